"""Updates each request's prefix-cache hit before scheduling."""

from __future__ import annotations

from collections.abc import Iterable

from vlora.memory.books import BlockTables
from vlora.orchestrator.request_state import Tracked
from vlora.types import RequestStatus

_MOST_KEYS = 128  # per step: many requests with one image must not delay a decision


def look_up(requests: Iterable[Tracked], tables: BlockTables) -> None:
    """Advance every request to its prefix-cache hit, so that policies and budgets see the tokens left to compute.

    A running request takes over blocks that others have computed. For a waiting request the hit is a forecast: it holds
    no blocks, and looks them up again when it starts. A request without changes costs two key lookups.

    Args:
        requests: in order of arrival; the number of lookups is limited, and older requests take precedence.
        tables: the KV blocks.
    """
    if not tables.reuses:
        return
    known = tables.known
    left = _MOST_KEYS
    for tracked in requests:
        if tracked.next_key in known:
            assert tracked.chain is not None
            if tracked.status is RequestStatus.RUNNING:
                tracked.place(tables.reuse(tracked.request_id, tracked.chain, tracked.cached_len, tracked.device_len))
                continue
            while left and tracked.next_key in known:
                tracked.place(tracked.cached_len + tracked.chain.block_size)
                left -= 1
        elif tracked.status is RequestStatus.WAITING:
            while tracked.last_key is not None and tracked.last_key not in known:
                assert tracked.chain is not None
                tracked.place(tracked.cached_len - tracked.chain.block_size)
