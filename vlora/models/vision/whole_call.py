"""The part of greenlet's interface that `PacedCall` uses, for installations without greenlet.

A call runs whole when it is first resumed: the vision tower is not interrupted, so decode steps wait for it.
"""

from __future__ import annotations

from collections.abc import Callable


class GreenletExit(BaseException):
    """As greenlet.GreenletExit; never raised, because no call is ever suspended."""


class greenlet:
    """A call on the caller's own stack. It is true while suspended, so never."""

    parent: greenlet | None = None

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self.dead = False

    def __bool__(self) -> bool:
        return False

    def switch(self) -> None:
        """Run the call. Raises its exception."""
        self.dead = True
        self._run()


def getcurrent() -> None:
    """No call is suspended, so none has to yield."""
