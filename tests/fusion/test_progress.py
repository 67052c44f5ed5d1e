"""Display of a long run: bars on a terminal, elsewhere one line per minute."""

from __future__ import annotations

import io
import os
import re
import signal
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from fusion.progress import Progress, ProgressBars, Work, duration
from fusion.training.parallel_jobs import one_thread, run_in_parallel
from fusion.training.scoring import HeldOutScores
from tests.fusion.small import color_splits, plan_of, trainer_of, write_base
from tests.processes import is_alive, until
from vlora.cli import cli
from vlora.errors import BadConfig


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def log(clock: Clock) -> tuple[Progress, io.StringIO]:
    """Progress that is written to a log."""
    shown = io.StringIO()
    return Progress(Console(file=shown, width=200), clock=clock), shown


# -- a log ------------------------------------------------------------------------------------------------------------


def test_stored_trainings_count_as_done_and_take_no_time(clock: Clock) -> None:
    progress, _ = log(clock)
    progress.expect(4)
    progress.count_stored("training a", 1)
    progress.count_stored("training a", 1)  # requested twice, counted once
    with progress.work("training b, c at once", 10, "steps", trainings=2) as update:
        clock.now += 10
        update(5)
        assert progress.totals.done == pytest.approx(2.0) and progress.totals.total == 4
        assert progress.totals.left_s(clock.now) == pytest.approx(20.0)
    assert progress.totals.finished == 2 and progress.totals.done == 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (8.4, "8 s"), (47, "45 s"), (89, "90 s"), (91, "2 min"), (5399, "90 min"), (9000, "2.5 h")],
)
def test_durations_are_rounded(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# -- a terminal -------------------------------------------------------------------------------------------------------


def test_bars_show_steps_facts_and_all_trainings(clock: Clock) -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=150, force_terminal=True, color_system=None, legacy_windows=False)
    with Progress(console, clock=clock) as progress:
        progress.expect(2)
        with progress.work("training a", 4, "steps", trainings=1) as update:
            for step in range(3):
                clock.now += 1
                update(step + 1, f"loss {step}")
            assert isinstance(progress.display, ProgressBars)
            bars = progress.display
            bars.refresh()
            assert [task.description for task in bars.tasks] == ["training a", "all trainings"]
            assert bars.tasks[0].percentage == 75 and bars.tasks[1].completed == pytest.approx(0.75)
        assert [task.description for task in bars.tasks] == ["all trainings"]
    assert "3 of 4 steps, loss 2" in shown.getvalue() and "0.8 of 2 or more" in shown.getvalue()


# -- forks ------------------------------------------------------------------------------------------------------------


def test_a_fork_sends_few_events_and_always_the_last(clock: Clock) -> None:
    sent: list[Work] = []
    progress, shown = log(clock)
    progress.forward(sent.append)
    progress.say("the parent prints this itself")
    with progress.work("training a", 1000, "steps", trainings=1) as update:
        for step in range(1000):
            clock.now += 0.001
            update(step + 1)
    assert [work.state for work in sent] == ["running"] * (len(sent) - 1) + ["complete"]
    assert (sent[0].done, sent[-1].done, sent[-1].share) == (0, 1000, 1.0)
    assert 5 < len(sent) < 12 and shown.getvalue() == ""


# -- held-out samples -------------------------------------------------------------------------------------------------


def test_held_out_scoring_takes_at_most_a_hundredth_of_the_time(clock: Clock) -> None:
    def score(domain: str, count: int) -> float:
        clock.now += 5.0
        return {"a": 0.5, "b": 1.0}[domain]

    scores = HeldOutScores(score, ("a", "b"), clock)
    assert not scores.due and str(scores) == ""
    clock.now += 10.0
    assert scores.due
    scores.update()
    assert str(scores) == "0.750 (lowest a 0.500)"
    clock.now += 999.0
    assert not scores.due
    clock.now += 1.0
    assert scores.due


