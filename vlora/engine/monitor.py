"""Records the step loop and creates an `EngineSnapshot` on request.

This happens between two steps, so every part of a snapshot is bounded: a thousand adapters must not delay a step.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping

from vlora.config import EngineConfig
from vlora.engine.snapshot import (
    AdapterLoad,
    ArenaMap,
    ArenaRun,
    EngineSnapshot,
    QueuedRequest,
    StepRecord,
)
from vlora.lora import AdapterRegistry
from vlora.lora.adapter_pool import AdapterBank
from vlora.lora.merge import ModeSwitcher
from vlora.memory.adapter_cache import Residency
from vlora.memory.arena import PAGE_BYTES
from vlora.memory.books import ArenaBooks, Run
from vlora.orchestrator import Scheduler
from vlora.types import Batch, EngineStats, RequestStatus, StepResult

MAX_STEPS = 2000
"""Number of steps kept."""

_MAX_SHOWN = 64  # requests, adapters, runs
_MAX_CELLS = 1024
_LETTERS = "fakcp"  # of `ArenaMap`, by the kinds of `ArenaBooks.page_kinds`; packed copies are distinguished here
_PACKED = _LETTERS.index("p")


class Observer:
    """Reads the engine's parts and changes none. users: ids of running requests by adapter key; pinned: by name."""

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float],
        *,
        scheduler: Scheduler,
        books: ArenaBooks,
        residency: Residency,
        bank: AdapterBank,
        registry: AdapterRegistry,
        switcher: ModeSwitcher,
        users: Mapping[str, Collection[str]],
        pinned: Collection[str],
    ) -> None:
        self._config = config
        self._clock = clock
        self._scheduler = scheduler
        self._books = books
        self._residency = residency
        self._bank = bank
        self._registry = registry
        self._switcher = switcher
        self._users = users
        self._pinned = pinned
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._num_steps = 0
        self._rates = Rates(clock)

    def asked(self, adapter: str | None) -> None:
        """A request has arrived, for the base model if adapter is None."""
        if adapter is not None:
            self._rates.count(adapter)

    def ran(self, batch: Batch, result: StepResult, num_requests: int) -> None:
        """A step has run, with `num_requests` in the engine."""
        self._num_steps += 1
        self._steps.append(
            StepRecord(
                self._num_steps,
                self._clock(),
                result.step_s,
                result.switch_s if result.switched else 0.0,
                batch.mode.value,
                self._name_of(batch.merged_adapter),
                len(batch.items),
                batch.num_tokens,
                num_requests - len(batch.items),
            )
        )

    def snapshot(self, since: int, stats: EngineStats) -> EngineSnapshot:
        """A snapshot with the recorded steps after number `since`."""
        wanted = min(len(self._steps), max(0, self._num_steps - since))
        return EngineSnapshot(
            now_s=self._clock(),
            stats=stats,
            theta_s=self._config.theta_s,
            max_batch_size=self._config.max_batch_size,
            steps=tuple(itertools.islice(self._steps, len(self._steps) - wanted, None)),
            queue=self._queue(),
            arena=self._arena_map(),
            adapters=self._loads(),
        )

    # -- parts --------------------------------------------------------------------------------------------------------

    def _queue(self) -> tuple[QueuedRequest, ...]:
        now = self._clock()
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
            for tracked, credit in self._scheduler.by_credit(_MAX_SHOWN)
        )

    def _arena_map(self) -> ArenaMap:
        runs = self._residency.runs
        size, cells = arena_cells(self._books.page_kinds, [run for key, run in runs if key is None])
        return ArenaMap(
            num_pages=self._books.num_pages,
            page_bytes=PAGE_BYTES,
            pages_per_cell=size,
            cells=cells,
            # The last ones are the packed copies and the most recently used adapters.
            runs=tuple(ArenaRun(self._name_of(key), run.first_page, run.num_pages) for key, run in runs[-_MAX_SHOWN:]),
        )

    def _loads(self) -> tuple[AdapterLoad, ...]:
        """Adapters in demand or on the device, the most requested first."""
        rates, resident, arriving = self._rates.read(), self._bank.resident, self._bank.arriving
        here = {self._registry.known(key).name for key in resident | arriving}
        there = [name for name in here | rates.keys() if name in self._registry]
        loads = []
        for name in heapq.nsmallest(_MAX_SHOWN, there, key=lambda name: (-rates.get(name, 0.0), name)):
            registration = self._registry.get(name)
            key, content = registration.key, registration.adapter
            loads.append(
                AdapterLoad(
                    name=name,
                    rank=registration.header.rank,
                    num_bytes=registration.num_bytes,
                    place="device"
                    if key in resident
                    else "arriving"
                    if key in arriving
                    else "host"
                    if content is not None
                    else "disk",
                    pinned=name in self._pinned,
                    merged=key == self._switcher.merged_key,
                    mergeable=content is not None and content.merge_fidelity >= self._config.merge_fidelity_floor,
                    rate=rates.get(name, 0.0),
                    num_under_way=len(self._users.get(key, ())),
                )
            )
        return tuple(loads)

    def _name_of(self, key: str | None) -> str | None:
        return None if key is None else self._registry.known(key).name


class Rates:
    """Requests per second by name, exponentially decayed with the time constant `WINDOW_S`."""

    WINDOW_S = 10.0
    _LEAST = 1e-3

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rates: dict[str, tuple[float, float]] = {}  # the rate and its time

    def count(self, name: str) -> None:
        """Count one request."""
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


def arena_cells(kinds: bytes, packed: Collection[Run], most: int = _MAX_CELLS) -> tuple[int, str]:
    """Pages per cell, and for each of at most `most` cells the letter (see `ArenaMap`) of the majority of its pages.

    kinds: of every page, as in `ArenaBooks.page_kinds`. packed: runs that hold packed copies.
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
