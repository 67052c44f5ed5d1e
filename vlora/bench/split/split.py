"""`vlora bench split`: what a base executor costs and saves, beside own copies of the model.

Memory is the proportional set size (PSS) of all processes, after two training steps. Speed is the processor time of a
token, of the client and of the executor together, in turns, so that other load on the machine cancels out.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen2VLForConditionalGeneration

from vlora.bench.dummy import ranks_config
from vlora.bench.report import Goal, Report
from vlora.bench.split.base_process import POLICIES
from vlora.bench.split.processes import Process, run_together, running

TRAIN = {"do": "train", "steps": 1, "rows": 2, "length": 64}
"""Training steps of 128 tokens."""


class Size(NamedTuple):
    """Extent of a run. clients: numbers of clients of the memory's measurement. rows: of table 5's clients."""

    layers: int
    clients: tuple[int, ...]
    rounds: int
    tokens: int
    rows: tuple[int, ...]


FULL = Size(layers=8, clients=(1, 2, 4, 8), rounds=9, tokens=16, rows=(1, 1, 2, 4, 8, 16, 32, 64))
QUICK = Size(layers=3, clients=(1, 2), rounds=3, tokens=8, rows=(1, 2, 16, 48))
NUM_DECODERS = 4

WAYS = {
    "executor and clients, float32": ("float32", True),
    "copies that map one file, float32": ("float32", False),
    "executor and clients, bfloat16": ("bfloat16", True),
    "copies that cannot share, bfloat16": ("bfloat16", False),
}
"""Ways to train k adapters: the type in which the float32 checkpoint is loaded, and whether there is an executor."""


def run(quick: bool) -> Report:
    """Measure memory, speed and batching."""
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="vlora-split-") as folder:
        checkpoint = write_checkpoint(Path(folder), size.layers)
        rows = [*memory(checkpoint, size), *peaks(checkpoint), *speed(checkpoint, size), *table_5(checkpoint, size)]
    return Report("split", rows, goals_of(rows))


def write_checkpoint(folder: Path, num_layers: int) -> Path:
    """A model of layers with 15 million parameters each, in float32."""
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(ranks_config(num_layers)).save_pretrained(folder / "model")
    return folder / "model"


def row(what: str, way: str, **values: Any) -> dict[str, Any]:
    """A row of the report."""
    names = ("clients", "executor MiB", "clients MiB", "all MiB", "CPU ms a token", "ratio", "tokens a second")
    return {"what": what, "way": way} | dict.fromkeys((*names, "latency ms", "calls a product")) | values


def memory(checkpoint: Path, size: Size) -> list[dict[str, Any]]:
    """PSS of executor and clients, for each number of clients."""
    found = []
    for place, (way, (dtype, split)) in enumerate(WAYS.items()):
        address = f"unix:{checkpoint.parent}/memory{place}.sock"
        bases = [Process("base_process", str(checkpoint), address, "--dtype", dtype)] if split else []
        flags = ("--base", address) if split else ()
        with running(*bases):
            clients: list[Process] = []
            try:
                for k in size.clients:
                    added = [
                        Process("worker", str(checkpoint), "--dtype", dtype, "--seed", str(seed), *flags)
                        for seed in range(len(clients), k)
                    ]
                    clients += added
                    for client in added:
                        client.ready()
                    run_together(clients, [TRAIN | {"steps": 2}] * k)
                    own, base = sum(c.pss_mib() for c in clients), sum(b.pss_mib() for b in bases)
                    found.append(
                        row(
                            "memory",
                            way,
                            clients=k,
                            **{"executor MiB": base, "clients MiB": own, "all MiB": own + base},
                        )
                    )
            finally:
                for client in clients:
                    client.stop()
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


def speed(checkpoint: Path, size: Size) -> list[dict[str, Any]]:
    """Processor time of a token: an own copy, one client of an executor, and several that decode at once."""
    address = f"unix:{checkpoint.parent}/speed.sock"
    with (
        running(Process("base_process", str(checkpoint), address)) as (base,),
        running(*(Process("worker", str(checkpoint), "--base", address) for _ in range(NUM_DECODERS))) as clients,
        running(Process("worker", str(checkpoint))) as own,
    ):

        def cpu_ms(workers: Sequence[Process], command: dict[str, Any]) -> float:
            before = base.cpu_s()
            answers = run_together(workers, [command] * len(workers))
            total = base.cpu_s() - before + sum(answer["cpu_s"] for answer in answers)
            return 1e3 * total / sum(answer["tokens"] for answer in answers)

        prefill, decode = {"do": "prefill", "rows": 1, "length": 32}, {"do": "decode", "tokens": size.tokens}
        for workers in (own, clients):
            run_together(workers, [prefill] * len(workers))
        return [
            *_compared(
                "training, 128 tokens a step",
                {"own copy": lambda: cpu_ms(own, TRAIN), "one client": lambda: cpu_ms(clients[:1], TRAIN)},
                size.rounds,
            ),
            *_compared(
                "decoding, one row",
                {"own copy": lambda: cpu_ms(own, decode), "one client": lambda: cpu_ms(clients[:1], decode)},
                size.rounds,
            ),
            *_compared(
                "decoding, one row each",
                {
                    "one client": lambda: cpu_ms(clients[:1], decode),
                    f"{NUM_DECODERS} clients": lambda: cpu_ms(clients, decode),
                },
                size.rounds,
            ),
        ]


def _compared(what: str, ways: dict[str, Callable[[], float]], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of each way, and the median of the ratios to the first, by turns; one round does not count."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, call in ways.items():
            measured = call()
            if turn:
                found[way].append(measured)
    first = next(iter(found.values()))
    return [
        row(
            what,
            way,
            clients=NUM_DECODERS if way.startswith(str(NUM_DECODERS)) else 1,
            ratio=statistics.median(a / b for a, b in zip(values, first, strict=True)),
            **{"CPU ms a token": statistics.median(values)},
        )
        for way, values in found.items()
    ]


def table_5(checkpoint: Path, size: Size) -> list[dict[str, Any]]:
    """The paper's table 5 in shape: decoding clients of different batch sizes under three ways to batch."""
    addresses = [f"unix:{checkpoint.parent}/policy{place}.sock" for place in range(len(POLICIES))]
    bases = [
        Process("base_process", str(checkpoint), address, "--policy", policy)
        for policy, address in zip(POLICIES, addresses, strict=True)
    ]
    flags = [flag for address in addresses for flag in ("--base", address)]
    walls: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    speeds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for base in bases:
        base.ready()
    try:
        with running(*(Process("worker", str(checkpoint), *flags) for _ in size.rows)) as clients:
            for turn in range(size.rounds + 1):
                for place, policy in enumerate(POLICIES):
                    if not turn:
                        run_together(
                            clients,
                            [{"do": "prefill", "client": place, "rows": rows, "length": 8} for rows in size.rows],
                        )
                        continue
                    command = {"do": "decode", "client": place, "tokens": size.tokens}
                    answers = run_together(clients, [command] * len(clients))
                    walls[policy].append(statistics.mean(a["wall_s"] for a in answers) / size.tokens)
                    speeds[policy].append(sum(a["tokens"] for a in answers) / max(a["wall_s"] for a in answers))
    finally:
        stopped = [base.stop() for base in bases]
    return [
        row(
            "table 5: clients of different batch sizes",
            policy,
            clients=len(size.rows),
            **{
                "tokens a second": statistics.median(speeds[policy]),
                "latency ms": 1e3 * statistics.median(walls[policy]),
                "calls a product": _calls_a_product(last),
            },
        )
        for policy, last in zip(POLICIES, stopped, strict=True)
    ]


