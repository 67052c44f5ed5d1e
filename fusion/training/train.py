"""Training of one adapter with its heads on a frozen base: PEFT LoRA, with image features cached if they are fixed."""

from __future__ import annotations

import math
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch import nn

from fusion.block_diagonal.blocks import block_config, scaled_alpha, undivided
from fusion.data.samples import Sample, Splits, held_back
from fusion.packing.algorithm import Adapter, Score
from fusion.packing.bounds import bounded
from fusion.plan.families import why_not_trained
from fusion.plan.schema import DomainPlan, Plan
from fusion.plan.tasks import MEANS
from fusion.progress.progress import Moved, Progress
from fusion.training.accumulate import backward_in_parts, halving
from fusion.training.collator import Prepared, embed, read_samples
from fusion.training.decoding import Prompt, greedy
from fusion.training.features import FeatureCache, Features, InMemory
from fusion.training.fingerprint import hash_of_weights
from fusion.training.looks import Looks
from fusion.training.objectives import HeadObjective, Objective, Read, answer_in_words, task_of
from fusion.training.precision import mixed_precision
from heads import HeadSpec, TaskHead, save_heads
from heads.boxes import Window
from vlora.errors import BadPlan, BadRequest
from vlora.models import EncodedPrompt, InputProcessor, Region
from vlora.models.hf_adapter import Seam
from vlora.models.processing import to_tensor
from vlora.models.token_grids import image_grids
from vlora.models.vision import VisionEncoder, VisionTask
from vlora.types import VisionInput

_ENCODE_AT_ONCE = 16  # samples per batch and per progress update
_SCORE_AT_ONCE = 50
_WARM_UP_STEPS = 10
_LOOKS = 12  # evaluations on held-back samples within one training
_CURVE_POINTS = 24
_RECENT = 10  # steps in the mean loss for display

_LONGER = 2  # decoding stops at this many times the length of the longest training answer

State = dict[str, torch.Tensor]
Made = TypeVar("Made")


class Domain:
    """A domain's plan, its objective and its samples, prepared once.

    held_back: training samples that decide early stopping and calibrate heads with answers that depend on calibration.
    others: the remaining training samples, which share no group with them. Validation data is used for neither, so
    bounds computed on it are valid.

    Args:
        most: number of samples of each part to prepare; all if None.
    """

    def __init__(self, plan: DomainPlan, splits: Splits, base: FrozenBase, *, most: int | None = None) -> None:
        self.plan = plan
        self.splits = splits
        self.base = base
        self.task = task_of(splits, plan.metric)
        parts = [part[:most] for part in (splits.train, splits.validation, splits.test)]
        done = 0
        with base.progress.work(f"encoding the pictures of {plan.name}", sum(map(len, parts)), "samples") as moved:

            def encoded(count: int) -> None:
                nonlocal done
                moved(done := done + count)

            self.train, self.validation, self.test = (
                base.prepare(plan.question, splits, part, encoded) for part in parts
            )
        kept = set(held_back(splits.train[:most]))
        self.held_back = [sample for place, sample in enumerate(self.train) if place in kept]
        self.others = [sample for place, sample in enumerate(self.train) if place not in kept]

    def features(self) -> np.ndarray:
        """Mean image features of its training pictures, [hidden]. Raises BadPlan if the vision side is trained, which
        changes the features."""
        means = [sample.features.rows().float().mean(0) for sample in self.train if sample.features is not None]
        if not means:
            raise BadPlan("order `similarity` compares image features, which change when lora.vision is on")
        return torch.stack(means).mean(0).cpu().numpy()


