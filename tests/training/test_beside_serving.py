"""Trainings in the engine's process: equal to trainings alone, beside requests that are equal to those alone; their
folders, the ends that they may have, and the bounds of plans and memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from atmm import processor
from tests.learning.test_store import files_of_at_most
from tests.training.beside import STEPS, Alone, Case, Running, adapter_of, assert_same, losses_of, request
from vlora.engine import LocalEngine
from vlora.engine.limits import Room
from vlora.engine.operations import Train
from vlora.errors import BadConfig, BadPlan, BadRequest, OverCapacity, VLoraError
from vlora.lora.registry import Registration
from vlora.models.hf_model import HFModel
from vlora.models.loading import load_model
from vlora.operations import CancelTraining, ListTrainings
from vlora.run_folder import lock_folder
from vlora.training.adapter import LoraSettings, TrainableLora, Update
from vlora.training.batch import Sample
from vlora.training.job import MAX_TRIES, TrainingJob
from vlora.training.micro_step import MicroStep
from vlora.training.plan import read_plan
from vlora.training.samples import SampleSource
from vlora.training.trainer import PackedTrainer

FINISHED = ("finished", STEPS)


@pytest.fixture(scope="module")
def alone(case: Case) -> Alone:
    return Alone(case)


@pytest.fixture(scope="module")
def first_alone(case: Case) -> Alone:
    return Alone(case, ["first"])


# -- equal to a training alone -----------------------------------------------------------------------------------------


def tokens(on: Running, *, trains: bool) -> dict[str, list[int]]:
    """Answers of requests with and without an adapter that arrive one after the other, with pieces in between."""
    waiting = [request(f"r{place}", (None, "served")[place % 2 * (place > 3)]) for place in range(8)]
    waiting += [request(f"m{place}", "served", 12) for place in range(3)]
    found: dict[str, list[int]] = {}
    num_calls = 0
    while waiting or on.engine.has_work:
        if waiting and num_calls % 3 == 0:
            on.engine.add(waiting.pop(0))
        for output in on.engine.step():
            assert output.error is None
            found.setdefault(output.request_id, []).extend(output.token_ids)
        if trains:
            on.trainings.advance()
        num_calls += 1
    return found


@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_a_training_beside_requests_equals_one_alone(family: str, tmp_path: Path) -> None:
    """Losses and adapters bit for bit, and the tokens of requests in merged and unmerged steps."""
    case = Case.make(tmp_path / "case", family)
    case.run(case.plan("served", ["first"], name="served", steps=2))
    served, alone = str(case.folder / "served" / "served" / "adapter"), Alone(case)
    with case.running() as plain, case.running(case.plan("beside")) as on:
        for one in (plain, on):
            one.engine.load_adapter("served", served)
        expected = tokens(plain, trains=False)
        on.settle(until_step=1)
        assert tokens(on, trains=True) == expected
        assert len(on.engine.stats().steps_by_mode) > 1, "nothing was merged"
        on.settle()
        for status in on.trainings.statuses():
            folder = case.folder / "beside" / status.name
            assert (status.state, status.step) == FINISHED and status.path == str(folder / "adapter")
            assert losses_of(folder) == alone.losses[status.name]
            assert [status.held_out_before, status.held_out_after] == alone.held_out[status.name]
            assert_same(folder, alone.adapter(status.name, tmp_path / status.name))
            assert not (folder / "checkpoint.pt").exists()
        # The result is served under its name.
        assert {"first", "second"} <= {status.name for status in on.engine.adapters()}
        assert on.serve(request("after", "first"))
        with torch.no_grad():  # negative control: the comparison of tokens finds weights that are not W0
            next(iter(plain.engine.parts.device.slabs.base)).mul_(1.5)
        assert tokens(plain, trains=False) != expected


def test_an_engine_in_a_thread_trains_between_calls(case: Case, first_alone: Alone) -> None:
    """`LocalEngine`, by its asyncio calls."""

    async def main() -> None:
        local = LocalEngine(case.config())
        (begun,) = await local.call(Train(str(case.plan("local", ["first"]))))
        assert begun.state == "running"
        outputs = [output async for output in local.generate(request("r", None))]
        assert sum(len(output.token_ids) for output in outputs) == 6
        while (await local.call(ListTrainings()))[0].state == "running":
            await asyncio.sleep(1e-3)
        assert (await local.call(ListTrainings()))[0].state == "finished"
        assert [status.name for status in await local.adapters()] == ["first"]
        with pytest.raises(BadRequest, match="no training named 'first' is running; running: none"):
            await local.call(CancelTraining("first"))
        with pytest.raises(BadPlan, match="cannot be read"):
            await local.call(Train(str(case.folder / "absent.yaml")))
        await local.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert losses_of(case.folder / "local" / "first") == first_alone.losses["first"]


def test_a_training_cut_at_any_piece_continues_equally(case: Case, first_alone: Alone, tmp_path: Path) -> None:
    """The process ends after a number of pieces, without notice; at most one micro-step is computed again."""
    plan, reached, lost, states = case.plan("cut", ["first"]), 0, [], []
    for most in (1, 7, 23, 11, 19, math.inf):
        on = Running(case.engine(plan))
        lost.append(reached - on.status.step)
        on.settle(most=most)
        on.trainings.close()  # an ended process writes no more files
        reached = on.status.step
        states.append(on.status.state)
    assert states == ["running"] * 5 + ["finished"] and max(lost) <= 1
    assert losses_of(case.folder / "cut" / "first") == first_alone.losses["first"]
    assert_same(case.folder / "cut" / "first", first_alone.adapter("first", tmp_path))


def test_short_micro_steps_change_nothing_but_rounding(case: Case, first_alone: Alone, tmp_path: Path) -> None:
    """One record in each micro-step."""
    counts = []
    for results, changes in (("short", {"micro_batch_tokens": 1}), ("long", {})):
        with case.running(case.plan(results, ["first"], **changes)) as on:
            counts.append(on.settle())
    assert counts[0] > 1.5 * counts[1]
    folder = case.folder / "short" / "first"
    assert losses_of(folder) == pytest.approx(first_alone.losses["first"], abs=1e-6)
    found, wanted = adapter_of(folder), first_alone.adapter("first", tmp_path)
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-3, atol=1e-6)


def test_trainings_may_be_cancelled_and_submitted_again_at_any_piece(case: Case, alone: Alone) -> None:
    """Each of two trainings in turn, after one more piece each time; both end with the right losses."""
    num_cancelled, plan = 0, case.plan("often")
    with case.running(plan) as on:
        on.settle(until_step=1)
        assert on.trainings.cancel("first").state == "cancelled"
        with pytest.raises(BadRequest, match="no training named 'first' is running; running: second"):
            on.trainings.cancel("first")
        on.settle(most=1)
    with case.running(plan) as on:  # it remains cancelled after a restart, and continues when it is submitted again
        assert on.states()["first"] == ("cancelled", 1)
        on.submit(case.plan("often", ["first"]))
        for number in range(24):
            on.settle(most=1 + number % 7)
            name = ("first", "second")[number % 2]
            if on.states()[name][0] == "running":
                try:
                    on.trainings.cancel(name)
                except BadRequest as error:  # after its last piece
                    assert "is complete" in str(error)
                    continue
                num_cancelled += 1
                on.settle(most=number % 3)
                on.submit(case.plan("often", [name]))
        on.settle()
        assert set(on.states().values()) == {FINISHED} and num_cancelled > 5
    for name, losses in alone.losses.items():
        assert losses_of(case.folder / "often" / name) == pytest.approx(losses, abs=1e-5)


def test_a_training_may_begin_from_an_adapter(case: Case, tmp_path: Path) -> None:
    case.run(case.plan("begun", ["first"]))
    start, begun = case.folder / "begun" / "first" / "adapter", losses_of(case.folder / "begun" / "first")
    plan = case.plan("continued", ["first"], start=str(start), learning_rate=1e-9, register_adapter=False)
    with case.running(plan) as on:
        on.settle()
        first, second = (adapter_of(case.folder / name / "first") for name in ("begun", "continued"))
        assert all(torch.allclose(first[key], second[key], atol=1e-6) for key in first)
        assert losses_of(case.folder / "continued" / "first")[0] < begun[0]
        assert [one.name for one in on.engine.adapters()] == [], "it is not registered"

        def change_config(folder: Path) -> None:
            found = json.loads((folder / "adapter_config.json").read_text())
            (folder / "adapter_config.json").write_text(json.dumps(found | {"r": 3}))

        def remove_a_factor(folder: Path) -> None:
            tensors = load_file(folder / "adapter_model.safetensors")
            tensors.pop(next(iter(tensors)))
            save_file(tensors, folder / "adapter_model.safetensors")

        unusable: list[tuple[Callable[[Path], object], str]] = [
            (change_config, r"has \(rank, alpha, rslora\) \(3, 4.0, False\); the training has \(2, 4.0, False\)"),
            (remove_a_factor, "cannot be read: "),
            (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"{"), "cannot be read: "),
            (shutil.rmtree, "cannot be read: "),
        ]
        for number, (change, message) in enumerate(unusable):
            shutil.copytree(start, own := tmp_path / f"{number} start")
            change(own)
            with pytest.raises(BadPlan, match=f"`start` of training 'first', .*start, {message}"):
                on.trainings.start(str(case.plan(f"from {number}", ["first"], start=str(own))))


@pytest.mark.parametrize("layer", ["layers.0.self_attn.q_proj.weight", "embed_tokens.weight"])
def test_a_training_does_not_continue_on_another_base_model(case: Case, layer: str) -> None:
    """The same model but for one layer's weight. The type of the weights does not matter."""
    folder, plan = case.folder / f"other {layer}", case.plan(f"on one {layer}", ["first"])
    shutil.copytree(case.model, folder)
    tensors = load_file(folder / "model.safetensors")
    (name,) = [one for one in tensors if one.endswith(layer)]
    tensors[name] = tensors[name] + 0.125
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with case.running(plan) as on:
        on.settle(most=12)
        assert on.status.state == "running"
    with pytest.raises(BadPlan, match="has training 'first' of another base model; serve that one, remove the folder"):
        dataclasses.replace(case, model=str(folder)).engine(plan)
    dtype = "bfloat16" if "embed" in layer else "float32"
    assert [one.state for one in case.run(plan, dtype=dtype)] == ["finished"]


