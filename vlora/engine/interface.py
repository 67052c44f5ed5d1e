"""The interface to an engine: `LocalEngine` in this process, `EngineClient` over a socket; a request's outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from vlora.engine.operations import ADAPTERS_PER_REPLY, GetSnapshot, ListAdapters, LoadAdapter, RegisterAdapters
from vlora.engine.snapshot import EngineSnapshot
from vlora.operations import GetStats, Operation, PinAdapter, UnloadAdapter
from vlora.types import AdapterStatus, EngineStats, Request, RequestOutput


class EngineInterface(Protocol):
    """The calls a front end may make to an engine.

    All are asyncio; a dead engine raises EngineDead at once, with the cause. An engine implements `generate`, `call`
    and `close`; a cluster, which has no engine of its own, each operation.
    """

    def generate(self, request: Request, until: float | None = None) -> AsyncIterator[RequestOutput]:
        """Generate the answer of one request; the last output is finished and carries the error, if any.

        Closing the iterator early cancels the request and frees its memory.

        Args:
            request: The request.
            until: When waiting for the next output ends with TimeoutError, in the loop's clock; None waits
                indefinitely.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """Cancel a request; its iterator ends with finish_reason "cancelled". Unknown ids are ignored."""
        ...

    async def call(self, operation: Operation) -> Any:
        """Perform an operation; the methods below are calls."""
        ...

    async def register_adapters(self, paths: Mapping[str, str], versions: Mapping[str, str] = {}) -> None:
        """Register adapter folders by name, all or none. Only headers are read now, the rest at first use.

        Raises BadAdapter with the reason, or OverCapacity for one that can never be loaded onto the device.

        Args:
            versions: Content hashes by name; an adapter with other content fails at first use.
        """
        await self.call(RegisterAdapters(dict(paths), dict(versions)))

    async def load_adapter(self, name: str, path: str, version: str = "") -> AdapterStatus:
        """Register the adapter folder `path` as `name`; returns when all of it was read, in the background.

        Until then, and if this raises, the name keeps its previous content. Loads and pins take effect in call order.

        Raises:
            BadAdapter: The folder is not a valid adapter of this model, or its content has another hash than `version`.
            OverCapacity: The adapter does not fit on the device.
            BadRequest: The name is pinned.
            Aborted: The name was unloaded meanwhile.
        """
        return await self.call(LoadAdapter(name, path, version))

    async def unload_adapter(self, name: str, drain: bool = False) -> None:
        """Remove an adapter; new requests by its name are refused. Raises UnknownAdapter.

        Its running requests are cancelled and its memory is freed; with `drain` they finish first.
        """
        await self.call(UnloadAdapter(name, drain))

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        """Load an adapter onto the device in the background and keep it resident, or allow it to be evicted again.

        Raises:
            UnknownAdapter: No adapter is registered under the name.
            OverCapacity: There is no room for it, or another adapter would no longer fit.
            Aborted: It was unpinned or unloaded meanwhile.
        """
        return await self.call(PinAdapter(name, pinned))

    async def adapters(self) -> tuple[AdapterStatus, ...]:
        """Every registered adapter, by name."""
        found: tuple[AdapterStatus, ...] = ()
        while True:
            page = await self.call(ListAdapters(found[-1].name if found else ""))
            found += page
            if len(page) < ADAPTERS_PER_REPLY:
                return found

    async def stats(self) -> EngineStats:
        """Counters since the engine started."""
        return await self.call(GetStats())

    async def snapshot(self, since: int = 0) -> EngineSnapshot:
        """The engine's current state between two steps, with the steps after number `since`."""
        return await self.call(GetSnapshot(since))

    async def close(self) -> None:
        """Stop the engine; requests still running end as cancelled."""
        ...


class OutputStream:
    """An asynchronous iterator over a request's outputs; it ends after the last one."""

    def __init__(self) -> None:
        """Without outputs and without a bound."""
        self.finished = False
        self._outputs: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._late: asyncio.TimerHandle | None = None

    def end_at(self, until: float | None) -> None:
        """Let a read raise TimeoutError at a time of the running event loop; None for no bound."""
        # One timer for all outputs: a timer per output would cost as much as passing the output on.
        if until is not None:
            self._late = asyncio.get_running_loop().call_at(until, self._outputs.put_nowait, None)

    def put(self, output: RequestOutput) -> None:
        """Add an output. Call in the event loop."""
        self._outputs.put_nowait(output)

    def close(self) -> None:
        if self._late is not None:
            self._late.cancel()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        output = await self._outputs.get()
        if output is None:
            raise TimeoutError
        self.finished = output.finished
        return output
