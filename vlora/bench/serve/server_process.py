"""A running server of a benchmark, and its processes."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import psutil

from vlora.bench.harness import module_command
from vlora.errors import BadConfig

_ENDING_S = 20.0


class ServerProcess(NamedTuple):
    """Ports of both APIs, and its processes: the front end first, then the engine."""

    rpyc_port: int
    http_port: int
    front_end: psutil.Process

    @property
    def processes(self) -> dict[str, psutil.Process]:
        return {"front end": self.front_end, "engine": self.front_end.children()[0]}


@contextlib.contextmanager
def launched_server(module: str, *arguments: str) -> Iterator[ServerProcess]:
    """Run the server of a module until the end of the block."""
    command, environment = module_command(module, *arguments)
    own = {name: value for name, value in environment.items() if not name.startswith("VLORA_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own)
    # A signal that ends the bench also ends its server: the block exits as after an error.
    terminated = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        assert process.stdout is not None
        ready = re.match(r"ready: rpyc \S+:(\d+) \| http \S+:(\d+) ", process.stdout.readline())
        if ready is None:
            raise BadConfig("the server of this bench did not start; see its output above")
        yield ServerProcess(int(ready[1]), int(ready[2]), psutil.Process(process.pid))
    finally:
        signal.signal(signal.SIGTERM, terminated)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
