"""One rank of `vlora bench tp`: the parts of an engine's rank without the scheduler, so that steps can be repeated.

All ranks execute the same lines in the same order; rank 0 also sends each step's batch, as an engine does, and keeps
the time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from vlora.config import EngineConfig
from vlora.engine.device_runtime import DeviceSide, lay_out, set_threads
from vlora.engine.tensor_parallel import messages
from vlora.engine.tensor_parallel.coordinator import fork_server
from vlora.engine.ways import Ways
from vlora.lora.adapter_pool import shared_inputs
from vlora.lora.host_adapter import load_adapter
from vlora.lora.peft_format import read_header
from vlora.memory.adapter_cache import Appointed
from vlora.memory.arena import pages_for
from vlora.memory.books import Run
from vlora.memory.host_to_device import Inline
from vlora.models.hf_adapter import Seam
from vlora.models.loading import device_of, load_model
from vlora.models.sharding import shard
from vlora.models.way_costs import measure
from vlora.parallel import Ends, Group, connect
from vlora.parallel.adapter_sharding import Way
from vlora.parallel.choice import Layer, break_even
from vlora.parallel.process_group import Cause, Entry
from vlora.types import Batch, BatchItem, Mode, Request, SamplingParams

_OVERSLEPT_S = 1e-4

Ledger = dict[tuple[str, Cause], Entry]


@dataclasses.dataclass(frozen=True)
class Adapter:
    """One adapter to load: its folder, and the layout of its factors on ranks if they are dense."""

    path: str
    way: Way


@dataclasses.dataclass(frozen=True)
class Cell:
    """Steps to compare: `batch` requests decode, or one prompt of `num_tokens`, with these adapters (None: without).

    latency_s: delay added to every collective of the forward.
    """

    phase: str
    batch: int
    num_tokens: int
    latency_s: float
    adapters: tuple[str | None, ...]
    rounds: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """seconds: of each adapter's steps, by round. chosen: the choice of `auto` for each dense adapter, at this latency
    and batch size. slora_from: the rank from which it would choose `slora`.
    """

    cell: Cell
    seconds: Mapping[str | None, Sequence[float]]
    chosen: Mapping[str, Way]
    slora_from: float | None


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one rank: of all weights, of a token's KV (rounded up to pages, which is significant for few layers),
    of each adapter.
    """

    weights: int
    kv_of_a_token: int
    adapters: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Setup:
    """The settings of all ranks. context: tokens of a decoding request. ledgers: steps with recorded collectives, as
    the adapters of a batch's requests in turn, and the batch size.
    """

    config: EngineConfig
    adapters: Mapping[str, Adapter]
    context: int
    cells: Sequence[Cell]
    ledgers: Sequence[tuple[tuple[str | None, ...], int]]


class DelayedGroup(Group):
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
        if self.latency_s > _OVERSLEPT_S:
            time.sleep(self.latency_s - _OVERSLEPT_S)
        while self.latency_s and time.perf_counter() < until:
            pass


