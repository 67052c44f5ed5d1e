"""One LoRA adapter in training: its parameters, its optimizer, and the factors that the lanes of a packed batch read.

All parameters are in one tensor, first every A, then every B transposed; so are the gradients and the scaled factors.
An optimizer step, a norm and a copy are then a few operations each, not a few per layer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from atmm import Factors
from heads.storage import write_tensors
from vlora.adapter_files import CONFIG_FILE, WEIGHTS_FILE, other_weights
from vlora.errors import BadConfig, BadPlan

PREFIX = "base_model.model."
"""Of PEFT's tensor names."""


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """Hyper-parameters of one adapter.

    Attributes:
        alpha: The delta is scaled by alpha / rank, or by alpha / sqrt(rank) with rslora.
        targets: Names of linear layers of the language model, the last component each.
        max_norm: Longer gradients are shortened to this norm. None: never.
        seed: Of the initial A; the initial B is zero.
    """

    rank: int = 8
    alpha: float = 16.0
    rslora: bool = False
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    learning_rate: float = 2e-4
    weight_decay: float = 0.0
    max_norm: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise BadConfig(f"rank is {self.rank}; give 1 or more")
        for name, least in (("alpha", 0.0), ("learning_rate", 0.0)):
            if not getattr(self, name) > least:
                raise BadConfig(f"{name} is {getattr(self, name)}; give a number above 0")
        if not self.targets:
            raise BadConfig("targets is empty; name at least one linear layer of the language model, such as q_proj")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class TrainedFactors(NamedTuple):
    """The parameters of one layer.

    a: [r, d_in]. bt: [r, d_out], not scaled. Gradients accumulate in both. read: the same values in the model's dtype,
    with bt scaled.
    """

    a: torch.Tensor
    bt: torch.Tensor
    read: Factors


class Update(NamedTuple):
    """An optimizer step.

    loss: mean over the tokens since the previous one. num_tokens: their number. norm: of the gradient, before it is
    shortened. applied: whether the parameters changed. A gradient that is not finite is dropped.
    """

    loss: float
    num_tokens: int
    norm: float
    applied: bool


