"""The adapters as the front end sees them: cached statuses, heads by name, and changes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from vlora.cluster.adapter_state import AdapterState, DesiredAdapter
from vlora.engine.interface import EngineInterface
from vlora.engine.operations import Train
from vlora.errors import BadAdapter, BadRequest, EngineDead, UnknownAdapter, UnknownHead, VLoraError, listed
from vlora.operations import CancelTraining, ListTrainings
from vlora.server.domains import Target
from vlora.server.metrics import Metrics
from vlora.server.prompts import prompt_warnings
from vlora.types import AdapterStatus, HeadSummary, TrainingStatus, adapter_name, composed_of, is_composed
from vlora.types.composition import MAX_NAME, name_problem
from vlora.types.domain import DomainSummary

if TYPE_CHECKING:
    from vlora.models.processing import InputProcessor

T = TypeVar("T")

ERROR_S = 1.0  # for which the cached status of an adapter that failed is used
TRAINED_S = 1.0  # between two looks at trainings whose adapters are to be kept

log = logging.getLogger(__name__)


class AdapterCatalog:
    """One per front end, used from its event loop. The engine has the truth; statuses are cached between changes.

    Attributes:
        learning: Names whose content only learning changes.
        hidden: Names of versions under evaluation, for no caller.
        paths: Folders by adapter, the one that a request used last at the end.
        find_unknown: Called with a name that no adapter has. Loads its adapter and returns None, or returns the end of
            the error, which says where it was looked for.
    """

    def __init__(self, engine: EngineInterface, metrics: Metrics, model: str, processor: InputProcessor) -> None:
        """model: the base model's name; no adapter may have this name. processor: makes the prompts of all adapters."""
        self._engine = engine
        self._metrics = metrics
        self._model = model
        self._processor = processor
        self._warnings: dict[str, tuple[str, ...]] = {}  # by adapter, of its folder
        self.learning: frozenset[str] = frozenset()
        self.hidden: set[str] = set()
        self.paths: dict[str, str] = {}
        self.find_unknown: Callable[[str], Awaitable[str | None]] | None = None
        self._statuses: dict[str, AdapterStatus] | None = None
        self._holders: dict[str, list[str]] = {}  # adapters by the names that stand for them
        self._loads: dict[str, int] = {}  # by adapter, the number of its last load
        self._number = itertools.count(1)
        self._listed_s = -math.inf
        self._changes: set[asyncio.Task[Any]] = set()  # in progress
        self._state: AdapterState | None = None
        self._training: set[str] = set()  # names whose adapters are to be kept when they are trained
        self._keeper: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()  # held while trained adapters are kept, and while one is pinned
        self._reported = False

    # -- queries ------------------------------------------------------------------------------------------------------

    async def list(self) -> tuple[AdapterStatus, ...]:
        found = await self._engine.adapters()
        statuses = tuple(self._with_warnings(status) for status in found if status.name not in self.hidden)
        self._statuses = {status.name: status for status in statuses}
        self._holders = {name: [name] for name in self._statuses}
        for status in statuses:
            for domain in status.domains:
                if domain.name not in self._statuses:
                    self._holders.setdefault(domain.name, []).append(status.name)
        self._listed_s = time.monotonic()
        self._metrics.expect(self._statuses)
        return statuses

    async def list_cached(self) -> tuple[AdapterStatus, ...]:
        """As `list`, cached since the last registration or removal; fields that change otherwise may be stale."""
        return await self.list() if self._statuses is None else tuple(self._statuses.values())

    def domains(self) -> Iterator[tuple[str, DomainSummary]]:
        """By the cached statuses, each domain with the adapter that answers for it."""
        for status in (self._statuses or {}).values():
            for domain in status.domains:
                if domain.name == status.name or self._last_loaded(domain.name) == [status.name]:
                    yield status.name, domain

    async def resolve(self, name: str | Mapping[str, float]) -> Target:
        """What a name in a request stands for: an adapter, a domain, or a composition of them.

        An adapter's own name goes before a domain's. Of several adapters with a domain, the one loaded last has it.

        Raises:
            UnknownAdapter: There is no such adapter or domain; the message lists those that there are.
            BadRequest: A composition is malformed or repeats an adapter, or the domain belongs to several adapters.
        """
        parts = composed_of(adapter_name(name))
        found = [await self._find(part.adapter) for part in parts]
        weights = {status.name: part.weight for part, (status, _) in zip(parts, found, strict=True)}
        if len(weights) < len(parts):
            names = listed([part.adapter for part in parts])
            raise BadRequest(f"{names} are of one adapter ({', '.join(weights)}); name it once", field="adapter")
        own = adapter_name(weights)
        return Target(own, tuple(status for status, _ in found), None if is_composed(own) else found[0][1])

    async def _find(self, name: str) -> tuple[AdapterStatus, DomainSummary | None]:
        if self._statuses is None or name not in self._holders or self._may_have_recovered(name):
            await self.list()
        looked: str | None = None
        if name not in self._holders and name not in self.hidden and self.find_unknown is not None:
            looked = await self.find_unknown(name)
            await self.list()
        assert self._statuses is not None
        holders = self._last_loaded(name)
        if len(holders) > 1:
            owners = listed([repr(each) for each in holders])
            raise BadRequest(
                f"domain {name[:MAX_NAME]!r} belongs to adapters {owners}; name the adapter", field="adapter"
            )
        if not holders:
            domains = self._holders.keys() - self._statuses.keys()
            raise UnknownAdapter(
                f"no adapter named {name[:MAX_NAME]!r}; registered: {listed(self._statuses)}"
                + (f"; domains: {listed(domains)}" if domains else "")
                + (looked or ""),
                field="adapter",
            )
        status = self._statuses[holders[0]]
        if (path := self.paths.pop(status.name, None)) is not None:
            self.paths[status.name] = path
        return status, next((domain for domain in status.domains if domain.name == name), None)

    def _last_loaded(self, name: str) -> Sequence[str]:
        """The adapters that a name stands for: one, several with a domain that were loaded at once, or none."""
        holders = self._holders.get(name, [])
        last = max((self._loads.get(each, 0) for each in holders), default=0)
        return [each for each in holders if self._loads.get(each, 0) == last]

    async def current(self, name: str) -> AdapterStatus:
        """The adapter's status in the engine now, also of a version under evaluation. Raises UnknownAdapter."""
        for status in await self._engine.adapters():
            if status.name == name:
                return status
        raise UnknownAdapter(f"no adapter named {name[:MAX_NAME]!r} is registered", field="adapter")

    def head_of(self, target: Target, head: str | None) -> HeadSummary:
        """An adapter's head; None for that of the domain, or for the adapter's only one.

        Raises:
            UnknownAdapter: The target is a composition.
            UnknownHead: With the heads of the adapter or domain, and with adapters that have a head of that name.
        """
        if is_composed(target.adapter):
            raise UnknownAdapter(
                f"adapter {target.adapter!r} is a composition; a task head belongs to one adapter: name that one",
                field="adapter",
            )
        (status,), domain = target.statuses, target.domain
        heads, asked = status.heads, f"adapter {status.name!r}"
        if domain is not None and (head is None or domain.name != status.name):
            heads, asked = tuple(each for each in heads if each.name == domain.head), f"domain {domain.name!r}"
        for summary in heads:
            if summary.name == head or (head is None and len(heads) == 1):
                return summary
        known = ", ".join(summary.name for summary in heads) or "none"
        if head is None:
            raise UnknownHead(f"{asked} has no single head to answer; its heads: {known}")
        owners = [
            repr(other.name)
            for other in (self._statuses or {}).values()
            if any(summary.name == head for summary in other.heads)
        ]
        hint = f"; head {head!r} belongs to adapter {listed(owners)}" if owners else ""
        raise UnknownHead(f"{asked} has no head {head[:MAX_NAME]!r}; its heads: {known}{hint}")

    def invalidate(self) -> None:
        self._statuses = None

    # -- changes ------------------------------------------------------------------------------------------------------

    async def register(self, paths: Mapping[str, str]) -> None:
        """Register adapter folders by name, all or none; the files are read at first use. Raises BadAdapter."""
        for name in paths:
            self._check_name(name)
        await self._engine.register_adapters(paths)
        self._loads.update(dict.fromkeys(paths, next(self._number)))
        self.paths.update(paths)
        await asyncio.to_thread(self._compare, paths)
        self.invalidate()

    async def load(self, name: str, path: str) -> AdapterStatus:
        """Register an adapter folder on the server's file system. Raises BadAdapter with the reason."""
        self.check(name)
        return await self.replace(name, path)

    def check(self, name: str) -> None:
        """Raises BadAdapter or BadRequest for a name under which no adapter can be loaded."""
        self._check_name(name)
        self._check_changeable(name)

    async def replace(self, name: str, path: str) -> AdapterStatus:
        """As `load`, for learning adapters and versions under evaluation too."""
        wanted = DesiredAdapter(os.path.abspath(path))
        return await self._complete(self._keeping(name, wanted, lambda: self._load(name, path)))

    async def keep_in(self, state: AdapterState, given: Mapping[str, str]) -> None:
        """Keep changes in a state from now on, and register its adapters beside the given ones, which are registered.

        An adapter that was loaded later and cannot be served is reported and stays in the state.
        """
        for name, each in state.adapters.items():
            if name in self.learning:
                continue
            try:
                await self.register({name: each.path})
                if each.pinned:
                    await self._engine.pin_adapter(name, True)
            except EngineDead:
                raise
            except VLoraError as error:
                if state.is_given(name):
                    raise
                log.warning(
                    "adapter %r, loaded before the restart, is not served: %s; load it, or unload it", name, error
                )
        try:
            await state.commit({name: DesiredAdapter(path) for name, path in given.items()})
        except VLoraError as error:
            log.warning("%s; changes will not outlive the server", error)
        else:
            self._state = state

    async def unload(self, name: str, drain: bool = False) -> None:
        """Remove an adapter and cancel its requests, or with `drain` let them finish. Raises UnknownAdapter."""
        self._check_changeable(name)
        self._check_own(name)
        await self._complete(self._keeping(name, None, lambda: self._engine.unload_adapter(name, drain)))
        self._warnings.pop(name, None)
        self._loads.pop(name, None)
        self.paths.pop(name, None)

    async def train(self, plan: str) -> tuple[TrainingStatus, ...]:
        """Begin the trainings of a plan file. The adapters that they finish are kept for the next start."""
        return await self._complete(self._train(plan))

    async def pin(self, name: str, pinned: bool) -> AdapterStatus:
        """Pin an adapter on the device, or unpin it. Raises UnknownAdapter; OverCapacity when there is no room."""
        self._check_own(name)
        return self._with_warnings(await self._complete(self._pin(name, pinned)))

    async def close(self) -> None:
        """Keep the adapters that have been trained so far."""
        async with self._looking:
            await self._keep_trained()
        self._training.clear()

    # -- internal -----------------------------------------------------------------------------------------------------

    async def _keeping(
        self, name: str, wanted: DesiredAdapter | None, change: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Make a change, and keep its result for the next start; if one fails, neither. Raises VLoraError."""
        if self._state is None or name in self.learning or name in self.hidden:
            return await change()
        before, training = self._state.adapters.get(name), self._training & {name}
        self._training.discard(name)
        try:
            await self._state.commit({name: wanted})
            return await change()
        except BaseException as error:
            if not (wanted is None and before is not None and isinstance(error, UnknownAdapter)):
                with contextlib.suppress(VLoraError):
                    await self._state.commit({name: before})
                self._keep_later(training)
                raise
            return cast(T, None)  # it was kept, but could not be served

    async def _pin(self, name: str, pinned: bool) -> AdapterStatus:
        async with self._looking:
            await self._keep_trained()
            if self._state is None or (kept := self._state.adapters.get(name)) is None:
                return await self._engine.pin_adapter(name, pinned)
            wanted = msgspec.structs.replace(kept, pinned=pinned)
            return await self._keeping(name, wanted, lambda: self._engine.pin_adapter(name, pinned))

    async def _train(self, plan: str) -> tuple[TrainingStatus, ...]:
        begun: tuple[TrainingStatus, ...] = await self._engine.call(Train(plan))
        try:
            for one in begun:
                self._check_name(one.name)
                self._check_changeable(one.name)
        except VLoraError:
            for one in begun:
                if one.state == "running":
                    await self._engine.call(CancelTraining(one.name))
            raise
        if self._state is not None:
            self._keep_later({one.name for one in begun} - self._state.adapters.keys())
        return begun

    def _keep_later(self, names: set[str]) -> None:
        self._training |= names
        if self._training and (self._keeper is None or self._keeper.done()):
            self._keeper = asyncio.create_task(self._poll_trainings())

    async def _poll_trainings(self) -> None:
        while self._training:
            await asyncio.sleep(TRAINED_S)
            async with self._looking:
                await self._keep_trained()

    async def _keep_trained(self) -> None:
        """Keep each adapter whose training has finished. A failure is logged, and the next call tries again."""
        try:
            await self._keep_finished(set(self._training))
            self._reported = False
        except EngineDead:
            pass  # it is restarting
        except Exception as error:
            if not self._reported:
                log.warning("trained adapters are not kept: %s", error, exc_info=not isinstance(error, VLoraError))
            self._reported = True

    async def _keep_finished(self, names: set[str]) -> None:
        if self._state is None or not names:
            return
        found = [one for one in await self._engine.call(ListTrainings()) if one.name in names]
        finished = {one.name: os.path.abspath(one.path or "") for one in found if one.state == "finished"}
        self._training -= names - finished.keys() - {one.name for one in found if one.state == "running"}
        served = {status.name: status for status in await self._engine.adapters()} if finished else {}
        for name, path in finished.items():
            pinned = name in served and served[name].pinned
            kept = self._state.adapters.get(name)
            if name in self._training and name in served and kept is None:
                await self._state.commit({name: DesiredAdapter(path, pinned=pinned)})
            if name in self._training and name in served and not pinned and (kept is None or kept.path == path):
                await self._load(name, path)  # of the content that it has: for restarts of the engine
                self.invalidate()
            self._training.discard(name)

    async def _load(self, name: str, path: str) -> AdapterStatus:
        status = await self._engine.load_adapter(name, path)
        self.paths[name] = path
        self._loads[name] = next(self._number)
        await asyncio.to_thread(self._compare, {name: path})
        return self._with_warnings(status)

    def _compare(self, paths: Mapping[str, str]) -> None:
        for name, path in paths.items():
            self._warnings[name] = prompt_warnings(name, Path(path), self._processor)

    def _with_warnings(self, status: AdapterStatus) -> AdapterStatus:
        return msgspec.structs.replace(status, warnings=self._warnings.get(status.name, ()))

    def _may_have_recovered(self, name: str) -> bool:
        """Whether a cached error is old: replicas try again, and to list all adapters for each request is too much."""
        assert self._statuses is not None
        failed = any(self._statuses[each].error is not None for each in self._holders[name])
        return failed and time.monotonic() - self._listed_s >= ERROR_S

    async def _complete(self, change: Coroutine[Any, Any, T]) -> T:
        """Complete a change of the engine's adapters also when its caller is cancelled, as the engine does."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._on_changed)
        return await asyncio.shield(task)

    def _on_changed(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        self.invalidate()
        if not task.cancelled():
            task.exception()  # retrieve the error when the caller was cancelled

    def _check_changeable(self, name: str) -> None:
        if name in self.learning:
            raise BadRequest(
                f"adapter {name!r} learns, so `vlora train promote` and `vlora train rollback` change it; start the "
                "server without it in the plan of --learn to load or unload it"
            )
        if name in self.hidden:
            raise UnknownAdapter(f"no adapter named {name[:MAX_NAME]!r}", field="adapter")

    def _check_own(self, name: str) -> None:
        if self._statuses is not None and name not in self._statuses and name in self._holders:
            owners = listed([repr(each) for each in self._holders[name]])
            raise UnknownAdapter(f"{name!r} is a domain of adapter {owners}; name the adapter", field="adapter")

    def _check_name(self, name: str) -> None:
        if name == self._model:
            raise BadAdapter(f"{name!r} is the base model's name; choose another name for the adapter")
        if (problem := name_problem(name)) is not None:
            raise BadAdapter(problem)
