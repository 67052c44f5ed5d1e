"""What a fusion run shows of itself while it runs: lines that stay, and how long it will take."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class Progress:
    """A bar over all trainings, as far as they can be known: each rollback is one more. Domains that are trained at
    once count as so many trainings.

    trainings: at least this many. On no terminal, lines tell the time left.
    """

    def __init__(self, console: Console, trainings: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
        # Speed over the last ten minutes: evaluation between trainings would make it jump.
        self._bars = Bars(*columns, TimeRemainingColumn(), console=console, transient=True, speed_estimate_period=600)
        self._all = self._bars.add_task("fusing", total=trainings)
        self._ended = 0
        self._size = 1

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self._bars.stop()

    def silence(self) -> None:
        """Tell nothing any more: in a fork, where the terminal is another's, and a lock may be held by nobody."""
        self._bars = Bars(console=Console(quiet=True), disable=True)
        self._all = self._bars.add_task("", total=1)

    def say(self, line: str) -> None:
        self._bars.console.print(line)

    def begin(self, what: str, size: int = 1) -> None:
        """A training of so many domains begins."""
        self._size = size
        left = self._bars.tasks[0].time_remaining
        told = "" if left is None or self._bars.console.is_terminal else f" (about {max(1, round(left / 60))} min left)"
        self._bars.update(self._all, description=what)
        if not self._bars.console.is_terminal:
            self.say(f"training {what}{told}")

    def step(self, done: int, most: int) -> None:
        """`done` of at most `most` steps of the training that has begun."""
        self._bars.update(self._all, completed=self._ended + self._size * done / most)

    def end(self, size: int = 1) -> None:
        """A training of so many domains has ended, or turned out to be known."""
        self._ended += size
        total = max(self._bars.tasks[0].total or 0, self._ended + 1)
        self._bars.update(self._all, completed=self._ended, total=total)
