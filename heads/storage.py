"""Heads on disk, beside the adapter's PEFT files: `heads.json` describes them, `heads.safetensors` holds their rows.

Format 2 has `parameters`, the task's parameters besides its labels, and format 3 `reads` and `hidden_units`. Formats 1
and 2 can still be read.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from heads.spec import HeadSpec, TaskHead

SPEC_FILE = "heads.json"
WEIGHTS_FILE = "heads.safetensors"
FORMAT = 3
_READ = (1, 2, 3)
_NOT_IN_EVERY_FORMAT = ("parameters", "reads", "hidden_units")
_HIDDEN = ("hidden.weight", "hidden.bias")


def write_tensors(tensors: Mapping[str, torch.Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a file of safetensors, with the permissions of any new file: safetensors' own keep other users out."""
    try:
        save_file(dict(tensors), str(file), metadata)
        give_usual_mode(file)
    except BaseException:
        file.unlink(missing_ok=True)  # a part would keep a full disk full
        raise


def give_usual_mode(file: Path) -> None:
    new = file.with_name(f".{file.name}-{os.getpid()}")
    new.touch()
    file.chmod(new.stat().st_mode & 0o777)
    new.unlink()


def save_heads(folder: Path | str, heads: Mapping[str, TaskHead]) -> None:
    """Write all heads of an adapter, replacing existing ones."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, head in heads.items():
        tensors[f"{name}.weight"] = head.weight.detach().cpu().contiguous()
        tensors[f"{name}.bias"] = head.bias.detach().cpu().contiguous()
        if head.hidden is not None:
            for part, tensor in zip(_HIDDEN, head.hidden, strict=True):
                tensors[f"{name}.{part}"] = tensor.detach().cpu().contiguous()
    write_tensors(tensors, folder / WEIGHTS_FILE)
    specs = [dataclasses.asdict(head.spec) for head in heads.values()]
    (folder / SPEC_FILE).write_text(json.dumps({"format": FORMAT, "heads": specs}, indent=2) + "\n")


def load_heads(folder: Path | str) -> dict[str, TaskHead]:
    """Read an adapter's heads by name. Raises ValueError with file, head and field for invalid content."""
    folder = Path(folder)
    file = folder / SPEC_FILE
    try:
        content = json.loads(file.read_text())
        entries = content["heads"]
        version = content["format"]
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        where = f" (see line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{file}: cannot be read as JSON{where}") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file}: cannot be read: it must be an object with the fields format and heads") from error
    if version not in _READ:
        raise ValueError(f"{file}: format is {version!r}, this version reads {', '.join(map(str, _READ))}")
    try:
        tensors = load((folder / WEIGHTS_FILE).read_bytes())  # a mapped file could change, or end the process
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS_FILE}: cannot be read ({error})") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{file}: heads is {entries!r}; expected a list of objects, one per head")
    heads: dict[str, TaskHead] = {}
    for entry in entries:
        try:
            spec = HeadSpec(**_spec(entry))
            weight, bias = tensors.pop(f"{spec.name}.weight"), tensors.pop(f"{spec.name}.bias")
            hidden = [tensors.pop(f"{spec.name}.{part}") for part in _HIDDEN] if spec.hidden_units else []
            head = TaskHead(spec, weight, bias, (hidden[0], hidden[1]) if hidden else None)
        except KeyError as error:
            raise ValueError(f"{folder / WEIGHTS_FILE}: head {entry.get('name')!r} lacks {error}") from error
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        heads[spec.name] = head
    if tensors:
        raise ValueError(f"{folder / WEIGHTS_FILE}: tensors without a head: {', '.join(sorted(tensors))}")
    return heads


def _spec(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry's fields, with JSON lists converted to tuples. Raises ValueError for unknown or missing fields."""
    head, known = f"head {entry.get('name')!r}", [field.name for field in dataclasses.fields(HeadSpec)]
    for name in entry:
        if name not in known:
            raise ValueError(f"{head} has an unknown field {name!r}; known: {', '.join(known)}")
    for name in known:
        if name not in entry and name not in _NOT_IN_EVERY_FORMAT:
            raise ValueError(f"{head} has no field {name!r}")
    if not isinstance(entry["labels"], list):
        raise ValueError(f"{head}: labels is {entry['labels']!r}; it must be a list of strings")
    fields = {**entry, "labels": tuple(entry["labels"])}
    parameters = entry.get("parameters", {})
    if isinstance(parameters, dict):
        fields["parameters"] = {k: tuple(v) if isinstance(v, list) else v for k, v in parameters.items()}
    return fields
