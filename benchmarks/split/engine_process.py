"""A serving engine, which may serve its base model too: `python -m benchmarks.split.engine_process FOLDER ...`.

Prints a line when it is ready. Each line of standard input is the arrival times of requests in seconds from now, as a
JSON list; it is answered by their latencies and the duration of all. Between them the engine is idle.

Seconds are those of the engine's clock: processor time of its thread, and the time in which it had nothing to do. So
other load on the machine counts little, and waits for the interpreter's lock do not count. The answer has each latency
on this clock, then in wall time, then on this clock without the products for clients that ran meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.arrivals import ThreadClock, steps
from benchmarks.training import request
from vlora.config import EngineConfig, ServedBase
from vlora.engine import Engine


class Server:
    """An engine and the loop of its thread."""

    def __init__(self, folder: str, address: str | None, dtype: str) -> None:
        """address: for clients of the base model."""
        base = None if address is None else ServedBase(addresses=(address,), name="bench")
        config = EngineConfig(
            model=folder,
            dtype=dtype,
            threads=1,
            arena_bytes=256 << 20,
            switching="shadow",
            prefix_cache=False,
            serve_base=base,
        )
        self._clock = ThreadClock()
        self._engine = Engine(config, clock=self._clock)
        self._work = self._engine.parts.other_work
        self._bell = threading.Event()
        self._work.wake = self._bell.set
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def run(self) -> None:
        """Answer lines until there are no more."""
        while True:
            try:
                line = self._lines.get_nowait()
            except queue.Empty:
                self._idle(None)
                continue
            if line is None:
                return
            print(json.dumps(self._serve(json.loads(line))), flush=True)

    def _read(self) -> None:
        for line in itertools.chain(sys.stdin, (None,)):
            self._lines.put(line)
            self._bell.set()

    def _idle(self, seconds: float | None) -> None:
        """Run a piece of other work, or sleep until there may be one, but no longer than `seconds`."""
        self._bell.clear()
        if not self._lines.empty() or self._work.advance():
            return
        limits = [limit for limit in (seconds, self._work.retry_s) if limit is not None]
        before = time.perf_counter()
        self._bell.wait(max(0.0, min(limits)) if limits else None)
        self._clock.skip(time.perf_counter() - before)

    def _serve(self, times: Sequence[float]) -> dict[str, Any]:
        began, promise = self._clock(), self._engine.parts.trainings.promise
        arrived: dict[str, tuple[float, float]] = {}  # in wall time, and the time of products
        latencies: list[tuple[float, float, float]] = []

        def add(number: int) -> None:
            self._engine.add(request(number))
            arrived[str(number)] = time.perf_counter(), promise.spent_s

        for outputs in steps(self._engine, times, add, self._clock, lambda until: self._idle(until - self._clock())):
            now, wall, spent = self._clock(), time.perf_counter(), promise.spent_s
            for ended in (output.request_id for output in outputs if output.finished):
                own_s = now - began - times[int(ended)]
                latencies.append((own_s, wall - arrived[ended][0], own_s - (spent - arrived[ended][1])))
            self._work.advance()
        return {"latencies_s": latencies, "seconds": self._clock() - began}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--base")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    server = Server(args.folder, args.base, args.dtype)
    print(json.dumps({}), flush=True)
    server.run()


if __name__ == "__main__":
    main()
