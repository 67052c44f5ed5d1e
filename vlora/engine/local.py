"""The engine in this process: synchronous for tests, fusion and benchmarks; asyncio and a thread for a front end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Executor
from typing import Any, NamedTuple

from vlora.config import EngineConfig
from vlora.engine.engine import Engine
from vlora.engine.interface import EngineInterface
from vlora.engine.ipc.client import EngineClient
from vlora.engine.ipc.messages import EngineTransport, Failed, encode
from vlora.engine.ipc.worker import EngineWorker, ready_of
from vlora.errors import EngineDead, VLoraError
from vlora.operations import Operation
from vlora.threads import compute_with, launch_on
from vlora.types import ErrorValue, Request, RequestOutput
from vlora.wire.framing import MessageTransport


class LocalEngine(EngineInterface):
    """`EngineInterface` without another process. Use either `run` or the asyncio calls, these in one event loop."""

    def __init__(self, config: EngineConfig, *, model: object | None = None, executor: Executor | None = None) -> None:
        self.engine = Engine(config, model=model, executor=executor)
        self._client: asyncio.Task[EngineClient] | None = None

    def run(self, requests: Iterable[Request]) -> dict[str, list[RequestOutput]]:
        """Run all requests to the end, batched together. Returns outputs by request id, the last of each finished.

        A request refused at admission gets one finished output with the error.
        """
        outputs: dict[str, list[RequestOutput]] = {}
        for request in requests:
            name = request.request_id
            outputs[name] = []
            try:
                self.engine.add(request)
            except VLoraError as error:
                outputs[name].append(RequestOutput(request_id=name, finish_reason="error", error=ErrorValue.of(error)))
        while self.engine.has_work:
            for output in self.engine.step():
                outputs[output.request_id].append(output)
        return outputs

    # -- asyncio ------------------------------------------------------------------------------------------------------

    async def generate(self, request: Request, until: float | None = None) -> AsyncIterator[RequestOutput]:
        client = await self._started()
        async with contextlib.aclosing(client.generate(request, until)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                yield output

    async def cancel(self, request_id: str) -> None:
        await (await self._started()).cancel(request_id)

    async def call(self, operation: Operation) -> Any:
        return await (await self._started()).call(operation)

    async def close(self) -> None:
        await (await self._started()).close()

    async def _started(self) -> EngineClient:
        """The client of the engine's thread, which the first call starts."""
        if self._client is None:
            self._client = asyncio.create_task(self._start())
        return await asyncio.shield(self._client)

    async def _start(self) -> EngineClient:
        here, there = socket.socketpair()
        transport = await MessageTransport.open(here, lambda _: None)
        ended = asyncio.Event()
        arguments = (there, functools.partial(asyncio.get_running_loop().call_soon_threadsafe, ended.set))
        threading.Thread(target=self._serve, args=arguments, name="vlora-engine", daemon=True).start()
        return EngineClient(_EngineThread(ended), transport, ready_of(self.engine, self.engine.config))

    def _serve(self, sock: socket.socket, on_end: Callable[[], object]) -> None:
        compute_with(self.engine.num_threads)
        launch_on(self.engine.parts.device.hf_model.device)
        transport = EngineTransport(sock)
        try:
            EngineWorker(self.engine, transport).loop()
        except Exception as error:
            traceback.print_exc()
            cause = EngineDead(f"the engine stopped: {type(error).__name__}: {error}")
            transport.send(encode(Failed(ErrorValue.of(cause))))
        finally:
            with contextlib.suppress(OSError, RuntimeError):  # the client's loop, and its end, may be closed
                on_end()
                sock.shutdown(socket.SHUT_RDWR)  # ends the transport's thread


class _EngineThread(NamedTuple):
    """The engine's thread as an `EngineProcess`."""

    ended: asyncio.Event

    async def wait(self) -> int | None:
        await self.ended.wait()
        return None

    def kill(self) -> None:
        """A thread cannot be killed: it ends after its step."""
