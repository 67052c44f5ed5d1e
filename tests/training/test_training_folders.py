"""Folders of trainings: locks, refusals, and the state after an end or a refusal."""

from __future__ import annotations

import errno
import math
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.training.beside import STEPS, Case, settle, states, submit
from vlora.engine import Engine
from vlora.errors import BadConfig, BadPlan, BadRequest, VLoraError
from vlora.lora import Registration
from vlora.training import TrainableLora, Update
from vlora.training.job import MAX_TRIES, TrainingJob
from vlora.types import TrainingStatus

_HOLD = """
import sys
from pathlib import Path
from vlora.plan_files.run_lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_two_processes_do_not_train_in_one_folder(case: Case) -> None:
    """Until the other one ends, however it does."""
    plan, folder = case.plan("shared", ["first"]), case.folder / "shared" / "first"
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(BadConfig, match=f"^{folder} is in use by process {other.pid} "):
            case.engine(plan)
        engine = case.engine()
        with pytest.raises(BadRequest, match="is in use by process"):
            submit(engine, plan)
        other.kill()
    submit(engine, plan)
    settle(engine.parts.trainings, engine)
    assert states(engine) == {"first": "finished"}
    engine.close()


def test_two_engines_do_not_train_in_one_folder(case: Case) -> None:
    """The second one may continue what the first one has cancelled, or left when it was closed."""
    plan = case.plan("handed", ["first"])
    engine, other = case.engine(plan), case.engine()
    settle(engine.parts.trainings, engine, most=5)
    with pytest.raises(BadRequest, match="is in use by process"):
        submit(other, plan)
    engine.parts.trainings.cancel("first")
    settle(engine.parts.trainings, engine, most=1)
    while not (begun := _tried(other, plan)):  # the first engine's thread unlocks the folder soon
        time.sleep(1e-3)
    assert begun[0].state == "running"
    other.close()
    assert submit(engine, plan)[0].state == "running"
    engine.close()


def _tried(engine: Engine, plan: Path) -> tuple[TrainingStatus, ...]:
    try:
        return submit(engine, plan)
    except BadRequest:
        return ()


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(case: Case) -> None:
    (case.folder / "occupied").write_text("a file, and no folder")
    with pytest.raises(BadConfig, match=r"occupied/first cannot be created: .*; choose another folder"):
        case.engine(case.plan("occupied", ["first"]))


def test_an_adapter_of_another_origin_is_not_replaced(case: Case) -> None:
    kept = case.folder / "foreign" / "first" / "adapter" / "adapter_config.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    with pytest.raises(BadPlan, match="adapter is not of training 'first'; choose another folder or name"):
        case.engine(case.plan("foreign", ["first"]))
    assert kept.exists()


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04" + bytes(100)], ids=["empty", "text", "cut"])
def test_a_checkpoint_that_cannot_be_read_is_named(case: Case, content: bytes, request: pytest.FixtureRequest) -> None:
    results = request.node.callspec.id
    file = case.folder / results / "first" / "checkpoint.pt"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with pytest.raises(BadPlan, match=rf"^{file.parent}: its training cannot be read \(.+\); remove the folder$"):
        case.engine(case.plan(results, ["first"]))


def test_a_training_that_cannot_begin_leaves_others_running(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors do not fit into memory, or its checkpoint is that of another model."""
    begin = TrainingJob.begin

    def broken(job: TrainingJob, adapter: TrainableLora) -> None:
        if job.name == "second":
            raise RuntimeError("can't allocate memory")
        begin(job, adapter)

    monkeypatch.setattr(TrainingJob, "begin", broken)
    engine = case.engine(case.plan("isolated", ["first"]))
    trainings = engine.parts.trainings
    settle(trainings, engine, most=5)
    submit(engine, case.plan("isolated2", ["second"]))
    settle(trainings, engine)
    first, second = trainings.statuses()
    assert first.state == "finished" and first.step == STEPS
    assert (second.state, second.error) == ("failed", "it cannot begin: RuntimeError: can't allocate memory")
    engine.close()


