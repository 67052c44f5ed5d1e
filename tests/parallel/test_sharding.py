"""Shard plans of layers and adapters: every feature has its rank, parts add up, and differing weights are noticed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.families import build_model
from vlora.errors import BadConfig
from vlora.lora.adapter_pool import site_groups
from vlora.lora.weight_slabs import WeightSlabs
from vlora.models import sharding
from vlora.models.hf_model import HFModel
from vlora.parallel.adapter_sharding import Blocks, FactorShape, dense, parts_of, plan_cut
from vlora.parallel.layer_sharding import LinearShard, ShardPlan, Span


def plan(
    rank: int, size: int, heads: int = 8, kv_heads: int = 4, intermediate: int = 48, head_dim: int = 3
) -> ShardPlan:
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "intermediate_size": intermediate}
    return ShardPlan(rank=rank, size=size, **sizes)


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
    sharding.shard(hf_model, group)
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


HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, HIDDEN = 8, 4, 6, 48, 48
LAYERS = {
    "q_proj": (HIDDEN, HEADS * HEAD_DIM),
    "k_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "gate_proj": (HIDDEN, INTERMEDIATE),
    "o_proj": (HEADS * HEAD_DIM, HIDDEN),
    "down_proj": (INTERMEDIATE, HIDDEN),
    "visual.fc1": (24, 36),
}
RANK = 8


def shards(name: str, size: int) -> list[LinearShard]:
    plans = [plan(rank, size, HEADS, KV_HEADS, INTERMEDIATE, HEAD_DIM) for rank in range(size)]
    return [each.shard(name, *LAYERS[name]) for each in plans]


def factors(name: str, blocks: Blocks | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a and b as on disk, and their delta [d_out, d_in], by PEFT's own rule for block-diagonal factors."""
    d_in, d_out = LAYERS[name]
    generator = torch.Generator().manual_seed(1)
    cut_a = blocks.num if blocks and blocks.side == "a" else 1
    cut_b = blocks.num if blocks and blocks.side == "b" else 1
    a = torch.randn(RANK, d_in // cut_a, generator=generator, dtype=torch.float64)
    b = torch.randn(d_out, RANK // cut_b, generator=generator, dtype=torch.float64)
    return a, b, torch.block_diag(*b.chunk(cut_b)) @ torch.block_diag(*a.chunk(cut_a))


def delta_here(shape: FactorShape, a: torch.Tensor, bt: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(shape.d_out, shape.d_in, dtype=a.dtype)
    for part in parts_of(shape, a, bt):
        out[part.outputs, part.inputs] += part.bt.t() @ part.a
    return out


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "blocks",
    [None, *(Blocks(side, num) for side in ("a", "b") for num in (2, 4, 8))],
    ids=lambda b: str(b and tuple(b)),
)
def test_each_rank_s_factors_are_its_part_of_the_delta(name: str, size: int, blocks: Blocks | None) -> None:
    if blocks and LAYERS[name][blocks.side == "b"] % blocks.num:
        pytest.skip("the layer is not divisible by these blocks")
    a, b, delta = factors(name, blocks)
    shapes = set()
    for shard in shards(name, size):
        cut = plan_cut(RANK, shard, blocks)
        here = cut.apply(a, b)
        shapes.add(cut.shape)
        assert here[0].shape == (cut.shape.rows_a, cut.shape.d_in)
        assert here[1].shape == (cut.shape.rows_bt, cut.shape.d_out)
        expected = delta[shard.outputs.slice, shard.inputs.slice]
        torch.testing.assert_close(delta_here(cut.shape, *here), expected)
        full_a, full_bt = dense(cut.shape, *here)
        torch.testing.assert_close(full_bt.t() @ full_a, expected)
        if cut.densified is None:
            assert (here[0] != 0).all() and (here[1] != 0).all(), "zeros are stored"
    assert len(shapes) == 1, "ranks need different amounts of memory"


@pytest.mark.parametrize(("size", "num", "is_dense"), [(2, 6, False), (4, 6, True), (2, 3, True), (8, 2, False)])
def test_only_ranks_that_cut_through_blocks_store_zeros(size: int, num: int, is_dense: bool) -> None:
    for rank in range(size):
        share = 48 // size
        shard = LinearShard(rank, size, 48, 48, Span(0, 48), Span(rank * share, (rank + 1) * share))
        assert (plan_cut(12, shard, Blocks("b", num)).densified is not None) == is_dense


def test_a_lora_rank_that_the_ranks_do_not_divide_is_replicated() -> None:
    shard = shards("q_proj", 4)[0]
    assert plan_cut(6, shard, None, "slora") == plan_cut(6, shard, None, "replicated")


class Model(nn.Module):
    """A matrix of 131,072 values, a vector, and buffers with one value and none."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter((torch.arange(131_072.0) % 251).view(1024, 128))
        self.vector = nn.Parameter(torch.arange(3.0))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("number", torch.tensor(2.0))


def change_rows(part: int) -> Callable[[Model], object]:
    return lambda model: model.matrix.chunk(8)[part].add_(1)


def change_columns(part: int) -> Callable[[Model], object]:
    return lambda model: model.matrix.t().chunk(8)[part].add_(1)


def change_vector(place: int) -> Callable[[Model], object]:
    return lambda model: model.vector[place].add_(1)


@torch.no_grad()
def test_a_difference_anywhere_is_detected() -> None:
    """In an eighth of a matrix, as if the file of a shard were of another version; vectors are read whole."""
    changes = [*(change(part) for change in (change_rows, change_columns) for part in range(8))]
    changes += [*map(change_vector, range(3)), lambda model: model.to(torch.bfloat16)]
    changes += [lambda model: setattr(model, "number", torch.tensor([2.0]))]  # another shape
    found = {sharding.fingerprint(Model())}
    assert found == {sharding.fingerprint(Model())}
    for change in changes:
        other = Model()
        change(other)
        found.add(sharding.fingerprint(other))
    assert len(found) == 1 + len(changes)
