"""The step loop and its processes. `LocalEngine` runs it here, `EngineClient` talks to it over a socket."""

from vlora.engine.engine import Engine
from vlora.engine.interface import EngineInterface
from vlora.engine.local import LocalEngine

__all__ = ["Engine", "EngineInterface", "LocalEngine"]
