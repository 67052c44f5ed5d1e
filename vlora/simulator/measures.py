"""The measures of a replay."""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vlora.errors import DeadlineUnreachable
from vlora.orchestrator import WaitStats
from vlora.types import EngineStats, RequestOutput

PERCENTILES = (50, 90, 99)


class Measures:
    """Sums over the answered requests. Times are in seconds from a request's arrival.

    Attributes:
        num_refused: Requests too long for the memory.
        num_unreachable: Requests refused because their bound on the first answer could not be met.
        num_late: Requests admitted, but answered after their bound.
        longest_wait_s: Of an admitted request for its next step.
        wait_bound_s: The maximum of the waiting bound on the same replica.
        tenant_shares: See `contested_shares`.
    """

    def __init__(self) -> None:
        self.num_finished = 0
        self.num_tokens = 0
        self.latency_s = 0.0
        self._ttft_s = array("d")
        self._tenants: defaultdict[str, _Tenant] = defaultdict(_Tenant)
        self.tenant_shares: Mapping[str, float] = {}
        self._stats: list[EngineStats] = []
        self.num_refused = 0
        self.num_unreachable = 0
        self.num_late = 0
        self._refusal_s = array("d")
        self.num_loads = 0
        self.end_s = 0.0
        self.longest_wait_s = 0.0
        self.wait_bound_s = 0.0

    def add(self, output: RequestOutput, max_ttft_s: float | None, tenant: str | None) -> None:
        """Count a finished output of a request with that bound, of that tenant."""
        timings = output.timings
        assert timings is not None
        if output.error is not None:
            assert output.error.code == DeadlineUnreachable.code
            self.num_unreachable += 1
            self._refusal_s.append(timings.latency_s)
            if tenant is not None:
                self._tenants[tenant].num_unreachable += 1
            return
        assert timings.ttft_s is not None
        self.num_late += max_ttft_s is not None and timings.ttft_s > max_ttft_s
        self.num_finished += 1
        num_tokens = timings.num_prompt_tokens + timings.num_completion_tokens
        self.num_tokens += num_tokens
        self.latency_s += timings.latency_s
        self._ttft_s.append(timings.ttft_s)
        if tenant is not None:
            self._tenants[tenant].answered(num_tokens, timings.latency_s, timings.ttft_s)

    def close(
        self,
        stats: Sequence[EngineStats],
        waits: Sequence[WaitStats],
        end_s: float,
        num_loads: int,
        tenant_shares: Mapping[str, float],
    ) -> None:
        """Add the replicas' counters at the end."""
        worst = max(waits, key=lambda each: each.longest_s)
        self.longest_wait_s, self.wait_bound_s = worst.longest_s, worst.bound_s
        self._stats = list(stats)
        self.end_s = end_s
        self.num_loads = num_loads
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
        for stats in self._stats:
            steps.update(stats.steps_by_mode)
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
            "ttft_s": _percentiles(self._ttft_s),
            "longest_wait_s": self.longest_wait_s,
            "wait_bound_s": self.wait_bound_s,
            "refusal_s": _percentiles(self._refusal_s),
            "steps": num_steps,
            "steps_by_mode": {mode: count / num_steps for mode, count in sorted(steps.items())},
            "switches": sum(stats.num_switches for stats in self._stats),
            "switch_s": sum(stats.switch_s for stats in self._stats),
            "preemptions": sum(stats.num_preemptions for stats in self._stats),
            "adapter_loads": self.num_loads,
            "tenants": {
                name: each.as_dict(self.tenant_shares.get(name)) for name, each in sorted(self._tenants.items())
            },
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
    return {f"p{share}": _percentile(ordered, share) for share in PERCENTILES} if ordered else {}


def _percentile(ordered: Sequence[float], share: int) -> float:
    """The smallest value that `share` percent of the values do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]
