"""`vlora bench training`: its clock, the ways it compares, and goals that are those of the measured rows."""

from __future__ import annotations

import os
import time
from pathlib import Path

from vlora.bench.training import beside
from vlora.bench.training.beside import EngineClock, Served
from vlora.bench.training.trainer_process import TrainerProcess


def test_the_clock_counts_the_threads_work_and_skipped_time() -> None:
    clock = EngineClock()
    before = clock()
    time.sleep(0.2)
    assert clock() - before < 0.1, "time of other processes must not count"
    clock.skip_to(before + 5)
    assert 5 <= clock() - before < 5.1
    clock.skip_to(before)
    assert clock() - before < 5.1, "time does not run backwards"


def test_every_way_serves_all_requests_and_only_training_trains(tmp_path: Path) -> None:
    clock = EngineClock()
    engine = beside.start(tmp_path, 1, clock)
    found = {way: Served() for way in ("alone", "beside, no promise")}
    for way in found:
        beside.serve(engine, clock, beside.arrivals(5, 4.0, seed=1), beside.WAYS[way], found[way])
        assert len(found[way].latencies_s) == 5 and min(found[way].latencies_s) > 0
    engine.close()
    assert found["alone"].num_tokens == 0 < found["beside, no promise"].num_tokens


def test_goals_are_the_promise_at_each_load() -> None:
    alone, good = Served([1.0] * 100, 10.0, 0), Served([1.0] * 98 + [1.1, 1.1], 10.0, 500)
    rows = [
        row for load in (0.3, 0.9) for row in beside.rows_of("processor", load, 1.0, {"alone": alone, "beside": good})
    ]
    goals = beside.goals_of(rows)
    assert [goal.holds for goal in goals] == [True, True, True] and goals[-1].value == 50
    slow = Served([1.0] * 98 + [1.2, 1.2], 10.0, 0)
    late = beside.goals_of([*rows[:2], *beside.rows_of("processor", 0.9, 1.0, {"alone": alone, "beside": slow})])
    assert [goal.holds for goal in late] == [True, False, True]
    wall = beside.rows_of("wall", 0.9, 1.0, {"alone": alone, "beside": slow})
    assert beside.goals_of([*rows, *wall]) == goals, "wall time counts other work on the machine"
    idle = beside.goals_of(beside.rows_of("processor", 0.3, 1.0, {"alone": alone, "beside": slow}))
    assert [goal.holds for goal in idle] == [False, False]


def test_a_training_process_works_only_between_resume_and_pause(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    with beside.one_core():
        process = TrainerProcess(tmp_path, 1, "nice process")
    assert os.sched_getaffinity(0) == cores
    try:
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19 and len(os.sched_getaffinity(process.pid)) == 1
        time.sleep(0.2)  # a step that was under way has ended
        before = process.num_tokens
        time.sleep(0.2)
        assert process.num_tokens == before > 0
        process.resume()
        ends_s = time.monotonic() + 60
        while process.num_tokens == before and time.monotonic() < ends_s:
            time.sleep(0.05)
        process.pause()
        assert process.num_tokens > before
    finally:
        process.close()
