"""Every policy on a 7B model with pictures, at three shares of the hottest adapter: latency per token, and the longest
wait (V-LoRA's figures 14, 19, 22 and 23 on real shapes). One engine after the other, on the same arrivals.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.arrivals import Clock, steps
from vlora.bench.dummy import dummy_picture, unseen
from vlora.bench.gpu import models
from vlora.bench.gpu.context import Context
from vlora.bench.report import Goal
from vlora.bench.timed_engine import TimedEngine
from vlora.bench.timing import work_seconds
from vlora.config import EngineConfig
from vlora.orchestrator.policies.registry import POLICIES
from vlora.orchestrator.stats import WaitStats
from vlora.simulator.arrivals import Arrival, adapter_name
from vlora.simulator.workloads import Hottest
from vlora.types import VisionInput

OURS, BASELINE = "cost_based", "unmerged_only"
NUM_ADAPTERS, LOAD = 8, 0.9  # of the baseline's measured capacity
SKEWS, NUM_REQUESTS, SIDE = (0.3, 0.6, 0.9), 96, 32
_SMALL_SKEWS, _SMALL_REQUESTS, _SMALL_SIDE = (0.6,), 4, 4
_RESERVE_S = 45.0  # of another engine


class PolicyEngine:
    """An engine under one policy."""

    def __init__(self, context: Context, policy: str, picture: VisionInput) -> None:
        self._clock, self._picture = Clock(work_seconds(context.device)), picture
        self._timed = TimedEngine(
            models.built(context),
            {adapter_name(number): 16 for number in range(NUM_ADAPTERS)},
            parts={"clock": self._clock},
            policy=policy,
            arena_bytes=models.ARENA_BYTES if context.on_gpu else 2**28,
        )

    def run(self, arrivals: Sequence[Arrival]) -> tuple[float, float]:
        """The sum of the requests' latencies over the number of all prompt and answer tokens (V-LoRA section 6.1), in
        ms, and the longest wait of a request relative to the waiting bound."""
        self._timed.engine.parts.scheduler.waits = waits = WaitStats(EngineConfig.max_batch_size)

        def add(number: int) -> None:
            own = arrivals[number]
            words = max(1, own.prompt_tokens - 1 - self._picture.num_tokens)
            self._timed.add(words, own.answer_tokens, own.adapter, [unseen(self._picture)])

        stepped = steps(self._timed, [arrival.time_s for arrival in arrivals], add, self._clock)
        timings = [own.timings for outputs in stepped for own in outputs if own.timings is not None]
        tokens = sum(each.num_prompt_tokens + each.num_completion_tokens for each in timings)
        return 1e3 * sum(each.latency_s for each in timings) / tokens, waits.longest_s / waits.bound_s

    def capacity(self, skew: float, number: int) -> float:
        """Requests per second of full batches, after others that load adapters and train the cost model."""
        self.run(retrieval(skew, self._picture, number, 1e6, 0))
        began_s = self._clock()
        self.run(retrieval(skew, self._picture, number, 1e6, 1))
        return number / (self._clock() - began_s)


def retrieval(skew: float, picture: VisionInput, number: int, rate: float, seed: int) -> list[Arrival]:
    """A picture, a few words, and answers of 12 to 20 tokens. skew: the share of the hottest adapter."""
    prompt = picture.num_tokens + 1
    lengths = {"prompt_min": prompt + 2, "prompt_max": prompt + 8, "answer_min": 12, "answer_max": 20}
    hottest = Hottest(rate=rate, skew=skew, images=1, patches=picture.num_patches, **lengths)
    return list(hottest.arrivals(number, NUM_ADAPTERS, seed))


def run(context: Context) -> dict[str, Any]:
    """The baseline first, whose capacity decides the load, then ours."""
    large = context.on_gpu
    picture = dummy_picture(models.config_of(context), SIDE if large else _SMALL_SIDE)
    number = NUM_REQUESTS if large else _SMALL_REQUESTS
    names = [BASELINE, OURS, *(name for name in POLICIES if name not in (BASELINE, OURS))]
    rates: dict[float, float] = {}
    rows: list[dict[str, Any]] = []
    for name in context.while_time(names if large else names[:2], _RESERVE_S if large else 0.0):
        engine = PolicyEngine(context, name, picture)
        for skew in SKEWS if large else _SMALL_SKEWS:
            if name == BASELINE:
                rates[skew] = LOAD * engine.capacity(skew, number)
            else:
                engine.run(retrieval(skew, picture, number, 1e6, 0))  # loads adapters, trains the cost model
            latency_ms, wait = engine.run(retrieval(skew, picture, number, rates[skew], 1))
            row = {"policy": name, "traffic": f"skew {skew}", "requests/s": rates[skew], "ms": latency_ms, "wait": wait}
            rows.append(row)
            context.keep({"rows": rows})
        del engine
        gc.collect()
        if large:
            torch.cuda.empty_cache()
    goals = goals_of(rows)
    return {
        "summary": "; ".join(f"{goal.name} {goal.value:.2f}" for goal in goals),
        "rows": rows,
        "goals": goals if large else [],
    }


def goals_of(rows: list[dict[str, Any]]) -> list[Goal]:
    """For each kind of traffic, our latency relative to the best other policy that kept the waiting bound."""
    goals = []
    for traffic in dict.fromkeys(row["traffic"] for row in rows):
        ms = {row["policy"]: row["ms"] for row in rows if row["traffic"] == traffic and row["wait"] <= 1}
        others = [value for name, value in ms.items() if name != OURS]
        if others and OURS in ms:
            goals.append(Goal(f"{OURS} / best other, {traffic}", ms[OURS] / min(others), 1.0, True))
    return goals
