"""The engine in this process: synchronous for tests, fusion and benchmarks; asyncio and a thread for a front end."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from vlora.config import EngineConfig
from vlora.engine.engine import Engine
from vlora.engine.interface import EngineInterface, OutputStream
from vlora.engine.operations import perform
from vlora.errors import EngineDead, VLoraError
from vlora.operations import Operation
from vlora.threads import compute_with, launch_on
from vlora.types import ErrorValue, Request, RequestOutput

T = TypeVar("T")


class LocalEngine(EngineInterface):
    """`EngineInterface` without a socket. Use either `run` or the asyncio calls at a time, not both."""

    def __init__(self, config: EngineConfig, *, model: object | None = None, executor: Executor | None = None) -> None:
        self.engine = Engine(config, model=model, executor=executor)
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._streams: dict[str, Callable[[RequestOutput], None]] = {}
        self._thread: threading.Thread | None = None
        self._cause: str | None = None
        self.engine.parts.other_work.wake = self._wake
        self._may_sleep = True

    # -- synchronous --------------------------------------------------------------------------------------------------

    def run(self, requests: Iterable[Request]) -> dict[str, list[RequestOutput]]:
        """Run all requests to the end, batched together. Returns outputs by request id, the last of each finished.

        A request refused at admission gets one finished output with the error.
        """
        outputs: dict[str, list[RequestOutput]] = {}
        for request in requests:
            outputs[request.request_id] = []
            try:
                self.engine.add(request)
            except VLoraError as error:
                outputs[request.request_id].append(_refused(request.request_id, error))
        while self.engine.has_work:
            for output in self.engine.step():
                outputs[output.request_id].append(output)
        return outputs

    # -- asyncio ------------------------------------------------------------------------------------------------------

    async def generate(self, request: Request, until: float | None = None) -> AsyncIterator[RequestOutput]:
        loop = asyncio.get_running_loop()
        stream = OutputStream()

        def deliver(output: RequestOutput) -> None:
            _call_in(loop, stream.put, output)

        def add() -> None:
            self.engine.add(request)
            self._streams[request.request_id] = deliver

        try:
            await self._call(add)
        except VLoraError as error:
            if isinstance(error, EngineDead):
                raise
            yield _refused(request.request_id, error)
            return
        stream.end_at(until)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()
            if not stream.finished:
                self._post(lambda: self._cancel(request.request_id))

    async def cancel(self, request_id: str) -> None:
        await self._call(lambda: self._cancel(request_id))

    async def call(self, operation: Operation) -> Any:
        found = await self._call(lambda: perform(self.engine, operation, self._deliver_all))
        return await asyncio.wrap_future(found) if isinstance(found, Future) else found

    async def close(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._calls.put(None)
            await asyncio.to_thread(self._thread.join)
        self._cause = self._cause or "the engine was closed"

    # -- the engine's thread ------------------------------------------------------------------------------------------

    async def _call(self, function: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
            if not future.done():
                set_outcome(outcome)

        def run() -> None:
            try:
                result = function()
            except Exception as error:
                _call_in(loop, settle, future.set_exception, error)
            else:
                _call_in(loop, settle, future.set_result, result)

        self._post(run)
        return await future

    def _post(self, call: Callable[[], None]) -> None:
        if self._cause is not None:
            raise EngineDead(self._cause)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="vlora-engine", daemon=True)
            self._thread.start()
        self._calls.put(call)

    def _loop(self) -> None:
        compute_with(self.engine.num_threads)
        launch_on(self.engine.parts.device.hf_model.device)
        self.engine.send_early = self._deliver_all
        try:
            while self._take_calls(block=not (self.engine.has_work or self._works())):
                self._may_sleep = False
                if self.engine.has_work:
                    self._deliver_all(self.engine.step())
                    self._works()
                self._may_sleep = not self.engine.has_work  # before it looks for other work once more
        except Exception as error:
            self._cause = f"the engine stopped: {type(error).__name__}: {error}"
            raise
        finally:
            self._cause = self._cause or "the engine was closed"
            for output in self.engine.close():
                self._deliver(output)
            value = ErrorValue.of(EngineDead(self._cause))
            for request_id in tuple(self._streams):
                self._deliver(RequestOutput(request_id=request_id, finish_reason="error", error=value))

    def _works(self) -> bool:
        """Run a piece of other work, unless a call waits. Returns whether not to wait for a call."""
        return not self._calls.empty() or self.engine.parts.other_work.advance()

    def _wake(self) -> None:
        """Let the loop look for other work. After a step it does so by itself, unless it finds a call."""
        if self._may_sleep:
            self._calls.put(_nothing)

    def _take_calls(self, *, block: bool) -> bool:
        """Run the pending calls; False if the engine is to stop."""
        while True:
            try:
                call = self._calls.get(block, self.engine.parts.other_work.retry_s)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            block = False

    def _cancel(self, request_id: str) -> None:
        output = self.engine.cancel(request_id)
        if output is not None:
            self._deliver(output)

    def _deliver_all(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        deliver = (
            self._streams.pop(output.request_id, None) if output.finished else self._streams.get(output.request_id)
        )
        if deliver is not None:
            deliver(output)


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    """Call a function in a caller's loop. A closed loop is ignored: the thread serves other callers."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


def _nothing() -> None:
    """A call that only wakes up the engine's thread."""


def _refused(request_id: str, error: VLoraError) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason="error", error=ErrorValue.of(error))
