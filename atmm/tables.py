"""The measured tables that ship in `tables/`: one JSON document per device, written by `vlora tune`.

A table says where it was measured (`device`, `torch`, `threads`, `date`) and holds one row per bucket in which the
rule of `atmm.selection` chose badly: the bucket's fields, then the strategy that was fastest.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from atmm import processor
from atmm.bucket import Bucket, Evenness
from atmm.strategies import known

logger = logging.getLogger(__name__)

FOLDER = pathlib.Path(__file__).parent / "tables"
COLUMNS = ("tokens", "adapters", "rank", "d_in", "d_out", "num_sites", "evenness", "dtype", "strategy")


def device_name(device_type: str) -> str:
    """What a table is measured for: a GPU by name, a CPU by the instructions its matrix products can use."""
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    flags = processor.flags()
    # Of those that have tiles all multiply pairs, too; and what multiplies neither is slower by far in 16 bits.
    products = next((name for flag, name in (("amx_bf16", "-amx"), ("avx512_bf16", "-bf16")) if flag in flags), "")
    return f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}{products}"


@functools.cache
def table_for(device_type: str) -> dict[int, str]:
    """Bucket key to strategy, for the device at hand; empty where none was measured or the file is no table, which is
    logged once."""
    path = path_for(device_type)
    try:
        return {bucket.key(): strategy for bucket, strategy in read(path, device_type)}
    except FileNotFoundError:
        logger.info(
            "no measured table for %s; strategies are chosen by the rule in atmm.selection", device_name(device_type)
        )
    except (OSError, ValueError) as error:
        logger.warning("strategies are chosen by the rule in atmm.selection: %s", error)
    return {}


def read(path: pathlib.Path, device_type: str) -> list[tuple[Bucket, str]]:
    """The buckets of a table's file, with their strategies. Raises OSError, and ValueError for what is no table of this
    version."""
    try:
        document = json.loads(path.read_text())
        columns, rows = tuple(document["columns"]), document["rows"]
        if columns != COLUMNS:
            raise ValueError(f"it has columns {columns}, not {COLUMNS}")
        found = [(_bucket(row[:-1], device_type), row[-1]) for row in rows]
        unknown = {strategy for _, strategy in found if not known(strategy)}
        if unknown:
            raise ValueError(f"it names strategies that are not known: {', '.join(sorted(unknown))}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no table of this version; search again with `vlora tune`: {error}") from error
    return found


def _bucket(row: Sequence[Any], device_type: str) -> Bucket:
    tokens, adapters, rank, d_in, d_out, num_sites, evenness, dtype = row
    sizes = tokens, adapters, rank, d_in, d_out, num_sites
    return Bucket(*sizes, Evenness[evenness], getattr(torch, dtype), device_type)


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
    # Whole or not at all: an engine may read it while it is written, and a search may be stopped here.
    fresh = path.with_suffix(".new")
    fresh.write_text(f'{json.dumps(header, indent=1)[:-2]},\n "rows": [\n  {body}\n ]\n}}\n')
    os.replace(fresh, path)
