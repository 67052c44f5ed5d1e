"""Samples of tiny models, and plain PEFT as the oracle of their training."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

from tests.families import Prompt, build_model, make_prompt
from vlora.models.hf_model import HFModel, VisionFeatures
from vlora.models.processing import to_tensor
from vlora.models.vision.encoder import VisionEncoder, VisionTask
from vlora.training.adapter import LoraSettings
from vlora.training.batch import IGNORED, Sample

SETTINGS = {
    "narrow": LoraSettings(rank=2, alpha=4, targets=("q_proj", "v_proj"), learning_rate=5e-3),
    "wide": LoraSettings(rank=8, alpha=8, rslora=True, learning_rate=2e-3, seed=1, weight_decay=0.01),
    "mlp": LoraSettings(rank=5, alpha=7, targets=("gate_proj", "down_proj", "o_proj"), learning_rate=3e-3, seed=2),
}
"""Adapters with different ranks, targets, scales and learning rates."""


def prompts(family: str, model: Any, adapter: str, step: int) -> list[Prompt]:
    """The batch of an adapter: three sequences of different lengths, one of them with an image."""
    seed = 100 * step + 10 * list(SETTINGS).index(adapter)
    return [
        make_prompt(family, model, seed + place, num_images=int(place == 1), text=(5 + 4 * place, 6 + seed % 7))
        for place in range(3)
    ]


def labels_of(prompt: Prompt) -> torch.Tensor:
    """The second half of a sequence is learned."""
    labels = prompt.kwargs["input_ids"][0].clone()
    labels[: len(labels) // 2] = IGNORED
    return labels


@torch.no_grad()
def sample_of(hf_model: HFModel, prompt: Prompt) -> Sample:
    """A prompt as a sample, with the features of its images."""
    ids = prompt.kwargs["input_ids"][0]
    fields = [
        (item.kind, {k: to_tensor(v) for k, v in item.fields.items() if "pixel" not in k}) for item in prompt.vision
    ]
    seen = VisionEncoder(hf_model, cache_bytes=0).encode([VisionTask(item, None) for item in prompt.vision])
    visual = None
    if seen:
        levels = zip(*(one.deepstack for one in seen), strict=True)
        visual = VisionFeatures(torch.cat([one.rows for one in seen]), tuple(map(torch.cat, levels)))
    positions = torch.from_numpy(hf_model.positions(ids, fields).rows.copy())
    return Sample(ids, labels_of(prompt), positions, visual)


def samples(hf_model: HFModel, family: str, adapters: Sequence[str], step: int) -> dict[str, list[Sample]]:
    return {
        name: [sample_of(hf_model, prompt) for prompt in prompts(family, hf_model.model, name, step)]
        for name in adapters
    }


class PlainTraining:
    """One adapter under PEFT, one sequence at a time, with an own optimizer."""

    def __init__(self, family: str, settings: LoraSettings, model: Any = None) -> None:
        model = build_model(family) if model is None else model
        model.set_attn_implementation({"text_config": "eager"})
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]
            use_rslora=settings.rslora,
            target_modules=rf".*language_model\..*\.({'|'.join(settings.targets)})",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model: Any = get_peft_model(model, config).eval()
        self.parameters = {
            name.removeprefix("base_model.model.").replace(".default", ""): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        self.max_norm = settings.max_norm
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), settings.learning_rate, weight_decay=settings.weight_decay
        )

    @torch.no_grad()
    def load(self, values: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start with the factors of another training."""
        assert 2 * len(values) == len(self.parameters)
        for layer, (a, b) in values.items():
            self.parameters[f"{layer}.lora_A.weight"].copy_(a)
            self.parameters[f"{layer}.lora_B.weight"].copy_(b)

    def backward(self, batch: Sequence[Prompt]) -> float:
        """Add the gradient of the mean loss over all labels of the batch. Returns the loss."""
        labels = [labels_of(prompt)[1:] for prompt in batch]
        count = sum(int((own != IGNORED).sum()) for own in labels)
        total = 0.0
        for prompt, own in zip(batch, labels, strict=True):
            logits = self.model(**prompt.kwargs).logits[0, :-1].float()
            loss = F.cross_entropy(logits, own, ignore_index=IGNORED, reduction="sum") / count
            loss.backward()
            total += float(loss.detach())
        return total

    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            name: parameter.grad.clone() for name, parameter in self.parameters.items() if parameter.grad is not None
        }

    def update(self) -> None:
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
