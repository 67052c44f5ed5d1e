"""Content that names no longer map to: used by earlier requests, or kept for answers that other engines began."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from vlora.engine.adapter_loader import AdapterLoader
from vlora.lora import AdapterRegistry, Registration
from vlora.lora.composition import composed_version
from vlora.lora.registry import WeightedAdapter
from vlora.types.composition import WeightedName

_MAX_TRIED = 256  # combinations of former adapters, when the parts of a composition are looked for


class FormerAdapters:
    """Finds former content by its hash, and keeps it although no request of this engine uses it, as long as asked."""

    def __init__(self, registry: AdapterRegistry, loader: AdapterLoader) -> None:
        self._registry = registry
        self._loader = loader
        self._wanted: Mapping[str, Collection[str]] = {}

    def keep(self, versions: Mapping[str, Collection[str]]) -> list[str]:
        """From now on, keep these contents by name when others replace them. Returns the keys not kept any more."""
        self._wanted = versions
        dropped = [key for key in self._loader.kept if not self._is_wanted(self._registry.known(key))]
        self._loader.kept.difference_update(dropped)
        return dropped

    def add(self, key: str) -> None:
        """A name no longer maps to this registration: keep it if its content is wanted. Call before it is retired."""
        if self._is_wanted(self._registry.known(key)):
            self._loader.kept.add(key)

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
        current = self._registry.get(name) if name in self._registry else None
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
        keys = {*self._loader.kept, *self._loader.users}
        former = [each for each in map(self._registry.known, keys) if each.name == name]
        current = [self._registry.get(name)] if name in self._registry else []
        return [*current, *(each for each in former if each not in current)]

    def _is_wanted(self, registration: Registration) -> bool:
        return _version(registration) in self._wanted.get(registration.name, ())


def _version(registration: Registration) -> str:
    """The content of an adapter that was read; before, the content that its folder must have."""
    if registration.adapter is not None:
        return registration.adapter.version
    return "" if registration.parts or registration.error is not None else registration.folder_header.version
