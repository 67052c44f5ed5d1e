"""Token authentication and admin permission, for RPyC and HTTP, and the rate limit of wrong tokens."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from vlora.config import Token
from vlora.errors import BadConfig, Forbidden, OverCapacity, Unauthorized

MAX_PEERS = 4096
"""Peers with failures that `AuthRateLimit` stores; the least recent failures are dropped first."""

_BURST = 20
_REFILL_S = 3.0


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def is_admin(caller: Token | None) -> bool:
    """Whether a caller may see and change everything. None: a server without tokens."""
    return caller is None or caller.admin


class Access:
    """Compares a caller's token with every known token in constant time. Without tokens every call is allowed."""

    def __init__(
        self,
        tokens: Sequence[Token],
        *,
        now: Callable[[], datetime.datetime] = _now,
        rate_limit: AuthRateLimit | None = None,
    ) -> None:
        self._tokens = [(_digest(token.secret), token) for token in tokens]
        self._now = now
        self._rate_limit = AuthRateLimit() if rate_limit is None else rate_limit

    @property
    def required(self) -> bool:
        """Whether authentication is required."""
        return bool(self._tokens)

    def replace(self, tokens: Sequence[Token]) -> None:
        """Use other tokens from the next call on. Raises BadConfig when that would turn authentication on or off."""
        if bool(tokens) != self.required:
            raise BadConfig("authentication cannot be turned on or off at run time; restart the server for that")
        self._tokens = [(_digest(token.secret), token) for token in tokens]

    def check(self, secret: str | None, *, admin: bool = False, peer: str | None = None) -> Token | None:
        """Return the caller's token; None where the server has no tokens.

        Args:
            secret: The caller's token; None or empty when it sent none.
            admin: Whether the call requires an admin token.
            peer: Address of the caller; None for a connection that is authenticated already.

        Raises:
            Unauthorized: The token is missing, wrong or expired.
            Forbidden: The call needs an admin token and this is a user token.
            OverCapacity: This peer sent too many wrong tokens.
        """
        if not self._tokens:
            return None
        if peer is not None:
            self._rate_limit.check(peer)
        if not secret:
            raise Unauthorized(
                "authentication required; send 'Authorization: Bearer TOKEN' over HTTP, or use Client(token=...) or "
                "the variable VLORA_TOKEN over RPyC"
            )
        digest = _digest(secret)
        found: Token | None = None
        for known, token in self._tokens:
            if hmac.compare_digest(known, digest):
                found = token
        if found is None:
            if peer is not None:
                self._rate_limit.record_failure(peer)
            raise Unauthorized("the token is not valid on this server")
        if found.expires is not None and self._now() >= found.expires:
            expired = found.expires.astimezone(datetime.UTC)
            raise Unauthorized(f"the token expired at {expired:%Y-%m-%d %H:%M} UTC; ask for a new one")
        if admin and not found.admin:
            raise Forbidden("this call requires an admin token")
        return found


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


def _digest(secret: str) -> bytes:
    # Digests have one length, so the comparison does not reveal the token's length.
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()
