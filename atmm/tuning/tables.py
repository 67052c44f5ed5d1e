"""The measured tables: one JSON document per processor and number of threads, written by `vlora tune`.

A table records where it was measured (`device`, `torch`, `threads`, `date`). It holds one row per bucket in which the
rule of `atmm.dispatch` is clearly slower than the fastest strategy: the fields of the bucket, then that strategy.

Tables are searched for in the user's folder (`$XDG_DATA_HOME/vlora/tables`, where `vlora tune` writes) and in the
package (`atmm/tables`). The engine uses the readable table with the nearest processor, then the nearest number of
threads, then the user's before the packaged one. Without a table, the rule decides. GPUs of one compute capability
share tables, because they have the same multiprocessors, such as an H100 and an H200.
"""

from __future__ import annotations

import enum
import functools
import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import torch

from atmm import cache, processor
from atmm.segments import BatchStats
from atmm.strategies.registry import known, served
from atmm.triton.tiling import LEAST_SHARED, SHARED_BYTES, Tiling, fits

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Evenness(enum.IntEnum):
    """SINGLE: one lane. EVEN: equal lanes that form one run at every site. RAGGED: anything else."""

    SINGLE = 0
    EVEN = 1
    RAGGED = 2


class Bucket(NamedTuple):
    """A rounded shape: sizes are rounded up to powers of two, so that similar shapes share one measured choice.

    tokens: size of the range with lanes. adapters: number of distinct adapters. rank: mean rank of the lanes at the
    sites they target. d_out: sum over the group's sites. num_sites: number of sites, not rounded.
    """

    tokens: int
    adapters: int
    rank: int
    d_in: int
    d_out: int
    num_sites: int
    evenness: Evenness
    dtype: torch.dtype
    device_type: str

    @classmethod
    def of(cls, stats: BatchStats) -> Bucket:
        layout = stats.layout
        ranks = [run.rank for site in stats.runs for run in site for _ in range(run.num_lanes)]
        if len(stats.lanes) == 1:
            evenness = Evenness.SINGLE
        else:
            evenness = Evenness.EVEN if all(len(runs) <= 1 for runs in stats.runs) else Evenness.RAGGED
        return cls(
            tokens=round_up(stats.num_tokens),
            adapters=round_up(len(stats.keys)),
            rank=round_up(round(sum(ranks) / max(1, len(ranks)))),
            d_in=round_up(layout.d_in),
            d_out=round_up(sum(layout.d_outs)),
            num_sites=len(layout.d_outs),
            evenness=evenness,
            dtype=layout.dtype,
            device_type=layout.device.type,
        )

    @classmethod
    def of_row(cls, row: Sequence[Any], device_type: str) -> Bucket:
        """The bucket that was written as `row`. Raises ValueError, KeyError, TypeError or AttributeError for others."""
        tokens, adapters, rank, d_in, d_out, num_sites, evenness, dtype = row
        sizes = tokens, adapters, rank, d_in, d_out, num_sites
        found = cls(*sizes, Evenness[evenness], getattr(torch, dtype), device_type)
        if found.dtype not in DTYPES or not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError(f"{row} is not a bucket")
        return found

    @property
    def row(self) -> list[int | str]:
        """The fields but the device's type, as in a table."""
        return [*self[:6], self.evenness.name, str(self.dtype).removeprefix("torch.")]


def round_up(value: int) -> int:
    """The next power of two, as the sizes in a bucket."""
    return 1 << (value - 1).bit_length() if value > 1 else value


logger = logging.getLogger(__name__)

FOLDER = pathlib.Path(__file__).parents[1] / "tables"
COLUMNS = ("tokens", "adapters", "rank", "d_in", "d_out", "num_sites", "evenness", "dtype", "strategy")


