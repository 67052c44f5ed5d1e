"""The cost of a decode step, against the installed transformers and PEFT on the same shapes, and against its floor.

Every step reads all weights once (about 1 GB in bfloat16 here) and the KV cache of every request, and computes with all
weights for every request. On a CPU the arithmetic of a few requests takes as long as reading the weights. Therefore the
same rounds measure the time to read as many bytes, and the time of as many operations in a large product of torch: the
larger of both is the floor, their sum the time of a step that reads and computes in turn. The baseline is transformers'
own model with sdpa attention and a DynamicCache, which reads the same weights.

All cores and one thread are measured alternately in wall time: run the bench on an otherwise idle machine.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from atmm.processor import multiplies_bfloat16
from vlora.bench.dummy import half_billion_config, language_shapes, random_peft
from vlora.bench.harness import Bench, Measured
from vlora.bench.report import Goal
from vlora.bench.timed_engine import Step, TimedEngine
from vlora.bench.timing import interleaved, median_ms, median_ratio, thread_counts, threads_label
from vlora.config import Quantize
from vlora.models.loading import dummy_model

_DTYPE = "bfloat16"
_CONTEXT, _QUICK_CONTEXT = 256, 64  # tokens; their KV is a small part of a step's bytes, but prompts take minutes
_WARMUP = 5  # rounds not counted; a set of adapters is packed after it has recurred a few times
_MIXED_RANKS = (8, 16, 32, 64)
_READING, _COMPUTING = "reading", "computing"
_FLOOR_GOAL = 1.5  # attention, normalisation, sampling and the decisions of the engine included
_MARGIN = 1.15  # of a ratio to another step over the ratio of their work
_LONGEST = 256  # answer tokens: more than the steps of all its comparisons


def cases(quick: bool, quantize: Quantize = "none") -> dict[str, tuple[bool, Quantize]]:
    return {quantize: (quick, quantize)}


def measure(case: tuple[bool, Quantize]) -> Measured:
    """Decode steps of a 0.5 B-parameter model on all cores and on one thread; quick: fewer rounds, and no baseline that
    takes seconds per step. With quantized weights these are compared with bfloat16 instead.
    """
    quick, quantize = case
    bench = _StepComparison(rounds=11 if quick else 15)
    context = _QUICK_CONTEXT if quick else _CONTEXT
    if quantize != "none":
        return _compare_quantized(bench, quantize, context)
    plain = dummy_model(half_billion_config(vision="none"), _DTYPE, torch.device("cpu"), seed=0)
    work = DecodeWork(plain, language_shapes(plain), context)
    adapters = {f"r{rank}-{i}": rank for rank, count in ((16, 4), (8, 16), (64, 16)) for i in range(count)}
    # One engine each: requests of a shared one would be batched together.
    first = _timed_engine({"r16-0": 16}, context, 2**30, policy="merged_only")
    second = _timed_engine(adapters, context, 6 * 2**30)
    merged = first.begin(["r16-0"] * 16)
    # From large to small batches: the remaining requests already have their context.
    for batch, baseline_goal in ((16, 0.5), (8, None), (4, 0.5), (1, 0.7)):
        first.keep(batch)
        steps = {"merged": merged}
        if baseline_goal is not None and not (quick and batch > 4):
            steps["transformers"] = _transformers_step(plain, batch, context)
        bench.compare(f"merged, batch {batch}", steps, {"merged": work(batch)}, {"transformers": baseline_goal})
        if batch == 4:
            steps = {"unmerged": second.begin([f"r16-{i}" for i in range(4)]), "merged": merged}
            works = {"unmerged": work(4, [16] * 4), "merged": work(4)}
            bench.compare("unmerged, 4 adapters of rank 16 in 4", steps, works)
    for rank in (8, 64):
        merged = first.begin(["r16-0"] * 16)
        steps = {"unmerged": second.begin([f"r{rank}-{i}" for i in range(16)]), "merged": merged}
        works = {"unmerged": work(16, [rank] * 16), "merged": work(16)}
        bench.compare(f"unmerged, 16 adapters of rank {rank} in 16", steps, works)
    if not quick:
        # The last with this model, because PEFT modifies it.
        steps = {
            "unmerged": second.begin([f"r8-{i}" for i in range(16)]),
            "PEFT": _peft_step(plain, 16, 8, context),
        }
        bench.compare("unmerged, 16 adapters of rank 8 in 16", steps, goals={"PEFT": 0.4})
    del plain, first, merged, steps
    gc.collect()  # before two other models
    _compare_mixed_ranks(bench, second, work, context)
    return bench.measured()


def _compare_mixed_ranks(bench: _StepComparison, padded: TimedEngine, work: DecodeWork, context: int) -> None:
    """Decode steps of sixteen adapters of S-LoRA's ranks (its setting S2), against the same number of equal ranks.

    Args:
        padded: An engine with adapters of the largest rank, which cost what the others cost if padded to it.
        work: The work of the steps.
        context: Tokens of each request.
    """
    names = [f"r{rank}-{number}" for number in range(4) for rank in _MIXED_RANKS]
    same, largest = ([f"r{rank}-{number}" for number in range(16)] for rank in (32, 64))
    ranks = dict(zip(names, _MIXED_RANKS * 4, strict=True))
    mixed, equal = (_timed_engine(own, context, 2 * 2**30) for own in (ranks, dict.fromkeys(same, 32)))
    steps = {
        "mixed ranks": mixed.begin(names),
        "all of rank 32": equal.begin(same),
        "padded to rank 64": padded.begin(largest),
    }
    works = {
        "mixed ranks": work(16, _MIXED_RANKS * 4),
        "all of rank 32": work(16, [32] * 16),
        "padded to rank 64": work(16, [64] * 16),
    }
    bench.compare("unmerged, 16 adapters of ranks 8, 16, 32 and 64 in 16", steps, works)


def _compare_quantized(bench: _StepComparison, quantize: Quantize, context: int) -> Measured:
    """Decode steps and a prompt on quantized weights, each against the same in bfloat16.

    A prompt is bound by arithmetic, which int4 does in int8 after it has unpacked the weights. Its gain is in bytes.
    """
    goals: dict[int, float | None] = {16: None, 1: 1 / 2.3} if quantize == "int4" else {16: 1 / 1.7, 1: 1 / 1.7}
    prompt_goal = 1.0 if quantize == "int4" else 1 / 1.5
    plain, quantized = (
        _timed_engine({}, context, 2**30, quantize=kind, quantize_head=kind != "none") for kind in ("none", quantize)
    )
    ours, theirs = quantized.begin([None] * 16), plain.begin([None] * 16)
    for batch in (16, 1):
        quantized.keep(batch)
        plain.keep(batch)
        steps = {quantize: ours, _DTYPE: theirs}
        bench.compare(f"{quantize}, batch {batch}", steps, goals={_DTYPE: goals[batch]})
    quantized.keep(0)
    plain.keep(0)
    prompts = {
        name: functools.partial(engine.prefill, [None], 512)
        for name, engine in ((quantize, quantized), (_DTYPE, plain))
    }
    bench.compare(f"{quantize}, a prompt of 512 tokens", prompts, goals={_DTYPE: prompt_goal})
    own, whole = (engine.engine.parts.device.slabs.num_bytes for engine in (quantized, plain))
    size = Goal("bytes of the linear layers / bfloat16", own / whole, 0.33 if quantize == "int4" else 0.55, True)
    bench.goals.append(size)
    return bench.measured()


BENCH = Bench(name="step", cases=cases, measure=measure, options=frozenset({"quantize"}))


class _StepComparison:
    """Compares steps on all cores and on one thread, and collects the results."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._numbers = thread_counts()
        self.rows: list[dict[str, Any]] = []
        self.goals: list[Goal] = []

    def measured(self) -> Measured:
        return Measured(self.rows, goals=self.goals)

    def compare(
        self,
        name: str,
        steps: Mapping[str, Step],
        works: Mapping[str, StepWork] | None = None,
        goals: Mapping[str, float | None] | None = None,
    ) -> None:
        """Time the first step against its floor and against the others.

        Args:
            works: The work of the first step, if it has a floor. The work of another step is its goal: the first may
                exceed the ratio of both by a small margin.
            goals: Upper bounds of the ratio to each of the others without work.
        """
        first, *others = steps
        works, goals = works or {}, goals or {}
        floor_steps = {_READING: reading(works[first]), _COMPUTING: computing(works[first])} if works else {}
        calls = {
            (what, threads): _with_threads(threads, step)
            for threads in self._numbers
            for what, step in {**steps, **floor_steps}.items()
        }
        keys = {f"{what} {threads}": (what, threads) for what, threads in calls}
        seconds = interleaved(
            {key: calls[pair] for key, pair in keys.items()}, self._rounds, _WARMUP, clock=time.perf_counter
        )
        found = {pair: seconds[key] for key, pair in keys.items()}
        torch.set_num_threads(self._numbers[0])
        for threads in self._numbers:
            own, label = found[first, threads], threads_label(threads)
            times = FloorTimes(works[first], found[_READING, threads], found[_COMPUTING, threads]) if works else None
            if times is not None:
                self._add_row(name, threads, own, "floor", times.floor())
                self._add_row(name, threads, own, "bytes, then operations", times.in_turn())
                ratio = median_ratio(own, times.in_turn())
                self.goals.append(Goal(f"{name} / bytes, then operations, {label}", ratio, _FLOOR_GOAL, True))
            for other in others:
                ratio, goal = median_ratio(own, found[other, threads]), goals.get(other)
                expected = None
                if times is not None and other in works:
                    expected = median_ratio(times.in_turn(), times.in_turn(works[other]))
                    goal = round(_MARGIN * expected, 3)
                self._add_row(name, threads, own, other, found[other, threads], expected)
                if goal is not None:
                    self.goals.append(Goal(f"{name} / {other}, {label}", ratio, goal, True))

    def _add_row(
        self,
        name: str,
        threads: int,
        own: Sequence[float],
        baseline: str,
        theirs: Sequence[float],
        expected: float | None = None,
    ) -> None:
        self.rows.append(
            {
                "step": name,
                "threads": threads,
                "ms": median_ms(own),
                "baseline": baseline,
                "baseline ms": median_ms(theirs),
                "ratio": median_ratio(own, theirs),
                "ratio of work": expected,
            }
        )


