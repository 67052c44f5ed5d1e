"""The engine's current state as a value: the last steps, the queue, the arena, the demand for adapters."""

from __future__ import annotations

from typing import Literal

import msgspec

from vlora.types import EngineStats


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One step. ended_s: in the engine's clock. merged: the name of the merged adapter; None is W0."""

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
    """A waiting or running request.

    Attributes:
        credit_s: The request starves if this is above theta.
        new_tokens: Tokens to compute before the next output token.
    """

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
    """The contents of the arena's pages.

    Attributes:
        cells: From the first page to the last, one letter per `pages_per_cell` pages, for the majority of them: a
            adapter, p packed copies, k KV blocks in use, c KV blocks cached, f free.
    """

    num_pages: int
    page_bytes: int
    pages_per_cell: int
    cells: str
    runs: tuple[ArenaRun, ...]


class AdapterLoad(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter and its demand.

    Attributes:
        place: Where the adapter is; host is this machine's memory.
        rate: Requests per second, mostly of the last ten seconds.
        num_under_way: Its unfinished requests.
    """

    name: str
    rank: int
    num_bytes: int
    place: Literal["device", "arriving", "host", "disk"]
    pinned: bool
    merged: bool
    mergeable: bool
    rate: float
    num_under_way: int


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How loaded an engine is, as a router in front of several engines sees it.

    Attributes:
        free_blocks: KV blocks that are left, including those with cached content, if each request holds its present
            tokens and one more block. Negative if requests wait for blocks.
        num_waiting: Includes requests that wait for admission.
        resident: Adapters on the device: the content hash by name, for the current content of the name.
        loading: Names of needed adapters that are being read or loaded onto the device.
    """

    free_blocks: int
    total_blocks: int
    num_running: int
    num_waiting: int
    resident: dict[str, str] = {}
    loading: tuple[str, ...] = ()


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state between two steps. The queue and the adapters are truncated if long.

    Attributes:
        now_s: In the engine's clock.
        steps: Those after the requested number.
        queue: Highest credits first.
        adapters: On the device or in demand, most requested first.
    """

    now_s: float
    stats: EngineStats
    theta_s: float
    max_batch_size: int
    steps: tuple[StepRecord, ...]
    queue: tuple[QueuedRequest, ...]
    arena: ArenaMap
    adapters: tuple[AdapterLoad, ...]
