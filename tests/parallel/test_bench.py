"""`vlora bench tp` on two processes and a model of five million parameters: what it says must follow from what was put
in."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from vlora.bench import tp
from vlora.bench.dummy import language_shapes, small_config, write_adapter
from vlora.bench.tp_rank import Adapter, Cell, Setup, leading
from vlora.config import EngineConfig
from vlora.models.loading import dummy_model

LATENCY_S = 0.005
NUM_LAYERS = 4


def test_injected_latency_is_paid_for_each_collective_and_moves_auto(tmp_path: Path) -> None:
    model_config: Any = small_config()
    model_config.save_pretrained(tmp_path / "model")
    (tmp_path / "meet").mkdir()
    shapes = language_shapes(dummy_model(model_config, "float32", torch.device("meta"), 0))
    dense = write_adapter(tmp_path / "dense", shapes, 16, seed=1)
    blocks = write_adapter(tmp_path / "blocks", shapes, 16, seed=1, num_blocks=2)
    adapters = (None, "replicated-16", "slora-16", "bd-16")
    setup = Setup(
        config=EngineConfig(
            model=str(tmp_path / "model"),
            load_format="dummy",
            dtype="float32",
            tensor_parallel=2,
            threads=1,
            arena_bytes=64 * 2**20,
        ),
        adapters={
            "replicated-16": Adapter(dense, "replicated"),
            "slora-16": Adapter(dense, "slora"),
            "bd-16": Adapter(blocks, "replicated"),
        },
        context=20,
        cells=[Cell("decode", 3, 3, LATENCY_S, adapters, 2), Cell("prefill", 1, 24, LATENCY_S, adapters, 1)],
        ledgers=[((adapter,), 3) for adapter in adapters] + [(("slora-16", None), 3)],
    )
    with leading(setup, str(tmp_path / "meet")) as rank:
        books = rank.keep_books()
        decode, prefill = rank.measure()
        nbytes = rank.adapter_bytes
    for (names, batch), entries in zip(setup.ledgers, books, strict=True):
        said, wanted = tp.said_in(entries), tp.formula(names, batch, 2, NUM_LAYERS, 256, torch.float32, torch.float32)
        assert not tp.unlike(said, wanted) and tp.unlike({**said, ("all_reduce", "slora"): (1, 1)}, wanted)
    for measured in (decode, prefill):
        fastest = {name: min(seconds) for name, seconds in measured.seconds.items()}
        # Two collectives a layer for the base model, four more for split factors.
        assert min(fastest.values()) >= 2 * NUM_LAYERS * LATENCY_S
        assert fastest["slora-16"] >= 6 * NUM_LAYERS * LATENCY_S
        assert measured.chosen["replicated-16"] == "replicated"
    assert statistics.median(decode.seconds["bd-16"]) < statistics.median(decode.seconds["slora-16"])
    assert nbytes["slora-16"] < nbytes["replicated-16"] and nbytes["bd-16"] < nbytes["replicated-16"]


def test_block_diagonal_adapters_have_about_as_many_parameters() -> None:
    shapes = {"q_proj": (64, 64), "gate_proj": (256, 64), "down_proj": (64, 256)}
    for rank in (16, 64, 256):
        found = tp.bd_rank(rank, shapes, 4)
        size = found * (64 / 4 + 64 + 256 / 4 + 64 + 64 + 256 / 4)
        assert found % 4 == 0
        assert abs(size / (rank * (128 + 320 + 320)) - 1) < 0.08