class Rank:
    """Model, adapters and requests. All ranks construct it at once, and make every call at once."""

    def __init__(self, setup: Setup, rank: int, ends: Ends, store_file: str) -> None:
        """ends, store_file: see Group."""
        config = setup.config
        set_threads(config)
        self._setup = setup
        self._seam = seam = Seam(load_model(config, rank))
        self._group = group = DelayedGroup(rank, ends, device_of(config, rank), store_file)
        shard(seam, group)
        self.device = seam.device
        layout = lay_out(config, seam, group, loaded=False)
        layout.arena.bytes.zero_()  # the KV of tokens that count as computed
        self._appointed = Appointed()
        side = DeviceSide(config, layout, self._appointed, executor=Inline(), group=group)
        self._bank, self._runner = side.bank, side.runner
        self._next_page = 0
        self._groups = {name: names[0] for names in shared_inputs(seam.language_linears) for name in names}
        pages = layout.limits.block_pages
        self.memory = Memory(
            weights=sum(parameter.nbytes for parameter in seam.model.parameters()),
            kv_of_a_token=2 * seam.num_layers * seam.kv_dim * seam.dtype.itemsize,
            adapters={name: self._load(name, adapter) for name, adapter in setup.adapters.items()},
        )
        self._blocks = iter(range(-(-self._next_page // pages), layout.limits.num_pages // pages))
        most = max(*(cell.batch for cell in setup.cells), *(batch for _, batch in setup.ledgers))
        self._tables = {name: self._add(name, setup.context) for name in (f"decode-{i}" for i in range(most))}
        self._tables["prefill"] = self._add("prefill", max(cell.num_tokens for cell in setup.cells))

    def _load(self, name: str, adapter: Adapter) -> int:
        """Load an adapter; returns its bytes on this rank."""
        seam = self._seam
        header = read_header(Path(adapter.path), self._bank.sites, seam.hidden_size, adapter.way)
        host = load_adapter(name, header, seam.dtype, lambda _: 1.0)
        pages = pages_for(host.run.nbytes)
        self._appointed.appoint(name, Run(self._next_page, pages))
        self._next_page += pages
        self._bank.bring(host)
        return host.run.nbytes

    def _add(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        """Add a request with this many tokens; returns its block table."""
        prompt = torch.randint(3, 1000, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        self._runner.add(Request(request_id=request_id, prompt_ids=tuple(prompt), sampling=sampling), None)
        return tuple(next(self._blocks) for _ in range(-(-num_tokens // self._setup.config.block_size)))

    def measure(self) -> Iterator[Measured]:
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
            yield Measured(cell, seconds, *self._choose(cell.batch))

    def keep_books(self) -> list[Ledger]:
        """The recorded collectives of each step of the setup's `ledgers`."""
        self._group.latency_s = 0.0
        found = []
        for adapters, batch in self._setup.ledgers:
            items = tuple(self._decode(i, adapters[i % len(adapters)]) for i in range(batch))
            self._group.ledger.take()
            self._step(Batch(mode=Mode.UNMERGED, merged_adapter=None, items=items))
            found.append(self._group.ledger.take())
        return found

    def _choose(self, batch: int) -> tuple[dict[str, Way], float | None]:
        """The choice of an engine with this many requests in a batch, and the rank from which factors are split."""
        config = dataclasses.replace(self._setup.config, max_batch_size=batch, sharding=())
        sites, dtype = self._bank.sites, self._seam.dtype
        costs = measure(self._group, batch, dtype, self._seam.device)
        ways = Ways(config, sites, self._groups, dtype, costs)
        chosen = {
            name: ways(name, read_header(Path(adapter.path), sites, self._seam.hidden_size))
            for name, adapter in self._setup.adapters.items()
        }

        def layers(rank: int) -> list[Layer]:
            shards = ((sites[name].shard, group) for name, group in self._groups.items())
            return [Layer(rank, shard, group) for shard, group in shards if shard is not None]

        return chosen, break_even(layers, dtype.itemsize, costs, self._group.size)

    def _batch(self, cell: Cell, adapter: str | None) -> Batch:
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
            self._group.send(messages.encode([messages.Run(batch)]))
        else:
            (order,) = messages.decode_orders(self._group.receive())
            assert isinstance(order, messages.Run)
            batch = order.batch
        self._runner.run(batch)
        return time.perf_counter() - started


def _follow(setup: Setup, rank: int, ends: Ends, store_file: str) -> None:
    follower = Rank(setup, rank, ends, store_file)
    follower.keep_books()
    for _ in follower.measure():
        pass


@contextlib.contextmanager
def leading(setup: Setup, store_file: str) -> Iterator[Rank]:
    """Run rank 0 in this process and the others in processes of their own until the end of the block. Call
    `keep_books` first, then iterate over `measure`. store_file: a new one, for NCCL.
    """
    context = fork_server()
    mine, *theirs = connect(setup.config.tensor_parallel)
    others = [
        context.Process(target=_follow, args=(setup, rank, ends, store_file), daemon=True)
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
