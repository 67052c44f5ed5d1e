"""The socket to an engine process: whole messages in order, of any size; ends and errors are reported."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlora.engine.ipc.transport import EngineLine, Line

_LARGE = 3_000_001  # more than the kernel buffers for one end


def run(main: Callable[[Line, EngineLine, asyncio.Queue[bytes]], Awaitable[None]]) -> None:
    """Run with both ends of a line, and a queue of what the front end receives."""

    async def with_ends() -> None:
        here, there = socket.socketpair()
        heard: asyncio.Queue[bytes] = asyncio.Queue()
        line = await Line.open(here, heard.put_nowait)
        with there:
            await asyncio.wait_for(main(line, EngineLine(there), heard), 30)
            line.close()
            line.close()

    asyncio.run(with_ends())


def test_messages_cross_in_order_both_ways_at_once() -> None:
    """Large messages both ways, too: an end that is blocked in sending must still receive."""
    count = 200

    def message(number: int) -> bytes:
        return b"%d " % number + b"." * (_LARGE if number % 50 == 7 else 0)

    async def main(line: Line, engine: EngineLine, heard: asyncio.Queue[bytes]) -> None:
        received: list[bytes] = []

        def other() -> None:
            """Answers each message and sends another one after it: twice as much data returns."""
            for number in range(count):
                received.append(bytes(engine.receive(block=True) or b""))
                engine.send(message(2 * number))
                engine.send(message(2 * number + 1))

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        for number in range(count):
            line.send(message(number))
        assert [await heard.get() for _ in range(2 * count)] == [message(number) for number in range(2 * count)]
        thread.join()
        assert received == [message(number) for number in range(count)]
        assert engine.receive(block=False) is None
        threading.Timer(0.05, engine.wake).start()
        assert engine.receive(block=True) is None

    run(main)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(1, 30), min_size=1))
def test_how_a_stream_is_cut_makes_no_difference(messages: list[bytes], cuts: list[int]) -> None:
    async def main() -> None:
        heard: list[bytes] = []
        line = Line(heard.append)
        stream = b"".join(struct.pack("<Q", len(message)) + message for message in messages)
        for number in range(len(stream)):
            size = cuts[number % len(cuts)]
            line.data_received(stream[:size])
            stream = stream[size:]
        assert heard == messages

    asyncio.run(main())


def test_a_read_that_a_signal_cuts_short_goes_on() -> None:
    """As when the process is suspended while it receives an image."""
    stream = bytearray(b"".join(struct.pack("<Q", len(word)) + word for word in (b"first word", b"second")))

    readable, other = socket.socketpair()
    other.send(b".")

    class Interrupted:
        def recv_into(self, buffer: memoryview, size: int, flags: int) -> int:
            count = min(3, len(buffer), len(stream))
            buffer[:count] = stream[:count]
            del stream[:count]
            return count

        def fileno(self) -> int:
            return readable.fileno()

    with readable, other:
        engine = EngineLine(Interrupted())  # type: ignore[arg-type]
        assert engine.receive(block=True) == b"first word" and engine.receive(block=True) == b"second"
        with pytest.raises(EOFError):
            engine.receive(block=True)


def test_a_mistake_of_who_hears_ends_the_reading_and_is_told() -> None:
    async def main(line: Line, engine: EngineLine, heard: asyncio.Queue[bytes]) -> None:
        line.hear = int
        for word in (b"1", b"two", b"three"):
            engine.send(word)
        with pytest.raises(ValueError, match="two"):
            await line.closed
        with pytest.raises(EOFError):
            await asyncio.to_thread(engine.receive, block=True)

    run(main)


def test_what_was_said_before_an_end_is_heard_before_it() -> None:
    async def engine_ends(line: Line, engine: EngineLine, heard: asyncio.Queue[bytes]) -> None:
        engine.send(b"last words")
        engine._socket.shutdown(socket.SHUT_RDWR)  # as when its process ends
        await line.closed
        assert heard.get_nowait() == b"last words"
        line.send(b"nobody hears this")

    async def front_end_ends(line: Line, engine: EngineLine, heard: asyncio.Queue[bytes]) -> None:
        line.send(b"last words")
        line.close()
        assert await asyncio.to_thread(engine.receive, block=True) == b"last words"
        with pytest.raises(EOFError):
            await asyncio.to_thread(engine.receive, block=True)
        engine.send(b"nobody hears this")

    run(engine_ends)
    run(front_end_ends)


def test_a_front_end_that_is_gone_with_words_unread_hears_no_more() -> None:
    """The kernel reports a reset connection, not an end of file."""
    for _ in range(20):
        here, there = socket.socketpair()
        with there:
            engine = EngineLine(there)
            engine.send(b"unread")
            here.close()
            engine.send(b"nobody hears this")
            with pytest.raises(EOFError):
                engine.receive(block=True)


def test_an_engine_far_ahead_waits_for_its_reader() -> None:
    """No message is dropped, and memory does not grow."""

    async def main(line: Line, engine: EngineLine, heard: asyncio.Queue[bytes]) -> None:
        count, sent = 20_000, [0]

        def other() -> None:
            for number in range(count):
                engine.send(b"%d" % number)
                sent[0] += 1

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(0.5)  # the loop is blocked
        assert 0 < sent[0] < count
        assert [int(await heard.get()) for _ in range(count)] == list(range(count))

    run(main)


def test_a_token_that_is_read_wakes_nobody_in_the_engine() -> None:
    """Otherwise the thread that waits for requests runs after each token, often on the core that computes the next
    one.
    """
    here, there = socket.socketpair()
    others = set(threading.enumerate())
    with here, there:
        engine = EngineLine(there)
        (reader,) = set(threading.enumerate()) - others
        before = _times_asleep(reader)
        for _ in range(200):
            engine.send(b"token")
            here.recv(64)
            time.sleep(0.001)  # time for it to wake up and block again
        assert _times_asleep(reader) - before < 20  # 200 for a thread blocked in recv


def _times_asleep(thread: threading.Thread) -> int:
    """Number of times that a thread has blocked so far."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
