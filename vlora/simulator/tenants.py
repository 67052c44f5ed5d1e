"""The share of service that each tenant received under contention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from vlora.types import BatchItem


class TenantContention:
    """Tokens computed on one replica in the steps in which more than one tenant had unfinished requests.

    Service received without contention does not count towards fairness: at the end every tenant has received what it
    requested. Requests without a tenant compete as one tenant, as in the scheduler.

    Attributes:
        own: by tenant, the tokens of its requests.
        total_tokens: by tenant, all tokens of the steps in which it had unfinished requests.
    """

    def __init__(self) -> None:
        self._tenant_of: dict[str, str | None] = {}
        self._unfinished: Counter[str | None] = Counter()
        self.own: Counter[str | None] = Counter()
        self.total_tokens: Counter[str | None] = Counter()

    def add(self, request_id: str, tenant: str | None) -> None:
        self._tenant_of[request_id] = tenant
        self._unfinished[tenant] += 1

    def remove(self, request_id: str) -> None:
        tenant = self._tenant_of.pop(request_id)
        self._unfinished[tenant] -= 1
        if not self._unfinished[tenant]:
            del self._unfinished[tenant]

    def record_step(self, items: Sequence[BatchItem]) -> None:
        """Count a step, before the final outputs of the requests that it ends are counted."""
        if len(self._unfinished) < 2:
            return
        for item in items:
            self.own[self._tenant_of[item.request_id]] += item.num_tokens
        total = sum(item.num_tokens for item in items)
        for tenant in self._unfinished:
            self.total_tokens[tenant] += total


def contested_shares(replicas: Iterable[TenantContention]) -> dict[str, float]:
    """By tenant: its part of all tokens computed while another tenant had unfinished requests on the same replica too.

    Tenants without contention are omitted.
    """
    own: Counter[str | None] = Counter()
    total_tokens: Counter[str | None] = Counter()
    for replica in replicas:
        own.update(replica.own)
        total_tokens.update(replica.total_tokens)
    return {tenant: own[tenant] / total for tenant, total in total_tokens.items() if tenant is not None and total}
