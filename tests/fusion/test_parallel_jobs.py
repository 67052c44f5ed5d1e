"""Parallel trainings in forks that store only their results."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from fusion.packing.training_counts import trained_alone
from fusion.phases.packing import packing_of
from fusion.plan.schema import Plan, RelativeThreshold
from fusion.progress.progress import Progress
from fusion.training.checkpoint import Checkpoint
from fusion.training.parallel_jobs import Job, one_thread, run_in_parallel
from fusion.training.run_cache import RunCache
from fusion.training.trainer import LoraTrainer
from tests.fusion.small import color_splits, plan_of, trainer_of, write_base
from tests.processes import until
from vlora.cli import cli
from vlora.errors import BadConfig


def test_jobs_run_two_at_a_time_and_their_failures_are_ignored(tmp_path: Path) -> None:
    def job(number: int) -> None:
        (tmp_path / f"{number}.begun").touch()
        assert len(list(tmp_path.glob("*.begun"))) - len(list(tmp_path.glob("*.ended"))) <= 2
        assert torch.get_num_threads() == 1
        if number == 0:  # waits for a parallel job
            until(lambda: (tmp_path / "1.begun").exists())
        (tmp_path / f"{number}.ended").touch()
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("ignored by the parent")

    with one_thread():
        run_in_parallel([partial(job, number) for number in range(5)], 2, Progress())
    assert len(list(tmp_path.glob("*.ended"))) == 5


def test_the_parent_shows_the_progress_of_forks() -> None:
    shown = io.StringIO()
    with Progress(Console(file=shown, width=200)) as progress:

        def job(name: str, fails: bool) -> None:
            with progress.work(f"training {name}", 3, "steps", trainings=1) as update:
                for step in range(3):
                    update(step + 1, f"loss {step}")
                if fails:
                    os.kill(os.getpid(), signal.SIGKILL)

        run_in_parallel([partial(job, "a", False), partial(job, "b", True), partial(job, "c", False)], 2, progress)
        assert progress.totals.finished == 2 and not progress.totals.open, "one was killed before it finished"
    lines = shown.getvalue().splitlines()
    for name in "ac":
        assert any(line.startswith(f"training {name}: 3 steps in ") and line.endswith(", loss 2") for line in lines)
    assert not any(line.startswith("training b: 3 steps in") for line in lines)


def test_forks_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    def job() -> None:
        (tmp_path / "fork").write_text(str(os.getpid()))
        time.sleep(600)

    parent = get_context("fork").Process(target=run_in_parallel, args=([job], 1, Progress()))
    parent.start()
    until(lambda: (tmp_path / "fork").exists() and bool((tmp_path / "fork").read_text()))
    fork = Path("/proc", (tmp_path / "fork").read_text())
    assert fork.exists()
    parent.kill()
    parent.join()
    until(lambda: not fork.exists() or "State:\tZ" in (fork / "status").read_text())


def trainings(plan: Plan, folder: Path) -> RunCache:
    contrary = color_splits({0: 1, 1: 2, 2: 0})
    splits = {"a": color_splits(), "b": contrary, "c": color_splits()}
    trainer = trainer_of(plan, splits, folder / "features")
    return RunCache(trainer, Checkpoint(folder / "checkpoint", {}, resume=True), rehearsal=0.5)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_parallel_orders_give_the_packing_and_adapters_of_sequential_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = plan_of(write_base(tmp_path / "base"), ("a", "b", "c"), steps=3, batch_size=4)
    plan = settings.model_copy(update={"packing": "first_fit", "order": ("given", "random", "random"), "seed": 1})
    thresholds = {"a": 0.1, "b": 0.9, "c": 0.1}
    alone, together = trainings(plan, tmp_path / "alone"), trainings(plan, tmp_path / "together")
    with one_thread():
        wanted = packing_of(plan, alone.trainer.domains, thresholds, alone, lambda line: None)
        run_ahead = partial(run_in_parallel, at_once=2, watcher=Progress())

        def never(*_: object, **__: object) -> None:
            raise AssertionError("trained once more")

        def packed(jobs: object) -> None:
            run_ahead(jobs)  # type: ignore[arg-type]
            monkeypatch.setattr(LoraTrainer, "train", never)

        found = packing_of(plan, together.trainer.domains, thresholds, together, lambda line: None, packed)
    assert found.adapters.keys() == wanted.adapters.keys()
    assert {name: one.scores for name, one in found.adapters.items()} == {
        name: one.scores for name, one in wanted.adapters.items()
    }
    for adapter in wanted.adapters:
        one, other = alone.state(adapter), together.state(adapter)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_both_parts_of_a_split_set_are_trained_in_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = plan_of(write_base(tmp_path / "base"), ("a", "b", "c"), steps=3, batch_size=4)
    plan = settings.model_copy(update={"packing": "jointly"})
    thresholds = {"a": 0.1, "b": 0.99, "c": 0.1}
    alone, together = trainings(plan, tmp_path / "alone"), trainings(plan, tmp_path / "together")
    sizes: list[int] = []
    with one_thread():
        wanted = packing_of(plan, alone.trainer.domains, thresholds, alone, lambda line: None)

        def never(*_: object, **__: object) -> None:
            raise AssertionError("trained once more")

        def run_ahead(jobs: Sequence[Job]) -> None:
            sizes.append(len(jobs))
            run_in_parallel(jobs, 2, Progress())
            monkeypatch.setattr(LoraTrainer, "train", never)
            monkeypatch.setattr(LoraTrainer, "train_together", never)

        found = packing_of(plan, together.trainer.domains, thresholds, together, lambda line: None, run_ahead)
    assert sizes == [2] and list(wanted.missed) == ["b"]
    assert {name: one.scores for name, one in found.adapters.items()} == {
        name: one.scores for name, one in wanted.adapters.items()
    }
    for adapter in wanted.adapters:
        one, other = alone.state_together(adapter), together.state_together(adapter)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_domains_that_are_trained_alone_in_any_case() -> None:
    plan = plan_of("x", ("a", "b"))
    assert trained_alone(plan, {}) == ()
    assert trained_alone(plan.model_copy(update={"order": ("given", "hardest_first")}), {}) == ("a", "b")
    relative = [RelativeThreshold(relative_to="alone"), RelativeThreshold(relative_to="teacher")]
    domains = [d.model_copy(update={"threshold": t}) for d, t in zip(plan.domains, relative, strict=True)]
    assert trained_alone(plan.model_copy(update={"domains": tuple(domains)}), {"b": 0.5}) == ("a",)


def test_a_gpu_trains_one_at_a_time(tmp_path: Path) -> None:
    arguments = ["fuse", "demo", "--out", str(tmp_path / "out"), "--device", "cuda", "--workers", "2"]
    error = CliRunner().invoke(cli, arguments).exception
    assert isinstance(error, BadConfig) and "workers is 2, but on cuda one process trains at a time" in str(error)
