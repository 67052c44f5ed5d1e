"""The writes of one loop iteration become one write, in order, before the connection is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from vlora.server.http.protocol import JoinedWrites


class RecordingTransport(asyncio.Transport):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def write(self, data: Any) -> None:
        self.calls.append(data)

    def close(self) -> None:
        self.calls.append("closed")

    def abort(self) -> None:
        self.calls.append("aborted")


def calls_after(*turns: Callable[[JoinedWrites], None]) -> list[Any]:
    """The calls to the wrapped transport after the given number of loop iterations."""

    async def run() -> list[Any]:
        transport = RecordingTransport()
        joined = JoinedWrites(transport)
        for turn in turns:
            turn(joined)
            await asyncio.sleep(0)
        return transport.calls

    return asyncio.run(run())


def header_and_body(joined: JoinedWrites) -> None:
    joined.write(b"header")
    joined.write(bytearray(b" body"))


def test_the_writes_of_a_loop_iteration_are_joined() -> None:
    assert calls_after(header_and_body, header_and_body) == [b"header body", b"header body"]


def test_close_flushes_and_abort_discards() -> None:
    def last(joined: JoinedWrites) -> None:
        header_and_body(joined)
        joined.close()

    def cut(joined: JoinedWrites) -> None:
        header_and_body(joined)
        joined.abort()

    assert calls_after(last, lambda joined: None) == [b"header body", "closed"]
    assert calls_after(cut, lambda joined: None) == ["aborted"]


def test_large_data_is_written_immediately() -> None:
    """Otherwise a slow reader would be noticed too late."""

    async def run() -> None:
        transport = RecordingTransport()
        joined = JoinedWrites(transport)
        for count in range(1, 11):
            joined.write(b"x" * 30_000)
            assert 30_000 * count - len(b"".join(transport.calls)) <= 65_536
        await asyncio.sleep(0)
        assert len(b"".join(transport.calls)) == 300_000

    asyncio.run(run())
