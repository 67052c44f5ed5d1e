"""Finds the adapter of a request by its name, and composes adapters on demand."""

from __future__ import annotations

from collections.abc import Callable

from vlora.engine.adapter_loader import AdapterLoader
from vlora.engine.former_adapters import FormerAdapters
from vlora.errors import BadAdapter, BadRequest, OverCapacity
from vlora.lora import AdapterRegistry, Registration
from vlora.lora.registry import WeightedAdapter
from vlora.memory.arena import pages_for
from vlora.types import adapter_name, composed_of

MAX_USED, MAX_UNUSED = 64, 8
"""Compositions that requests use, and others that are kept: weights are free, and each has a copy of its factors."""


class Compositions:
    """A composition is made when a request names it. It is kept while requests use it, and then as one of the last few.

    A request for it also uses its parts: an unloaded part ends the request, and a replaced one is kept for it.
    """

    def __init__(
        self, registry: AdapterRegistry, loader: AdapterLoader, former: FormerAdapters, room: Callable[[], int]
    ) -> None:
        """room: The number of contiguous pages that an adapter may have."""
        self._registry = registry
        self._loader = loader
        self._former = former
        self._room = room

    def get(self, name: str, version: str | None = None) -> Registration:
        """The current registration of an adapter or a composition.

        Args:
            version: A content hash: the registration with this content if there is one, else the current one.

        Raises:
            BadRequest: The name is no composition, an adapter cannot be composed, or the composition is too large.
            UnknownAdapter: An adapter is not registered.
            BadAdapter: An adapter could not be read.
            OverCapacity: Requests use `MAX_USED` other compositions.
        """
        named = composed_of(name)
        parts = self._former.parts(named, version) if version else None
        if parts is None:
            parts = tuple(WeightedAdapter(self._registry.get(adapter), weight) for adapter, weight in named)
        for part in parts:
            if part.registration.error is not None:
                raise BadAdapter(part.registration.error)
        if len(parts) == 1 and parts[0].weight == 1:
            return parts[0].registration
        found = self._registry.composition(adapter_name(name), parts)
        needed, room = pages_for(found.num_bytes), self._room()
        if needed > room:
            raise BadRequest(
                f"adapter {name!r} has rank {found.header.rank} and needs {needed} contiguous pages of the arena, but "
                f"only {room} are available; compose fewer or smaller adapters, or start with a larger arena_bytes",
                field="adapter",
            )
        self._limit_others(found)
        if (replaced := self._registry.keep(found)) is not None:
            self._loader.retire(replaced)
        return found

    def drop(self, part: str) -> None:
        """Drop the compositions of a registration that is no longer current, those in use when their requests end."""
        for composition in self._registry.compositions:
            if part in composition.uses:
                self._registry.dissolve(composition)
                self._loader.retire(composition.key)

    def _limit_others(self, needed: Registration) -> None:
        others = [each for each in self._registry.compositions if each is not needed]
        unused = [each for each in others if each.key not in self._loader.users]
        if len(others) - len(unused) >= MAX_USED:
            raise OverCapacity(
                f"requests use {MAX_USED} other compositions of adapters, which is the limit; try again later"
            )
        for composition in unused[:-MAX_UNUSED]:
            self._registry.dissolve(composition)
            self._loader.retire(composition.key)
