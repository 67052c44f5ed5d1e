"""Replicas in processes of their own that are killed, hang, or are behind bad lines: nothing lost, doubled or changed.

One proof for each kind of end; `test_requests` and `test_random_lives` have the others in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.running import (
    MIXED,
    SECRET,
    ReplicaProcess,
    Running,
    answer_mixed,
    asked,
    check,
    joined,
    outputs_of,
    real,
    run,
    running,
)
from tests.cluster.serving import serving
from tests.processes import PATIENCE_S
from tests.server.running import png
from tests.server.scripted import write_adapter
from vlora.client import Client, FrameResult
from vlora.cluster.connection import connect
from vlora.cluster.journal_file import JournalFile
from vlora.routing import RecordedRouter, replay_file
from vlora.wire.address import Address

pytestmark = pytest.mark.slow


def rows(first: str, *others: str) -> list[object]:
    """Values of a parameter: all but the first in the tier of all tests."""
    return [first, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in others)]


@pytest.mark.parametrize("victim", rows("engine", "replica", "both"))
def test_a_killed_replica_loses_nothing_and_its_run_replays(victim: str, tmp_path: Path) -> None:
    path = tmp_path / "routing.jsonl"
    journal = JournalFile(str(path))

    async def main() -> None:
        router = RecordedRouter(journal.write, rule="placed", over=1.0).as_router
        async with running("a", "b", router=router) as here:
            requests = [*MIXED, *(asked(f"x{number}", 40) for number in range(20))]
            answers = [asyncio.create_task(outputs_of(here.cluster, request)) for request in requests]
            await asyncio.sleep(0.1)
            assert await here.cluster.drain("a", 5.0)
            here.cluster.resume("a")
            here.replicas["b"].signal(signal.SIGKILL, engine=victim != "replica", actor=victim != "engine")
            for request, outputs in zip(requests, await asyncio.gather(*answers), strict=True):
                check(request, outputs)
            status = here.cluster.status()
            assert status.num_moves and status.num_deaths == 1 and status.num_resubmitted
            assert [name for name, member in here.cluster.members.items() if member.client] == ["a"]
            check(asked("after"), await outputs_of(here.cluster, asked("after")))
            assert here.is_idle

    run(main())
    journal.close()
    found = replay_file(str(path))
    assert found.difference is None and found.num_calls > 100 and path.stat().st_mode & 0o777 == 0o600
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + b'["submit",[["cut o')  # killed while it wrote
    assert replay_file(str(path)) == found
    place, line = next((place, line) for place, line in enumerate(lines) if b'"submit"' in line and b'"a"]]]' in line)
    lines[place] = line.replace(b'"a"]]]', b'"b"]]]')
    path.write_bytes(b"".join(lines))
    changed = replay_file(str(path))
    assert changed.difference is not None and (changed.num_calls, changed.difference[0]) == (place - 1, "submit")


@pytest.mark.parametrize("what", rows("engine", "both"))
@real
async def test_a_hung_replica_is_given_up_and_heard_no_more_when_it_wakes(what: str) -> None:
    async with running("a", "b") as here:
        hung: list[ReplicaProcess] = []

        def hang() -> None:
            hung.append(here.replicas[here.where("r0")])
            hung[0].signal(signal.SIGSTOP, actor=what == "both")

        assert set(await answer_mixed(here.cluster, hang)) == {0, 1}
        waking = [asked(f"w{number}", 150) for number in range(6)]
        tasks = [asyncio.create_task(outputs_of(here.cluster, each)) for each in waking]
        await asyncio.sleep(0.1)
        hung[0].signal(signal.SIGCONT)
        for request, outputs in zip(waking, await asyncio.gather(*tasks), strict=True):
            check(request, outputs)
        await asyncio.gather(*(member.wait_joined() for member in here.cluster.members.values()))
        # The replica has cancelled what the former line had asked for.
        async with asyncio.timeout(PATIENCE_S):
            while (await here.cluster.stats()).num_running:
                await asyncio.sleep(0.05)


# -- lines ------------------------------------------------------------------------------------------------------------


class SlowLink:
    """Passes bytes on between a front end and a replica.

    Attributes:
        is_open: If not set, nothing is passed on, and both connections stay open.
    """

    def __init__(self, target: Address) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self._target = target
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
        there = await asyncio.open_connection(*self._target[:2])
        for source, target in ((reader, there[1]), (there[0], writer)):
            pump = asyncio.create_task(self._pass_on(source, target))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1000):
                # 10 ms a way; in one of 50 cases a retransmission.
                await asyncio.sleep(self._draws.gauss(0.01, 0.002) + 0.2 * (self._draws.random() < 0.02))
                await self.is_open.wait()
                target.write(data)
        await self.is_open.wait()
        target.close()


@real
async def test_a_slow_line_and_a_cut_one_lose_nothing() -> None:
    """Neither end is notified of the cut."""
    async with running(over=8.0) as here:
        links: dict[str, SlowLink] = {}
        for name in ("a", "b"):
            here.replicas[name] = await ReplicaProcess.start()
            links[name] = SlowLink(here.replicas[name].address)
            await joined(here.cluster, name, await links[name].listen())
        requests = [asked(f"r{number}", 250) for number in range(12)]
        answers = [asyncio.create_task(outputs_of(here.cluster, request)) for request in requests]
        for name in ("a", "b"):
            await asyncio.sleep(0.1)
            assert await here.cluster.drain(name, 5.0)
            here.cluster.resume(name)
        links["a"].is_open.clear()
        async with asyncio.timeout(PATIENCE_S):  # the cut is noticed, and the requests continue on the other replica
            while here.cluster.members["a"].client is not None:
                await asyncio.sleep(0.01)
        links["a"].is_open.set()
        timings = [check(request, await answer).timings for request, answer in zip(requests, answers, strict=True)]
        assert sum(each.num_moves for each in timings if each is not None) >= 12
        await asyncio.wait_for(here.cluster.members["a"].wait_joined(), PATIENCE_S)
        check(asked("after"), await outputs_of(here.cluster, asked("after")))
        for link in links.values():
            link.close()


# -- a client's frame stream ------------------------------------------------------------------------------------------

NUM_FRAMES = 60
HUNG_AT = 20  # one replica stops at this frame, with frames that it has accepted


def is_bright(number: int) -> bool:
    return number % 3 == 0


def frames_of(port: int, hang: threading.Event) -> list[FrameResult]:
    """Send all frames; `hang` is set in the middle of them. Returns the results as they come."""
    results: list[FrameResult] = []
    with (
        Client(port=port) as client,
        client.open_stream(adapter="cam", head="night", drop="none") as stream,
    ):
        receiving = threading.Thread(target=lambda: results.extend(stream))
        receiving.start()
        for number in range(NUM_FRAMES):
            if number == HUNG_AT:
                hang.set()
            assert stream.send(png(230 if is_bright(number) else 20)) == number
            time.sleep(0.002)
        stream.end()
        receiving.join(PATIENCE_S)
    return results


async def kill_under_frames(found: Running, hang: threading.Event) -> int:
    """Stop a replica, wait until it has frames, and kill it. Returns the number of its frames."""
    await asyncio.to_thread(hang.wait)
    found.replicas["a"].signal(signal.SIGSTOP)
    while not (frames := len(found.router.replicas["a"].holds)):
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    found.replicas["a"].signal(signal.SIGKILL)
    return frames


@real
async def test_a_frame_stream_loses_no_frame_when_a_replica_is_killed(tmp_path: Path) -> None:
    async with serving("a", "b") as (found, front_end, port):
        await front_end.adapters.load("cam", write_adapter(tmp_path / "cam", {"night": 1}))
        hang = threading.Event()
        killing = asyncio.create_task(kill_under_frames(found, hang))
        results = await asyncio.to_thread(frames_of, port, hang)
        assert await killing and found.cluster.status().num_resubmitted
        assert [result.number for result in results] == list(range(NUM_FRAMES))
        labels = [result.answer.label if result.answer is not None else result.error for result in results]
        assert labels == ["bright" if is_bright(number) else "dark" for number in range(NUM_FRAMES)]
        assert found.is_idle


# -- the end of a replica's process ------------------------------------------------------------------------------------

ALONE_S = 1.5


@real
async def test_a_replica_ends_after_a_time_without_a_front_end() -> None:
    replica = await ReplicaProcess.start(alone_s=ALONE_S)
    client = await connect(replica.address, SECRET, tls=False, beat_s=0.1, key="k")

    async def ping() -> None:
        while True:
            client.ping()
            await asyncio.sleep(0.1)

    pinging = asyncio.create_task(ping())  # it keeps the connection
    await asyncio.sleep(1.5 * ALONE_S)
    pinging.cancel()
    assert replica.process.returncode is None and client.cause is None
    began_s = time.monotonic()
    await client.disconnect("the front end ends")
    assert await replica.wait_ended() == 0
    assert time.monotonic() - began_s >= ALONE_S * 0.9
