"""The default model: a small LMM of a standard architecture that ships with the package (made in `tools`)."""

from __future__ import annotations

from pathlib import Path


def checkpoint_path() -> str:
    """The folder of the checkpoint that ships with the package; transformers can load it."""
    return str(Path(__file__).parent / "checkpoint")
