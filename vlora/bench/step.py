"""What a decode step costs, against the installed transformers and PEFT on the same shapes.

Decode is bound by bytes: every step reads all weights once (about 1 GB in bfloat16 here) and the KV cache of every
request. The baseline is transformers' own model with sdpa attention and a DynamicCache, which reads the same weights;
what can be won is the cache handling and the attention over it, and what can be lost is everything the engine does
around the model.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
_WARMUP = 5  # steps not counted; a set of adapters is packed when it has come back a few times
_LONGEST = 64  # tokens of an answer: more than the steps of all its comparisons


def run(quick: bool) -> Report:
    """Decode steps of a 0.5 B-parameter model, one thread. quick: one context and fewer rounds."""
    torch.set_num_threads(1)
    rounds = 3 if quick else 9
    # A model each: the engine changes its own, and the two engines' requests must not meet.
    plain = dummy_model(half_billion_config(vision="none"), _DTYPE, torch.device("cpu"), seed=0)
    shapes = language_shapes(plain)
    found = _Found(rounds)
    with tempfile.TemporaryDirectory() as folder:
        adapters = {
            f"r{rank}-{i}": write_adapter(Path(folder) / f"r{rank}-{i}", shapes, rank, seed=100 * rank + i)
            for rank, count in ((16, 4), (8, 16), (64, 16))
            for i in range(count)
        }
        first = _TimedEngine({"r16-0": adapters["r16-0"]}, arena_bytes=2**30)
        second = _TimedEngine(adapters, arena_bytes=7 * 2**30)  # half of it is for adapters and their packed copies
        for context in (256,) if quick else (1024, 256):
            merged = first.begin(["r16-0"] * 16, context, Mode.MERGED)
            # From many to few: those who are left have their context already.
            for batch, goal in ((16, 0.9), (4, 0.9), (1, 1.05)):
                first.keep(batch)
                name = f"merged / transformers, batch {batch}, context {context}"
                theirs = _transformers_step(plain, batch, context)
                found.compare(name, batch, context, {"merged": merged, "transformers": theirs}, goal)
                if (batch, context) == (4, 256):
                    steps = {"unmerged": second.begin([f"r16-{i}" for i in range(4)], 256), "merged": merged}
                    found.compare("unmerged / merged, 4 adapters of rank 16, batch 4", 4, 256, steps, 1.2)
        # Without adapters; then with as many bytes of adapters as there are of weights.
        none = first.begin([None] * 16, 256, Mode.MERGED)
        floor = 1 + 16 * _adapter_bytes(shapes, 64) / _weight_bytes(plain)
        names = [f"r64-{i}" for i in range(16)]
        for kernels, goal in (("compiled", 1.6), ("plain", 2.1)):
            if kernels == "compiled" and not atmm.load_kernels():
                continue
            with nullcontext() if kernels == "compiled" else _without_compiled_kernels():
                steps = {"unmerged": second.begin(names, 256), "no adapters": none}
                found.compare(
                    f"16 adapters of rank 64 / none, batch 16, {kernels} kernels", 16, 256, steps, goal, floor
                )
        unmerged = second.begin([f"r8-{i}" for i in range(16)], 256)
        floor = 1 + 16 * _adapter_bytes(shapes, 8) / _weight_bytes(plain)
        steps = {"unmerged": unmerged, "no adapters": none}
        found.compare("16 adapters of rank 8 / none, batch 16", 16, 256, steps, 1.25, floor)
        # Last, because PEFT changes the model that it is given.
        steps = {"PEFT mixed batch": _peft_step(plain, 16, 8, 256), "unmerged": unmerged}
        name = "PEFT mixed batch / unmerged, 16 adapters of rank 8"
        found.compare(name, 16, 256, steps, 2.5, at_most=False)
    return Report("step", found.rows, found.goals)


class _Found:
    """What was measured so far."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self.rows: list[dict[str, Any]] = []
        self.goals: list[Goal] = []

    def compare(
        self,
        name: str,
        batch: int,
        context: int,
        steps: Mapping[str, Callable[[], None]],
        goal: float,
        bytes_ratio: float | None = None,
        *,
        at_most: bool = True,
    ) -> None:
        """One step over another, the first of two by name over the second. bytes_ratio: bytes of weights and adapters
        over those of the baseline, the ratio of two steps bound by memory."""
        seconds = interleaved(steps, self._rounds, warmup=_WARMUP)
        what, baseline = steps
        ratio = median_ratio(seconds[what], seconds[baseline])
        self.goals.append(Goal(name, ratio, goal, at_most))
        self.rows.append(
            {
                "what": what,
                "baseline": baseline,
                "batch": batch,
                "context": context,
                "ms": median_ms(seconds[what]),
                "baseline ms": median_ms(seconds[baseline]),
                "ratio": ratio,
                "bytes ratio": bytes_ratio,
            }
        )


