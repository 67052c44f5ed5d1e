"""An engine process that also accepts direct calls to its engine while it is otherwise idle.

Two engines of one model differ by several percent for their whole lifetime, depending on the location of their weights
in memory; a front end adds less than that to a long answer. Therefore both ways use one engine. Its process is that of
a normal server, except that its step loop also polls a socket of the bench between two requests.

`python -m vlora.cli.instrumented_server PATH` starts it, as
`python -m vlora.bench.serving.instrumented_engine PATH DESCRIPTOR`. PATH: of the bench's socket.
DESCRIPTOR: see `vlora/engine/ipc/worker.py`.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection, Listener
from typing import NamedTuple

from transformers.utils import logging

from vlora.config import EngineConfig
from vlora.engine.engine import Engine
from vlora.engine.ipc.transport import EngineTransport
from vlora.engine.ipc.worker import run
from vlora.types import Request, SamplingParams


class DirectRequest(NamedTuple):
    """A request that the bench sends to the engine without the front end.

    Attributes:
        prompt_ids: Tokens of the prompt.
        tokens: Tokens of the answer; random weights generate no end token.
    """

    prompt_ids: tuple[int, ...]
    tokens: int


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


def main(path: str, descriptor: int) -> None:
    logging.disable_progress_bar()
    lines: list[InstrumentedTransport] = []

    def make_line(sock: socket.socket) -> InstrumentedTransport:
        lines.append(InstrumentedTransport(sock, path))
        return lines[0]

    def make_engine(config: EngineConfig) -> Engine:
        lines[0].engine = Engine(config)
        return lines[0].engine

    sys.exit(run(descriptor, make_engine, make_line))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
