"""The default model: a small LMM of a real architecture that ships with the package, and how it was made."""

from __future__ import annotations

from pathlib import Path


def checkpoint_path() -> str:
    """The folder of the checkpoint that ships with the package; transformers loads it like any other."""
    return str(Path(__file__).parent / "checkpoint")
