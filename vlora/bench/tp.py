"""The cost of an adapter on several ranks by its layout: BD-LoRA's figure 5.

Three adapters with about the same number of parameters: a dense one `replicated` (Punica) or split (`slora`), and a
block-diagonal one (`bd`) of a higher rank. Decode steps of a full batch with one adapter, and a prompt, as in the
paper. On a CPU, two ranks of one thread each, with slower networks emulated by a delay in every collective; on GPUs,
all available ranks over NCCL (not measured yet).

The first two are layouts of one adapter, of which `auto` is the first. A block-diagonal adapter is a different adapter,
trained or converted to this form: the report shows its step next to the replicated one's.

All ranks execute the same lines in the same order, the parts of an engine's rank without the scheduler, so that steps
can be repeated; rank 0 also sends each step's batch, as an engine does, and keeps the time.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vlora.bench.dummy import language_shapes, ranks_config, write_adapter
from vlora.bench.harness import Bench, Measured
from vlora.bench.plots import Plot
from vlora.bench.report import Goal, Row
from vlora.bench.timing import median_ms, median_ratio
from vlora.config import EngineConfig
from vlora.engine.device_runtime import DeviceRuntime, lay_out, set_threads, use_device
from vlora.engine.tensor_parallel import messages
from vlora.engine.tensor_parallel.coordinator import fork_server
from vlora.errors import BadConfig
from vlora.lora.host_adapter import load_adapter
from vlora.lora.peft_format import read_header
from vlora.memory.adapter_cache import WorkerAdapterCache
from vlora.memory.arena import pages_for
from vlora.memory.host_to_device import Inline
from vlora.memory.page_allocator import PageRun
from vlora.models.hf_model import HFModel
from vlora.models.loading import device_of, dummy_model, load_model
from vlora.models.sharding import shard
from vlora.parallel import ProcessGroup, RankSockets, connect
from vlora.parallel.adapter_sharding import ShardingKind
from vlora.parallel.layer_sharding import ROW_PARALLEL
from vlora.parallel.process_group import Cause
from vlora.types import Batch, BatchItem, Mode, Request, SamplingParams

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


# -- ranks -------------------------------------------------------------------------------------------------------------

_SLEEP_OVERRUN_S = 1e-4


class RankAdapter(NamedTuple):
    """path: of its folder. sharding: the layout of its factors on ranks, if they are dense."""

    path: str
    sharding: ShardingKind


class StepCell(NamedTuple):
    """Steps to compare."""

    phase: str  # decode or prefill
    batch: int  # number of decoding requests
    num_tokens: int  # tokens of the one prompt of a prefill
    latency_s: float  # delay added to every collective of the forward
    adapters: tuple[str | None, ...]  # the adapters to compare; None for steps without one
    rounds: int  # number of rounds


class CellTimes(NamedTuple):
    """The times of a cell."""

    cell: StepCell
    seconds: Mapping[str | None, Sequence[float]]  # of each adapter's steps, by round


class RankMemory(NamedTuple):
    """Bytes on one rank."""

    weights: int  # of all weights
    kv_of_a_token: int  # rounded up to pages, which is significant for few layers
    adapters: Mapping[str, int]  # of each adapter


class RankSetup(NamedTuple):
    """The settings of all ranks."""

    config: EngineConfig
    adapters: Mapping[str, RankAdapter]
    context: int  # tokens of a decoding request
    cells: Sequence[StepCell]


class DelayedGroup(ProcessGroup):
    """A group on a slower network: each collective of the forward takes `latency_s` longer, on every rank."""

    latency_s = 0.0

    def all_reduce(self, tensor: torch.Tensor, cause: Cause) -> torch.Tensor:
        tensor = super().all_reduce(tensor, cause)
        self._wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor, cause: Cause) -> torch.Tensor:
        tensor = super().all_gather(tensor, cause)
        self._wait()
        return tensor

    def _wait(self) -> None:
        """Sleep, because ranks may share cores and a spinning rank soon has to wait for a core; then spin to the end,
        because a sleep overruns.
        """
        until = time.perf_counter() + self.latency_s
        if self.latency_s > _SLEEP_OVERRUN_S:
            time.sleep(self.latency_s - _SLEEP_OVERRUN_S)
        while self.latency_s and time.perf_counter() < until:
            pass


class Rank:
    """Model, adapters and requests. All ranks construct it at once, and make every call at once."""

    def __init__(self, setup: RankSetup, rank: int, ends: RankSockets, store_file: str) -> None:
        """Load the model and the adapters, and add the requests."""
        config = setup.config
        set_threads(config)
        use_device(device_of(config, rank))
        self._setup = setup
        self._hf_model = hf_model = HFModel(load_model(config, rank))
        self._group = group = DelayedGroup(rank, ends, device_of(config, rank), store_file)
        shard(hf_model, group)
        self.device = hf_model.device
        layout = lay_out(config, hf_model, group, loaded=False)
        layout.arena.bytes.zero_()  # the KV of tokens that count as computed
        self._adapter_cache = WorkerAdapterCache()
        side = DeviceRuntime(config, layout, self._adapter_cache, executor=Inline(), group=group)
        self._pool, self._runner = side.pool, side.runner
        self._next_page = 0
        pages = layout.limits.block_pages
        self.memory = RankMemory(
            weights=sum(parameter.nbytes for parameter in hf_model.model.parameters()),
            kv_of_a_token=2 * hf_model.num_layers * hf_model.kv_dim * hf_model.dtype.itemsize,
            adapters={name: self._load(name, adapter) for name, adapter in setup.adapters.items()},
        )
        self._blocks = iter(range(-(-self._next_page // pages), layout.limits.num_pages // pages))
        most = max(cell.batch for cell in setup.cells)
        self._tables = {name: self._add(name, setup.context) for name in (f"decode-{i}" for i in range(most))}
        self._tables["prefill"] = self._add("prefill", max(cell.num_tokens for cell in setup.cells))

    def _load(self, name: str, adapter: RankAdapter) -> int:
        """Load an adapter."""
        hf_model = self._hf_model
        header = read_header(Path(adapter.path), self._pool.sites, hf_model.hidden_size, adapter.sharding)
        host = load_adapter(name, header, hf_model.dtype, lambda _: 1.0)
        pages = pages_for(host.run.nbytes)
        self._adapter_cache.place(name, PageRun(self._next_page, pages))
        self._next_page += pages
        self._pool.load(host)
        return host.run.nbytes

    def _add(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        """Add a request with this many tokens."""
        prompt = torch.randint(3, 1000, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        self._runner.add(Request(request_id=request_id, prompt_ids=tuple(prompt), sampling=sampling), None)
        return tuple(next(self._blocks) for _ in range(-(-num_tokens // self._setup.config.block_size)))

    def measure(self) -> Iterator[CellTimes]:
        """Measure every cell in turn. Within a cell, adapters alternate in random order, because each leaves the
        caches in a different state.
        """
        draw = random.Random(0)
        for cell in self._setup.cells:
            self._group.latency_s = cell.latency_s
            batches = {adapter: self._batch(cell, adapter) for adapter in cell.adapters}
            seconds: dict[str | None, list[float]] = {adapter: [] for adapter in cell.adapters}
            for turn in range(cell.rounds + 1):
                for adapter in draw.sample(cell.adapters, len(cell.adapters)):
                    taken = self._step(batches[adapter])
                    if turn:  # the first round warms up
                        seconds[adapter].append(taken)
            yield CellTimes(cell, seconds)

    def _batch(self, cell: StepCell, adapter: str | None) -> Batch:
        if cell.phase == "decode":
            items = tuple(self._decode(i, adapter) for i in range(cell.batch))
        else:
            items = (BatchItem("prefill", adapter, 0, cell.num_tokens, self._tables["prefill"], True),)
        return Batch(mode=Mode.UNMERGED, merged_adapter=None, items=items)

    def _decode(self, number: int, adapter: str | None) -> BatchItem:
        """The request's last token, repeatedly."""
        name = f"decode-{number}"
        return BatchItem(name, adapter, self._setup.context - 1, 1, self._tables[name], True)

    def _step(self, batch: Batch) -> float:
        """Seconds, from rank 0's order to its sampled tokens."""
        started = time.perf_counter()
        if self._group.leads:
            self._group.send(messages.encode([messages.RunBatch(batch)]))
        else:
            (order,) = messages.decode_orders(self._group.receive())
            assert isinstance(order, messages.RunBatch)
            batch = order.batch
        self._runner.run(batch)
        return time.perf_counter() - started


def _run_worker(setup: RankSetup, rank: int, ends: RankSockets, store_file: str) -> None:
    worker = Rank(setup, rank, ends, store_file)
    for _ in worker.measure():
        pass


@contextlib.contextmanager
def run_ranks(setup: RankSetup, store_file: str) -> Iterator[Rank]:
    """Run rank 0 in this process and the others in processes of their own until the end of the block."""
    context = fork_server()
    mine, *theirs = connect(setup.config.tensor_parallel)
    others = [
        context.Process(target=_run_worker, args=(setup, rank, ends, store_file), daemon=True)
        for rank, ends in enumerate(theirs, start=1)
    ]
    for process in others:
        process.start()
    for end in itertools.chain.from_iterable(ends.values() for ends in theirs):
        end.close()  # the rank's own end is then the last one, and closes with it
    try:
        yield Rank(setup, 0, mine, store_file)
    finally:
        for process in others:
            process.kill()
            process.join()
        for end in mine.values():
            end.close()
