"""Heads: what they decide, and that they come back from disk as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from heads import TASKS, HeadSpec, TaskHead, load_heads, save_heads


def spec(name: str = "kind", **changes: object) -> HeadSpec:
    values = {
        "name": name,
        "task": "classification",
        "labels": ("cat", "dog", "bird"),
        "prompt": "what is it ?",
        "num_frames": 1,
        "hidden_size": 8,
        **changes,
    }
    return HeadSpec(**values)  # type: ignore[arg-type]


def head(name: str = "kind") -> TaskHead:
    generator = torch.Generator().manual_seed(3)
    return TaskHead(spec(name), torch.randn(3, 8, generator=generator), torch.randn(3, generator=generator))


def test_classification_takes_the_likeliest_label() -> None:
    decision = head().decode(torch.tensor([0.0, 2.0, 1.0]))
    assert (decision.label, decision.label_id) == ("dog", 1)
    assert decision.scores == pytest.approx(torch.softmax(torch.tensor([0.0, 2.0, 1.0]), 0).tolist())


def test_classification_learns_towards_the_label() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    TASKS["classification"].loss(logits, torch.tensor([0, 2])).backward()
    assert logits.grad is not None
    assert (logits.grad[0, 0] < 0) and (logits.grad[1, 2] < 0) and (logits.grad[0, 1] > 0)


def test_heads_come_back_from_disk(tmp_path: Path) -> None:
    save_heads(tmp_path, {"a": head("a"), "b": head("b")})
    found = load_heads(tmp_path)
    assert list(found) == ["a", "b"]
    assert found["b"].spec == spec("b")
    assert torch.equal(found["b"].weight, head("b").weight) and torch.equal(found["b"].bias, head("b").bias)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": ""}, "name is empty"),
        ({"task": "alchemy"}, "'alchemy'; known: action, classification"),
        ({"labels": ("one",)}, "two or more"),
        ({"labels": ("same", "same")}, "different"),
        ({"prompt": " "}, "prompt is empty"),
        ({"num_frames": 0}, "num_frames is 0"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_frames": "four"}, "num_frames is 'four'; expected int"),
        ({"name": 7}, "name is 7; expected str"),
        ({"labels": ("cat", 3)}, "every label"),
    ],
)
def test_specs_that_cannot_work(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        spec(**changes)  # type: ignore[arg-type]


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"weight \(2, 8\)"):
        TaskHead(spec(), torch.zeros(2, 8), torch.zeros(3))
    with pytest.raises(ValueError, match="not finite"):
        TaskHead(spec(), torch.full((3, 8), float("nan")), torch.zeros(3))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    save_heads(tmp_path, {"kind": head()})
    good = json.loads((tmp_path / "heads.json").read_text())
    for spoiled, text in (
        ("{", "cannot be read"),
        (json.dumps({**good, "format": 99}), "format is 99"),
        (json.dumps({**good, "heads": []}), "tensors without a head"),
        (json.dumps({**good, "heads": [{**good["heads"][0], "name": "other"}]}), "lacks"),
        (json.dumps({**good, "heads": [{**good["heads"][0], "extra": 1}]}), "extra"),
        (json.dumps({**good, "heads": [{**good["heads"][0], "labels": 5}]}), "heads.json"),
        (json.dumps({**good, "heads": ["kind"]}), "heads.json"),
        (json.dumps({**good, "heads": 5}), "heads.json"),
    ):
        (tmp_path / "heads.json").write_text(spoiled)
        with pytest.raises(ValueError, match=text):
            load_heads(tmp_path)


def test_weights_that_are_cut_short(tmp_path: Path) -> None:
    save_heads(tmp_path, {"kind": head()})
    file = tmp_path / "heads.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"heads.safetensors: cannot be read"):
        load_heads(tmp_path)
