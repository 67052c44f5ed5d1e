"""Every adapter the engine knows by name, in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from vlora.adapters.host import HostAdapter, load_adapter
from vlora.adapters.peft_format import AdapterHeader, SiteShape, read_header
from vlora.errors import BadAdapter, UnknownAdapter

MAX_NAME = 128


class AdapterRegistry:
    """Names to adapters. Registering reads headers only; tensors are read when an adapter is first needed."""

    def __init__(self, sites: Mapping[str, SiteShape], dtype: torch.dtype, hidden_size: int) -> None:
        self._sites = sites
        self._dtype = dtype
        self._hidden_size = hidden_size
        self._headers: dict[str, AdapterHeader] = {}
        self._loaded: dict[str, HostAdapter] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._headers))

    def __contains__(self, name: str) -> bool:
        return name in self._headers

    def register(self, name: str, path: str) -> None:
        """Register a folder under a name; a name already taken gets the new content. Raises BadAdapter."""
        self._headers[name] = self._read(name, path)
        self._loaded.pop(name, None)

    def load(self, name: str, path: str, check: Callable[[HostAdapter], None] = lambda _: None) -> HostAdapter:
        """Register a folder and read its tensors now. When it is refused, what the name stood for before stays.

        check: told of the adapter before its name changes hands; what it raises refuses the adapter.
        """
        header = self._read(name, path)
        adapter = load_adapter(name, header, self._sites, self._dtype, self._hidden_size)
        check(adapter)
        self._headers[name] = header
        self._loaded[name] = adapter
        return adapter

    def get(self, name: str) -> HostAdapter:
        """The adapter's tensors, read at first use. Raises UnknownAdapter, BadAdapter."""
        if name not in self._headers:
            raise UnknownAdapter(f"no adapter named {name!r}; registered: {', '.join(self.names) or 'none'}")
        if name not in self._loaded:
            header = self._headers[name]
            self._loaded[name] = load_adapter(name, header, self._sites, self._dtype, self._hidden_size)
        return self._loaded[name]

    def _read(self, name: str, path: str) -> AdapterHeader:
        if (
            not 0 < len(name) <= MAX_NAME
            or name != name.strip()
            or name.startswith(".")
            or not name.isprintable()
            or any(letter in name for letter in "@/\\")
        ):
            raise BadAdapter(
                f"adapter name {name[:MAX_NAME]!r} is not usable: it has 1 to {MAX_NAME} printable characters, no @, "
                "no slashes, and does not begin with a dot"
            )
        if "\0" in path:
            raise BadAdapter(f"adapter {name!r}: a path cannot hold a zero byte")
        return read_header(Path(path), self._sites)

    def remove(self, name: str) -> None:
        """Forget an adapter. Raises UnknownAdapter."""
        if self._headers.pop(name, None) is None:
            raise UnknownAdapter(f"no adapter named {name!r}; registered: {', '.join(self.names) or 'none'}")
        self._loaded.pop(name, None)
