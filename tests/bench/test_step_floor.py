"""The floor of `vlora bench step`: its work, against torch's count of operations and the sizes of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from vlora.bench.dummy import language_shapes, small_config
from vlora.bench.engine.floor import DecodeWork, FloorTimes, StepWork
from vlora.models.loading import dummy_model

CONTEXT = 64


@pytest.fixture(scope="module")
def model() -> Any:
    plain: Any = dummy_model(small_config(vision="none"), "bfloat16", torch.device("cpu"), seed=0)
    plain.set_attn_implementation("eager")  # products that torch counts
    return plain


def test_operations_are_those_that_torch_counts(model: Any) -> None:
    batch = 3
    cache = DynamicCache(config=model.config.text_config)
    run: dict[str, Any] = {"use_cache": True, "past_key_values": cache, "logits_to_keep": 1}
    with torch.no_grad():
        model(input_ids=torch.full((batch, CONTEXT - 1), 3), **run)
        with FlopCounterMode(display=False) as counted:
            model(input_ids=torch.full((batch, 1), 3), position_ids=torch.full((3, batch, 1), CONTEXT - 1), **run)
    work = DecodeWork(model, language_shapes(model), CONTEXT)(batch)
    # Of weights that are no products, norms and biases, the work counts one operation each: less than 1 %.
    assert work.operations == pytest.approx(counted.get_total_flops(), rel=0.01)


def test_bytes_are_weights_caches_and_adapters(model: Any) -> None:
    shapes, ranks = language_shapes(model), [8, 64]
    cache = DynamicCache(config=model.config.text_config)
    with torch.no_grad():
        model(input_ids=torch.full((1, CONTEXT), 3), use_cache=True, past_key_values=cache)
    layers: list[Any] = cache.layers
    of_one_cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    weights = sum(parameter.nbytes for parameter in model.model.language_model.parameters())
    adapters = sum(2 * rank * (d_out + d_in) for rank in ranks for d_out, d_in in shapes.values())
    work = DecodeWork(model, shapes, CONTEXT)
    assert work(4, ranks).num_bytes == weights + 4 * of_one_cache + adapters
    assert work(4, ranks).operations - work(4).operations == adapters  # two bytes and two operations per weight


def test_floor_of_other_work_is_at_the_same_speeds() -> None:
    times = FloorTimes(StepWork(100, 1000), reading=[1.0, 4.0], computing=[2.0, 3.0])
    assert times.floor() == [2.0, 4.0]
    assert times.in_turn() == [3.0, 7.0]
    assert times.in_turn(StepWork(200, 500)) == [3.0, 9.5]