@contextmanager
def _without_compiled_kernels() -> Iterator[None]:
    """As on a machine without a compiler."""
    before = os.environ.get("ATMM_COMPILED")
    os.environ["ATMM_COMPILED"] = "0"
    atmm.load_kernels.cache_clear()
    try:
        yield
    finally:
        os.environ.pop("ATMM_COMPILED")
        if before is not None:
            os.environ["ATMM_COMPILED"] = before
        atmm.load_kernels.cache_clear()


def _adapter_bytes(shapes: Mapping[str, tuple[int, int]], rank: int) -> int:
    return sum(2 * rank * (d_out + d_in) for d_out, d_in in shapes.values())


def _weight_bytes(model: Any) -> int:
    """What a decode step reads of a model without adapters: layers, and the embedding as its output head."""
    language = model.model.language_model
    return sum(parameter.numel() * parameter.element_size() for parameter in language.parameters())


class _TimedEngine:
    """An engine with adapters loaded, whose decode steps can be run one at a time."""

    def __init__(self, adapters: Mapping[str, str], arena_bytes: int) -> None:
        settings = EngineConfig(
            model="dummy",
            max_batch_size=16,
            max_step_tokens=2048,
            arena_bytes=arena_bytes,
            merge_fidelity_floor=0.0,
            prefix_cache=False,  # the requests of a batch read KV of their own
        )
        self._engine = LocalEngine(
            settings, model=dummy_model(half_billion_config(vision="none"), _DTYPE, torch.device("cpu"), 0)
        ).engine
        for name, path in adapters.items():
            self._engine.load_adapter(name, path)
        self._ids: list[str] = []
        self._num_begun = 0

    def begin(self, adapters: Sequence[str | None], context: int, mode: Mode = Mode.UNMERGED) -> Callable[[], None]:
        """Prefill one request per adapter to `context` tokens, ending those before. The call returned runs one decode
        step of them, or of those that are kept, in this mode."""
        self.keep(0)
        generator = torch.Generator().manual_seed(0)
        for adapter in adapters:
            prompt = torch.randint(3, 1000, (context,), generator=generator).tolist()
            sampling = SamplingParams(max_tokens=_LONGEST, ignore_eos=True)
            request_id = f"{self._num_begun}"
            self._num_begun += 1
            self._ids.append(request_id)
            self._engine.add(
                Request(request_id=request_id, prompt_ids=tuple(prompt), adapter=adapter, sampling=sampling)
            )
        answered: set[str] = set()
        while len(answered) < len(self._ids):
            answered.update(output.request_id for output in self._engine.step())
        in_another = 0

        def step() -> None:
            nonlocal in_another
            engine = self._engine
            before = engine.stats().steps_by_mode.get(mode.value, 0)
            outputs = engine.step()
            assert len(outputs) == len(self._ids), f"{len(outputs)} of {len(self._ids)} requests were answered"
            # While others are prepared requests wait, and who has waited long is not merged.
            in_another += engine.stats().steps_by_mode.get(mode.value, 0) == before
            assert in_another < _WARMUP, f"{in_another} steps did not run {mode.value}"

        return step

    def keep(self, batch: int) -> None:
        """End all requests but the first ones."""
        for request_id in self._ids[batch:]:
            self._engine.cancel(request_id)
        del self._ids[batch:]


def _filled_cache(config: Any, batch: int, context: int) -> DynamicCache:
    """As if the context had been read: attention takes as long over any values."""
    cache = DynamicCache(config=config)
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    generator = torch.Generator().manual_seed(batch)
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(2, batch, heads, context, width, generator=generator).to(getattr(torch, _DTYPE))
        cache.update(keys, values, layer)
    return cache


def _transformers_step(model: Any, batch: int, context: int, **extra: Any) -> Callable[[], None]:
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
    return _transformers_step(peft, batch, context, adapter_names=[f"a{i}" for i in range(batch)])


def _language_only(leaves: Sequence[str]) -> str:
    return rf".*language_model.*\.({'|'.join(leaves)})"
