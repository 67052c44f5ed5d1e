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
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.training import request
from vlora.config import EngineConfig, ServedBase
from vlora.engine import Engine


class EngineClock:
    """Processor time of a thread, and the time in which it slept."""

    def __init__(self) -> None:
        self._slept_s = 0.0

    def __call__(self) -> float:
        return time.thread_time() + self._slept_s

    def sleep(self, bell: threading.Event, seconds: float | None) -> None:
        """Sleep until the bell rings, or for so long."""
        before = time.perf_counter()
        bell.wait(seconds)
        self._slept_s += time.perf_counter() - before


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
        self._clock = EngineClock()
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
        self._clock.sleep(self._bell, max(0.0, min(limits)) if limits else None)

    def _serve(self, times: Sequence[float]) -> dict[str, Any]:
        began = self._clock()
        due = deque((began + each, request(number)) for number, each in enumerate(times))
        arrived: dict[str, tuple[float, float, float]] = {}  # on the engine's clock, in wall time, and time of products
        latencies: list[tuple[float, float, float]] = []
        promise = self._engine.parts.trainings.promise
        while due or self._engine.has_work:
            while due and due[0][0] <= self._clock():
                when, request = due.popleft()
                self._engine.add(request)
                arrived[request.request_id] = when, time.perf_counter(), promise.spent_s
            if self._engine.has_work:
                ended = [arrived[output.request_id] for output in self._engine.step() if output.finished]
                now, wall, spent = self._clock(), time.perf_counter(), promise.spent_s
                latencies += [(now - a, wall - b, now - a - (spent - c)) for a, b, c in ended]
                self._work.advance()
            else:
                self._idle(due[0][0] - self._clock())
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
