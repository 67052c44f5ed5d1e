"""A running piece of work, and the progress of all trainings of a run."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(eq=False)
class Work:
    """number: unique within its process. trainings: number of single-domain trainings that it counts as. begun: start
    time by the progress's clock. share: finished share, 0 to 1. shown: whether a line about it has been printed."""

    number: int
    what: str
    total: int
    unit: str
    trainings: int
    begun: float
    done: int = 0
    share: float = 0.0
    facts: str = ""
    shown: bool = False

    def left_s(self, now: float) -> float | None:
        """Estimated remaining seconds at the average speed so far; None before any progress."""
        return (now - self.begun) * (1 - self.share) / self.share if self.share > 0 else None


class Totals:
    """Counts of single-domain trainings; a joint training counts once per domain.

    expected: minimum number in the run. finished: by this run. stored: found on disk. first: start time of the first
    one. open: all running work.
    """

    def __init__(self) -> None:
        self.expected = 0
        self.finished = 0
        self.stored = 0
        self.first: float | None = None
        self.open: list[Work] = []
        self._counted: set[str] = set()

    def count(self, what: str) -> bool:
        """Whether to count a training, which is true once: it may be requested after a fork has done it."""
        new = what not in self._counted
        self._counted.add(what)
        return new

    @property
    def done(self) -> float:
        """Finished trainings, including parts of running ones."""
        return self.stored + self._worked

    @property
    def total(self) -> float:
        """Number of trainings known so far; the final number is known only when packing ends."""
        under_way = sum(work.trainings for work in self.open)
        return max(self.expected, self.stored + self.finished + under_way)

    def left_s(self, now: float) -> float | None:
        """Estimated remaining seconds of all expected trainings at the speed so far; None before any progress."""
        if self.first is None or not self._worked:
            return None
        return (now - self.first) / self._worked * (self.total - self.done)

    @property
    def _worked(self) -> float:
        return self.finished + sum(work.trainings * work.share for work in self.open)
