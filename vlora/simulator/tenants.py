"""The share of service that each tenant received under contention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from vlora.types import BatchItem


class Contest:
    """Tokens computed on one box in the steps in which more than one tenant had unfinished requests.

    Service received without contention does not count towards fairness: at the end every tenant has received what it
    requested. Requests without a tenant compete as one tenant, as in the scheduler.

    Both counts are by tenant: `own` has the tokens of its requests, `everybody` all tokens of the steps in which it had
    unfinished ones.
    """

    def __init__(self) -> None:
        self._tenant_of: dict[str, str | None] = {}
        self._unfinished: Counter[str | None] = Counter()
        self.own: Counter[str | None] = Counter()
        self.everybody: Counter[str | None] = Counter()

    def arrived(self, request_id: str, tenant: str | None) -> None:
        self._tenant_of[request_id] = tenant
        self._unfinished[tenant] += 1

    def ended(self, request_id: str) -> None:
        tenant = self._tenant_of.pop(request_id)
        self._unfinished[tenant] -= 1
        if not self._unfinished[tenant]:
            del self._unfinished[tenant]

    def served(self, items: Sequence[BatchItem]) -> None:
        """Count a step, before the final outputs of the requests that it ends are counted."""
        if len(self._unfinished) < 2:
            return
        for item in items:
            self.own[self._tenant_of[item.request_id]] += item.num_tokens
        total = sum(item.num_tokens for item in items)
        for tenant in self._unfinished:
            self.everybody[tenant] += total


def contested_shares(contests: Iterable[Contest]) -> dict[str, float]:
    """By tenant: its part of all tokens computed while it and another tenant had unfinished requests on the same box.

    Tenants without contention are omitted.
    """
    own: Counter[str | None] = Counter()
    everybody: Counter[str | None] = Counter()
    for contest in contests:
        own.update(contest.own)
        everybody.update(contest.everybody)
    return {tenant: own[tenant] / total for tenant, total in everybody.items() if tenant is not None and total}
