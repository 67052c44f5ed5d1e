"""The machine and the model of a run, and the store of its measurements."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vlora.bench.dummy import served_config
from vlora.bench.report import environment
from vlora.bench.scheduling.models import MODELS, BenchModel

RANK = 64
"""Of adapters, as in V-LoRA section 6.1."""

QUICK_MODEL = BenchModel("qwen2-0.5b, 6 layers", lambda: served_config(6), 512 * 2**20, all_policies=True)
"""Six layers of the 0.5 B model, with a vocabulary so small that the layers take most of the time."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        quick: Fewer points and repetitions, on a CPU also a model of fewer layers.
        device: The device.
        model: The model of all measurements of steps and of all simulations.
    """

    quick: bool
    device: torch.device
    model: BenchModel

    @classmethod
    def of(cls, quick: bool, device: torch.device) -> Setting:
        """The setting of a machine: its GPU with a 7 B model, or one thread of its CPU with the 0.5 B model."""
        if device.type == "cuda":
            return cls(quick, device, MODELS["qwen2-vl-7b"])
        return cls(quick, device, QUICK_MODEL if quick else MODELS["qwen2-0.5b"])

    @property
    def rounds(self) -> int:
        return 3 if self.quick else 9

    @property
    def model_words(self) -> str:
        """The model in words, for captions."""
        return f"{self.model.name}, random weights, bfloat16, adapters of rank {RANK}"

    def identity(self) -> dict[str, Any]:
        """What a stored measurement must agree in to be used again."""
        env = environment()
        return {
            "quick": self.quick,
            "device": self.device.type,
            "model": self.model.name,
            **{name: env[name] for name in ("machine", "gpu", "versions")},
        }


def device_words(device: torch.device) -> str:
    """A device of this machine in words, for captions."""
    env = environment()
    if device.type == "cuda":
        return str(env["gpu"])
    return f"{env['machine'].partition(',')[0].removeprefix('x86_64 ')}, one thread"


class Measuring:
    """Runs measurements once: each is stored under its name, and read again by figures that share it and by later runs
    in the same setting.

    Args:
        setting: The setting.
        folder: Where measurements are stored.
        say: Receives a line for each new measurement.
    """

    def __init__(self, setting: Setting, folder: Path, say: Callable[[str], None]) -> None:
        self.setting = setting
        self._folder = folder
        self._say = say
        self._identity = json.loads(json.dumps(setting.identity()))
        folder.mkdir(parents=True, exist_ok=True)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """The measurement of this name, as JSON decodes it."""
        path = self._path(name)
        stored = self._stored(name)
        if stored is None:
            started = time.perf_counter()
            value = make()
            seconds = round(time.perf_counter() - started, 1)
            stored = {"of": self._identity, "commit": environment()["commit"], "seconds": seconds, "value": value}
            written = path.with_suffix(".partial")
            written.write_text(json.dumps(stored) + "\n")
            written.replace(path)
            stored = json.loads(path.read_text())
            self._say(f"{name}: {seconds:g} s")
        return stored["value"]

    def knows(self, name: str) -> bool:
        """Whether `once` would read the measurement of this name."""
        return self._stored(name) is not None

    def seconds(self, name: str) -> float:
        """How long the measurement of this name took, including the shared ones that it needed first."""
        stored = self._stored(name)
        return float(stored["seconds"]) if stored else 0.0

    def _path(self, name: str) -> Path:
        return self._folder / f"{name.replace(':', '-')}.json"

    def _stored(self, name: str) -> dict[str, Any] | None:
        stored = _read(self._path(name))
        return stored if stored is not None and stored.get("of") == self._identity else None


def _read(path: Path) -> dict[str, Any] | None:
    """A stored measurement; None if there is none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"of", "value", "seconds"} <= found.keys() else None
