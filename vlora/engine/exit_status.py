"""A process's exit status as text."""

from __future__ import annotations

import signal


def describe_exit(code: int) -> str:
    """code: the process's return code, negative for a signal."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
