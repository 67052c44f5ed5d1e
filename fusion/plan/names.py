"""Names in a plan that may be folders beside it."""

from __future__ import annotations

import os

from pydantic import ValidationInfo

from fusion.synthetic.sources import BUILT_IN


def next_to_plan(name: str, info: ValidationInfo) -> str:
    """The full path of a folder next to the plan file; any other name unchanged."""
    folder = (info.context or {}).get("folder")
    if folder is None or name == "embedded" or name in BUILT_IN or not os.path.isdir(folder / name):
        return name
    return str(folder / name)
