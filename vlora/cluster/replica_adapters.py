"""The loop that makes one replica as the desired state says, and why it cannot serve some adapters."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from vlora.cluster.adapter_messages import Lead
from vlora.cluster.adapter_sender import ReplicaFiles
from vlora.cluster.adapter_state import AdapterFailure, DesiredAdapter, Goal
from vlora.cluster.former_contents import parts_of
from vlora.engine.ipc.client import EngineClient
from vlora.errors import Aborted, EngineDead, OverCapacity, UnknownAdapter, VLoraError
from vlora.types import AdapterStatus, ErrorValue, is_composed

log = logging.getLogger("vlora.cluster")

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # between two attempts of an adapter that fails
ANSWER_S, STATUS_S = 300.0, 10.0  # of one call: the read of an adapter may take long
RETRY_S, MAX_COMPOSITIONS = 60.0, 256  # refused compositions that are remembered, and for how long
BATCH = 64  # adapters in one call: the engine reads their headers between two steps


class ReplicaAdapters:
    """One replica from its connection's opening to its end.

    Attributes:
        calling: Held during each call about adapters, so that a change waits for one of them at most.
        failures: Why it is not as desired with some adapters, and compositions that it has refused.
        to_read: Adapters with files to be read when their content comes there; otherwise a header suffices.
        to_cancel: Adapters with requests to end when they are unloaded.
        files: Sends files that the replica's machine lacks; None: they have to be there.
    """

    def __init__(
        self,
        name: str,
        client: EngineClient,
        goal: Callable[[], Goal],
        on_usable: Callable[[str, str, bool], None],
        on_applied: Callable[[ReplicaAdapters, str], None],
        files: ReplicaFiles | None = None,
    ) -> None:
        """Call nothing yet.

        Args:
            goal: Returns the present goal. It may change while a call waits for the ones before it.
            on_usable: Called with the replica, an adapter, and whether requests of the adapter may be sent there.
            on_applied: Called with this and an adapter that the replica has now, has no more, or cannot have.
        """
        self.name = name
        self._client = client
        self.files = files
        self.calling = asyncio.Lock()
        self.failures: dict[str, AdapterFailure] = {}
        self.to_read: set[str] = set()
        self.to_cancel: set[str] = set()
        self._goal = goal
        self._on_usable = on_usable
        self._on_applied = on_applied
        self._applied: dict[str, DesiredAdapter] = {}
        self._term: int | None = None  # since when it is known what the replica has, see `Goal`
        self._kept: Mapping[str, Collection[str]] | None = None  # another front end may have asked for some
        self._held: Mapping[str, Collection[str]] = {}  # of these, those that it had when it was asked
        self._changed, self._to_send = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # -- a change that this replica tries first, while `calling` is held; errors are raised ----------------------------

    async def register(self, adapters: Mapping[str, DesiredAdapter]) -> None:
        await self._prepare(self._goal())
        paths = [await self.send(wanted) for wanted in adapters.values()]
        await self._register(adapters, dict(zip(adapters, paths, strict=True)))

    async def load(self, name: str, wanted: DesiredAdapter) -> AdapterStatus:
        await self._prepare(self._goal())
        path = await self.send(wanted)
        try:
            status = await self._answer(self._client.load_adapter(name, path, wanted.version))
        except Aborted as error:
            if isinstance(error.__cause__, TimeoutError):  # it may still take effect
                self.fail(name, ErrorValue.of(error))
            raise
        self._apply({name: DesiredAdapter(wanted.path, status.version)})
        return status

    async def pin(self, name: str, pinned: bool) -> AdapterStatus:
        await self._prepare(self._goal())
        status = await self._answer(self._client.pin_adapter(name, pinned))
        if (applied := self._applied.get(name)) is not None:
            self._applied[name] = DesiredAdapter(applied.path, applied.version, pinned)
            self._on_applied(self, name)
        return status

    async def send(self, wanted: DesiredAdapter) -> str:
        """The folder of an adapter on the replica's machine, after its files were sent if they were missing."""
        return wanted.path if self.files is None or not wanted.version else await self.files.send(wanted)

    # -- the desired state --------------------------------------------------------------------------------------------

    async def statuses(self) -> tuple[AdapterStatus, ...]:
        """The statuses of all adapters that the replica has. Raises Aborted if it does not answer soon."""
        return await self._answer(self._client.adapters(), STATUS_S)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is to be done now. One that another front end changes is always settled."""
        desired, _, term = self._goal()
        different = {name for name, wanted in desired.items() if self._applied.get(name) != wanted}
        as_desired = different <= self.failures.keys() and self._applied.keys() <= desired.keys()
        return term is None or (term == self._term and as_desired)

    def is_done(self, name: str) -> bool:
        """Whether an adapter is as desired, or has failed and is tried again later."""
        failure = self.failures.get(name)
        if failure is not None and not failure.is_coming and failure.due_s > asyncio.get_running_loop().time():
            return True
        return self._applied.get(name) == self._goal().adapters.get(name)

    def problem(self, name: str) -> str:
        """Why an adapter is not as desired; empty if it is."""
        if name in self.failures:
            return self.failures[name].error.message
        return "" if self.is_done(name) else "it has not answered yet"

    async def sync(self) -> None:
        """Do what is to be done now; note what fails, and try it again after a pause. Raises EngineDead."""
        goal = self._goal()
        desired = dict(goal.adapters)
        async with self.calling:
            await self._prepare(goal)
            if goal.term is None:
                self._forget_settled(())
                return await self._hold()
        for name in filter(self._is_due, {*self._applied, *self.failures, *self.to_read} - desired.keys()):
            if not is_composed(name):
                await self._try(name, None, self._unload)
        due = [name for name, each in desired.items() if self._applied.get(name) != each and self._is_due(name)]
        self._forget_settled(due)
        contents = {name: (each.path, each.version) for name, each in self._applied.items()}
        changed = [name for name in due if contents.get(name) != (desired[name].path, desired[name].version)]
        for name in changed:
            if self._is_pinned(name):  # it cannot be replaced
                await self._try(name, desired[name], lambda name: self.pin(name, False), bars=False)
        failed = {name for name, failure in self.failures.items() if not failure.has_arrived}
        plain = [name for name in changed if name not in self.to_read | failed]  # their headers suffice
        for first in range(0, len(plain), BATCH):
            async with self.calling:
                await self._try_register({name: desired[name] for name in plain[first : first + BATCH]})
        for name in sorted(set(changed).difference(plain), key=lambda name: (name in self.failures, name)):
            if self._tasks and self._changed.is_set():
                return  # what has changed comes before further ones that have failed
            await self._try(name, desired[name], self._load)
        for name in due:
            if self._is_pinned(name) not in (None, desired[name].pinned):
                await self._try(name, desired[name], lambda name: self.pin(name, desired[name].pinned), bars=False)
        if self.is_settled:
            async with self.calling:
                await self._hold()

    def follow(self) -> None:
        """From now on, `sync` after each `wake`, and when a failed adapter is due, until `close`."""
        self.wake()
        self._tasks.append(asyncio.create_task(self._follow(), name=f"vlora-adapters-{self.name}"))
        if self.files is not None:
            self._tasks.append(asyncio.create_task(self._send_files(self.files), name=f"vlora-files-{self.name}"))

    def wake(self, changed: Iterable[str] = ()) -> None:
        """The desired state has changed. changed: adapters that are tried again at once, with their compositions."""
        names = {*changed}
        for name in [name for name in self.failures if not names.isdisjoint((name, *parts_of(name)))]:
            self.failures[name].due_s = asyncio.get_running_loop().time()
        self._changed.set()

    def verify(self, name: str) -> None:
        """The replica may have other content than it should: read the adapter's folder again."""
        self.to_read.add(name)
        self._applied.pop(name, None)
        self.wake()

    def fail(self, name: str, error: ErrorValue, *, bars: bool = True) -> None:
        """Note that an adapter cannot be served there. It is tried again after a pause, each time a longer one."""
        before, pause_s = self.failures.get(name), RETRY_S
        if not is_composed(name):
            pause_s = FIRST_PAUSE_S if before is None else min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * before.pause_s))
            if self._goal().term is not None and (before is None or before.error != error):
                log.warning("replica %r cannot serve adapter %r: %s", self.name, name, error.message)
        due_s = asyncio.get_running_loop().time() + pause_s
        self.failures[name] = AdapterFailure(error, bars, pause_s=pause_s, due_s=due_s)
        if is_composed(name):
            composed = [each for each in self.failures if is_composed(each)]
            for oldest in composed[:-MAX_COMPOSITIONS]:  # there may be any number, since weights are free
                self._forget_failure(oldest)
        if bars:
            self._applied.pop(name, None)
        self._on_usable(self.name, name, not bars)
        self._on_applied(self, name)
        self.wake()

    def mirror(self, failures: Mapping[str, AdapterFailure]) -> None:
        """Have the failures that another front end, which makes the changes, has found."""
        for name in [name for name, each in self.failures.items() if math.isinf(each.due_s) and name not in failures]:
            self._forget_failure(name)
        for name, found in failures.items():
            self.failures[name] = msgspec.structs.replace(found)
            self._on_usable(self.name, name, not found.bars)

    def mirrored(self) -> dict[str, AdapterFailure]:
        """What `mirror` has elsewhere."""
        return {name: AdapterFailure(each.error, each.bars, each.is_coming) for name, each in self.failures.items()}

    @property
    def num_failed(self) -> int:
        own = [failure for name, failure in self.failures.items() if name in self._goal().adapters]
        return sum(failure.bars and not failure.is_coming for failure in own)

    def applied(self, name: str) -> DesiredAdapter | None:
        """An adapter as the replica was last asked to have it; None if it does not, or if that has failed."""
        return self._applied.get(name)

    def has_content(self, name: str, version: str, *, kept: bool = True) -> bool:
        """Whether the replica has a content of an adapter, the present one or, with `kept`, one that it keeps."""
        applied = self._applied.get(name)
        return (applied is not None and applied.version == version) or (kept and version in self._held.get(name, ()))

    def bars(self, name: str) -> bool:
        return name in self.failures and self.failures[name].bars

    def awaits_files(self, names: Collection[str]) -> bool:
        """Whether the replica can serve these adapters as soon as it has files that are being sent."""
        barring = [self.failures[name] for name in names if self.bars(name)]
        return bool(barring) and all(failure.is_coming or failure.has_arrived for failure in barring)

    def progress(self, name: str) -> str:
        """How far the files of an adapter are that are being sent."""
        wanted = self._goal().adapters.get(name)
        progress = {} if self.files is None else self.files.progress
        return progress.get(wanted.version if wanted else "", "its files are to be sent")

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_due(self, name: str) -> bool:
        """Whether an adapter has not failed, or is to be tried again."""
        failure, now_s = self.failures.get(name), asyncio.get_running_loop().time()
        return failure is None or (failure.due_s <= now_s and not failure.is_coming)

    def _is_still(self, name: str, wanted: DesiredAdapter | None) -> bool:
        """Whether an adapter is still to be so: a change may have come between."""
        return self._goal().adapters.get(name) == wanted

    def _is_pinned(self, name: str) -> bool | None:
        """Whether an adapter was pinned; None if it has no content."""
        applied = self._applied.get(name)
        return None if applied is None else applied.pinned

    def _forget_settled(self, due: Collection[str]) -> None:
        """Forget failures that nothing is left to be done about, as of a pin that is not desired any more."""
        for name in [name for name in self.failures if self._is_due(name) and name not in due]:
            self._forget_failure(name)

    async def _follow(self) -> None:
        while True:
            due_s = min((each.due_s for each in self.failures.values() if not each.is_coming), default=None)
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

    async def _answer(self, call: Coroutine[Any, Any, T], limit_s: float = ANSWER_S) -> T:
        """A replica's answer. Raises Aborted after a time: its files may be on a disk that does not answer."""
        try:
            async with asyncio.timeout(limit_s):
                return await call
        except TimeoutError as error:
            raise Aborted(f"it did not answer within {limit_s:g} s; its disk may hang") from error

    async def _prepare(self, goal: Goal) -> None:
        """Before other calls: say what is to be kept, and read what the replica has if another one made changes."""
        if goal.kept != self._kept:
            self._held = await self._answer(self._client.keep_adapters(goal.kept))
            self._kept = goal.kept
        if goal.term not in (None, self._term):
            await self._answer(self._client.call(Lead(goal.term)))
            # The folders are not known, so each adapter is compared with the desired one.
            found = await self.statuses()
            self._applied = {each.name: DesiredAdapter("", each.version, each.pinned) for each in found}
            for name in tuple(self.failures):
                self._forget_failure(name)
        self._term = goal.term

    async def _register(self, adapters: Mapping[str, DesiredAdapter], paths: Mapping[str, str]) -> None:
        """paths: On the replica's machine."""
        versions = {name: wanted.version for name, wanted in adapters.items() if wanted.version}
        pinned = {name: self._applied[name].pinned for name in adapters if name in self._applied}
        await self._answer(self._client.register_adapters(paths, versions))
        self._apply(
            {name: DesiredAdapter(each.path, each.version, pinned.get(name, False)) for name, each in adapters.items()}
        )

    async def _try_register(self, adapters: Mapping[str, DesiredAdapter]) -> None:
        paths = {}
        for name, wanted in adapters.items():
            if self._is_still(name, wanted) and (path := await self._find(name, wanted)) is not None:
                paths[name] = path
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

    async def _load(self, name: str) -> None:
        wanted = self._goal().adapters[name]
        if (path := await self._find(name, wanted)) is not None and self._is_still(name, wanted):
            status = await self._answer(self._client.load_adapter(name, path, wanted.version))
            self._apply({name: DesiredAdapter(wanted.path, wanted.version, status.pinned)})

    async def _find(self, name: str, wanted: DesiredAdapter) -> str | None:
        """The folder of an adapter on the replica's machine; None if it is not there. That is noted, or it is sent."""
        if self.files is None or not wanted.version:
            return wanted.path
        try:
            path = await self.files.find(wanted)
        except EngineDead:
            raise
        except VLoraError as error:
            self.fail(name, ErrorValue.of(error))
            return None
        if path is None:
            if name not in self.failures:
                self.fail(name, ErrorValue.of(OverCapacity("its files are being sent there; try again later")))
            self.failures[name].is_coming = True
            self._to_send.set()
        return path

    async def _send_files(self, files: ReplicaFiles) -> None:
        """Send what is missing, one adapter after the other. Calls about adapters go on meanwhile."""
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            for name in sorted(name for name, failure in self.failures.items() if failure.is_coming):
                wanted = self._goal().adapters.get(name)
                is_wanted = functools.partial(self._is_content, name, "" if wanted is None else wanted.version)
                has_arrived = False
                try:
                    if wanted is not None and wanted.version:
                        await files.send(wanted, is_wanted)
                        has_arrived = True
                except EngineDead:
                    return
                except VLoraError as error:
                    if is_wanted():
                        self.fail(name, ErrorValue.of(error))
                        continue
                if (failure := self.failures.get(name)) is not None:
                    failure.is_coming, failure.has_arrived = False, has_arrived
                self.wake([name])

    def _is_content(self, name: str, version: str) -> bool:
        wanted = self._goal().adapters.get(name)
        return wanted is not None and wanted.version == version

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

    async def _unload(self, name: str) -> None:
        with contextlib.suppress(UnknownAdapter):
            await self._answer(self._client.unload_adapter(name, name not in self.to_cancel))
        self._applied.pop(name, None)
        await self._hold()  # its files may go before the next change
        self._forget(name)

    async def _try(
        self,
        name: str,
        wanted: DesiredAdapter | None,
        call: Callable[[str], Coroutine[object, object, object]],
        *,
        bars: bool = True,
    ) -> None:
        async with self.calling:
            if self._is_still(name, wanted):
                try:
                    await call(name)
                except EngineDead:
                    raise
                except VLoraError as error:
                    self.fail(name, ErrorValue.of(error), bars=bars)

    def _apply(self, adapters: Mapping[str, DesiredAdapter]) -> None:
        self._applied |= adapters
        for name in adapters:
            self._forget(name)

    def _forget(self, name: str) -> None:
        """An adapter is as it was desired, perhaps before a change that its loop has not come to."""
        if self._is_still(name, self._applied.get(name)):
            self.to_read.discard(name)
            self.to_cancel.discard(name)
        self._forget_failure(name)
        self._on_applied(self, name)

    def _forget_failure(self, name: str) -> None:
        """Let requests be sent there again, also those of compositions with an adapter."""
        for each in [each for each in self.failures if each == name or (is_composed(each) and name in parts_of(each))]:
            del self.failures[each]
            self._on_usable(self.name, each, True)
