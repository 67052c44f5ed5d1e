"""Records the step loop and creates an `EngineSnapshot` on request.

This happens between two steps, so every part of a snapshot is bounded: a thousand adapters must not delay a step.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import msgspec

from vlora.config import EngineConfig
from vlora.engine.adapter_loader import AdapterLoader
from vlora.engine.device_runtime import DeviceRuntime
from vlora.engine.snapshot import (
    AdapterLoad,
    ArenaMap,
    ArenaRun,
    EngineLoad,
    EngineSnapshot,
    QueuedRequest,
    StepRecord,
)
from vlora.lora.registry import AdapterRegistry
from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.arena import PAGE_BYTES
from vlora.memory.block_manager import BlockManager
from vlora.memory.page_allocator import PageRun
from vlora.orchestrator.scheduler import Scheduler
from vlora.types import Batch, EngineStats, Request, RequestStatus, StepResult, TrainingStatus, composed_of

MAX_STEPS = 2000
"""Number of steps kept."""

_MAX_SHOWN = 64  # requests, adapters, runs
_MAX_CELLS = 1024
_LETTERS = "fakcp"  # of `ArenaMap`, by the kinds of `PageAllocator.page_kinds`; packed copies are distinguished here
_PACKED = _LETTERS.index("p")


@dataclasses.dataclass(kw_only=True, eq=False)
class Monitor:
    """Reads the engine's parts and changes none.

    served_base: fields of `EngineStats` for clients of the base model. environment: those that never change.
    """

    config: EngineConfig
    clock: Callable[[], float]
    scheduler: Scheduler
    device: DeviceRuntime
    block_manager: BlockManager
    adapter_cache: AdapterCache
    registry: AdapterRegistry
    loader: AdapterLoader
    pinned: Collection[str]
    trainings: Callable[[], tuple[TrainingStatus, ...]]
    served_base: Callable[[], Mapping[str, Any]]
    environment: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._allocator = self.block_manager.allocator
        self._pool = self.device.pool
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._num_steps = 0
        self._rates = Rates(self.clock)

    def count_request(self, request: Request) -> None:
        """Count the demand for the request's adapter, or for each one of its composition."""
        for part in () if request.adapter is None else composed_of(request.adapter):
            self._rates.count(part.adapter)

    def record_step(self, batch: Batch, result: StepResult) -> None:
        """Record a step that has run, before the scheduler ends requests for it."""
        queue = self.scheduler.queue
        num_others = len(queue) - len([item for item in batch.items if item.request_id in queue.admitted])
        self._num_steps += 1
        self._steps.append(
            StepRecord(
                self._num_steps,
                self.clock(),
                result.step_s,
                result.switch_s if result.switched else 0.0,
                batch.mode.value,
                self._name_of(batch.merged_adapter),
                len(batch.items),
                batch.num_tokens,
                num_others,
            )
        )

    def stats(self) -> EngineStats:
        block_bytes = self.device.limits.block_pages * PAGE_BYTES
        vision, loader = self.device.vision, self.loader
        return msgspec.structs.replace(
            self.scheduler.stats(self.config.model),
            max_context=self.device.limits.max_context,
            arena_bytes=self._allocator.num_pages * PAGE_BYTES,
            kv_bytes=len(self._allocator.taken_blocks) * block_bytes,
            cached_kv_bytes=self.block_manager.num_cached_blocks * block_bytes,
            adapter_bytes=self.adapter_cache.num_pages * PAGE_BYTES,
            num_adapters=len(self.registry.names),
            num_resident_adapters=len(self._pool.resident),
            num_vision_hits=vision.num_hits,
            num_vision_encoded=vision.num_encoded,
            vision_cache_bytes=vision.num_bytes,
            host_adapter_bytes=self.registry.num_bytes,
            relocated_bytes=self.device.arena.num_copied * PAGE_BYTES,
            num_adapter_loads=self._pool.num_loads,
            num_adapter_hits=loader.num_hits,
            num_adapter_misses=loader.num_misses,
            num_load_waits=loader.num_waits,
            load_wait_s=loader.wait_s,
            trainings=self.trainings(),
            **self.served_base(),
            **self.environment,
        )

    def load(self) -> EngineLoad:
        queue, resident = self.scheduler.queue, self._pool.resident
        blocks = self.block_manager
        num_running = sum([t.status is RequestStatus.RUNNING for t in queue.admitted.values()])
        missing = 0
        for t in (*queue.admitted.values(), *queue.outside.waiting):
            missing += max(0, blocks.blocks_for(t.device_len) + 1 - len(blocks.table(t.request_id)))
        return EngineLoad(
            free_blocks=blocks.num_free_blocks - missing,
            total_blocks=blocks.total_blocks,
            num_running=num_running,
            num_waiting=len(queue) - num_running,
            resident={
                known.name: known.content.version
                for known in map(self.registry.known, resident)
                if self.registry.is_current(known.key)
            },
            loading=tuple(sorted(self.registry.known(key).name for key in self.loader.available - resident)),
        )

    def snapshot(self, since: int = 0) -> EngineSnapshot:
        """A snapshot with the recorded steps after number `since`."""
        wanted = min(len(self._steps), max(0, self._num_steps - since))
        return EngineSnapshot(
            now_s=self.clock(),
            stats=self.stats(),
            theta_s=self.config.theta_s,
            max_batch_size=self.config.max_batch_size,
            steps=tuple(itertools.islice(self._steps, len(self._steps) - wanted, None)),
            queue=self._queue(),
            arena=self._arena_map(),
            adapters=self._loads(),
        )

    # -- parts --------------------------------------------------------------------------------------------------------

    def _queue(self) -> tuple[QueuedRequest, ...]:
        now = self.clock()
        return tuple(
            QueuedRequest(
                adapter=self._name_of(tracked.adapter),
                head=tracked.request.head,
                running=tracked.status is RequestStatus.RUNNING,
                waited_s=now - tracked.last_ran_s,
                credit_s=credit,
                new_tokens=tracked.new_tokens,
                num_sampled=tracked.num_sampled,
            )
            for tracked, credit in self.scheduler.by_credit(_MAX_SHOWN)
        )

    def _arena_map(self) -> ArenaMap:
        runs = self.adapter_cache.runs
        size, cells = arena_cells(self._allocator.page_kinds, [run for key, run in runs if key is None])
        return ArenaMap(
            num_pages=self._allocator.num_pages,
            page_bytes=PAGE_BYTES,
            pages_per_cell=size,
            cells=cells,
            # The last ones are the packed copies and the most recently used adapters.
            runs=tuple(ArenaRun(self._name_of(key), run.first_page, run.num_pages) for key, run in runs[-_MAX_SHOWN:]),
        )

    def _loads(self) -> tuple[AdapterLoad, ...]:
        """Adapters in demand or on the device, the most requested first."""
        rates, resident, arriving = self._rates.read(), self._pool.resident, self._pool.loading
        here = {known.name: known for known in map(self.registry.known, resident | arriving)}
        there = {name: self.registry.get(name) for name in here | rates if name in self.registry}
        there |= {name: known for name, known in here.items() if known.parts}
        loads = []
        for name in heapq.nsmallest(_MAX_SHOWN, there, key=lambda name: (-rates.get(name, 0.0), name)):
            registration = there[name]
            key, content = registration.key, registration.adapter
            loads.append(
                AdapterLoad(
                    name=name,
                    rank=registration.header.rank,
                    num_bytes=registration.num_bytes,
                    place=_place(key in resident, key in arriving, content is not None),
                    pinned=name in self.pinned,
                    merged=key == self.device.switcher.merged_key,
                    mergeable=self.loader.is_mergeable(key),
                    rate=rates.get(name, 0.0),
                    num_under_way=len(self.loader.users.get(key, ())),
                )
            )
        return tuple(loads)

    def _name_of(self, key: str | None) -> str | None:
        # Not from the registry: the registration may be gone when its last step is recorded.
        return None if key is None else key.rpartition("@")[0]


