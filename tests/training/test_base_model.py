"""A training belongs to its base model, and may begin from an adapter."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training.beside import Case, adapter_of, losses_of, settle
from vlora.errors import BadPlan


def other_model(case: Case, layer: str) -> Case:
    """The same model but for one layer's weight."""
    folder = case.folder / f"other {layer}"
    shutil.copytree(case.model, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (name,) = [one for one in tensors if one.endswith(layer)]
    tensors[name] = tensors[name] + 0.125
    save_file(tensors, file, metadata={"format": "pt"})
    return dataclasses.replace(case, model=str(folder))


@pytest.mark.parametrize("layer", ["layers.0.self_attn.q_proj.weight", "embed_tokens.weight"])
def test_a_training_does_not_continue_on_another_base_model(case: Case, layer: str) -> None:
    plan = case.plan(f"on one {layer}", ["first"])
    engine = case.engine(plan)
    settle(engine.parts.trainings, engine, most=12)
    assert engine.parts.trainings.statuses()[0].state == "running"
    engine.close()
    with pytest.raises(BadPlan, match="has training 'first' of another base model; serve that one, remove the folder"):
        other_model(case, layer).engine(plan)
    again = case.engine(plan)  # the negative control
    settle(again.parts.trainings, again)
    assert again.parts.trainings.statuses()[0].state == "finished"
    again.close()


def test_the_type_of_the_weights_does_not_matter(case: Case) -> None:
    plan = case.plan("two types", ["first"])
    for dtype in ("float32", "bfloat16"):
        engine = case.engine(plan, dtype=dtype)
        settle(engine.parts.trainings, engine, most=12 if dtype == "float32" else 10**6)
        engine.close()
    assert json.loads((case.folder / "two types" / "first" / "training.json").read_text())["state"] == "finished"


def test_a_training_may_begin_from_an_adapter(case: Case) -> None:
    whole = case.engine(case.plan("begun", ["first"]))
    settle(whole.parts.trainings, whole)
    start = case.folder / "begun" / "first" / "adapter"
    plan = case.plan("continued", ["first"], start=str(start), learning_rate=1e-9, register_adapter=False)
    engine = case.engine(plan)
    settle(engine.parts.trainings, engine)
    first, second = (adapter_of(case.folder / name / "first") for name in ("begun", "continued"))
    assert all(torch.allclose(first[key], second[key], atol=1e-6) for key in first)
    assert losses_of(case.folder / "continued" / "first")[0] < losses_of(case.folder / "begun" / "first")[0]
    assert [one.name for one in engine.adapters()] == [], "it is not registered"
    assert engine.parts.trainings.statuses()[0].state == "finished"


def change_config(folder: Path) -> None:
    found = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(found | {"r": 3}))


def remove_a_factor(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_config, r"has \(rank, alpha, rslora\) \(3, 4.0, False\); the training has \(2, 4.0, False\)"),
        (remove_a_factor, "cannot be read: "),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"{"), "cannot be read: "),
        (shutil.rmtree, "cannot be read: "),
    ],
    ids=["other rank", "a factor is missing", "broken", "no folder"],
)
def test_an_unusable_beginning_is_refused(
    case: Case, tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    engine = case.engine()
    parts = engine.parts.trainings
    parts.start(str(case.plan(f"base of {tmp_path.name}", ["first"], steps=1)))
    settle(parts, engine)
    start = tmp_path / "start"
    shutil.copytree(case.folder / f"base of {tmp_path.name}" / "first" / "adapter", start)
    change(start)
    engine.unload_adapter("first")
    with pytest.raises(BadPlan, match=f"`start` of training 'first', .*start, {message}"):
        parts.start(str(case.plan(f"from {tmp_path.name}", ["first"], start=str(start))))
