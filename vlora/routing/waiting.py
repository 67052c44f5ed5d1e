"""The router's queue, in the order of the orchestrator."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence

from vlora.orchestrator.admission.kv_admission import entry_order
from vlora.orchestrator.fairness import FairShares, adapter_of, tenant_of
from vlora.routing.replica_load import Need

_Group = tuple[bool, bool, int, str | None, str | None]


class WaitingQueue:
    """Requests that no replica has room for.

    Order: returned requests, the oldest first; requests with a deadline; all others. The last two by priority, then
    fair shares, then arrival, and one of every `OLDEST_EVERY` placements goes to the oldest: `entry_order` of the
    orchestrator. In this order requests differ by few properties, so only the oldest of each group of equal requests is
    compared. With shares between both tenants and adapters, the adapters' shares are compared among these alone.

    Args:
        weights: fair shares between adapters; not applied if empty.
        tenant_weights: fair shares between tenants, which precede those between adapters; not applied if empty.
        by_arrival: order by arrival alone.
    """

    def __init__(
        self, weights: Mapping[str, float], tenant_weights: Mapping[str, float], *, by_arrival: bool = False
    ) -> None:
        self._by_arrival = by_arrival
        self._by_adapter = bool(weights) and not by_arrival
        self._by_tenant = bool(tenant_weights) and not by_arrival
        self._shares: Sequence[FairShares] = [
            FairShares(given, name_of)
            for given, name_of in ((weights, adapter_of), (tenant_weights, tenant_of))
            if given and not by_arrival
        ]
        self._groups: dict[_Group, list[tuple[int, int, Need]]] = {}  # heaps by arrival; some have been removed
        self._numbers = itertools.count()
        self._waiting: dict[str, Need] = {}
        self._placed: dict[str, Need] = {}  # requests on a replica, for the fair shares
        self._num_placed = 0  # placements of requests that had not returned
        self._first: Need | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[Need]:
        """The waiting requests, in no particular order."""
        return iter(self._waiting.values())

    def add(self, need: Need) -> None:
        assert need.request_id not in self._waiting and need.request_id not in self._placed, need.request_id
        self._waiting[need.request_id] = need
        for shares in self._shares:
            shares.add(need)
        entry = need.arrival, next(self._numbers), need
        heapq.heappush(self._groups.setdefault(self._group(need), []), entry)
        self._first = None

    @property
    def first(self) -> Need | None:
        """The next request to place; None if none waits."""
        if self._first is None and self._waiting:
            heads = sorted(filter(None, map(self._head, list(self._groups))), key=lambda need: need.arrival)
            if len(heads) == 1 or self._by_arrival:
                self._first = heads[0]
            else:
                self._first = next(entry_order(heads, self._shares, lambda: self._num_placed))
        return self._first

    def place(self, request_id: str) -> None:
        """A request is sent to a replica."""
        need = self._placed[request_id] = self._waiting.pop(request_id)
        self._first = None
        self._num_placed += not need.returned
        self.count_service(request_id, need.blocks)

    def count_service(self, request_id: str, blocks: int) -> None:
        """Count computed blocks of a request on a replica towards the fair shares."""
        if self._shares and blocks > 0:
            for shares in self._shares:
                shares.count_service(self._placed[request_id], blocks)
            self._first = None

    def remove(self, request_id: str) -> None:
        """A request has ended, waiting or on a replica, or is taken from its replica."""
        need = self._waiting.pop(request_id, None) or self._placed.pop(request_id)
        for shares in self._shares:
            shares.remove(need)
        if self._shares or need is self._first:
            self._first = None

    def _group(self, need: Need) -> _Group:
        if self._by_arrival:
            return False, False, 0, None, None
        return (
            need.returned,
            need.answer_by is not None,
            need.priority,
            need.tenant if self._by_tenant else None,
            adapter_of(need) if self._by_adapter else None,
        )

    def _head(self, group: _Group) -> Need | None:
        """The oldest request of a group. Removes entries that no longer wait, and the group with its last entry."""
        heap = self._groups[group]
        while heap:
            need = heap[0][-1]
            if self._waiting.get(need.request_id) is need:
                return need
            heapq.heappop(heap)
        del self._groups[group]
        return None
