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

from vlora.engine.ipc.messages import EngineTransport
from vlora.wire.framing import MessageTransport

_LARGE = 3_000_001  # more than the kernel buffers for one end


def run(main: Callable[[MessageTransport, EngineTransport, asyncio.Queue[bytes]], Awaitable[None]]) -> None:
    """Run with both ends of a connection, and a queue of what the front end receives."""

    async def with_ends() -> None:
        here, there = socket.socketpair()
        inbox: asyncio.Queue[bytes] = asyncio.Queue()
        client = await MessageTransport.open(here, inbox.put_nowait)
        with there:
            await asyncio.wait_for(main(client, EngineTransport(there), inbox), 30)
            client.close()
            client.close()

    asyncio.run(with_ends())


def test_messages_cross_in_order_both_ways_at_once() -> None:
    """Large messages both ways, too: an end that is blocked in sending must still receive."""
    count = 200

    def message(number: int) -> bytes:
        return b"%d " % number + b"." * (_LARGE if number % 50 == 7 else 0)

    async def main(client: MessageTransport, engine: EngineTransport, inbox: asyncio.Queue[bytes]) -> None:
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
            client.send(message(number))
        assert [await inbox.get() for _ in range(2 * count)] == [message(number) for number in range(2 * count)]
        thread.join()
        assert received == [message(number) for number in range(count)]
        assert engine.receive(block=False) is None
        threading.Timer(0.05, engine.wake).start()
        assert engine.receive(block=True) is None

    run(main)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(1, 30), min_size=1))
def test_messages_are_independent_of_how_the_stream_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    async def main() -> None:
        inbox: list[bytes] = []
        client = MessageTransport(inbox.append)
        stream = b"".join(struct.pack("<Q", len(message)) + message for message in messages)
        length = len(stream)
        for number in range(len(stream)):
            size = cuts[number % len(cuts)]
            client.data_received(stream[:size])
            stream = stream[size:]
            assert client.num_bytes_received == length - len(stream)
        assert inbox == messages

    asyncio.run(main())


def test_a_read_interrupted_by_a_signal_continues() -> None:
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
        engine = EngineTransport(Interrupted())  # type: ignore[arg-type]
        assert engine.receive(block=True) == b"first word" and engine.receive(block=True) == b"second"
        with pytest.raises(EOFError):
            engine.receive(block=True)


def test_an_error_of_the_message_callback_closes_the_transport() -> None:
    async def main(client: MessageTransport, engine: EngineTransport, inbox: asyncio.Queue[bytes]) -> None:
        client.on_message = int
        for word in (b"1", b"two", b"three"):
            engine.send(word)
        with pytest.raises(ValueError, match="two"):
            await client.closed
        with pytest.raises(EOFError):
            await asyncio.to_thread(engine.receive, block=True)

    run(main)


def test_messages_sent_before_the_end_are_received() -> None:
    async def engine_ends() -> None:
        here, there = socket.socketpair()
        inbox: asyncio.Queue[bytes] = asyncio.Queue()
        client = await MessageTransport.open(here, inbox.put_nowait)
        with there:
            EngineTransport(there).send(b"last message")
            there.shutdown(socket.SHUT_RDWR)  # as when its process ends
            await client.closed
        assert inbox.get_nowait() == b"last message"
        client.send(b"dropped")
        client.close()

    async def front_end_ends(client: MessageTransport, engine: EngineTransport, inbox: asyncio.Queue[bytes]) -> None:
        client.send(b"last message")
        client.close()
        assert await asyncio.to_thread(engine.receive, block=True) == b"last message"
        with pytest.raises(EOFError):
            await asyncio.to_thread(engine.receive, block=True)
        engine.send(b"dropped")

    asyncio.run(asyncio.wait_for(engine_ends(), 30))
    run(front_end_ends)


def test_a_closed_front_end_with_unread_messages_ends_the_reading() -> None:
    """The kernel reports a reset connection, not an end of file."""
    for _ in range(20):
        here, there = socket.socketpair()
        with there:
            engine = EngineTransport(there)
            engine.send(b"unread")
            here.close()
            engine.send(b"dropped")
            with pytest.raises(EOFError):
                engine.receive(block=True)


def test_a_full_socket_blocks_the_engine() -> None:
    """No message is dropped, and memory does not grow."""

    async def main(client: MessageTransport, engine: EngineTransport, inbox: asyncio.Queue[bytes]) -> None:
        count, sent = 20_000, [0]

        def other() -> None:
            for number in range(count):
                engine.send(b"%d" % number)
                sent[0] += 1

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(0.5)  # the loop is blocked
        assert 0 < sent[0] < count
        assert [int(await inbox.get()) for _ in range(count)] == list(range(count))

    run(main)


def test_a_token_that_is_read_wakes_no_engine_thread() -> None:
    """Otherwise the thread that waits for requests runs after each token, often on the core that computes the next
    one.
    """
    here, there = socket.socketpair()
    others = set(threading.enumerate())
    with here, there:
        engine = EngineTransport(there)
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


def test_transports_of_other_event_loops_are_accepted() -> None:
    """uvloop's are not of asyncio's class."""

    class Other:
        written = b""

        def write(self, data: bytes) -> None:
            self.written += data

    async def main() -> None:
        client, other = MessageTransport(lambda data: None), Other()
        client.connection_made(other)  # type: ignore[arg-type]
        client.send(b"word")
        assert other.written == struct.pack("<Q", 4) + b"word"

    asyncio.run(main())


def test_a_message_over_the_limit_closes_the_transport() -> None:
    async def main(client: MessageTransport, engine: EngineTransport, inbox: asyncio.Queue[bytes]) -> None:
        client.max_bytes = 100
        engine.send(b"x" * 100)
        assert await inbox.get() == b"x" * 100
        engine.send(b"x" * 101)
        await asyncio.wait({client.closed})
        assert str(client.closed.exception()) == "a message of 101 bytes, over the limit of 100"

    run(main)


def test_a_reply_is_sent_while_the_engine_is_busy() -> None:
    async def main(client: MessageTransport, engine: EngineTransport, inbox: asyncio.Queue[bytes]) -> None:
        engine.reply_at_once(b"ping", lambda: b"pong")
        client.send(b"ping")
        client.send(b"word")
        assert await inbox.get() == b"pong"  # nothing calls `receive`
        assert await asyncio.to_thread(engine.receive, block=True) == b"word"
        assert engine.receive(block=True, timeout_s=0.01) is None

    run(main)
