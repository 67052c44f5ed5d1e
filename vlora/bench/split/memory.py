"""Memory of clients beside an executor, and of copies: the paper's figures 9 and 10 in shape."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vlora.bench.split.processes import Process, run_together, running
from vlora.bench.split.rows import TRAIN, Size, row

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
                    run_together(clients, [TRAIN] * k)
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