def _with_threads(threads: int, step: Step) -> Step:
    def call() -> None:
        torch.set_num_threads(threads)
        step()

    return call


def _timed_engine(adapters: Mapping[str, int], context: int, arena_bytes: int, **settings: Any) -> TimedEngine:
    model = dummy_model(half_billion_config(vision="none"), _DTYPE, torch.device("cpu"), 0)
    fixed = {"policy": "unmerged_only", "max_batch_size": 16, "max_step_tokens": 512, "arena_bytes": arena_bytes}
    return TimedEngine(model, adapters, context=context, longest=_LONGEST, **{**fixed, **settings})


def _filled_cache(config: Any, batch: int, context: int) -> DynamicCache:
    """A cache as after reading the context: attention time does not depend on the values."""
    cache = DynamicCache(config=config)
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    generator = torch.Generator().manual_seed(batch)
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(2, batch, heads, context, width, generator=generator).to(getattr(torch, _DTYPE))
        cache.update(keys, values, layer)
    return cache


def _transformers_step(model: Any, batch: int, context: int, **extra: Any) -> Step:
    cache = _filled_cache(model.config.text_config, batch, context)
    tokens = torch.full((batch, 1), 3)

    @torch.no_grad()
    def step() -> None:
        positions = torch.full((3, batch, 1), cache.get_seq_length())
        logits = model(
            input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1, **extra
        ).logits
        tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))

    return step


