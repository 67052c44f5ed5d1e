"""Progress indicators on a terminal for slow operations; silent if stderr is not a terminal.

They are written to stderr. Lines printed to the same terminal meanwhile appear above them; output to a file is
unchanged.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar; call the yielded function once for each completed item."""
    with _progress("{task.description} {task.completed}/{task.total}", bar=True) as bar:
        task = None if bar is None else bar.add_task(what, total=total)
        yield lambda: None if bar is None else bar.advance(task)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Callable[[], None]]:
    """A spinner with the elapsed time; call the yielded function to end it before the block does."""
    with _progress("{task.description}", bar=False) as bar:
        if bar is not None:
            bar.add_task(what, total=None)
        yield lambda: None if bar is None else bar.stop()


@contextlib.contextmanager
def _progress(text: str, *, bar: bool) -> Iterator[Any]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), TimeRemainingColumn()) if bar else (SpinnerColumn(), TimeElapsedColumn())
    console, to_terminal = Console(stderr=True), sys.stdout.isatty()
    with Progress(TextColumn(text), *columns, console=console, transient=True, redirect_stdout=to_terminal) as progress:
        yield progress
