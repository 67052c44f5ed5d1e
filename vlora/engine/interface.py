"""The one interface to an engine, wherever it runs: `LocalEngine` in this process, `EngineClient` over a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from vlora.engine.snapshot import EngineSnapshot
from vlora.types import AdapterStatus, EngineStats, Request, RequestOutput


class EngineInterface(Protocol):
    """What a front end may ask of an engine. All calls are asyncio; a dead engine raises EngineDead at once, with its
    cause."""

    def generate(self, request: Request, until: float | None = None) -> AsyncIterator[RequestOutput]:
        """Answer one request; the last output is finished and carries the error, if any.

        Closing the iterator before its end cancels the request and frees what it held. until: when waiting for the next
        output ends with TimeoutError, by the loop's clock.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """Cancel a request; its iterator ends with finish_reason "cancelled". Unknown ids are ignored."""
        ...

    async def register_adapters(self, paths: Mapping[str, str]) -> None:
        """Register adapter folders by name, all or none: only headers are read now, the rest at first use.

        Raises BadAdapter with the reason, OverCapacity for one that could never be brought to the device.
        """
        ...

    async def load_adapter(self, name: str, path: str) -> AdapterStatus:
        """Register the adapter folder `path` as `name`; returns when all of it was read, beside the steps.

        Until then the name stands for what it did, also where this raises: BadAdapter with the reason, OverCapacity,
        BadRequest for a pinned name, Aborted when the name is unloaded meanwhile. Loads and pins take effect in the
        order of the calls.
        """
        ...

    async def unload_adapter(self, name: str, drain: bool = False) -> None:
        """Forget an adapter; requests by its name are refused from now on. Raises UnknownAdapter.

        Its requests under way are cancelled and its memory is freed; with `drain` they finish first.
        """
        ...

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        """Bring an adapter to the device, beside the steps, and keep it there; or let it be evicted again.

        Raises UnknownAdapter, OverCapacity when there is no room for it or it would leave none for another, Aborted
        when it is unpinned or unloaded meanwhile.
        """
        ...

    async def adapters(self) -> tuple[AdapterStatus, ...]:
        """Every registered adapter, by name."""
        ...

    async def stats(self) -> EngineStats:
        """Counters since the engine started."""
        ...

    async def snapshot(self, since: int = 0) -> EngineSnapshot:
        """What is going on, with the steps after number `since`; made between two steps."""
        ...

    async def close(self) -> None:
        """Stop the engine; requests still running end as cancelled."""
        ...
