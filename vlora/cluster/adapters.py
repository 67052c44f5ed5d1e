"""Adapters on all replicas: an operator's change is made everywhere or nowhere, replica after replica.

The desired state (`adapter_state.py`) is the truth. Each replica follows it by itself (`replica_adapters.py`), so one
that joins, or that fails an adapter, delays no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from vlora.cluster.adapter_sender import AdapterSender, ReplicaFiles
from vlora.cluster.adapter_state import FLUSH_S, AdapterFailure, AdapterState, DesiredAdapter, Goal
from vlora.cluster.former_contents import FormerContents, RefusedCompositions, parts_of
from vlora.cluster.replica_adapters import ReplicaAdapters
from vlora.cluster.summary import merged_status, merged_statuses
from vlora.engine.ipc.client import EngineClient
from vlora.errors import Aborted, BadRequest, EngineDead, UnknownAdapter, VLoraError, listed
from vlora.types import AdapterStatus, ErrorValue

log = logging.getLogger("vlora.cluster")

T = TypeVar("T")


class ReplicatedAdapters:
    """The adapters of a cluster.

    Attributes:
        former: Contents that unfinished answers may need.
        homes: The replicas that serve, by name.
        linger_s: How long replicas keep former contents after a change, until other front ends have asked for those
            that they need.
    """

    def __init__(
        self,
        state: AdapterState,
        *,
        unfinished: Callable[[], Iterable[tuple[str, str | None]]],
        on_usable: Callable[[str, str, bool], None],
        on_lack: Callable[[str, str, str, bool], None],
        on_drain: Callable[[str, str], None],
        sender: AdapterSender | None = None,
    ) -> None:
        """Begin without replicas. Call in a running event loop.

        Args:
            on_usable: Called with a replica, an adapter or composition, and whether it can be used there from now on.
            on_lack: Called with a replica, an adapter, a content hash, and whether the replica lacks that content.
            on_drain: Called with the name and content of an adapter that is unloaded once its requests have ended.
            sender: Sends files that a replica's machine lacks; None: they have to be there.
        """
        self.state = state
        self.homes: dict[str, ReplicaAdapters] = {}
        self.linger_s = 0.0
        self._mirrored: Mapping[str, Mapping[str, AdapterFailure]] | None = None  # by replica; None: not `follow`
        self.former = FormerContents(unfinished, self._content_ended)
        self._tell_usable = on_usable
        self._on_lack = on_lack
        self._on_drain = on_drain
        self._sender = sender
        self._compositions = RefusedCompositions(on_usable)
        self._changing = asyncio.Lock()
        self._busy: set[str] = set()  # names that a change is at
        self._loop = asyncio.get_running_loop()

    def __contains__(self, adapter: object) -> bool:
        names = parts_of(adapter) if isinstance(adapter, str) else ()
        return bool(names) and all(name in self.state for name in names)

    # -- replicas -----------------------------------------------------------------------------------------------------

    async def join(self, name: str, engine: EngineClient, before: ReplicaAdapters | None = None) -> None:
        """Synchronize a new replica with the desired state; note what it cannot serve. Raises EngineDead.

        before: in its place, unless it is gone by then.
        """
        await self._adopt_own()
        files = None if self._sender is None else ReplicaFiles(self._sender, engine)
        while True:
            mirrors = self._mirrored is not None
            home = ReplicaAdapters(name, engine, self._goal, self._usable, files, mirrors=mirrors)
            await home.read()
            while not (mirrors or home.is_settled):
                await home.sync()
            if mirrors == (self._mirrored is not None):
                break
        if self.homes.get(name) is not before:
            return
        # Nothing was awaited since: a change that ends later finds this replica.
        self.leave(name)
        self.homes[name] = home
        if self._mirrored is not None:
            home.mirror(self._mirrored.get(name, {}))
        home.follow()

    def joined(self, name: str) -> None:
        """The router knows a replica from now on: say what it cannot serve."""
        for adapter, failure in self.homes[name].failures.items():
            if failure.bars:
                self._tell_usable(name, adapter, False)
        for adapter, version in self.former:
            self._on_lack(name, adapter, version, not self.homes[name].has_content(adapter, version))

    def leave(self, name: str) -> None:
        """A replica is gone. Unknown names are ignored."""
        home = self.homes.pop(name, None)
        if home is not None:
            home.close()
        self._compositions.forget(name)

    def seen(self, replica: str, contents: Mapping[str, str]) -> None:
        home = self.homes.get(replica)
        for name, version in contents.items():
            wanted = self.state.adapters.get(name)
            if home is None or home.mirrors or wanted is None or wanted.version == version or name in self._busy:
                continue
            applied = home.applied(name)
            if (name, version) in self.former or applied is None or applied.path != wanted.path:
                continue
            if wanted.version:
                home.verify(name)
            else:
                self._adopt(name, version)

    def began(self, name: str, version: str) -> None:
        """An answer began with this content of an adapter or a composition."""
        wanted = self.state.adapters.get(name)
        if wanted and not wanted.version and name not in self._busy and (name, version) not in self.former:
            self._adopt(name, version)

    def refused(self, replica: str, adapter: str, error: ErrorValue) -> None:
        self._usable(replica, adapter, False)
        if adapter in self.state and replica in self.homes and self._mirrored is None:
            self.homes[replica].fail(adapter, error)
        else:
            self._compositions.add(replica, adapter, error)

    def cause_of(self, adapter: str | None) -> VLoraError | None:
        """Why no replica can serve an adapter or composition; None if one can, or if it is not known."""
        causes = []
        for _, home in sorted(self.homes.items()):
            failures = [home.failures[name] for name in parts_of(adapter) if name in home.failures]
            errors = [failure.error for failure in failures if failure.bars]
            if adapter is not None and (refused := self._compositions.cause(home.name, adapter)) is not None:
                errors.append(refused)
            if not errors:
                return None
            causes.append((home.name, errors[0]))
        return _of_replica(*causes[0]) if causes else None

    # -- other front ends ---------------------------------------------------------------------------------------------

    def follow(
        self, adapters: Mapping[str, DesiredAdapter], failures: Mapping[str, Mapping[str, AdapterFailure]]
    ) -> None:
        """Have the adapters of another front end, which makes the changes, and its replicas' failures."""
        before, self._mirrored = self.state.adapters, failures
        former = [(name, each.version) for name, each in before.items() if each.version]
        for name, version in former:
            if name not in adapters or adapters[name].version != version:
                self.former.begin(name, version)
            if name not in adapters:
                self._on_drain(name, version)
        self.state.take_over(adapters)
        for name, each in adapters.items():
            self.former.drop(name, each.version)
        for name, version in former:
            self.former.end(name, version)
        for home in self.homes.values():
            home.mirror(failures.get(home.name, {}))
        self._wake()

    async def offer(self, paths: Mapping[str, str]) -> dict[str, DesiredAdapter]:
        """Send the files of folders to the replicas, for a change that another front end makes. Raises as `load`."""
        wanted = {name: await self._wanted(path) for name, path in paths.items()}
        await self._send(wanted.values())
        return wanted

    async def lead(self) -> None:
        """Make the changes from now on, in place of another front end."""
        if self._mirrored is not None:
            self._mirrored = None
            await asyncio.gather(*map(self._lead, self.homes.values()))

    async def _lead(self, home: ReplicaAdapters) -> None:
        home.mirror({})
        while self.homes.get(home.name) is home:
            try:
                await self.join(home.name, home.client, home)
            except EngineDead:
                return  # it is synchronized when it joins again
            except VLoraError as error:
                log.warning("the adapters of replica %r cannot be read: %s; retrying", home.name, error)
                await asyncio.sleep(FLUSH_S)

    # -- changes by operators -----------------------------------------------------------------------------------------

    async def register(self, paths: Mapping[str, str], versions: Mapping[str, str]) -> None:
        """Register folders on all replicas, all or none. Raises as `EngineInterface.register_adapters`.

        versions: By name, the contents of those that another front end has sent to the replicas.
        """
        wanted = {name: await self._wanted(path, versions.get(name, "")) for name, path in paths.items()}
        await self._send(wanted.values())
        async with self._change(*paths) as homes:
            for name in paths.keys() & self.state.adapters.keys():
                if former := self.state.adapters[name].version:
                    self.former.begin(name, former)
            await self._on_all(homes, lambda home: home.register(wanted))
            await self.state.commit(wanted)

    async def load(self, name: str, path: str, version: str) -> AdapterStatus:
        """Load a folder on all replicas. Raises as `EngineInterface.load_adapter`. version: as in `register`.

        Requests continue with the content that they began with, wherever they are.
        """
        own = await self._wanted(path, version)
        await self._send([own])
        async with self._change(name) as homes:
            if name in self.state and self.state.adapters[name].pinned:
                raise BadRequest(f"adapter {name!r} is pinned; unpin it before loading other content under its name")
            former = await self._read_content(name)
            if former is not None:
                self.former.begin(name, former)
            found: list[AdapterStatus] = []
            for home in homes:
                version = found[0].version if found else own.version
                status = await self._on(home, home.load(name, DesiredAdapter(own.path, version)))
                if status is None:
                    continue
                if not found and former not in (None, status.version):
                    self._lack_elsewhere(name, status.version, home.name)
                found.append(status)
                self._on_lack(home.name, name, status.version, False)
            if not found:
                raise _no_replica()
            await self.state.commit({name: DesiredAdapter(own.path, found[0].version)})
            self.former.drop(name, found[0].version)
        return merged_status(found)

    async def unload(self, name: str, drain: bool) -> None:
        """Unload an adapter from all replicas. Raises UnknownAdapter."""
        async with self._change(name) as homes:
            self._check_known(name)
            former = await self._read_content(name) if drain else None
            await self.state.commit({name: None})
            if former is not None:
                self.former.begin(name, former)
                self._on_drain(name, former)
            for home in homes:
                await self._on(home, home.unload(name, drain=drain))

    async def pin(self, name: str, pinned: bool) -> AdapterStatus:
        """Pin an adapter on all replicas that can serve it, or unpin it. Raises as `EngineInterface.pin_adapter`."""
        async with self._change(name) as homes:
            self._check_known(name)
            if (cause := self.cause_of(name)) is not None:
                raise cause
            usable = [home for home in homes if name not in home.failures or not home.failures[name].bars]
            found = await self._on_all(usable, lambda home: home.pin(name, pinned))
            wanted = self.state.adapters[name]
            version = wanted.version or found[0].version
            await self.state.commit({name: DesiredAdapter(wanted.path, version, pinned)})
        return merged_status(found)

    # -- questions ----------------------------------------------------------------------------------------------------

    async def statuses(self) -> tuple[AdapterStatus, ...]:
        """Every adapter by name. One that no replica has, since all have failed, has an error and no further values."""
        by_replica = await self.by_replica()
        if not by_replica:
            raise _no_replica()
        return merged_statuses(by_replica.values(), self.state.adapters.keys(), self.cause_of)

    async def by_replica(self) -> dict[str, tuple[AdapterStatus, ...]]:
        homes = tuple(self.homes.values())
        results = await asyncio.gather(*(home.statuses() for home in homes), return_exceptions=True)
        found: dict[str, tuple[AdapterStatus, ...]] = {}
        for home, result in zip(homes, results, strict=True):
            if not isinstance(result, BaseException):
                found[home.name] = result
            elif not isinstance(result, EngineDead | Aborted):
                raise result
        return found

    async def close(self) -> None:
        """Write what was not written yet, and leave the state to other processes."""
        for name in tuple(self.homes):
            self.leave(name)
        with contextlib.suppress(VLoraError):
            await self.state.flush()
        self.state.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _change(self, *names: str) -> AsyncIterator[list[ReplicaAdapters]]:
        """Make one change at a time. If it fails, restore the desired state on the replicas."""
        async with self._changing:
            homes = [self.homes[name] for name in sorted(self.homes)]
            if not homes:
                raise _no_replica()
            self._busy |= {*names}
            try:
                yield homes
            except BaseException:
                self._busy -= {*names}
                await asyncio.gather(*map(self._restore, homes))
                for name in names:
                    if name in self.state:
                        self.former.drop(name, self.state.adapters[name].version)
                raise
            finally:
                self._busy -= {*names}
                if self.linger_s:
                    self._loop.call_later(self.linger_s, self._end_changes, tuple(self.former))
                else:
                    self._end_changes(self.former)
                self._wake(names)
                for home in homes:
                    self._compositions.allow(home.name, names)

    def _end_changes(self, contents: Iterable[tuple[str, str]]) -> None:
        """Former contents are kept from now on only until the requests that began with them have ended."""
        for name, version in contents:
            if name not in self._busy:
                self.former.end(name, version)

    async def _wanted(self, path: str, version: str = "") -> DesiredAdapter:
        """A folder, with the content that it has at the front end if files are sent. Raises BadAdapter.

        version: Of the content, if another front end has it.
        """
        path = os.path.abspath(path)  # a later server may start in another folder
        content = None if self._sender is None or version else await self._sender.content_of(path)
        return DesiredAdapter(path, version if content is None else content.version)

    async def _send(self, adapters: Collection[DesiredAdapter]) -> None:
        """Send the files of a change before it begins: that may take long, and no other change waits for it."""
        homes = [] if self._sender is None else [self.homes[name] for name in sorted(self.homes)]
        try:
            if homes:
                await self._on_all(homes, lambda home: home.send(adapters))
        except BaseException:
            self._wake()  # files that have arrived are not in use
            raise

    async def _adopt_own(self) -> None:
        """Where files are sent, the content of the front end counts if none has been read so far."""
        for name, wanted in tuple(self.state.adapters.items()) if self._sender is not None else ():
            if wanted.version:
                continue
            try:
                own = await self._wanted(wanted.path)
            except VLoraError as error:
                log.warning("adapter %r: %s", name, error)
                continue
            if own.version and self.state.adapters.get(name) == wanted and name not in self._busy:
                self._adopt(name, own.version)

    def _goal(self) -> Goal:
        return Goal(self.state.adapters, self.former.kept, self._busy)

    async def _restore(self, home: ReplicaAdapters) -> None:
        try:
            await home.sync()
        except EngineDead:
            pass  # it is synchronized when it joins again
        except VLoraError as error:
            log.warning("the adapters of replica %r could not be restored: %s", home.name, error)

    async def _on(self, home: ReplicaAdapters, call: Coroutine[Any, Any, T]) -> T | None:
        """The result of a replica; None if it is gone. Raises its error, with its name."""
        try:
            return await call
        except EngineDead:
            return None
        except VLoraError as error:
            raise _of_replica(home.name, ErrorValue.of(error)) from error

    async def _on_all(
        self, homes: Sequence[ReplicaAdapters], call: Callable[[ReplicaAdapters], Coroutine[Any, Any, T]]
    ) -> list[T]:
        """The results of replicas at once, without those that are gone. Raises the first error once all have ended."""
        results = await asyncio.gather(*(self._on(home, call(home)) for home in homes), return_exceptions=True)
        found = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            if result is not None:
                found.append(result)
        if not found:
            raise _no_replica()
        return found

    async def _read_content(self, name: str) -> str | None:
        """The hash of an adapter's present content; None if no replica has read it."""
        wanted = self.state.adapters.get(name)
        if wanted is None or wanted.version:
            return None if wanted is None else wanted.version
        statuses = [status for own in (await self.by_replica()).values() for status in own if status.name == name]
        return next((status.version for status in statuses if status.version), None)

    def _lack_elsewhere(self, name: str, version: str, first: str) -> None:
        """The first replica has a new content: answers that begin with it do not go on where it is not loaded yet."""
        if (name, version) in self.former:
            return  # it is not new: the replicas have kept it
        self.former.begin(name, version, kept=False)
        for replica in self.homes.keys() - {first}:
            self._on_lack(replica, name, version, True)

    def _content_ended(self, name: str, version: str) -> None:
        for replica in self.homes:
            self._on_lack(replica, name, version, False)
        self._wake()  # it need not be kept any more

    def _usable(self, replica: str, adapter: str, usable: bool) -> None:
        self._tell_usable(replica, adapter, usable)
        if usable:
            self._compositions.allow(replica, {adapter})

    def _adopt(self, name: str, version: str) -> None:
        """The first content that is read is the desired one."""
        if self._mirrored is not None:
            return
        self.state.adopt(name, version)
        self._loop.call_later(FLUSH_S, self._wake)  # the replicas check the content that was adopted

    def _check_known(self, name: str) -> None:
        if name not in self.state:  # it may be as long as a message
            raise UnknownAdapter(f"no adapter named {name[:128]!r}; registered: {listed(self.state.adapters)}")

    def _wake(self, changed: Iterable[str] = ()) -> None:
        for home in self.homes.values():
            home.wake(changed)


def _no_replica() -> EngineDead:
    return EngineDead("no replica can be used")


def _of_replica(replica: str, error: ErrorValue) -> VLoraError:
    return ErrorValue(error.code, f"replica {replica!r}: {error.message}").to_exception()
