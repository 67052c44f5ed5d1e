"""`EngineClient`: an engine in its own process, behind `EngineInterface`."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from vlora.config import EngineConfig, Token
from vlora.engine.host_resources import describe_exit, thread_waiting
from vlora.engine.interface import EngineInterface, OutputStream
from vlora.engine.ipc import messages
from vlora.engine.ipc.messages import WatchedLoad
from vlora.engine.operations import KeepAdapters
from vlora.errors import BadRequest, EngineDead
from vlora.operations import Operation
from vlora.types import ErrorValue, Request, RequestOutput
from vlora.wire.framing import MessageTransport, UnreadableMessage

ENGINE_COMMAND = (sys.executable, "-m", "vlora.engine.ipc.worker")

# glibc raises these two thresholds as large blocks are freed, until the tensors of a step share the heap with
# long-lived blocks, and fragmentation grows for minutes. Fixed thresholds keep an engine's memory flat; smaller ones
# would map the activations of every prompt again (docs/decisions/0035).
_C_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(16 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}

FINAL_MESSAGE_S = 0.2  # for the last message of a process, end of file on its socket and its exit code to arrive
_STOP_S = 5.0  # how long a stopping engine may take before it is killed


class EngineProcess(Protocol):
    """The part of an engine's process that a client needs, on this machine or another."""

    async def wait(self) -> int | None:
        """Wait for its end.

        Returns:
            Its exit code, or the negative number of the signal that killed it; None if it is not known.
        """
        ...

    def kill(self) -> None: ...


class EngineClient(EngineInterface):
    """Created by `start`. Belongs to the event loop that started it."""

    def __init__(self, process: EngineProcess, transport: MessageTransport, ready: messages.Ready) -> None:
        self.ready = ready
        self.pong: messages.Pong | None = None
        """The last answer to `ping`."""
        self._watched: WatchedLoad | None = None
        self._process = process
        self._transport = transport
        self._streams: dict[str, Callable[[RequestOutput], None]] = {}
        self._calls: dict[int, asyncio.Future[messages.Reply[msgspec.Raw]]] = {}
        self._call_ids = itertools.count()
        self.cause: str | None = None
        """Why the engine is dead; None while it is alive."""
        self._reported_cause: str | None = None
        self._closing = False
        transport.on_message = self._receive
        self._watching = asyncio.create_task(self._watch(), name="vlora-engine-client")

    @classmethod
    async def start(cls, config: EngineConfig, *, command: Sequence[str] = ENGINE_COMMAND) -> EngineClient:
        """Start an engine process and wait until its model is loaded. See `start_process`."""
        return cls(*await start_process(config, command=command))

    async def wait_dead(self) -> str:
        """Wait until the engine is dead, for any reason, and return the cause."""
        await asyncio.wait({self._watching})
        assert self.cause is not None
        return self.cause

    # -- EngineInterface ----------------------------------------------------------------------------------------------

    async def generate(self, request: Request, until: float | None = None) -> AsyncIterator[RequestOutput]:
        stream = OutputStream()
        self.submit(request, stream.put)
        stream.end_at(until)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()
            self.abandon(request.request_id)

    def submit(self, request: Request, on_output: Callable[[RequestOutput], None]) -> None:
        """Send a request; its outputs are passed to `on_output`.

        Raises:
            EngineDead: The engine is dead.
            BadRequest: The request cannot be sent.
        """
        self._check_alive()
        if request.request_id in self._streams:
            raise BadRequest(f"request id {request.request_id!r} is already in use; ids must be unique")
        self._streams[request.request_id] = on_output
        try:
            self._post(messages.Add(request))
        except BadRequest:
            del self._streams[request.request_id]
            raise

    def post_cancel(self, request_id: str) -> None:
        """As `cancel`, without waiting for the event loop. A dead engine is ignored."""
        if self.cause is None:
            self._post(messages.Cancel(request_id))

    def replace_base_tokens(self, tokens: tuple[Token, ...]) -> None:
        """Admit clients of the base model with these tokens from now on. A dead engine is ignored."""
        if self.cause is None:
            self._post(messages.ReplaceBaseTokens(tokens))

    def abandon(self, request_id: str) -> None:
        """Cancel a request if it has not ended; it has no more outputs."""
        if self._streams.pop(request_id, None) is not None and self.cause is None:
            self._post(messages.Cancel(request_id))

    async def cancel(self, request_id: str) -> None:
        self._check_alive()
        self._post(messages.Cancel(request_id))

    async def call(self, operation: Operation) -> Any:
        reply = await self.post(operation)
        if reply.error is not None:
            raise reply.error.to_exception()
        return msgspec.msgpack.decode(reply.value, type=operation.result)

    def post(self, operation: Operation) -> asyncio.Future[messages.Reply[msgspec.Raw]]:
        """Send an operation now; its reply comes later. Raises EngineDead."""
        self._check_alive()
        call_id = next(self._call_ids)
        self._post(messages.Call(call_id, operation))
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._calls.pop(call_id, None))
        return future

    # -- for a router -------------------------------------------------------------------------------------------------

    async def keep_adapters(self, versions: Mapping[str, Collection[str]]) -> Mapping[str, Collection[str]]:
        """Keep these contents by name when others replace them, and no others: answers may continue with them.

        Returns those of them that the engine has.
        """
        return await self.call(KeepAdapters({name: tuple(contents) for name, contents in versions.items()}))

    def watch_load(self, every_s: float, on_change: Callable[[messages.LoadReport], None]) -> None:
        """Call `on_change` with the engine's load now and after changes, at most once in `every_s` seconds."""
        self._watched = WatchedLoad(on_change)
        self._post(messages.WatchLoad(every_s))

    def ping(self) -> None:
        """Ask for a sign of life, which `pong` has when it arrives. It does not wait for the end of a step."""
        self.pong = None
        self._transport.send(messages.PING)

    @property
    def num_bytes_received(self) -> int:
        """From the engine so far, those of an incomplete message included."""
        return self._transport.num_bytes_received

    async def disconnect(self, reason: str) -> None:
        """Close the connection to the engine; what waits for it fails with the reason."""
        self._reported_cause = self._reported_cause or reason
        self._transport.close()
        await asyncio.wait({self._watching})

    async def close(self) -> None:
        """See EngineInterface. An engine that does not stop in time is killed."""
        if self.cause is None and not self._closing:
            self._closing = True
            self._post(messages.Stop())
        _, late = await asyncio.wait({self._watching}, timeout=_STOP_S)
        if late:
            self._process.kill()
            await asyncio.wait({self._watching})

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self.cause is not None:
            raise EngineDead(self.cause)

    def _post(self, message: messages.ToEngine | messages.Call[Operation]) -> None:
        try:
            data = messages.encode(message)
        except OverflowError as error:
            raise BadRequest(f"a number in the request is too large: {error}") from error
        except UnicodeEncodeError as error:
            raise BadRequest(f"text in the request contains an unpaired surrogate: {error}") from error
        self._transport.send(data)

    async def _watch(self) -> None:
        """Wait for the end of the process, then fail all waiting calls with the cause."""
        ended = asyncio.ensure_future(self._process.wait())
        signs: set[asyncio.Future[Any]] = {self._transport.closed, ended}
        try:
            await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(signs, timeout=FINAL_MESSAGE_S)
            if self._transport.closed.done() and (error := self._transport.closed.exception()) is not None:
                self._reported_cause = f"the engine sent a message that cannot be read: {error}"
                if not isinstance(error, UnreadableMessage | msgspec.MsgspecError):
                    raise error  # an internal error
        finally:
            self._fail_pending(ended.result() if ended.done() else None)

    def _receive(self, data: bytes) -> None:
        match message := messages.decode_from_engine(data):
            case messages.Outputs():
                for output in message.outputs:
                    # The stream of a cancelled request no longer exists; its cancellation is in transit.
                    if (on_output := self._streams.get(output.request_id)) is not None:
                        if output.finished:
                            del self._streams[output.request_id]
                        on_output(output)
            case messages.Reply():
                if (future := self._calls.pop(message.call_id, None)) is not None and not future.done():
                    future.set_result(message)
            case messages.Failed():
                self._reported_cause = message.error.message
            case messages.LoadReport():
                if self._watched is not None:
                    self._watched.receive(message)
            case messages.Pong():
                self.pong = message
            case messages.Ready():
                raise AssertionError("the engine sent Ready twice")

    def _fail_pending(self, code: int | None) -> None:
        if self._reported_cause is not None:
            self.cause = self._reported_cause
        elif self._closing:
            self.cause = "the engine was closed"
        else:
            self.cause = _end_of_process(code)
        error = ErrorValue.of(EngineDead(self.cause))
        streams, self._streams = self._streams, {}
        for request_id, on_output in streams.items():
            on_output(RequestOutput(request_id=request_id, finish_reason="error", error=error))
        calls, self._calls = self._calls, {}
        for call_id, future in calls.items():
            if not future.done():
                future.set_result(messages.Reply(call_id, error=error))
        self._transport.close()