def device_name(device_type: str) -> str:
    """The device name in a table: the name of a GPU, or the matrix instruction set of a CPU."""
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    flags = processor.flags()
    # All processors with tiles (AMX) also have AVX512-BF16. Processors with neither are far slower in 16 bits.
    products = next((name for flag, name in (("amx_bf16", "-amx"), ("avx512_bf16", "-bf16")) if flag in flags), "")
    return f"cpu-{torch.backends.cpu.get_cpu_capability().lower().replace(' ', '-')}{products}"


def capability_of(device_type: str) -> str | None:
    """A GPU's compute capability, such as "9.0"; None for a CPU."""
    return ".".join(map(str, torch.cuda.get_device_capability())) if device_type == "cuda" else None


class Table(NamedTuple):
    """A table's file.

    threads: the number of threads during the measurement. date: ISO, for messages only. capability: the compute
    capability of a GPU; None for a CPU, or if the file does not have it.
    """

    path: pathlib.Path
    device: str
    threads: int
    date: str
    rows: Sequence[tuple[Bucket, str]]
    capability: str | None = None

    @property
    def from_user(self) -> bool:
        """Whether the table is from the user's folder instead of the package."""
        return self.path.parent != FOLDER


class _Document(msgspec.Struct):
    """A table's file as it is stored."""

    device: str
    columns: tuple[str, ...]
    rows: list[tuple[int, int, int, int, int, int, str, str, str]]
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    date: str = "an unknown date"
    capability: str | None = None


class Choice(NamedTuple):
    """The table in use, or None, and its strategies by bucket."""

    table: Table | None
    strategies: Mapping[Bucket, str]


def table_for(device_type: str) -> Mapping[Bucket, str]:
    """Bucket to strategy, for this device and this thread's number of torch threads; empty without a table."""
    return choose_table(device_type, torch.get_num_threads()).strategies


@functools.cache
def choose_table(device_type: str, threads: int) -> Choice:
    """The best table for this device, chosen once per process. Unreadable files are skipped with a warning."""
    here, capability = device_name(device_type), capability_of(device_type)
    candidates = []
    for path in _files():
        try:
            table = read_table(path, device_type)
        except (OSError, ValueError) as error:
            logger.warning("skipped an ATMM table: %s", error)
            continue
        distance = _distance(here, table.device)
        if distance is None and capability is not None and table.capability is not None:
            alike = any({capability, table.capability} <= kind for kind in _CLASSES)
            distance = 1 if capability == table.capability else 2 if alike else None
        if distance is not None:
            # A GPU's kernels do not depend on the number of host threads.
            other_threads = 0.0 if device_type == "cuda" else abs(math.log2(table.threads / threads))
            candidates.append(((distance, other_threads, not table.from_user, table.threads, path.name), table))
    if not candidates:
        return Choice(None, {})
    _, best = min(candidates, key=lambda candidate: candidate[0])
    shared = SHARED_BYTES.get(torch.cuda.get_device_capability(), LEAST_SHARED) if device_type == "cuda" else 0
    return Choice(best, {bucket: name for bucket, name in best.rows if _runs(name, bucket.dtype, shared)})


def _runs(strategy: str, dtype: torch.dtype, shared_bytes: int) -> bool:
    """Whether a strategy of a table fits into this much shared memory, which another GPU's may not."""
    return not strategy.startswith("tiled ") or fits(Tiling.named(strategy), dtype.itemsize, shared_bytes)


def describe(device_type: str) -> str:
    """One line on the table in use, with a remedy if it was not measured for this processor and number of threads."""
    here, threads = device_name(device_type), torch.get_num_threads()
    table = choose_table(device_type, threads).table
    tune = "run `vlora tune`" if device_type == "cpu" else f"run `vlora tune --device {device_type}`"
    if table is None:
        return f"no table for this processor ({here}); strategies are chosen by rule; {tune}"
    number = "" if device_type == "cuda" else f", {table.threads} thread{'s' if table.threads > 1 else ''}"
    origin = "tuned" if table.from_user else "packaged, measured"
    if table.device != here:
        facts = f"{table.device} ({origin} on {table.date}{number})"
        return f"no table for this processor ({here}); using the nearest, {facts}; {tune}"
    facts = f"{here} ({origin}{' here' if table.from_user else ''} on {table.date}{number})"
    if device_type == "cuda" or table.threads == threads:
        return facts
    return f"no table for {threads} thread{'s' if threads > 1 else ''}; using {facts}; {tune}"


