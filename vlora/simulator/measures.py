"""The measures of a replay."""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vlora.simulator.arrivals import Arrival, Job
from vlora.types import BatchItem

PERCENTILES = (50, 90, 99)
IDLE_S = math.inf
"""When a replica without work continues."""


class Totals(NamedTuple):
    """The counters of a replica at its end."""

    steps_by_mode: dict[str, int]
    num_switches: int  # of merged weights
    switch_s: float
    num_preemptions: int  # requests that lost their KV to continue others
    num_loads: int
    busy_s: float  # with requests
    batch_s: float  # the sum of busy_s over the requests
    longest_wait_s: float = 0.0  # of admitted requests for their next step; 0 if not simulated
    wait_bound_s: float = 0.0


class Sample(NamedTuple):
    """The unfinished requests at one time, by replica, and the requests that wait in the router."""

    time_s: float
    sizes: Mapping[str, int]
    num_waiting: int


class Measures:
    """Sums over the answered requests. Times are in seconds from a request's arrival.

    Attributes:
        num_refused: Requests too long for the memory.
        num_unreachable: Requests refused because their bound on the first answer could not be met.
        num_late: Requests admitted, but answered after their bound.
        num_reused: Prompt tokens found in a prefix cache.
        longest_wait_s: Of an admitted request for its next step; 0 if it is not simulated.
        wait_bound_s: The maximum of the waiting bound on the same replica.
        rule: Of the router; None for one replica. With a rule, these are measured too:
        num_moves, num_evictions, num_failures, num_resubmitted: Requests moved by the router, requests evicted from
            full memory to another replica, failed replicas, and requests that these had.
        num_recomputed: Tokens of which the KV was computed again for these requests.
        most_waiting: Requests in the router's queue, at most.
        active_s: Seconds with requests, summed over the replicas.
    """

    def __init__(self) -> None:
        self.num_finished = 0
        self.num_tokens = 0
        self.latency_s = 0.0
        self._ttft_s = array("d")
        self._latencies_s = array("d")
        self._tenants: defaultdict[str, _Tenant] = defaultdict(_Tenant)
        self.tenant_shares: Mapping[str, float] = {}
        self._totals: list[Totals] = []
        self.num_refused = 0
        self.num_unreachable = 0
        self.num_late = 0
        self.num_reused = 0
        self._refusal_s = array("d")
        self.num_loads = 0
        self.end_s = 0.0
        self.longest_wait_s = self.wait_bound_s = 0.0
        self.rule: str | None = None
        self.num_moves = self.num_evictions = self.num_failures = self.num_resubmitted = 0
        self.num_recomputed = 0
        self.most_waiting = 0
        self.active_s = 0.0
        self.samples: list[Sample] = []

    def add_answer(self, job: Job, now: float, max_ttft_s: float | None) -> None:
        """Count a request that was answered; max_ttft_s: its bound if the arrival has none."""
        arrival = job.arrival
        ttft_s, latency_s = job.first_s - arrival.time_s, now - arrival.time_s
        bound_s = max_ttft_s if arrival.max_ttft_s is None else arrival.max_ttft_s
        self.num_late += bound_s is not None and ttft_s > bound_s
        self.num_finished += 1
        num_tokens = arrival.prompt_tokens + arrival.answer_tokens
        self.num_tokens += num_tokens
        self.num_reused += job.num_reused
        self.latency_s += latency_s
        self._ttft_s.append(ttft_s)
        self._latencies_s.append(latency_s)
        if arrival.tenant is not None:
            self._tenants[arrival.tenant].answered(num_tokens, latency_s, ttft_s)

    def add_refusal(self, arrival: Arrival, after_s: float) -> None:
        """Count a request that was refused because of its bound, so long after its arrival."""
        self.num_unreachable += 1
        self._refusal_s.append(after_s)
        if arrival.tenant is not None:
            self._tenants[arrival.tenant].num_unreachable += 1

    def close(self, totals: Sequence[Totals], end_s: float, tenant_shares: Mapping[str, float]) -> None:
        worst = max(totals, key=lambda each: each.longest_wait_s)
        self.longest_wait_s, self.wait_bound_s = worst.longest_wait_s, worst.wait_bound_s
        self._totals = list(totals)
        self.end_s = end_s
        self.num_loads = sum(each.num_loads for each in totals)
        self.tenant_shares = tenant_shares

    @property
    def average_token_latency_s(self) -> float:
        """The sum of all requests' latencies over the number of all tokens, of prompts and answers (V-LoRA 6.1)."""
        return self.latency_s / self.num_tokens if self.num_tokens else math.nan

    @property
    def mean_ttft_s(self) -> float:
        """Mean time to the first token of the answered requests."""
        return sum(self._ttft_s) / len(self._ttft_s) if self._ttft_s else math.nan

    def share_within(self, bound_s: float) -> float:
        """The share of all requests, answered or refused, with a first token within a bound (S-LoRA's SLO
        attainment).
        """
        num_requests = self.num_finished + self.num_refused + self.num_unreachable
        return sum(each <= bound_s for each in self._ttft_s) / num_requests if num_requests else math.nan

    def as_dict(self) -> dict[str, Any]:
        steps: Counter[str] = Counter()
        for each in self._totals:
            steps.update(each.steps_by_mode)
        num_steps = sum(steps.values())
        return {
            "requests": self.num_finished,
            "refused": self.num_refused,
            "unreachable": self.num_unreachable,
            "late": self.num_late,
            "tokens": self.num_tokens,
            "simulated_s": self.end_s,
            "requests_per_s": self.num_finished / self.end_s if self.end_s else 0.0,
            "average_token_latency_ms": 1e3 * self.average_token_latency_s if self.num_tokens else None,
            "mean_latency_s": self.latency_s / self.num_finished if self.num_finished else None,
            "latency_s": _percentiles(self._latencies_s),
            "ttft_s": _percentiles(self._ttft_s),
            "longest_wait_s": self.longest_wait_s,
            "wait_bound_s": self.wait_bound_s,
            "refusal_s": _percentiles(self._refusal_s),
            "steps": num_steps,
            "steps_by_mode": {mode: count / num_steps for mode, count in sorted(steps.items())},
            "switches": sum(each.num_switches for each in self._totals),
            "switch_s": sum(each.switch_s for each in self._totals),
            "preemptions": sum(each.num_preemptions for each in self._totals),
            "adapter_loads": self.num_loads,
            "reused_tokens": self.num_reused,
            "routing": self._routing(),
            "tenants": {
                name: each.as_dict(self.tenant_shares.get(name)) for name, each in sorted(self._tenants.items())
            },
        }

    def _routing(self) -> dict[str, Any] | None:
        if self.rule is None:
            return None
        busy_s = sum(each.busy_s for each in self._totals)
        return {
            "rule": self.rule,
            "active_replicas": self.active_s / self.end_s if self.end_s else 0.0,
            "busy_s": busy_s,
            "requests_while_busy": sum(each.batch_s for each in self._totals) / busy_s if busy_s else 0.0,
            "most_waiting": self.most_waiting,
            "moves": self.num_moves,
            "evictions": self.num_evictions,
            "failures": self.num_failures,
            "resubmitted": self.num_resubmitted,
            "recomputed_tokens": self.num_recomputed,
        }


class _Tenant:
    """The same sums over one tenant's requests."""

    def __init__(self) -> None:
        self.num_unreachable = 0
        self._num_tokens = 0
        self._latency_s = 0.0
        self._ttft_s = array("d")

    def answered(self, num_tokens: int, latency_s: float, ttft_s: float) -> None:
        self._num_tokens += num_tokens
        self._latency_s += latency_s
        self._ttft_s.append(ttft_s)

    def as_dict(self, share: float | None) -> dict[str, Any]:
        """share: of the tokens computed under contention; None without contention."""
        num_finished = len(self._ttft_s)
        return {
            "requests": num_finished,
            "unreachable": self.num_unreachable,
            "tokens": self._num_tokens,
            "share": share,
            "mean_latency_s": self._latency_s / num_finished if num_finished else None,
            "ttft_s": _percentiles(self._ttft_s),
        }


def _percentiles(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{share}": percentile(ordered, share) for share in PERCENTILES} if ordered else {}


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest value that at least `percent` of all values do not exceed. NaN for no values."""
    rank = math.ceil(percent / 100 * len(values))
    return sorted(values)[max(rank, 1) - 1] if values else math.nan


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
