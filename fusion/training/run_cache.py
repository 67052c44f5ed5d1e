"""Every training of a run, done at most once and looked up by packing, its baselines and the oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from fusion.packing.algorithm import Adapter, Trained
from fusion.progress.progress import Progress
from fusion.training.checkpoint import Checkpoint, State
from fusion.training.train import LoraTrainer, trained_at_once, trained_into


class Trainings:
    """`fusion.packing.algorithm.Train` with one trainer.

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

    def __call__(self, adapter: Adapter) -> Trained:
        """Train the last domain into the adapter of the domains before it."""

        def train() -> tuple[float, ...]:
            *beside, domain = adapter
            if beside:
                if self._checkpoint.trained(self._key(tuple(beside))) is None:
                    self(tuple(beside))
                self.trainer.restore(self.state(tuple(beside)))
            else:
                self.trainer.fresh()
            return self.trainer.train(domain, beside, rehearsal=self._rehearsal)

        return self._made(self._key(adapter), adapter, trained_into(adapter[-1], adapter[:-1]), 1, train)

    def together(self, domains: Collection[str]) -> Trained:
        """Train a set of domains jointly into one adapter. A single domain is the same training as in sequence."""
        names = tuple(sorted(domains))
        if len(names) == 1:
            return self(names)

        def train() -> tuple[float, ...]:
            self.trainer.fresh()
            return self.trainer.train_together(names)

        return self._made(self._key_together(names), names, trained_at_once(names), len(names), train)

    def state(self, adapter: Adapter) -> State:
        """Weights of a trained adapter."""
        return self._checkpoint.state(self._key(adapter))

    def state_together(self, domains: Collection[str]) -> State:
        names = tuple(sorted(domains))
        return self._checkpoint.state(self._key(names) if len(names) == 1 else self._key_together(names))

    def _made(
        self, key: str, domains: Adapter, what: str, size: int, train: Callable[[], tuple[float, ...]]
    ) -> Trained:
        found = self._checkpoint.trained(key)
        if found is None:
            started = time.perf_counter()
            losses = train()
            own = self.trainer.domains
            scores = {name: self.trainer.bounded_score(name, own[name].validation) for name in domains}
            found = Trained(scores, time.perf_counter() - started, losses)
            self._checkpoint.keep(key, found, self.trainer.snapshot())
        else:
            self._progress.known(what, size)
        return found

    def _key(self, adapter: Adapter) -> str:
        names = ", ".join(adapter)
        return f"alone: {names}" if len(adapter) == 1 else f"rehearsal {self._rehearsal!r}: {names}"

    def _key_together(self, names: Adapter) -> str:
        return f"together: {', '.join(names)}"
