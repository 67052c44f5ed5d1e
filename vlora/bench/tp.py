"""The cost of an adapter on several ranks by its layout: BD-LoRA's figure 5.

Three adapters with about the same number of parameters: a dense one `replicated` (Punica) or split (`slora`), and a
block-diagonal one (`bd`) of a higher rank. Decode steps of a full batch with one adapter, and a prompt, as in the
paper. On a CPU, two ranks of one thread each, with slower networks emulated by a delay in every collective; on GPUs,
all available ranks over NCCL (not measured yet).

The first two are layouts of one adapter, of which `auto` is the first. A block-diagonal adapter is a different adapter,
trained or converted to this form: the report shows its step next to the replicated one's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vlora.bench.dummy import language_shapes, ranks_config, write_adapter
from vlora.bench.harness import Bench, Measured
from vlora.bench.plots import Plot
from vlora.bench.rank import CellTimes, RankAdapter, RankMemory, RankSetup, StepCell, run_ranks
from vlora.bench.report import Goal, Row
from vlora.bench.timing import median_ms, median_ratio
from vlora.config import EngineConfig
from vlora.errors import BadConfig
from vlora.models.loading import dummy_model
from vlora.parallel.layer_sharding import ROW_PARALLEL

LATENCIES_US = (0, 200, 1000)
_KINDS = ("replicated", "slora", "bd")
_RANKS = (16, 64, 256)
_BATCHES = (1, 64)
_DTYPE = "bfloat16"
_NUM_LAYERS = 4
_CONTEXT, _PROMPT = 64, 256  # tokens
_WITHIN = 1.05  # relative to the faster layout, for `auto`

Shapes = Mapping[str, tuple[int, int]]


def cases(quick: bool, latencies_us: Sequence[int] = ()) -> dict[str, tuple[bool, Sequence[int]]]:
    return {"all": (quick, latencies_us)}


def measure(case: tuple[bool, Sequence[int]]) -> Measured:
    """Compare layouts of adapters on ranks."""
    quick, latencies_us = case
    num_gpus = torch.cuda.device_count()
    on_gpu = num_gpus > 1
    if on_gpu and latencies_us:
        raise BadConfig(
            "latencies can be added between ranks on a CPU only; GPUs are measured without: remove --latency-us"
        )
    size = 2 ** (num_gpus.bit_length() - 1) if on_gpu else 2
    latencies = (0,) if on_gpu else tuple(latencies_us) or (LATENCIES_US[::2] if quick else LATENCIES_US)
    model_config: Any = ranks_config(_NUM_LAYERS)
    whole = dummy_model(model_config, _DTYPE, torch.device("meta"), seed=0)
    shapes, whole_bytes = language_shapes(whole), sum(parameter.nbytes for parameter in whole.parameters())
    with tempfile.TemporaryDirectory() as folder:
        model_config.save_pretrained(f"{folder}/model")
        setup = RankSetup(
            config=EngineConfig(
                model=f"{folder}/model",
                load_format="dummy",
                device="cuda" if on_gpu else "cpu",
                dtype=_DTYPE,
                tensor_parallel=size,
                threads=1,
                max_batch_size=max(_BATCHES),
                arena_bytes=768 * 2**20,
            ),
            adapters=_write_adapters(Path(folder), shapes, size),
            context=_CONTEXT,
            cells=_cells(latencies, quick),
        )
        with run_ranks(setup, f"{folder}/nccl") as rank:
            rows = [row for each in rank.measure() for row in rows_of(each, rank.memory)]
            memory = rank.memory
    found = {
        "model": f"{_NUM_LAYERS} layers of hidden size {model_config.text_config.hidden_size}, {_DTYPE}, {size} ranks",
        "bytes a rank": memory._asdict(),
        "weight bytes of all ranks' model": whole_bytes,
    }
    return Measured(rows, found, goals_of(rows))


def _names() -> list[str | None]:
    return [None, *(f"{kind}-{rank}" for rank in _RANKS for kind in _KINDS)]


def _cells(latencies_us: Sequence[int], quick: bool) -> list[StepCell]:
    cells = []
    for latency in latencies_us:
        for batch in _BATCHES:
            cells.append(StepCell("decode", batch, batch, 1e-6 * latency, tuple(_names()), 5 if quick else 15))
        cells.append(StepCell("prefill", 1, _PROMPT, 1e-6 * latency, tuple(_names()), 3 if quick else 9))
    return cells


def _write_adapters(folder: Path, shapes: Shapes, size: int) -> dict[str, RankAdapter]:
    """Write every kind at every rank; block-diagonal ones at the rank with about the same number of parameters."""
    adapters: dict[str, RankAdapter] = {}
    for rank in _RANKS:
        dense = write_adapter(folder / f"dense-{rank}", shapes, rank, seed=rank)
        adapters[f"replicated-{rank}"] = RankAdapter(dense, "replicated")
        adapters[f"slora-{rank}"] = RankAdapter(dense, "slora")
        blocks = write_adapter(folder / f"bd-{rank}", shapes, bd_rank(rank, shapes, size), rank, num_blocks=size)
        adapters[f"bd-{rank}"] = RankAdapter(blocks, "replicated")
    return adapters


def bd_rank(rank: int, shapes: Shapes, num_blocks: int) -> int:
    """The rank of a block-diagonal adapter with about as many parameters as a dense one of `rank`."""
    dense = sum(d_out + d_in for d_out, d_in in shapes.values())
    blocks = sum(
        d_out + d_in / num_blocks if name.endswith(ROW_PARALLEL) else d_out / num_blocks + d_in
        for name, (d_out, d_in) in shapes.items()
    )
    return num_blocks * round(rank * dense / blocks / num_blocks)


def rows_of(measured: CellTimes, memory: RankMemory) -> list[dict[str, Any]]:
    cell, seconds = measured.cell, measured.seconds
    kv_tokens = cell.batch * (_CONTEXT if cell.phase == "decode" else cell.num_tokens)
    rows = []
    for rank in _RANKS:
        taken = {kind: seconds[f"{kind}-{rank}"] for kind in _KINDS}
        rows.append(
            {
                "phase": cell.phase,
                "batch": cell.batch,
                "tokens": cell.num_tokens,
                "latency us": round(1e6 * cell.latency_s),
                "rank": rank,
                "base ms": median_ms(seconds[None]),
                **{f"{kind} / base": median_ratio(taken[kind], seconds[None]) for kind in _KINDS},
                "slora / replicated": median_ratio(taken["slora"], taken["replicated"]),
                "auto / other": median_ratio(taken["replicated"], taken["slora"]),
                "auto / bd": median_ratio(taken["replicated"], taken["bd"]),
                "MiB a rank: weights": memory.weights / 2**20,
                "KV": memory.kv_of_a_token * kv_tokens / 2**20,
                "adapter, by kind": ", ".join(f"{memory.adapters[f'{kind}-{rank}'] / 2**20:.1f}" for kind in _KINDS),
            }
        )
    return rows


def goals_of(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Limits for `auto`, which replicates, relative to the other layout of the same adapter, by phase and batch: at
    every rank and latency. Below 1 it is faster.
    """
    of = [(row["phase"], row["batch"]) for row in rows]
    return [
        Goal(
            f"auto / other, {phase}, batch {batch}, at worst",
            max(row["auto / other"] for row, key in zip(rows, of, strict=True) if key == (phase, batch)),
            _WITHIN,
            True,
        )
        for phase, batch in dict.fromkeys(of)
    ]


def _fastest(rows: Sequence[Row]) -> list[Row]:
    """With the kinds within 5 % of the fastest."""
    made = []
    for row in rows:
        times = {kind: row[f"{kind} / base"] for kind in _KINDS}
        level = [kind for kind in _KINDS if times[kind] <= _WITHIN * min(times.values())]
        made.append({**row, "step": f"{row['phase']}, batch {row['batch']}", "best": " = ".join(level)})
    return made


_RATIOS = tuple(f"{kind} / base" for kind in _KINDS)

BENCH = Bench(
    name="tp",
    cases=cases,
    measure=measure,
    options=frozenset({"latencies_us"}),
    plots=(
        Plot(file="curves", x="rank", y=_RATIOS, panels=("phase", "batch", "latency us"), log="x"),
        Plot(file="wins", kind="tiles", x="rank", y=("latency us",), by=("best",), panels=("step",), derive=_fastest),
    ),
)
