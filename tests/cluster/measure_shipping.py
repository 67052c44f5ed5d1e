"""How long tokens and new requests wait while an adapter's files are sent to a replica, and how long that takes.

    python -m tests.cluster.measure_shipping

A sleeping engine with steps of 4 ms answers 7 long requests, and a request of one token is sent every 20 ms, over a
line with TLS to a process of this machine: as fast as it goes, and limited to 125 MB/s. Phases with and without an
adapter of 100 MB that is sent take turns. The longest gap is that between two outputs of a request. The engine does not
read the adapter.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from tests.cluster.running import ReplicaProcess, Running, running
from tests.cluster.test_cluster import asked
from tests.cluster.test_doors import written
from tests.cluster.test_network import SlowLink
from tests.cluster.test_shipped_adapters import HERE, write
from vlora.cluster.adapter_sender import AdapterSender, ReplicaFiles, ShippingLimits
from vlora.cluster.adapter_state import DesiredAdapter

SIZE, TURNS, IDLE_S, PHASE_S = 100_000_000, 5, 1.0, 1.0
LIMITS = ShippingLimits(1 << 30, 2 << 30)


class Waits:
    """Waits of clients. gaps: between two outputs of a request. firsts: for the only token of a short request."""

    def __init__(self, here: Running) -> None:
        self.gaps: list[float] = []
        self.firsts: list[float] = []
        self._here = here
        self._turn = 0

    async def ask_for_long(self, place: int) -> None:
        while True:
            self._turn += 1
            last_s = None
            async for _ in self._here.cluster.generate(asked(f"long {place} {self._turn}", 1000)):
                now_s = time.monotonic()
                if last_s is not None:
                    self.gaps.append(now_s - last_s)
                last_s = now_s

    async def ask_often(self) -> None:
        while True:
            self._turn += 1
            began_s = time.monotonic()
            async for _ in self._here.cluster.generate(asked(f"short {self._turn}", 1)):
                self.firsts.append(time.monotonic() - began_s)
            await asyncio.sleep(0.02)

    def take(self) -> str:
        """Describe the waits since the last call, and forget them."""
        if not self.gaps or not self.firsts:
            return ""
        gaps, firsts = sorted(self.gaps), sorted(self.firsts)
        self.gaps, self.firsts = [], []
        shown = (gaps[-1], gaps[int(0.99 * len(gaps))], firsts[-1], statistics.median(firsts))
        gap, p99, first, median = (f"{1e3 * each:.1f}" for each in shown)
        return f"longest gap {gap}, p99 {p99}; first token: longest {first}, median {median} ms"


@asynccontextmanager
async def replica_behind(folder: Path, bytes_per_s: float | None) -> AsyncIterator[Running]:
    async with running(over=4.0) as here:
        (folder / "a").mkdir()
        replica = here.replicas["a"] = await ReplicaProcess.start(machine=folder / "a", **written(folder)._asdict())
        address, link = replica.address, None
        if bytes_per_s is not None:
            link = SlowLink(replica.address, bytes_per_s)
            address = await link.listen()
        await here.cluster.add("a", address, tls=True)
        yield here
        if link is not None:
            link.close()


async def measure(folder: Path, bytes_per_s: float | None) -> None:
    async with replica_behind(folder, bytes_per_s) as here:
        waits, client = Waits(here), here.cluster.members["a"].client
        assert client is not None
        files = ReplicaFiles(AdapterSender(LIMITS), client)
        tasks = [asyncio.create_task(waits.ask_for_long(place)) for place in range(7)]
        tasks.append(asyncio.create_task(waits.ask_often()))
        replica = psutil.Process(here.replicas["a"].process.pid)
        for turn in range(TURNS):
            waits.take()
            await asyncio.sleep(PHASE_S)
            print(f"  without: {waits.take()}")
            path = folder / "front" / f"large-{turn}"
            version = await asyncio.to_thread(write, path, seed=turn, size=SIZE)
            await asyncio.to_thread(os.sync)
            await asyncio.sleep(IDLE_S)
            waits.take()
            began_s, cpu_s = time.monotonic(), time.process_time()
            there_s = sum(replica.cpu_times()[:2])
            await files.send(DesiredAdapter(f"{HERE}/{path.name}", version))
            took_s = time.monotonic() - began_s
            cpu = f"CPU {time.process_time() - cpu_s:.2f} and {sum(replica.cpu_times()[:2]) - there_s:.2f} s"
            print(f"  with:    {waits.take()}; {took_s:.2f} s, {cpu}, load {os.getloadavg()[0]:.1f}")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def main() -> None:
    for rate in (None, 125e6):
        print("at full speed" if rate is None else f"at {rate / 1e6:g} MB/s")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "front").mkdir()
            os.chdir(folder / "front")
            await measure(folder, rate)


if __name__ == "__main__":
    asyncio.run(main())
