"""Rate limit of wrong tokens per peer."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

from vlora.errors import OverCapacity

_AT_ONCE = 20
_ONE_EVERY_S = 3.0
_MOST_PEERS = 4096  # remembered; the least recent failures are dropped first


class WrongTokens:
    """A token bucket for each peer: every wrong token takes one unit, and one unit is refilled every three seconds.

    While its bucket is empty, a peer is refused before any comparison, which bounds the rate of guesses. An IPv6
    network (/64) counts as one peer.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_at: OrderedDict[str, float] = OrderedDict()  # time at which a peer's bucket is full

    def check(self, peer: str) -> None:
        """Raises OverCapacity for a peer that has to wait."""
        wait_s = self._full_at.get(_network(peer), 0.0) - self._clock() - (_AT_ONCE - 1) * _ONE_EVERY_S
        if wait_s > 0:
            raise OverCapacity(f"too many wrong tokens from {peer}; try again in {wait_s:.0f} s")

    def count(self, peer: str) -> None:
        """Count a wrong token of a peer."""
        network, now = _network(peer), self._clock()
        self._full_at[network] = max(now, self._full_at.get(network, now)) + _ONE_EVERY_S
        self._full_at.move_to_end(network)
        if len(self._full_at) > _MOST_PEERS:
            self._full_at.popitem(last=False)


def _network(peer: str) -> str:
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return peer
    return peer if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))
