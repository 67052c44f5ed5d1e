"""The machine and the model of a run, and the store of its measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atmm.processor import prefers_float32
from vlora.bench.dummy import MODELS, BenchModel, served_config
from vlora.bench.report import environment

RANK = 64
"""Of adapters, as in V-LoRA section 6.1."""

LIMIT_S = 60.0
"""Of the rounds of one comparison, as in `interleaved`: on a CPU, prompts of 4,096 tokens take up to a minute."""

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
    def baseline_dtype(self) -> str:
        """Of other operators and of PEFT: the faster of bfloat16 and float32, which their users would choose."""
        return "float32" if prefers_float32(torch.bfloat16, self.device) else "bfloat16"

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


BASELINE_TYPE = "Other operators and PEFT have float32 values on processors without fast bfloat16 products."
"""A sentence of captions: `Setting.baseline_dtype` in words."""


def device_words(device: torch.device, *, one_thread: bool) -> str:
    """A device of this machine in words, for captions; one_thread: of a CPU, whether to say so."""
    env = environment()
    if device.type == "cuda":
        return str(env["gpu"])
    name = str(env["machine"]).partition(",")[0].removeprefix("x86_64 ")
    return f"{name}, one thread" if one_thread else name


class Origin(NamedTuple):
    """When a measurement was made.

    Attributes:
        commit: Of the code; None outside a checkout.
        load: Of the machine at the start.
        seconds: How long it took, including the shared ones that it needed first.
    """

    commit: str | None
    load: float
    seconds: float


class Measuring:
    """Runs measurements once: each is stored under its name, and read again by figures that share it, by other
    processes and by later runs in the same setting, unless a measurement from which it was derived has changed since.

    Args:
        setting: The setting.
        folder: Where measurements are stored.
        say: Receives a line for each new measurement.
    """

    def __init__(self, setting: Setting, folder: Path, say: Callable[[str], None]) -> None:
        self.setting = setting
        self.folder = folder
        self._say = say
        self._identity = json.loads(json.dumps(setting.identity()))
        self._running: list[dict[str, str | None]] = []  # inputs of the measurements in progress, innermost last
        folder.mkdir(parents=True, exist_ok=True)

    def once(self, name: str, make: Callable[[], Any], inputs: Sequence[str] = ()) -> Any:
        """The measurement of this name, as JSON decodes it.

        Args:
            name: The name.
            make: Returns the measurement. Those that it reads through this method are recorded as its inputs.
            inputs: Further inputs: names of measurements from which arguments of `make` were derived.
        """
        stored = self._stored(name)
        if stored is None:
            with self._locked(name):  # another process may have measured it meanwhile
                stored = self._stored(name) or self._measured(name, make, inputs)
        if self._running:
            self._running[-1][name] = _digest(stored["value"])
        return stored["value"]

    def knows(self, name: str) -> bool:
        """Whether `once` would read the measurement of this name."""
        return self._stored(name) is not None

    def origins(self, name: str) -> dict[str, Origin]:
        """Of a stored measurement, and then of those from which it was derived, by name."""
        stored = self._stored(name)
        if stored is None:
            return {}
        found = {name: Origin(stored["commit"], stored["load"], stored["seconds"])}
        for each in stored["inputs"]:
            found |= self.origins(each)
        return found

    def _measured(self, name: str, make: Callable[[], Any], inputs: Sequence[str]) -> dict[str, Any]:
        """Make a measurement, store it, and return it as stored."""
        started, load = time.perf_counter(), os.getloadavg()[0]
        self._running.append({each: self._stored_digest(each) for each in inputs})
        try:
            value = make()
        finally:
            used = self._running.pop()
        seconds = round(time.perf_counter() - started, 1)
        stored = {
            "of": self._identity,
            "commit": environment()["commit"],
            "load": round(load, 2),
            "seconds": seconds,
            "inputs": used,
            "value": value,
        }
        path = self._path(name)
        written = path.with_suffix(".partial")
        written.write_text(json.dumps(stored) + "\n")
        written.replace(path)
        self._say(f"{name}: {seconds:g} s")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Context in which no other process measures this. Measurements are derived in one direction, so that no two
        processes wait for each other.
        """
        with self._path(name).with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, name: str) -> Path:
        return self.folder / f"{name.replace(':', '-')}.json"

    def _stored(self, name: str) -> dict[str, Any] | None:
        """A stored measurement of this setting, unless one of its inputs has changed since."""
        stored = _read(self._path(name))
        if stored is None or stored["of"] != self._identity:
            return None
        same = all(self._stored_digest(each) == digest for each, digest in stored["inputs"].items())
        return stored if same else None

    def _stored_digest(self, name: str) -> str | None:
        stored = self._stored(name)
        return None if stored is None else _digest(stored["value"])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any] | None:
    """A stored measurement; None if there is none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.keys() >= _FIELDS else None


_FIELDS = {"of", "commit", "load", "seconds", "inputs", "value"}
