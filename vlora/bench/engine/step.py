"""The cost of a decode step, against the installed transformers and PEFT on the same shapes, and against memory
bandwidth.

Decode is memory-bound: every step reads all weights once (about 1 GB in bfloat16 here) and the KV cache of every
request. Therefore its floor is the time to read the same number of bytes, measured in the same rounds. The baseline is
transformers' own model with sdpa attention and a DynamicCache, which reads the same weights.

All cores and one thread are measured alternately in wall time: run the bench on an otherwise idle machine.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

import atmm
from atmm import matmul
from vlora.bench.dummy import half_billion_config, language_shapes, write_adapter
from vlora.bench.engine.timed_engine import Step, TimedEngine
from vlora.bench.report import Goal, Report
from vlora.bench.timing import interleaved, median_ms, median_ratio, thread_counts, threads_label
from vlora.config import EngineConfig, Quantize
from vlora.models.loading import dummy_model

_DTYPE = "bfloat16"
_CONTEXT = 256  # tokens
_WARMUP = 5  # rounds not counted; a set of adapters is packed after it has recurred a few times
_MIXED_RANKS = (8, 16, 32, 64)
_LONGEST = 256  # answer tokens: more than the steps of all its comparisons


def run(quick: bool, quantize: Quantize = "none") -> Report:
    """Decode steps of a 0.5 B-parameter model on all cores and on one thread.

    Args:
        quick: Fewer rounds, and no baseline that takes seconds per step.
        quantize: Compare quantized weights with bfloat16 instead.
    """
    bench = _StepComparison(rounds=3 if quick else 7)
    if quantize != "none":
        return _compare_quantized(bench, quantize)
    plain = dummy_model(half_billion_config(vision="none"), _DTYPE, torch.device("cpu"), seed=0)
    shapes = language_shapes(plain)
    weight_bytes = _weight_bytes(plain)
    with tempfile.TemporaryDirectory() as folder:
        adapters = {
            f"r{rank}-{i}": write_adapter(Path(folder) / f"r{rank}-{i}", shapes, rank, seed=100 * rank + i)
            for rank, count in ((16, 4), (8, 16), (32, 16), (64, 16))
            for i in range(count)
        }
        # One engine each: requests of a shared one would be batched together.
        first = _timed_engine({"r16-0": adapters["r16-0"]}, "merged_only", arena_bytes=2**30)
        second = _timed_engine(adapters, "unmerged_only", arena_bytes=7 * 2**30)
        merged = first.begin(["r16-0"] * 16)
        # From large to small batches: the remaining requests already have their context.
        for batch, floor_goal, baseline_goal in ((16, 2.0, 0.5), (8, 1.5, None), (4, 1.5, 0.5), (1, 1.5, 0.6)):
            first.keep(batch)
            steps = {"merged": merged, "floor": _reading(weight_bytes + batch * _kv_bytes(plain))}
            if baseline_goal is not None and not (quick and batch > 4):
                steps["transformers"] = _transformers_step(plain, batch)
            goals = {"floor": floor_goal, "transformers": baseline_goal}
            bench.compare(f"merged, batch {batch}", steps, goals, scales=True)
            if batch == 4:
                names = [f"r16-{i}" for i in range(4)]
                steps = {"unmerged": second.begin(names), "merged": merged}
                bench.compare("unmerged, 4 adapters of rank 16 in 4", steps, {"merged": 1.15}, scales=True)
        for rank, goal in ((8, 1.2), (64, 1.45)):
            merged = first.begin(["r16-0"] * 16)
            steps = {"unmerged": second.begin([f"r{rank}-{i}" for i in range(16)]), "merged": merged}
            bytes_ratios = {"merged": 1 + 16 * _adapter_bytes(shapes, rank) / weight_bytes}
            name = f"unmerged, 16 adapters of rank {rank} in 16"
            bench.compare(name, steps, {"merged": goal}, scales=True, bytes_ratios=bytes_ratios)
        _compare_mixed_ranks(bench, adapters, second, weight_bytes, _adapter_bytes(shapes, 1))
        if atmm.load_kernels() and not quick:
            with _without_compiled_kernels():
                names = [f"r8-{i}" for i in range(16)]
                steps = {"unmerged, plain": second.begin(names), "merged, plain": merged}
                bench.compare("unmerged, 16 adapters of rank 8 in 16, plain kernels", steps, {}, scales=False)
        if not quick:
            # Last, because PEFT modifies the given model.
            steps = {"unmerged": second.begin([f"r8-{i}" for i in range(16)]), "PEFT": _peft_step(plain, 16, 8)}
            bench.compare("unmerged, 16 adapters of rank 8 in 16", steps, {"PEFT": 0.4}, scales=False)
    return Report("step", bench.rows, bench.goals)


def _compare_mixed_ranks(
    bench: _StepComparison, adapters: Mapping[str, str], padded: TimedEngine, weight_bytes: int, bytes_per_rank: int
) -> None:
    """Decode steps of sixteen adapters of S-LoRA's ranks (its setting S2), against the same number of equal ranks.

    Args:
        adapters: Folders by name, r{rank}-{number}.
        padded: An engine with adapters of the largest rank, which cost what the others cost if padded to it.
        weight_bytes: Bytes that a step without adapters reads.
        bytes_per_rank: Bytes of an adapter of rank 1.
    """
    names = [f"r{rank}-{number}" for number in range(4) for rank in _MIXED_RANKS]
    same, largest = ([f"r{rank}-{number}" for number in range(16)] for rank in (32, 64))
    mixed, equal = (
        _timed_engine({name: adapters[name] for name in chosen}, "unmerged_only", 2 * 2**30) for chosen in (names, same)
    )
    steps = {
        "mixed ranks": mixed.begin(names),
        "all of rank 32": equal.begin(same),
        "padded to rank 64": padded.begin(largest),
    }

    def read_bytes(total_rank: int) -> int:
        return weight_bytes + total_rank * bytes_per_rank

    total = 4 * sum(_MIXED_RANKS)
    bytes_ratios = {
        "all of rank 32": read_bytes(total) / read_bytes(16 * 32),
        "padded to rank 64": read_bytes(total) / read_bytes(16 * 64),
    }
    goals = {"all of rank 32": 1.1, "padded to rank 64": 0.9}
    name = "unmerged, 16 adapters of ranks 8, 16, 32 and 64 in 16"
    bench.compare(name, steps, goals, scales=False, bytes_ratios=bytes_ratios)


def _compare_quantized(bench: _StepComparison, quantize: Quantize) -> Report:
    """Decode steps and a prompt on quantized weights, each against the same in bfloat16.

    A prompt is bound by arithmetic, which int4 does in int8 after it has unpacked the weights. Its gain is in bytes.
    """
    goals: dict[int, float | None] = {16: None, 1: 1 / 2.3} if quantize == "int4" else {16: 1 / 1.7, 1: 1 / 1.7}
    prompt_goal = 1.0 if quantize == "int4" else 1 / 1.5
    plain, quantized = (_timed_engine({}, "unmerged_only", 2**30, kind) for kind in ("none", quantize))
    ours, theirs = quantized.begin([None] * 16), plain.begin([None] * 16)
    for batch in (16, 1):
        quantized.keep(batch)
        plain.keep(batch)
        steps = {quantize: ours, _DTYPE: theirs}
        bench.compare(f"{quantize}, batch {batch}", steps, {_DTYPE: goals[batch]}, scales=False)
    quantized.keep(0)
    plain.keep(0)
    prompts = {
        name: functools.partial(engine.prefill, [None], 512)
        for name, engine in ((quantize, quantized), (_DTYPE, plain))
    }
    bench.compare(f"{quantize}, a prompt of 512 tokens", prompts, {_DTYPE: prompt_goal}, scales=False)
    own, whole = (engine.engine.parts.device.slabs.num_bytes for engine in (quantized, plain))
    size = Goal("bytes of the linear layers / bfloat16", own / whole, 0.33 if quantize == "int4" else 0.55, True)
    return Report("step", bench.rows, [*bench.goals, size])


class _StepComparison:
    """Compares steps on all cores and on one thread, and collects the results."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._numbers = thread_counts()
        self.rows: list[dict[str, Any]] = []
        self.goals: list[Goal] = []

    def compare(
        self,
        name: str,
        steps: Mapping[str, Step],
        goals: Mapping[str, float | None],
        *,
        scales: bool,
        bytes_ratios: Mapping[str, float] | None = None,
    ) -> None:
        """Time the first step against the others.

        Args:
            goals: upper bounds of the ratio to each of the others.
            scales: whether two threads must be faster than one.
            bytes_ratios: bytes that the step reads relative to each other, the ratio of two memory-bound steps.
        """
        calls = {
            (what, threads): _with_threads(threads, step) for threads in self._numbers for what, step in steps.items()
        }
        keys = {f"{what} {threads}": (what, threads) for what, threads in calls}
        seconds = interleaved(
            {key: calls[pair] for key, pair in keys.items()}, self._rounds, _WARMUP, clock=time.perf_counter
        )
        found = {pair: seconds[key] for key, pair in keys.items()}
        torch.set_num_threads(self._numbers[0])
        what, *others = steps
        for threads in self._numbers:
            for other in others:
                ratio = median_ratio(found[what, threads], found[other, threads])
                self.rows.append(
                    {
                        "step": name,
                        "threads": threads,
                        "ms": median_ms(found[what, threads]),
                        "baseline": other,
                        "baseline ms": median_ms(found[other, threads]),
                        "ratio": ratio,
                        "bytes ratio": (bytes_ratios or {}).get(other),
                    }
                )
                goal = goals.get(other)
                if goal is not None:
                    self.goals.append(Goal(f"{name} / {other}, {threads_label(threads)}", ratio, goal, True))
        if scales and self._numbers[0] == 2:
            ratio = median_ratio(found[what, 2], found[what, 1])
            self.goals.append(Goal(f"{name}, two threads / one", ratio, 0.62, True))


