"""The rate limit of wrong tokens, for every listener that checks tokens."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

from vlora.errors import OverCapacity

MAX_PEERS = 4096
"""Peers with failures that `AuthRateLimit` stores; the least recent failures are dropped first."""

_BURST = 20
_REFILL_S = 3.0


class AuthRateLimit:
    """A token bucket for each peer: every wrong token takes one unit, and one unit is refilled every three seconds.

    While its bucket is empty, a peer is refused before any comparison, which bounds the rate of guesses. An IPv6
    network (/64) counts as one peer.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_at: OrderedDict[str, float] = OrderedDict()  # time at which a peer's bucket is full

    def __len__(self) -> int:
        """The number of stored peers."""
        return len(self._full_at)

    def check(self, peer: str) -> None:
        """Raises OverCapacity for a peer that has to wait."""
        wait_s = self._full_at.get(_network(peer), 0.0) - self._clock() - (_BURST - 1) * _REFILL_S
        if wait_s > 0:
            raise OverCapacity(f"too many wrong tokens from {peer}; try again in {wait_s:.0f} s")

    def record_failure(self, peer: str) -> None:
        """Count a wrong token of a peer."""
        network, now = _network(peer), self._clock()
        self._full_at[network] = max(now, self._full_at.get(network, now)) + _REFILL_S
        self._full_at.move_to_end(network)
        if len(self._full_at) > MAX_PEERS:
            self._full_at.popitem(last=False)


def _network(peer: str) -> str:
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return peer
    return peer if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))