def _peft_step(plain: Any, batch: int, rank: int, context: int) -> Step:
    """PEFT's own mixed batch: one adapter per row through `adapter_names`."""
    peft = random_peft(plain, rank, batch)
    return _transformers_step(peft, batch, context, adapter_names=[f"a{i}" for i in range(batch)])


# -- the floor --------------------------------------------------------------------------------------------------------

_SIDE = 2048  # of the product of the operations: large enough for the processor's peak, small enough for its caches


class StepWork(NamedTuple):
    """The least work of a step. operations: a multiplication and an addition are two."""

    num_bytes: int
    operations: int


class DecodeWork:
    """The work of the decode steps of a model in bfloat16, from its shapes.

    Args:
        model: A model of transformers with a language model.
        shapes: (d_out, d_in) of each layer that an adapter changes, by name.
        context: Tokens that each request attends to.
        weight_bytes: Of the layers and the output head, if they are quantized.
    """

    def __init__(
        self, model: Any, shapes: Mapping[str, tuple[int, int]], context: int, weight_bytes: int | None = None
    ) -> None:
        # Layers, and the embedding as the output head, which has its size.
        self._weights = sum(parameter.numel() for parameter in model.model.language_model.parameters())
        self._weight_bytes = weight_bytes or 2 * self._weights
        text = model.config.text_config
        width = text.hidden_size // text.num_attention_heads
        self._kv = 2 * text.num_hidden_layers * text.num_key_value_heads * width * context
        self._attended = 2 * text.num_hidden_layers * text.hidden_size * context  # multiplications, keys and values
        self._per_rank = sum(d_out + d_in for d_out, d_in in shapes.values())

    def __call__(self, batch: int, ranks: Sequence[int] = ()) -> StepWork:
        """The work of a step of `batch` requests, with an unmerged adapter of one request for each of the ranks."""
        adapters = sum(ranks) * self._per_rank
        return StepWork(
            num_bytes=self._weight_bytes + 2 * (batch * self._kv + adapters),
            operations=2 * (batch * (self._weights + self._attended) + adapters),
        )


