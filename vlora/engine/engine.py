"""One replica: `step()` schedules a batch, runs it and records the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor, Future

from vlora.config import EngineConfig
from vlora.engine.build import build
from vlora.engine.snapshot import EngineLoad, EngineSnapshot
from vlora.errors import Aborted, BadRequest, VLoraError
from vlora.orchestrator.cost_model import CostModel
from vlora.orchestrator.policies.base import Policy
from vlora.types import AdapterStatus, EngineStats, ErrorValue, Request, RequestOutput


class Engine:
    """Scheduler, memory and model of one replica. Not thread-safe: one thread owns it.

    Internally, an adapter is identified by its key (name and registration), never by its name alone: reloading a name
    creates a new registration for new requests, while running requests finish on their original one. Raises BadConfig.

    Args:
        model: A built transformers model; None loads `config.model`.
        executor: Reads adapters, loads them onto the device, compiles grammars; None creates a thread for each.
        cost: Learns step times; None for an untrained one.

    Attributes:
        send_early: Gets outputs that are known before the model runs, such as refusals; None: `step` returns them.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: object | None = None,
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
        policy: Policy | None = None,
        cost: CostModel | None = None,
    ) -> None:
        self.parts = parts = build(config, model=model, clock=clock, executor=executor, policy=policy, cost=cost)
        self.config, self.limits, self.num_threads = config, parts.device.limits, parts.num_threads
        self._scheduler, self._runner, self._steps = parts.scheduler, parts.runner, parts.steps
        self._hooks, self._loader, self._admin, self._monitor = parts.hooks, parts.loader, parts.admin, parts.monitor
        self.send_early: Callable[[tuple[RequestOutput, ...]], None] | None = None
        self._key_of: dict[str, str | None] = {}  # of each unfinished request, the key of its adapter

    def step(self) -> tuple[RequestOutput, ...]:
        """Schedule, run, record. Returns new outputs, those of one request in order. Raises EngineDead if a rank died.

        On a GPU it records the step that the last call launched, after it has launched the next one.
        """
        self.check_ranks()
        self._admin.poll()
        outputs = [output for key, error in self._loader.collect() for output in self._fail_users(key, error)]
        for hook in self._hooks.before_schedule:
            outputs += hook()
        self._scheduler.admit(self._loader.available)
        self._loader.load_needed()
        batch = self._scheduler.schedule(self._loader.memory_view())
        outputs += self._scheduler.drain_outputs()
        if batch is not None or self._steps.pending:
            if self.send_early is not None and outputs:
                self.send_early(self._released(outputs))
                outputs = []
            outputs += self._steps.run(batch)
        elif not outputs:
            self._loader.wait(self.parts.grammars.pending, self._admin.pending)
        return self._released(outputs)

    # -- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Admit a request. Raises subclasses of BadRequest, or BadAdapter, and then changes no state."""
        if request.request_id in self._key_of:
            raise BadRequest(f"request id {request.request_id!r} is already in use; ids must be unique")
        checked, vision_key, num_holds = self.parts.checks.check(request)
        self._scheduler.add(checked, num_holds=num_holds, vision_key=vision_key)
        self._runner.add(checked, vision_key)
        self._key_of[checked.request_id] = checked.adapter
        if checked.adapter is not None:
            self._loader.add_user(checked.adapter, checked.request_id)
        for hook in self._hooks.on_add:
            hook(request)

    def cancel(self, request_id: str) -> RequestOutput | None:
        """Cancel a request and return its last output; None if it is unknown or already finished."""
        output = self._scheduler.cancel(request_id)
        self._released(() if output is None else (output,))
        return output

    def version_of(self, request_id: str) -> str | None:
        return self.parts.versions.version_of(request_id)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._steps.pending or self._admin.has_work

    @property
    def alarm(self) -> int | None:
        """A file descriptor that becomes readable when another rank dies; None without other ranks."""
        ranks = self.parts.coordinator
        return None if ranks is None else ranks.reports.alarm

    def check_ranks(self) -> None:
        """Raises EngineDead if another rank is dead."""
        if self.parts.coordinator is not None:
            self.parts.coordinator.reports.check()

    # -- adapters, see AdapterAdmin -----------------------------------------------------------------------------------

    def register_adapters(self, paths: Mapping[str, str], versions: Mapping[str, str] = {}) -> None:
        """Register adapter folders by name, all or none. Only headers are read now, the factors at first use."""
        self._admin.register(paths, versions)

    def load_adapter(self, name: str, path: str) -> AdapterStatus:
        """Register an adapter folder, reading and checking all of it before returning."""
        return self._admin.load(name, path)

    def load_in_background(self, name: str, path: str, version: str = "") -> Future[AdapterStatus]:
        """As `load_adapter`; a later step sets the result or the exception."""
        return self._admin.load_in_background(name, path, version)

    def keep_adapters(self, versions: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
        """Keep these contents by name: answers of other engines may continue with them. Returns those that are here."""
        return self._admin.keep(versions)

    def unload_adapter(self, name: str, drain: bool = False) -> tuple[RequestOutput, ...]:
        """Remove an adapter: its name is free at once. Raises UnknownAdapter.

        Its requests are cancelled and its memory is freed before this returns; with `drain`, they finish first, and
        the last one frees the memory. A pending load or pin of the name is aborted.
        """
        key = self._admin.unload(name)
        if key is None:
            return ()
        outputs = () if drain else self._fail_users(key, Aborted(f"adapter {name!r} was unloaded"))
        self._loader.retire(key)
        return outputs

    def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        """Load an adapter onto the device and keep it resident, or allow it to be evicted again."""
        return self._admin.pin(name) if pinned else self._admin.unpin(name)

    def pin_in_background(self, name: str) -> Future[AdapterStatus]:
        """As `pin_adapter` with pinned=True; a later step sets the result or the exception."""
        return self._admin.pin_in_background(name)

    def adapters(self, after: str = "", most: int | None = None) -> tuple[AdapterStatus, ...]:
        """Statuses in order of name: at most `most` of those after `after`."""
        return self._admin.statuses(after, most)

    # -- state and end ------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        return self._monitor.stats()

    def load(self) -> EngineLoad:
        return self._monitor.load()

    def snapshot(self, since: int = 0) -> EngineSnapshot:
        """The engine's current state, with the steps after number `since`."""
        return self._monitor.snapshot(since)

    def check_integrity(self) -> None:
        """Check that every page has one owner. Raises AssertionError with the sum that does not match."""
        for part in (self.parts.block_manager.allocator, self.parts.block_manager, self.parts.adapter_cache):
            part.check_integrity()

    def close(self) -> tuple[RequestOutput, ...]:
        """Cancel all running requests, and stop loading adapters."""
        outputs = [self.cancel(request_id) for request_id in tuple(self._key_of)]
        parts = self.parts
        for close in (parts.admin.close, parts.registry.close, parts.device.pool.close, *self._hooks.on_close):
            close()
        return tuple(output for output in outputs if output is not None)

    # -- internal -----------------------------------------------------------------------------------------------------

    def _fail_users(self, key: str, error: VLoraError) -> tuple[RequestOutput, ...]:
        value = ErrorValue.of(error)
        failed = [self._scheduler.fail(request_id, value) for request_id in tuple(self._loader.users.get(key, ()))]
        return self._released(output for output in failed if output is not None)

    def _released(self, outputs: Iterable[RequestOutput]) -> tuple[RequestOutput, ...]:
        """Free what ended requests hold beside their KV blocks, which the scheduler has freed. Returns the outputs."""
        released = tuple(outputs)
        for request_id in (output.request_id for output in released if output.finished):
            self._runner.release(request_id)
            for hook in self._hooks.on_release:
                hook(request_id)
            if (key := self._key_of.pop(request_id, None)) is not None:
                self._loader.remove_user(key, request_id)
        return released
