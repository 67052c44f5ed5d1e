"""Progress of all long work in a run: training, scoring, reading pictures, labelling by teachers.

It is shown as bars on a terminal; in a log, as a first line, one line per minute, and a last line. A fork sends its
work to its parent, which owns the terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Hashable, Iterator
from types import TracebackType
from typing import Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichBars
from rich.table import Column

Clock = Callable[[], float]


@dataclasses.dataclass(eq=False)
class Work:
    """number: unique within its process. trainings: number of single-domain trainings that it counts as. begun: start
    time by the progress's clock. share: finished share, 0 to 1. state: broken if it ended with an exception. shown:
    whether a line about it has been printed."""

    number: int
    what: str
    total: int
    unit: str
    trainings: int
    begun: float
    done: int = 0
    share: float = 0.0
    facts: str = ""
    state: Literal["running", "complete", "broken"] = "running"
    shown: bool = False

    def __str__(self) -> str:
        return ", ".join(filter(None, (f"{self.done} of {self.total} {self.unit}", self.facts)))

    def left(self, now: float) -> str:
        """How far it is, with the estimated remaining time at the average speed so far."""
        left_s = (now - self.begun) * (1 - self.share) / self.share if self.share > 0 else None
        return f"{self.what}: {self}" + ("" if left_s is None else f", about {duration(left_s)} left")


@dataclasses.dataclass
class Totals:
    """Counts of single-domain trainings; a joint training counts once per domain.

    expected: minimum number in the run. finished: by this run. stored: found on disk. first: start time of the first
    one. open: all running work. counted: a training may be requested after a fork has done it, and counts once.
    """

    expected: int = 0
    finished: int = 0
    stored: int = 0
    first: float | None = None
    open: list[Work] = dataclasses.field(default_factory=list)
    counted: set[str] = dataclasses.field(default_factory=set)

    @property
    def done(self) -> float:
        """Finished trainings, including parts of running ones."""
        return self.stored + self._worked

    @property
    def total(self) -> float:
        """Number of trainings known so far; the final number is known only when packing ends."""
        return max(self.expected, self.stored + self.finished + sum(work.trainings for work in self.open))

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
_EVENTS_S = 0.2  # interval between what a fork sends of the same work


class Display:
    """What a kind of output does; nothing by default."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def say(self, line: str) -> None:
        """Print a permanent line."""

    def show(self, work: Work) -> None:
        """Called when work begins, at its progress, and when it has ended."""


class ProgressBars(RichBars, Display):
    """One bar per piece of work and one for all trainings of the run; each is removed when it ends."""

    def __init__(self, console: Console, clock: Clock, totals: Totals) -> None:
        super().__init__(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=60)),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            refresh_per_second=_REDRAWS_PER_S,
            speed_estimate_period=_SPEED_S,
            get_time=clock,
        )
        self._totals = totals
        self._of_work: dict[Work, TaskID] = {}
        self._all: TaskID | None = None

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)

    def show(self, work: Work) -> None:
        if work not in self._of_work:
            self._of_work[work] = self.add_task(work.what, total=1.0, text="")
        self.update(self._of_work[work], completed=work.share, text=str(work))
        if work.state != "running":
            self.remove_task(self._of_work.pop(work))
        if work.trainings and self._all is None:
            self._all = self.add_task("all trainings", total=None, text="")
        if self._all is not None:
            done, total = self._totals.done, self._totals.total
            self.update(self._all, total=total, completed=done, text=f"{done:.1f} of {total:.0f} or more")


class LogLines(Display):
    """A first and a last line for each training, and for other work that takes more than ten seconds; and one line
    about all running work after each minute without output."""

    def __init__(self, console: Console, clock: Clock, totals: Totals) -> None:
        self._console, self._clock, self._totals = console, clock, totals
        self._last = clock()

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._last = self._clock()

    def show(self, work: Work) -> None:
        now, shown = self._clock(), work.shown
        work.shown = shown or work.trainings > 0 or now - work.begun >= _LONG_S
        left_s = self._totals.left_s(now)
        all_left = "" if left_s is None else f"all trainings: about {duration(left_s)} left"
        if work.state != "running":
            if shown and work.state == "complete":
                took = f"{work.done} {work.unit} in {duration(now - work.begun)}"
                self.say(", ".join(filter(None, (f"{work.what}: {took}", work.facts))))
        elif work.shown and not shown:
            first = f"{work.what}: {work.total} {work.unit}" + (f" ({all_left})" if all_left else "")
            self.say(first if work.trainings else work.left(now))
        elif shown and now - self._last >= _EVERY_S:
            states = [other.left(now) for other in self._totals.open if other.shown]
            self.say("; ".join(filter(None, (*states, all_left))))


