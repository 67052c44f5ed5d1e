"""Display of progress: bars on a terminal; in a log a first line, one line per minute, and a last line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichBars
from rich.table import Column

from fusion.progress.work import Totals, Work

_EVERY_S = 60.0  # interval between lines of a log
_LONG_S = 10.0  # other work than training is logged if it takes longer
_SPEED_S = 600.0  # window for the speed that a bar's remaining time is estimated from
_REDRAWS_PER_S = 2.0  # each costs training one or two milliseconds


class Display(Protocol):
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


class ProgressBars:
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


class LogLines:
    """A first and a last line for each training, and for other work that takes more than ten seconds; and one line
    about all running work after each minute without output."""

    def __init__(self, console: Console, clock: Callable[[], float], totals: Totals) -> None:
        self._console = console
        self._clock = clock
        self._totals = totals
        self._last = clock()

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def refresh(self) -> None: ...

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