class TrainableLora:
    """An adapter with its own optimizer.

    Attributes:
        busy: Whether a micro-step with this adapter is under way, so that its parameters must not change.
    """

    @torch.inference_mode(False)
    def __init__(
        self, name: str, settings: LoraSettings, shapes: Mapping[str, tuple[int, int]], like: torch.Tensor
    ) -> None:
        """Create an adapter with a random A and a B of zeros, as PEFT does.

        Args:
            shapes: (d_in, d_out) of each target layer.
            like: A tensor of the model's dtype and device.
        """
        self.name = name
        self.settings = settings
        rank = settings.rank
        sizes = [rank * d_in for d_in, _ in shapes.values()] + [rank * d_out for _, d_out in shapes.values()]
        self._num_a = sum(sizes[: len(shapes)])
        self._parameters = nn.Parameter(torch.zeros(sum(sizes), device=like.device))  # float32
        self._parameters.grad = torch.zeros_like(self._parameters)
        self._read = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
        parts = zip(
            *(each.split(sizes) for each in (self._parameters.detach(), self._parameters.grad, self._read)), strict=True
        )
        leaves, read = [], []
        for values, gradient, served in parts:
            leaf = values.view(rank, -1).requires_grad_()
            leaf.grad = gradient.view(rank, -1)
            leaves.append(leaf)
            read.append(served.view(rank, -1))
        count = len(shapes)
        self.factors = {
            layer: TrainedFactors(leaves[place], leaves[count + place], Factors(read[place], read[count + place]))
            for place, layer in enumerate(shapes)
        }
        self._optimizer = torch.optim.AdamW(
            [self._parameters], settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.busy = False
        self._loss, self._num_tokens = 0.0, 0
        generator = torch.Generator().manual_seed(settings.seed)
        initial = {}
        for layer, (d_in, d_out) in shapes.items():
            draw = torch.rand(rank, d_in, generator=generator) * 2 - 1
            initial[layer] = draw / math.sqrt(d_in), torch.zeros(d_out, rank)
        self.load(initial)

    @torch.inference_mode(False)
    @torch.no_grad()
    def load(self, values: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Set A [r, d_in] and B [d_out, r] of every layer, in PEFT's orientation. The optimizer keeps its state."""
        self._check_idle("load")
        for layer, (a, b) in values.items():
            own = self.factors[layer]
            own.a.copy_(a)
            own.bt.copy_(b.t())
        self._refresh()

    def values(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Copies of A [r, d_in] and B [d_out, r] of every layer, in PEFT's orientation."""
        return {layer: (own.a.detach().clone(), own.bt.detach().t().clone()) for layer, own in self.factors.items()}

    def gradients(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Copies of the gradients of the mean loss since the last update, as `values`."""
        found = {}
        for layer, own in self.factors.items():
            assert own.a.grad is not None and own.bt.grad is not None
            found[layer] = own.a.grad / self._num_tokens, own.bt.grad.t() / self._num_tokens
        return found

    def record(self, loss: float, num_tokens: int) -> None:
        """Count the tokens of a complete micro-step. loss: their sum."""
        self._loss += loss
        self._num_tokens += num_tokens

    def drop(self) -> None:
        """Forget the gradients since the last update."""
        assert self._parameters.grad is not None
        self._parameters.grad.zero_()
        self._loss, self._num_tokens = 0.0, 0

    @torch.inference_mode(False)
    @torch.no_grad()
    def update(self) -> Update:
        """Step the optimizer with the mean gradient over all tokens since the previous update."""
        self._check_idle("update")
        gradient, count = self._parameters.grad, self._num_tokens
        assert gradient is not None and count, f"adapter {self.name} has no gradient; run a micro-step first"
        gradient.div_(count)
        norm = float(gradient.norm())
        found = Update(self._loss / count, count, norm, math.isfinite(norm))
        if found.applied:
            if self.settings.max_norm is not None:
                gradient.mul_(min(1.0, self.settings.max_norm / (norm + 1e-6)))
            self._optimizer.step()
            self._refresh()
        self.drop()
        return found

    @property
    def is_finite(self) -> bool:
        return bool(self._parameters.isfinite().all())

    def state(self) -> dict[str, Any]:
        """Parameters, the optimizer's state and the gradients since the last update, copied, to continue later."""
        self._check_idle("state")
        assert self._parameters.grad is not None
        kept = self._optimizer.state_dict()
        inner = {place: {name: _copy(value) for name, value in own.items()} for place, own in kept["state"].items()}
        return {
            "parameters": self._parameters.detach().clone(),
            "optimizer": {**kept, "state": inner},
            "gradient": self._parameters.grad.clone(),
            "loss": self._loss,
            "num_tokens": self._num_tokens,
        }

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state` of an adapter with equal settings."""
        self._check_idle("restore")
        self._parameters.copy_(state["parameters"])
        self._optimizer.load_state_dict(state["optimizer"])
        assert self._parameters.grad is not None
        self._parameters.grad.copy_(state["gradient"])
        self._loss, self._num_tokens = state["loss"], state["num_tokens"]
        self._refresh()

    def save(self, folder: Path) -> None:
        """Write the adapter in PEFT's format, for the engine or PEFT to load."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for layer, (a, b) in self.values().items():
            tensors[f"{PREFIX}{layer}.lora_A.weight"] = a.cpu()
            tensors[f"{PREFIX}{layer}.lora_B.weight"] = b.cpu().contiguous()
        write_tensors(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        settings = {
            "peft_type": "LORA",
            "r": self.settings.rank,
            "lora_alpha": self.settings.alpha,
            "use_rslora": self.settings.rslora,
            "target_modules": sorted(self.factors),
        }
        (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")

    def _refresh(self) -> None:
        """Copy the parameters to the factors that lanes read, and scale B."""
        first = self._num_a
        self._read[:first].copy_(self._parameters[:first])
        self._read[first:].copy_(self._parameters[first:] * self.settings.scale)

    def _check_idle(self, what: str) -> None:
        assert not self.busy, f"{what}: a micro-step with adapter {self.name} is under way"


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


_ENDS = ".lora_A.weight", ".lora_B.weight"


class Start(NamedTuple):
    """factors: A [r, d_in] and B [d_out, r] by layer. digest: of the files."""

    factors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    digest: str


def read_start(folder: Path, settings: LoraSettings, name: str) -> Start:
    """Read an adapter in the form that `TrainableLora.save` writes.

    Raises:
        BadPlan: It cannot be read, or has another rank or scale.
    """
    try:
        if problem := other_weights(folder):
            raise ValueError(problem)
        text, weights = (folder / CONFIG_FILE).read_bytes(), (folder / WEIGHTS_FILE).read_bytes()
        config = json.loads(text)
        found = config["r"], config["lora_alpha"], config.get("use_rslora", False)
        tensors = load(weights)
        layers = {key.removeprefix(PREFIX).removesuffix(_ENDS[0]) for key in tensors if key.endswith(_ENDS[0])}
        factors = {one: (tensors[PREFIX + one + _ENDS[0]], tensors[PREFIX + one + _ENDS[1]]) for one in sorted(layers)}
        if 2 * len(factors) != len(tensors):
            raise ValueError("it has other tensors than the factors of LoRA")
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise BadPlan(f"`start` of training {name!r}, {folder}, cannot be read: {error}") from error
    wanted = settings.rank, settings.alpha, settings.rslora
    if found != wanted:
        raise BadPlan(
            f"`start` of training {name!r}, {folder}, has (rank, alpha, rslora) {found}; the training has {wanted}"
        )
    return Start(factors, hashlib.blake2b(text + weights, digest_size=16).hexdigest())