def _files() -> Iterator[pathlib.Path]:
    for find in (user_folder, lambda: FOLDER):
        try:
            yield from sorted(find().glob("*.json"))
        except OSError as error:
            logger.warning("skipped a folder of ATMM tables: %s", error)


# x86-64 processors ordered by their matrix instructions. AMX is further apart: its products of few
# tokens are faster by far.
_LADDER = {"cpu-default": 0, "cpu-no-avx": 0, "cpu-avx2": 1, "cpu-avx512": 2, "cpu-avx512-bf16": 3, "cpu-avx512-amx": 6}


# GPUs by compute capability that take a table of each other: of data centers, of workstations, of small boards.
_CLASSES = ({"8.0", "9.0", "10.0", "10.3"}, {"8.6", "8.9", "12.0"}, {"8.7", "11.0", "12.1"})


def _distance(here: str, there: str) -> int | None:
    """Distance of two processors: 0 for the same, None if a table of one is unusable on the other."""
    if here == there:
        return 0
    if here not in _LADDER or there not in _LADDER:
        return None
    return abs(_LADDER[here] - _LADDER[there]) or 1


def read_table(path: pathlib.Path, device_type: str) -> Table:
    """Read a table's file. A table without a number of threads counts as measured with one thread.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is not a table of this version.
    """
    try:
        document = msgspec.json.decode(path.read_bytes(), type=_Document)
        if document.columns != COLUMNS:
            raise ValueError(f"columns are {document.columns}, expected {COLUMNS}")
        found = [(Bucket.of_row(row, device_type), strategy) for *row, strategy in document.rows]
        unknown = {strategy for _, strategy in found if not (known(strategy) or strategy.startswith("grouped "))}
        if unknown:
            raise ValueError(f"unknown strategies: {', '.join(sorted(unknown))}")
        # On a GPU, earlier versions also measured strategies on packed copies, and CUTLASS's grouped products.
        found = [row for row in found if served(row[1], device_type)]
    except (ValueError, KeyError, AttributeError, RecursionError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path} is not a table of this version; run `vlora tune` again: {error}") from error
    return Table(path, document.device, document.threads, document.date, found, document.capability)


def user_folder() -> pathlib.Path:
    """`$XDG_DATA_HOME/vlora/tables`, default `~/.local/share/vlora/tables`; it may not exist yet.

    Raises:
        FileNotFoundError: if the variable is not set and the user has no home folder, which is common in containers.
    """
    try:
        return pathlib.Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "vlora" / "tables"
    except RuntimeError as error:
        raise FileNotFoundError("this user has no home folder and XDG_DATA_HOME is not set") from error


def path_for(device_type: str, threads: int) -> pathlib.Path:
    """The file in the user's folder to which `vlora tune` writes the table of this device."""
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device_type).lower())
    return user_folder() / (f"{name}.json" if device_type == "cuda" else f"{name}-t{threads}.json")


def write(path: pathlib.Path, device_type: str, date: str, rows: Iterable[tuple[Bucket, str]]) -> None:
    """Write this machine's table, one row per line for readable diffs."""
    capability = capability_of(device_type)
    header = {
        "device": device_name(device_type),
        **({} if capability is None else {"capability": capability}),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": date,
        "columns": COLUMNS,
    }
    body = ",\n  ".join(json.dumps([*bucket.row, strategy]) for bucket, strategy in rows)
    cache.replace(path, f'{json.dumps(header, indent=1)[:-2]},\n "rows": [\n  {body}\n ]\n}}\n')