class _ToParent(Display):
    """Sends this process's work. Lines are dropped, since the parent repeats the call and prints them."""

    def __init__(self, send: Callable[[Work], None], clock: Clock) -> None:
        self._send = send
        self._clock = clock
        self._sent: dict[int, float] = {}

    def show(self, work: Work) -> None:
        now = self._clock()
        if work.state != "running" or now - self._sent.get(work.number, -_EVENTS_S) >= _EVENTS_S:
            self._sent[work.number] = now
            self._send(dataclasses.replace(work))


def duration(seconds: float) -> str:
    """Format a rounded duration: 8 s, 50 s, 4 min, 2.5 h."""
    if seconds < 10:
        return f"{seconds:.1f} s" if seconds < 1 else f"{seconds:.0f} s"
    if seconds < 90:
        return f"{5 * round(seconds / 5)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class ProgressCallback(Protocol):
    """done: number of finished units. facts: figures to show; if empty, the previous ones stay. share: 0 to 1, if it
    differs from done / total."""

    def __call__(self, done: int, facts: str = "", share: float | None = None) -> None: ...


class Progress:
    """Shows running work; a context manager. watched: whether anything is shown.

    Args:
        console: output; None shows nothing.
        clock: returns seconds from any origin.
    """

    def __init__(self, console: Console | None = None, *, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.watched = console is not None and not console.quiet
        console = console or Console(quiet=True)
        self.totals = Totals()
        self.display: Display = (ProgressBars if console.is_terminal else LogLines)(console, clock, self.totals)
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
        self.totals.stored += trainings * (what not in self.totals.counted)
        self.totals.counted.add(what)

    @contextlib.contextmanager
    def work(self, what: str, total: int, unit: str, *, trainings: int = 0) -> Iterator[ProgressCallback]:
        """Show a piece of work while the block runs.

        Args:
            total: maximum number of units.
            unit: name of the units, in the plural.
            trainings: number of single-domain trainings that it counts as; 0 for other work.
        """
        work = Work(next(self._numbers), what, total, unit, trainings, self.clock())

        def update(done: int, facts: str = "", share: float | None = None) -> None:
            work.done, work.facts = done, facts or work.facts
            work.share = min(1.0, done / max(1, total) if share is None else share)
            self._show(work)

        self._show(work)
        try:
            yield update
        except BaseException:
            work.state = "broken"
            raise
        else:
            work.state = "complete"
        finally:
            self._show(work)

    def forward(self, send: Callable[[Work], None]) -> None:
        """Send work instead of showing anything; called in a fork, since the parent owns the display."""
        self.display = _ToParent(send, self.clock)

    def receive(self, fork: Hashable, sent: Work | None) -> None:
        """Show work of a fork as it is now; None when the fork has ended."""
        if sent is None:
            for key in [key for key in self._from_forks if key[0] == fork]:
                self.receive(fork, dataclasses.replace(self._from_forks[key], state="broken"))
            return
        key = fork, sent.number
        work = self._from_forks.setdefault(key, dataclasses.replace(sent, begun=self.clock()))
        work.done, work.facts, work.share, work.state = sent.done, sent.facts, sent.share, sent.state
        if work.state != "running":
            del self._from_forks[key]
        self._show(work)

    def _show(self, work: Work) -> None:
        totals = self.totals
        if work.state == "running":
            if work.trainings and totals.first is None:
                totals.first = work.begun
            if work not in totals.open:
                totals.open.append(work)
        else:
            totals.open.remove(work)
            if work.state == "complete" and work.trainings and work.what not in totals.counted:
                totals.counted.add(work.what)
                totals.finished += work.trainings
        self.display.show(work)
