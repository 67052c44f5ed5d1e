"""The adapters of one replica: synchronizes them with the desired state, and notes why some cannot be served."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Set
from typing import Any, TypeVar

from vlora.cluster.adapter_sender import ReplicaFiles
from vlora.cluster.adapter_state import FIRST_PAUSE_S, AdapterFailure, DesiredAdapter, Failure, Goal
from vlora.engine.ipc.client import EngineClient
from vlora.errors import Aborted, EngineDead, OverCapacity, UnknownAdapter, VLoraError
from vlora.types import AdapterStatus, ErrorValue

log = logging.getLogger("vlora.cluster")

T = TypeVar("T")

ANSWER_S, STATUS_S = 300.0, 10.0  # of one call: the read of an adapter may take long
_LEAST_S = 0.1  # between two rounds of retries
BATCH = 64  # adapters in one call: the engine reads their headers between two steps


class ReplicaAdapters:
    """One replica from its connection's opening to its end. Calls are made one after another.

    Attributes:
        files: Sends files that the replica's machine lacks; None: they have to be there.
        coming: Adapters that have failed because their files are not there yet, and are being sent.
        mirrors: Another front end makes the changes; this one only says which former contents it needs.
    """

    def __init__(
        self,
        name: str,
        client: EngineClient,
        goal: Callable[[], Goal],
        on_usable: Callable[[str, str, bool], None],
        files: ReplicaFiles | None = None,
        *,
        mirrors: bool = False,
    ) -> None:
        """Call nothing yet.

        Args:
            goal: Returns the present goal. It may change while a call waits for the ones before it.
            on_usable: Called with the replica, an adapter, and whether requests of the adapter may be sent there.
        """
        self.name = name
        self.mirrors = mirrors
        self._goal = goal
        self.client = client
        self.failures: dict[str, Failure] = {}
        self._on_usable = on_usable
        self._applied: dict[str, DesiredAdapter] = {}
        self._unverified: set[str] = set()  # read in full to compare the content
        self._kept: Mapping[str, Collection[str]] | None = None  # another front end may have asked for some
        self._held: Mapping[str, Collection[str]] = {}  # of these, those that it had when it was asked
        self._calling = asyncio.Lock()
        self._num_changes = 0  # by operators: under way, or waiting for the call before
        self._changed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self.files = files
        self.coming: set[str] = set()
        self._arrived: set[str] = set()  # adapters with files that were sent, and not registered yet
        self._to_send = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None

    # -- changes by an operator; errors are raised --------------------------------------------------------------------

    async def send(self, adapters: Iterable[DesiredAdapter]) -> list[str]:
        """The folders of adapters on the replica's machine, after their files were sent if they were missing."""
        if self.files is None:
            return [wanted.path for wanted in adapters]
        return [await self.files.send(wanted) if wanted.version else wanted.path for wanted in adapters]

    async def register(self, adapters: Mapping[str, DesiredAdapter]) -> bool:
        async with self._change():
            await self._keep()
            paths = await self.send(adapters.values())
            await self._register(adapters, dict(zip(adapters, paths, strict=True)))
            await self._hold()
            return True

    async def load(self, name: str, wanted: DesiredAdapter) -> AdapterStatus:
        async with self._change():
            await self._keep()
            [path] = await self.send([wanted])
            try:
                status = await self._answer(self.client.load_adapter(name, path, wanted.version))
            except Aborted as error:
                self.fail(name, ErrorValue.of(error))  # it may still take effect
                raise
            self._apply({name: DesiredAdapter(wanted.path, status.version)})
            await self._hold()
            return status

    async def unload(self, name: str, *, drain: bool) -> None:
        async with self._change():
            await self._keep()
            await self._unload(name, drain=drain)
            await self._hold()

    async def pin(self, name: str, pinned: bool) -> AdapterStatus:
        async with self._change():
            return await self._pin(name, pinned)

    # -- the desired state --------------------------------------------------------------------------------------------

    async def read(self) -> None:
        """Read which adapters the replica has: its engine may have served another front end."""
        for status in await self.statuses():
            # The folder is not known, so each is compared with the desired one.
            self._applied[status.name] = DesiredAdapter("", status.version, status.pinned)

    async def statuses(self) -> tuple[AdapterStatus, ...]:
        """The statuses of all adapters that the replica has. Raises Aborted if it does not answer soon."""
        return await self._answer(self.client.adapters(), STATUS_S)

    @property
    def is_settled(self) -> bool:
        """Whether each adapter is as desired, or has failed and is tried again later."""
        desired = self._goal().adapters
        different = {name for name, wanted in desired.items() if self._applied.get(name) != wanted}
        return different <= self.failures.keys() and self._applied.keys() <= desired.keys()

    async def sync(self) -> None:
        """Do what is to be done now. An adapter that fails is noted, and tried again after a pause.

        Before `follow` no change includes this replica, so it does not leave the adapters of a change alone.

        Raises:
            EngineDead: The replica is gone.
        """
        async with self._calling:
            await self._keep()
            if self.mirrors:
                return await self._hold()
            for name in (self._applied.keys() | self.failures.keys()) - self._goal().adapters.keys():
                if self._is_still(name, None):
                    await self._unload(name, drain=True)
            desired = self._goal().adapters
            due = {name: desired[name] for name in self._due(desired) if self._is_still(name, desired[name])}
            self._forget_settled(due.keys() | self._goal().busy)
            changed = {name: wanted for name, wanted in due.items() if self._has_other_content(name, wanted)}
            for name, wanted in changed.items():
                if self._is_pinned(name) and self._is_still(name, wanted):
                    await self._try(name, self._pin(name, False), bars=False)  # a pinned one cannot be replaced
            plain = [name for name in changed if name not in self._unverified and self._is_unread(name)]
            for first in range(0, len(plain), BATCH):
                await self._try_register({name: changed[name] for name in plain[first : first + BATCH]})
            for name in changed.keys() - plain:
                if self._num_changes:  # it would wait for all of them, each of which may take `ANSWER_S`
                    self.wake()
                    return
                if self._is_still(name, due[name]):
                    await self._try(name, self._verify(name, due[name]))
            for name, wanted in due.items():
                if self._is_pinned(name) not in (None, wanted.pinned) and self._is_still(name, wanted):
                    await self._try(name, self._pin(name, wanted.pinned), bars=False)
            if self.is_settled:
                await self._hold()

    def follow(self) -> None:
        """From now on, `sync` after each `wake`, and when a failed adapter is due, until `close`."""
        self._following = asyncio.create_task(self._follow(), name=f"vlora-adapters-{self.name}")
        if self.files is not None:
            self._sending = asyncio.create_task(self._send_files(self.files), name=f"vlora-files-{self.name}")

    def wake(self, changed: Iterable[str] = ()) -> None:
        """The desired state has changed. changed: adapters that are tried again at once if they have failed."""
        for name in changed:
            if (failure := self.failures.get(name)) is not None:
                failure.due_s = asyncio.get_running_loop().time()
        self._changed.set()

    def verify(self, name: str) -> None:
        """The replica may have other content than it should: read the adapter's folder again."""
        self._unverified.add(name)
        self._applied.pop(name, None)
        self.wake()

    def fail(self, name: str, error: ErrorValue, *, bars: bool = True) -> None:
        """Note that an adapter cannot be served there. It is tried again after a pause, each time a longer one."""
        before = self.failures.get(name)
        if before is None or before.error != error:
            log.warning("replica %r cannot serve adapter %r: %s", self.name, name, error.message)
        self.failures[name] = Failure(error, before, bars=bars)
        self.coming.discard(name)
        self._arrived.discard(name)
        if bars:
            self._applied.pop(name, None)
        self._on_usable(self.name, name, not bars)
        self.wake()

    def mirror(self, failures: Mapping[str, AdapterFailure]) -> None:
        """Have the failures that another front end, which makes the changes, has found."""
        self.mirrors = True
        for name in self.failures.keys() - failures.keys():
            self._forget_failure(name)
        for name, found in failures.items():
            failure = self.failures[name] = Failure(found.error, None, bars=found.bars)
            failure.due_s = math.inf
            (self.coming.add if found.coming else self.coming.discard)(name)
            self._on_usable(self.name, name, not found.bars)

    def mirrored(self) -> dict[str, AdapterFailure]:
        """What `mirror` has elsewhere."""
        found = self.failures.items()
        return {name: AdapterFailure(each.error, each.bars, name in self.coming) for name, each in found}

    @property
    def num_failed(self) -> int:
        return sum(failure.bars for name, failure in self.failures.items() if name not in self.coming)

    def applied(self, name: str) -> DesiredAdapter | None:
        """An adapter as the replica was last asked to have it; None if it does not, or if that has failed."""
        return self._applied.get(name)

    def has_content(self, name: str, version: str) -> bool:
        """Whether the replica has a content of an adapter, the present one or one that it keeps."""
        applied = self._applied.get(name)
        return (applied is not None and applied.version == version) or version in self._held.get(name, ())

    def awaits_files(self, names: Collection[str]) -> bool:
        """Whether the replica can serve these adapters as soon as it has files that are being sent."""
        barred = {name for name in names if name in self.failures and self.failures[name].bars}
        return bool(barred) and barred <= self.coming | self._arrived

    def progress(self, name: str) -> str:
        """How far the files of an adapter are that are being sent."""
        wanted = self._goal().adapters.get(name)
        progress = {} if self.files is None else self.files.progress
        return progress.get(wanted.version if wanted else "", "its files are to be sent")

    def close(self) -> None:
        for task in (self._following, self._sending):
            if task is not None:
                task.cancel()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _due(self, desired: Mapping[str, DesiredAdapter]) -> list[str]:
        now = asyncio.get_running_loop().time()
        different = [name for name, wanted in desired.items() if self._applied.get(name) != wanted]
        ready = [name for name in different if name not in self.coming]
        return [name for name in ready if name not in self.failures or self.failures[name].due_s <= now]

    def _is_unread(self, name: str) -> bool:
        """Whether an adapter has not failed before; only then its header suffices to try it."""
        return name not in self.failures or name in self._arrived

    def _has_other_content(self, name: str, wanted: DesiredAdapter) -> bool:
        applied = self._applied.get(name)
        return applied is None or (applied.path, applied.version) != (wanted.path, wanted.version)

    def _is_still(self, name: str, wanted: DesiredAdapter | None) -> bool:
        """Whether an adapter is still to be so. A change may have come between, also one that this replica has made."""
        goal = self._goal()
        return goal.adapters.get(name) == wanted and (self._following is None or name not in goal.busy)

    def _is_content(self, name: str, version: str) -> bool:
        wanted = self._goal().adapters.get(name)
        return wanted is not None and wanted.version == version

    def _is_pinned(self, name: str) -> bool | None:
        """Whether an adapter was pinned; None if it has no content."""
        applied = self._applied.get(name)
        return None if applied is None else applied.pinned

    def _forget_settled(self, due: Set[str]) -> None:
        """Forget failures that nothing is left to be done about, as of a pin that is not desired any more."""
        now = asyncio.get_running_loop().time()
        for name, failure in tuple(self.failures.items()):
            if failure.due_s <= now and name not in due and name not in self.coming:
                self._forget_failure(name)

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            ready = [failure.due_s for name, failure in self.failures.items() if name not in self.coming]
            due_s = min(ready, default=None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self.sync()
            except EngineDead:
                return
            except VLoraError as error:
                log.warning("the adapters of replica %r cannot be changed: %s; retrying", self.name, error)
                await asyncio.sleep(FIRST_PAUSE_S)
                self.wake()
            if due_s is not None and due_s <= loop.time():
                await asyncio.sleep(_LEAST_S)  # also if an adapter that is due is busy

    async def _answer(self, call: Coroutine[Any, Any, T], limit_s: float = ANSWER_S) -> T:
        """A replica's answer. Raises Aborted after a time: its files may be on a disk that does not answer."""
        try:
            async with asyncio.timeout(limit_s):
                return await call
        except TimeoutError as error:
            raise Aborted(f"it did not answer within {limit_s:g} s; its disk may hang") from error

    @contextlib.asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """Make an operator's change after the call that is under way."""
        self._num_changes += 1
        try:
            async with self._calling:
                yield
        finally:
            self._num_changes -= 1

    async def _keep(self) -> None:
        kept = self._goal().kept
        if kept != self._kept:
            self._held = await self._answer(self.client.keep_adapters(kept))
            self._kept = kept

    async def _register(self, adapters: Mapping[str, DesiredAdapter], paths: Mapping[str, str]) -> None:
        """paths: On the replica's machine."""
        versions = {name: wanted.version for name, wanted in adapters.items() if wanted.version}
        pinned = {name: self._applied[name].pinned for name in adapters if name in self._applied}
        await self._answer(self.client.register_adapters(paths, versions))
        self._apply(
            {name: DesiredAdapter(each.path, each.version, pinned.get(name, False)) for name, each in adapters.items()}
        )

    async def _try_register(self, adapters: Mapping[str, DesiredAdapter]) -> None:
        paths = await self._find({name: wanted for name, wanted in adapters.items() if self._is_still(name, wanted)})
        adapters = {name: adapters[name] for name in paths if self._is_still(name, adapters[name])}
        if not adapters:
            return
        try:
            await self._register(adapters, {name: paths[name] for name in adapters})
        except EngineDead:
            raise
        except VLoraError as error:
            if len(adapters) > 1:
                for name, wanted in adapters.items():
                    await self._try_register({name: wanted})
            else:
                [name] = adapters
                self.fail(name, ErrorValue.of(error))

    async def _verify(self, name: str, wanted: DesiredAdapter) -> None:
        paths = await self._find({name: wanted})
        if name in paths and self._is_still(name, wanted):
            status = await self._answer(self.client.load_adapter(name, paths[name], wanted.version))
            self._apply({name: DesiredAdapter(wanted.path, wanted.version, status.pinned)})

    async def _find(self, adapters: Mapping[str, DesiredAdapter]) -> dict[str, str]:
        """The folders of adapters on the replica's machine. Those that are not there are noted, or will be sent."""
        found = {}
        for name, wanted in adapters.items():
            if self.files is None or not wanted.version:
                found[name] = wanted.path
                continue
            try:
                path = await self.files.find(wanted)
            except EngineDead:
                raise
            except VLoraError as error:
                self.fail(name, ErrorValue.of(error))
                continue
            if path is None:
                self._await_files(name)
            else:
                found[name] = path
        return found

    def _await_files(self, name: str) -> None:
        if name not in self.failures:
            error = OverCapacity("its files are being sent there; try again later")
            self.fail(name, ErrorValue.of(error))
        self.coming.add(name)
        self._to_send.set()

    async def _send_files(self, files: ReplicaFiles) -> None:
        """Send what is missing, one adapter after the other. Calls about adapters go on meanwhile."""
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            for name in sorted(self.coming):
                wanted = self._goal().adapters.get(name)
                is_wanted = functools.partial(self._is_content, name, "" if wanted is None else wanted.version)
                try:
                    if wanted is not None and wanted.version and self._is_still(name, wanted):
                        await files.send(wanted, is_wanted)
                        self._arrived.add(name)
                except EngineDead:
                    return
                except VLoraError as error:
                    if is_wanted():
                        self.fail(name, ErrorValue.of(error))
                        continue
                self.coming.discard(name)
                self.wake([name])

    async def _hold(self) -> None:
        if self.files is not None:
            goal = self._goal()
            kept = (version for versions in goal.kept.values() for version in versions)
            used = (wanted.version for wanted in (*goal.adapters.values(), *self._applied.values()))
            try:
                await self.files.hold({*kept, *used} - {""})
            except EngineDead:
                raise
            except VLoraError as error:  # it is sent again; nothing but room depends on it
                log.warning("replica %r: %s", self.name, error)

    async def _unload(self, name: str, *, drain: bool) -> None:
        self._forget_failure(name)
        self._unverified.discard(name)
        with contextlib.suppress(UnknownAdapter):
            await self._answer(self.client.unload_adapter(name, drain))
        self._applied.pop(name, None)

    async def _pin(self, name: str, pinned: bool) -> AdapterStatus:
        status = await self._answer(self.client.pin_adapter(name, pinned))
        if (applied := self._applied.get(name)) is not None:
            self._applied[name] = DesiredAdapter(applied.path, applied.version, pinned)
        return status

    async def _try(self, name: str, call: Coroutine[object, object, object], *, bars: bool = True) -> None:
        try:
            await call
        except EngineDead:
            raise
        except VLoraError as error:
            self.fail(name, ErrorValue.of(error), bars=bars)

    def _apply(self, adapters: Mapping[str, DesiredAdapter]) -> None:
        self._applied |= adapters
        for name in adapters:
            self._unverified.discard(name)
            self._forget_failure(name)

    def _forget_failure(self, name: str) -> None:
        self.coming.discard(name)
        self._arrived.discard(name)
        if self.failures.pop(name, None) is not None:
            self._on_usable(self.name, name, True)
