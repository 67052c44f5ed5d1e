"""In which order requests get their turn where nothing else decides: by priority, then by fair share, then as they
came."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from vlora.orchestrator.request_state import Tracked


class FairShares:
    """Weighted fairness between those that requests count for: each has a counter of the tokens it was served, over its
    weight, and the one with the lowest comes first (virtual token counters, VTC; Y. Sheng et al., OSDI 2024, Algorithm
    2).

    Nothing is held back: where only one has requests it gets all there is. One that comes back starts at what the least
    served of the others has by then, so that nobody saves up shares while idle.
    """

    def __init__(self, weights: Mapping[str, float], name_of: Callable[[Tracked], str | None]) -> None:
        """name_of: whom a request counts for, such as `adapter_of`. weights: by that name; "*" is for all that are not
        named, None included (1 if not given)."""
        self._name_of = name_of
        self._weights = weights
        self._served: dict[str | None, float] = {}
        self._unfinished: Counter[str | None] = Counter()
        self._least = 0.0  # what whoever comes next starts at, at least

    def arrived(self, tracked: Tracked) -> None:
        """Count a request in."""
        name = self._name_of(tracked)
        if not self._unfinished[name]:
            self._move_least()
            self._served[name] = max(self._served.get(name, 0.0), self._least)
        self._unfinished[name] += 1

    def ended(self, tracked: Tracked) -> None:
        """Count a request out."""
        name = self._name_of(tracked)
        if self._unfinished[name] == 1:
            self._move_least()
            del self._unfinished[name]
            if self._served[name] <= self._least:
                del self._served[name]  # it would start there anyway
        else:
            self._unfinished[name] -= 1

    def serve(self, tracked: Tracked, num_tokens: int) -> None:
        """Count tokens of an unfinished request."""
        name = self._name_of(tracked)
        self._served[name] += num_tokens / self._weight(name)

    def starts(self, requests: Sequence[Tracked]) -> list[float]:
        """Where each one's counter will stand when its turn comes, if those before it of the same name are served
        first."""
        stands: dict[str | None, list[float]] = {}  # where the name stands, and how far a token moves it
        found: list[float] = []
        for t in requests:
            name = self._name_of(t)
            stand = stands.get(name)
            if stand is None:
                stand = stands[name] = [self._served[name], 1 / self._weight(name)]
            found.append(stand[0])
            stand[0] += (t.device_len - t.cached_len) * stand[1]
        return found

    def _weight(self, name: str | None) -> float:
        fallback = self._weights.get("*", 1.0)
        return fallback if name is None else self._weights.get(name, fallback)

    def _move_least(self) -> None:
        if self._unfinished:
            self._least = max(self._least, min(self._served[name] for name in self._unfinished))


def in_turn(requests: Sequence[Tracked], shares: Sequence[FairShares]) -> Sequence[Tracked]:
    """The requests by priority, within one by fair shares, within one as they come.

    shares: the last of them counts first, and the others order what it leaves open.
    """
    ranked = any([tracked.priority for tracked in requests])
    if ranked:
        requests = sorted(requests, key=_rank)
    for each in shares:
        starts = each.starts(requests)
        requests = [requests[place] for place in sorted(range(len(starts)), key=starts.__getitem__)]
    return sorted(requests, key=_rank) if ranked and shares else requests


def tenant_of(tracked: Tracked) -> str | None:
    """On whose behalf a request came."""
    return tracked.tenant


@functools.lru_cache(maxsize=4096)
def _name(adapter: str | None) -> str | None:
    return None if adapter is None else adapter.rpartition("@")[0] or adapter


def adapter_of(tracked: Tracked) -> str | None:
    """The name of a request's adapter. Inside the engine an adapter is known as name@version; all versions of a name
    share."""
    return _name(tracked.adapter)


def _rank(tracked: Tracked) -> int:
    return -tracked.priority
