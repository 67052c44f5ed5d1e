"""Counts of the operations of the simulated device, by kind, name, stream and call site."""

from __future__ import annotations

import enum
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[2]
_OWN = tuple(str(Path(__file__).with_name(f"{name}.py")) for name in ("counts", "install", "streams", "tensor"))
_TORCH = str(Path(torch.__file__).parent)
SERVING = "default"
"""The name of the stream that runs the steps."""


class Kind(enum.StrEnum):
    """The kinds of operations that are counted.

    Copies from or to pageable host memory block the host, also with `non_blocking=True`; asynchronous copies start from
    or end in pinned memory. `ITEM`: a value is read as a Python number. `NONZERO`: the size of the result depends on
    values. `SYNCHRONIZE`: the host waits for an event, a stream or the device.
    """

    LAUNCH = "launch"
    H2D_BLOCKING = "blocking host-to-device copy"
    H2D_ASYNC = "asynchronous host-to-device copy"
    D2H = "device-to-host copy"
    D2H_ASYNC = "asynchronous device-to-host copy"
    ITEM = ".item()"
    NONZERO = "nonzero"
    BOOLEAN_INDEX = "boolean index"
    SYNCHRONIZE = "synchronization"


HOST_WAITS = (Kind.H2D_BLOCKING, Kind.D2H, Kind.ITEM, Kind.NONZERO, Kind.BOOLEAN_INDEX, Kind.SYNCHRONIZE)
"""Kinds of operations that block the host until the stream's earlier work is done."""


class Operation(NamedTuple):
    """name: of the operator or kernel. site: the innermost frames outside torch and inside this project."""

    kind: Kind
    name: str
    stream: str
    site: str


class Counts:
    """Operations counted during a `counting()` context."""

    def __init__(self) -> None:
        self.operations: Counter[Operation] = Counter()

    def total(self, *kinds: Kind, stream: str | None = None) -> int:
        """The number of operations of these kinds, on one stream or on all."""
        return sum(self._selected(kinds, stream).values())

    def names(self, kind: Kind) -> Counter[str]:
        """The number of operations of a kind by name."""
        found: Counter[str] = Counter()
        for operation, number in self._selected((kind,), None).items():
            found[operation.name] += number
        return found

    def report(self, *kinds: Kind, stream: str | None = None) -> str:
        """A line per call site, the most frequent first."""
        lines = (
            f"{number:5}  {operation.kind}: {operation.name} on stream {operation.stream} at {operation.site}"
            for operation, number in self._selected(kinds, stream).most_common()
        )
        return "\n".join(lines)

    def _selected(self, kinds: tuple[Kind, ...], stream: str | None) -> Counter[Operation]:
        return Counter(
            {
                operation: number
                for operation, number in self.operations.items()
                if operation.kind in kinds and stream in (None, operation.stream)
            }
        )


_active: list[Counts] = []
_lock = threading.Lock()


@contextmanager
def counting() -> Iterator[Counts]:
    """Count the operations of all threads."""
    counts = Counts()
    with _lock:
        _active.append(counts)
    try:
        yield counts
    finally:
        with _lock:
            _active.remove(counts)


def record(kind: Kind, name: str, stream: str) -> None:
    """Add an operation to the active counts."""
    if _active:
        operation = Operation(kind, name, stream, _call_site())
        with _lock:
            for counts in _active:
                counts.operations[operation] += 1


def _call_site() -> str:
    """The innermost frame outside torch and this package, and the innermost one of the project if that is another."""
    frame = sys._getframe(2)
    innermost = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_OWN, _TORCH, "<")):
            site = f"{_short(file)}:{frame.f_lineno} {frame.f_code.co_name}"
            if Path(file).is_relative_to(ROOT) and "site-packages" not in file:
                return f"{innermost} from {site}" if innermost else site
            innermost = innermost or site
        frame = frame.f_back  # type: ignore[assignment]
    return innermost


def _short(file: str) -> str:
    return file.rpartition("site-packages/")[2].removeprefix(f"{ROOT}/")
