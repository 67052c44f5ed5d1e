"""A replica between two front ends, and with one that sends messages slowly."""

from __future__ import annotations

import asyncio
import os
import struct
from typing import Any, cast

import pytest

from tests.cluster.running import SECRET, SLEEPING, run
from tests.cluster.sleeping_engine import COMMAND
from vlora.cluster.door import Address, Door, Inbox, connect, open_line, watch_beats
from vlora.cluster.handshake import Hello
from vlora.cluster.replica import MISSED_BEATS, Replica
from vlora.engine.ipc import messages
from vlora.engine.ipc.transport import ClientTransport
from vlora.types import Request, RequestOutput, SamplingParams

LOOPBACK = Address("127.0.0.1", 0)
HEAD = struct.Struct("<Q")
BEAT_S = 0.02

pytestmark = pytest.mark.slow


# -- messages that arrive slowly --------------------------------------------------------------------------------------


async def trickle(transport: ClientTransport, data: bytes, duration_s: float) -> None:
    """Send a message in pieces over a time."""
    descriptor, stream = transport.extra("socket").fileno(), HEAD.pack(len(data)) + data
    size = 1 + int(len(stream) * BEAT_S / duration_s)
    for begin in range(0, len(stream), size):
        os.write(descriptor, stream[begin : begin + size])
        await asyncio.sleep(BEAT_S)


def test_a_front_end_is_alive_while_a_message_arrives() -> None:
    async def main() -> None:
        replica = await Replica.start(SLEEPING, SECRET, LOOPBACK, command=COMMAND)
        line = await open_line(Address("127.0.0.1", replica.port), SECRET, tls=False, beat_s=BEAT_S)
        request = Request(request_id="r", prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=1, seed=0))
        await trickle(line.transport, messages.encode(messages.Add(request)), 3 * MISSED_BEATS * BEAT_S)
        assert not line.transport.closed.done()
        # Meanwhile the replica has pinged the engine in the front end's place.
        found = [messages.decode_from_engine(await line.inbox.get())]
        while not isinstance(found[-1], messages.Outputs):
            found.append(messages.decode_from_engine(await line.inbox.get()))
        assert len(found) > MISSED_BEATS and all(isinstance(each, messages.Pong) for each in found[:-1])
        assert found[-1].outputs[0].request_id == "r"
        await asyncio.wait_for(asyncio.wait({line.transport.closed}), 3)  # 20 beats without a byte
        await replica.close()

    run(main())


def test_a_replica_is_alive_while_a_message_arrives() -> None:
    async def main() -> None:
        transports: list[ClientTransport] = []
        ready = messages.encode(messages.Ready("", 1, 1))

        def greet(transport: ClientTransport, *_: Any) -> None:
            transports.append(transport)
            transport.send(ready)

        door = await Door.open(LOOPBACK, SECRET, greet)
        client = await connect(Address("127.0.0.1", door.port), SECRET, tls=False, beat_s=1)
        long = RequestOutput(request_id="unknown", token_ids=tuple(range(500)))
        watching = asyncio.create_task(watch_beats(client, 5 * BEAT_S, 4, 60.0))
        await trickle(transports[0], messages.encode(messages.Outputs((long,))), 1.2)
        assert not watching.done()
        assert await asyncio.wait_for(watching, 3) == "it gave no sign of life for 0.4 s"
        await client.disconnect("")
        door.close()

    run(main())


# -- two front ends ---------------------------------------------------------------------------------------------------


class Wire:
    """In place of a transport: keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.num_bytes_received = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_message: Any = None

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        pass


class Between:
    """A replica without an engine."""

    def __init__(self) -> None:
        self.engine = Wire()
        process = cast(asyncio.subprocess.Process, None)
        self.replica = Replica(process, cast(ClientTransport, self.engine), messages.Ready("", 1, 1))

    def front_end(self) -> Wire:
        """A new one that replaces the one before."""
        wire = Wire()
        self.replica._admit(cast(ClientTransport, wire), Inbox(), Hello(1, "", bytes(32), 60.0), "")  # noqa: SLF001
        return wire

    def add(self, front_end: Wire, *names: str) -> None:
        for name in names:
            front_end.on_message(messages.encode(messages.Add(Request(request_id=name, prompt_ids=(1,)))))

    def answer(self, *outputs: RequestOutput) -> None:
        self.engine.on_message(messages.encode(messages.Outputs(outputs)))

    @property
    def cancelled(self) -> list[str]:
        """Ids of the cancellations that were sent to the engine."""
        found = [messages.decode_to_engine(data) for data in self.engine.sent]
        return sorted(each.request_id for each in found if isinstance(each, messages.Cancel))


def tokens(name: str, token: int) -> RequestOutput:
    return RequestOutput(request_id=name, token_ids=(token,))


def end(name: str) -> RequestOutput:
    return RequestOutput(request_id=name, finish_reason="cancelled")


def outputs_at(front_end: Wire) -> list[RequestOutput]:
    found = [messages.decode_from_engine(data) for data in front_end.sent]
    return [output for each in found if isinstance(each, messages.Outputs) for output in each.outputs]


def test_a_front_end_gets_no_output_of_the_one_before() -> None:
    async def main() -> None:
        here = Between()
        first = here.front_end()
        here.add(first, "same", "other", "ended")
        here.answer(tokens("same", 1), end("ended"))
        second = here.front_end()
        assert here.cancelled == ["other", "same"]
        here.add(second, "same", "ended")
        # The step of the former requests ends, then the engine reads the cancellations.
        here.answer(tokens("same", 666), tokens("other", 666))
        here.answer(end("other"), tokens("ended", 2))
        here.answer(end("same"))
        here.answer(tokens("same", 3))
        here.answer(end("same"))
        assert outputs_at(first) == [tokens("same", 1), end("ended")]
        assert outputs_at(second) == [tokens("ended", 2), tokens("same", 3), end("same")]
        third = here.front_end()
        assert here.cancelled == ["ended", "other", "same"]  # of the second, only what had not ended
        here.answer(end("ended"))
        assert outputs_at(third) == []

    run(main())


def test_outputs_that_come_while_there_is_no_front_end() -> None:
    async def main() -> None:
        here = Between()
        first = here.front_end()
        here.add(first, "r")
        first.closed.set_result(None)
        await asyncio.sleep(0.01)
        assert here.cancelled == ["r"]
        here.answer(tokens("r", 666), end("r"))
        second = here.front_end()
        here.add(second, "r")
        here.answer(tokens("r", 1))
        assert outputs_at(second) == [tokens("r", 1)]

    run(main())


def test_an_id_that_was_used_twice_ends_twice() -> None:
    """The front end cancelled its first request of that id, and asked again before the cancellation arrived."""

    async def main() -> None:
        here = Between()
        first = here.front_end()
        here.add(first, "r", "r")
        here.answer(end("r"))
        second = here.front_end()
        assert here.cancelled == ["r"]
        here.add(second, "r")
        here.answer(tokens("r", 666), end("r"), tokens("r", 1))
        assert outputs_at(second) == [tokens("r", 1)]

    run(main())
