"""Finished trainings on disk, so that a run that was killed is resumed, and a run of a changed plan trains only what
the change affects.

Each FOLDER/KEY/ has one training: state.safetensors, trained.json, and a file for each value measured with it; the
folder of `UNTRAINED` has those measured with the base model alone. Random draws depend on the seed and on what is
trained, not on earlier draws, so no generator state is stored.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fusion.training.fingerprint import ALL
from heads.storage import write_tensors
from vlora.errors import BadPlan
from vlora.run_folder import remove_unfinished, whole, write_whole, writing

Value = TypeVar("Value")
State = dict[str, torch.Tensor]
_PACKING = "packing.json"


class Key(NamedTuple):
    """A training. what: its domains, in which order and how, and inputs: what its result depends on otherwise
    (`fusion.training.fingerprint.Inputs`), for readers. identity: both, without the domains' names."""

    what: str
    inputs: Mapping[str, Mapping[str, str]]
    identity: str
    size: int = 1  # in single-domain trainings

    @property
    def folder(self) -> str:
        return _short_hash(self.identity)


UNTRAINED = Key("no training", {}, "no training", 0)


class Checkpoint:
    """Trainings, and values that were measured with them, by what they depend on."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self._folder = folder
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)

    def trained(self, key: Key) -> tuple[float, tuple[float, ...]] | None:
        """The seconds and the losses of a training, None if it is not stored."""
        found = self._read(self._folder / key.folder / "trained.json", _Trained)
        return None if found is None else (found.seconds, found.losses)

    def state(self, key: Key) -> State:
        file = self._folder / key.folder / "state.safetensors"
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            raise _damaged(file) from error

    def keep(self, key: Key, seconds: float, losses: Sequence[float], state: Mapping[str, torch.Tensor]) -> None:
        """Write a training atomically: if the process dies while writing, nothing is stored."""
        place = self._folder / key.folder
        stored = {name: tensor.contiguous().cpu() for name, tensor in state.items()}
        content = msgspec.json.encode(_Trained(key.what, key.inputs, key.size, seconds, tuple(losses)))
        # Another process may store it first; training is deterministic.
        with writing(place), whole(place) as part:
            part.mkdir()
            write_tensors(stored, part / "state.safetensors")
            (part / "trained.json").write_bytes(msgspec.json.format(content, indent=1))

    def measured(self, key: Key, what: str, kind: type[Value]) -> Value | None:
        """A value that was measured with a training, None if it is not stored. what: all that it depends on."""
        return self._read(self._folder / key.folder / f"{_short_hash(what)}.json", kind)

    def keep_measured(self, key: Key, what: str, value: object) -> None:
        self._write(self._folder / key.folder / f"{_short_hash(what)}.json", value)

    def packing(self, kind: type[Value]) -> Value | None:
        """The packing of the last run that finished, None before the first one."""
        return self._read(self._folder / _PACKING, kind)

    def keep_packing(self, value: object) -> None:
        self._write(self._folder / _PACKING, value)

    def inputs(self) -> list[Mapping[str, Mapping[str, str]]]:
        """The inputs of each training, the latest last."""
        return [one.inputs for one in self._all()]

    def seconds(self, shared: Mapping[str, str]) -> float | None:
        """The mean seconds of a single-domain training with these inputs of all trainings; None if none is stored."""
        alike = [one for one in self._all() if one.inputs.get(ALL) == shared]
        return sum(one.seconds for one in alike) / sum(one.size for one in alike) if alike else None

    def _all(self) -> list[_Trained]:
        files = sorted(self._folder.glob("*/trained.json"), key=lambda file: file.stat().st_mtime)
        return [found for file in files if (found := self._read(file, _Trained)) is not None]

    def _read(self, file: Path, kind: type[Value]) -> Value | None:
        try:
            return msgspec.json.decode(file.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _damaged(file) from error

    def _write(self, file: Path, value: object) -> None:
        with writing(file):
            file.parent.mkdir(exist_ok=True)
            write_whole(file, msgspec.json.encode(value))


class _Trained(msgspec.Struct):
    what: str
    inputs: Mapping[str, Mapping[str, str]]
    size: int
    seconds: float
    losses: tuple[float, ...]


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _damaged(file: Path) -> BadPlan:
    """A run writes atomically, even if it is killed, so a damaged file was changed by another program, or is of another
    version."""
    return BadPlan(f"{file} is damaged, so the run cannot be resumed; give --restart instead of --resume")
