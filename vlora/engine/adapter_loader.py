"""The adapters of unfinished requests: loaded onto the device before a step, forgotten when nothing refers to them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from vlora.config import EngineConfig
from vlora.engine.device_runtime import DeviceRuntime
from vlora.errors import BadAdapter, StepFailed, VLoraError
from vlora.lora.registry import AdapterRegistry
from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.block_manager import BlockManager
from vlora.orchestrator.adapter_prefetch import evict_for_kv, load_needed_adapters
from vlora.orchestrator.scheduler import Scheduler
from vlora.types import MemoryView

_WAIT_S = 0.005  # how long a step with nothing to run waits for a load before messages are handled


@dataclasses.dataclass(kw_only=True, eq=False)
class AdapterLoader:
    """Loads the adapters that requests need, and knows which requests use which registration.

    Args:
        on_retire: Called with the key of each registration that is dropped.

    Attributes:
        num_hits, num_misses: Requests whose adapter was, or was not, on the device when they arrived.
        num_waits, wait_s: Steps that could run nothing before a load or a grammar was ready, and how long they waited.
        kept: Keys of registrations that stay without a name and without a request.
    """

    config: EngineConfig
    scheduler: Scheduler
    registry: AdapterRegistry
    device: DeviceRuntime
    adapter_cache: AdapterCache
    block_manager: BlockManager
    on_retire: Sequence[Callable[[str], None]] = ()

    def __post_init__(self) -> None:
        self.num_hits = self.num_misses = self.num_waits = 0
        self.wait_s = 0.0
        self.kept: set[str] = set()
        self._pool = self.device.pool
        self._users: dict[str, set[str]] = {}
        self._view = MemoryView(resident=frozenset(), mergeable=frozenset())

    # -- users --------------------------------------------------------------------------------------------------------

    @property
    def users(self) -> Mapping[str, Collection[str]]:
        """Ids of unfinished requests by the key of their adapter."""
        return self._users

    def add_user(self, key: str, request_id: str) -> None:
        """Keep a registration, and the parts of a composition, until `remove_user`."""
        for used in self.registry.known(key).uses:
            self._users.setdefault(used, set()).add(request_id)
        self.num_hits += key in self._pool.resident
        self.num_misses += key not in self._pool.resident

    def remove_user(self, key: str, request_id: str) -> None:
        for used in self.registry.known(key).uses:
            self._users[used].discard(request_id)
            if not self._users[used]:
                del self._users[used]
                self.retire(used)

    def retire(self, key: str | None) -> None:
        """Drop a registration unless a name maps to it, a request uses it or it is kept."""
        if key is None or key in self.kept or self.registry.is_current(key) or self._users.get(key):
            return
        self.device.switcher.forget(key)
        self._pool.evict(key)
        self.device.vision.forget(key)
        self.block_manager.forget(key)
        self.registry.forget(key)
        for notify in self.on_retire:
            notify(key)

    # -- before a step ------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[tuple[str, VLoraError]]:
        """Collect adapters that were read or loaded. Yields the keys and errors of those that failed."""
        for failed in self.registry.collect():
            yield failed.key, BadAdapter(failed.error or "")
        for key, error in self._pool.collect().items():
            kind, name = type(error) if isinstance(error, BadAdapter) else StepFailed, self.registry.known(key).name
            yield key, kind(f"adapter {name!r} could not be loaded onto the device: {error}")

    @property
    def available(self) -> frozenset[str]:
        return self._pool.resident | self._loading()

    def load_needed(self) -> None:
        """Start to load the adapters that requests need, and evict others if the next step lacks KV blocks."""
        switcher = self.device.switcher
        load_needed_adapters(self.scheduler.demand, self.adapter_cache, self._load)
        evict_for_kv(self.scheduler.demand, self.adapter_cache, switcher.merged_key)
        self._pool.detach_evicted()
        for key in self.scheduler.queue.waiting_adapters:
            self.registry.fetch(key)  # into host memory only: their requests are not admitted yet
        merged = switcher.merged_key
        if merged is not None and merged not in self._pool.resident:
            switcher.forget(merged)

    def memory_view(self) -> MemoryView:
        """What the scheduler may use in the next step."""
        resident, before = self._pool.resident, self._view
        mergeable = before.mergeable
        if resident is not before.resident:  # computed in every step, over possibly thousands of adapters
            mergeable = (mergeable & resident).union(filter(self.is_mergeable, resident - before.resident))
        self._view = MemoryView(resident=resident, mergeable=mergeable, loading=self._loading())
        return self._view

    def wait(self, grammars: Sequence[Future[Any]], calls: Sequence[Future[Any]]) -> None:
        """Nothing can run before an adapter or grammar is ready: yield the CPU to its thread for a short time.

        Args:
            calls: Reads for administration; they count only while there is no request.
        """
        pending: tuple[Future[Any], ...] = (*self.registry.pending, *self._pool.pending, *grammars)
        if not self.scheduler.has_work:
            wait((*pending, *calls), _WAIT_S, FIRST_COMPLETED)
        elif pending:
            started = time.perf_counter()
            wait(pending, _WAIT_S, FIRST_COMPLETED)
            self.num_waits += 1
            self.wait_s += time.perf_counter() - started

    def is_mergeable(self, key: str) -> bool:
        adapter = self.registry.known(key).adapter
        return adapter is not None and adapter.can_merge and adapter.merge_fidelity >= self.config.merge_fidelity_floor

    def _load(self, key: str) -> bool:
        adapter = self.registry.fetch(key)
        return adapter is not None and self._pool.load(adapter)

    def _loading(self) -> frozenset[str]:
        """Needed adapters that are being loaded onto the device or still have to be read."""
        arriving = self._pool.loading
        return frozenset(
            key
            for key in self.scheduler.demand.needed_adapters - self._pool.resident
            if key in arriving or self.registry.known(key).adapter is None
        )
