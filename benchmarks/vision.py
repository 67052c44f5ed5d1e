"""The cost of encoding ten 1,024 x 1,024 pictures for decoding requests, and the total cost of splitting the encoding.

The reference engine encodes in the step: all waiting pictures, whole. Both engines answer the same requests,
alternately; figures are medians over rounds.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, NamedTuple

import torch

from vlora.bench.costs import RecordingCostModel
from vlora.bench.dummy import dummy_picture, half_billion_config, unseen
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.timed_engine import TimedEngine
from vlora.bench.timing import percentile
from vlora.config import EngineConfig
from vlora.models.loading import dummy_model
from vlora.orchestrator import StepSize

_SIDE = 74  # patches per side of a picture of 1,024 pixels, rounded to whole tokens
_TOWER = {"depth": 2, "embed_dim": 384, "num_heads": 6, "mlp_ratio": 4}
_NUM_DECODING = 8
_WORDS = 32
_NUM_PLAIN = 130  # steps without pictures


class _TimedStep(NamedTuple):
    seconds: float
    size: StepSize | None  # None: no tokens


class _DecodeTimes(NamedTuple):
    """Times of decode steps without and with concurrent encoding of pictures."""

    plain: list[float]  # seconds of each step without encoding
    beside: list[float]  # seconds of each step with encoding
    total_s: float  # seconds from the pictures' arrival to the last answer


def measure(quick: bool) -> Measured:
    """The 0.5 B-parameter Qwen2-VL's first layers and a small tower of its family in float32, on all threads."""
    num_pictures, num_layers, answer, num_rounds = (6, 2, 300, 2) if quick else (10, 4, 400, 3)
    config = half_billion_config(num_layers)
    for name, value in _TOWER.items():
        setattr(config.vision_config, name, value)
    engines = {
        "divided": _VisionEngine(config, EngineConfig.encode_share),
        "in the step": _VisionEngine(config, math.inf),
    }
    rounds = [{name: each.run(num_pictures, answer) for name, each in engines.items()} for _ in range(num_rounds)]
    rows: list[dict[str, Any]] = []
    for name in engines:
        plain = [seconds for found in rounds for seconds in found[name].plain]
        beside = [seconds for found in rounds for seconds in found[name].beside]
        rows.append(
            {
                "encoding": name,
                "decode steps": len(plain),
                "p50 ms": 1e3 * statistics.median(plain),
                "p99 ms": 1e3 * percentile(plain, 99),
                "beside pictures": len(beside),
                "p50 ms beside": 1e3 * percentile(beside, 50),
                "p99 ms beside": 1e3 * percentile(beside, 99),
                "all s": statistics.median(found[name].total_s for found in rounds),
            }
        )
    divided = [found["divided"] for found in rounds]
    tails = statistics.median(percentile(found.beside, 99) / percentile(found.plain, 99) for found in divided)
    throughput = statistics.median(found["in the step"].total_s / found["divided"].total_s for found in rounds)
    goals = [
        Goal("p99 of decode steps beside pictures / without", tails, 2.0, True),
        Goal("throughput / encoding in the step", throughput, 0.95, False),
    ]
    found = {"threads": torch.get_num_threads(), "pictures": num_pictures, "rounds": num_rounds}
    return Measured(rows, found, goals)


BENCH = Bench(name="vision", measure=measure)


class _VisionEngine:
    """An engine that times individual steps."""

    def __init__(self, config: Any, encode_share: float) -> None:
        self._config, self._recorded = config, RecordingCostModel()
        settings = EngineConfig(
            model="dummy",
            dtype="float32",
            arena_bytes=2**29,
            max_batch_size=2 * _NUM_DECODING + 4,
            encode_share=encode_share,
            vision_cache_bytes=0,
        )
        built = dummy_model(config, "float32", torch.device("cpu"), seed=0)
        self._engine = TimedEngine(settings, built, cost=self._recorded)

    def run(self, num_pictures: int, answer: int) -> _DecodeTimes:
        """Run decode steps alone, then with the pictures of other requests, until the last answer."""
        picture = dummy_picture(self._config, _SIDE)
        self._engine.add(_WORDS, pictures=[unseen(picture)])
        self._engine.finish()  # the cost per patch is now known
        for _ in range(_NUM_DECODING):
            self._engine.add(_WORDS, answer)
        plain = [step.seconds for step in (self._step() for _ in range(_NUM_PLAIN)) if _decodes(step)][10:]
        started = time.perf_counter()
        for _ in range(num_pictures):
            self._engine.add(_WORDS, pictures=[unseen(picture)])
        beside: list[float] = []
        encoded = self._engine.engine.stats().num_encoded_patches
        while self._engine.has_work:
            step = self._step()
            now = self._engine.engine.stats().num_encoded_patches
            if now > encoded and _decodes(step):
                beside.append(step.seconds)
            encoded = now
        return _DecodeTimes(plain, beside, time.perf_counter() - started)

    def _step(self) -> _TimedStep:
        self._recorded.last_step = None
        return _TimedStep(self._engine.timed_step(), self._recorded.last_step)


def _decodes(step: _TimedStep) -> bool:
    """Whether all tokens of a step belong to decoding requests."""
    return step.size is not None and step.size.num_tokens == _NUM_DECODING
