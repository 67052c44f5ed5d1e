"""Progress of all long work in a run: training, scoring, reading pictures, labelling by teachers.

It is shown as bars on a terminal and as a few lines elsewhere (`fusion.progress.display`). A fork sends its progress as
events to its parent, which owns the terminal.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Hashable, Iterator
from types import TracebackType
from typing import NamedTuple, Protocol

from rich.console import Console

from fusion.progress.display import Display, LogLines, ProgressBars
from fusion.progress.work import Totals, Work

Clock = Callable[[], float]
_EVENTS_S = 0.2  # interval between progress events of the same work


class ProgressCallback(Protocol):
    """Reports the progress of work."""

    def __call__(self, done: int, facts: str = "", share: float | None = None) -> None:
        """
        Args:
            done: number of finished units.
            facts: figures to show; if empty, the previous ones stay.
            share: 0 to 1, if it differs from done / total.
        """


class WorkStarted(NamedTuple):
    number: int
    what: str
    total: int
    unit: str
    trainings: int


class WorkUpdated(NamedTuple):
    number: int
    done: int
    facts: str
    share: float


class WorkEnded(NamedTuple):
    number: int
    whole: bool


Event = WorkStarted | WorkUpdated | WorkEnded
"""An event of work in a fork; `number` is unique within the fork."""


class Progress:
    """Shows running work; a context manager.

    totals: counts of the run's trainings. watched: whether anything is shown.

    Args:
        console: output; None shows nothing.
        clock: returns seconds from any origin.
    """

    def __init__(self, console: Console | None = None, *, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.watched = console is not None and not console.quiet
        console = console or Console(quiet=True)
        self.totals = Totals()
        display = ProgressBars if console.is_terminal else LogLines
        self.display: Display = display(console, clock, self.totals)
        self._numbers = itertools.count()
        self._from_forks: dict[tuple[Hashable, int], Work] = {}

    def __enter__(self) -> Progress:
        self.display.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.display.stop()

    def say(self, line: str) -> None:
        """Print a permanent line."""
        self.display.say(line)

    def expect(self, trainings: int) -> None:
        """Set the minimum number of single-domain trainings of the run, including those already stored."""
        self.totals.expected = trainings

    def count_stored(self, what: str, trainings: int) -> None:
        """Record a request for a training of that many domains which an earlier run or a fork has already done."""
        if self.totals.count(what):
            self.totals.stored += trainings
            self.display.refresh()

    @contextlib.contextmanager
    def work(self, what: str, total: int, unit: str, *, trainings: int = 0) -> Iterator[ProgressCallback]:
        """Show a piece of work while the block runs.

        Args:
            what: short description.
            total: maximum number of units.
            unit: name of the units, in the plural.
            trainings: number of single-domain trainings that it counts as; 0 for other work.
        """
        work = Work(next(self._numbers), what, total, unit, trainings, self.clock())
        self._open(work)

        def update(done: int, facts: str = "", share: float | None = None) -> None:
            self._move(work, done, facts or work.facts, done / max(1, total) if share is None else share)

        try:
            yield update
        except BaseException:
            self._close(work, whole=False)
            raise
        self._close(work, whole=True)

    def forward(self, send: Callable[[Event], None]) -> None:
        """Send events instead of showing anything; called in a fork, since the parent owns the display."""
        self.display = _EventSender(send, self.clock)

    def receive(self, fork: Hashable, event: Event | None) -> None:
        """Show an event of a fork; None when the fork has ended."""
        match event:
            case None:
                for key in [key for key in self._from_forks if key[0] == fork]:
                    self._close(self._from_forks.pop(key), whole=False)
            case WorkStarted(number, what, total, unit, trainings):
                work = Work(number, what, total, unit, trainings, self.clock())
                self._from_forks[fork, number] = work
                self._open(work)
            case WorkUpdated(number, done, facts, share):
                self._move(self._from_forks[fork, number], done, facts, share)
            case WorkEnded(number, whole):
                self._close(self._from_forks.pop((fork, number)), whole=whole)

    def _open(self, work: Work) -> None:
        if work.trainings and self.totals.first is None:
            self.totals.first = work.begun
        self.totals.open.append(work)
        self.display.started(work)

    def _move(self, work: Work, done: int, facts: str, share: float) -> None:
        work.done, work.facts, work.share = done, facts, min(1.0, share)
        self.display.updated(work)

    def _close(self, work: Work, *, whole: bool) -> None:
        self.totals.open = [other for other in self.totals.open if other is not work]
        if whole and work.trainings and self.totals.count(work.what):
            self.totals.finished += work.trainings
        self.display.ended(work, whole)


class _EventSender:
    """Sends events of this process's work. Lines are dropped, since the parent repeats the call and prints them."""

    def __init__(self, send: Callable[[Event], None], clock: Clock) -> None:
        self._send = send
        self._clock = clock
        self._sent: dict[int, float] = {}

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def refresh(self) -> None: ...

    def say(self, line: str) -> None: ...

    def started(self, work: Work) -> None:
        self._send(WorkStarted(work.number, work.what, work.total, work.unit, work.trainings))

    def updated(self, work: Work) -> None:
        now = self._clock()
        if now - self._sent.get(work.number, -_EVENTS_S) >= _EVENTS_S:
            self._sent[work.number] = now
            self._send(WorkUpdated(work.number, work.done, work.facts, work.share))

    def ended(self, work: Work, whole: bool) -> None:
        self._sent.pop(work.number, None)
        self._send(WorkUpdated(work.number, work.done, work.facts, work.share))
        self._send(WorkEnded(work.number, whole))