def _place(resident: bool, arriving: bool, read: bool) -> Literal["device", "arriving", "host", "disk"]:
    if resident:
        return "device"
    return "arriving" if arriving else "host" if read else "disk"


class Rates:
    """Requests per second by name, exponentially decayed with the time constant `WINDOW_S`."""

    WINDOW_S = 10.0
    _LEAST = 1e-3

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rates: dict[str, tuple[float, float]] = {}  # the rate and its time

    def count(self, name: str) -> None:
        now = self._clock()
        self._rates[name] = self._rate(name, now) + 1 / self.WINDOW_S, now

    def read(self) -> dict[str, float]:
        """Drops names without recent requests."""
        now = self._clock()
        rates = {name: self._rate(name, now) for name in self._rates}
        for name, rate in rates.items():
            if rate < self._LEAST:
                del self._rates[name]
        return {name: rates[name] for name in self._rates}

    def _rate(self, name: str, now: float) -> float:
        rate, then = self._rates.get(name, (0.0, now))
        return rate * math.exp((then - now) / self.WINDOW_S)


def arena_cells(kinds: bytes, packed: Collection[PageRun], most: int = _MAX_CELLS) -> tuple[int, str]:
    """Pages per cell, and for each of at most `most` cells the letter (see `ArenaMap`) of the majority of its pages.

    kinds: of every page, as in `PageAllocator.page_kinds`. packed: runs that hold packed copies.
    """
    pages = bytearray(kinds)
    for run in packed:
        pages[run.first_page : run.end] = bytes([_PACKED]) * run.num_pages
    size = max(1, -(-len(pages) // most))
    letters = []
    for start in range(0, len(pages), size):
        cell = pages[start : start + size]
        kind = cell[0]
        if cell.count(kind) < len(cell):
            kind = max(sorted(set(cell)), key=cell.count)
        letters.append(_LETTERS[kind])
    return size, "".join(letters)
