"""Plans and data are bounded: nothing that a plan names ends, fills or blocks the engine's process."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from atmm import processor
from tests.training.beside import Case, losses_of, settle, states, submit
from vlora.engine.limits import Room
from vlora.errors import BadPlan, BadRequest, OverCapacity
from vlora.models.hf_model import HFModel
from vlora.models.loading import load_model
from vlora.training import LoraSettings, MicroStep, PackedTrainer, Sample
from vlora.training.plan import read_plan
from vlora.training.samples import SampleSource


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
@pytest.mark.parametrize("what", ["plan", "data"])
def test_only_files_of_a_limited_size_are_opened(
    case: Case, tmp_path: Path, kind: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading /dev/zero would fill the memory; a pipe without a writer would block all checkpoints."""
    file = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.write_text(" " * 2**20)
        monkeypatch.setattr("vlora.training.records.MAX_BYTES", 2**20 - 1)
    plan = file if what == "plan" else case.plan(f"{kind}", ["first"], data=str(file))
    reason = "has 1048576 bytes; at most 1048575 are read" if kind == "large" else "it is not a file"
    with pytest.raises(BadPlan, match=f"{file}:? .*{reason}"):
        read_plan(plan)


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
def test_a_plan_that_is_no_path_is_refused_in_printable_text(path: str) -> None:
    with pytest.raises(BadPlan, match="is not a path") as found:
        read_plan(path)
    assert str(found.value).encode()


@pytest.mark.parametrize("field", ["data", "question", "targets"])
def test_text_of_a_plan_that_is_not_unicode_is_refused(case: Case, field: str) -> None:
    """A message with it could not be sent, so the caller would wait for ever."""
    value = '["\\ud800"]' if field == "targets" else '"\\ud800"'
    plan = case.plan("surrogates", ["second"])
    kept = [line for line in plan.read_text().splitlines() if not line.strip().startswith((f"{field}:", "- o_", "- d"))]
    plan.write_text("\n".join([*kept, f"  {field}: {value}"]))
    with pytest.raises(BadPlan, match=r"\\ud800 cannot be read .*surrogates not allowed") as found:
        read_plan(plan)
    assert str(found.value).encode()


@pytest.mark.parametrize("row", ["[" * 100_000, json.dumps({"question": "q", "answer": list(range(100_000))})])
def test_lines_that_are_no_records_give_short_errors(case: Case, row: str) -> None:
    (case.folder / "odd.jsonl").write_text(row + "\n")
    with pytest.raises(BadPlan, match=r"odd\.jsonl, line 1: ") as found:
        read_plan(case.plan("odd", ["first"], data="odd.jsonl"))
    assert len(str(found.value)) < 1000


@pytest.mark.parametrize(
    "changes",
    [{"steps": 10**7}, {"batch": 10**6}, {"micro_batch_tokens": 10**6}, {"learning_rate": 1e38}, {"alpha": 1e300}],
    ids=str,
)
def test_numbers_without_a_use_are_refused(case: Case, changes: dict[str, Any]) -> None:
    with pytest.raises(BadPlan, match=rf"field `trainings\[0\].{next(iter(changes))}`"):
        read_plan(case.plan("numbers", ["first"], **changes))


def test_an_adapter_that_cannot_be_served_is_not_trained(case: Case) -> None:
    engine = case.engine()
    with pytest.raises(OverCapacity, match=r"adapter .first. needs .* pages of the arena"):
        submit(engine, case.plan("wide", ["first"], rank=10**9))
    assert not states(engine)
    engine.close()


def test_trainings_that_do_not_fit_into_memory_are_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a plan together. Negative control: with a little more memory they begin."""
    engine = case.engine()
    free = [0]
    monkeypatch.setattr("vlora.engine.trainings.free_room", lambda *_: Room("cpu", free[0]))
    plan = case.plan("memory")
    with pytest.raises(BadRequest, match=r"the training of first, second needs \d\.\d\d GiB .* and 0.00 GiB are free"):
        submit(engine, plan)
    assert not states(engine)
    free[0] = 2**30
    submit(engine, plan)
    assert states(engine) == {"first": "running", "second": "running"}
    engine.close()


def test_few_records_are_prepared_before_they_are_used(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may have a large picture; a batch may have thousands."""
    rows = [{"question": "what ?", "answer": f"w{number % 50}", "split": "train"} for number in range(300)]
    (case.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    most = [0]
    request = SampleSource.request

    def counted(source: SampleSource, records: Any) -> None:
        most[0] = max(most[0], len(records))
        request(source, records)

    monkeypatch.setattr(SampleSource, "request", counted)
    engine = case.engine(case.plan("ahead", ["first"], data="rows.jsonl", batch=300, steps=1, micro_batch_tokens=2000))
    settle(engine.parts.trainings, engine)
    assert states(engine) == {"first": "finished"}
    assert most[0] == 16
    engine.close()


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
    engine = case.engine()
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
    submit(engine, case.plan(f"whole{share}", steps=1))
    settle(engine.parts.trainings, engine)
    assert not any(recompute for _, recompute in steps)
    room, number = int(share * max(needed for needed, _ in steps)), len(steps)
    for name in ("first", "second"):
        engine.unload_adapter(name)
    submit(engine, case.plan(f"part{share}", steps=1))
    settle(engine.parts.trainings, engine)
    assert set(states(engine).values()) == {"finished"}
    assert any(recompute for _, recompute in steps[number:]) == (share < 1)
    for name in ("first", "second"):
        found, wanted = (losses_of(case.folder / f"{part}{share}" / name) for part in ("part", "whole"))
        assert found == pytest.approx(wanted, abs=1e-5)
    engine.close()


def test_a_record_that_does_not_fit_into_memory_fails_its_training(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 2**30
    monkeypatch.setattr("vlora.engine.trainings.free_room", lambda *_: Room("cpu", room))
    engine = case.engine(case.plan("none", ["first"]))
    room = 2
    settle(engine.parts.trainings, engine)
    (status,) = engine.parts.trainings.statuses()
    assert status.state == "failed" and status.error is not None
    assert re.match(
        r".*questions\.jsonl, line \d: a record of \d+ tokens needs \d MiB of memory .*, and 0 MiB may be used",
        status.error,
    )
    engine.close()
