"""Heads on disk: round trips, and invalid files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def test_a_tasks_parameters_come_back_from_disk(tmp_path: Path) -> None:
    measures = {"offset": (1.5,), "scale": (2.0,), "tolerance": (0.5,), "deviations": (0.25,)}
    tasks: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "binary": (("no", "yes"), {"threshold": 0.25, "temperature": 1.75}),
        "regression": (("speed",), measures),
        "detection": (("car",), {"threshold": 0.25, "overlap": 0.75, "temperature": 0.5}),
    }
    heads = {}
    for task, (labels, parameters) in tasks.items():
        own = spec(task, task=task, labels=labels, parameters=parameters)
        count = own.make_task().num_outputs
        heads[task] = TaskHead(own, torch.randn(count, 8), torch.randn(count))
    save_heads(tmp_path, heads)
    assert json.loads((tmp_path / "heads.json").read_text())["format"] == 3
    found = load_heads(tmp_path)
    for task, (_, parameters) in tasks.items():
        assert found[task].task == heads[task].task and found[task].spec == heads[task].spec
        assert found[task].spec.parameters == parameters


def test_heads_of_the_first_format_are_read(tmp_path: Path) -> None:
    save_heads(tmp_path, {"kind": head()})
    (entry,) = json.loads((tmp_path / "heads.json").read_text())["heads"]
    del entry["parameters"]
    (tmp_path / "heads.json").write_text(json.dumps({"format": 1, "heads": [entry]}))
    assert load_heads(tmp_path)["kind"].spec == spec()


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
        ({"task": "alchemy"}, "'alchemy'; known: action, binary, classification, counting, detection"),
        ({"labels": ("one",)}, "two or more"),
        ({"labels": ("same", "same")}, "distinct"),
        ({"prompt": " "}, "prompt is empty"),
        ({"num_frames": 0}, "num_frames is 0"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_frames": "four"}, "num_frames is 'four'; expected int"),
        ({"name": 7}, "name is 7; expected str"),
        ({"labels": ("cat", 3)}, "every label"),
        ({"hidden_size": True}, "hidden_size is True; expected int"),
        ({"parameters": {"threshold": 0.5}}, "head 'kind': parameter 'threshold' is not one of a classification head"),
        ({"parameters": [1]}, r"parameters are \[1\]; expected a mapping"),
    ],
)
def test_invalid_specs_are_refused(changes: dict[str, object], text: str) -> None:
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
        (json.dumps({**good, "heads": [{**good["heads"][0], "extra": 1}]}), "unknown field 'extra'; known: name, task"),
        (
            json.dumps({**good, "heads": [{k: v for k, v in good["heads"][0].items() if k != "prompt"}]}),
            "no field 'prompt'",
        ),
        (
            json.dumps({**good, "heads": [{**good["heads"][0], "labels": 5}]}),
            "labels is 5; it must be a list of strings",
        ),
        (json.dumps({**good, "heads": ["kind"]}), "heads.json"),
        (json.dumps({**good, "heads": 5}), "heads.json"),
        (json.dumps({**good, "heads": [{**good["heads"][0], "parameters": {"temperature": -1}}]}), "temperature is -1"),
        (json.dumps({**good, "heads": [{**good["heads"][0], "parameters": None}]}), "parameters are None"),
        (json.dumps({**good, "heads": [{**good["heads"][0], "task": "binary"}]}), "needs two"),
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
