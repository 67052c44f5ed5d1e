"""The step loop and its processes. `LocalEngine` runs it in this process, `EngineClient` talks to it over a socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlora.lazy import attributes

if TYPE_CHECKING:
    from vlora.engine.engine import Engine
    from vlora.engine.interface import EngineInterface
    from vlora.engine.local import LocalEngine

__all__ = ["Engine", "EngineInterface", "LocalEngine"]

# Importing torch and transformers takes seconds; a front end uses this package without a model.
__getattr__ = attributes(
    __name__,
    Engine="vlora.engine.engine",
    EngineInterface="vlora.engine.interface",
    LocalEngine="vlora.engine.local",
)
