"""A replica and its front end while a message arrives slowly."""

from __future__ import annotations

import asyncio
import os
import struct
from typing import Any

import pytest

from tests.cluster.running import SECRET, SLEEPING, run
from tests.cluster.sleeping_engine import COMMAND
from vlora.cluster.door import Address, Door, connect, open_line, watch_beats
from vlora.cluster.replica import MISSED_BEATS, Replica
from vlora.engine.ipc import messages
from vlora.engine.ipc.transport import ClientTransport
from vlora.types import Request, RequestOutput, SamplingParams

LOOPBACK = Address("127.0.0.1", 0)
HEAD = struct.Struct("<Q")
BEAT_S = 0.02

pytestmark = pytest.mark.slow


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
