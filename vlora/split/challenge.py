"""Proof of a token by a challenge: the token itself is never sent.

Both sides contribute a random nonce. A proof is an HMAC of the role and both nonces under the token, so that a recorded
proof is worthless and neither side's proof can be sent back as the other's. Without TLS an attacker that relays the
connection can still read and change calls; with TLS the certificate prevents that.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
from collections.abc import Sequence
from typing import Literal

from vlora.config import Token
from vlora.errors import Unauthorized

Role = Literal["client", "base"]


def prove(secret: str, role: Role, client_nonce: bytes, base_nonce: bytes) -> bytes:
    """The proof that `role` knows the secret."""
    key = hashlib.sha256(secret.encode()).digest()
    return hmac.digest(key, b"vlora-split-1 " + role.encode() + b"\0" + client_nonce + base_nonce, "sha256")


def check(tokens: Sequence[Token], digest: bytes, client_nonce: bytes, base_nonce: bytes) -> Token | None:
    """Find the token of a client's proof; None where the executor has no tokens.

    Raises:
        Unauthorized: There is no proof, or it is that of no token, or the token is expired.
    """
    if not tokens:
        return None
    if not digest:
        raise Unauthorized("this base executor requires a token; connect(..., token=...)")
    found: Token | None = None
    for token in tokens:  # all of them, in constant time
        if hmac.compare_digest(prove(token.secret, "client", client_nonce, base_nonce), digest):
            found = token
    if found is None:
        raise Unauthorized("the token is not valid on this base executor")
    if found.expires is not None and has_expired(found):
        raise Unauthorized(f"the token expired at {found.expires.astimezone(datetime.UTC):%Y-%m-%d %H:%M} UTC")
    return found


def has_expired(token: Token) -> bool:
    return token.expires is not None and datetime.datetime.now(datetime.UTC) >= token.expires


def knows(secret: str, digest: bytes, client_nonce: bytes, base_nonce: bytes) -> bool:
    """Whether the executor's proof is that of the client's token."""
    return hmac.compare_digest(prove(secret, "base", client_nonce, base_nonce), digest)
