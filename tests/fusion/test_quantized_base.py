"""A plan with `quantize` trains on the weights that the engine serves in that format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fusion.phases.data_ready import load_frozen_base
from fusion.progress.progress import Progress
from fusion.training.quantized_base import round_base
from tests.families import build_model
from tests.fusion.small import plan_of, write_base
from vlora.config import EngineConfig, Quantize
from vlora.engine.local import LocalEngine
from vlora.errors import BadConfig
from vlora.memory.arena import PAGE_BYTES


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_the_base_has_the_weights_that_are_served(quantize: Quantize) -> None:
    model = build_model("qwen2_vl")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    engine = LocalEngine(
        EngineConfig(model="tiny", quantize=quantize, arena_bytes=256 * PAGE_BYTES), model=build_model("qwen2_vl")
    ).engine
    served = {
        f"{name}.weight": linear.quantized.float()
        for name, linear in engine.parts.device.hf_model.language_linears.items()
        if linear.quantized is not None
    }
    round_base(model, quantize)
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == served.keys()
    for name, weight in served.items():
        torch.testing.assert_close(model.get_parameter(name), weight, rtol=0, atol=0)


def test_a_plan_rounds_its_base(tmp_path: Path) -> None:
    path = write_base(tmp_path)
    plain, rounded = (
        load_frozen_base(plan_of(path, ("a",)).model_copy(update={"quantize": quantize}), "cpu", Progress())
        for quantize in ("none", "int8")
    )
    assert plain.weights != rounded.weights, "a run cannot be resumed with another format"


def test_a_layer_that_the_format_cannot_store_is_named() -> None:
    model = build_model("qwen2_vl")
    model.model.language_model.layers[0].mlp.down_proj = nn.Linear(40, 32)
    message = "quantize int4 needs layers with inputs in multiples of 32; .*mlp.down_proj has 40; set another format"
    with pytest.raises(BadConfig, match=message):
        round_base(model, "int4")
