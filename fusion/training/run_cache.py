"""Every training of a run, done at most once and looked up by packing, its baselines and the oracle."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Collection, Iterator

import torch

from fusion.packing.algorithm import Adapter, History, Score, TrainingResult
from fusion.packing.guided import Conflicts
from fusion.progress.progress import Progress
from fusion.training.checkpoint import Checkpoint, Key, NotStored, State
from fusion.training.fingerprint import Inputs
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
        inputs: Inputs,
        *,
        rehearsal: float,
        progress: Progress | None = None,
    ) -> None:
        self.trainer = trainer
        self._checkpoint = checkpoint
        removed = {name: values for name, values in checkpoint.inputs().items() if name not in inputs.training}
        self._inputs = inputs._replace(training={**inputs.training, **removed})  # still in trained adapters
        self._rehearsal = rehearsal
        self._progress = progress or Progress()
        self._trains = True

    @contextlib.contextmanager
    def only_stored(self) -> Iterator[None]:
        """Within the block, a training that is not stored raises NotStored."""
        before, self._trains = self._trains, False
        try:
            yield
        finally:
            self._trains = before

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
        names = (*beside, domain)

        def train() -> tuple[float, ...]:
            # A head that the domain already has in this adapter is trained further.
            self.trainer.adapter.restore(self.state_of(before, names))
            return self.trainer.train(domain, beside, rehearsal=self._rehearsal)

        key = self._key_of(before._replace(joins=(*before.joins, (beside, domain))))
        return self._load_or_train(key, names, training_title(domain, beside), 1, train)

    def stored(self, history: History, names: Collection[str]) -> TrainingResult | None:
        """The result of a training with the scores of some of its domains; None if it is not stored."""
        key = self._key_of(history)
        return None if self._checkpoint.trained(key) is None else self._result(key, names)

    @property
    def conflict_cost(self) -> float:
        return self._gradient_batches / self.trainer.plan.training.steps

    def conflicts(self, history: History, domains: Collection[str]) -> Conflicts:
        """By pair of domains, minus the cosine of their gradients in this adapter."""
        names, key = tuple(sorted(domains)), self._key_of(history)
        pairs = list(itertools.combinations(names, 2))
        what = f"conflicts of {', '.join(names)} by {self._gradient_batches} batches"
        found = self._checkpoint.measured(key, what, list[float])
        if found is None:
            self.trainer.adapter.restore(self.state_of(history, names))
            gradients = self.trainer.gradients(names, self._gradient_batches)
            found = [-float(torch.cosine_similarity(gradients[one], gradients[other], dim=0)) for one, other in pairs]
            self._checkpoint.keep_measured(key, what, found)
        return dict(zip(map(frozenset, pairs), found, strict=True))

    @property
    def _gradient_batches(self) -> int:
        return min(_GRADIENT_BATCHES, max(1, self.trainer.plan.training.steps // 25))

    def state_of(self, history: History, names: Collection[str]) -> State:
        """Weights of an adapter with the heads of some of its domains."""
        return _with_heads_of(self._checkpoint.state(self._key_of(history)), names)

    def state(self, adapter: Adapter) -> State:
        return self._checkpoint.state(self._key(adapter))

    def state_together(self, domains: Collection[str]) -> State:
        return self._checkpoint.state(self._key_together(tuple(sorted(domains))))

    def _load_or_train(
        self, key: Key, domains: Adapter, what: str, size: int, train: Callable[[], tuple[float, ...]]
    ) -> TrainingResult:
        if self._checkpoint.trained(key) is None:
            if not self._trains:
                raise NotStored(what)
            started = time.perf_counter()
            losses = train()
            # Scores are stored by themselves, but belong to the seconds of a training.
            scores = {name: self._score(name) for name in domains}
            self._checkpoint.keep(key, time.perf_counter() - started, losses, self.trainer.adapter.snapshot())
            for name, score in scores.items():
                self._checkpoint.keep_measured(key, self._measured(name), score)
        else:
            self._progress.count_stored(what, size)
        return self._result(key, domains)

    def _result(self, key: Key, domains: Collection[str]) -> TrainingResult:
        """A stored training with the scores of some of its domains, which are measured where they are not stored."""
        trained = self._checkpoint.trained(key)
        assert trained is not None
        scores = {name: self._checkpoint.measured(key, self._measured(name), Score) for name in domains}
        if missing := [name for name, score in scores.items() if score is None]:
            self.trainer.adapter.restore(self._checkpoint.state(key))
            for name in missing:
                scores[name] = self._score(name)
                self._checkpoint.keep_measured(key, self._measured(name), scores[name])
        return TrainingResult({name: score for name, score in scores.items() if score is not None}, *trained)

    def _score(self, name: str) -> Score:
        return self.trainer.evaluator.bounded_score(name, self.trainer.domains[name].validation)

    def _measured(self, name: str) -> str:
        return f"score of {name}: {json.dumps(self._inputs.validation[name], sort_keys=True)}"

    def _key(self, adapter: Adapter) -> Key:
        names = ", ".join(adapter)
        what = f"alone: {names}" if len(adapter) == 1 else f"rehearsal {self._rehearsal!r}: {names}"
        return Key(what, self._inputs.of_training(adapter))

    def _key_of(self, history: History) -> Key:
        first = self._key_together(history.together)
        joins = [f"; rehearsal {self._rehearsal!r}: {new} into {', '.join(beside)}" for beside, new in history.joins]
        names = {*history.together, *(new for _, new in history.joins)}
        return Key(first.what + "".join(joins), self._inputs.of_training(names))

    def _key_together(self, names: Adapter) -> Key:
        """Of names in their order. A single domain is the same training as in sequence."""
        if len(names) == 1:
            return self._key(names)
        return Key(f"together: {', '.join(names)}", self._inputs.of_training(names))


def _with_heads_of(state: State, names: Collection[str]) -> State:
    return {key: tensor for key, tensor in state.items() if not key.startswith("head.") or key.split(".")[1] in names}
