"""The one interface to an engine, wherever it runs: `LocalEngine` in this process, `EngineClient` over a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from vlora.types import AdapterStatus, EngineStats, Request, RequestOutput


class EngineInterface(Protocol):
    """What a front end may ask of an engine. All calls are asyncio; a dead engine raises EngineDead at once, with its
    cause."""

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Answer one request; the last output is finished and carries the error, if any.

        Closing the iterator before its end cancels the request and frees what it held.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """Cancel a request; its iterator ends with finish_reason "cancelled". Unknown ids are ignored."""
        ...

    async def load_adapter(self, name: str, path: str) -> AdapterStatus:
        """Register the adapter folder `path` as `name`. Raises BadAdapter with the reason."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Cancel the adapter's requests, free its memory and forget it. Raises UnknownAdapter."""
        ...

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        """Bring an adapter to the device and keep it there, or let it be evicted again.

        Raises UnknownAdapter, OverCapacity when there is no room for it or it would leave none for another.
        """
        ...

    async def adapters(self) -> tuple[AdapterStatus, ...]:
        """Every registered adapter, by name."""
        ...

    async def stats(self) -> EngineStats:
        """Counters since the engine started."""
        ...

    async def close(self) -> None:
        """Stop the engine; requests still running end as cancelled."""
        ...
