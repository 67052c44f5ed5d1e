"""Hides every package but torch, transformers, peft, numpy, safetensors, msgspec, and their own dependencies.

A folder with a `sitecustomize.py` that calls `hide_others`, first on PYTHONPATH, applies to all processes of a command.
"""

from __future__ import annotations

import importlib.metadata
import re

from tests.cli.without_extras import hide

PACKAGES = ("torch", "transformers", "peft", "numpy", "safetensors", "msgspec")
_WITH_TORCH_ON_A_GPU = {"triton"}
_OWN = {"vlora", "atmm", "heads", "fusion", "apps", "benchmarks", "tests"}


def hide_others() -> None:
    """Hide the modules of all other distributions from this process."""
    hide(others())


def others() -> set[str]:
    """Top-level modules of all other installed distributions."""
    kept = closure(PACKAGES) | _WITH_TORCH_ON_A_GPU
    modules = importlib.metadata.packages_distributions()
    return {
        module
        for module, owners in modules.items()
        if module not in _OWN and not any(_normalized(owner) in kept for owner in owners)
    }


def closure(names: tuple[str, ...]) -> set[str]:
    """Normalized names of these distributions and of all that they depend on, without optional dependencies."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = _normalized(left.pop())
        if name in found:
            continue
        found.add(name)
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        left += [re.split(r"[\[<>=!~; (]", each)[0] for each in requirements if "extra ==" not in each]
    return found


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
