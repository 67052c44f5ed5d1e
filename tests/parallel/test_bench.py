"""`vlora bench tp` on two processes and a model of five million parameters: the report follows from the input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vlora.bench import tp
from vlora.bench.dummy import language_shapes, small_config, write_adapter
from vlora.bench.tp import RankAdapter, RanksEngine
from vlora.models.loading import dummy_model

LATENCY_S = 0.005
NUM_LAYERS = 4


@pytest.mark.exhaustive
@pytest.mark.slow
def test_injected_latency_is_paid_for_each_collective(tmp_path: Path) -> None:
    model_config: Any = small_config()
    model_config.save_pretrained(tmp_path / "model")
    whole = dummy_model(model_config, "float32", torch.device("meta"), 0)
    shapes = language_shapes(whole)
    dense = write_adapter(tmp_path / "dense", shapes, 16, seed=1)
    blocks = write_adapter(tmp_path / "blocks", shapes, 16, seed=1, num_blocks=2)
    adapters = {
        "replicated-16": RankAdapter(dense, "replicated"),
        "slora-16": RankAdapter(dense, "slora"),
        "bd-16": RankAdapter(blocks, "replicated"),
    }
    engine = RanksEngine(
        str(tmp_path / "model"), adapters, LATENCY_S, size=2, most=3, dtype="float32", arena_bytes=64 * 2**20
    )
    memory = engine.memory()
    for seconds in (engine.decode(3, rounds=2), engine.decode(1, rounds=1), engine.prefill(24, rounds=1)):
        assert set(seconds) == {"base", *adapters}
        fastest = {name: min(taken) for name, taken in seconds.items()}
        # Two collectives per layer for the base model, four more for split factors.
        assert min(fastest.values()) >= 2 * NUM_LAYERS * LATENCY_S
        assert fastest["slora-16"] >= 6 * NUM_LAYERS * LATENCY_S
    engine.close()
    nbytes = memory["adapters"]
    assert nbytes["slora-16"] < nbytes["replicated-16"] and nbytes["bd-16"] < nbytes["replicated-16"]
    linears = {name: module for name, module in whole.named_modules() if name in shapes}
    shared = sum(module.weight.nbytes for module in linears.values())
    biases = sum(module.bias.nbytes for module in linears.values() if module.bias is not None)  # of q, k and v
    assert memory["weights"] == sum(parameter.nbytes for parameter in whole.parameters()) - shared // 2 - biases // 2


def test_rows_compare_auto_with_slora_and_with_block_diagonal() -> None:
    """Half the time of the other kind is 0.5, not 1; blocks are no option for `auto`."""
    seconds = {"base": [1.0, 2.0]}
    for rank in (16, 64, 256):
        seconds |= {f"replicated-{rank}": [2.0, 4.0], f"slora-{rank}": [4.0, 8.0], f"bd-{rank}": [1.6, 3.2]}
    rows = tp.rows_of("decode", 4, 4, 0, seconds)
    assert [row["auto / other"] for row in rows] == [0.5, 0.5, 0.5]
    assert [row["auto / bd"] for row in rows] == pytest.approx([1.25, 1.25, 1.25])
    (goal,) = tp.goals_of(rows)
    assert goal.value == 0.5 and goal.holds


def test_block_diagonal_adapters_have_about_as_many_parameters() -> None:
    shapes = {"q_proj": (64, 64), "gate_proj": (256, 64), "down_proj": (64, 256)}
    for rank in (16, 64, 256):
        found = tp.bd_rank(rank, shapes, 4)
        size = found * (64 / 4 + 64 + 256 / 4 + 64 + 64 + 256 / 4)
        assert found % 4 == 0
        assert abs(size / (rank * (128 + 320 + 320)) - 1) < 0.08