async def start_process(
    config: EngineConfig, *, command: Sequence[str] = ENGINE_COMMAND
) -> tuple[asyncio.subprocess.Process, MessageTransport, messages.Ready]:
    """Start an engine process and wait until its model is loaded.

    Args:
        command: The process to start; the descriptor of its end of the socket is appended as the last argument.

    Returns:
        The process, the transport to it, and its first message.

    Raises:
        VLoraError: A typed error (BadConfig or similar) if the engine cannot be built.
        EngineDead: The process ended without reporting an error.
    """
    first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    here, there = socket.socketpair()
    transport = await MessageTransport.open(here, first.set_result)
    process: asyncio.subprocess.Process | None = None
    try:
        with there:
            # The child's stdout goes to stderr: stdout is for the command's results.
            process = await asyncio.create_subprocess_exec(
                *command,
                str(there.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
                env={**_C_HEAP, **thread_waiting(), **os.environ},
                pass_fds=(there.fileno(),),
            )
        transport.send(messages.encode(messages.Start(config)))
        message = messages.decode_from_engine(await _first_message(process, first))
        if isinstance(message, messages.Failed):
            raise message.error.to_exception()
        assert isinstance(message, messages.Ready)
        return process, transport, message
    except BaseException:
        transport.close()
        if process is not None:
            await _end(process)
        raise


async def _first_message(process: asyncio.subprocess.Process, first: asyncio.Future[bytes]) -> bytes:
    ended = asyncio.ensure_future(process.wait())
    try:
        either: set[asyncio.Future[Any]] = {first, ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({first}, timeout=FINAL_MESSAGE_S)
        if first.done():
            return first.result()
        raise EngineDead(f"{_end_of_process(ended.result())} while starting; see its messages above")
    finally:
        first.cancel()
        ended.cancel()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def _end_of_process(code: int | None) -> str:
    if code is None:
        return "the connection to the engine process failed"
    return f"the engine process {describe_exit(code)}"
