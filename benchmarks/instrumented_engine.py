"""An engine process that also accepts direct calls to its engine while it is otherwise idle.

Two engines of one model differ by several percent for their whole lifetime, depending on the location of their weights
in memory; a front end adds less than that to a long answer. Therefore both ways use one engine. Its process is that of
a normal server, except that its step loop also polls a socket of the bench between two requests.

`python -m benchmarks.instrumented_engine PATH` starts the server, and that its engine's process, with the descriptor of
`vlora/engine/ipc/worker.py` as a second argument. PATH: of the bench's socket.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection, Listener
from typing import NamedTuple

from transformers.utils import logging

from fusion.embedded import checkpoint_path
from vlora.config import EngineConfig, ServerConfig
from vlora.engine.engine import Engine
from vlora.engine.ipc.messages import EngineTransport
from vlora.engine.ipc.worker import run
from vlora.server.launch import serve
from vlora.types import Request, SamplingParams


class DirectRequest(NamedTuple):
    """A request that the bench sends to the engine without the front end."""

    prompt_ids: tuple[int, ...]  # tokens of the prompt
    tokens: int  # tokens of the answer; random weights generate no end token


TimedTokens = list[tuple[float, tuple[int, ...]]]
"""The new tokens of each step, and the seconds since the request."""


class InstrumentedTransport(EngineTransport):
    """The engine's end of the connection to its front end; while waiting it also serves the bench."""

    engine: Engine

    def __init__(self, sock: socket.socket, path: str) -> None:
        super().__init__(sock)
        self._requests: queue.SimpleQueue[tuple[Connection, DirectRequest]] = queue.SimpleQueue()
        listener = Listener(path)
        threading.Thread(target=self._listen, args=(listener,), name="vlora-bench", daemon=True).start()

    def receive(self, *, block: bool, timeout_s: float | None = None) -> bytearray | None:
        """As `EngineTransport.receive`. Runs in the engine's own thread, as all of this class does."""
        data = super().receive(block=block, timeout_s=timeout_s)
        while not self._requests.empty():
            connection, request = self._requests.get()
            connection.send(run_directly(self.engine, request))
        return data

    def _listen(self, listener: Listener) -> None:
        connection = listener.accept()
        try:
            while True:
                self._requests.put((connection, connection.recv()))
                self.wake()
        except EOFError:
            pass


def run_directly(engine: Engine, direct: DirectRequest) -> TimedTokens:
    """Run one request on an engine without other work."""
    request = Request(
        request_id="direct", prompt_ids=direct.prompt_ids, sampling=SamplingParams(max_tokens=direct.tokens)
    )
    started = time.perf_counter()
    engine.add(request)
    timed_tokens: TimedTokens = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            timed_tokens.append((time.perf_counter() - started, output.token_ids))
    return timed_tokens


def run_server(path: str) -> None:
    config = EngineConfig(
        model=str(checkpoint_path()), load_format="dummy", dtype="float32", threads=1, prefix_cache=False
    )
    command = (sys.executable, "-m", "benchmarks.instrumented_engine", path)
    ports = ServerConfig(rpyc_port=0, http_port=0)
    announce = functools.partial(print, flush=True)
    asyncio.run(serve(config, ports, {}, announce=announce, model_name="embedded", engine_command=command))


def run_engine(path: str, descriptor: int) -> None:
    lines: list[InstrumentedTransport] = []

    def make_line(sock: socket.socket) -> InstrumentedTransport:
        lines.append(InstrumentedTransport(sock, path))
        return lines[0]

    def make_engine(config: EngineConfig) -> Engine:
        lines[0].engine = Engine(config)
        return lines[0].engine

    sys.exit(run(descriptor, make_engine, make_line))


if __name__ == "__main__":
    logging.disable_progress_bar()
    run_engine(sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 2 else run_server(sys.argv[1])
