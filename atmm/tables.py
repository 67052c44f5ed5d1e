"""The measured tables that ship beside this file: one JSON document per device, written by `python -m atmm.search`.

A table says where it was measured (`device`, `torch`, `threads`, `date`) and holds one row per bucket with the strategy that
was fastest there.
"""

from __future__ import annotations

import functools
import json
import logging
import pathlib
from collections.abc import Iterable

import torch

from atmm.bucket import Bucket, Evenness

logger = logging.getLogger(__name__)

FOLDER = pathlib.Path(__file__).parent / "tables"
COLUMNS = ("tokens", "adapters", "rank", "d_in", "d_out", "evenness", "dtype", "strategy")


def device_name(device_type: str) -> str:
    """What a table is measured for: the GPU by name, a CPU by the instructions that its matrix products can use."""
    if device_type != "cpu":
        return torch.cuda.get_device_name()
    flags = pathlib.Path("/proc/cpuinfo")
    amx = "-amx" if flags.exists() and "amx_bf16" in flags.read_text() else ""
    return f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}{amx}"


@functools.cache
def table_for(device_type: str) -> dict[int, str]:
    """Bucket key to strategy name, for the device at hand; empty, which is logged once, where none was measured."""
    device = device_name(device_type)
    for path in sorted(FOLDER.glob("*.json")):
        document = json.loads(path.read_text())
        if document["device"] == device:
            return parse(document, device_type)
    logger.info("no measured table for %s; strategies are chosen by the rule in atmm.selection", device)
    return {}


def parse(document: dict, device_type: str) -> dict[int, str]:
    """The lookup form of a table document. Raises ValueError when its columns are not the ones this version reads."""
    if tuple(document["columns"]) != COLUMNS:
        raise ValueError(f"table for {document['device']} has columns {document['columns']}; write it again: {COLUMNS}")
    table = {}
    for *sizes, evenness, dtype, strategy in document["rows"]:
        table[Bucket(*sizes, Evenness[evenness], getattr(torch, dtype), device_type).key()] = strategy
    return table


def write(path: pathlib.Path, device_type: str, date: str, rows: Iterable[tuple[Bucket, str]]) -> None:
    """Write a table for this machine: one row per line, so that two searches compare well."""
    header = {
        "device": device_name(device_type),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": date,
        "columns": COLUMNS,
    }
    lines = [
        json.dumps([*bucket[:5], bucket.evenness.name, str(bucket.dtype).removeprefix("torch."), strategy])
        for bucket, strategy in rows
    ]
    head = json.dumps(header, indent=1)[:-2]
    path.write_text(f'{head},\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")
