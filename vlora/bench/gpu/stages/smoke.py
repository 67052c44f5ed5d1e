"""Tiny models in every mode on the device against the CPU, and each Triton kernel once against float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlavaConfig

import atmm
from atmm.formats import FORMATS
from atmm.quantized import QuantizedWeight
from atmm.tuning.search import Case, Shape, error
from vlora.bench.dummy import clip_config, dummy_picture, llava_config, small_served_config
from vlora.bench.gpu.context import Context
from vlora.bench.serve.model_folder import answering_weights
from vlora.bench.timed_engine import FixedModePolicy, Kind, TimedEngine
from vlora.models.loading import dummy_model
from vlora.tune import LARGEST_ERROR
from vlora.types import TokenScore

_ADAPTERS = {"r8": 8, "r16": 16}
"""Ranks by name."""
_ANSWER, _TOP = 6, 5  # tokens of an answer, and most likely tokens of each that are compared
_LARGEST_DIFFERENCE = 2e-3  # of log probabilities in float32, which differ by 1e-4 at most where sums are reordered
_SHAPE = Shape(512, (512, 128, 128))
_SINGLE = "tiled m16 n64 k64 s0 p2"

Scores = dict[str, list[TokenScore]]
"""By request id, the score of each token of the answer."""


_MODES = (
    Kind("unmerged", (None, *_ADAPTERS, "r8"), False),
    Kind("merged", ("r16", "r16"), True),
    Kind("mixed", ("r16", None, "r8", "r16"), True),
)


def run(context: Context) -> dict[str, Any]:
    """Compare the engine on this device with transformers and PEFT."""
    found: dict[str, Any] = {"kernels": {}, "models": {}}
    with torch.inference_mode():
        found["kernels"] = _kernels(context)
    context.keep(found)
    for name, config in (("qwen2_vl", small_served_config()), ("llava", _llava_config())):
        found["models"][name] = _compare_model(context, config)
        context.keep(found)
    largest = max(each["largest difference"] for each in found["models"].values())
    return found | {
        "summary": f"{len(found['kernels'])} kernels; log probabilities differ by at most {largest:.1e} from the CPU's"
    }


def _llava_config() -> LlavaConfig:
    tower = clip_config((64, 128), 3, 4, 28, 64)
    more = {"num_key_value_heads": 2, "max_position_embeddings": 1024}
    return llava_config((512, 500), (128, 352), 3, 4, tower, **more)


def _compare_model(context: Context, config: Any) -> dict[str, Any]:
    """Largest difference between the device and the CPU, by mode, and over all of them."""
    theirs = _answers(config, torch.device("cpu"))
    by_mode = _differences(_answers(config, context.device), theirs)
    if context.on_gpu:
        captured = _answers(config, context.device, cuda_graphs=True)
        by_mode |= {f"{mode}, graphs": found for mode, found in _differences(captured, theirs).items()}
    largest = max(by_mode.values())
    if not largest <= _LARGEST_DIFFERENCE:
        raise ValueError(f"{config.model_type}: log probabilities on {context.device} differ from the CPU's: {by_mode}")
    wanted = theirs["unmerged"]
    effect = min(difference(wanted["0 None"], wanted[f"{place} {name}"]) for place, name in enumerate(_ADAPTERS, 1))
    if effect <= 10 * _LARGEST_DIFFERENCE:
        raise ValueError(
            f"{config.model_type}: adapters change log probabilities by {effect:.1e}, too little to compare"
        )
    return {**by_mode, "largest difference": largest, "effect of adapters": effect}


def _differences(ours: dict[str, Scores], theirs: dict[str, Scores]) -> dict[str, float]:
    """The largest difference of our answers to the others in each mode, and of our answers between the modes."""
    by_mode = {
        mode: max(difference(ours[mode][request], theirs[mode][request]) for request in ours[mode]) for mode in ours
    }
    # One adapter's answers do not depend on the mode, nor on the other requests.
    by_mode["between modes"] = max(
        difference(ours["unmerged"]["2 r16"], ours[mode]["0 r16"]) for mode in ("merged", "mixed")
    )
    return by_mode


def _answers(config: Any, device: torch.device, *, cuda_graphs: bool = False) -> dict[str, Scores]:
    """The scores of every mode's answers, each over one image and a few words.

    Raises RuntimeError if an answer failed, and if cuda_graphs is set and nothing was captured.
    """
    model = dummy_model(config, "float32", torch.device("cpu"), seed=0)
    with torch.no_grad():
        for (_, parameter), (_, drawn) in zip(model.named_parameters(), answering_weights(model, seed=0), strict=True):
            parameter.copy_(drawn)
    policy = FixedModePolicy()
    engine = TimedEngine(
        model.to(device),
        _ADAPTERS,
        parts={"policy": policy},
        arena_bytes=2**27,
        max_step_tokens=64,
        encode_share=1e9,  # all images before the first token, so that all requests run in one batch
        cuda_graphs=cuda_graphs,
    )
    if cuda_graphs and engine.engine.parts.device.runner.graphs is None:
        raise RuntimeError(f"{config.model_type}: decode steps were not captured; the log has the reason")
    torch.manual_seed(0)
    picture = dummy_picture(config, 4)
    found: dict[str, Scores] = {}
    for mode in _MODES:
        policy.merging = mode.merging
        for index, adapter in enumerate(mode.adapters):
            engine.add(range(3, 12), _ANSWER, adapter, [picture], logprobs=_TOP, request_id=f"{index} {adapter}")
        scores: Scores = {}
        while engine.has_work:
            for output in engine.step():
                scores.setdefault(output.request_id, []).extend(output.scores)
        found[mode.name] = scores
    return found


def difference(ours: Sequence[TokenScore], theirs: Sequence[TokenScore]) -> float:
    """The largest difference of log probabilities, up to the first token at which two answers part; infinite for
    values that are not finite.
    """
    largest = 0.0
    for own, wanted in zip(ours, theirs, strict=True):
        found = dict(own.top)
        compared = [abs(found[token] - value) for token, value in wanted.top if token in found]
        best, other = own.top[0], wanted.top[0]
        compared.append(abs(best[1] - other[1]))
        if not all(map(math.isfinite, compared)):
            return math.inf
        largest = max(largest, *compared)
        if best[0] != other[0]:
            break
    return largest


def _kernels(context: Context) -> dict[str, float]:
    """Relative errors by strategy and type. On a GPU these launch every kernel of `atmm.triton`."""
    device = str(context.device)
    strategies = ("loop", "batched", "stacked", "tiled", _SINGLE) if context.on_gpu else ("loop", "batched", "stacked")
    found: dict[str, float] = {}
    for strategy, dtype in itertools.product(strategies, ("float32", "bfloat16")):
        case = Case(_SHAPE, 16, dtype, 3, 12, True)
        found[f"{strategy}, {dtype}"] = checked(strategy, dtype, error(case, strategy, device))
    for dtype in ("float32", "bfloat16"):
        found[f"merge, {dtype}"] = checked("merge", dtype, _merge_error(context, getattr(torch, dtype)))
        # A CPU also rounds its inputs.
        for name, tokens in itertools.product(("int8", "int4"), (1, 40, 300) if context.on_gpu else ()):
            own = _product_error(context, name, tokens, getattr(torch, dtype))
            found[f"{name}, {tokens} tokens, {dtype}"] = checked(name, dtype, own)
    return found


def _product_error(context: Context, name: str, num_tokens: int, dtype: torch.dtype) -> float:
    """Of a product with integers, relative to float64."""
    kind = FORMATS[name]
    weight, x = (torch.randn(*shape, device=context.device) for shape in ((96, 512), (num_tokens, 512)))
    held = QuantizedWeight(*kind.encode(weight), dtype, kind)
    exact = x.to(dtype).double() @ held.float().to(dtype).double().t()
    return float((held.product(x.to(dtype), None).double() - exact).norm() / exact.norm())


def checked(name: str, dtype: str, found: float) -> float:
    if not found <= LARGEST_ERROR[dtype]:
        raise ValueError(f"{name} in {dtype}: relative error {found:.1e} against float64")
    return found


def _merge_error(context: Context, dtype: torch.dtype) -> float:
    """Of the merged weights relative to the largest, of two layers."""
    drawn = (torch.randn(2, *shape, device=context.device) * 0.1 for shape in ((96, 64), (16, 64), (16, 96)))
    base, a, bt = (each.to(dtype) for each in drawn)
    out = torch.full_like(base, float("nan"))
    atmm.merge(out, base, a, bt)
    exact = base.double() + bt.double().transpose(1, 2) @ a.double()
    return float((out.double() - exact).abs().max() / exact.abs().max())
