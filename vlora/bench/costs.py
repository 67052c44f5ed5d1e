"""The costs of a step on this machine, in the format of `vlora simulate --costs`: steps of the real engine are timed, a
cost model is fitted to them, and each timed step is reported next to the fit.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vlora.bench.dummy import BenchModel, dummy_picture, model_named, unseen
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.timed_engine import FixedModePolicy, TimedEngine
from vlora.bench.timing import thread_counts, threads, threads_label, work_seconds
from vlora.config import EngineConfig
from vlora.engine.build import token_thresholds
from vlora.models.loading import device_of, dummy_model
from vlora.orchestrator.cost_model import CostModel, Costs, StepSize, TokenThresholds


def cases(quick: bool, model: str = "qwen2-0.5b", device: str = "cpu") -> dict[str, tuple[bool, str, str, int]]:
    """On a CPU a server's default number of threads, for the reported costs, then one thread."""
    counts = thread_counts() if device == "cpu" else [1]
    return {threads_label(number): (quick, model, device, number) for number in counts}


def measure(case: tuple[bool, str, str, int]) -> Measured:
    quick, model, device, number = case
    with threads(number):
        fitted = measure_costs(quick, model, device)
    rows = [
        {
            "threads": number,
            "tokens": size.num_tokens,
            "lanes": size.lanes,
            "context": size.num_context,
            "patches": round(size.num_patches),
            "ms": 1e3 * seconds,
            "fitted ms": 1e3 * fitted.costs.step_s(size),
        }
        for size, seconds in fitted.samples
    ]
    return Measured(rows, costs_as_dict(fitted, model))


def goals(measured: Measured) -> list[Goal]:
    found: list[Goal] = []
    for number in dict.fromkeys(row["threads"] for row in measured.rows):
        own = [row for row in measured.rows if row["threads"] == number]
        errors = sorted(abs(row["fitted ms"] / row["ms"] - 1) for row in own)
        where = f"of what is fitted over {len(errors)} steps, {threads_label(number)}"
        found += [
            Goal(f"median relative error {where}", statistics.median(errors), 0.05, True),
            Goal(f"90th percentile of the relative error {where}", errors[int(0.9 * len(errors))], 0.3, True),
        ]
    return found


BENCH = Bench(name="costs", cases=cases, measure=measure, goals=goals, options=frozenset({"model", "device"}))


def measure_costs(quick: bool, model: str, device: str) -> Fit:
    return fit(model_named(model), device_of(EngineConfig(model=model, device=device), 0), 1 if quick else 3)


def costs_as_dict(found: Fit, model: str) -> dict[str, Any]:
    """The part of a report that `vlora simulate --costs` reads, and its origin."""
    return {
        "costs": {**found.costs._asdict(), "load_s": found.load_s},
        "fit": {"model": model, "rank": RANK, "median relative error": found.error},
    }


