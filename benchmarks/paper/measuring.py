"""The machine and the model of a run, and the store of its measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from atmm.processor import prefers_float32
from vlora.bench.dummy import MODELS, BenchModel, served_config
from vlora.bench.harness import Store
from vlora.bench.report import environment

RANK = 64
"""Of adapters, as in V-LoRA section 6.1."""

QUICK_MODEL = BenchModel("qwen2-0.5b, 6 layers", lambda: served_config(6), 512 * 2**20)
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
    def here(cls, quick: bool) -> Setting:
        """This machine's: its GPU with a 7 B model, or one thread of its CPU with the 0.5 B model."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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


def device_words(device: torch.device, *, one_thread: bool) -> str:
    """A device of this machine in words, for captions; one_thread: of a CPU, whether to say so."""
    env = environment()
    if device.type == "cuda":
        return str(env["gpu"])
    name = str(env["machine"]).partition(",")[0].removeprefix("x86_64 ")
    return f"{name}, one thread" if one_thread else name


class Measuring:
    """The setting of a figure's measurement, and the stored measurements that figures share.

    Attributes:
        used: Names of the stored measurements that were read or made.
    """

    def __init__(self, setting: Setting, store: Store) -> None:
        self.setting = setting
        self.store = store
        self.used: list[str] = []

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """The measurement of this name, made first if no process has stored it."""
        self.used.append(name)
        return self.store.value(name, make)
