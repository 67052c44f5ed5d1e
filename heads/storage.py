"""Heads on disk, beside the adapter's PEFT files: `heads.json` describes them, `heads.safetensors` holds their rows.

Format 2 has `parameters`, the task's parameters besides its labels, and format 3 `reads` and `hidden_units`. Formats 1
and 2 can still be read.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from heads.answer import Answer, Grid
from heads.task import Task
from heads.tasks import make_task


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A head's description: the task it was trained for, and its input.

    prompt: the question to the model, exactly as in training. num_frames: images per request. parameters: the task's
    parameters besides labels and rows, by name (see each task); omitted ones get their default. reads: `states`, the
    model's last hidden states, or `inputs`, the language model's inputs at image tokens, which only heads over image
    tokens can read. hidden_units: units of a layer before the rows, 0 for none; only heads that read inputs have one.

    Raises:
        ValueError: if a value is invalid. Types are checked where a file is read.
    """

    name: str
    task: str
    labels: tuple[str, ...]
    prompt: str
    num_frames: int
    hidden_size: int
    parameters: Mapping[str, int | float | tuple[int | float, ...]] = {}
    reads: str = "states"
    hidden_units: int = 0

    def __post_init__(self) -> None:
        if not all(self.labels):
            raise ValueError(f"head {self.name!r}: labels are {self.labels!r}; every label must be a non-empty string")
        if not self.name:
            raise ValueError("name is empty; requests select a head by its name")
        if not self.prompt.strip():
            raise ValueError(f"head {self.name!r}: prompt is empty; give the question used in training")
        if self.num_frames < 1:
            raise ValueError(f"head {self.name!r}: num_frames is {self.num_frames}; it must be at least 1")
        if self.hidden_size < 1:
            raise ValueError(f"head {self.name!r}: hidden_size is {self.hidden_size}; it must be at least 1")
        task, units = self.make_task(), self.hidden_units
        msgspec.structs.force_setattr(self, "parameters", dict(task.parameters))
        if self.reads not in ("states", "inputs"):
            raise ValueError(f"head {self.name!r}: reads is {self.reads!r}; choose states or inputs")
        if self.reads == "inputs" and not task.reads_images:
            raise ValueError(f"head {self.name!r}: reads is 'inputs'; a {self.task} head reads states")
        if (units > 0) != (self.reads == "inputs"):
            wanted = "at least 1" if self.reads == "inputs" else "0"
            raise ValueError(
                f"head {self.name!r}: hidden_units is {units!r}; a head that reads {self.reads} has {wanted}"
            )

    def make_task(self) -> Task:
        """The task of this head. Raises ValueError for an invalid description."""
        try:
            return make_task(self.task, self.labels, self.parameters)
        except ValueError as error:
            raise ValueError(f"head {self.name!r}: {error}") from error


class TaskHead:
    """A head's spec and its weight [rows, features] and bias [rows].

    Args:
        hidden: weight [hidden_units, hidden_size] and bias of the layer before the rows; None without one. The features
            are its units, else the hidden states.

    Raises:
        ValueError: if shapes do not match the spec or values are not finite.
    """

    def __init__(
        self,
        spec: HeadSpec,
        weight: torch.Tensor,
        bias: torch.Tensor,
        hidden: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.task = spec.make_task()
        count, units = self.task.num_outputs, spec.hidden_units
        features = units or spec.hidden_size
        if tuple(weight.shape) != (count, features) or tuple(bias.shape) != (count,):
            raise ValueError(
                f"head {spec.name!r}: weight {tuple(weight.shape)} and bias {tuple(bias.shape)} do not fit "
                f"{count} rows ({spec.task}, {len(spec.labels)} labels) over {features} features"
            )
        shapes = [tuple(tensor.shape) for tensor in hidden or ()]
        if shapes != ([(units, spec.hidden_size), (units,)] if units else []):
            raise ValueError(
                f"head {spec.name!r}: weight and bias of the hidden layer are {shapes or 'absent'}; they do not fit "
                f"{units} units over {spec.hidden_size} features"
            )
        if not all(torch.isfinite(tensor).all() for tensor in (weight, bias, *(hidden or ()))):
            raise ValueError(f"head {spec.name!r}: weight or bias has values that are not finite (NaN or infinity)")
        self.spec = spec
        self.weight = weight
        self.bias = bias
        self.hidden = hidden

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> TaskHead:
        """The same head on another device or in another dtype."""
        weight, bias, *hidden = (tensor.to(device, dtype) for tensor in (self.weight, self.bias, *(self.hidden or ())))
        return TaskHead(self.spec, weight, bias, (hidden[0], hidden[1]) if hidden else None)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """The logits [n, outputs] of rows [n, hidden_size] of what the head reads, in the dtype of its weight.

        Inputs are normalised by their root mean square, since their scale depends on the vision tower.
        """
        rows = rows.to(self.weight.dtype)
        if self.hidden is not None:
            rows = F.gelu(F.linear(F.rms_norm(rows, rows.shape[-1:]), *self.hidden))
        return F.linear(rows, self.weight, self.bias)

    def decode(self, logits: torch.Tensor, grids: Sequence[Grid] = ()) -> Answer:
        """Decode this head's logits to an answer; `Task` documents their shape."""
        return self.task.decode(logits, grids)


SPEC_FILE = "heads.json"
WEIGHTS_FILE = "heads.safetensors"
FORMAT = 3
_READ = (1, 2, 3)
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
    described = {"format": FORMAT, "heads": [head.spec for head in heads.values()]}
    content = msgspec.json.encode(described, enc_hook=operator.methodcaller("item"))  # of numpy's values
    (folder / SPEC_FILE).write_bytes(msgspec.json.format(content) + b"\n")


class _SpecFile(msgspec.Struct):
    format: int
    heads: msgspec.Raw


def load_heads(folder: Path | str) -> dict[str, TaskHead]:
    """Read an adapter's heads by name. Raises ValueError with file, head and field for invalid content."""
    folder = Path(folder)
    file = folder / SPEC_FILE
    try:
        content = msgspec.json.decode(file.read_bytes(), type=_SpecFile)
        if content.format not in _READ:
            raise ValueError(f"{file}: format is {content.format}, this version reads {', '.join(map(str, _READ))}")
        specs = msgspec.json.decode(content.heads, type=list[HeadSpec])
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from error
    try:
        tensors = load((folder / WEIGHTS_FILE).read_bytes())  # a mapped file could change, or end the process
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS_FILE}: cannot be read ({error})") from error
    heads: dict[str, TaskHead] = {}
    for spec in specs:
        try:
            weight, bias = tensors.pop(f"{spec.name}.weight"), tensors.pop(f"{spec.name}.bias")
            hidden = [tensors.pop(f"{spec.name}.{part}") for part in _HIDDEN] if spec.hidden_units else []
            heads[spec.name] = TaskHead(spec, weight, bias, (hidden[0], hidden[1]) if hidden else None)
        except KeyError as error:
            raise ValueError(f"{folder / WEIGHTS_FILE}: head {spec.name!r} lacks {error}") from error
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    if tensors:
        raise ValueError(f"{folder / WEIGHTS_FILE}: tensors without a head: {', '.join(sorted(tensors))}")
    return heads