# -- ends --------------------------------------------------------------------------------------------------------------


Trainable = Callable[[TrainableLora], None]


def not_finite(adapter: TrainableLora) -> None:
    layer, (a, b) = next(iter(adapter.values().items()))
    adapter.load({layer: (a, b + math.inf)})


def diverged(adapter: TrainableLora) -> None:
    layer, (a, b) = next(iter(adapter.values().items()))
    adapter.load({layer: (a * math.nan, b)})


def no_memory(adapter: TrainableLora) -> None:
    raise RuntimeError("can't allocate memory")


@pytest.mark.parametrize(
    ("at", "fail", "error"),
    [
        ("begin", no_memory, "it cannot begin: RuntimeError: can't allocate memory"),
        ("update", no_memory, "the optimizer step failed: RuntimeError: can't allocate memory"),
        ("update", not_finite, "a parameter is not finite after step 1; lower the learning rate"),
        ("begin", diverged, "the loss is nan in step 1; lower the learning rate"),
    ],
    ids=["begin", "update", "parameter", "loss"],
)
def test_a_training_that_fails_ends_alone(
    case: Case, alone: Alone, monkeypatch: pytest.MonkeyPatch, at: str, fail: Trainable, error: str
) -> None:
    """Its last checkpoint, if there is one, has no value that is not finite."""
    begin, update = TrainingJob.begin, TrainableLora.update

    def begins(job: TrainingJob, adapter: TrainableLora) -> None:
        begin(job, adapter)
        if job.name == "second" and at == "begin":
            fail(adapter)

    def updates(adapter: TrainableLora) -> Update:
        found = update(adapter)
        if adapter.name == "second" and at == "update":
            fail(adapter)
        return found

    monkeypatch.setattr(TrainingJob, "begin", begins)
    monkeypatch.setattr(TrainableLora, "update", updates)
    results = f"fails: {error[:20]}"
    with case.running(case.plan(results, micro_batch_tokens=1)) as on:
        on.settle()
        assert on.states() == {"first": FINISHED, "second": ("failed", 0)}
        assert on.trainings.statuses()[1].error == error
    assert losses_of(case.folder / results / "first") == pytest.approx(alone.losses["first"], abs=1e-5)
    if (kept := case.folder / results / "second" / "checkpoint.pt").exists():
        assert torch.load(kept)["adapter"]["parameters"].isfinite().all() or fail is diverged


