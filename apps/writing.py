"""Result files that cannot be written are told by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from vlora.errors import BadConfig


@contextlib.contextmanager
def writing(file: Path) -> Iterator[None]:
    """What is done inside is done to `file`. Raises BadConfig with its name for what the system says of it."""
    try:
        yield
    except OSError as error:
        raise BadConfig(f"cannot write {str(file)!r}: {error.strerror}") from error
