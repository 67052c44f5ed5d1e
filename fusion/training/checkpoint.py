"""Finished trainings on disk, so that a run that was killed can be resumed.

FOLDER/run.json contains the run's identity; each FOLDER/KEY/ contains one training: state.safetensors and trained.json.
Random draws depend on the seed and on what is trained, not on earlier draws, so no generator state is stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fusion.packing.algorithm import Score, TrainingResult
from fusion.training.resume_hint import UNFINISHED
from vlora.errors import BadPlan

_MADE_OF = "run.json"
State = dict[str, torch.Tensor]


class Checkpoint:
    """Trainings by key. identity: names and values of everything that determines the result of a training."""

    def __init__(self, folder: Path, identity: Mapping[str, str], *, resume: bool) -> None:
        """Continue with the folder's trainings, or clear it. Raises BadPlan if they belong to another identity."""
        self._folder = folder
        made_of = folder / _MADE_OF
        if resume and made_of.exists():
            refuse_others(folder, identity)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            temporary = folder / f"{UNFINISHED}{_MADE_OF}"
            _write_through(temporary, json.dumps(dict(identity), indent=1).encode())
            temporary.rename(made_of)
            _sync(folder)
        for left in folder.glob(f"{UNFINISHED}*"):  # by a process that was killed
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def trained(self, key: str) -> TrainingResult | None:
        """The result of a training, None if it is not stored."""
        file = self._place(key) / "trained.json"
        try:
            found = json.loads(file.read_text())
            scores = {name: Score(*score) for name, score in found["scores"].items()}
            return TrainingResult(scores, found["seconds"], tuple(found["losses"]))
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _damaged(file) from error

    def state(self, key: str) -> State:
        file = self._place(key) / "state.safetensors"
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            raise _damaged(file) from error

    def keep(self, key: str, trained: TrainingResult, state: Mapping[str, torch.Tensor]) -> None:
        """Write a training atomically: if the process dies while writing, nothing is stored."""
        place = self._place(key)
        # Other processes may store the same training; each writes into a folder of its own.
        temporary = self._folder / f"{UNFINISHED}{os.getpid()}-{place.name}"
        temporary.mkdir()
        save_file({name: tensor.contiguous().cpu() for name, tensor in state.items()}, temporary / "state.safetensors")
        _sync(temporary / "state.safetensors")
        content = {"key": key, "scores": trained.scores, "seconds": trained.seconds, "losses": trained.losses}
        _write_through(temporary / "trained.json", json.dumps(content, indent=1).encode())
        _sync(temporary)
        try:
            temporary.rename(place)
        except OSError:
            if not place.exists():
                raise
            shutil.rmtree(temporary)  # another process stored it first, and training is deterministic
        _sync(self._folder)

    def _place(self, key: str) -> Path:
        return self._folder / hashlib.sha256(key.encode()).hexdigest()[:24]


def refuse_others(folder: Path, identity: Mapping[str, str]) -> None:
    """Raise BadPlan, with the differences, if the folder belongs to another identity or its identity is unreadable."""
    made_of = folder / _MADE_OF
    try:
        before = json.loads(made_of.read_text())
    except FileNotFoundError:
        return
    except ValueError as error:
        raise _damaged(made_of) from error
    if not isinstance(before, dict):
        raise _damaged(made_of)
    changed = [name for name in {**before, **identity} if before.get(name) != identity.get(name)]
    if changed:
        changes = "\n".join(
            f"  {name}: was {_short(before.get(name))}, is {_short(identity.get(name))}" for name in changed
        )
        raise BadPlan(
            f"{made_of.parent} belongs to a run with different inputs, so it cannot be resumed:\n{changes}\n"
            "undo the change, or give --restart instead of --resume to start over"
        )


def _damaged(file: Path) -> BadPlan:
    """A run writes atomically, even if it is killed, so a damaged file was changed by another program."""
    return BadPlan(f"{file} is damaged, so the run cannot be resumed; give --restart instead of --resume")


def _short(value: str | None) -> str:
    return "absent" if value is None else value if len(value) <= 40 else f"{value[:37]}..."


def _write_through(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    _sync(file)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
