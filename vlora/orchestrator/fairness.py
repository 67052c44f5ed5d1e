"""Scheduling order: by priority, then fair share, then arrival."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar


class Queued(Protocol):
    """A request in the scheduler's queue or in the router's."""

    @property
    def request_id(self) -> str: ...
    @property
    def adapter(self) -> str | None: ...
    @property
    def tenant(self) -> str | None: ...
    @property
    def priority(self) -> int: ...
    @property
    def arrival(self) -> int: ...
    @property
    def answer_by(self) -> float | None: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def new_tokens(self) -> int: ...


Q = TypeVar("Q", bound=Queued)


class FairShares:
    """Weighted fairness between names, such as adapters or tenants.

    Each name has a counter of tokens served, divided by its weight. The name with the lowest counter comes first
    (virtual token counters, VTC; Y. Sheng et al., OSDI 2024, Algorithm 2). The policy is work-conserving: a name
    without competition gets the full capacity. A name that returns after idling starts at the lowest counter of the
    others, so idle time earns no credit.
    """

    def __init__(self, weights: Mapping[str, float], name_of: Callable[[Queued], str | None]) -> None:
        """Start without counters.

        Args:
            weights: weight by name. "*" is the weight of all names that are not listed, None included (default 1).
            name_of: the name that a request counts for, such as `adapter_of`.
        """
        self._name_of = name_of
        self._weights = weights
        self._served: dict[str | None, float] = {}
        self._unfinished: Counter[str | None] = Counter()
        self._least = 0.0  # lower bound for the counter of the next arriving name

    def add(self, tracked: Queued) -> None:
        name = self._name_of(tracked)
        if not self._unfinished[name]:
            self._move_least()
            if name not in self._served:  # compositions have any number of names: drop those that would restart
                self._served = {
                    other: served
                    for other, served in self._served.items()
                    if served > self._least or self._unfinished[other]
                }
            self._served[name] = max(self._served.get(name, 0.0), self._least)
        self._unfinished[name] += 1

    def remove(self, tracked: Queued) -> None:
        name = self._name_of(tracked)
        if self._unfinished[name] == 1:
            self._move_least()
            del self._unfinished[name]
            if self._served[name] <= self._least:
                del self._served[name]  # it would restart at the same value
        else:
            self._unfinished[name] -= 1

    def count_service(self, tracked: Queued, num_tokens: int) -> None:
        name = self._name_of(tracked)
        self._served[name] += num_tokens / self._weight(name)

    def starts(self, requests: Sequence[Queued]) -> list[float]:
        """The counter of each request's name when its turn comes, if earlier requests of the name are served first."""
        stands: dict[str | None, list[float]] = {}  # by name: counter, and its increase per token
        found: list[float] = []
        for t in requests:
            name = self._name_of(t)
            stand = stands.get(name)
            if stand is None:
                stand = stands[name] = [self._served[name], 1 / self._weight(name)]
            found.append(stand[0])
            stand[0] += t.new_tokens * stand[1]
        return found

    def _weight(self, name: str | None) -> float:
        fallback = self._weights.get("*", 1.0)
        return fallback if name is None else self._weights.get(name, fallback)

    def _move_least(self) -> None:
        if self._unfinished:
            self._least = max(self._least, min(self._served[name] for name in self._unfinished))


def scheduling_order(requests: Sequence[Q], shares: Sequence[FairShares]) -> Sequence[Q]:
    """The requests ordered by priority, then fair shares, then their given order.

    Args:
        shares: the last takes precedence; earlier ones break its ties.
    """
    ranked = any([tracked.priority for tracked in requests])
    if ranked:
        requests = sorted(requests, key=lambda t: -t.priority)
    for each in shares:
        starts = each.starts(requests)
        requests = [requests[place] for place in sorted(range(len(starts)), key=starts.__getitem__)]
    return sorted(requests, key=lambda t: -t.priority) if ranked and shares else requests


def tenant_of(tracked: Queued) -> str | None:
    return tracked.tenant


@functools.lru_cache(maxsize=4096)
def _name(adapter: str | None) -> str | None:
    return None if adapter is None else adapter.rpartition("@")[0] or adapter


def adapter_of(tracked: Queued) -> str | None:
    """The adapter name of a request.

    The engine identifies an adapter as name@version; all versions of a name share one counter.
    """
    return _name(tracked.adapter)
