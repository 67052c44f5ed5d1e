"""The measured tables that ship in `tables/`: one JSON document per device, written by `vlora tune`.

A table says where it was measured (`device`, `torch`, `threads`, `date`) and holds one row per bucket in which the
rule of `atmm.selection` chose badly: the bucket's fields, then the strategy that was fastest.
"""

from __future__ import annotations

import functools
import json
import logging
import pathlib
import re
from collections.abc import Iterable

import torch

from atmm.bucket import Bucket, Evenness

logger = logging.getLogger(__name__)

FOLDER = pathlib.Path(__file__).parent / "tables"
COLUMNS = ("tokens", "adapters", "rank", "d_in", "d_out", "num_sites", "evenness", "dtype", "strategy")


def device_name(device_type: str) -> str:
    """What a table is measured for: a GPU by name, a CPU by the instructions its matrix products can use."""
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    flags = pathlib.Path("/proc/cpuinfo")
    amx = "-amx" if flags.exists() and "amx_bf16" in flags.read_text() else ""
    return f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}{amx}"


@functools.cache
def table_for(device_type: str) -> dict[int, str]:
    """Bucket key to strategy, for the device at hand; empty, which is logged once, where none was measured."""
    device = device_name(device_type)
    path = path_for(device_type)
    if path.exists():
        return parse(json.loads(path.read_text()), device_type)
    logger.info("no measured table for %s; strategies are chosen by the rule in atmm.selection", device)
    return {}


def parse(document: dict, device_type: str) -> dict[int, str]:
    """A table document in its lookup form. Raises ValueError when its columns are not the ones read here."""
    return {bucket.key(): strategy for bucket, strategy in parse_rows(document, device_type)}


def parse_rows(document: dict, device_type: str) -> list[tuple[Bucket, str]]:
    """The buckets of a table document, with their strategies. Raises ValueError as `parse`."""
    if tuple(document["columns"]) != COLUMNS:
        raise ValueError(
            f"the table for {document['device']} has columns {document['columns']}, not {COLUMNS}; search again"
        )
    rows = []
    for *sizes, evenness, dtype, strategy in document["rows"]:
        tokens, adapters, rank, d_in, d_out, num_sites = sizes
        bucket = Bucket(
            tokens, adapters, rank, d_in, d_out, num_sites, Evenness[evenness], getattr(torch, dtype), device_type
        )
        rows.append((bucket, strategy))
    return rows


def path_for(device_type: str) -> pathlib.Path:
    """Where the table of the device at hand is kept."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "-", device_name(device_type).lower()) + ".json")


def write(path: pathlib.Path, device_type: str, date: str, rows: Iterable[tuple[Bucket, str]]) -> None:
    """Write this machine's table, one row per line so that two searches compare well."""
    header = {
        "device": device_name(device_type),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": date,
        "columns": COLUMNS,
    }
    lines = [
        json.dumps([*bucket[:6], bucket.evenness.name, str(bucket.dtype).removeprefix("torch."), strategy])
        for bucket, strategy in rows
    ]
    body = ",\n  ".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{json.dumps(header, indent=1)[:-2]},\n "rows": [\n  {body}\n ]\n}}\n')