@pytest.mark.slow
def test_progress_display_changes_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusion.training.scoring.EVERY_S", 0.0)
    monkeypatch.setattr("fusion.training.scoring.SHARE", 1e9)
    plan = plan_of(write_base(tmp_path / "base"), ("colors",), steps=4, batch_size=4)
    states = []
    shown = io.StringIO()
    for progress in (Progress(), Progress(Console(file=shown, width=200))):
        trainer = trainer_of(plan, {"colors": color_splits()}, progress=progress)
        trainer.adapter.reset()
        trainer.train("colors", ())
        states.append(trainer.adapter.snapshot())
    assert re.search(r"4 steps in .*, loss \d\.\d{3}, held-out [01]\.\d{3}$", shown.getvalue().strip())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_gpu_trains_one_at_a_time(tmp_path: Path) -> None:
    arguments = ["fuse", "demo", "--out", str(tmp_path / "out"), "--device", "cuda", "--workers", "2"]
    error = CliRunner().invoke(cli, arguments).exception
    assert isinstance(error, BadConfig) and "workers is 2, but on cuda one process trains at a time" in str(error)


def test_a_training_has_a_first_line_a_line_a_minute_and_a_last_one(clock: Clock) -> None:
    """Trainings that are not foreseen prolong what is left."""
    progress, shown = log(clock)
    with progress:
        progress.expect(1)
        with progress.work("training a", 400, "steps", trainings=1) as update:
            for step in range(400):
                clock.now += 0.5
                update(step + 1, f"loss {1 / (step + 1):.3f}")
        for seconds in (0.1, 3.0):  # other work has lines only where it takes long
            with progress.work(f"reading for {seconds:g} s each", 10, "samples") as update:
                for done in range(10):
                    clock.now += seconds
                    update(done + 1)
        with pytest.raises(KeyboardInterrupt), progress.work("training b", 10, "steps", trainings=1) as update:
            update(1)
            raise KeyboardInterrupt
    assert shown.getvalue().splitlines() == [
        "training a: 400 steps",
        "training a: 120 of 400 steps, loss 0.008, about 2 min left; all trainings: about 2 min left",
        "training a: 240 of 400 steps, loss 0.004, about 80 s left; all trainings: about 80 s left",
        "training a: 360 of 400 steps, loss 0.003, about 20 s left; all trainings: about 20 s left",
        "training a: 400 steps in 3 min, loss 0.003",
        "reading for 3 s each: 4 of 10 samples, about 20 s left",
        "reading for 3 s each: 10 samples in 30 s",
        "training b: 10 steps (all trainings: about 4 min left)",
    ]
    assert progress.totals.finished == 1, "an interrupted training is not counted"


def test_forks_run_two_at_a_time_and_the_parent_shows_their_progress(tmp_path: Path) -> None:
    """Their failures are ignored; one is killed before it has finished."""
    shown = io.StringIO()
    with Progress(Console(file=shown, width=200)) as progress, one_thread():

        def job(number: int) -> None:
            (tmp_path / f"{number}.begun").touch()
            assert len(list(tmp_path.glob("*.begun"))) - len(list(tmp_path.glob("*.ended"))) <= 2
            assert torch.get_num_threads() == 1
            with progress.work(f"training {number}", 3, "steps", trainings=1) as update:
                for step in range(3):
                    update(step + 1, f"loss {step}")
                if number == 0:  # waits for a parallel job
                    until(lambda: (tmp_path / "1.begun").exists())
                (tmp_path / f"{number}.ended").touch()
                if number == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("ignored by the parent")

        run_in_parallel([partial(job, number) for number in range(5)], 2, progress)
        assert progress.totals.finished == 4 and not progress.totals.open
    assert len(list(tmp_path.glob("*.ended"))) == 5
    lines = shown.getvalue().splitlines()
    for number in range(5):
        ended = [line for line in lines if line.startswith(f"training {number}: 3 steps in ")]
        assert len(ended) == (number != 1) and all(line.endswith(", loss 2") for line in ended)


def test_forks_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    def job() -> None:
        (tmp_path / "fork").write_text(str(os.getpid()))
        time.sleep(600)

    parent = get_context("fork").Process(target=run_in_parallel, args=([job], 1, Progress()))
    parent.start()
    until(lambda: (tmp_path / "fork").exists() and bool((tmp_path / "fork").read_text()))
    fork = int((tmp_path / "fork").read_text())
    assert is_alive(fork)
    parent.kill()
    parent.join()
    until(lambda: not is_alive(fork))
