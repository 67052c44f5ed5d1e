"""The error for a result file that cannot be written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from vlora.errors import BadConfig


@contextlib.contextmanager
def writing(file: Path) -> Iterator[None]:
    """Turn an OSError inside the block into BadConfig with the name of `file`."""
    try:
        yield
    except OSError as error:
        raise BadConfig(f"cannot write {str(file)!r}: {error.strerror}") from error
