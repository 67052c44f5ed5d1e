"""Errors of files that cannot be written, by name."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator

from vlora.errors import BadConfig, VLoraError

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_IN_A_MESSAGE = re.compile(r"\(os error (\d+)\)")  # of safetensors, which raises no OSError


class NotWritten(VLoraError):
    """A file cannot be written: its disk is full, or fails."""

    code = "not_written"
    http_status = 507


@contextlib.contextmanager
def writing(place: str | os.PathLike[str], *, only_disks: bool = False) -> Iterator[None]:
    """Name a file or folder in errors of the block that writes it.

    Raises:
        NotWritten: The disk is full, or fails.
        BadConfig: Any other OSError, unless only those of disks are named.
    """
    try:
        yield
    except Exception as error:
        found = _IN_A_MESSAGE.search(str(error))
        number = error.errno if isinstance(error, OSError) else found and int(found[1])
        named = getattr(error, "filename", None) or place
        if number in _OF_DISKS:
            raise NotWritten(f"cannot write {os.fspath(named)!r}: {os.strerror(number)}") from error
        if isinstance(error, OSError) and not only_disks:
            raise BadConfig(f"cannot write {os.fspath(place)!r}: {error.strerror}") from error
        raise
