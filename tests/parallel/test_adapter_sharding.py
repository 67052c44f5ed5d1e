"""The ranks' shards of an adapter's factors add up to its delta, for every sharding."""

from __future__ import annotations

import pytest
import torch

from vlora.parallel import ShardPlan, Span
from vlora.parallel.adapter_sharding import Blocks, FactorShape, dense, parts_of, plan_cut
from vlora.parallel.layer_sharding import LinearShard

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
    return [
        ShardPlan(
            rank=rank,
            size=size,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            intermediate_size=INTERMEDIATE,
        ).shard(name, *LAYERS[name])
        for rank in range(size)
    ]


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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "visual.fc1"])
def test_split_factors_give_the_delta_after_exchanging_hidden_values(name: str, size: int) -> None:
    a, b, delta = factors(name, None)
    x = torch.randn(5, LAYERS[name][0], dtype=torch.float64)
    cuts = [plan_cut(RANK, shard, None, "slora") for shard in shards(name, size)]
    pairs = [cut.apply(a, b) for cut in cuts]
    hidden = [x[:, shard.inputs.slice] @ own[0].t() for shard, own in zip(shards(name, size), pairs, strict=True)]
    whole = delta @ x.t()
    for shard, cut, (_, bt) in zip(shards(name, size), cuts, pairs, strict=True):
        if cut.shape.kind == "gathered":
            torch.testing.assert_close((torch.cat(hidden, 1) @ bt).t(), whole[shard.outputs.slice])
        else:
            assert cut.shape.kind == "reduced"
            width = cut.shape.d_out
            own = whole[shard.rank * width : (shard.rank + 1) * width]
            torch.testing.assert_close((torch.stack(hidden).sum(0) @ bt).t(), own)


def test_a_lora_rank_that_the_ranks_do_not_divide_is_replicated() -> None:
    shard = shards("q_proj", 4)[0]
    assert plan_cut(6, shard, None, "slora") == plan_cut(6, shard, None, "replicated")
