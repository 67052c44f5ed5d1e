"""What the prefix cache has of each request, looked up before anybody decides."""

from __future__ import annotations

from collections.abc import Iterable

from vlora.memory.books import BlockTables
from vlora.orchestrator.request_state import Tracked
from vlora.types import RequestStatus

_MOST_KEYS = 128  # found in one step: a crowd that asks about one picture shall not hold up a decision


def look_up(requests: Iterable[Tracked], tables: BlockTables) -> None:
    """Let every request stand where the cache lets it begin, so that policies and budgets see what is left to compute.

    A running request takes over blocks that others computed meanwhile. For a waiting one it is a forecast: it holds
    nothing, and finds what is still there when it starts. A request for which nothing changed costs a look at two keys.

    requests: in order of arrival; the older ones' forecasts go first where there is much to find.
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
