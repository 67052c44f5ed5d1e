"""Every training of a run, done at most once and looked up by packing, its baselines and the oracle."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

import torch

from fusion.packing.algorithm import Adapter, History, Score, TrainingResult
from fusion.packing.guided import Conflicts
from fusion.progress import Progress
from fusion.training.checkpoint import Checkpoint, Key, State
from fusion.training.fingerprint import ALL, Inputs
from fusion.training.trainer import LoraTrainer, joint_training_title, training_title

T = TypeVar("T")
_GRADIENT_BATCHES = 4  # per domain, in a training of a hundred steps or more


@dataclasses.dataclass(eq=False)
class RunCache:
    """`fusion.packing.algorithm.Train` and `fusion.packing.guided.Trainings` with one trainer.

    Args:
        rehearsal: share of each batch for domains already in the adapter.
        progress: notified of requested trainings that are already stored.
    """

    trainer: LoraTrainer
    checkpoint: Checkpoint
    inputs: Inputs
    _: dataclasses.KW_ONLY
    rehearsal: float
    progress: Progress = dataclasses.field(default_factory=Progress)
    _supposed: dict[str, int] | None = dataclasses.field(default=None, init=False)

    @functools.cached_property
    def _identities(self) -> dict[str, str]:
        return self.inputs.identities

    @contextlib.contextmanager
    def supposing_success(self) -> Iterator[dict[str, int]]:
        """Within the block, a training that is not stored is not run: all of its domains meet their thresholds. Yields
        those trainings and their sizes in single-domain trainings, as they are requested."""
        before, self._supposed = self._supposed, {}
        try:
            yield self._supposed
        finally:
            self._supposed = before

    def would_train(self, job: Callable[[], object]) -> bool:
        with self.supposing_success() as missing:
            job()
        return bool(missing)

    def __call__(self, adapter: Adapter) -> TrainingResult:
        """Train the last domain into the adapter of the domains before it."""
        return self._load_or_train(History.in_sequence(adapter), adapter)

    def together(self, domains: Collection[str]) -> TrainingResult:
        """Train a set of domains jointly into one adapter. A single domain is the same training as in sequence."""
        names = tuple(sorted(domains))
        return self._load_or_train(History(names), names)

    def join(self, before: History, beside: Adapter, domain: str) -> TrainingResult:
        return self._load_or_train(before._replace(joins=(*before.joins, (beside, domain))), (*beside, domain))

    def stored(self, history: History, names: Collection[str]) -> TrainingResult | None:
        """The result of a training with the scores of some of its domains; None if it is not stored."""
        key = self._key_of(history)
        return None if self.checkpoint.trained(key) is None else self._result(key, names)

    @property
    def conflict_cost(self) -> float:
        return self._gradient_batches / self.trainer.plan.training.steps

    def conflicts(self, history: History, domains: Collection[str]) -> Conflicts:
        """By pair of domains, minus the cosine of their gradients in this adapter."""
        names = tuple(sorted(domains, key=self.identity))
        pairs = list(itertools.combinations(names, 2))

        def measure() -> list[float]:
            gradients = self.trainer.gradients(names, self._gradient_batches)
            return [-float(torch.cosine_similarity(gradients[one], gradients[other], dim=0)) for one, other in pairs]

        what = f"conflicts of {', '.join(map(self.identity, names))} by {self._gradient_batches} batches"
        found = self._measured(self._key_of(history), names, what, list[float], measure)
        return dict(zip(map(frozenset, pairs), found, strict=True))

    def tested(self, history: History, names: Adapter, domain: str, kind: type[T], measure: Callable[[], T]) -> T:
        """Results on test data of one of an adapter's domains. measure: called with the adapter restored, unless they
        are stored."""
        what = f"test of {self.identity(domain)}: {json.dumps(self.inputs.test[domain], sort_keys=True)}"
        return self._measured(self._key_of(history), names, what, kind, measure)

    @property
    def _gradient_batches(self) -> int:
        return min(_GRADIENT_BATCHES, max(1, self.trainer.plan.training.steps // 25))

    def identity(self, name: str) -> str:
        """What identifies a domain in stored trainings; of a removed domain, its name here."""
        return self._identities.get(name, name)

    def state_of(self, history: History, names: Collection[str]) -> State:
        """Weights of an adapter with the heads of some of its domains."""
        return self._state(self._key_of(history), names)

    def _state(self, key: Key, names: Collection[str]) -> State:
        here = {self.identity(name): name for name in names}
        return _renamed(self.checkpoint.state(key), here.get)

    def _load_or_train(self, history: History, domains: Adapter) -> TrainingResult:
        key = self._key_of(history)
        if self.checkpoint.trained(key) is not None:
            self.progress.count_stored(_title(history), key.size)
            return self._result(key, domains)
        if self._supposed is not None:
            self._supposed[_title(history)] = key.size
            return TrainingResult(dict.fromkeys(domains, Score(1.0, 1.0)), 0.0, ())
        started = time.perf_counter()
        losses = self._train(history, domains)
        # Scores are stored by themselves, but belong to the seconds of a training.
        scores = {name: self._score(name) for name in domains}
        state = _renamed(self.trainer.adapter.snapshot(), self.identity)
        self.checkpoint.keep(key, time.perf_counter() - started, losses, state)
        for name, score in scores.items():
            self.checkpoint.keep_measured(key, self._scored(name), score)
        return self._result(key, domains)

    def _train(self, history: History, domains: Adapter) -> tuple[float, ...]:
        """Run the last training of a history, after those before it that are not stored; return its losses."""
        if history.joins:
            *joins, (beside, domain) = history.joins
            before = history._replace(joins=tuple(joins))
            if self.checkpoint.trained(self._key_of(before)) is None:
                self._load_or_train(before, beside)
            # A head that the domain already has in this adapter is trained further.
            self.trainer.adapter.restore(self.state_of(before, domains))
            return self.trainer.train(domain, beside, rehearsal=self.rehearsal)
        self.trainer.adapter.reset()
        if len(history.together) == 1:
            return self.trainer.train(history.together[0], (), rehearsal=self.rehearsal)
        return self.trainer.train_together(history.together)

    def _result(self, key: Key, domains: Collection[str]) -> TrainingResult:
        """A stored training with the scores of some of its domains, which are measured where they are not stored."""
        trained = self.checkpoint.trained(key)
        assert trained is not None
        scores = {
            name: self._measured(key, domains, self._scored(name), Score, functools.partial(self._score, name))
            for name in domains
        }
        return TrainingResult(scores, *trained)

    def _measured(self, key: Key, names: Collection[str], what: str, kind: type[T], measure: Callable[[], T]) -> T:
        """A value of an adapter, which is restored with the heads of these domains unless the value is stored."""
        found = self.checkpoint.measured(key, what, kind)
        if found is None:
            self.trainer.adapter.restore(self._state(key, names))
            found = measure()
            self.checkpoint.keep_measured(key, what, found)
        return found

    def _score(self, name: str) -> Score:
        return self.trainer.evaluator.bounded_score(name, self.trainer.domains[name].validation)

    def _scored(self, name: str) -> str:
        return f"score of {self.identity(name)}: {json.dumps(self.inputs.validation[name], sort_keys=True)}"

    def _key_of(self, history: History) -> Key:
        def what(history: History) -> str:
            first = ("alone: " if len(history.together) == 1 else "together: ") + ", ".join(history.together)
            joins = [f"; rehearsal {self.rehearsal!r}: {new} into {', '.join(old)}" for old, new in history.joins]
            return first + "".join(joins)

        def same(names: Adapter) -> Adapter:
            return tuple(sorted(map(self.identity, names)))

        joins = tuple((same(beside), self.identity(new)) for beside, new in history.joins)
        names = (*history.together, *(new for _, new in history.joins))
        identity = what(History(same(history.together), joins))
        shared = json.dumps(self.inputs.training[ALL], sort_keys=True)
        size = 1 if history.joins else len(history.together)
        return Key(what(history), self.inputs.of_training(names), f"{identity}; {shared}", size)


def _title(history: History) -> str:
    """Display name of the last training of a history."""
    if history.joins:
        beside, domain = history.joins[-1]
        return training_title(domain, beside)
    if len(history.together) == 1:
        return training_title(history.together[0], ())
    return joint_training_title(history.together)


def _renamed(state: State, name_of: Callable[[str], str | None]) -> State:
    """Weights with other names of the heads' domains, without the heads of domains that have none."""
    found = {}
    for key, tensor in state.items():
        if not key.startswith("head."):
            found[key] = tensor
        elif (name := name_of(key.split(".")[1])) is not None:
            found[f"head.{name}.{key.split('.', 2)[2]}"] = tensor
    return found
