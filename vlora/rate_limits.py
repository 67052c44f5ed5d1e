"""Token buckets, and the rate limit of wrong tokens, for every listener that checks tokens."""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable

from vlora.errors import OverCapacity

MAX_PEERS = 4096
"""Peers with failures that `AuthRateLimit` stores; the least recent failures are dropped first."""

_BURST, _PERIOD_S = 20, 60.0


class Bucket:
    """`limit` units, all of which may be taken at once, and which are refilled evenly within `period_s`."""

    def __init__(self, limit: int, period_s: float) -> None:
        self.limit = limit
        self.full_at = 0.0
        self._unit_s = period_s / limit

    def take(self, units: int, now: float) -> None:
        """Take units, also more than are left: later ones then wait longer."""
        self.full_at = max(now, self.full_at) + units * self._unit_s

    def wait_s(self, now: float) -> float:
        """The time until a unit is left; 0 or less if one is."""
        return self.full_at - now - (self.limit - 1) * self._unit_s

    def left(self, now: float) -> int:
        return max(0, self.limit - math.ceil(max(0.0, self.full_at - now) / self._unit_s - 1e-6))


class AuthRateLimit:
    """A bucket for each peer: every wrong token takes one unit, and one unit is refilled every three seconds.

    While its bucket is empty, a peer is refused before any comparison, which bounds the rate of guesses. An IPv6
    network (/64) counts as one peer.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}  # the least recent failure first

    def __len__(self) -> int:
        """The number of stored peers."""
        return len(self._buckets)

    def check(self, peer: str) -> None:
        """Raises OverCapacity for a peer that has to wait."""
        bucket = self._buckets.get(_network(peer))
        if bucket is not None and (wait_s := bucket.wait_s(self._clock())) > 0:
            raise OverCapacity(f"too many wrong tokens from {peer}; try again in {wait_s:.0f} s", wait_s)

    def record_failure(self, peer: str) -> None:
        """Count a wrong token of a peer."""
        network = _network(peer)
        bucket = self._buckets.pop(network) if network in self._buckets else Bucket(_BURST, _PERIOD_S)
        self._buckets[network] = bucket
        bucket.take(1, self._clock())
        if len(self._buckets) > MAX_PEERS:
            del self._buckets[next(iter(self._buckets))]


def _network(peer: str) -> str:
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return peer
    return peer if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))