def _calls_a_product(printed: str) -> float:
    counts = json.loads(printed.splitlines()[-1])
    return float(counts["calls"] / counts["batches"])


def goals_of(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """The goals of split execution."""
    ratios = {(each["what"], each["way"]): each["ratio"] for each in rows if each["ratio"] is not None}
    most = max(each["clients"] for each in rows if each["what"] == "memory")
    whole = {each["way"]: each["all MiB"] for each in rows if each["what"] == "memory" and each["clients"] == most}
    latency = {each["way"]: each["latency ms"] for each in rows if each["latency ms"] is not None}
    goals = [
        Goal(
            "training of 128 tokens, CPU time beside an own copy",
            ratios["training, 128 tokens a step", "one client"],
            1.1,
            True,
        ),
        Goal("decoding one row, CPU time beside an own copy", ratios["decoding, one row", "one client"], 1.5, True),
        Goal(
            f"{NUM_DECODERS} decoding clients, CPU time a token beside one",
            ratios["decoding, one row each", f"{NUM_DECODERS} clients"],
            0.8,
            True,
        ),
        Goal(
            "latency of opportunistic batching beside lockstep", latency["opportunistic"] / latency["lockstep"], 1, True
        ),
    ]
    if most >= FULL.clients[-1]:  # with fewer, the executor's own process takes more than it saves
        share = whole["executor and clients, bfloat16"] / whole["copies that cannot share, bfloat16"]
        goals.append(Goal(f"memory of {most} clients beside copies that cannot share", share, 1.0, True))
    return goals
