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

from fusion.progress.display import Bars, Display, Lines
from fusion.progress.work import Totals, Work

Clock = Callable[[], float]
_EVENTS_S = 0.2  # interval between progress events of the same work


class Moved(Protocol):
    """Reports the progress of work."""

    def __call__(self, done: int, facts: str = "", share: float | None = None) -> None:
        """
        Args:
            done: number of finished units.
            facts: figures to show; if empty, the previous ones stay.
            share: 0 to 1, if it differs from done / total.
        """


class Opened(NamedTuple):
    number: int
    what: str
    total: int
    unit: str
    trainings: int


class Reached(NamedTuple):
    number: int
    done: int
    facts: str
    share: float


class Closed(NamedTuple):
    number: int
    whole: bool


Event = Opened | Reached | Closed
"""An event of work in a fork; `number` is unique within the fork."""


class Progress:
    """Shows running work; a context manager.

    Args:
        console: output; None shows nothing.
        clock: returns seconds from any origin.
    """

    def __init__(self, console: Console | None = None, *, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.watched = console is not None and not console.quiet
        console = console or Console(quiet=True)
        self._totals = Totals()
        display = Bars if console.is_terminal else Lines
        self._display: Display = display(console, clock, self._totals)
        self._numbers = itertools.count()
        self._from_forks: dict[tuple[Hashable, int], Work] = {}

    def __enter__(self) -> Progress:
        self._display.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self._display.stop()

    def say(self, line: str) -> None:
        """Print a permanent line."""
        self._display.say(line)

    def expect(self, trainings: int) -> None:
        """Set the minimum number of single-domain trainings of the run, including those already stored."""
        self._totals.expected = trainings

    def known(self, what: str, trainings: int) -> None:
        """Record a request for a training of that many domains which an earlier run or a fork has already done."""
        if self._totals.count(what):
            self._totals.known += trainings
            self._display.refresh()

    @contextlib.contextmanager
    def work(self, what: str, total: int, unit: str, *, trainings: int = 0) -> Iterator[Moved]:
        """Show a piece of work while the block runs.

        Args:
            what: short description.
            total: maximum number of units.
            unit: name of the units, in the plural.
            trainings: number of single-domain trainings that it counts as; 0 for other work.
        """
        work = Work(next(self._numbers), what, total, unit, trainings, self.clock())
        self._open(work)

        def moved(done: int, facts: str = "", share: float | None = None) -> None:
            self._move(work, done, facts or work.facts, done / max(1, total) if share is None else share)

        try:
            yield moved
        except BaseException:
            self._close(work, whole=False)
            raise
        self._close(work, whole=True)

    def forward(self, send: Callable[[Event], None]) -> None:
        """Send events instead of showing anything; called in a fork, since the parent owns the display."""
        self._display = _Forwarded(send, self.clock)

    def receive(self, fork: Hashable, event: Event | None) -> None:
        """Show an event of a fork; None when the fork has ended."""
        match event:
            case None:
                for key in [key for key in self._from_forks if key[0] == fork]:
                    self._close(self._from_forks.pop(key), whole=False)
            case Opened(number, what, total, unit, trainings):
                work = Work(number, what, total, unit, trainings, self.clock())
                self._from_forks[fork, number] = work
                self._open(work)
            case Reached(number, done, facts, share):
                self._move(self._from_forks[fork, number], done, facts, share)
            case Closed(number, whole):
                self._close(self._from_forks.pop((fork, number)), whole=whole)

    def _open(self, work: Work) -> None:
        if work.trainings and self._totals.first is None:
            self._totals.first = work.begun
        self._totals.open.append(work)
        self._display.opened(work)

    def _move(self, work: Work, done: int, facts: str, share: float) -> None:
        work.done, work.facts, work.share = done, facts, min(1.0, share)
        self._display.moved(work)

    def _close(self, work: Work, *, whole: bool) -> None:
        self._totals.open = [other for other in self._totals.open if other is not work]
        if whole and work.trainings and self._totals.count(work.what):
            self._totals.made += work.trainings
        self._display.closed(work, whole)


class _Forwarded:
    """Sends events of this process's work. Lines are dropped, since the parent repeats the call and prints them."""

    def __init__(self, send: Callable[[Event], None], clock: Clock) -> None:
        self._send = send
        self._clock = clock
        self._sent: dict[int, float] = {}

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def refresh(self) -> None: ...

    def say(self, line: str) -> None: ...

    def opened(self, work: Work) -> None:
        self._send(Opened(work.number, work.what, work.total, work.unit, work.trainings))

    def moved(self, work: Work) -> None:
        now = self._clock()
        if now - self._sent.get(work.number, -_EVENTS_S) >= _EVENTS_S:
            self._sent[work.number] = now
            self._send(Reached(work.number, work.done, work.facts, work.share))

    def closed(self, work: Work, whole: bool) -> None:
        self._sent.pop(work.number, None)
        self._send(Reached(work.number, work.done, work.facts, work.share))
        self._send(Closed(work.number, whole))