class RecordingCostModel(CostModel):
    """Records the sizes of steps that computed tokens, and the number of encoded patches. Both may be reset."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[StepSize] = []
        self.num_patches = 0.0

    def observe_step(self, size: StepSize, seconds: float) -> None:
        self.sizes.append(size)
        super().observe_step(size, seconds)

    def observe_encoding(self, num_patches: float, seconds: float) -> None:
        self.num_patches += num_patches
        super().observe_encoding(num_patches, seconds)


RANK = 64
_NUM_ADAPTERS = 8
# Requests, and prompt tokens of each; all prompts of a batch run in one step.
_BATCHES = ((1, 64), (2, 256), (4, 32), (4, 128), (8, 64), (16, 8), (16, 32), (32, 8), (32, 16))
_SIDES = (16, 24, 32, 48)  # patches per side of a picture
_RUNS = 2  # of each step; the shortest counts


class StepSample(NamedTuple):
    """One step: its size, and its time without merging."""

    size: StepSize
    seconds: float


class Fit(NamedTuple):
    """Fitted costs, and the samples they are fitted to."""

    costs: Costs  # of a step
    load_s: float  # seconds to load one adapter into memory
    error: float  # median of |predicted / measured - 1| over the samples
    samples: tuple[StepSample, ...]  # the measured steps


def fit(
    model: BenchModel,
    device: torch.device,
    decode_steps: int,
    batches: Sequence[tuple[int, int]] = _BATCHES,
    sides: Sequence[int] = _SIDES,
) -> Fit:
    """Time steps of a model with random weights in bfloat16 and adapters of rank 64, and fit their cost.

    Every kind of step that a policy may choose is included: over W0 and over merged weights without a lane, unmerged
    with distinct and with shared adapters, mixed; prefill, decode, and prefill that joins running decodes.
    """
    timer = _StepTimer(model, device, max(batches)[0])
    names: list[str | None] = list(timer.names)
    # The first run loads and merges each adapter; the second one only merges.
    loaded, merged = ([timer.steps([name], 1, 1, merging=True) for name in names] for _ in range(2))
    merge_s = statistics.median(max(0.0, first.seconds - second.seconds) for first, second in merged)
    load_s = statistics.median(
        max(0.0, first.seconds - again.seconds) for (first, _), (again, _) in zip(loaded, merged, strict=True)
    )
    samples: list[StepSample] = []
    for num_requests, prompt in batches:
        num_others = num_requests // 2
        mixes: tuple[tuple[list[str | None], bool], ...] = (
            ([None] * num_requests, False),
            ([names[0]] * num_requests, True),
            ([names[i % len(names)] for i in range(num_requests)], False),
            ([names[i % 2] for i in range(num_requests)], False),
            ([names[0]] * (num_requests - num_others) + [names[1 + i % 7] for i in range(num_others)], True),
        )
        for adapters, merging in mixes:
            timer.steps(adapters, 1, 1, merging=merging)  # warm up plans and caches
            runs = [timer.steps(adapters, prompt, decode_steps, merging=merging, joining=prompt) for _ in range(_RUNS)]
            samples += shortest(runs)
    timer.steps_with_picture(sides[0])  # warm up plans and caches
    pictures = [
        sample
        for _ in range(decode_steps)
        for side in sides
        for sample in shortest([timer.steps_with_picture(side) for _ in range(_RUNS)])
    ]
    costs = fit_costs(samples, timer.thresholds)._replace(merge_s=merge_s, patch_s=patch_cost(pictures))
    samples += pictures
    errors = [abs(costs.step_s(sample.size) / sample.seconds - 1) for sample in samples]
    return Fit(costs, load_s, statistics.median(errors), tuple(samples))


def shortest(runs: Sequence[Sequence[StepSample]]) -> list[StepSample]:
    """The shortest sample of each step over runs of the same steps: other load and first uses only add time."""
    return [min(samples, key=lambda sample: sample.seconds) for samples in zip(*runs, strict=True)]


def fit_costs(samples: Sequence[StepSample], thresholds: TokenThresholds) -> Costs:
    """Non-negative step costs of least relative error. The absolute error would be dominated by the long prefill
    steps, although a run has many short decode steps for each of them.
    """
    from scipy.optimize import nnls  # only the fit needs it, not the timing of steps

    seconds = np.array([sample.seconds for sample in samples])
    features = np.array([sample.size.features(thresholds) for sample in samples])
    scale = features.max(axis=0)  # near 1, which keeps the problem well conditioned
    scale[scale == 0] = 1
    weights, _ = nnls(features / scale / seconds[:, None], np.ones(len(samples)))
    return Costs._make((*map(float, weights / scale), 0.0, 0.0, 0.0, *thresholds, 0.0))  # none of merging and images


def patch_cost(samples: Sequence[StepSample]) -> float:
    """Seconds per patch of least relative error, from encode-only steps."""
    ratios = [sample.size.num_patches / sample.seconds for sample in samples]
    return sum(ratios) / sum([ratio * ratio for ratio in ratios])


class _StepTimer:
    def __init__(self, model: BenchModel, device: torch.device, max_requests: int) -> None:
        self._config = model.config()
        built = dummy_model(self._config, "bfloat16", device, seed=0)
        self._clock = work_seconds(device)
        self._policy, self._recorded = FixedModePolicy(), RecordingCostModel()
        self.thresholds = token_thresholds(built)
        self.names = [f"a{i}" for i in range(_NUM_ADAPTERS)]
        self._engine = TimedEngine(
            built,
            dict.fromkeys(self.names, RANK),
            parts={"policy": self._policy, "cost": self._recorded},
            max_batch_size=2 * max_requests,  # one more request may join the largest batch
            arena_bytes=model.arena_bytes,
        )

    def steps(
        self, adapters: Sequence[str | None], prompt: int, num_decode: int, *, merging: bool, joining: int = 0
    ) -> list[StepSample]:
        """Run a request for each adapter: one step with their prompts, then decode steps; with `joining`, one
        more prompt of that many tokens, computed in a step of its own with all decoding requests.
        """
        self._policy.merging = merging
        for adapter in adapters:
            self._engine.add(prompt, 1 + num_decode + (joining > 0), adapter)
        self._recorded.sizes.clear()
        seconds = [self._engine.timed_step(self._clock) for _ in range(1 + num_decode)]
        if joining:
            self._engine.add(joining, 1, adapters[-1])
            seconds.append(self._engine.timed_step(self._clock))
        self._engine.finish()  # a GPU's last step, which is recorded after the next launch
        return [StepSample(*sample) for sample in zip(self._recorded.sizes, seconds, strict=True)]

    def steps_with_picture(self, side: int) -> list[StepSample]:
        """Encode a picture of side x side patches: one sample, the sum of the steps it takes."""
        self._engine.add(1, pictures=[unseen(dummy_picture(self._config, side))])
        self._recorded.num_patches, seconds, encoded = 0.0, 0.0, -1.0
        while self._engine.has_work:
            step_s = self._engine.timed_step(self._clock)
            if self._recorded.num_patches == encoded:
                continue  # the prefill step
            encoded = self._recorded.num_patches
            seconds += step_s
        return [StepSample(StepSize(0, (), 0, self._recorded.num_patches), seconds)]
