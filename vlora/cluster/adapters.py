"""Adapters on all replicas: each change is made everywhere or nowhere, and replicas that join get all adapters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from vlora.engine.ipc.client import EngineClient
from vlora.errors import BadAdapter, EngineDead, UnknownAdapter, VLoraError
from vlora.types import AdapterStatus

log = logging.getLogger("vlora.cluster")

T = TypeVar("T")


class ReplicatedAdapters:
    """The adapters of a cluster by name, with their folders and pins."""

    def __init__(self, engines: Callable[[], Mapping[str, EngineClient]]) -> None:
        """engines: the replicas' engines by name."""
        self._engines = engines
        self._paths: dict[str, str] = {}
        self._pinned: set[str] = set()
        self._changing = asyncio.Lock()

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    async def restore(self, engine: EngineClient) -> None:
        """Register the adapters on a replica that joins. One that it cannot serve is logged: it is no home for it."""
        async with self._changing:
            for name, path in tuple(self._paths.items()):
                try:
                    await engine.register_adapters({name: path})
                    if name in self._pinned:
                        await engine.pin_adapter(name, True)
                except EngineDead:
                    raise
                except VLoraError as error:
                    log.warning("a replica that joins cannot serve adapter %r: %s", name, error)

    async def register(self, paths: Mapping[str, str]) -> None:
        """Register folders on all replicas, all or none. Raises as `EngineInterface.register_adapters`."""
        async with self._changing:
            await self._everywhere(lambda engine: engine.register_adapters(paths), paths)
            self._paths |= paths

    async def load(self, name: str, path: str) -> AdapterStatus:
        """Load a folder on all replicas. Raises as `EngineInterface.load_adapter`."""
        async with self._changing:
            found = await self._everywhere(lambda engine: engine.load_adapter(name, path), (name,))
            versions = {status.version for status in found.values()}
            if len(versions) > 1:
                await self._undo(found, (name,))
                shown = ", ".join(f"{replica} has {status.version}" for replica, status in found.items())
                raise BadAdapter(
                    f"adapter {name!r} in {path} has different content on the replicas: {shown}; copy the same files "
                    "to all machines"
                )
            self._paths[name] = path
            return merged_status(found.values())

    async def unload(self, name: str, drain: bool) -> None:
        """Unload an adapter from all replicas. Raises UnknownAdapter if none has it."""
        async with self._changing:
            known = name in self._paths
            self._paths.pop(name, None)
            self._pinned.discard(name)
            results = await self._settle(lambda engine: engine.unload_adapter(name, drain))
            errors = [result for result in results.values() if isinstance(result, BaseException)]
            for error in errors:
                if not isinstance(error, UnknownAdapter | EngineDead) or (not known and len(errors) == len(results)):
                    raise error

    async def pin(self, name: str, pinned: bool) -> AdapterStatus:
        """Pin an adapter on all replicas, or unpin it. Raises as `EngineInterface.pin_adapter`."""
        async with self._changing:
            results = await self._settle(lambda engine: engine.pin_adapter(name, pinned))
            failed = _failures(results)
            if failed:
                done = [replica for replica, result in results.items() if isinstance(result, AdapterStatus)]
                await self._undo_pin(done, name)
                raise next(iter(failed.values()))
            (self._pinned.add if pinned else self._pinned.discard)(name)
            return merged_status([result for result in results.values() if isinstance(result, AdapterStatus)])

    async def statuses(self) -> tuple[AdapterStatus, ...]:
        """Every adapter by name."""
        found: dict[str, list[AdapterStatus]] = {}
        for result in (await self._settle(lambda engine: engine.adapters())).values():
            if isinstance(result, BaseException):
                if not isinstance(result, EngineDead):
                    raise result
                continue
            for status in result:
                found.setdefault(status.name, []).append(status)
        return tuple(merged_status(found[name]) for name in sorted(found))

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _everywhere(
        self, call: Callable[[EngineClient], Awaitable[T]], names: tuple[str, ...] | Mapping[str, str]
    ) -> dict[str, T]:
        """Change adapters on all replicas; if one refuses, undo it on the others and raise its error."""
        results = await self._settle(call)
        failed = _failures(results)
        done = {replica: result for replica, result in results.items() if not isinstance(result, BaseException)}
        if failed:
            await self._undo(done, tuple(names))
            raise next(iter(failed.values()))
        return done

    async def _settle(self, call: Callable[[EngineClient], Awaitable[T]]) -> dict[str, T | BaseException]:
        engines = self._engines()
        if not engines:
            raise EngineDead("no replica can be used")
        results = await asyncio.gather(*map(call, engines.values()), return_exceptions=True)
        return dict(zip(engines, results, strict=True))

    async def _undo(self, replicas: Mapping[str, object], names: tuple[str, ...]) -> None:
        engines = self._engines()
        for replica in replicas:
            for name in names:
                engine = engines.get(replica)
                if engine is None:
                    continue
                try:
                    if name in self._paths:
                        await engine.register_adapters({name: self._paths[name]})
                    else:
                        await engine.unload_adapter(name)
                except VLoraError as error:
                    log.warning("adapter %r could not be restored on replica %r: %s", name, replica, error)

    async def _undo_pin(self, replicas: Iterable[str], name: str) -> None:
        for replica in replicas:
            engine = self._engines().get(replica)
            if engine is None:
                continue
            try:
                await engine.pin_adapter(name, name in self._pinned)
            except VLoraError as error:
                log.warning("the pin of adapter %r could not be restored on replica %r: %s", name, replica, error)


def _failures(results: Mapping[str, object]) -> dict[str, BaseException]:
    """The errors of replicas that refused. One that died refused nothing, unless all did."""
    errors = {replica: result for replica, result in results.items() if isinstance(result, BaseException)}
    refused = {replica: error for replica, error in errors.items() if not isinstance(error, EngineDead)}
    return errors if len(errors) == len(results) else refused


def merged_status(statuses: Iterable[AdapterStatus]) -> AdapterStatus:
    """One adapter's status over the replicas that have it."""
    found = list(statuses)
    read = next((status for status in found if status.loaded), found[0])
    return msgspec.structs.replace(
        read,
        resident=any(status.resident for status in found),
        pinned=all(status.pinned for status in found),
        error=next((status.error for status in found if status.error is not None), None),
        num_loads=sum(status.num_loads for status in found),
    )
