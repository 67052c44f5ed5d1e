"""What a decode step costs, against the installed transformers and PEFT on the same shapes.

Decode is bound by bytes: every step reads all weights once (about 1 GB in bfloat16 here) and the KV cache of every
request. The baseline is transformers' own model with sdpa attention and a DynamicCache, which reads the same weights;
what can be won is the cache handling and the attention over it, and what can be lost is everything the engine does
around the model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

import atmm
from vlora.bench.dummy import half_billion_config, language_shapes, write_adapter
from vlora.bench.form import Goal, Report
from vlora.bench.timing import interleaved, median_ms, median_ratio
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.models.loading import dummy_model
from vlora.types import Mode, Request, SamplingParams

_DTYPE = "bfloat16"


def run(quick: bool) -> Report:
    """Decode steps of a 0.5 B-parameter model, one thread. quick: one context and fewer rounds."""
    torch.set_num_threads(1)
    rounds = 3 if quick else 9
    cpu = torch.device("cpu")
    # A model each: the engine changes its own, and the two engines' requests must not meet.
    plain = dummy_model(half_billion_config(), _DTYPE, cpu, seed=0)
    shapes = language_shapes(plain)
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory() as folder:
        adapters = {
            f"r{rank}-{i}": write_adapter(Path(folder) / f"r{rank}-{i}", shapes, rank, seed=100 * rank + i)
            for rank, count in ((16, 4), (8, 16), (64, 16))
            for i in range(count)
        }
        first, second = (_TimedEngine(adapters) for _ in range(2))
        for context in (256,) if quick else (256, 1024):
            for batch in (1, 4, 16):
                steps = {
                    "transformers": _transformers_step(plain, batch, context),
                    "merged": first.decode_step(["r16-0"] * batch, context, Mode.MERGED),
                }
                seconds = interleaved(steps, rounds)
                ratio = median_ratio(seconds["merged"], seconds["transformers"])
                rows.append(_row("merged", "transformers", batch, context, seconds, ratio))
                goals.append(
                    Goal(
                        f"merged / transformers, batch {batch}, context {context}",
                        ratio,
                        1.05 if batch == 1 else 0.9,
                        True,
                    )
                )
        for batch, rank, goal in ((4, 16, 1.2), (16, 8, 1.25)):
            names = [f"r{rank}-{i}" for i in range(batch)]
            steps = {
                "merged": first.decode_step([names[0]] * batch, 256, Mode.MERGED),
                "unmerged": second.decode_step(names, 256, Mode.UNMERGED),
            }
            seconds = interleaved(steps, rounds)
            ratio = median_ratio(seconds["unmerged"], seconds["merged"])
            rows.append(_row("unmerged", "merged", batch, 256, seconds, ratio))
            goals.append(Goal(f"unmerged / merged, {batch} adapters of rank {rank}, batch {batch}", ratio, goal, True))
        # Without adapters; then with as many bytes of adapters as there are of weights.
        steps = {
            "merged": first.decode_step([None] * 16, 256, Mode.MERGED),
            "unmerged": second.decode_step([f"r64-{i}" for i in range(16)], 256, Mode.UNMERGED),
        }
        seconds = interleaved(steps, rounds)
        ratio = median_ratio(seconds["unmerged"], seconds["merged"])
        floor = 1 + 16 * _adapter_bytes(shapes, 64) / _weight_bytes(plain)
        rows.append(_row("unmerged", "merged", 16, 256, seconds, ratio, floor))
        kernels = "compiled" if atmm.load_kernels() else "plain"
        goal = 1.6 if kernels == "compiled" else 2.1
        goals.append(Goal(f"16 adapters of rank 64 / none, batch 16, {kernels} kernels", ratio, goal, True))
        mixed = {
            "PEFT mixed batch": _peft_step(plain, 16, 8, 256),
            "unmerged": second.decode_step([f"r8-{i}" for i in range(16)], 256, Mode.UNMERGED),
        }
        seconds = interleaved(mixed, rounds)
        ratio = median_ratio(seconds["PEFT mixed batch"], seconds["unmerged"])
        rows.append(_row("unmerged", "PEFT mixed batch", 16, 256, seconds, 1 / ratio))
        goals.append(Goal("PEFT mixed batch / unmerged, 16 adapters of rank 8", ratio, 2.5, False))
    return Report("step", rows, goals)


def _adapter_bytes(shapes: Mapping[str, tuple[int, int]], rank: int) -> int:
    return sum(2 * rank * (d_out + d_in) for d_out, d_in in shapes.values())


def _weight_bytes(model: Any) -> int:
    """What a decode step reads of a model without adapters: layers, and the embedding as its output head."""
    language = model.model.language_model
    return sum(parameter.numel() * parameter.element_size() for parameter in language.parameters())


def _row(
    what: str,
    baseline: str,
    batch: int,
    context: int,
    seconds: dict[str, list[float]],
    ratio: float,
    bytes_ratio: float | None = None,
) -> dict[str, Any]:
    """bytes_ratio: bytes of weights and adapters over those of the baseline, the ratio of two steps bound by memory."""
    return {
        "what": what,
        "baseline": baseline,
        "batch": batch,
        "context": context,
        "ms": median_ms(seconds[what]),
        "baseline ms": median_ms(seconds[baseline]),
        "ratio": ratio,
        "bytes ratio": bytes_ratio,
    }


class _TimedEngine:
    """An engine with adapters loaded, whose decode steps can be run one at a time."""

    def __init__(self, adapters: Mapping[str, str]) -> None:
        settings = EngineConfig(
            model="dummy",
            max_batch_size=16,
            max_step_tokens=2048,
            arena_bytes=7 * 2**30,
            merge_fidelity_floor=0.0,
            prefix_cache=False,  # the requests of a batch read KV of their own
        )
        self._engine = LocalEngine(
            settings, model=dummy_model(half_billion_config(), _DTYPE, torch.device("cpu"), 0)
        ).engine
        for name, path in adapters.items():
            self._engine.load_adapter(name, path)
        self._ids: list[str] = []

    def decode_step(self, adapters: Sequence[str | None], context: int, mode: Mode) -> Callable[[], None]:
        """Prefill one request per adapter to `context` tokens, ending those before; the call returned runs one decode
        step."""
        engine = self._engine
        for request_id in self._ids:
            engine.cancel(request_id)
        generator = torch.Generator().manual_seed(0)
        self._ids = [f"{adapter}-{place}" for place, adapter in enumerate(adapters)]
        for request_id, adapter in zip(self._ids, adapters, strict=True):
            prompt = torch.randint(3, 1000, (context,), generator=generator).tolist()
            sampling = SamplingParams(max_tokens=64, ignore_eos=True)
            engine.add(Request(request_id=request_id, prompt_ids=tuple(prompt), adapter=adapter, sampling=sampling))
        answered: set[str] = set()
        while len(answered) < len(self._ids):
            answered.update(output.request_id for output in engine.step())

        def step() -> None:
            outputs = engine.step()
            assert len(outputs) == len(self._ids)
            ran = engine.stats().steps_by_mode.get(mode.value, 0)
            assert ran > 0, f"no step ran {mode.value}"

        return step


@torch.no_grad()
def _transformers_step(model: Any, batch: int, context: int) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(batch)
    cache = DynamicCache(config=model.config.text_config)
    prompt = torch.randint(3, 1000, (batch, context), generator=generator)
    state = {"tokens": _next(model, prompt, cache, 0)}

    def step() -> None:
        with torch.no_grad():
            state["tokens"] = _next(model, state["tokens"], cache, cache.get_seq_length())

    return step


def _next(model: Any, ids: torch.Tensor, cache: DynamicCache, start: int, **extra: Any) -> torch.Tensor:
    positions = torch.arange(start, start + ids.shape[1]).expand(3, ids.shape[0], -1)
    logits = model(
        input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1, **extra
    ).logits
    return logits[:, -1].argmax(-1, keepdim=True)


@torch.no_grad()
def _peft_step(plain: Any, batch: int, rank: int, context: int) -> Callable[[], None]:
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
    names = [f"a{i}" for i in range(batch)]
    cache = DynamicCache(config=plain.config.text_config)
    prompt = torch.randint(3, 1000, (batch, context))
    state = {"tokens": _next(peft, prompt, cache, 0, adapter_names=names)}

    def step() -> None:
        with torch.no_grad():
            state["tokens"] = _next(peft, state["tokens"], cache, cache.get_seq_length(), adapter_names=names)

    return step


def _language_only(leaves: Sequence[str]) -> str:
    return rf".*language_model.*\.({'|'.join(leaves)})"
