"""What a base executor costs and saves, beside own copies of the model: the figures of Symbiosis.

Memory is the proportional set size (PSS) of all processes, after one further training step of every client. Table 5 and
figures 22 and 23 of the paper are in wall time: run them on an otherwise idle machine. Clients and executors are
processes with one thread each.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.split import mixed
from benchmarks.split.base_process import POLICIES
from benchmarks.split.processes import FULL, TRAIN, Process, Size, row, run_together, running, write_checkpoint
from vlora.bench.report import Goal

WAYS = {
    "executor and clients, float32": ("float32", True),
    "copies that map one file, float32": ("float32", False),
    "executor and clients, bfloat16": ("bfloat16", True),
    "copies that cannot share, bfloat16": ("bfloat16", False),
}
"""Ways to train k adapters: the type in which the float32 checkpoint is loaded, and whether there is an executor."""


def memory(checkpoint: Path, size: Size) -> list[dict[str, Any]]:
    """PSS of executor and clients for each number of clients, after one further training step of every client."""
    found = []
    for place, (way, (dtype, split)) in enumerate(WAYS.items()):
        address = f"unix:{checkpoint.parent}/memory{place}.sock"
        bases = [Process("base_process", str(checkpoint), address, "--dtype", dtype)] if split else []
        flags = ("--base", address) if split else ()
        with running(*bases), contextlib.ExitStack() as opened:
            clients: list[Process] = []
            for k in size.clients:
                seeds = range(len(clients), k)
                added = (Process("worker", str(checkpoint), "--dtype", dtype, "--seed", str(n), *flags) for n in seeds)
                clients += opened.enter_context(running(*added))
                run_together(clients, [TRAIN] * k)
                own, base = sum(c.pss_mib() for c in clients), sum(b.pss_mib() for b in bases)
                sizes = {"executor MiB": base, "clients MiB": own, "all MiB": own + base}
                found.append(row("memory", way, clients=k, **sizes))
    return found


def peaks(checkpoint: Path) -> list[dict[str, Any]]:
    """Memory that training steps of 512 tokens take beside the weights: mainly what backward needs of forward."""
    address, steps = f"unix:{checkpoint.parent}/peaks.sock", TRAIN | {"rows": 4, "length": 128, "steps": 2}
    found = []
    with (
        running(Process("base_process", str(checkpoint), address)) as bases,
        running(Process("worker", str(checkpoint), "--base", address)) as clients,
        running(Process("worker", str(checkpoint))) as own,
    ):
        for way, workers, executors in (("own copy", own, ()), ("one client", clients, bases)):
            before = _private(workers, executors)
            with ThreadPoolExecutor(1) as pool:
                done = pool.submit(run_together, workers, [steps])
                peak = before
                while not done.done():
                    peak = [max(pair) for pair in zip(peak, _private(workers, executors), strict=True)]
                    time.sleep(0.002)
                done.result()
            client, base = (high - low for high, low in zip(peak, before, strict=True))
            sizes = {"executor MiB": base, "clients MiB": client, "all MiB": client + base}
            found.append(row("peak of training steps of 512 tokens", way, clients=1, **sizes))
    return found


def _private(workers: Sequence[Process], executors: Sequence[Process]) -> list[float]:
    """Private memory of clients and of executors; shared memory counts for the clients."""
    return [
        sum(each.private_mib(shared=True) for each in workers),
        sum(each.private_mib(shared=False) for each in executors),
    ]


def table_5(checkpoint: Path, size: Size) -> list[dict[str, Any]]:
    """The paper's table 5 in shape: decoding clients of different batch sizes under three ways to batch."""
    addresses = [f"unix:{checkpoint.parent}/policy{place}.sock" for place in range(len(POLICIES))]
    flags = [flag for address in addresses for flag in ("--base", address)]
    walls: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    speeds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    executors = (
        Process("base_process", str(checkpoint), address, "--policy", policy)
        for policy, address in zip(POLICIES, addresses, strict=True)
    )
    with (
        running(*executors) as bases,
        running(*(Process("worker", str(checkpoint), *flags) for _ in size.rows)) as clients,
    ):
        for place in range(len(POLICIES)):
            run_together(clients, [{"do": "prefill", "client": place, "rows": rows, "length": 8} for rows in size.rows])
        for _ in range(size.rounds):
            for place, policy in enumerate(POLICIES):
                command = {"do": "decode", "client": place, "tokens": size.tokens}
                answers = run_together(clients, [command] * len(clients))
                walls[policy].append(statistics.mean(a["wall_s"] for a in answers) / size.tokens)
                speeds[policy].append(sum(a["tokens"] for a in answers) / max(a["wall_s"] for a in answers))
    return [
        row(
            "table 5: clients of different batch sizes",
            policy,
            clients=len(size.rows),
            **{
                "tokens a second": statistics.median(speeds[policy]),
                "latency ms": 1e3 * statistics.median(walls[policy]),
                "calls a product": _calls_a_product(base.printed),
            },
        )
        for policy, base in zip(POLICIES, bases, strict=True)
    ]


def _calls_a_product(printed: str) -> float:
    counts = json.loads(printed.splitlines()[-1])
    return float(counts["calls"] / counts["batches"])


PARTS: Mapping[str, Callable[[Path, Size], list[dict[str, Any]]]] = {
    "memory": memory,
    "peaks": lambda checkpoint, _: peaks(checkpoint),
    "table5": table_5,
    "mixed": mixed.measure,
}
"""Parts of the bench, in their order."""


def one(part: str, size: Size) -> list[dict[str, Any]]:
    """The rows of a part, on a model of its own."""
    layers = size.mix.layers if part == "mixed" else size.layers
    with tempfile.TemporaryDirectory(prefix="vlora-split-") as folder:
        return PARTS[part](write_checkpoint(Path(folder), layers), size)


def goals_of(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """The goals of the parts that the rows are of."""
    return [
        *_memory_goals(rows),
        *_table_5_goals(rows),
        *mixed.goals_of(rows),
    ]


def _memory_goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    most = max((each["clients"] for each in rows if each["what"] == "memory"), default=0)
    if most < FULL.clients[-1]:  # with fewer, the executor's own process takes more than it saves
        return []
    whole = {each["way"]: each["all MiB"] for each in rows if each["what"] == "memory" and each["clients"] == most}
    share = whole["executor and clients, bfloat16"] / whole["copies that cannot share, bfloat16"]
    return [Goal(f"memory of {most} clients beside copies that cannot share", share, 1.0, True)]


def _table_5_goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    latency = {each["way"]: each["latency ms"] for each in rows if each["what"].startswith("table 5")}
    if not latency:
        return []
    beside = latency["opportunistic"] / latency["lockstep"]
    return [Goal("latency of opportunistic batching beside lockstep", beside, 1, True)]
