"""The writes of one loop iteration become one write, in order, before the connection is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from vlora.server.joined_writes import JoinedWrites


class Recorded(asyncio.Transport):
    def __init__(self) -> None:
        self.did: list[Any] = []

    def write(self, data: Any) -> None:
        self.did.append(data)

    def close(self) -> None:
        self.did.append("closed")

    def abort(self) -> None:
        self.did.append("aborted")


def did(*turns: Callable[[JoinedWrites], None]) -> list[Any]:
    """The calls to the wrapped transport after the given number of loop iterations."""

    async def run() -> list[Any]:
        beneath = Recorded()
        joined = JoinedWrites(beneath)
        for turn in turns:
            turn(joined)
            await asyncio.sleep(0)
        return beneath.did

    return asyncio.run(run())


def header_and_body(joined: JoinedWrites) -> None:
    joined.write(b"header")
    joined.write(bytearray(b" body"))


def test_a_turn_is_one_write() -> None:
    assert did(header_and_body, header_and_body) == [b"header body", b"header body"]


def test_what_was_written_leaves_before_the_end_and_not_after_it() -> None:
    def last(joined: JoinedWrites) -> None:
        header_and_body(joined)
        joined.close()

    def cut(joined: JoinedWrites) -> None:
        header_and_body(joined)
        joined.abort()

    assert did(last, lambda joined: None) == [b"header body", "closed"]
    assert did(cut, lambda joined: None) == ["aborted"]


def test_much_does_not_wait_for_the_turn_to_end() -> None:
    """Otherwise a slow reader would be noticed too late."""
    seen: list[int] = []

    def much(joined: JoinedWrites) -> None:
        beneath: Any = joined._transport
        for _ in range(10):
            joined.write(b"x" * 30_000)
            seen.append(len(b"".join(beneath.did)))

    assert len(b"".join(did(much))) == 300_000
    assert all(30_000 * (place + 1) - sent <= 65_536 for place, sent in enumerate(seen))
