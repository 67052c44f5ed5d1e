"""Finds the adapter of a request by its name, and composes adapters on demand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from vlora.engine.adapter_loader import AdapterLoader
from vlora.errors import BadAdapter, BadRequest, OverCapacity
from vlora.lora.composition import composed_version
from vlora.lora.registry import AdapterRegistry, Registration, WeightedAdapter
from vlora.memory.arena import pages_for
from vlora.types import adapter_name, composed_of
from vlora.types.composition import WeightedName

MAX_USED, MAX_UNUSED = 64, 8
"""Compositions that requests use, and others that are kept: weights are free, and each has a copy of its factors."""


@dataclasses.dataclass(eq=False)
class Compositions:
    """A composition is made when a request names it. It is kept while requests use it, and then as one of the last few.

    A request for it also uses its parts: an unloaded part ends the request, and a replaced one is kept for it.

    room: the number of contiguous pages that an adapter may have.
    """

    registry: AdapterRegistry
    loader: AdapterLoader
    former: FormerAdapters
    room: Callable[[], int]

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
        parts = self.former.parts(named, version) if version else None
        if parts is None:
            parts = tuple(WeightedAdapter(self.registry.get(adapter), weight) for adapter, weight in named)
        for part in parts:
            if part.registration.error is not None:
                raise BadAdapter(part.registration.error)
        if len(parts) == 1 and parts[0].weight == 1:
            return parts[0].registration
        found = self.registry.composition(adapter_name(name), parts)
        needed, room = pages_for(found.num_bytes), self.room()
        if needed > room:
            raise BadRequest(
                f"adapter {name!r} has rank {found.header.rank} and needs {needed} contiguous pages of the arena, but "
                f"only {room} are available; compose fewer or smaller adapters, or start with a larger arena_bytes",
                field="adapter",
            )
        self._limit_others(found)
        if (replaced := self.registry.keep(found)) is not None:
            self.loader.retire(replaced)
        return found

    def drop(self, part: str) -> None:
        """Drop the compositions of a registration that is no longer current, those in use when their requests end."""
        for composition in self.registry.compositions:
            if part in composition.uses:
                self.registry.dissolve(composition)
                self.loader.retire(composition.key)

    def _limit_others(self, needed: Registration) -> None:
        others = [each for each in self.registry.compositions if each is not needed]
        unused = [each for each in others if each.key not in self.loader.users]
        if len(others) - len(unused) >= MAX_USED:
            raise OverCapacity(
                f"requests use {MAX_USED} other compositions of adapters, which is the limit; try again later"
            )
        for composition in unused[:-MAX_UNUSED]:
            self.registry.dissolve(composition)
            self.loader.retire(composition.key)


_MAX_TRIED = 256  # combinations of former adapters, when the parts of a composition are looked for


@dataclasses.dataclass(eq=False)
class FormerAdapters:
    """Finds former content by its hash, and keeps it although no request of this engine uses it, as long as asked."""

    registry: AdapterRegistry
    loader: AdapterLoader

    def __post_init__(self) -> None:
        self._wanted: Mapping[str, Collection[str]] = {}

    def keep(self, versions: Mapping[str, Collection[str]]) -> list[str]:
        """From now on, keep these contents by name when others replace them. Returns the keys not kept any more."""
        self._wanted = versions
        dropped = [key for key in self.loader.kept if not self._is_wanted(self.registry.known(key))]
        self.loader.kept.difference_update(dropped)
        return dropped

    def add(self, key: str) -> None:
        """A name no longer maps to this registration: keep it if its content is wanted. Call before it is retired."""
        if self._is_wanted(self.registry.known(key)):
            self.loader.kept.add(key)

    @property
    def held(self) -> dict[str, tuple[str, ...]]:
        return {
            name: tuple(found for found in map(_version, self._candidates(name)) if found in wanted)
            for name, wanted in self._wanted.items()
        }

    def with_content(self, name: str, path: str, version: str) -> Registration | None:
        """The current or a former registration of a name with this content.

        A current one that was not read yet may have it if it is of the same folder.
        """
        if not version:
            return None
        current = self.registry.get(name) if name in self.registry else None
        if current is not None and current.adapter is None and current.error is None:
            header = current.folder_header
            if str(header.path) == path and header.version in ("", version):
                return current
        return next((each for each in self._candidates(name) if _version(each) == version), None)

    def parts(self, named: Sequence[WeightedName], version: str) -> tuple[WeightedAdapter, ...] | None:
        """The adapters, former ones too, of a composition or a single adapter with this content; None if not known."""
        for found in itertools.islice(itertools.product(*(self._candidates(name) for name, _ in named)), _MAX_TRIED):
            contents = [(_version(each), part.weight) for each, part in zip(found, named, strict=True)]
            is_single = len(named) == 1 and named[0].weight == 1
            if version == (contents[0][0] if is_single else composed_version(contents)):
                return tuple(WeightedAdapter(each, part.weight) for each, part in zip(found, named, strict=True))
        return None

    def _candidates(self, name: str) -> list[Registration]:
        keys = {*self.loader.kept, *self.loader.users}
        former = [each for each in map(self.registry.known, keys) if each.name == name]
        current = [self.registry.get(name)] if name in self.registry else []
        return [*current, *(each for each in former if each not in current)]

    def _is_wanted(self, registration: Registration) -> bool:
        return _version(registration) in self._wanted.get(registration.name, ())


def _version(registration: Registration) -> str:
    """The content of an adapter that was read; before, the content that its folder must have."""
    if registration.adapter is not None:
        return registration.adapter.version
    return "" if registration.parts or registration.error is not None else registration.folder_header.version