class FloorTimes(NamedTuple):
    """Measured times of a step's work, for each round of a comparison."""

    work: StepWork  # the work that was measured
    reading: Sequence[float]  # seconds to read as many bytes
    computing: Sequence[float]  # seconds of as many operations

    def floor(self) -> list[float]:
        """Seconds of a step that computes while it reads: the larger of both times."""
        return [max(pair) for pair in zip(self.reading, self.computing, strict=True)]

    def in_turn(self, work: StepWork | None = None) -> list[float]:
        """Seconds of a step that reads and computes in turn, of other work at the same speeds if given."""
        work = work or self.work
        more_bytes, more_operations = (new / measured for new, measured in zip(work, self.work, strict=True))
        return [
            more_bytes * read + more_operations * computed
            for read, computed in zip(self.reading, self.computing, strict=True)
        ]


def reading(work: StepWork) -> Step:
    """Reads the bytes of the work once, as fast as torch can."""
    values = torch.ones(work.num_bytes // 4)

    def step() -> None:
        values.sum()

    return step


def product_dtype() -> torch.dtype:
    """The type that this CPU multiplies fastest, of bfloat16 and float32."""
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


def computing(work: StepWork) -> Step:
    """Does the operations of the work in one large product of torch, in the type that the processor multiplies best."""
    dtype = product_dtype()
    weight = torch.ones(_SIDE, _SIDE, dtype=dtype)
    x = torch.ones(max(1, work.operations // (2 * _SIDE * _SIDE)), _SIDE, dtype=dtype)

    @torch.inference_mode()
    def step() -> None:
        torch.nn.functional.linear(x, weight)

    return step
