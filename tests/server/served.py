"""`vlora serve` as users start it, in processes of its own, and callers of it."""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.processes import PATIENCE_S
from vlora.client import Client
from vlora.errors import EngineDead, VLoraError
from vlora.types import EngineStats

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass
class Served:
    """A running server. address: for `--server`. ready: its line. log: its stderr, once it has ended."""

    process: subprocess.Popen[str]
    client: Client
    http_port: int
    address: str
    ready: str
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
        ready = process.stdout.readline()
        match = re.match(r"ready: rpyc \S+:(\d+) \| http \S+:(\d+) ", ready)
        assert match, process.communicate()
        with Client(port=int(match[1]), timeout_s=PATIENCE_S) as client:
            on = Served(process, client, int(match[2]), f"127.0.0.1:{match[1]}", ready)
            yield on
        process.send_signal(signal.SIGTERM)
        _, on.log = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, on.log
    finally:
        process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until_alive(client: Client) -> EngineStats:
    deadline = time.monotonic() + 200
    while True:
        try:
            return client.stats()
        except EngineDead:
            assert time.monotonic() < deadline
            time.sleep(0.05)


class Caller(threading.Thread):
    """A client that waits and records its result with the time."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._ask = ask
        self.result: Any = None
        self.at = 0.0
        self.start()

    def run(self) -> None:
        try:
            self.result = self._ask()
        except VLoraError as error:
            self.result = error.code
        self.at = time.monotonic()


def call(port: int, method: str, path: str, body: Any = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def last_code(answer: tuple[int, str]) -> str:
    """The code of a complete answer's error, or of the error that ends a stream."""
    text = answer[1] if answer[0] != 200 else answer[1].split("\n\n")[-3].removeprefix("data: ")
    code: str = json.loads(text)["error"]["code"]
    return code
