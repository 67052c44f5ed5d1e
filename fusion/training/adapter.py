"""One LoRA adapter with its heads on a frozen base, trained in place."""

from __future__ import annotations

import contextlib
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from fusion.block_diagonal.blocks import block_config, scaled_alpha, undivided
from fusion.plan.schema import Plan, trains_by_itself
from fusion.training.checkpoint import State
from fusion.training.collator import EncodedSample, forward_samples, pass_offsets, without_language_model
from fusion.training.frozen_base import Domain, FrozenBase
from fusion.training.objectives import HIDDEN_UNITS, ForwardOutputs, HeadObjective, ImageHead
from fusion.training.steps import mixed_precision
from vlora.errors import BadPlan
from vlora.models.hf_model import HFModel

Batch = Sequence[tuple[str, EncodedSample]]
"""Samples with the names of their domains."""


class TrainableAdapter:
    """A LoRA adapter and its heads. A state is a copy of both: LoRA tensors by name, and heads by domain.

    model: PEFT's model. lora: the adapter's tensors by name. heads: by domain.
    """

    def __init__(self, base: FrozenBase, domains: Mapping[str, Domain], plan: Plan) -> None:
        self.base = base
        self.domains = dict(domains)
        self.heads: dict[str, nn.Linear | ImageHead] = {}
        self._seed = plan.seed
        self._bfloat16 = plan.training.bfloat16
        for parameter in base.model.parameters():
            parameter.requires_grad_(False)
        config = LoraConfig(
            r=plan.lora.rank,
            lora_alpha=scaled_alpha(plan.lora),  # type: ignore[arg-type]  # PEFT divides alpha, so a float works
            use_rslora=plan.lora.rslora,
            use_bdlora=block_config(plan.lora),
            target_modules=_target_modules(base.hf_model, plan),
            base_model_name_or_path=plan.base,
            alora_invocation_tokens=list(base.invocation) or None,
            # PEFT searches for invocation tokens with this task type only.
            task_type="CAUSAL_LM" if base.invocation else None,
        )
        self.model = get_peft_model(base.model, config)
        if base.invocation:
            pass_offsets(base.hf_model.text_model)
        if plan.training.gradient_checkpointing:
            base.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.lora = {name: p for name, p in self.model.named_parameters() if "lora_" in name}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The adapter's tensors and all current heads', by name."""
        heads = {f"head {name}.{part}": p for name, head in self.heads.items() for part, p in head.named_parameters()}
        return {**self.lora, **heads}

    def reset(self) -> None:
        """Start a new adapter without heads: A random, B zero, as in LoRA."""
        self.heads.clear()
        with torch.no_grad():
            for name, parameter in self.lora.items():
                if "lora_A" in name:
                    generator = torch.Generator().manual_seed(self.seed(name))
                    bound = 1 / math.sqrt(parameter.shape[1])
                    draw = torch.rand(parameter.shape, generator=generator) * 2 - 1
                    parameter.copy_(draw * bound)
                else:
                    parameter.zero_()

    def add_head(self, domain: str) -> None:
        """Add a new head for a domain, unless the language model answers it in words."""
        task = self.domains[domain].task
        if not isinstance(task, HeadObjective):
            return
        size, device = self.base.hf_model.hidden_size, self.base.hf_model.device
        generator = torch.Generator().manual_seed(self.seed(f"head {domain}"))
        if task.task.reads_images:
            own = self.heads[domain] = ImageHead(size, HIDDEN_UNITS, task.num_outputs, device)
            own.reset(generator)
            return
        head = self.heads[domain] = nn.Linear(size, task.num_outputs, device=device)
        with torch.no_grad():
            head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * 0.02)
            head.bias.zero_()

    def is_independent(self, domain: str) -> bool:
        """Whether a head answers the domain from features of pictures that the adapter does not change.

        Such a domain takes no part in the training of the LoRA, and other domains cannot displace it.
        """
        task = self.domains[domain].task
        return isinstance(task, HeadObjective) and trains_by_itself(task.task.kind, vision=self.base.train_vision)

    def snapshot(self) -> State:
        state = {f"lora.{name}": p.detach().clone() for name, p in self.lora.items()}
        for domain, head in self.heads.items():
            state |= {f"head.{domain}.{name}": p.detach().clone() for name, p in head.named_parameters()}
        return state

    @torch.no_grad()
    def restore(self, state: State) -> None:
        for name, parameter in self.lora.items():
            parameter.copy_(state[f"lora.{name}"])
        self.heads.clear()
        for key, value in state.items():
            if key.startswith("head."):
                _, domain, name = key.split(".", 2)  # names of domains have no dots
                if domain not in self.heads:
                    self.add_head(domain)
                self.heads[domain].get_parameter(name).copy_(value)

    def forward(self, batch: Batch) -> ForwardOutputs:
        samples = [sample for _, sample in batch]
        independent = [self.is_independent(domain) for domain, _ in batch]
        with self.autocast():
            if all(independent):
                return without_language_model(self.base.hf_model, samples, self.base.features_of(samples))
            return forward_samples(self.base.hf_model, samples, self.base.features_of(samples))

    def loss(self, batch: Batch, outputs: ForwardOutputs) -> torch.Tensor:
        """Each domain's loss on its part of the batch, including the language model's loss on answers in words."""
        with self.autocast():
            loss = outputs.last.new_zeros((), dtype=torch.float32)
            for domain in dict.fromkeys(name for name, _ in batch):
                rows = [i for i, (name, _) in enumerate(batch) if name == domain]
                targets = [batch[i][1].learned for i in rows]
                own = self.domains[domain].task.loss(outputs.select(rows), self.heads.get(domain), targets)
                loss = loss + own * len(rows) / len(batch)
        return loss

    def autocast(self) -> torch.autocast:
        return mixed_precision(self.base.hf_model.device, self._bfloat16)

    @contextlib.contextmanager
    def recomputation(self) -> Iterator[None]:
        """Recompute activations as in training, if the plan sets that, in a model that is otherwise in eval mode.

        transformers looks at the mode of each layer with `gradient_checkpointing`; dropout is in the layers' parts.
        """
        layers = [layer for layer in self.model.modules() if getattr(layer, "gradient_checkpointing", False)]
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in layers:
                layer.training = False

    def seed(self, what: str) -> int:
        """A seed for random draws, from the plan's seed and what is drawn."""
        return zlib.crc32(f"{self._seed} {what}".encode())


def _target_modules(hf_model: HFModel, plan: Plan) -> str:
    """PEFT's `target_modules`: a regular expression over names of linear layers."""
    known = sorted({name.rpartition(".")[2] for name in hf_model.language_linears})
    wanted = plan.lora.targets or known
    if unknown := sorted(set(wanted) - set(known)):
        raise BadPlan(
            f"lora.targets names {', '.join(unknown)}, which the base {plan.base} lacks; it has {', '.join(known)}"
        )
    targeted = {name: layer for name, layer in hf_model.language_linears.items() if name.rpartition(".")[2] in wanted}
    if wrong := undivided(plan.lora, targeted):
        raise BadPlan(f"lora.blocks: {wrong}")
    language = rf".*language_model\..*\.({'|'.join(wanted)})"
    if not plan.lora.vision:
        return language
    return "|".join((language, *(rf"(.*\.)?{re.escape(name)}" for name in sorted(hf_model.vision_linears))))
