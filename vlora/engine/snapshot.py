"""What the engine is doing right now, as a value: the last steps, who waits, what lies where, who is asked for."""

from __future__ import annotations

from typing import Literal

import msgspec

from vlora.types import EngineStats


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One step. ended_s: by the engine's clock. merged: the name of the adapter in the weights; None is W0."""

    number: int
    ended_s: float
    step_s: float
    switch_s: float
    mode: str
    merged: str | None
    num_requests: int
    num_tokens: int
    num_others: int  # requests in the engine that were not in this step


class QueuedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """credit_s: above theta it starves. new_tokens: to compute before its next answer; num_sampled: answered so far."""

    adapter: str | None
    head: str | None
    running: bool
    waited_s: float
    credit_s: float
    new_tokens: int
    num_sampled: int


class ArenaRun(msgspec.Struct, frozen=True, array_like=True):
    """Pages [first_page, first_page + num_pages) of an adapter, or of packed copies (name None)."""

    name: str | None
    first_page: int
    num_pages: int


class ArenaMap(msgspec.Struct, frozen=True, kw_only=True):
    """cells: from the first page to the last, a letter for every `pages_per_cell` pages, for what most of them are:
    a adapter, p packed copies, k KV blocks in use, c KV blocks cached, f free."""

    num_pages: int
    page_bytes: int
    pages_per_cell: int
    cells: str
    runs: tuple[ArenaRun, ...]


class AdapterLoad(msgspec.Struct, frozen=True, kw_only=True):
    """place: where it is; host is this machine's memory. rate: requests a second, the last ten seconds weighing most.
    num_under_way: of its requests, those that have not ended."""

    name: str
    rank: int
    num_bytes: int
    place: Literal["device", "arriving", "host", "disk"]
    pinned: bool
    merged: bool
    mergeable: bool
    rate: float
    num_under_way: int


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """now_s: the engine's clock. steps: those after the number that was asked for. queue: highest credits first;
    adapters: most asked for first, those on the device and those in demand; both cut where they are long."""

    now_s: float
    stats: EngineStats
    theta_s: float
    max_batch_size: int
    steps: tuple[StepRecord, ...]
    queue: tuple[QueuedRequest, ...]
    arena: ArenaMap
    adapters: tuple[AdapterLoad, ...]
