"""Every training of a run, done at most once and looked up by packing, its baselines and the oracle."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection

import torch

from fusion.packing.algorithm import Adapter, History, TrainingResult
from fusion.packing.guided import Conflicts
from fusion.progress.progress import Progress
from fusion.training.checkpoint import Checkpoint, State
from fusion.training.trainer import LoraTrainer, joint_training_title, training_title

_GRADIENT_BATCHES = 4  # per domain, in a training of a hundred steps or more


class RunCache:
    """`fusion.packing.algorithm.Train` and `fusion.packing.guided.Trainings` with one trainer.

    Args:
        rehearsal: share of each batch for domains already in the adapter.
        progress: notified of requested trainings that are already stored.
    """

    def __init__(
        self,
        trainer: LoraTrainer,
        checkpoint: Checkpoint,
        *,
        rehearsal: float,
        progress: Progress | None = None,
    ) -> None:
        self.trainer = trainer
        self._checkpoint = checkpoint
        self._rehearsal = rehearsal
        self._progress = progress or Progress()

    def __call__(self, adapter: Adapter) -> TrainingResult:
        """Train the last domain into the adapter of the domains before it."""

        def train() -> tuple[float, ...]:
            *beside, domain = adapter
            if beside:
                if self._checkpoint.trained(self._key(tuple(beside))) is None:
                    self(tuple(beside))
                self.trainer.adapter.restore(self.state(tuple(beside)))
            else:
                self.trainer.adapter.reset()
            return self.trainer.train(domain, beside, rehearsal=self._rehearsal)

        return self._load_or_train(self._key(adapter), adapter, training_title(adapter[-1], adapter[:-1]), 1, train)

    def together(self, domains: Collection[str]) -> TrainingResult:
        """Train a set of domains jointly into one adapter. A single domain is the same training as in sequence."""
        names = tuple(sorted(domains))
        if len(names) == 1:
            return self(names)

        def train() -> tuple[float, ...]:
            self.trainer.adapter.reset()
            return self.trainer.train_together(names)

        return self._load_or_train(self._key_together(names), names, joint_training_title(names), len(names), train)

    def join(self, before: History, beside: Adapter, domain: str) -> TrainingResult:
        """Train a domain into an adapter, of which only the domains in `beside` stay."""
        names = (*beside, domain)

        def train() -> tuple[float, ...]:
            # A head that the domain already has in this adapter is trained further.
            self.trainer.adapter.restore(self.state_of(before, names))
            return self.trainer.train(domain, beside, rehearsal=self._rehearsal)

        key = self._key_of(before._replace(joins=(*before.joins, (beside, domain))))
        return self._load_or_train(key, names, training_title(domain, beside), 1, train)

    @property
    def conflict_cost(self) -> float:
        return self._gradient_batches / self.trainer.plan.training.steps

    def conflicts(self, history: History, domains: Collection[str]) -> Conflicts:
        """By pair of domains, minus the cosine of their gradients in this adapter."""
        names = tuple(sorted(domains))
        self.trainer.adapter.restore(self.state_of(history, names))
        gradients = self.trainer.gradients(names, self._gradient_batches)
        return {
            frozenset(pair): -float(torch.cosine_similarity(gradients[pair[0]], gradients[pair[1]], dim=0))
            for pair in itertools.combinations(names, 2)
        }

    @property
    def _gradient_batches(self) -> int:
        return min(_GRADIENT_BATCHES, max(1, self.trainer.plan.training.steps // 25))

    def state_of(self, history: History, names: Collection[str]) -> State:
        """Weights of an adapter with the heads of some of its domains."""
        state = self._checkpoint.state(self._key_of(history))
        return {
            key: tensor for key, tensor in state.items() if not key.startswith("head.") or key.split(".")[1] in names
        }

    def state(self, adapter: Adapter) -> State:
        """Weights of a trained adapter."""
        return self._checkpoint.state(self._key(adapter))

    def state_together(self, domains: Collection[str]) -> State:
        names = tuple(sorted(domains))
        return self._checkpoint.state(self._key(names) if len(names) == 1 else self._key_together(names))

    def _load_or_train(
        self, key: str, domains: Adapter, what: str, size: int, train: Callable[[], tuple[float, ...]]
    ) -> TrainingResult:
        found = self._checkpoint.trained(key)
        if found is None:
            started = time.perf_counter()
            losses = train()
            own = self.trainer.domains
            scores = {name: self.trainer.evaluator.bounded_score(name, own[name].validation) for name in domains}
            found = TrainingResult(scores, time.perf_counter() - started, losses)
            self._checkpoint.keep(key, found, self.trainer.adapter.snapshot())
        else:
            self._progress.count_stored(what, size)
        return found

    def _key(self, adapter: Adapter) -> str:
        names = ", ".join(adapter)
        return f"alone: {names}" if len(adapter) == 1 else f"rehearsal {self._rehearsal!r}: {names}"

    def _key_of(self, history: History) -> str:
        names = history.together
        first = self._key(names) if len(names) == 1 else self._key_together(names)
        joins = [f"; rehearsal {self._rehearsal!r}: {new} into {', '.join(beside)}" for beside, new in history.joins]
        return first + "".join(joins)

    def _key_together(self, names: Adapter) -> str:
        return f"together: {', '.join(names)}"
