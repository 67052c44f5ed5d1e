"""Reports of an engine's load: what they amount to, and how many there are."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from pathlib import Path

import msgspec

from tests.server.scripted import ENGINE_COMMAND, write_adapter
from vlora.config import EngineConfig
from vlora.engine.ipc.client import EngineClient
from vlora.engine.ipc.messages import LoadReport, LoadReporter, WatchedLoad, decode_from_engine, encode
from vlora.engine.snapshot import EngineLoad
from vlora.types import Request, SamplingParams

IDLE = EngineLoad(free_blocks=10, total_blocks=10, num_running=0, num_waiting=0)


class Watched:
    """A reporter and its reader, with a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.load = IDLE
        self.sent: list[LoadReport] = []
        self.seen: list[EngineLoad] = []
        self.reporter = LoadReporter(lambda: self.load, self._send, lambda: self.now_s)
        self._reader = WatchedLoad(lambda load, _: self.seen.append(load))

    def _send(self, report: LoadReport) -> None:
        found = decode_from_engine(encode(report))
        assert isinstance(found, LoadReport)
        self.sent.append(found)
        self._reader.receive(found)


def test_random_changes_amount_to_the_engines_load() -> None:
    draws = random.Random(0)
    watched = Watched()
    watched.reporter.poll()
    assert not watched.sent  # not watched yet
    watched.reporter.watch(0.1)
    for _ in range(2_000):
        watched.now_s += draws.choice([0.001, 0.05])
        resident = dict(watched.load.resident)
        if draws.random() < 0.3:
            name = f"a{draws.randrange(20)}"
            if draws.random() < 0.5:
                resident.pop(name, None)
            else:
                resident[name] = f"v{draws.randrange(3)}"
        watched.load = msgspec.structs.replace(
            watched.load, resident=resident, free_blocks=draws.randrange(3), loading=tuple(sorted(resident))[:1]
        )
        num_sent = len(watched.sent)
        watched.reporter.poll()
        if len(watched.sent) > num_sent:
            assert watched.seen[-1] == watched.load
    assert len(watched.sent) <= watched.now_s / 0.1 + 1
    assert len(watched.sent) > 0.5 * watched.now_s / 0.1
    assert [report.is_complete for report in watched.sent].count(True) == 1
    # The adapters of most reports are a part of those on the device.
    assert sum(len(report.load.resident) for report in watched.sent) < 3 * len(watched.sent)


def test_a_new_reader_gets_everything_and_nothing_before() -> None:
    watched = Watched()
    watched.load = msgspec.structs.replace(IDLE, resident={"a": "1", "b": "1"})
    watched.reporter.watch(0.1)
    watched.reporter.poll()
    later: list[EngineLoad] = []
    reader = WatchedLoad(lambda load, _: later.append(load))
    watched.now_s = 1.0
    watched.load = msgspec.structs.replace(IDLE, resident={"a": "1"})
    watched.reporter.poll()
    reader.receive(watched.sent[-1])
    assert not later  # a change of a load that this reader does not know
    watched.reporter.watch(0.1)
    watched.reporter.poll()
    reader.receive(watched.sent[-1])
    assert later == [watched.load]


def test_a_change_before_a_report_is_due_is_reported_when_it_is() -> None:
    watched = Watched()
    watched.reporter.watch(0.1)
    watched.reporter.poll()
    assert watched.reporter.wait_s is None
    watched.now_s, watched.load = 0.03, msgspec.structs.replace(IDLE, num_running=1)
    watched.reporter.poll()
    assert len(watched.sent) == 1 and watched.reporter.wait_s is not None
    assert abs(watched.reporter.wait_s - 0.07) < 1e-9
    watched.now_s = 0.1
    watched.reporter.poll()
    assert watched.seen[-1].num_running == 1 and watched.reporter.wait_s is None


def test_an_engine_process_reports_its_load_and_signs_of_life(tmp_path: Path) -> None:
    async def main() -> None:
        engine = await EngineClient.start(EngineConfig(model="scripted"), command=ENGINE_COMMAND)
        seen: list[tuple[float, int, EngineLoad]] = []
        engine.ping()  # possibly before its loop begins
        engine.watch_load(0.05, lambda load, taken: seen.append((time.monotonic(), taken, load)))
        await engine.load_adapter("signs", write_adapter(tmp_path / "signs"))
        await engine.pin_adapter("signs", True)
        prompt = tuple(b"say:" + b"x" * 200)
        request = Request(request_id="r", prompt_ids=prompt, sampling=SamplingParams(max_tokens=300))
        engine.ping()
        async for _ in engine.generate(request):
            pass
        assert engine.pong is not None and engine.pong.step_s < 1
        await asyncio.sleep(0.2)
        loads = [load for *_, load in seen]
        assert {load.num_running for load in loads} == {0, 1} and loads[-1].num_running == 0
        assert list(loads[-1].resident) == ["signs"] and loads[-1].resident["signs"]
        times = [at for at, *_ in seen]
        assert seen[0][1] == 0 and seen[-1][1] == 1
        assert all(later - earlier > 0.03 for earlier, later in itertools.pairwise(times))
        number = len(seen)
        await asyncio.sleep(0.2)
        assert len(seen) == number  # an idle engine reports nothing
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))
