"""The only call of transformers' `from_pretrained`. Code that comes with a checkpoint is never run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers.utils import logging

from vlora.errors import BadConfig


def from_pretrained(kind: Any, model: str | Path | None, **options: Any) -> Any:
    """Load an object from a folder or hub name.

    Args:
        kind: One of transformers' Auto classes.
        model: The folder or hub name. None if the options have all tensors.
        options: Passed on to `kind.from_pretrained`.

    Raises:
        BadConfig: The checkpoint needs custom code. Errors of `kind` are raised too.
    """
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # for terminals only
    try:
        # Always explicit: by default transformers prompts on the terminal and runs the code if the user agrees.
        return kind.from_pretrained(model, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise BadConfig(
            f"{str(model)!r} needs custom code (auto_map) for {kind.__name__}, and code from a checkpoint is never "
            "run here; use a checkpoint that transformers supports itself"
        ) from error
