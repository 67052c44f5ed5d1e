"""Servers as users start them, in processes of their own, and callers of them."""

from __future__ import annotations

import dataclasses
import json
import os
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

import httpx

from tests.processes import PATIENCE_S
from vlora.client import Client
from vlora.errors import EngineDead, VLoraError
from vlora.types import EngineStats

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass
class Served:
    """A running server. address: for `--server`. lines: until it was ready. log: its stderr, once it has ended."""

    process: subprocess.Popen[str]
    client: Client
    http_port: int
    address: str
    lines: list[str]
    log: str = ""

    @property
    def ready(self) -> str:
        return self.lines[-1]

    def end(self, code: int = 0) -> None:
        """Wait for the end."""
        _, self.log = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == code, self.log

    def messages(self) -> list[str]:
        """The log's messages, without time and source."""
        form = r"\d{4}-\d\d-\d\dT\S+ warning vlora\.server\.launch: (.*)"
        return [found[1] if (found := re.fullmatch(form, line)) else line for line in self.log.splitlines()]


def launch(module: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, **pipes)


@contextmanager
def serving(module: str, *arguments: str, token: str | None = None, **environment: str) -> Iterator[Served]:
    """A server until the end of the block, which may end it."""
    process = launch(module, *arguments, **environment)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not (match := re.match(r"ready: rpyc \S+:(\d+) \| http \S+:(\d+) ", lines[-1] if lines else "")):
            lines.append(process.stdout.readline())
            assert lines[-1], (lines, process.communicate())
        with Client(port=int(match[1]), token=token, timeout_s=PATIENCE_S) as client:
            yield Served(process, client, int(match[2]), f"127.0.0.1:{match[1]}", lines)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def served(*arguments: str) -> Iterator[Served]:
    """Serve until the end of the block, which a signal ends without an error. arguments: of `vlora serve`."""
    with serving("vlora.cli", "serve", *arguments, "--rpyc-port", "0", "--http-port", "0", "--threads", "1") as on:
        yield on
        on.process.send_signal(signal.SIGTERM)
        on.end()


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
    response = httpx.request(method, f"http://127.0.0.1:{port}{path}", json=body, timeout=PATIENCE_S)
    return response.status_code, response.text


def last_code(answer: tuple[int, str]) -> str:
    """The code of a complete answer's error, or of the error that ends a stream."""
    text = answer[1] if answer[0] != 200 else answer[1].split("\n\n")[-3].removeprefix("data: ")
    code: str = json.loads(text)["error"]["code"]
    return code
