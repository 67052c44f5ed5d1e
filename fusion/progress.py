"""Progress of all long work in a run: training, scoring, reading pictures, labelling by teachers.

It is shown as bars on a terminal; in a log, as a first line, one line per minute, and a last line. A fork sends its
progress as events to its parent, which owns the terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Hashable, Iterator
from types import TracebackType
from typing import NamedTuple, Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichBars
from rich.table import Column


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


_EVERY_S = 60.0  # interval between lines of a log
_LONG_S = 10.0  # other work than training is logged if it takes longer
_SPEED_S = 600.0  # window for the speed that a bar's remaining time is estimated from
_REDRAWS_PER_S = 2.0  # each costs training one or two milliseconds


class Display:
    """What a kind of output does at each event; nothing by default."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def say(self, line: str) -> None:
        """Print a permanent line."""

    def started(self, work: Work) -> None: ...

    def updated(self, work: Work) -> None: ...

    def ended(self, work: Work, whole: bool) -> None:
        """whole: whether the work ended without an exception."""

    def refresh(self) -> None:
        """Show changed totals."""


class ProgressBars(Display):
    """One bar per piece of work and one for all trainings of the run; each is removed when it ends."""

    def __init__(self, console: Console, clock: Callable[[], float], totals: Totals) -> None:
        columns = (
            TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=60)),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        self.bars = RichBars(
            *columns,
            console=console,
            transient=True,
            refresh_per_second=_REDRAWS_PER_S,
            speed_estimate_period=_SPEED_S,
            get_time=clock,
        )
        self._totals = totals
        self._tasks: dict[Work, TaskID] = {}
        self._all: TaskID | None = None

    def start(self) -> None:
        self.bars.start()

    def stop(self) -> None:
        self.bars.stop()

    def say(self, line: str) -> None:
        self.bars.console.print(line, markup=False)

    def started(self, work: Work) -> None:
        self._tasks[work] = self.bars.add_task(work.what, total=1.0, text=_count(work))
        if work.trainings and self._all is None:
            self._all = self.bars.add_task("all trainings", total=None, text="")
        self.refresh()

    def updated(self, work: Work) -> None:
        text = ", ".join(filter(None, (_count(work), work.facts)))
        self.bars.update(self._tasks[work], completed=work.share, text=text)
        self.refresh()

    def ended(self, work: Work, whole: bool) -> None:
        self.bars.remove_task(self._tasks.pop(work))
        self.refresh()

    def refresh(self) -> None:
        if self._all is not None:
            total = self._totals.total
            text = f"{self._totals.done:.1f} of {total:.0f} or more"
            self.bars.update(self._all, total=total, completed=self._totals.done, text=text)


class LogLines(Display):
    """A first and a last line for each training, and for other work that takes more than ten seconds; and one line
    about all running work after each minute without output."""

    def __init__(self, console: Console, clock: Callable[[], float], totals: Totals) -> None:
        self._console = console
        self._clock = clock
        self._totals = totals
        self._last = clock()

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._last = self._clock()

    def started(self, work: Work) -> None:
        if work.trainings:
            work.shown = True
            left = self._totals.left_s(self._clock())
            self.say(f"{work.what}: {work.total} {work.unit}" + ("" if left is None else f" ({_all_left(left)})"))

    def updated(self, work: Work) -> None:
        now = self._clock()
        if not work.shown and now - work.begun >= _LONG_S:
            work.shown = True
            self.say(_state(work, now))
        elif work.shown and now - self._last >= _EVERY_S:
            states = [_state(other, now) for other in self._totals.open if other.shown]
            left = self._totals.left_s(now)
            self.say("; ".join([*states, *([] if left is None else [_all_left(left)])]))

    def ended(self, work: Work, whole: bool) -> None:
        if work.shown and whole:
            took = f"{work.done} {work.unit} in {duration(self._clock() - work.begun)}"
            self.say(", ".join(filter(None, (f"{work.what}: {took}", work.facts))))


def duration(seconds: float) -> str:
    """Format a rounded duration: 8 s, 50 s, 4 min, 2.5 h."""
    if seconds < 10:
        return f"{seconds:.1f} s" if seconds < 1 else f"{seconds:.0f} s"
    if seconds < 90:
        return f"{5 * round(seconds / 5)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _count(work: Work) -> str:
    return f"{work.done} of {work.total} {work.unit}"


def _state(work: Work, now: float) -> str:
    left = work.left_s(now)
    parts = (f"{work.what}: {_count(work)}", work.facts, "" if left is None else f"about {duration(left)} left")
    return ", ".join(filter(None, parts))


def _all_left(seconds: float) -> str:
    return f"all trainings: about {duration(seconds)} left"


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


class Event(NamedTuple):
    """Work of a fork as it is now. ended: whether it has ended, and whole: whether without an exception."""

    work: Work
    ended: bool = False
    whole: bool = False


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
        if event is None:
            for key in [key for key in self._from_forks if key[0] == fork]:
                self._close(self._from_forks.pop(key), whole=False)
            return
        key = fork, event.work.number
        if key not in self._from_forks:
            self._from_forks[key] = dataclasses.replace(event.work, begun=self.clock())
            self._open(self._from_forks[key])
        self._move(self._from_forks[key], event.work.done, event.work.facts, event.work.share)
        if event.ended:
            self._close(self._from_forks.pop(key), whole=event.whole)

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


class _EventSender(Display):
    """Sends events of this process's work. Lines are dropped, since the parent repeats the call and prints them."""

    def __init__(self, send: Callable[[Event], None], clock: Clock) -> None:
        self._send = send
        self._clock = clock
        self._sent: dict[int, float] = {}

    def started(self, work: Work) -> None:
        self._send(Event(dataclasses.replace(work)))

    def updated(self, work: Work) -> None:
        now = self._clock()
        if now - self._sent.get(work.number, -_EVENTS_S) >= _EVENTS_S:
            self._sent[work.number] = now
            self._send(Event(dataclasses.replace(work)))

    def ended(self, work: Work, whole: bool) -> None:
        self._sent.pop(work.number, None)
        self._send(Event(work, ended=True, whole=whole))
