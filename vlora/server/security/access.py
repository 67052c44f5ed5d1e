"""Who may make a call, on either surface."""

from __future__ import annotations

import datetime
import hashlib
import hmac
from collections.abc import Callable, Sequence

from vlora.config import Token
from vlora.errors import BadConfig, Forbidden, Unauthorized
from vlora.server.security.auth_rate_limit import WrongTokens


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Access:
    """Compares what a caller shows with every token, in a time that tells nothing. Without tokens all may do all."""

    def __init__(self, tokens: Sequence[Token], *, now: Callable[[], datetime.datetime] = _now) -> None:
        self._tokens = [(_digest(token.secret), token) for token in tokens]
        self._now = now
        self._wrong = WrongTokens()

    @property
    def required(self) -> bool:
        """Whether there are tokens at all."""
        return bool(self._tokens)

    def replace(self, tokens: Sequence[Token]) -> None:
        """Take other tokens from the next call on. Raises BadConfig where that would open or close the server as a
        whole."""
        if bool(tokens) != self.required:
            raise BadConfig("a server begins to ask for tokens, or ceases to, when it is started, not in between")
        self._tokens = [(_digest(token.secret), token) for token in tokens]

    def check(self, shown: str | None, *, admin: bool = False, peer: str | None = None) -> Token | None:
        """The token that was shown; None where there are no tokens.

        peer: address of who shows it; None for one that was found good before.

        Raises Unauthorized for no token, a wrong or an expired one; Forbidden when `admin` is asked of a user's;
        OverCapacity when too many wrong ones came from this peer.
        """
        if not self._tokens:
            return None
        if peer is not None:
            self._wrong.check(peer)
        if not shown:
            raise Unauthorized(
                "this server answers only who shows a token: the header 'Authorization: Bearer TOKEN' over HTTP, "
                "Client(token=...) or the variable VLORA_TOKEN over RPyC"
            )
        digest = _digest(shown)
        found: Token | None = None
        for known, token in self._tokens:
            if hmac.compare_digest(known, digest):
                found = token
        if found is None:
            if peer is not None:
                self._wrong.count(peer)
            raise Unauthorized("the token is not one of this server's")
        if found.expires is not None and self._now() >= found.expires:
            expired = found.expires.astimezone(datetime.UTC)
            raise Unauthorized(f"the token expired at {expired:%Y-%m-%d %H:%M} UTC; ask for a new one")
        if admin and not found.admin:
            raise Forbidden("this call takes an admin's token")
        return found


def _digest(secret: str) -> bytes:
    # Of one length, so that comparing does not tell how long a token is.
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()
