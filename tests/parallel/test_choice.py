"""Without a configured sharding the cheaper option is selected, by the formulas."""

from __future__ import annotations

import pytest

from vlora.parallel import ShardPlan
from vlora.parallel.choice import Costs, Layer, break_even, choose

HIDDEN, INTERMEDIATE = 64, 128


def layers(size: int, rank: int, num_layers: int = 3) -> list[Layer]:
    plan = ShardPlan(rank=0, size=size, num_heads=8, num_kv_heads=8, head_dim=8, intermediate_size=INTERMEDIATE)
    shapes = {
        "q_proj": (HIDDEN, HIDDEN), "k_proj": (HIDDEN, HIDDEN), "v_proj": (HIDDEN, HIDDEN), "o_proj": (HIDDEN, HIDDEN),
        "gate_proj": (HIDDEN, INTERMEDIATE), "up_proj": (HIDDEN, INTERMEDIATE), "down_proj": (INTERMEDIATE, HIDDEN),
    }  # fmt: skip
    inputs = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "mlp", "up_proj": "mlp"}
    return [
        Layer(rank, plan.shard(name, *shape), f"{number}.{inputs.get(name, name)}")
        for number in range(num_layers)
        for name, shape in shapes.items()
    ]


def test_predictions_are_s_lora_s_formulas() -> None:
    """S-LoRA section 6.2, with the MLP: per layer two gathers, of 3 and 2 shares, and two sums; B tokens, rank r."""
    size, rank, num_tokens = 4, 8, 10
    found = choose(layers(size, rank), 2, Costs(num_tokens, gather_s=1.0, reduce_s=10.0, byte_s=0.0, factor_byte_s=0.0))
    assert found.slora_s == 3 * (2 * 1 + 2 * 10)
    found = choose(layers(size, rank), 2, Costs(num_tokens, gather_s=0.0, reduce_s=0.0, byte_s=1.0, factor_byte_s=0.0))
    assert found.slora_s == 3 * (5 * num_tokens * rank * 2 / size + 2 * num_tokens * rank * 2)
    # Replicated: five A's [r, hidden] and two B's [hidden, r], of which a shard would be 1/N.
    found = choose(layers(size, rank), 2, Costs(num_tokens, gather_s=0.0, reduce_s=0.0, byte_s=0.0, factor_byte_s=1.0))
    assert found.replicated_s == 3 * 7 * rank * HIDDEN * 2 * (size - 1) / size


@pytest.mark.parametrize(("call_s", "way"), [(1e-6, "slora"), (1e-3, "replicated")])
def test_what_talking_costs_decides(call_s: float, way: str) -> None:
    costs = Costs(1, gather_s=call_s, reduce_s=call_s, byte_s=0.0, factor_byte_s=1e-9)
    assert choose(layers(2, 64), 2, costs).way == way


def test_a_higher_rank_tips_the_balance() -> None:
    costs = Costs(1, gather_s=1e-5, reduce_s=1e-5, byte_s=1e-12, factor_byte_s=1e-9)
    ways = [choose(layers(2, rank), 2, costs).way for rank in (2, 16, 64, 256, 1024)]
    assert ways == sorted(ways) and set(ways) == {"replicated", "slora"}


@pytest.mark.parametrize("size", [2, 4])
def test_where_the_balance_tips_is_told(size: int) -> None:
    costs = Costs(8, gather_s=3e-5, reduce_s=5e-5, byte_s=1e-11, factor_byte_s=1e-9)
    found = break_even(lambda rank: layers(size, rank), 2, costs, size)
    assert found is not None and found > 4 * size
    below, above = (size * (int(found / size) + more) for more in (0, 1))
    assert [choose(layers(size, rank), 2, costs).way for rank in (below, above)] == ["replicated", "slora"]
    dear = costs._replace(byte_s=1e-6)
    assert break_even(lambda rank: layers(size, rank), 2, dear, size) is None
    assert choose(layers(size, 4096), 2, dear).way == "replicated"


def test_nothing_to_split_is_replicated() -> None:
    assert choose([], 2, Costs(1, 1.0, 1.0, 1.0, 1.0)) == ("replicated", 0.0, 0.0)
    assert choose(layers(4, 3), 2, Costs(1, 0.0, 0.0, 0.0, 1.0)).way == "slora"  # o and down can still be split
