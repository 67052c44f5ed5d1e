"""Heads on disk: round trips, and invalid files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heads import HeadSpec, TaskHead, load_heads, save_heads


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


TASKS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "binary": (("no", "yes"), {"threshold": 0.25, "temperature": 1.75}),
    "regression": (
        (np.str_("speed"),),
        {"offset": (np.float64(1.5),), "scale": (2.0,), "tolerance": (0.5,), "deviations": (0.25,)},
    ),
    "detection": (("car",), {"threshold": 0.25, "overlap": 0.75, "temperature": 0.5}),
}


def test_heads_come_back_from_disk_as_they_were_saved_last(tmp_path: Path) -> None:
    heads = {"a": head("a")}
    for task, (labels, parameters) in TASKS.items():
        own = spec(task, task=task, labels=labels, parameters=parameters)
        count = own.make_task().num_outputs
        heads[task] = TaskHead(own, torch.randn(count, 8), torch.randn(count))
    save_heads(tmp_path, heads)
    assert json.loads((tmp_path / "heads.json").read_text())["format"] == 3
    trained = TaskHead(spec("a"), head().weight + 1, head().bias - 1)
    for written in (heads, {**heads, "a": trained}, {"a": head("a")}):  # another version of one head, then one head
        save_heads(tmp_path, written)
        found = load_heads(tmp_path)
        assert list(found) == list(written)
        for name, want in written.items():
            assert found[name].task == want.task and found[name].spec == want.spec
            assert torch.equal(found[name].weight, want.weight) and torch.equal(found[name].bias, want.bias)
    (entry,) = json.loads((tmp_path / "heads.json").read_text())["heads"]
    del entry["parameters"]  # as the first format
    (tmp_path / "heads.json").write_text(json.dumps({"format": 1, "heads": [entry]}))
    assert load_heads(tmp_path)["a"].spec == spec("a")


def kind(task: str, *labels: str, **parameters: Any) -> dict[str, Any]:
    return {"task": task, "labels": labels, "parameters": parameters}


MEASURES = {"offset": (1.0,), "scale": (1.0,), "tolerance": (1.0,), "deviations": (1.0,)}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": ""}, "name is empty"),
        ({"task": "alchemy"}, "'alchemy'; known: action, binary, classification, counting, detection"),
        ({"labels": ("one",)}, "two or more"),
        ({"labels": ("same", "same")}, "distinct"),
        ({"prompt": " "}, "prompt is empty"),
        ({"num_frames": 0}, "num_frames is 0"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"labels": ("cat", "")}, "every label"),
        ({"parameters": {"threshold": 0.5}}, "head 'kind': parameter 'threshold' is not one of a classification head"),
        (kind("classification", "a", "b", temperature=0), "temperature is 0; it must be a finite number above 0"),
        (kind("classification", "a", "b", temperature=float("nan")), "temperature is nan"),
        (kind("classification", "a", "b", temperature=True), "temperature is True"),
        (kind("binary", "a", "b", "c"), "needs two"),
        (kind("binary", "a", "b", threshold=1.5), "threshold is 1.5; it must be between 0 and 1"),
        (kind("binary", "a", "b", threshold="high"), "threshold is 'high'"),
        (kind("multi_label"), "one or more"),
        (kind("regression", "x"), "needs the parameter 'offset'"),
        (kind("regression", "x", **MEASURES | {"scale": (0.0,)}), "scale is 0.0"),
        (kind("regression", "x", **MEASURES | {"offset": 1.0}), "for each of 1"),
        (kind("regression", "x", **MEASURES | {"offset": ("1",)}), "offset is '1'"),
        (kind("detection", "car", overlap=0), "overlap is 0"),
        (kind("detection", "car", "car"), "distinct"),
    ],
)
def test_invalid_specs_are_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        spec(**changes)  # type: ignore[arg-type]


def test_files_and_weights_that_cannot_be_used(tmp_path: Path) -> None:
    for weight, message in ((torch.zeros(2, 8), r"weight \(2, 8\)"), (torch.full((3, 8), torch.nan), "not finite")):
        with pytest.raises(ValueError, match=message):
            TaskHead(spec(), weight, torch.zeros(3))
    save_heads(tmp_path, {"kind": head()})
    good = json.loads((tmp_path / "heads.json").read_text())
    (entry,) = good["heads"]
    without = {name: value for name, value in entry.items() if name != "prompt"}
    for spoiled, text in (
        ({"format": 99}, "format is 99"),
        ({"heads": []}, "tensors without a head"),
        ({"heads": ["kind"]}, "heads.json"),
        ({"heads": 5}, "heads.json"),
        ({"heads": [without]}, "missing required field `prompt`"),
        ({"heads": [{**entry, "name": "other"}]}, "lacks"),
        ({"heads": [{**entry, "extra": 1}]}, "unknown field `extra`"),
        *(
            ({"heads": [{**entry, field: value}]}, rf"heads.json: Expected .*`\$\[0\]\.{field}")
            for field, value in (
                *(("labels", 5), ("labels", ["cat", 3]), ("num_frames", "four"), ("name", 7), ("hidden_size", True)),
                *(("parameters", None), ("parameters", [1]), ("parameters", {"temperature": "high"})),
                *(("parameters", {"temperature": True}), ("hidden_units", True)),
            )
        ),
        ({"heads": [{**entry, "parameters": {"temperature": -1}}]}, "head 'kind': temperature is -1"),
        ({"heads": [{**entry, "task": "binary"}]}, "needs two"),
        (b"{", "heads.json: .*truncated"),
        (b"[" * 100_000, "heads.json: "),
        (b'"\xff"', "heads.json: "),
    ):
        assert isinstance(spoiled, dict | bytes)
        written = spoiled if isinstance(spoiled, bytes) else json.dumps({**good, **spoiled}).encode()
        (tmp_path / "heads.json").write_bytes(written)
        with pytest.raises(ValueError, match=text):
            load_heads(tmp_path)
    save_heads(tmp_path, {"kind": head()})
    file = tmp_path / "heads.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"heads.safetensors: cannot be read"):
        load_heads(tmp_path)
