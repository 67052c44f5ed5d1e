"""Shard plans: every feature has its rank, and indivisible models are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.families import build_model
from vlora.errors import BadConfig
from vlora.lora.adapter_pool import site_groups
from vlora.lora.weight_slabs import WeightSlabs
from vlora.models.hf_model import HFModel
from vlora.models.sharding import shard
from vlora.parallel import ShardPlan, Span


def plan(rank: int, size: int, heads: int = 8, kv_heads: int = 4, intermediate: int = 48) -> ShardPlan:
    return ShardPlan(
        rank=rank, size=size, num_heads=heads, num_kv_heads=kv_heads, head_dim=3, intermediate_size=intermediate
    )


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_ranks_cover_every_layer_in_order(size: int, kv_heads: int) -> None:
    plans = [plan(rank, size, kv_heads=kv_heads) for rank in range(size)]
    for name, d_in, d_out in (("q_proj", 24, 24), ("gate_proj", 24, 48), ("up_proj", 24, 48)):
        shards = [each.shard(f"layers.0.{name}", d_in, d_out) for each in plans]
        assert [feature for shard in shards for feature in range(*shard.outputs)] == list(range(d_out))
        assert all(shard.inputs == Span(0, d_in) for shard in shards)
    for name, d_in, d_out in (("o_proj", 24, 24), ("down_proj", 48, 24)):
        shards = [each.shard(f"layers.0.{name}", d_in, d_out) for each in plans]
        assert [feature for shard in shards for feature in range(*shard.inputs)] == list(range(d_in))
        assert all(shard.outputs == Span(0, d_out) for shard in shards)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_a_rank_holds_the_kv_heads_its_query_heads_read(size: int, kv_heads: int) -> None:
    for rank in range(size):
        each = plan(rank, size, kv_heads=kv_heads)
        queries = [feature // 3 for feature in range(*each.shard("q_proj", 24, 24).outputs)][::3]
        held = [feature // 3 for feature in range(*each.shard("k_proj", 24, 3 * kv_heads).outputs)][::3]
        assert held == sorted({query * kv_heads // 8 for query in queries})
        # Attention assigns a rank's query heads evenly to its KV heads: this must be the model's own grouping.
        assert [held[i * len(held) // len(queries)] for i in range(len(queries))] == [
            q * kv_heads // 8 for q in queries
        ]
        assert each.kv_heads == len(held)


@pytest.mark.slow
def test_a_rank_joins_its_parts_of_layers_with_one_input() -> None:
    hf_model, whole = (HFModel(build_model("qwen2_vl")) for _ in range(2))
    group: Any = SimpleNamespace(rank=1, size=2, device=torch.device("cpu"))
    shard(hf_model, group)
    layers = hf_model.language_linears
    slabs = WeightSlabs(layers, join=True)
    site_groups(layers)
    x = torch.randn(1, 3, hf_model.hidden_size)
    joined = {name: layer for name, layer in layers.items() if layer.joined is not None}
    assert len(joined) == 5 * hf_model.num_layers
    with torch.inference_mode():
        for name, layer in joined.items():
            wanted = whole.language_linears[name](x)[..., layer.shard.outputs.slice]
            torch.testing.assert_close(layer(x), wanted)
            assert layer.weight.data_ptr() == slabs.entry(name).data_ptr()


def test_other_layers_are_replicated() -> None:
    shard = plan(1, 2).shard("visual.merger.mlp.0", 10, 7)
    assert (shard.inputs, shard.outputs) == (Span(0, 10), Span(0, 7))
    assert not shard.by_columns and not shard.by_rows


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, r"3, which does not divide the model's 8 attention heads; choose one of 1, 2, 4, 8"),
        (8, {"intermediate": 44}, r"does not divide the model's 44 intermediate features; choose one of 1, 2, 4"),
        (4, {"heads": 12, "kv_heads": 3}, r"3 KV heads can neither be divided .* choose one of 1, 3, 6, 12"),
        (16, {}, r"does not divide the model's 8 attention heads"),
    ],
)
def test_an_impossible_number_of_ranks_is_refused(size: int, changes: dict[str, int], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        plan(0, size, **changes)
