"""Token buckets: the rate limit of wrong tokens, for every listener that checks them, and the quotas of valid ones."""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable, Sequence

from vlora.config import Token
from vlora.errors import OverCapacity, RateLimited

MAX_PEERS = 4096
"""Peers with failures that `AuthRateLimit` stores; the least recent failures are dropped first."""

_BURST, _PERIOD_S = 20, 60.0
_PERIODS = {"requests_per_minute": 60.0, "tokens_per_minute": 60.0, "tokens_per_day": 86_400.0}


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


class Quotas:
    """What the holders of tokens may use in a time, counted in memory. Used from one event loop."""

    def __init__(self, tokens: Sequence[Token], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._buckets: dict[str, dict[str, Bucket]] = {}
        self.replace(tokens)

    def replace(self, tokens: Sequence[Token]) -> None:
        """Use the quotas of other tokens. Quotas that are not changed keep their counts."""
        before, self._buckets = self._buckets, {}
        for token in tokens:
            for quota, period_s in _PERIODS.items():
                if (limit := getattr(token, quota)) is not None:
                    kept = before.get(token.name, {}).get(quota)
                    bucket = kept if kept is not None and kept.limit == limit else Bucket(limit, period_s)
                    self._buckets.setdefault(token.name, {})[quota] = bucket

    def count_request(self, tenant: str | None) -> None:
        """Count a request. Raises RateLimited if none is left, or no token."""
        now, buckets = self.clock(), self._of(tenant)
        for quota, bucket in buckets.items():
            if (wait_s := bucket.wait_s(now)) > 0:
                text = f"{bucket.limit} {quota.replace('_', ' ')}"
                raise RateLimited(f"{tenant!r} has used its quota of {text}; try again in {wait_s:.0f} s", wait_s)
        if "requests_per_minute" in buckets:
            buckets["requests_per_minute"].take(1, now)

    def count_tokens(self, tenant: str | None, number: int) -> None:
        """Count tokens of a prompt or an answer, also above the quotas: later requests then wait."""
        for quota, bucket in self._of(tenant).items():
            if quota.startswith("tokens"):
                bucket.take(number, self.clock())

    def headers(self, tenant: str | None) -> list[tuple[bytes, bytes]]:
        """OpenAI's headers about requests and tokens; of several quotas the one with the least units left."""
        now, found = self.clock(), {}
        for quota, bucket in sorted(self._of(tenant).items(), key=lambda item: -item[1].left(now)):
            reset = f"{max(0.0, bucket.full_at - now):.3f}s"
            for field, value in (("limit", bucket.limit), ("remaining", bucket.left(now)), ("reset", reset)):
                found[f"x-ratelimit-{field}-{quota.partition('_')[0]}".encode()] = str(value).encode()
        return list(found.items())

    def _of(self, tenant: str | None) -> dict[str, Bucket]:
        return {} if tenant is None else self._buckets.get(tenant, {})


def _network(peer: str) -> str:
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return peer
    return peer if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))
