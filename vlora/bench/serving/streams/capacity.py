"""The largest number of cameras that are answered in real time."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from vlora.bench.serving.streams.cameras import Observed

_RESOLUTION = 0.06  # of the number of cameras
_STEP = 1.25


class Capacity(NamedTuple):
    """The result of a search.

    Attributes:
        cameras: The largest number that passed; 0 if one camera did not.
        passed: Observations of these; None if `cameras` is 0.
        above: The smallest number that did not pass; None if the largest possible number passed.
        refused: Observations of that number.
    """

    cameras: int
    passed: Observed | None
    above: int | None
    refused: Observed | None


async def largest(attempt: Callable[[int], Awaitable[Observed]], fps: float, guess: int, most: int) -> Capacity:
    """Find the largest number of cameras without a miss: from a guess in growing steps to a bracket, then by bisection.

    Args:
        attempt: Runs a number of cameras.
        fps: Frames per second of each camera.
        guess: The number to begin with.
        most: The number at which the search ends.
    """
    low, high = 0, most + 1
    passed: Observed | None = None
    refused: Observed | None = None
    trying = max(1, min(guess, most))
    while high - low > max(1, int(_RESOLUTION * low)):
        observed = await attempt(trying)
        if observed.missed(fps) is None:
            low, passed = trying, observed
        else:
            high, refused = trying, observed
        if refused is None:
            trying = min(most, max(low + 1, math.ceil(low * _STEP)))
        elif passed is None:
            trying = max(1, math.floor(high / _STEP))
        else:
            trying = (low + high) // 2
    return Capacity(low, passed, None if refused is None else high, refused)
