"""Training one adapter with its heads on a frozen base: PEFT LoRA on the language model, cached image embeddings."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch import nn

from fusion.objectives import Read, answer_in_words, task_of
from fusion.plan import DomainPlan, Plan
from fusion.samples import Sample, Splits, Target
from heads import Grid, HeadSpec, Task, TaskHead, save_heads
from vlora.models import EncodedPrompt, InputProcessor
from vlora.models.grids import image_grids
from vlora.models.processing import to_tensor
from vlora.models.seam import Seam
from vlora.models.vision import VisionEncoder, VisionTask

_ENCODE_AT_ONCE = 64
_IGNORE = -100


class Prepared(NamedTuple):
    """One sample ready for training. ids [n] ends with the prompt; embeddings [placeholders, hidden]; grids: how these
    lie, picture by picture; positions [1 or 3, n]; answer: the tokens of its answer in words, none where it has no
    words."""

    ids: torch.Tensor
    embeddings: torch.Tensor
    grids: tuple[Grid, ...]
    positions: torch.Tensor
    target: Target
    answer: tuple[int, ...]


class Domain:
    """A domain's plan, what it asks of training, and its samples, prepared once: the vision tower is frozen, so what it
    makes never changes."""

    def __init__(self, plan: DomainPlan, splits: Splits, base: FrozenBase) -> None:
        self.plan = plan
        self.splits = splits
        self.base = base
        self.task = task_of(splits)
        self.train, self.validation, self.test = (
            base.prepare(plan.question, splits, part) for part in (splits.train, splits.validation, splits.test)
        )


class FrozenBase:
    """The base model without gradients: image embeddings, prompts, and the language model that adapters sit on."""

    def __init__(self, model: Any, processor: InputProcessor) -> None:
        self.processor = processor
        self.seam = Seam(model)
        # Features through the seam, exactly as serving makes them; training through the model's own attention. On a CPU
        # the fused one spends 1.7 times as long per step, all of it backwards (docs/decisions.md, 2026-11-21).
        model.set_attn_implementation({"text_config": "eager" if self.seam.device.type == "cpu" else "sdpa"})
        self.model = model
        self._vision = VisionEncoder(self.seam, cache_bytes=0)

    @torch.no_grad()
    def prepare(self, question: str, splits: Splits, samples: Sequence[Sample]) -> list[Prepared]:
        """Encode every sample's frames and its question, or else the domain's."""
        prepared: list[Prepared] = []
        for first in range(0, len(samples), _ENCODE_AT_ONCE):
            part = samples[first : first + _ENCODE_AT_ONCE]
            encoded = [self._encode(sample.question or question, sample) for sample in part]
            tasks = [VisionTask(item, None) for one in encoded for item in one.vision]
            features = iter(self._vision.encode(tasks))
            for sample, one in zip(part, encoded, strict=True):
                own = [next(features) for _ in one.vision]
                if own[0].deepstack:
                    raise NotImplementedError("fusion does not train on models with deepstack features (Qwen3-VL) yet")
                ids = torch.tensor(one.prompt_ids)
                grids = [
                    (item.kind, {k: to_tensor(v) for k, v in item.fields.items() if "pixel" not in k})
                    for item in one.vision
                ]
                positions = self.seam.positions(ids, grids).rows
                prepared.append(
                    Prepared(
                        ids,
                        torch.cat([f.rows for f in own]),
                        image_grids(self.seam.config, one.vision),
                        positions,
                        sample.target,
                        self._answer(splits, sample),
                    )
                )
        return prepared

    def _answer(self, splits: Splits, sample: Sample) -> tuple[int, ...]:
        words = answer_in_words(splits, sample)
        tokenizer = self.processor.tokenizer
        return (*tokenizer(words, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id) if words else ()

    def _encode(self, question: str, sample: Sample) -> EncodedPrompt:
        prompt = self.processor.chat(question, len(sample.frames))
        return self.processor.encode(prompt, [Image.fromarray(frame) for frame in sample.frames])


class LoraTrainer:
    """`AdapterTrainer` over a frozen base. State: LoRA tensors by name, and heads by domain."""

    def __init__(self, base: FrozenBase, domains: Mapping[str, Domain], plan: Plan) -> None:
        self._base = base
        self.domains = dict(domains)
        self._plan = plan
        self._heads: dict[str, nn.Linear] = {}
        for parameter in base.model.parameters():
            parameter.requires_grad_(False)
        leaves = sorted({name.rpartition(".")[2] for name in base.seam.language_linears})
        config = LoraConfig(
            r=plan.lora.rank,
            lora_alpha=plan.lora.alpha,
            target_modules=rf".*language_model\..*\.({'|'.join(leaves)})",
            base_model_name_or_path=plan.base,
        )
        self._peft = get_peft_model(base.model, config)
        self._lora = {name: p for name, p in self._peft.named_parameters() if "lora_" in name}

    # -- AdapterTrainer -----------------------------------------------------------------------------------------------

    def fresh(self) -> None:
        """A new adapter: A random, B zero, as LoRA starts; no heads."""
        self._heads = {}
        with torch.no_grad():
            for name, parameter in self._lora.items():
                if "lora_A" in name:
                    generator = torch.Generator().manual_seed(self._seed(name))
                    bound = 1 / math.sqrt(parameter.shape[1])
                    draw = torch.rand(parameter.shape, generator=generator) * 2 - 1
                    parameter.copy_(draw * bound)
                else:
                    parameter.zero_()

    def snapshot(self) -> dict[str, torch.Tensor]:
        state = {f"lora.{name}": p.detach().clone() for name, p in self._lora.items()}
        for domain, head in self._heads.items():
            state[f"head.{domain}.weight"] = head.weight.detach().clone()
            state[f"head.{domain}.bias"] = head.bias.detach().clone()
        return state

    @torch.no_grad()
    def restore(self, state: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._lora.items():
            parameter.copy_(state[f"lora.{name}"])
        self._heads = {}
        for key in state:
            if key.startswith("head.") and key.endswith(".weight"):
                domain = key.removeprefix("head.").removesuffix(".weight")
                head = self._heads[domain] = self._new_head(domain)
                head.weight.copy_(state[key])
                head.bias.copy_(state[f"head.{domain}.bias"])

    def train(self, domain: str, beside: Sequence[str]) -> None:
        settings = self._plan.training
        if self.domains[domain].task.num_outputs:
            self._heads[domain] = self._new_head(domain)
        rng = np.random.default_rng(self._seed(f"{domain} beside {','.join(beside)}"))
        parameters = [*self._lora.values(), *(p for head in self._heads.values() for p in head.parameters())]
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(parameters, settings.learning_rate, weight_decay=0.0)
        rehearsed = round(settings.batch_size * settings.rehearsal) if beside else 0
        self._peft.train()
        started = time.process_time()
        for step in range(settings.steps):
            done = step / settings.steps
            if settings.seconds is not None:
                done = max(done, (time.process_time() - started) / settings.seconds)
                if done >= 1:
                    break
            rate = min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * done))
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * rate
            batch = self._draw(rng, domain, settings.batch_size - rehearsed)
            for place in range(rehearsed):
                batch += self._draw(rng, beside[place % len(beside)], 1)
            loss = self._loss(batch)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._peft.eval()

    def accuracy(self, domain: str) -> float:
        return self.score(domain, self.domains[domain].validation)

    # -- more ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, domain: str, samples: Sequence[Prepared]) -> float:
        """The domain's metric on these samples, 0 to 1."""
        answers: list[object] = []
        for part, read in self._reads(domain, samples):
            answers += self.domains[domain].task.answers(read, self._heads.get(domain), [one.target for one in part])
        return self.domains[domain].task.metric(answers, [sample.target for sample in samples])

    @torch.no_grad()
    def in_words(self, domain: str, samples: Sequence[Prepared]) -> float:
        """Share of samples that the language model answers word for word; 0 where answers are no words."""
        return sum(float(read.exact.sum()) for _, read in self._reads(domain, samples)) / len(samples)

    def _reads(self, domain: str, samples: Sequence[Prepared]) -> Iterator[tuple[Sequence[Prepared], Read]]:
        for first in range(0, len(samples), 50):
            part = samples[first : first + 50]
            with self._autocast():
                yield part, self._read([(domain, sample) for sample in part])

    def save(self, folder: Path, state: dict[str, torch.Tensor]) -> None:
        """Write an adapter in PEFT's format with its heads beside it."""
        self.restore(state)
        self._peft.save_pretrained(str(folder))
        heads = {}
        for name, head in self._heads.items():
            domain = self.domains[name]
            task = self._calibrated(name, head)
            spec = HeadSpec(
                name=name,
                task=task.kind,
                labels=task.labels,
                parameters=task.parameters,
                prompt=domain.plan.question,
                num_frames=domain.splits.num_frames,
                hidden_size=head.in_features,
            )
            heads[name] = TaskHead(spec, head.weight.detach().float(), head.bias.detach().float())
        if heads:
            save_heads(folder, heads)

    @torch.no_grad()
    def _calibrated(self, domain: str, head: nn.Linear) -> Task:
        """The domain's task, as sure as it is right on the validation part."""
        own = self.domains[domain]
        reads = [read for _, read in self._reads(domain, own.validation)]
        task = own.task.calibrated(reads, head, [sample.target for sample in own.validation])
        assert task is not None, "a domain with a head has a task"
        return task

    def _new_head(self, domain: str) -> nn.Linear:
        outputs = self.domains[domain].task.num_outputs
        head = nn.Linear(self._base.seam.hidden_size, outputs, device=self._base.seam.device)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(self._seed(f"head {domain}"))
            head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * 0.02)
            head.bias.zero_()
        return head

    def _draw(self, rng: np.random.Generator, domain: str, count: int) -> list[tuple[str, Prepared]]:
        samples = self.domains[domain].train
        return [(domain, samples[i]) for i in rng.integers(len(samples), size=count)]

    def _loss(self, batch: Sequence[tuple[str, Prepared]]) -> torch.Tensor:
        """Every domain's own loss on its part of the batch, and the language model's on answers in words."""
        with self._autocast():
            read = self._read(batch)
            loss = read.last.new_zeros((), dtype=torch.float32)
            for domain in {name for name, _ in batch}:
                rows = [i for i, (name, _) in enumerate(batch) if name == domain]
                targets = [batch[i][1].target for i in rows]
                own = self.domains[domain].task.loss(read.of(rows), self._heads.get(domain), targets)
                loss = loss + own * len(rows) / len(batch)
        return loss

    def _read(self, batch: Sequence[tuple[str, Prepared]]) -> Read:
        """One forward over prompts with their answers behind them."""
        seam = self._base.seam
        device = seam.device
        rows, positions, wanted, last = [], [], [], []
        for _, sample in batch:
            ids = torch.cat([sample.ids, torch.tensor(sample.answer[:-1], dtype=torch.long)])
            embeddings = seam.embed(ids.to(device))
            embeddings[(ids == seam.image_token_id).to(device)] = sample.embeddings.to(embeddings.dtype)
            rows.append(embeddings)
            tail = torch.arange(len(ids) - len(sample.ids)) + sample.positions.max() + 1
            positions.append(torch.cat([sample.positions, tail.expand(sample.positions.shape[0], -1)], 1).t())
            last.append(len(sample.ids) - 1)
            wanted.append(torch.tensor([_IGNORE] * (len(sample.ids) - 1) + list(sample.answer or (_IGNORE,))))
        embeds = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        # Padding stands at the end, behind everything that is read: causal attention keeps it out without a mask.
        places = nn.utils.rnn.pad_sequence(positions, batch_first=True).permute(2, 0, 1).to(device)
        hidden = seam.text_model(
            inputs_embeds=embeds, position_ids=places if seam.family.mrope else places[0], use_cache=False
        ).last_hidden_state
        targets = nn.utils.rnn.pad_sequence(wanted, batch_first=True, padding_value=_IGNORE).to(device)
        answered = targets != _IGNORE
        logits = seam.lm_head(hidden[answered]).float()
        losses, hits = torch.zeros(targets.shape, device=device), torch.zeros_like(answered)
        losses[answered] = F.cross_entropy(logits, targets[answered], reduction="none")
        hits[answered] = logits.argmax(-1) == targets[answered]
        counts = answered.sum(1)
        return Read(
            last=hidden[torch.arange(len(batch)), torch.tensor(last)],
            images=[
                hidden[row, (one.ids == seam.image_token_id).nonzero().flatten()] for row, (_, one) in enumerate(batch)
            ],
            grids=[one.grids for _, one in batch],
            words=losses.sum(1) / counts.clamp(min=1),
            # Every token right, given those before it: what greedy decoding would have said.
            exact=(hits.sum(1) == counts) & (counts > 0),
        )

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._base.seam.device.type, torch.bfloat16)

    def _seed(self, what: str) -> int:
        return zlib.crc32(f"{self._plan.seed} {what}".encode())
