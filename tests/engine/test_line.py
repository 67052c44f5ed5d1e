"""The socket to an engine process: nothing is lost before, while or after the other end connects; mistakes are told."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path

import pytest
import zmq

from vlora.engine.line import Line


def test_messages_cross_in_order_both_ways_at_once(tmp_path: Path) -> None:
    """Both ends send at the same time: sending must not swallow the signal that something came."""
    count, address = 500, f"ipc://{tmp_path}/line"

    def other() -> None:
        """Answers each message, and says something of its own after each: twice as much comes back."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(address)
            for number in range(count):
                assert socket.recv() == b"%d" % number
                socket.send(b"%d" % (2 * number))
                socket.send(b"%d" % (2 * number + 1))

    async def main() -> None:
        heard: list[int] = []
        done = asyncio.Event()

        def hear(data: bytes) -> None:
            heard.append(int(data))
            if len(heard) == 2 * count:
                done.set()

        line = Line(address, hear)
        line.send(b"0")  # nobody is there yet
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        for number in range(1, count):
            line.send(b"%d" % number)
            if number % 7 == 0:
                await asyncio.sleep(0)
        await asyncio.wait_for(done.wait(), 30)
        assert heard == list(range(2 * count))
        thread.join()
        line.close()
        line.close()

    asyncio.run(main())


def test_a_mistake_of_who_hears_ends_the_reading_and_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        line = Line(f"ipc://{tmp_path}/line", lambda data: int(data))
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(f"ipc://{tmp_path}/line")
            for word in (b"1", b"two", b"three"):
                socket.send(word)
            with pytest.raises(ValueError, match="two"):
                await asyncio.wait_for(line.broken, 30)
            line.close()

    asyncio.run(main())


def test_whenever_the_other_end_connects_what_waited_is_sent(tmp_path: Path) -> None:
    """The signal that somebody is there now can be taken by a look for messages."""
    moments = random.Random(0)

    async def once(address: str) -> None:
        heard: asyncio.Queue[bytes] = asyncio.Queue()
        line = Line(address, heard.put_nowait)
        line.send(b"waits")

        def other(delay_s: float) -> None:
            time.sleep(delay_s)
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.linger = 0
                socket.connect(address)
                socket.send(b"here")
                if socket.poll(10_000):
                    socket.send(socket.recv())
                    answered.wait(10)

        answered = threading.Event()
        thread = threading.Thread(target=other, args=(moments.random() * 0.003,), daemon=True)
        thread.start()
        assert await asyncio.wait_for(heard.get(), 20) == b"here"
        assert await asyncio.wait_for(heard.get(), 20) == b"waits"
        answered.set()
        thread.join()
        line.close()

    for number in range(60):
        asyncio.run(once(f"ipc://{tmp_path}/{number}"))
