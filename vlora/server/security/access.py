"""Tokens: where they are read, authentication and admin permission, for RPyC and HTTP."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from vlora.config import Token
from vlora.errors import BadConfig, Unauthorized
from vlora.rate_limits import AuthRateLimit
from vlora.wording import msgspec_errors, yaml_errors

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

log = logging.getLogger(__name__)

VARIABLES = {"VLORA_TOKEN": False, "VLORA_ADMIN_TOKEN": True}  # name -> whether it is an admin token


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
        return tuple(token for _, token in self._tokens)

    @property
    def required(self) -> bool:
        return bool(self._tokens)

    def replace(self, tokens: Sequence[Token]) -> None:
        """Use other tokens from the next call on. Raises BadConfig when that would turn authentication on or off."""
        if bool(tokens) != self.required:
            raise BadConfig("authentication cannot be turned on or off at run time; restart the server for that")
        self._tokens = [(_digest(token.secret), token) for token in tokens]

    def check(self, secret: str | None, *, peer: str | None = None) -> Token | None:
        """Return the caller's token; None where the server has no tokens.

        peer: the caller's address; None for a connection that is authenticated already.

        Raises:
            Unauthorized: The token is missing, wrong or expired.
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
        return found


def _digest(secret: str) -> bytes:
    # Digests have one length, so the comparison does not reveal the token's length.
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    token: str
    admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    cameras: int | None = None
    expires: Any = None  # YAML gives a date or a datetime; msgspec cannot distinguish them


def read_tokens(file: Path | None, environ: Mapping[str, str]) -> tuple[Token, ...]:
    """Read the tokens of the file, then VLORA_TOKEN and VLORA_ADMIN_TOKEN where they are set.

    The file is YAML: a name with `token`, and optionally `admin: true`, quotas (`vlora.config.QUOTAS`) and `expires:
    2027-01-31` (a date or a time, UTC by default). Raises BadConfig with the entry's name, never with its content.
    """
    tokens = [] if file is None else list(_read_file(file))
    tokens += [
        Token(name=name, secret=environ[name], admin=admin) for name, admin in VARIABLES.items() if environ.get(name)
    ]
    return tuple(tokens)


def _read_file(file: Path) -> Iterator[Token]:
    try:
        if file.stat().st_mode & 0o077:
            log.warning("the token file %r is accessible to other users; run chmod 600 on it", str(file))
        entries: Any = yaml.safe_load(file.read_text())
    except OSError as error:
        raise BadConfig(f"cannot read the token file {str(file)!r}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        # The parser's own message quotes the file; so it must not be the cause either.
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        why = yaml_errors.problem(error) if isinstance(error, yaml.YAMLError) else "it is not UTF-8 text"
        raise BadConfig(f"the token file {str(file)!r} is not YAML{line}: {why}") from None
    if not isinstance(entries, dict) or not entries:
        raise BadConfig(f"the token file {str(file)!r} has no tokens; write 'NAME: {{token: SECRET}}', one per line")
    for name, fields in entries.items():
        yield _token(str(name), fields, file)


def _token(name: str, fields: Any, file: Path) -> Token:
    try:
        entry = msgspec.convert(fields, _Entry)
    except msgspec_errors.REFUSED as error:
        # Omit the value, which may be a secret.
        why = msgspec_errors.described(error)
        raise BadConfig(f"the token file {str(file)!r}, entry {name!r}: {why}; write '{{token: SECRET}}'") from None
    expires = entry.expires
    if not isinstance(expires, datetime.date | None):
        raise BadConfig(f"the token file {str(file)!r}, entry {name!r}: expires is not a date; write 2027-01-31")
    if expires is not None and not isinstance(expires, datetime.datetime):
        expires = datetime.datetime.combine(expires, datetime.time())
    if expires is not None and expires.tzinfo is None:
        expires = expires.replace(tzinfo=datetime.UTC)
    values = {**msgspec.structs.asdict(entry), "expires": expires}
    return Token(name=name, secret=values.pop("token"), **values)


def caller_of(request: HTTPConnection) -> Token | None:
    """The caller's token, as the checks before the routes have found it; None where the server has no tokens."""
    caller: Token | None = getattr(request.state, "caller", None)
    return caller


def tenant(request: HTTPConnection) -> str | None:
    return name_of(caller_of(request))


def name_of(caller: Token | None) -> str | None:
    """The name of a caller's token; None where the server has no tokens."""
    return None if caller is None else caller.name