class FrozenBase:
    """The base model without gradients: image features, prompts, and the language model that adapters modify.

    weights: hash of the model's weights.

    Args:
        features: folder for image features; None keeps all of them in memory.
        train_vision: do not precompute image features, since training changes them.
        progress: display for work over samples.

    Raises:
        BadPlan: models of this family cannot be trained.
    """

    def __init__(
        self,
        model: Any,
        processor: InputProcessor,
        *,
        features: Path | None = None,
        train_vision: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if why := why_not_trained(model.config):
            raise BadPlan(why)
        self.processor = processor
        self.progress = progress or Progress()
        self.seam = Seam(model)
        # Features come from the seam, exactly as in serving; training uses the model's own attention. On a CPU the
        # fused attention takes 1.7 times as long per step, all of it in the backward pass (docs/decisions/0012).
        model.set_attn_implementation({"text_config": "eager" if self.seam.device.type == "cpu" else "sdpa"})
        self.model = model
        self.train_vision = train_vision
        self.weights = hash_of_weights(model.named_parameters())
        maker = f"{self.weights} on {self.seam.device.type}"  # another device rounds differently
        self._features = None if features is None else FeatureCache(features, maker)
        self._vision = VisionEncoder(self.seam, cache_bytes=0)

    @torch.no_grad()
    def prepare(
        self,
        question: str,
        splits: Splits,
        samples: Sequence[Sample],
        encoded: Callable[[int], None] = lambda count: None,
    ) -> list[Prepared]:
        """Encode every sample's frames with its question, or the domain's.

        Args:
            encoded: called after each batch with its number of samples.
        """
        prepared: list[Prepared] = []
        for first in range(0, len(samples), _ENCODE_AT_ONCE):
            part = samples[first : first + _ENCODE_AT_ONCE]
            prompts = [self._encode(question, sample) for sample in part]
            features = [None] * len(part) if self.train_vision else self._kept_features(prompts)
            for sample, one, seen in zip(part, prompts, features, strict=True):
                ids = torch.tensor(one.prompt_ids)
                answer = self._answer(splits, sample)
                if len(ids) + len(answer) > self.seam.max_positions:
                    raise BadPlan(
                        f"{_name(sample)}: its pictures, question and answer take {len(ids) + len(answer)} tokens; "
                        f"the base model takes at most {self.seam.max_positions}"
                    )
                grids = [
                    (item.kind, {k: to_tensor(v) for k, v in item.fields.items() if "pixel" not in k})
                    for item in one.vision
                ]
                prepared.append(
                    Prepared(
                        ids,
                        seen,
                        tuple(one.vision) if seen is None else (),
                        image_grids(self.seam.config, one.vision),
                        self.seam.positions(ids, grids).rows,
                        sample.target,
                        tuple(map(_window, one.shown)),
                        answer,
                    )
                )
            encoded(len(part))
        return prepared

    def encode(self, items: Sequence[VisionInput]) -> list[torch.Tensor]:
        """Image features [num_tokens, hidden] of each picture, with gradients if they are enabled."""
        return [one.rows for one in self._vision.encode([VisionTask(item, None) for item in items])]

    def features_of(self, samples: Sequence[Prepared]) -> list[torch.Tensor]:
        """Image features of each sample [placeholders, hidden]: the stored ones, or recomputed if the vision side is
        trained, with gradients if they are enabled."""
        if not self.train_vision:
            return [seen for sample in samples if (seen := sample.embeddings) is not None]
        made = iter(self.encode([item for sample in samples for item in sample.vision]))
        return [torch.cat([next(made) for _ in sample.vision]) for sample in samples]

    @torch.no_grad()
    def said(self, samples: Sequence[Prepared], limit: int) -> list[str]:
        """Decode the current model's answer to each sample as the engine does, up to `limit` tokens."""
        rows = [embed(self.seam, one.ids, seen) for one, seen in zip(samples, self.features_of(samples), strict=True)]
        prompts = [Prompt(row, one.positions) for row, one in zip(rows, samples, strict=True)]
        return [self.processor.decode(tokens).strip() for tokens in greedy(self.seam, prompts, limit)]

    def _kept_features(self, encoded: Sequence[EncodedPrompt]) -> Sequence[Features]:
        """Features of each sample's pictures, from the cache if they are stored."""
        items = [item for one in encoded for item in one.vision]
        if self._features is None:
            made = iter(self.encode(items))
            return [InMemory(torch.cat([next(made) for _ in one.vision])) for one in encoded]
        samples = [[item.content_hash for item in one.vision] for one in encoded]
        if (found := self._features.get(samples)) is None:
            self._features.put(samples, self.encode(items))
            found = self._features.get(samples)
        assert found is not None, "the features were just written"
        return found

    def _answer(self, splits: Splits, sample: Sample) -> tuple[int, ...]:
        """Tokens of a sample's answer in words. Raises BadPlan if they include special tokens of the base model."""
        words = answer_in_words(splits, sample)
        if not words:
            return ()
        tokenizer = self.processor.tokenizer
        ids = tokenizer(words, add_special_tokens=False)["input_ids"]
        marks = {*tokenizer.all_special_ids, self.seam.image_token_id}
        if splits.labels:  # a head answers, which distinguishes labels outside the model's vocabulary
            marks.discard(tokenizer.unk_token_id)
        if found := sorted(marks.intersection(ids)):
            mark = tokenizer.convert_ids_to_tokens(found[0])
            raise BadPlan(f"{_name(sample)}: the answer {words!r} contains {mark}, a special token of the base model")
        return (*ids, tokenizer.eos_token_id)

    def _encode(self, question: str, sample: Sample) -> EncodedPrompt:
        """Encode a sample with its question or the domain's. Raises BadPlan for pictures that the processor refuses."""
        prompt = self.processor.chat(sample.question or question, len(sample.frames))
        try:
            return self.processor.encode(prompt, [Image.fromarray(frame) for frame in sample.frames])
        except BadRequest as error:
            raise BadPlan(f"{_name(sample)}: {error}") from error


class LoraTrainer:
    """Trains adapters over a frozen base, one at a time. A state is LoRA tensors by name, and heads by domain.

    The result of a training depends only on its initial state, the plan and the seed: random draws are seeded by what
    is trained.

    Args:
        progress: display for training and scoring.
    """

    def __init__(
        self,
        base: FrozenBase,
        domains: Mapping[str, Domain],
        plan: Plan,
        *,
        progress: Progress | None = None,
    ) -> None:
        self._base = base
        self.domains = dict(domains)
        self._plan = plan
        self._progress = progress or Progress()
        self._at_once = _SCORE_AT_ONCE
        self._heads: dict[str, nn.Linear] = {}
        for parameter in base.model.parameters():
            parameter.requires_grad_(False)
        config = LoraConfig(
            r=plan.lora.rank,
            lora_alpha=scaled_alpha(plan.lora),  # type: ignore[arg-type]  # PEFT divides alpha, so a float works
            use_rslora=plan.lora.rslora,
            use_bdlora=block_config(plan.lora),
            target_modules=_targets(base.seam, plan),
            base_model_name_or_path=plan.base,
        )
        self._peft = get_peft_model(base.model, config)
        if plan.training.gradient_checkpointing:
            base.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._lora = {name: p for name, p in self._peft.named_parameters() if "lora_" in name}

    def fresh(self) -> None:
        """Start a new adapter without heads: A random, B zero, as in LoRA."""
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

    def snapshot(self) -> State:
        """Copy of the current adapter and heads."""
        state = {f"lora.{name}": p.detach().clone() for name, p in self._lora.items()}
        for domain, head in self._heads.items():
            state[f"head.{domain}.weight"] = head.weight.detach().clone()
            state[f"head.{domain}.bias"] = head.bias.detach().clone()
        return state

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Restore a snapshot."""
        for name, parameter in self._lora.items():
            parameter.copy_(state[f"lora.{name}"])
        self._heads = {}
        for key in state:
            if key.startswith("head.") and key.endswith(".weight"):
                domain = key.removeprefix("head.").removesuffix(".weight")
                head = self._heads[domain] = self._new_head(domain)
                head.weight.copy_(state[key])
                head.bias.copy_(state[f"head.{domain}.bias"])

    def train(self, domain: str, beside: Sequence[str], *, rehearsal: float | None = None) -> tuple[float, ...]:
        """Train one more domain into the adapter, which holds the domains in `beside`.

        Args:
            rehearsal: share of each batch drawn from the domains in `beside`; None for the plan's.

        Returns:
            Losses from start to end.
        """
        settings = self._plan.training
        share = settings.rehearsal if rehearsal is None else rehearsal
        rehearsed = round(settings.batch_size * share) if beside else 0

        def rows(step: int) -> list[str]:
            # Round robin over all steps, so that each is rehearsed even if a batch cannot hold all of them.
            again = [beside[(step * rehearsed + place) % len(beside)] for place in range(rehearsed)]
            return [domain] * (settings.batch_size - rehearsed) + again

        held = (*beside, domain) if rehearsed else (domain,)
        with self._shown(trained_into(domain, beside), settings.steps, 1) as moved:
            return self._fit(
                (domain,), held, settings.steps, rows, f"{domain} beside {','.join(beside)}", (*beside, domain), moved
            )

    def train_together(self, domains: Sequence[str]) -> tuple[float, ...]:
        """Train several domains jointly into a new adapter, with as many steps per domain as for one alone."""
        settings = self._plan.training
        steps = settings.steps * len(domains)

        def rows(step: int) -> list[str]:
            first = step * settings.batch_size
            return [domains[place % len(domains)] for place in range(first, first + settings.batch_size)]

        with self._shown(trained_at_once(domains), steps, len(domains)) as moved:
            return self._fit(domains, domains, steps, rows, f"together {','.join(domains)}", tuple(domains), moved)

    def _shown(self, what: str, steps: int, trainings: int) -> AbstractContextManager[Moved]:
        return self._progress.work(what, steps, "steps", trainings=trainings)

    def _fit(
        self,
        new: Sequence[str],
        held: Sequence[str],
        steps: int,
        rows: Callable[[int], list[str]],
        what: str,
        adapter: Adapter,
        moved: Moved,
    ) -> tuple[float, ...]:
        """Run the training loop.

        Args:
            new: domains that get a head.
            held: domains for the held-back loss that decides early stopping.
            rows: returns the domain of each sample of a step's batch.
            what: seeds the random draws.
            adapter: all domains in the adapter.
        """
        settings = self._plan.training
        for domain in new:
            if self.domains[domain].task.num_outputs:
                self._heads[domain] = self._new_head(domain)
        rng = np.random.default_rng(self._seed(what))
        optimizer = self._optimizer()
        size = settings.batch_size
        losses: list[float] = []
        best, best_state, looks_since = math.inf, None, 0
        looks = Looks(self._held_out, adapter, self._progress.clock)
        self._peft.train()
        started = time.process_time()
        for step in range(steps):
            done = step / steps
            if settings.seconds is not None:
                done = max(done, (time.process_time() - started) / (settings.seconds * len(new)))
                if done >= 1:
                    break
            rate = min(1.0, (step + 1) / _WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * done))
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * rate
            loss, size = self._step(optimizer, self._batch(rng, rows(step)), size)
            losses.append(loss)
            if self._progress.watched and looks.due and step + 1 < steps:
                before = time.process_time()
                self._look(looks)
                started += time.process_time() - before  # displayed scores must not change a training
            moved(step + 1, _facts(losses, looks), max(done, (step + 1) / steps))
            if settings.patience is not None and (step + 1) % max(1, steps // _LOOKS) == 0:
                held_back = self._held_back_loss(held)
                looks_since = 0 if held_back < best else looks_since + 1
                if held_back < best:
                    best, best_state = held_back, self.snapshot()
                elif looks_since >= settings.patience:
                    break
        if best_state is not None:
            self.restore(best_state)
        self._peft.eval()
        return _curve(losses)

    def _optimizer(self) -> torch.optim.Optimizer:
        """An optimizer over the adapter and all current heads."""
        parameters = [*self._lora.values(), *(p for head in self._heads.values() for p in head.parameters())]
        for parameter in parameters:
            parameter.requires_grad_(True)
        return torch.optim.AdamW(parameters, self._plan.training.learning_rate, weight_decay=0.0)

    def _batch(self, rng: np.random.Generator, rows: Sequence[str]) -> list[tuple[str, Prepared]]:
        return [pair for name, count in Counter(rows).items() for pair in self._draw(rng, name, count)]

    def _step(
        self, optimizer: torch.optim.Optimizer, batch: Sequence[tuple[str, Prepared]], size: int
    ) -> tuple[float, int]:
        """One optimizer step on a batch, in parts of `size` samples, or fewer if memory runs out. Returns the loss and
        the size used."""
        loss, size = halving(
            size,
            lambda at_once: self._backward(batch, at_once),
            lambda at_once: self._after_too_much(optimizer, at_once),
        )
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss, size

    def time_step(self, rows: Sequence[str]) -> float:
        """Seconds of one step on a batch with samples of these domains. Changes the adapter and creates heads for all
        domains."""
        for name, domain in self.domains.items():
            if domain.task.num_outputs and name not in self._heads:
                self._heads[name] = self._new_head(name)
        optimizer, rng = self._optimizer(), np.random.default_rng(self._seed("time"))
        self._peft.train()
        began = time.perf_counter()
        self._step(optimizer, self._batch(rng, rows), len(rows))
        if self._base.seam.device.type == "cuda":
            torch.cuda.synchronize(self._base.seam.device)
        took = time.perf_counter() - began
        self._peft.eval()
        return took

    def _look(self, looks: Looks) -> None:
        self._peft.eval()
        looks.look()
        self._peft.train()

    def _held_out(self, domain: str, count: int) -> float:
        return self.score(domain, self.domains[domain].validation[:count])

    @torch.no_grad()
    def score(self, domain: str, samples: Sequence[Prepared]) -> float:
        """The domain's metric on these samples, 0 to 1."""
        answers = self.answers(domain, samples)
        return self.domains[domain].task.metric(answers, [sample.target for sample in samples])

    @torch.no_grad()
    def bounded_score(self, domain: str, samples: Sequence[Prepared]) -> Score:
        """Score with its lower bound at the plan's confidence, or with itself as bound if there is none."""
        with self._progress.work(f"scoring {domain}", len(samples), "samples") as moved:
            answers = self.answers(domain, samples, moved)
        targets = [sample.target for sample in samples]
        task, confidence = self.domains[domain].task, self._plan.confidence
        if confidence is None:
            value = task.metric(answers, targets)
            return Score(value, value)
        seed = self._seed(f"bound {domain}")
        mean = task.metric_name in MEANS
        return bounded(task.metric, answers, targets, mean=mean, confidence=confidence, seed=seed)

    @torch.no_grad()
    def in_words(self, domain: str, samples: Sequence[Prepared]) -> float:
        """Share of samples that the language model answers word for word; 0 for samples without an answer in words."""
        return sum(float(read.exact.sum()) for _, read in self._reads(domain, samples)) / len(samples)

    @torch.no_grad()
    def said(
        self, domain: str, samples: Sequence[Prepared], moved: Moved = lambda done, facts="", share=None: None
    ) -> list[str]:
        """The language model's answer to each sample, up to twice the length of the longest training answer.

        Args:
            moved: called with the number of samples done.
        """
        limit = _LONGER * max(len(sample.answer) for sample in self.domains[domain].train)

        def decode(part: Sequence[Prepared]) -> list[str]:
            with self._autocast():
                return self._base.said(part, limit)

        words: list[str] = []
        for _, found in self._in_parts(samples, decode):
            words += found
            moved(len(words))
        return words

    @torch.no_grad()
    def answers(
        self, domain: str, samples: Sequence[Prepared], moved: Moved = lambda done, facts="", share=None: None
    ) -> list[object]:
        """The answer to each sample, in the form that the domain's metric compares.

        Args:
            moved: called with the number of samples done.
        """
        if self.domains[domain].task.needs_text:
            return list(self.said(domain, samples, moved))
        task = self.domains[domain].task
        if task.calibration_decides:
            task = self.calibrated(domain)
        answers: list[object] = []
        for part, read in self._reads(domain, samples):
            with self._autocast():
                found = task.answers(read, self._heads.get(domain), [s.target for s in part])
                answers += [s.of_whole_pictures(answer) for s, answer in zip(part, found, strict=True)]
            moved(len(answers))
        return answers

    @torch.no_grad()
    def calibrated(self, domain: str) -> Objective:
        """The domain's objective with a calibrated head, as it is served.

        If calibration changes answers, it uses held-back training samples, so that validation data stays independent;
        otherwise it uses validation data, which has more samples.
        """
        own = self.domains[domain]
        samples = own.held_back if own.task.calibration_decides else own.validation
        reads = [read for _, read in self._reads(domain, samples)]
        return own.task.calibrated(reads, self._heads.get(domain), [sample.learned for sample in samples])

    def _reads(self, domain: str, samples: Sequence[Prepared]) -> Iterator[tuple[Sequence[Prepared], Read]]:
        return self._in_parts(samples, lambda part: self._read([(domain, sample) for sample in part]))

    def _in_parts(
        self, samples: Sequence[Prepared], make: Callable[[Sequence[Prepared]], Made]
    ) -> Iterator[tuple[Sequence[Prepared], Made]]:
        """Process samples in parts as large as memory allows."""
        first = 0
        while first < len(samples):

            def attempt(at_once: int, first: int = first) -> Made:
                return make(samples[first : first + at_once])

            found, self._at_once = halving(self._at_once, attempt, lambda at_once: None)
            yield samples[first : first + self._at_once], found
            first += self._at_once

    @torch.no_grad()
    def _held_back_loss(self, domains: Sequence[str]) -> float:
        """Mean over domains of the loss on held-back samples."""
        self._peft.eval()
        total = 0.0
        for domain in domains:
            samples = self.domains[domain].held_back
            for part, read in self._reads(domain, samples):
                own = self._loss_of([(domain, sample) for sample in part], read)
                total += float(own) * len(part) / len(samples)
        self._peft.train()
        return total / len(domains)

    def save(self, folder: Path, state: State) -> None:
        """Write an adapter in PEFT's format with its heads."""
        self.restore(state)
        self._peft.save_pretrained(str(folder))
        heads = {}
        for name, head in self._heads.items():
            domain, served = self.domains[name], self.calibrated(name)
            assert isinstance(served, HeadObjective), "words have no head"
            task = served.task
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

    def _new_head(self, domain: str) -> nn.Linear:
        outputs = self.domains[domain].task.num_outputs
        head = nn.Linear(self._base.seam.hidden_size, outputs, device=self._base.seam.device)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(self._seed(f"head {domain}"))
            head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * 0.02)
            head.bias.zero_()
        return head

    def _draw(self, rng: np.random.Generator, domain: str, count: int) -> list[tuple[str, Prepared]]:
        own = self.domains[domain]
        keeps = self._plan.training.patience is not None or own.task.calibration_decides
        samples = own.others if keeps else own.train
        return [(domain, samples[i]) for i in rng.integers(len(samples), size=count)]

    def _backward(self, batch: Sequence[tuple[str, Prepared]], at_once: int) -> float:
        return backward_in_parts(batch, at_once, self._read, lambda read: self._loss_of(batch, read))

    def _after_too_much(self, optimizer: torch.optim.Optimizer, at_once: int) -> None:
        optimizer.zero_grad(set_to_none=True)  # drop the gradients of earlier parts
        self._progress.say(f"out of memory: continuing with {at_once} samples at a time; gradients do not change")

    def _loss_of(self, batch: Sequence[tuple[str, Prepared]], read: Read) -> torch.Tensor:
        """Each domain's loss on its part of the batch, including the language model's loss on answers in words."""
        with self._autocast():
            loss = read.last.new_zeros((), dtype=torch.float32)
            for domain in dict.fromkeys(name for name, _ in batch):
                rows = [i for i, (name, _) in enumerate(batch) if name == domain]
                targets = [batch[i][1].learned for i in rows]
                own = self.domains[domain].task.loss(read.of(rows), self._heads.get(domain), targets)
                loss = loss + own * len(rows) / len(batch)
        return loss

    def _read(self, batch: Sequence[tuple[str, Prepared]]) -> Read:
        samples = [sample for _, sample in batch]
        with self._autocast():
            return read_samples(self._base.seam, samples, self._base.features_of(samples))

    def _autocast(self) -> torch.autocast:
        return mixed_precision(self._base.seam.device, self._plan.training.bfloat16)

    def _seed(self, what: str) -> int:
        return zlib.crc32(f"{self._plan.seed} {what}".encode())


