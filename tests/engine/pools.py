"""Counts the native threads of an engine's process after each stage; runs in its own process.

    python -m tests.engine.pools FOLDER bounded|unbounded

Prints JSON: the count after each stage. unbounded: the background threads have their own OpenMP pools, for comparison.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.embedded_cases import cases, config, write_adapters
from tests.harness import FixedModes
from vlora.engine import LocalEngine
from vlora.types import Mode

NUM_THREADS = 2
STAGES = {"greedy": None, "pictured": None, "adapted": "north", "composed": None, "in a grammar": None}
"""Requests of `cases`, each with the adapter that is merged."""


def num_native_threads() -> int:
    """Threads that belong to no `threading.Thread`: those of OpenMP pools and of other libraries."""
    counts = []
    for _ in range(20):  # an ended thread stays in the list briefly
        python = {thread.native_id for thread in threading.enumerate()}
        counts.append(len({int(task) for task in os.listdir("/proc/self/task")} - python))
        time.sleep(0.005)
    return min(counts)


def main(folder: Path, *, bounded: bool) -> None:
    torch.set_num_threads(NUM_THREADS)
    folders, requests = write_adapters(folder), cases()
    executor = None if bounded else ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(NUM_THREADS,))
    local = LocalEngine(config(threads=NUM_THREADS, merge_fidelity_floor=0.0), executor=executor)
    counts: dict[str, int] = {}
    for name, merged in STAGES.items():
        mode = Mode.UNMERGED if merged is None else Mode.MERGED
        local.engine.parts.scheduler.policy = FixedModes(mode, merged)
        assert local.run([requests[name]])[name][-1].error is None
        if name == "greedy":
            counts["base model"] = num_native_threads()
            local.engine.register_adapters(folders)
        counts[name] = num_native_threads()
    modes = local.engine.stats().steps_by_mode
    assert modes.get("merged") and modes.get("unmerged"), modes
    print(json.dumps(counts))
    local.engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), bounded=sys.argv[2] == "bounded")
