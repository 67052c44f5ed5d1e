"""A line with delay, stalls as after lost packets, and cuts that neither end is notified of; and a narrow line."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.running import ReplicaProcess, outputs_of, run, running
from tests.cluster.test_cluster import asked, check
from tests.cluster.test_doors import written
from vlora.cluster.door import Address
from vlora.cluster.members import Health
from vlora.types import TensorValue, VisionInput

pytestmark = pytest.mark.slow


class SlowLink:
    """Passes bytes on between a front end and a replica.

    Attributes:
        is_open: If not set, nothing is passed on, and both connections stay open.
    """

    def __init__(self, target: Address, bytes_per_s: float | None = None) -> None:
        """bytes_per_s: the line's rate, without delay; None for one with delay."""
        self.is_open = asyncio.Event()
        self.is_open.set()
        self._target = target
        self._bytes_per_s = bytes_per_s
        self._draws = random.Random(0)
        self._pumps: set[asyncio.Task[None]] = set()

    async def listen(self) -> Address:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return Address("127.0.0.1", self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(*self._target)
        for source, target in ((reader, there[1]), (there[0], writer)):
            pump = asyncio.create_task(self._pass_on(source, target))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1000 if self._bytes_per_s is None else 1 << 16):
                await asyncio.sleep(self._pause_s(len(data)))
                await self.is_open.wait()
                target.write(data)
        await self.is_open.wait()
        target.close()

    def _pause_s(self, num_bytes: int) -> float:
        if self._bytes_per_s is not None:
            return num_bytes / self._bytes_per_s
        # 10 ms a way; in one of 50 cases a retransmission.
        return self._draws.gauss(0.01, 0.002) + 0.2 * (self._draws.random() < 0.02)


def test_a_slow_line_and_a_cut_one_lose_nothing() -> None:
    async def main() -> None:
        async with running(health=Health(beat_s=0.2, missed=4), over=8.0) as here:
            links: dict[str, SlowLink] = {}
            for name in ("a", "b"):
                here.replicas[name] = await ReplicaProcess.start()
                links[name] = SlowLink(here.replicas[name].address)
                await here.cluster.add(name, await links[name].listen())
            requests = [asked(f"r{number}", 250) for number in range(12)]
            answers = [asyncio.create_task(outputs_of(here.cluster, request)) for request in requests]
            for name in ("a", "b"):
                await asyncio.sleep(0.1)
                assert await here.cluster.drain(name, 5.0)
                here.cluster.resume(name)
            links["a"].is_open.clear()
            # The cut is noticed, and the requests continue on the other replica.
            await asyncio.sleep(1.2)
            assert here.cluster.members["a"].client is None
            links["a"].is_open.set()
            timings = [check(request, await answer).timings for request, answer in zip(requests, answers, strict=True)]
            assert sum(each.num_moves for each in timings if each is not None) >= 12
            await asyncio.wait_for(here.cluster.members["a"].wait_joined(), 10)
            check(asked("after"), await outputs_of(here.cluster, asked("after")))
            for link in links.values():
                link.close()

    run(main())


NARROW = 2e6  # bytes per second


def image_of(num_bytes: int) -> VisionInput:
    fields = {"pixels": TensorValue("uint8", (num_bytes,), bytes(num_bytes))}
    return VisionInput(kind="image", content_hash="x", num_tokens=1, fields=fields)


@pytest.mark.parametrize("tls", [False, True])
def test_a_large_image_on_a_narrow_line_is_no_death(tls: bool, tmp_path: Path) -> None:
    """Pings wait behind it for longer than a dead replica is given."""
    certificate = written(tmp_path)._asdict() if tls else {}

    async def main() -> None:
        health = Health(beat_s=0.1, missed=4)
        async with running(health=health) as here:
            replica = here.replicas["a"] = await ReplicaProcess.start(**certificate)
            link = SlowLink(replica.address, NARROW)
            await here.cluster.add("a", await link.listen(), tls=tls)
            began_s = time.monotonic()
            request = asked("r", 5, vision=(image_of(3_000_000),))
            timings = check(request, await outputs_of(here.cluster, request)).timings
            assert timings is not None and timings.num_deaths == 0
            assert time.monotonic() - began_s > 3 * health.beat_s * health.missed
            link.close()

    run(main())


@pytest.mark.parametrize("what", ["line", "engine"])
def test_a_death_during_a_large_image_is_noticed_in_time(what: str) -> None:
    """The line is cut; or the engine alone hangs, and its replica still takes the image."""

    async def main() -> None:
        async with running(health=Health(beat_s=0.1, missed=4)) as here:
            replica = here.replicas["a"] = await ReplicaProcess.start()
            link = SlowLink(replica.address, NARROW)
            await here.cluster.add("a", await link.listen())
            answer = asyncio.create_task(outputs_of(here.cluster, asked("r", vision=(image_of(6_000_000),))))
            await asyncio.sleep(0.6)
            assert here.cluster.members["a"].client is not None
            if what == "line":
                link.is_open.clear()
            else:
                replica.signal(signal.SIGSTOP, actor=False)
            began_s = time.monotonic()
            while here.cluster.members["a"].client is not None:
                await asyncio.sleep(0.01)
            assert time.monotonic() - began_s < 2.2  # the image takes 2.4 s more
            answer.cancel()
            await asyncio.wait({answer})
            link.close()

    run(main())