def _facts(losses: Sequence[float], looks: Looks) -> str:
    """The mean recent loss, and the last scores of held-out samples."""
    recent = losses[-_RECENT:]
    loss = f"loss {sum(recent) / len(recent):.3f}"
    return f"{loss}, held-out {looks}" if str(looks) else loss


def _name(sample: Sample) -> object:
    return getattr(sample.frames, "file", "a drawn picture")


def trained_into(domain: str, beside: Sequence[str]) -> str:
    """Display name of a training of one more domain into an adapter."""
    return f"training {domain} into {', '.join(beside) or 'a new adapter'}"


def trained_at_once(domains: Sequence[str]) -> str:
    """Display name of a joint training of several domains into a new adapter."""
    return f"training {', '.join(domains)} at once"


def _window(shown: Region) -> Window:
    """The window of a picture that the image processor's centre crop keeps."""
    width, height = shown.width + 2 * shown.left, shown.height + 2 * shown.top
    return shown.left / width, shown.top / height, shown.width / width, shown.height / height


def _targets(seam: Seam, plan: Plan) -> str:
    """PEFT's `target_modules`: a regular expression over names of linear layers."""
    known = sorted({name.rpartition(".")[2] for name in seam.language_linears})
    wanted = plan.lora.targets or known
    if unknown := sorted(set(wanted) - set(known)):
        raise BadPlan(
            f"lora.targets names {', '.join(unknown)}, which the base {plan.base} lacks; it has {', '.join(known)}"
        )
    targeted = {name: layer for name, layer in seam.language_linears.items() if name.rpartition(".")[2] in wanted}
    if wrong := undivided(plan.lora, targeted):
        raise BadPlan(f"lora.blocks: {wrong}")
    language = rf".*language_model\..*\.({'|'.join(wanted)})"
    if not plan.lora.vision:
        return language
    return "|".join((language, *(rf"(.*\.)?{re.escape(name)}" for name in sorted(seam.vision_linears))))


def _curve(losses: Sequence[float]) -> tuple[float, ...]:
    """Mean losses over equal parts of a training, few enough to plot."""
    return tuple(float(part.mean()) for part in np.array_split(losses, min(_CURVE_POINTS, len(losses))))
