"""Adapters on all replicas: a table of desired adapters, which each replica follows by itself.

A change is tried on one replica, which may refuse it, then written to the table (`adapter_state.py`). Each replica's
loop (`replica_adapters.py`) then makes it there, as after a start, a lost connection or a takeover.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from typing import TypeVar

import msgspec

from vlora.cluster.adapter_sender import AdapterSender, ReplicaFiles
from vlora.cluster.adapter_state import FLUSH_S, AdapterFailure, AdapterState, DesiredAdapter, Goal
from vlora.cluster.former_contents import FormerContents, parts_of
from vlora.cluster.replica_adapters import ReplicaAdapters
from vlora.cluster.summary import merged_statuses
from vlora.engine.ipc.client import EngineClient
from vlora.errors import Aborted, BadRequest, EngineDead, UnknownAdapter, VLoraError, listed
from vlora.types import AdapterStatus, ErrorValue

log = logging.getLogger("vlora.cluster")

T = TypeVar("T")

_FOLLOW_S = 60.0  # a caller's wait for the replicas after the first: less than clients wait for an answer


class ReplicatedAdapters:
    """The adapters of a cluster.

    Attributes:
        former: Contents that unfinished answers may need.
        homes: The replicas that serve, by name.
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
            unfinished: The ids and adapters of the unfinished requests.
            on_usable: Called with a replica, an adapter or composition, and whether it can be used there from now on.
            on_lack: Called with a replica, an adapter, a content hash, and whether the replica lacks that content.
            on_drain: Called with the name and content of an adapter that is unloaded once its requests have ended.
            sender: Sends files that a replica's machine lacks; None: they have to be there.
        """
        self.state = state
        self.homes: dict[str, ReplicaAdapters] = {}
        self._term = 0
        self._mirrored: Mapping[str, Mapping[str, AdapterFailure]] | None = None  # by replica; None: not `follow`
        self.former = FormerContents(unfinished, self._content_ended)
        self._on_usable = on_usable
        self._on_lack = on_lack
        self._on_drain = on_drain
        self._sender = sender
        self._changing = asyncio.Lock()
        self._busy: set[str] = set()  # names of a change that is not written yet
        self._moved = asyncio.Event()  # a replica has done something
        self._loop = asyncio.get_running_loop()

    def __contains__(self, adapter: object) -> bool:
        names = parts_of(adapter) if isinstance(adapter, str) else ()
        return bool(names) and all(name in self.state for name in names)

    # -- replicas -----------------------------------------------------------------------------------------------------

    async def join(self, name: str, engine: EngineClient) -> None:
        """Synchronize a new replica with the desired state; note what it cannot serve. Raises EngineDead."""
        await self._adopt_own()
        files = None if self._sender is None else ReplicaFiles(self._sender, engine)
        home = ReplicaAdapters(name, engine, self._goal, self._on_usable, self._applied, files)
        while not home.is_settled:
            await home.sync()
        # Nothing was awaited since: a change that is written later wakes this replica.
        self.leave(name)
        self.homes[name] = home
        if self._mirrored is not None:
            home.mirror(self._mirrored.get(name, {}))
        home.follow()

    def joined(self, name: str) -> None:
        """The router knows a replica from now on: say what it cannot serve."""
        home = self.homes[name]
        for adapter in filter(home.bars, home.failures):
            self._on_usable(name, adapter, False)
        for adapter, version in self.former:
            self._on_lack(name, adapter, version, not home.has_content(adapter, version))

    def leave(self, name: str) -> None:
        """A replica is gone. Unknown names are ignored."""
        home = self.homes.pop(name, None)
        if home is not None:
            home.close()
            self._replica_moved()

    def seen(self, replica: str, contents: Mapping[str, str]) -> None:
        for name, version in contents.items():
            if (other := self._other_content(replica, name, version)) is not None:
                if other.version:
                    self.homes[replica].verify(name)
                else:
                    self._set_content(name, version)

    def began(self, replica: str, name: str, version: str) -> None:
        """An answer began on a replica with this content of an adapter or a composition."""
        other = self._other_content(replica, name, version)
        if other is not None and not other.version:
            self._set_content(name, version)

    def refused(self, replica: str, adapter: str, error: ErrorValue) -> None:
        """A replica cannot load the adapter or composition of a request."""
        if (home := self.homes.get(replica)) is not None:
            is_late = self._mirrored is None and not home.is_done(adapter)
            home.fail(adapter, error)
            home.wake([adapter] if is_late else ())  # its loop is about to load it

    def cause_of(self, adapter: str | None) -> VLoraError | None:
        """Why no replica can serve an adapter or composition; None if one can, or if it is not known."""
        causes = []
        for _, home in sorted(self.homes.items()):
            errors = [home.failures[name].error for name in (*parts_of(adapter), adapter or "") if home.bars(name)]
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

    def lead(self, term: int) -> None:
        """Make the changes from now on, perhaps in place of another front end. term: see `Lead`."""
        self._term, self._mirrored = term, None
        self._wake()

    # -- changes by operators -----------------------------------------------------------------------------------------

    async def register(self, paths: Mapping[str, str], versions: Mapping[str, str]) -> None:
        """Register folders. Raises as `EngineInterface.register_adapters`.

        versions: By name, the contents of those that another front end has sent to the replicas.
        """
        wanted = {name: await self._wanted(path, versions.get(name, "")) for name, path in paths.items()}
        lacking = await self._send(wanted.values())
        async with self._change(*paths):
            for name in paths.keys() & self.state.adapters.keys():
                if former := self.state.adapters[name].version:
                    self.former.begin(name, former)
            async with self._first(paths, lambda home: home.register(wanted), lacking):
                await self.state.commit(wanted)

    async def load(self, name: str, path: str, version: str) -> AdapterStatus:
        """Load a folder. Raises as `EngineInterface.load_adapter`. version: as in `register`.

        Requests continue with the content that they began with, wherever they are.
        """
        wanted = await self._wanted(path, version)
        lacking = await self._send([wanted])
        async with self._change(name):
            if name in self.state and self.state.adapters[name].pinned:
                raise BadRequest(f"adapter {name!r} is pinned; unpin it before loading other content under its name")
            former = await self._read_content(name)
            if former is not None:
                self.former.begin(name, former)
            async with self._first([name], lambda home: home.load(name, wanted), lacking) as status:
                if former not in (None, status.version):
                    self._lack_elsewhere(name, status.version)
                await self.state.commit({name: DesiredAdapter(wanted.path, status.version)})
            for home in self.homes.values():
                if home.applied(name) != self.state.adapters[name]:
                    home.to_read.add(name)
        return self._with_problem(status)

    async def unload(self, name: str, drain: bool) -> None:
        """Unload an adapter. Raises UnknownAdapter."""
        async with self._change(name):
            self._check_known(name)
            former = await self._read_content(name) if drain else None
            await self.state.commit({name: None})
            if former is not None:
                self.former.begin(name, former)
                self._on_drain(name, former)
            for home in self.homes.values():
                (home.to_cancel.discard if drain else home.to_cancel.add)(name)

    async def pin(self, name: str, pinned: bool) -> AdapterStatus:
        """Pin an adapter, or unpin it. Raises as `EngineInterface.pin_adapter`."""
        async with self._change(name):
            self._check_known(name)
            if (cause := self.cause_of(name)) is not None:
                raise cause
            async with self._first([name], lambda home: home.pin(name, pinned)) as status:
                wanted = self.state.adapters[name]
                version = wanted.version or status.version
                await self.state.commit({name: DesiredAdapter(wanted.path, version, pinned)})
        return self._with_problem(status)

    # -- questions ----------------------------------------------------------------------------------------------------

    async def statuses(self) -> tuple[AdapterStatus, ...]:
        """Every adapter by name. One that no replica has, since all have failed, has an error and no further values."""
        by_replica = await self.by_replica()
        if not by_replica:
            raise EngineDead("no replica can be used")
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
    async def _change(self, *names: str) -> AsyncIterator[None]:
        """Make one change at a time; then wait until each replica has followed or failed, while others are made."""
        async with self._changing:
            if not self.homes:
                raise EngineDead("no replica can be used")
            self._busy = {*names}
            try:
                yield
            finally:
                self._busy = set()
                self._wake(names)
                self._replica_moved()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FOLLOW_S):
                for name in names:
                    while not all(home.is_done(name) for home in self.homes.values()):
                        await self._moved.wait()

    @contextlib.asynccontextmanager
    async def _first(
        self, names: Collection[str], call: Callable[[ReplicaAdapters], Awaitable[T]], lacking: Collection[str] = ()
    ) -> AsyncIterator[T]:
        """Try a change of adapters on one replica, whose loop waits for the block. Raises its error.

        It is the first one by name that is not gone, if possible of those that can serve them and got their files.
        """
        unable = {*lacking, *(name for name, home in self.homes.items() if any(map(home.bars, names)))}
        for home in sorted(self.homes.values(), key=lambda home: (home.name in unable, home.name)):
            async with home.calling:
                try:
                    found = await call(home)
                except EngineDead:
                    continue
                except VLoraError as error:
                    raise _of_replica(home.name, ErrorValue.of(error)) from error
                yield found
                return
        raise EngineDead("no replica can be used")

    def _with_problem(self, status: AdapterStatus) -> AdapterStatus:
        """The status of the first replica, with the cause if another one has not followed."""
        problems = ((name, home.problem(status.name)) for name, home in sorted(self.homes.items()))
        found = next((f"replica {name!r}: {problem}" for name, problem in problems if problem), status.error)
        return msgspec.structs.replace(status, error=found)

    async def _wanted(self, path: str, version: str = "") -> DesiredAdapter:
        """A folder, with the content that it has at the front end if files are sent. Raises BadAdapter.

        version: Of the content, if another front end has it.
        """
        path = os.path.abspath(path)  # a later server may start in another folder
        content = None if self._sender is None or version else await self._sender.content_of(path)
        return DesiredAdapter(path, version if content is None else content.version)

    async def _send(self, adapters: Collection[DesiredAdapter]) -> set[str]:
        """Send the files of a change before it begins: that may take long, and no other change waits for it.

        Returns the replicas where that has failed; their loops try it again. Raises the first error if all have failed.
        """

        async def send(home: ReplicaAdapters) -> VLoraError | None:
            try:
                for wanted in adapters:
                    await home.send(wanted)
            except VLoraError as error:
                return _of_replica(home.name, ErrorValue.of(error))
            return None

        homes = [self.homes[name] for name in sorted(self.homes)] if self._sender is not None else []
        found = await asyncio.gather(*map(send, homes))
        failed = {home.name: error for home, error in zip(homes, found, strict=True) if error is not None}
        if failed and len(failed) == len(homes):
            self._wake()  # files that have arrived are not in use
            raise next(iter(failed.values()))
        return {*failed}

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
            if own.version and self.state.adapters.get(name) == wanted and self._mirrored is None:
                self._set_content(name, own.version)

    def _goal(self) -> Goal:
        return Goal(self.state.adapters, self.former.kept, term=self._term if self._mirrored is None else None)

    async def _read_content(self, name: str) -> str | None:
        """The hash of an adapter's present content; None if no replica has read it."""
        wanted = self.state.adapters.get(name)
        if wanted is None or wanted.version:
            return None if wanted is None else wanted.version
        statuses = [status for own in (await self.by_replica()).values() for status in own if status.name == name]
        return next((status.version for status in statuses if status.version), None)

    def _lack_elsewhere(self, name: str, version: str) -> None:
        """One replica has a new content: answers that begin with it do not go on where it is not loaded yet."""
        if (name, version) in self.former:
            return  # it is not new: the replicas have kept it
        self.former.begin(name, version, kept=False)
        for replica, home in self.homes.items():
            self._on_lack(replica, name, version, not home.has_content(name, version))

    def _applied(self, home: ReplicaAdapters, name: str) -> None:
        if self.homes.get(home.name) is home:
            if (applied := home.applied(name)) is not None and applied.version:
                self._on_lack(home.name, name, applied.version, False)
            self._replica_moved()

    def _replica_moved(self) -> None:
        """A replica has done something: end what was kept for changes that all have followed."""
        self._moved.set()
        self._moved = asyncio.Event()
        written = [each for each in self.former if self._mirrored is None and each[0] not in self._busy]
        for name, version in written:
            if name in self.state and self.state.adapters[name].version == version:
                if all(home.is_done(name) for home in self.homes.values()):
                    self.former.drop(name, version)
            elif not any(home.has_content(name, version, kept=False) for home in self.homes.values()):
                self.former.end(name, version)  # no further answer begins with it

    def _content_ended(self, name: str, version: str) -> None:
        for replica in self.homes:
            self._on_lack(replica, name, version, False)
        self._wake()  # it need not be kept any more

    def _other_content(self, replica: str, name: str, version: str) -> DesiredAdapter | None:
        """The desired adapter, if a replica has its folder, but another content than is known; None otherwise."""
        home, wanted = self.homes.get(replica), self.state.adapters.get(name)
        if home is None or wanted is None or self._mirrored is not None or (name, version) in self.former:
            return None
        applied = home.applied(name)
        is_same = applied is None or applied.path != wanted.path or version in (applied.version, wanted.version)
        return None if is_same else wanted

    def _set_content(self, name: str, version: str) -> None:
        """The first content that is read is the desired one."""
        self.state.adopt(name, version)
        self._loop.call_later(FLUSH_S, self._wake)  # the replicas check the content that was adopted

    def _check_known(self, name: str) -> None:
        if name not in self.state:  # it may be as long as a message
            raise UnknownAdapter(f"no adapter named {name[:128]!r}; registered: {listed(self.state.adapters)}")

    def _wake(self, changed: Iterable[str] = ()) -> None:
        for home in self.homes.values():
            home.wake(changed)


def _of_replica(replica: str, error: ErrorValue) -> VLoraError:
    return ErrorValue(error.code, f"replica {replica!r}: {error.message}").to_exception()
