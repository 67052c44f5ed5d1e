"""Tokens from a file and from the environment."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from vlora.config import Token
from vlora.errors import BadConfig
from vlora.wording import msgspec_errors, yaml_errors

log = logging.getLogger(__name__)

VARIABLES = {"VLORA_TOKEN": False, "VLORA_ADMIN_TOKEN": True}  # name -> whether it is an admin token


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    token: str
    admin: bool = False
    expires: Any = None  # YAML gives a date or a datetime; msgspec cannot distinguish them


def read_tokens(file: Path | None, environ: Mapping[str, str]) -> tuple[Token, ...]:
    """Read the tokens of the file, then VLORA_TOKEN and VLORA_ADMIN_TOKEN where they are set.

    The file is YAML: a name with `token`, and optionally `admin: true` and `expires: 2027-01-31` (a date or a time, UTC
    by default). Raises BadConfig with the entry's name, never with its content.
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
    return Token(name=name, secret=entry.token, admin=entry.admin, expires=expires)
