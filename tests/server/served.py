"""`vlora serve` as users start it, in processes of its own."""

from __future__ import annotations

import dataclasses
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlora.client import Client

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass
class Served:
    """A running server. address: for `--server`. log: its stderr, once it has ended."""

    process: subprocess.Popen[str]
    client: Client
    http_port: int
    address: str
    log: str = ""


@contextmanager
def served(*arguments: str) -> Iterator[Served]:
    """Serve until the end of the block, which a signal ends without an error. arguments: of `vlora serve`."""
    ports = ["--rpyc-port", "0", "--http-port", "0", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "vlora.cli", "serve", *arguments, *ports],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        match = re.match(r"ready: rpyc \S+:(\d+) \| http \S+:(\d+) ", process.stdout.readline())
        assert match, process.communicate()
        with Client(port=int(match[1]), timeout_s=60) as client:
            on = Served(process, client, int(match[2]), f"127.0.0.1:{match[1]}")
            yield on
        process.send_signal(signal.SIGTERM)
        _, on.log = process.communicate(timeout=60)
        assert process.returncode == 0, on.log
    finally:
        process.kill()
        process.communicate()
