"""In which order requests get their turn where nothing else decides: by priority, then by fair share, then as they
came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from vlora.orchestrator.tracked import Tracked


class FairShares:
    """Weighted fairness between adapters: each has a counter of the tokens it was served, over its weight, and the
    adapter with the lowest comes first (virtual token counters, VTC; Y. Sheng et al., OSDI 2024, Algorithm 2).

    Nothing is held back: where only one adapter has requests it gets all there is. An adapter that comes back starts
    at what the least served of the others has by then, so that nobody saves up shares while idle.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """weights: by adapter's name; "*" is for all that are not named, base model included (1 if not given)."""
        self._weights = weights
        self._served: dict[str | None, float] = {}
        self._unfinished: Counter[str | None] = Counter()
        self._least = 0.0  # what whoever comes next starts at, at least

    def arrived(self, adapter: str | None) -> None:
        """Count a request in."""
        name = _name(adapter)
        if not self._unfinished[name]:
            self._move_least()
            self._served[name] = max(self._served.get(name, 0.0), self._least)
        self._unfinished[name] += 1

    def ended(self, adapter: str | None) -> None:
        """Count a request out."""
        name = _name(adapter)
        if self._unfinished[name] == 1:
            self._move_least()
            del self._unfinished[name]
            if self._served[name] <= self._least:
                del self._served[name]  # it would start there anyway
        else:
            self._unfinished[name] -= 1

    def serve(self, adapter: str | None, num_tokens: int) -> None:
        """Put tokens of an unfinished request on its adapter's counter."""
        name = _name(adapter)
        self._served[name] += num_tokens / self._weight(name)

    def starts(self, requests: Sequence[Tracked]) -> list[float]:
        """Where each request's adapter will stand when its turn comes, if its requests before it are served first."""
        by_name: dict[str | None, list[float]] = {}  # where the name stands, and how far a token moves it
        stands: dict[str | None, list[float]] = {}  # the same by adapter: names are not taken apart for each request
        found: list[float] = []
        for t in requests:
            stand = stands.get(t.adapter)
            if stand is None:
                name = _name(t.adapter)
                stand = by_name.setdefault(name, [self._served[name], 1 / self._weight(name)])
                stands[t.adapter] = stand
            found.append(stand[0])
            stand[0] += (t.device_len - t.cached_len) * stand[1]
        return found

    def _weight(self, name: str | None) -> float:
        fallback = self._weights.get("*", 1.0)
        return fallback if name is None else self._weights.get(name, fallback)

    def _move_least(self) -> None:
        if self._unfinished:
            self._least = max(self._least, min(self._served[name] for name in self._unfinished))


def in_turn(requests: Sequence[Tracked], shares: FairShares | None) -> Sequence[Tracked]:
    """The requests by priority, within one by fair share, within one as they come."""
    ranked = any([tracked.priority for tracked in requests])
    if ranked:
        requests = sorted(requests, key=_rank)
    if shares is None:
        return requests
    starts = shares.starts(requests)
    requests = [requests[place] for place in sorted(range(len(starts)), key=starts.__getitem__)]
    return sorted(requests, key=_rank) if ranked else requests


def _rank(tracked: Tracked) -> int:
    return -tracked.priority


def _name(adapter: str | None) -> str | None:
    """Inside the engine an adapter is known as name@version; all versions of a name share."""
    return None if adapter is None else adapter.rpartition("@")[0] or adapter