def _with_threads(threads: int, step: Step) -> Step:
    def call() -> None:
        torch.set_num_threads(threads)
        step()

    return call


def _reading(num_bytes: int) -> Step:
    """Reads this many bytes once, as fast as torch can."""
    values = torch.ones(num_bytes // 4)

    def step() -> None:
        values.sum()

    return step


@contextmanager
def _without_compiled_kernels() -> Iterator[None]:
    """As on a machine without a compiler."""
    before = os.environ.get("ATMM_COMPILED")
    os.environ["ATMM_COMPILED"] = "0"
    atmm.load_kernels.cache_clear()
    chosen = dict(matmul.measured)
    matmul.measured.clear()  # cached measurements may name the kernels
    matmul.forget_choices()
    try:
        yield
    finally:
        matmul.measured.update(chosen)
        matmul.forget_choices()
        os.environ.pop("ATMM_COMPILED")
        if before is not None:
            os.environ["ATMM_COMPILED"] = before
        atmm.load_kernels.cache_clear()


def _adapter_bytes(shapes: Mapping[str, tuple[int, int]], rank: int) -> int:
    return sum(2 * rank * (d_out + d_in) for d_out, d_in in shapes.values())


def _weight_bytes(model: Any) -> int:
    """Bytes that a decode step reads of a model without adapters: layers, and the embedding as its output head."""
    language = model.model.language_model
    return sum(parameter.numel() * parameter.element_size() for parameter in language.parameters())


def _kv_bytes(model: Any) -> int:
    """KV bytes that a decode step reads for one request of the bench."""
    text = model.config.text_config
    width = text.hidden_size // text.num_attention_heads
    return 2 * 2 * text.num_hidden_layers * text.num_key_value_heads * width * _CONTEXT


def _timed_engine(
    adapters: Mapping[str, str], policy: str, arena_bytes: int, quantize: Quantize = "none"
) -> TimedEngine:
    settings = EngineConfig(
        model="dummy",
        quantize=quantize,
        quantize_head=quantize != "none",
        policy=policy,
        max_batch_size=16,
        max_step_tokens=512,
        arena_bytes=arena_bytes,
        merge_fidelity_floor=0.0,
        prefix_cache=False,  # each request of a batch reads its own KV
    )
    model = dummy_model(half_billion_config(vision="none"), _DTYPE, torch.device("cpu"), 0)
    return TimedEngine(settings, model, adapters, context=_CONTEXT, longest=_LONGEST)


def _filled_cache(config: Any, batch: int) -> DynamicCache:
    """A cache as after reading the context: attention time does not depend on the values."""
    cache = DynamicCache(config=config)
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    generator = torch.Generator().manual_seed(batch)
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(2, batch, heads, _CONTEXT, width, generator=generator).to(getattr(torch, _DTYPE))
        cache.update(keys, values, layer)
    return cache


def _transformers_step(model: Any, batch: int, **extra: Any) -> Step:
    cache = _filled_cache(model.config.text_config, batch)
    tokens = torch.full((batch, 1), 3)

    @torch.no_grad()
    def step() -> None:
        positions = torch.full((3, batch, 1), cache.get_seq_length())
        logits = model(
            input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1, **extra
        ).logits
        tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))

    return step


def _peft_step(plain: Any, batch: int, rank: int) -> Step:
    """PEFT's own mixed batch: one adapter per row through `adapter_names`."""
    targets = sorted({name.rpartition(".")[2] for name in language_shapes(plain)})
    peft = None
    for i in range(batch):
        settings = LoraConfig(r=rank, lora_alpha=rank, target_modules=_language_only(targets), init_lora_weights=False)
        if peft is None:
            peft = get_peft_model(plain, settings, adapter_name=f"a{i}")
        else:
            peft.add_adapter(f"a{i}", settings)
    assert peft is not None
    peft = peft.to(getattr(torch, _DTYPE)).eval()
    return _transformers_step(peft, batch, adapter_names=[f"a{i}" for i in range(batch)])


def _language_only(leaves: Sequence[str]) -> str:
    return rf".*language_model.*\.({'|'.join(leaves)})"
