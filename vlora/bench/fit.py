"""What steps cost on this machine: the real engine's steps, timed, and the cost model fitted to them."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from vlora.bench.dummy import half_billion_config, language_shapes, write_adapter
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.memory.transfer import Inline
from vlora.models.loading import dummy_model
from vlora.orchestrator import CostModel, Costs, StepSize
from vlora.types import Request, SamplingParams

RANK = 64
_NUM_ADAPTERS = 8
_MAX_STEP_TOKENS = 512
# (requests, prompt tokens of each); all prompts of a line run in one step.
_BATCHES = ((1, 64), (2, 256), (4, 32), (4, 128), (8, 64), (16, 8), (16, 32))


class Sample(NamedTuple):
    """One step: what was in it, and how long it took, merging not included."""

    size: StepSize
    seconds: float


class Fit(NamedTuple):
    """error: median of |predicted / measured - 1| over the samples. load_s: bringing one adapter into memory."""

    costs: Costs
    load_s: float
    error: float
    samples: tuple[Sample, ...]


def fit(decode_steps: int) -> Fit:
    """Time steps of a 0.5 B-parameter model in bfloat16 with adapters of rank 64, one thread, and fit their cost.

    Times are the process's own CPU time: other work on the machine should not look like the model's.

    decode_steps: after each prompt step.
    """
    torch.set_num_threads(1)
    model = dummy_model(half_billion_config(), "bfloat16", torch.device("cpu"), seed=0)
    shapes = language_shapes(model)
    with tempfile.TemporaryDirectory() as folder:
        settings = EngineConfig(
            model="dummy",
            max_batch_size=16,
            max_step_tokens=_MAX_STEP_TOKENS,
            arena_bytes=3 * 2**30,
            merge_fidelity_floor=0.0,
            prefix_cache=False,  # every prompt is to be computed
        )
        engine = LocalEngine(settings, model=model, executor=Inline()).engine
        for i in range(_NUM_ADAPTERS):
            path = write_adapter(Path(folder) / f"a{i}", shapes, RANK, seed=i)
            engine.load_adapter(f"a{i}", path)
        samples: list[Sample] = []
        number = 0

        def steps(adapters: list[str | None], prompt: int, num_decode: int) -> list[Sample]:
            nonlocal number
            ids = [f"r{number + i}" for i in range(len(adapters))]
            number += len(ids)
            sampling = SamplingParams(max_tokens=num_decode + 1, ignore_eos=True)
            for request_id, adapter in zip(ids, adapters, strict=True):
                engine.add(
                    Request(
                        request_id=request_id,
                        prompt_ids=tuple(range(3, 3 + prompt)),
                        adapter=adapter,
                        sampling=sampling,
                    )
                )
            found: list[Sample] = []
            for turn in range(num_decode + 1):
                start = time.process_time()
                engine.step()
                seconds = time.process_time() - start
                each = prompt if turn == 0 else 1
                context = 0 if turn == 0 else prompt + turn - 1
                adapted = [adapter for adapter in adapters if adapter is not None]
                lanes, different = len(adapted), len(set(adapted))
                size = StepSize(len(adapters) * each, lanes * each, lanes, len(adapters) * context, different)
                found.append(Sample(size, seconds))
            return found

        # The first time each is loaded and, being alone, merged; the second time merged only.
        loaded, merged = ([steps([f"a{i}"], 1, 1) for i in range(_NUM_ADAPTERS)] for _ in range(2))
        merge_s = statistics.median(max(0.0, first.seconds - second.seconds) for first, second in merged)
        load_s = statistics.median(
            max(0.0, first.seconds - again.seconds) for (first, _), (again, _) in zip(loaded, merged, strict=True)
        )
        for num_requests, prompt in _BATCHES:
            own: list[str | None] = [f"a{i % _NUM_ADAPTERS}" for i in range(num_requests)]
            shared: list[str | None] = [f"a{i % 2}" for i in range(num_requests)]
            plain: list[str | None] = [None] * num_requests
            for adapters in (plain, own, shared) if num_requests > 1 else (plain,):
                steps(adapters, 1, 1)  # plans and caches as steady work finds them
                prompt_step, *decoding = steps(adapters, prompt, decode_steps)
                samples += [prompt_step, *decoding]
    costs = _fitted(samples, merge_s)
    errors = [abs(costs.step_s(*sample.size) / sample.seconds - 1) for sample in samples]
    return Fit(costs, load_s, statistics.median(errors), tuple(samples))


def _fitted(samples: list[Sample], merge_s: float) -> Costs:
    """The engine's own cost model after it saw every sample a few times, in a random order that is always the same."""
    model = CostModel()
    model.observe_switch(merge_s)
    draws = random.Random(0)
    for _ in range(20):
        for sample in draws.sample(samples, len(samples)):
            model.observe_step(*sample)
    return model.costs