@pytest.mark.parametrize("where", ["internal", "full disk"])
def test_an_internal_error_or_a_full_disk_ends_trainings_and_not_the_engine(
    case: Case, first_alone: Alone, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """No part of a checkpoint remains, which would keep the disk full; another loop continues from the one before."""
    plan, folder = case.plan(where, ["first"]), case.folder / where / "first"

    def broken() -> None:
        raise KeyError("missing")

    with case.running(plan) as on:
        on.settle(until_step=1)
        with monkeypatch.context() as patched:
            if where == "internal":
                patched.setattr(on.trainings.jobs[0], "checkpoint", broken)
            with files_of_at_most(4000) if where == "full disk" else contextlib.nullcontext():
                on.settle()
        expected = "(KeyError: 'missing')" if where == "internal" else f"cannot write '{folder}': File too large"
        assert on.status.state == "failed" and on.status.error is not None and expected in on.status.error
        assert sorted(file.name for file in folder.iterdir()) == ["checkpoint.pt", "in-use", "training.json"]
        assert on.serve(request("r", None))
        on.submit(plan)
        on.settle()
        assert on.states() == {"first": FINISHED}
    assert losses_of(folder) == first_alone.losses["first"]


def test_an_engine_that_closes_does_not_fail_a_complete_training(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was closed while the adapter was read: the next one registers it."""
    plan, begun = case.plan("closed", ["first"]), list[str]()

    def endless(name: str, *_: Any) -> Future[Registration]:  # a read that is quick could be complete already
        begun.append(name)
        return Future()

    with case.running(plan) as on:
        monkeypatch.setattr(on.engine.parts.registry, "read_folder_in_background", endless)
        on.settle(until=lambda: bool(begun))
        assert begun == ["first"] and on.status.state == "running"
    assert [one.state for one in case.run(plan)] == ["finished"]


def test_ended_trainings_keep_no_tensors_and_are_listed_to_a_limit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlora.engine.trainings.MAX_ENDED", 2)
    with case.running() as on:
        for number in range(4):
            on.submit(case.plan("many", ["first"], name=f"n{number}", steps=1))
            on.settle()
        assert list(on.states()) == ["n1", "n2", "n3"], "the last one, and two before it"
        assert all(job.adapter is None and not job.records.train for job in on.trainings.jobs)


def test_a_micro_step_that_ends_the_process_is_not_repeated_for_ever(case: Case, tmp_path: Path) -> None:
    """As the kernel ends a process that needs too much memory. Processes that are stopped do not count."""
    plan, folder = case.plan("deaths", ["first"]), case.folder / "deaths" / "first"
    for death in range(MAX_TRIES):
        with case.running(plan) as on:
            assert on.status.state == "running"
            on.settle(most=2)
            left = shutil.copytree(folder, tmp_path / f"{death}")
        assert not (folder / "tries").exists(), "the process was stopped in order"
        shutil.rmtree(folder)
        shutil.copytree(left, folder)
    with case.running(plan) as on:
        assert on.status.state == "failed" and on.status.error is not None
        assert on.status.error.startswith("its micro-step has ended the engine's process 3 times")
        assert on.submit(plan)[0].state == "running"
        on.settle()
        assert on.states() == {"first": FINISHED} and not (folder / "tries").exists()


# -- folders and plans -------------------------------------------------------------------------------------------------


def test_two_processes_or_engines_do_not_train_in_one_folder(case: Case) -> None:
    """Until the other one ends, cancels its training, or is closed."""
    plan, folder = case.plan("shared", ["first"]), case.folder / "shared" / "first"
    with case.running() as on, case.running() as other:
        with lock_folder(folder):
            with pytest.raises(BadConfig, match=f"^{folder} is in use by process {os.getpid()} "):
                case.engine(plan)
            with pytest.raises(BadRequest, match="is in use by process"):
                on.submit(plan)
        on.submit(plan)
        on.settle(most=5)
        with pytest.raises(BadRequest, match="is in use by process"):
            other.submit(plan)
        on.trainings.cancel("first")
        on.settle(most=1)
        while True:
            try:
                assert other.submit(plan)[0].state == "running"
                break
            except BadRequest:  # the first engine's thread unlocks the folder soon
                time.sleep(1e-3)
        other.engine.close()
        assert on.submit(plan)[0].state == "running"


def test_a_folder_that_cannot_be_tidied_is_unlocked(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    plan, folder = case.plan("untidy", ["first"]), case.folder / "untidy" / "first"
    with monkeypatch.context() as patched:
        patched.setattr("vlora.training.job.remove_unfinished", refuse)
        with pytest.raises(BadPlan, match=rf"^{folder}: its training cannot be read .*Permission denied"):
            case.engine(plan)
    with lock_folder(folder):
        pass


def test_a_refused_plan_begins_and_changes_nothing(case: Case) -> None:
    """Not even the trainings before the refused one; a cancelled one remains so."""
    plan = case.plan("refused", ["first"])
    with case.running(plan) as on:
        on.settle(most=5)
        on.trainings.cancel("first")
    content = yaml.safe_load(plan.read_text())
    content["trainings"].append({**content["trainings"][0], "name": "more", "targets": ["nothing"]})
    (case.folder / "both.yaml").write_text(yaml.safe_dump(content))
    case.run(case.plan("gone", ["first"]))
    shutil.rmtree(case.folder / "gone" / "first" / "adapter")
    with case.running() as on:
        with pytest.raises(VLoraError, match="no linear layer is named nothing"):
            on.submit(case.folder / "both.yaml")
        with pytest.raises(VLoraError, match="adapter"):  # a finished one whose adapter is gone
            on.submit(case.plan("gone", ["second", "first"]))
        with pytest.raises(OverCapacity, match=r"adapter .first. needs .* pages of the arena"):
            on.submit(case.plan("wide", ["first"], rank=10**9))
        assert not on.states()
    with case.running(plan) as on:
        assert on.status.state == "cancelled"


def row(image: str) -> str:
    return json.dumps({"question": "what ?", "answer": "w1", "image": image}) + "\n"


OCCUPIED: dict[str, tuple[str, bytes, type[VLoraError], str]] = {  # by results, a file and its content
    "occupied": ("occupied", b"no folder", BadConfig, "occupied/first cannot be created: .*; choose another folder"),
    "foreign": (
        "foreign/first/adapter/adapter_config.json",
        b"{}",
        BadPlan,
        "is not of training 'first'; choose anoth",
    ),
    **{
        f"torn {number}": (
            f"torn {number}/first/checkpoint.pt",
            content,
            BadPlan,
            r"cannot be read \(.+\); remove the fo",
        )
        for number, content in enumerate((b"", b"garbage", b"PK\x03\x04" + bytes(100)))
    },
}


@pytest.mark.parametrize("results", OCCUPIED)
def test_folders_that_hold_something_else_are_refused_at_the_start(case: Case, results: str) -> None:
    name, content, kind, message = OCCUPIED[results]
    file = case.folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    with pytest.raises(kind, match=message):
        case.engine(case.plan(results, ["first"]))
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"targets": ["nothing"]}, {}, "targets: no linear layer is named nothing; it has down_proj"),
        ({}, {"switching": "in_place"}, "start with --switching shadow"),
        ({}, {"quantize": "int8"}, "start without --quantize"),
        ({"data": "broken"}, {}, r"questions\.jsonl, line 1: .*/broken/a\.png is not a valid picture"),
        *(
            (numbers, {}, rf"field `trainings\[0\].{next(iter(numbers))}`")
            for numbers in ({"steps": 10**7}, {"batch": 10**6}, {"micro_batch_tokens": 10**6}, {"learning_rate": 1e38})
        ),
        ({"alpha": 1e300}, {}, r"field `trainings\[0\].alpha`"),
    ],
    ids=str,
)
def test_an_engine_that_cannot_train_does_not_start(
    case: Case, changes: dict[str, object], settings: dict[str, object], message: str
) -> None:
    (case.folder / "broken").mkdir(exist_ok=True)
    (case.folder / "broken" / "a.png").write_bytes(b"no picture")
    (case.folder / "broken" / "questions.jsonl").write_text(row("a.png"))
    with pytest.raises((BadPlan, BadConfig), match=message):
        case.engine(case.plan("unable", ["first"], **changes), **settings)


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
@pytest.mark.parametrize("what", ["plan", "data"])
def test_only_files_of_a_limited_size_are_opened(
    case: Case, tmp_path: Path, kind: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading /dev/zero would fill the memory; a pipe without a writer would block all checkpoints."""
    file, reason = tmp_path / "file", "it is not a file"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.write_text(" " * 2**20)
        reason = "has 1048576 bytes; at most 1048575 are read"
        monkeypatch.setattr("vlora.training.records.MAX_BYTES", 2**20 - 1)
    with pytest.raises(BadPlan, match=f"{file}:? .*{reason}"):
        read_plan(file if what == "plan" else case.plan(kind, ["first"], data=str(file)))


def test_text_of_a_plan_that_is_not_unicode_is_refused_in_printable_text(case: Case) -> None:
    """A message with it could not be sent, so the caller would wait for ever."""
    for path in ("a\0b", "\ud800"):
        with pytest.raises(BadPlan, match="is not a path") as found:
            read_plan(path)
        assert str(found.value).encode()
    plan = case.plan("surrogates", ["second"])
    lines = plan.read_text().splitlines()
    for field in ("data", "question", "targets"):
        value = '["\\ud800"]' if field == "targets" else '"\\ud800"'
        kept = [line for line in lines if not line.strip().startswith((f"{field}:", "- o_", "- d"))]
        plan.write_text("\n".join([*kept, f"  {field}: {value}"]))
        with pytest.raises(BadPlan, match=r"\\ud800 cannot be read .*surrogates not allowed") as found:
            read_plan(plan)
        assert str(found.value).encode()


def test_names_in_use_and_other_settings_are_refused(case: Case) -> None:
    plan = case.plan("names", ["first"])
    case.run(case.plan("taken", ["first"]))
    with case.running(plan) as on:
        with pytest.raises(BadRequest, match="training 'first' is running already"):
            on.submit(plan)
        # An adapter that is registered while its name is in training is not replaced.
        on.engine.load_adapter("first", str(case.folder / "taken" / "first" / "adapter"))
        on.settle()
        assert on.status.state == "failed" and "was registered meanwhile" in str(on.status.error)
        on.engine.unload_adapter("first")
        on.submit(plan)
        on.settle()
        for changes in ({"steps": STEPS + 1}, {"seed": 7}):
            with pytest.raises(BadPlan, match="has training 'first' with other settings or data; remove the folder"):
                on.submit(case.plan("names", ["first"], **changes))
        with pytest.raises(BadRequest, match="an adapter 'first' is registered already; unload it first"):
            on.submit(case.plan("other", ["first"]))
        on.submit(case.plan("names", ["first"]))  # it is finished


# -- memory ------------------------------------------------------------------------------------------------------------


def test_trainings_that_do_not_fit_into_memory_are_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a plan together. Negative control: with a little more memory they begin. Then a record does not fit."""
    room = 0
    monkeypatch.setattr("vlora.engine.trainings.free_room", lambda *_: Room("cpu", room))
    plan = case.plan("memory")
    with case.running() as on:
        with pytest.raises(BadRequest, match=r"the training of first, second needs \d\.\d\d GiB .* and 0.00 GiB are f"):
            on.submit(plan)
        assert not on.states()
        room = 2**30
        on.submit(plan)
        assert {state for state, _ in on.states().values()} == {"running"}
        room = 2
        on.settle()
        for status in on.trainings.statuses():
            assert status.state == "failed" and re.match(
                r".*questions\.jsonl, line \d: a record of \d+ tokens needs \d MiB of memory .*, and 0 MiB may be used",
                str(status.error),
            )


def test_few_records_are_prepared_before_they_are_used(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may have a large picture; a batch may have thousands."""
    rows = [{"question": "what ?", "answer": f"w{number % 50}", "split": "train"} for number in range(300)]
    (case.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts, ask = [0], SampleSource.request

    def counted(source: SampleSource, records: Any) -> None:
        counts.append(len(records))
        ask(source, records)

    monkeypatch.setattr(SampleSource, "request", counted)
    plan = case.plan("ahead", ["first"], data="rows.jsonl", batch=300, steps=1, micro_batch_tokens=2000)
    assert [one.state for one in case.run(plan)] == ["finished"] and max(counts) == 16


@pytest.mark.parametrize("length", [10, 300])
@pytest.mark.parametrize(("dtype", "fast"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
def test_the_estimate_of_a_micro_step_bounds_what_autograd_keeps(
    case: Case, dtype: str, fast: bool, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is at most a third above it, without what it adds for one layer at a time and for logits."""
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: fast)
    hf_model = HFModel(load_model(case.config(dtype=dtype)))
    trainer = PackedTrainer(hf_model)
    trainer.add("first", LoraSettings(targets=("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")))
    ids = torch.arange(length) % 100 + 4
    step = trainer.micro_step({"first": [Sample(ids, ids.clone())] * 2})
    weights = {each.untyped_storage().data_ptr() for each in hf_model.model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for _ in range(hf_model.num_layers):
            step.advance()
    step.abandon()
    found = sum(each.untyped_storage().nbytes() for place, each in kept.items() if place not in weights)
    more = trainer.step_bytes([length] * 2, recompute=False) - trainer.step_bytes([length] * 2, recompute=True)
    assert found <= trainer.step_bytes([length] * 2, recompute=False)
    size = hf_model.dtype.itemsize
    assert found <= more + hf_model.num_layers * 2 * length * hf_model.embed.embedding_dim * size <= found * 4 / 3


@pytest.mark.parametrize("share", [1.0, 0.6, 0.3])
def test_a_micro_step_that_does_not_fit_into_memory_is_made_smaller(
    case: Case, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Layers are computed again, records and jobs are taken one by one; losses differ by rounding only."""
    room = 2**40
    monkeypatch.setattr("vlora.engine.trainings.free_room", lambda *_: Room("cpu", 2 * room))
    steps: list[tuple[int, bool]] = []
    micro_step = PackedTrainer.micro_step

    def noted(trainer: PackedTrainer, samples: Any, **settings: Any) -> MicroStep:
        lengths = [len(each.ids) for own in samples.values() for each in own]
        needed = trainer.step_bytes(lengths, recompute=settings["recompute"])
        assert needed <= room
        steps.append((needed, settings["recompute"]))
        return micro_step(trainer, samples, **settings)

    monkeypatch.setattr(PackedTrainer, "micro_step", noted)
    case.run(case.plan(f"whole{share}", steps=1))
    assert not any(recompute for _, recompute in steps)
    room, number = int(share * max(needed for needed, _ in steps)), len(steps)
    assert {one.state for one in case.run(case.plan(f"part{share}", steps=1))} == {"finished"}
    assert any(recompute for _, recompute in steps[number:]) == (share < 1)
    for name in ("first", "second"):
        found, wanted = (losses_of(case.folder / f"{part}{share}" / name) for part in ("part", "whole"))
        assert found == pytest.approx(wanted, abs=1e-5)
