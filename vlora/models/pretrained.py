"""The one way to transformers' `from_pretrained`: a checkpoint is read, and code that it brings is never run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers.utils import logging

from vlora.errors import BadConfig


def from_pretrained(kind: Any, model: str | Path, **options: Any) -> Any:
    """What a folder or hub name holds. kind: one of transformers' Auto classes.

    Raises BadConfig for a checkpoint that only code of its own can read, else what `kind` raises.
    """
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # bars are for who watches
    try:
        # Said each time: where nothing is said, transformers asks on the terminal and runs the code on a yes.
        return kind.from_pretrained(model, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise BadConfig(
            f"{str(model)!r} brings code of its own (auto_map) for what {kind.__name__} reads, and code of a "
            "checkpoint is never run here; take one that transformers itself knows"
        ) from error
