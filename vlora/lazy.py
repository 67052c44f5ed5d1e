"""Lazy imports of a package's public names, so that importing one of its modules stays cheap."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def attributes(package: str, **modules: str) -> Callable[[str], Any]:
    """A module-level `__getattr__` (PEP 562) for a package.

    Args:
        package: The package's `__name__`.
        modules: For each public name of the package, the module that defines it.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return get
