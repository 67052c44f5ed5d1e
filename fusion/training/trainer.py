"""Training of one adapter with its heads on a frozen base: the training loop."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from fusion.packing.algorithm import Adapter
from fusion.plan.schema import HEAD_SAMPLES, HEAD_STEPS, Plan
from fusion.progress import Progress
from fusion.training.adapter import Batch, TrainableAdapter
from fusion.training.checkpoint import State
from fusion.training.collator import EncodedSample
from fusion.training.frozen_base import Domain, FrozenBase
from fusion.training.objectives import HIDDEN_UNITS, HeadObjective, ImageHead, stored_head
from fusion.training.scoring import Evaluator, HeldOutScores, Parameters
from fusion.training.steps import EarlyStopping, Schedule, backward_in_parts, halving
from heads import HeadSpec, save_heads
from heads.storage import give_usual_mode
from vlora.adapter_files import WEIGHTS_FILE
from vlora.errors import BadPlan

_EVALUATIONS = 12  # on held-back samples within one training
_CURVE_POINTS = 24
_HEAD_DECAY = 1e-3
_RECENT = 10  # steps in the mean loss for display


@dataclasses.dataclass(frozen=True)
class _Job:
    """One training.

    title: for display. seed: what the random draws are seeded with. adapter: all domains in the adapter. new: those
    that are trained, and get a head unless they have one. watched: those whose held-back loss decides early stopping.
    rows: returns the domain of each sample of a step's batch.
    """

    title: str
    seed: str
    adapter: Adapter
    new: Sequence[str]
    watched: Sequence[str]
    steps: int
    rows: Callable[[int], list[str]]

    @property
    def trains_lora(self) -> bool:
        return self.steps > 0


class StepTime(NamedTuple):
    """Duration of a training step. cpu_s: processor time of this process, which `training.seconds` limits."""

    wall_s: float
    cpu_s: float


class LoraTrainer:
    """Trains adapters over a frozen base, one at a time.

    The result of a training depends only on its initial state, the plan and the seed: random draws are seeded by what
    is trained.
    """

    def __init__(
        self, base: FrozenBase, domains: Mapping[str, Domain], plan: Plan, *, progress: Progress | None = None
    ) -> None:
        self.plan = plan
        self.progress = progress or Progress()
        self.adapter = TrainableAdapter(base, domains, plan)
        self.evaluator = Evaluator(self.adapter, plan.confidence, self.progress)
        self.domains = self.adapter.domains
        self._trained_heads: dict[str, tuple[State, list[float]]] = {}

    def train(self, domain: str, beside: Sequence[str], *, rehearsal: float | None = None) -> tuple[float, ...]:
        """Train one more domain into the adapter, which holds the domains in `beside`; return its losses. rehearsal:
        share of each batch drawn from the domains in `beside`; None for the plan's."""
        settings = self.plan.training
        share = settings.rehearsal if rehearsal is None else rehearsal
        again_from = self._dependent(sorted(beside))  # in another order it is the same training
        rehearsed = round(settings.batch_size * share) if again_from else 0

        def rows(step: int) -> list[str]:
            # Round robin over all steps, so that each is rehearsed even if a batch cannot hold all of them.
            again = [again_from[(step * rehearsed + place) % len(again_from)] for place in range(rehearsed)]
            return [domain] * (settings.batch_size - rehearsed) + again

        job = _Job(
            title=training_title(domain, beside),
            seed=f"{domain} beside {','.join(sorted(beside))}",
            adapter=(*beside, domain),
            new=(domain,),
            watched=(*again_from, domain) if rehearsed else (domain,),
            steps=settings.steps * len(self._dependent((domain,))),
            rows=rows,
        )
        return self._run(job)

    def train_together(self, domains: Sequence[str]) -> tuple[float, ...]:
        """Train several domains jointly into a new adapter, with as many steps per domain as for one alone."""
        settings = self.plan.training
        dependent = self._dependent(domains)

        def rows(step: int) -> list[str]:
            first = step * settings.batch_size
            return [dependent[place % len(dependent)] for place in range(first, first + settings.batch_size)]

        job = _Job(
            title=joint_training_title(domains),
            seed=f"together {','.join(domains)}",
            adapter=tuple(domains),
            new=domains,
            watched=dependent,
            steps=settings.steps * len(dependent),
            rows=rows,
        )
        return self._run(job)

    def gradients(self, domains: Sequence[str], batches: int) -> dict[str, torch.Tensor]:
        """By domain, the gradient [parameters of the adapter] of its loss on training samples, heads not included."""
        lora = list(self.adapter.lora.values())
        for parameter in self.adapter.parameters.values():
            parameter.requires_grad_(True)
        found, size = {}, self.plan.training.batch_size

        def undo(at_once: int) -> None:
            for parameter in self.adapter.parameters.values():
                parameter.grad = None

        with self.progress.work("measuring conflicts", len(domains), "domains") as update, self.adapter.recomputation():
            for count, domain in enumerate(domains, 1):
                rng = np.random.default_rng(self.adapter.seed(f"gradient {domain}"))
                batch = self.draw(rng, domain, batches * self.plan.training.batch_size)
                _, size = halving(size, functools.partial(self.backward, batch), undo)
                found[domain] = torch.cat([_gradient(parameter) for parameter in lora])
                undo(size)
                update(count)
        return found

    def _dependent(self, domains: Sequence[str]) -> list[str]:
        """The domains whose answers depend on the LoRA: it trains on no others."""
        return [name for name in domains if not self.adapter.is_independent(name)]

    def time_step(self, rows: Sequence[str]) -> StepTime:
        """Duration of one step on a batch with samples of these domains. Changes the adapter and creates heads for all
        domains."""
        for name in self.domains:
            if name not in self.adapter.heads:
                self.adapter.add_head(name)
        optimizer, rng = self._optimizer(), np.random.default_rng(self.adapter.seed("time"))
        self.adapter.model.train()
        took = self._timed(lambda: self._step(optimizer, self._draw_batch(rng, rows), len(rows)))
        self.adapter.model.eval()
        return took

    def time_head_step(self, domain: str, samples: int, steps: int) -> StepTime:
        """Mean duration of a few steps of training an independent head by itself. Creates and changes the head."""
        self.adapter.add_head(domain)
        took = self._timed(lambda: self._train_image_head(domain, 0, samples=samples, steps=steps))
        return StepTime(took.wall_s / steps, took.cpu_s / steps)

    def _timed(self, work: Callable[[], object]) -> StepTime:
        device = self.adapter.base.hf_model.device
        began, cpu_began = time.perf_counter(), time.process_time()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return StepTime(time.perf_counter() - began, time.process_time() - cpu_began)

    def save(self, folder: Path, state: State, parameters: Mapping[str, Parameters] = {}) -> None:
        """Write an adapter in PEFT's format with its heads. parameters: by domain, of calibrated heads; those of others
        are measured."""
        self.adapter.restore(state)
        self.adapter.model.save_pretrained(str(folder))
        give_usual_mode(folder / WEIGHTS_FILE)
        heads = {}
        for name, head in self.adapter.heads.items():
            domain, task = self.domains[name], self.domains[name].task
            assert isinstance(task, HeadObjective), "words have no head"
            layers = {"reads": "inputs", "hidden_units": HIDDEN_UNITS} if isinstance(head, ImageHead) else {}
            spec = HeadSpec(
                **layers,  # type: ignore[arg-type]
                name=name,
                task=task.task.kind,
                labels=task.task.labels,
                parameters=parameters[name] if name in parameters else self.evaluator.head_parameters(name),
                prompt=domain.plan.question,
                num_frames=domain.splits.num_frames,
                hidden_size=head.in_features,
            )
            heads[name] = stored_head(spec, head)
        if heads:
            save_heads(folder, heads)

    def draw(self, rng: np.random.Generator, domain: str, count: int) -> list[tuple[str, EncodedSample]]:
        """Draw training samples of a domain, without those held back for early stopping or calibration."""
        own = self.domains[domain]
        holds_back = self.plan.training.patience is not None or own.task.calibration_decides
        samples = own.others if holds_back else own.train
        return [(domain, samples[i]) for i in rng.integers(len(samples), size=count)]

    def backward(self, batch: Batch, at_once: int) -> float:
        """Add the gradient of a batch's loss, computed in parts of `at_once` samples; return the loss."""
        return backward_in_parts(
            batch, at_once, self.adapter.forward, lambda outputs: self.adapter.loss(batch, outputs)
        )

    def _run(self, job: _Job) -> tuple[float, ...]:
        """Run the training; return the losses of the LoRA, or those of its heads if it has no step, start to end."""
        for domain in job.new:
            if domain not in self.adapter.heads:
                self.adapter.add_head(domain)
        independent = [name for name in job.new if self.adapter.is_independent(name)]
        losses = [loss for name in independent for loss in self._independent_head(name, int(not job.trains_lora))]
        return self._run_lora(job) if job.trains_lora else _curve(losses)

    def _independent_head(self, domain: str, trainings: int) -> list[float]:
        if domain in self._trained_heads:
            state, losses = self._trained_heads[domain]
            self.adapter.heads[domain].load_state_dict(state)
            self.progress.count_stored(f"the head of {domain}", trainings)
        else:
            self.adapter.add_head(domain)  # also where an earlier training has left one
            losses = self._train_image_head(domain, trainings)
            state = {name: value.clone() for name, value in self.adapter.heads[domain].state_dict().items()}
            self._trained_heads[domain] = (state, losses)
        return losses

    def _train_image_head(
        self, domain: str, trainings: int, *, samples: int | None = None, steps: int | None = None
    ) -> list[float]:
        """Train a head over pictures' features by itself; return its losses. trainings: as of `Progress.work`.
        samples: per step; those of a whole training by default, like `steps`."""
        settings, own = self.plan.training, self.domains[domain]
        head = self.adapter.heads[domain]
        steps, count = steps or HEAD_STEPS * settings.steps, samples or HEAD_SAMPLES * settings.batch_size
        optimizer = torch.optim.AdamW(head.parameters(), settings.learning_rate, weight_decay=_HEAD_DECAY)
        rng = np.random.default_rng(self.adapter.seed(f"head alone {domain}"))
        targets = {id(sample): sample.learned for sample in own.others}
        losses: list[float] = []
        schedule = Schedule(optimizer, settings.learning_rate, steps, settings.seconds)
        with self.progress.work(f"training the head of {domain}", steps, "steps", trainings=trainings) as update:
            for step in schedule:
                batch = self.draw(rng, domain, count)
                outputs = self.adapter.forward(batch)
                with self.adapter.autocast():
                    loss = own.task.loss(outputs, head, [targets[id(sample)] for _, sample in batch])
                loss.backward()
                gradients = [parameter.grad for parameter in head.parameters() if parameter.grad is not None]
                self._refuse_not_finite((domain,), step, float(loss.detach()), nn.utils.get_total_norm(gradients))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(float(loss.detach()))
                update(step + 1, f"loss {losses[-1]:.3f}", max(schedule.done, (step + 1) / steps))
        return losses

    def _run_lora(self, job: _Job) -> tuple[float, ...]:
        """Run the steps of the LoRA with the heads that depend on it; return the losses from start to end."""
        settings = self.plan.training
        rng = np.random.default_rng(self.adapter.seed(job.seed))
        optimizer = self._optimizer()
        size = settings.batch_size
        losses: list[float] = []
        early = EarlyStopping[State](settings.patience)
        held_out = HeldOutScores(
            lambda name, count: self.evaluator.score(name, self.domains[name].validation[:count]),
            job.adapter,
            self.progress.clock,
        )
        dependent = len(self._dependent(job.new))  # heads of the others have had their own time
        with self.progress.work(job.title, job.steps, "steps", trainings=len(job.new)) as update:
            self.adapter.model.train()
            seconds = None if settings.seconds is None else settings.seconds * dependent
            schedule = Schedule(optimizer, settings.learning_rate, job.steps, seconds)
            for step in schedule:
                loss, size = self._step(optimizer, self._draw_batch(rng, job.rows(step)), size, step)
                losses.append(loss)
                if self.progress.watched and held_out.due and step + 1 < job.steps:
                    with schedule.paused():  # displayed scores must not change a training
                        self.adapter.model.eval()
                        held_out.update()
                        self.adapter.model.train()
                update(step + 1, _facts(losses, held_out), max(schedule.done, (step + 1) / job.steps))
                evaluates = settings.patience is not None and (step + 1) % max(1, job.steps // _EVALUATIONS) == 0
                if evaluates and early.stops(self.evaluator.held_back_loss(job.watched), self.adapter.snapshot):
                    break
            if early.best is not None:
                self.adapter.restore(early.best)
            self.adapter.model.eval()
        return _curve(losses)

    def _optimizer(self) -> torch.optim.Optimizer:
        """An optimizer over the adapter and all current heads."""
        parameters = list(self.adapter.parameters.values())
        for parameter in parameters:
            parameter.requires_grad_(True)
        return torch.optim.AdamW(parameters, self.plan.training.learning_rate, weight_decay=0.0)

    def _draw_batch(self, rng: np.random.Generator, rows: Sequence[str]) -> list[tuple[str, EncodedSample]]:
        return [pair for name, count in Counter(rows).items() for pair in self.draw(rng, name, count)]

    def _step(self, optimizer: torch.optim.Optimizer, batch: Batch, size: int, step: int = 0) -> tuple[float, int]:
        """One optimizer step on a batch, in parts of `size` samples, or fewer if memory runs out. Returns the loss and
        the size used. Raises BadPlan, and leaves the weights unchanged, if the loss is not finite."""

        def undo(at_once: int) -> None:
            optimizer.zero_grad(set_to_none=True)  # drop the gradients of earlier parts
            self.progress.say(f"out of memory: continuing with {at_once} samples at a time; gradients do not change")

        loss, size = halving(size, lambda at_once: self.backward(batch, at_once), undo)
        norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        self._refuse_not_finite((name for name, _ in batch), step, loss, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss, size

    def _refuse_not_finite(self, domains: Iterable[str], step: int, loss: float, norm: torch.Tensor) -> None:
        """Raise BadPlan if the loss or the norm of its gradient is not finite: the step would spoil every weight."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        settings = self.plan.training
        exact = ", or set `training.bfloat16: false`" if settings.bfloat16 else ""
        raise BadPlan(
            f"training {', '.join(dict.fromkeys(domains))}: step {step + 1} has a loss of {loss:g} and a gradient of "
            f"norm {float(norm):g}, which must be finite; lower `training.learning_rate` (now "
            f"{settings.learning_rate:g}){exact}"
        )


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros(parameter.numel()) if parameter.grad is None else parameter.grad.float().flatten().cpu()


def training_title(domain: str, beside: Sequence[str]) -> str:
    """Display name of a training of one more domain into an adapter."""
    return f"training {domain} into {', '.join(beside) or 'a new adapter'}"


def joint_training_title(domains: Sequence[str]) -> str:
    """Display name of a joint training of several domains into a new adapter."""
    return f"training {', '.join(domains)} at once"


def _facts(losses: Sequence[float], held_out: HeldOutScores) -> str:
    """The mean recent loss, and the last scores of held-out samples."""
    recent = losses[-_RECENT:]
    loss = f"loss {sum(recent) / len(recent):.3f}"
    return f"{loss}, held-out {held_out}" if str(held_out) else loss


def _curve(losses: Sequence[float]) -> tuple[float, ...]:
    """Mean losses over equal parts of a training, few enough to plot."""
    return tuple(float(part.mean()) for part in np.array_split(losses, min(_CURVE_POINTS, len(losses))))