@pytest.mark.parametrize("problem", ["raises", "not finite"])
def test_an_optimizer_step_that_fails_ends_its_training_only(
    case: Case, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    """Its last checkpoint has no value that is not finite."""
    update = TrainableLora.update

    def broken(adapter: TrainableLora, learning_rate: float | None = None) -> Update:
        found = update(adapter, learning_rate)
        if adapter.name == "second" and problem == "raises":
            raise RuntimeError("can't allocate memory")
        if adapter.name == "second":
            layer, (a, b) = next(iter(adapter.values().items()))
            adapter.load({layer: (a, b + math.inf)})
        return found

    monkeypatch.setattr(TrainableLora, "update", broken)
    results = f"update {problem}"
    engine = case.engine(case.plan(results, micro_batch_tokens=1))
    settle(engine.parts.trainings, engine)
    first, second = engine.parts.trainings.statuses()
    assert (first.state, first.step, second.state, second.step) == ("finished", STEPS, "failed", 0)
    assert second.error in (
        "the optimizer step failed: RuntimeError: can't allocate memory",
        "a parameter is not finite after step 1; lower the learning rate",
    )
    kept = torch.load(case.folder / results / "second" / "checkpoint.pt")["adapter"]["parameters"]
    assert kept.isfinite().all()
    engine.close()


def test_a_refused_plan_begins_and_changes_nothing(case: Case) -> None:
    """Not even the trainings before the refused one; a cancelled one remains so."""
    plan = case.plan("refused", ["first"])
    engine = case.engine(plan)
    settle(engine.parts.trainings, engine, most=5)
    engine.parts.trainings.cancel("first")
    engine.close()
    content = yaml.safe_load(plan.read_text())
    content["trainings"].append({**content["trainings"][0], "name": "more", "targets": ["nothing"]})
    (case.folder / "both.yaml").write_text(yaml.safe_dump(content))
    engine = case.engine()
    with pytest.raises(VLoraError, match="no linear layer is named nothing"):
        submit(engine, case.folder / "both.yaml")
    assert not states(engine)
    engine.close()
    engine = case.engine(plan)
    assert states(engine) == {"first": "cancelled"}
    engine.close()


def test_a_plan_whose_finished_adapter_is_gone_begins_nothing(case: Case) -> None:
    plan = case.plan("gone", ["first"])
    case.run(plan)
    shutil.rmtree(case.folder / "gone" / "first" / "adapter")
    engine = case.engine()
    with pytest.raises(VLoraError, match="adapter"):
        submit(engine, case.plan("gone", ["second", "first"]))
    assert not states(engine)
    engine.close()


def test_an_engine_that_closes_does_not_fail_a_complete_training(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was closed while the adapter was read: the next one registers it."""
    plan = case.plan("closed", ["first"])
    engine = case.engine(plan)
    begun: list[str] = []

    def endless(name: str, *_: Any) -> Future[Registration]:  # a read that is quick could be complete already
        begun.append(name)
        return Future()

    monkeypatch.setattr(engine.parts.registry, "read_folder_in_background", endless)
    settle(engine.parts.trainings, engine, until=lambda: bool(begun))
    assert begun == ["first"]
    assert states(engine) == {"first": "running"}
    engine.close()
    assert {one.name: one.state for one in case.run(plan)} == {"first": "finished"}


def test_ended_trainings_keep_no_tensors_and_are_listed_to_a_limit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlora.engine.trainings.MAX_ENDED", 2)
    engine = case.engine()
    trainings = engine.parts.trainings
    for number in range(4):
        submit(engine, case.plan("many", ["first"], name=f"n{number}", steps=1))
        settle(trainings, engine)
    assert list(states(engine)) == ["n1", "n2", "n3"], "the last one, and two before it"
    assert all(job.adapter is None and not job.records.train for job in trainings.jobs)
    engine.close()


def test_a_micro_step_that_ends_the_process_is_not_repeated_for_ever(case: Case, tmp_path: Path) -> None:
    """As the kernel ends a process that needs too much memory. Processes that are stopped do not count."""
    plan, folder = case.plan("deaths", ["first"]), case.folder / "deaths" / "first"
    for death in range(MAX_TRIES):
        engine = case.engine(plan)
        assert states(engine) == {"first": "running"}
        settle(engine.parts.trainings, engine, most=2)
        left = shutil.copytree(folder, tmp_path / f"{death}")
        engine.close()
        assert not (folder / "tries").exists(), "the process was stopped in order"
        shutil.rmtree(folder)
        shutil.copytree(left, folder)
    engine = case.engine(plan)
    (status,) = engine.parts.trainings.statuses()
    assert status.state == "failed" and status.error is not None
    assert status.error.startswith("its micro-step has ended the engine's process 3 times")
    assert submit(engine, plan)[0].state == "running"
    settle(engine.parts.trainings, engine)
    assert states(engine) == {"first": "finished"} and not (folder / "tries").exists()
    engine.close()


def test_a_checkpoint_that_does_not_fit_on_the_disk_leaves_no_part(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep the disk full. The checkpoint before it remains, and the training continues from it."""
    plan, folder = case.plan("full", ["first"]), case.folder / "full" / "first"
    engine = case.engine(plan)
    settle(engine.parts.trainings, engine, until=lambda: engine.parts.trainings.statuses()[0].step == 1)
    save = torch.save

    def broken(_: Any, file: Path) -> None:
        file.write_bytes(b"the first part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", broken)
    settle(engine.parts.trainings, engine)
    (status,) = engine.parts.trainings.statuses()
    assert status.state == "failed" and status.error is not None
    assert f"{folder} cannot be written: [Errno 28] No space left on device" in status.error
    assert sorted(file.name for file in folder.iterdir()) == ["checkpoint.pt", "in-use", "training.json"]
    monkeypatch.setattr(torch, "save", save)
    submit(engine, plan)
    settle(engine.parts.trainings, engine)
    assert states(engine) == {"first": "finished"}
    engine.close()
