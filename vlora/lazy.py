"""Imports that are not made: public names of a package before their use, and packages that a library finds."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


def attributes(package: str, **modules: str) -> Callable[[str], Any]:
    """A package's `__getattr__` (PEP 562), by its `__name__` and the modules that define its public names."""

    def get(name: str) -> Any:
        if name in modules:
            return getattr(importlib.import_module(modules[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


@contextlib.contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Packages as if not installed: transformers imports each that it finds. No other thread may import them then."""
    names = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None makes an import fail
    try:
        yield
    finally:
        for name in [each for each in names if sys.modules.get(each, each) is None]:
            del sys.modules[name]
