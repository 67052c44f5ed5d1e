"""Token authentication and admin permission, for RPyC and HTTP."""

from __future__ import annotations

import datetime
import hashlib
import hmac
from collections.abc import Callable, Sequence

from vlora.auth_rate_limit import AuthRateLimit
from vlora.config import Token
from vlora.errors import BadConfig, Forbidden, Unauthorized


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
    def tokens(self) -> tuple[Token, ...]:
        """The permitted tokens."""
        return tuple(token for _, token in self._tokens)

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


def _digest(secret: str) -> bytes:
    # Digests have one length, so the comparison does not reveal the token's length.
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()
