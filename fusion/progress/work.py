"""A piece of work that is under way, and how far all trainings of a run are."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(eq=False)
class Work:
    """number: unique within its process. trainings: of one domain that it counts as. begun: by the progress's clock.
    share: of it that is done, 0 to 1. shown: whether anything was printed of it."""

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
        """Seconds, if it goes on as it has gone; None before it has."""
        return (now - self.begun) * (1 - self.share) / self.share if self.share > 0 else None


class Totals:
    """Trainings of one domain each: expected at least, made by this run, known without. A training of several domains
    counts as many. first: when the first one began. open: all work under way."""

    def __init__(self) -> None:
        self.expected = 0
        self.made = 0
        self.known = 0
        self.first: float | None = None
        self.open: list[Work] = []
        self._counted: set[str] = set()

    def count(self, what: str) -> bool:
        """Whether a training is counted now, which it is once: it may be asked for after a fork made it."""
        new = what not in self._counted
        self._counted.add(what)
        return new

    @property
    def done(self) -> float:
        """Trainings done, parts of those under way included."""
        return self.known + self._worked

    @property
    def total(self) -> float:
        """Trainings in all, as far as is known: how many a packing needs comes out at its end."""
        under_way = sum(work.trainings for work in self.open)
        return max(self.expected, self.known + self.made + under_way)

    def left_s(self, now: float) -> float | None:
        """Seconds for all trainings that are expected, if they take as long as those so far; None before there are
        any."""
        if self.first is None or not self._worked:
            return None
        return (now - self.first) / self._worked * (self.total - self.done)

    @property
    def _worked(self) -> float:
        return self.made + sum(work.trainings * work.share for work in self.open)
