"""The cluster's token: a file that each machine has, and the secrets that are derived from it.

Ray sends its token with each call, so the secret of the replicas is another one: neither reveals the other.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

from vlora.cluster.on_ray.settings import write_private
from vlora.errors import BadConfig

MIN_CHARS = 32
_MOST_CHARS = 4096
_BYTES = 32


def create_token(file: Path) -> bool:
    """Make the file with a new token, for this user only. Returns False if it exists.

    Raises:
        BadConfig: The file cannot be created.
    """
    if file.exists():
        return False  # its folder may be read-only
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        write_private(str(temporary), secrets.token_hex(_BYTES) + "\n")
        os.link(temporary, file)  # whole, and never over a file that another process makes at the same time
    except FileExistsError:
        return False
    except OSError as error:
        raise BadConfig(f"the token file {str(file)!r} cannot be created: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return True


def read_token(file: Path) -> bytes:
    """The token. Raises BadConfig for a file that others may read or that is no token; never with its content."""
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise BadConfig(f"the token file {str(file)!r} is not a regular file")
            if mode & 0o077:
                raise BadConfig(
                    f"the token file {str(file)!r} has mode {stat.S_IMODE(mode):04o}, so others may use it; run "
                    f"`chmod 600` on it, and make a new token if others could read it"
                )
            token = opened.read(_MOST_CHARS).strip()
    except OSError as error:
        raise BadConfig(
            f"cannot read the token file {str(file)!r}: {error.strerror}; copy that of `vlora cluster up`"
        ) from error
    if len(token) < MIN_CHARS:
        raise BadConfig(
            f"the token file {str(file)!r} has {len(token)} characters; at least {MIN_CHARS} are needed, for example "
            "from `openssl rand -hex 32`"
        )
    return token


def derived(token: bytes, purpose: str) -> str:
    return hmac.digest(token, f"vlora cluster: {purpose}".encode(), "sha256").hex()
