"""The cost of an adapter on several ranks by its layout: BD-LoRA's figure 5.

Three adapters with about the same number of parameters: a dense one `replicated` (Punica) or split (`slora`), and a
block-diagonal one (`bd`) of a higher rank. Decode steps of a full batch with one adapter, and a prompt, as in the
paper. On a CPU, two ranks of one thread each, with slower networks emulated by a delay in every collective; on GPUs,
all available ranks over NCCL (not measured yet).

The first two are layouts of one adapter, of which `auto` is the first. A block-diagonal adapter is a different adapter,
trained or converted to this form: the report shows its step next to the replicated one's.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from atmm.shrink_expand import hidden_dtype
from vlora.bench.dummy import language_shapes, ranks_config, write_adapter
from vlora.bench.harness import Bench, Measured
from vlora.bench.plots import Plot
from vlora.bench.rank import CellTimes, Ledger, RankAdapter, RankMemory, RankSetup, StepCell, run_ranks
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
Totals = Mapping[tuple[str, str], tuple[int, int]]
"""Calls and bytes of a step's collectives, by kind and cause."""


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
            ledgers=[((name,), 8) for name in _names()] + [(("slora-16", "slora-64", "slora-256", None), 8)],
        )
        with run_ranks(setup, f"{folder}/nccl") as rank:
            ledgers = rank.record_collectives()
            measured = list(rank.measure())
            memory = rank.memory
    rows = [row for each in measured for row in rows_of(each, memory)]
    hidden, dtype = model_config.text_config.hidden_size, getattr(torch, _DTYPE)
    totals = [
        (adapters, batch, collective_totals(entries))
        for (adapters, batch), entries in zip(setup.ledgers, ledgers, strict=True)
    ]
    wrong = []
    for adapters, batch, found_totals in totals:
        travels = hidden_dtype(batch, rank.device, dtype)
        wanted = formula(adapters, batch, size, _NUM_LAYERS, hidden, dtype, travels)
        if differs(found_totals, wanted):
            wrong.append({"adapters": list(adapters), "said": str(found_totals), "formula": str(wanted)})
    goals = [Goal("kinds whose collectives are not what the formulas say", len(wrong), 0, True), *goals_of(rows)]
    found = {
        "model": f"{_NUM_LAYERS} layers of hidden size {hidden}, {_DTYPE}, {size} ranks",
        "bytes a rank": memory._asdict(),
        "weight bytes of all ranks' model": whole_bytes,
        "unlike the formulas": wrong,
        "ledger": [
            {"adapters": list(adapters), "batch": batch, "said": {" ".join(k): v for k, v in own.items()}}
            for adapters, batch, own in totals
        ],
    }
    return Measured(rows, found, goals)


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


def collective_totals(entries: Ledger) -> Totals:
    """Calls and bytes of a step, by kind of collective and cause."""
    return {(kind, cause): (entry.calls, entry.num_bytes) for (kind, cause), entry in entries.items()}


def formula(
    adapters: Sequence[str | None],
    batch: int,
    size: int,
    num_layers: int,
    hidden: int,
    dtype: torch.dtype,
    travels: torch.dtype,
) -> Totals:
    """Expected collectives in the forward of a step.

    The base model: two all-reduces per layer. Replicated and block-diagonal adapters: none in addition. S-LoRA's: two
    gathers (of five layers' products) and two all-reduces per layer, for any number of adapters (section 6.2).
    """
    values = sum(
        int(name.rpartition("-")[2])
        for name in itertools.islice(itertools.cycle(adapters), batch)
        if name is not None and name.startswith("slora")
    )
    calls = 2 * num_layers
    totals = {("all_reduce", "base"): (calls, calls * batch * hidden * dtype.itemsize)}
    itemsize = travels.itemsize
    if values:
        totals["all_gather", "slora"] = (calls, num_layers * 5 * values * itemsize // size)
        totals["all_reduce", "slora"] = (calls, num_layers * 2 * values * itemsize)
    return totals


def differs(totals: Totals, wanted: Totals) -> bool:
    """Whether a step's collectives differ from one broadcast of rank 0's orders, of any size, and the expected ones."""
    orders, _ = totals.get(("broadcast", "orders"), (0, 0))
    forward = {key: entry for key, entry in totals.items() if key != ("broadcast", "orders")}
    return orders != 1 or forward != wanted


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
