"""The main of an engine process: one `Engine`, one step loop, one socket to the client that started it.

Run as `python -m vlora.engine.ipc.worker DESCRIPTOR`, the descriptor of an open socket. When its other end closes, the
parent is dead and the engine ends too. SIGINT and SIGTERM are ignored: the parent handles them and drains.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from vlora.config import EngineConfig
from vlora.engine.host_resources import default_threads
from vlora.engine.ipc import messages
from vlora.engine.ipc.messages import EngineTransport, LoadReporter
from vlora.engine.operations import perform
from vlora.errors import EngineDead, StepFailed, VLoraError
from vlora.lazy import hidden
from vlora.logging_format import configure
from vlora.types import ErrorValue, Request, RequestOutput, TokenScore

if TYPE_CHECKING:
    from vlora.engine.engine import Engine


def main() -> None:
    import torch

    # torch's compiler, which transformers imports, imports triton; only kernels for GPUs use it.
    unused = () if torch.backends.cuda.is_built() else ("triton",)
    with hidden("accelerate", "scipy", *unused):
        from vlora.engine.engine import Engine

    configure(os.environ)
    code = run(int(sys.argv[1]), Engine)
    # Unloading torch takes seconds, which would delay the server's stop; there is no state to save.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(
    descriptor: int,
    make_engine: Callable[[EngineConfig], Engine],
    make_transport: Callable[[socket.socket], EngineTransport] = EngineTransport,
) -> int:
    """Serve the client at the other end of the socket until it sends Stop or closes; returns the exit code.

    The socket is closed with the process, so that the peer sees both ends at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)  # so that child processes do not keep it open
    transport = make_transport(socket.socket(fileno=descriptor))
    try:
        first = transport.receive(block=True)
        assert first is not None
        start = messages.decode_to_engine(first)
        assert isinstance(start, messages.Start)
        engine = make_engine(_with_threads(start.config))
        gc.freeze()  # a full collection between two steps would otherwise scan all objects that exist now
        transport.send(messages.encode(ready_of(engine, start.config)))
        EngineWorker(engine, transport).loop()
    except EOFError:
        return 0  # the client closed before it sent Start
    except VLoraError as error:
        transport.send(messages.encode(messages.Failed(ErrorValue.of(error))))
        return 1
    except Exception as error:
        traceback.print_exc()
        cause = EngineDead(f"the engine stopped: {type(error).__name__}: {error}")
        transport.send(messages.encode(messages.Failed(ErrorValue.of(cause))))
        return 1
    finally:
        gc.unfreeze()  # otherwise libraries report leaks at exit
    return 0


def ready_of(engine: Engine, config: EngineConfig) -> messages.Ready:
    limits = (engine.limits.max_context, config.max_batch_size, config.block_size, engine.load().total_blocks)
    return messages.Ready(config.model, os.getpid(), *limits)


def _with_threads(config: EngineConfig) -> EngineConfig:
    if config.threads is not None:
        return config
    return dataclasses.replace(config, threads=default_threads(config.tensor_parallel))


class EngineWorker:
    """Handles messages between steps: without blocking while there is work, blocking otherwise."""

    def __init__(self, engine: Engine, transport: EngineTransport) -> None:
        self._engine = engine
        self._transport = transport
        if engine.alarm is not None:
            threading.Thread(
                target=self._wake_on_alarm, args=(engine.alarm,), name="vlora-engine-alarm", daemon=True
            ).start()
        self._coalescer = OutputCoalescer(version_of=engine.version_of)
        self._reports = LoadReporter(engine.load, self._send)
        self._started_s = time.monotonic()  # of the current step
        transport.reply_at_once(messages.PING, self._pong)
        self._trainings = engine.parts.trainings
        engine.send_early = self._send_outputs
        self._other_work = engine.parts.other_work
        self._other_work.wake = self._wake
        self._may_sleep = False
        self._stopping = False

    def loop(self) -> None:
        # A step evicts the CPU caches with its weights, so code between two steps runs cold and takes five times as
        # long: without messages to handle, the loop does as little as possible between steps.
        while not self._stopping:
            self._started_s = time.monotonic()
            if not self._engine.has_work or self._transport.has_message:
                self._may_sleep = True
                for message in self._messages(block=not (self._engine.has_work or self._works())):
                    self._handle(message)
                self._may_sleep = False
                if not self._engine.has_work:
                    self._engine.check_ranks()  # as each step does
            else:
                self._send_outputs(self._engine.step())
                self._works()
            self._reports.poll()
        self._send_outputs(self._engine.close())

    def _works(self) -> bool:
        """Run a piece of other work, unless a message waits. Returns whether not to wait for a message."""
        return self._transport.has_message or self._other_work.advance()

    def _wake(self) -> None:
        """Let the loop look for other work. After a step it does so by itself, unless it finds a message."""
        if self._may_sleep:
            self._transport.wake()

    def _pong(self) -> bytes:
        """Called by the transport's thread."""
        step_s = time.monotonic() - self._started_s if self._engine.has_work else 0.0
        return messages.encode(messages.Pong(step_s))

    def _messages(self, *, block: bool) -> Iterator[messages.ToEngine]:
        limits = (self._reports.wait_s, self._other_work.retry_s) if block else ()
        wait_s = min((limit for limit in limits if limit is not None), default=None)
        try:
            while not self._stopping and (data := self._transport.receive(block=block, timeout_s=wait_s)) is not None:
                self._started_s = time.monotonic()  # the engine may have been idle
                yield messages.decode_to_engine(data)
                block = False
        except EOFError:
            self._stopping = True

    def _wake_on_alarm(self, alarm: int) -> None:
        os.read(alarm, 1)
        self._transport.wake()

    def _handle(self, message: messages.ToEngine) -> None:
        match message:
            case messages.Add():
                self._add(message)
            case messages.Cancel():
                version = self._engine.version_of(message.request_id)
                output = self._engine.cancel(message.request_id)
                # The answer may continue elsewhere, after the tokens that were held back.
                self._send_outputs(() if output is None else (replace(output, adapter_version=version),))
            case messages.Stop():
                self._stopping = True
            case messages.WatchLoad():
                self._reports.watch(message.every_s)
            case messages.ReplaceBaseTokens():
                if (base := self._engine.parts.base) is not None:
                    base.replace_tokens(message.tokens)
            case messages.Ping():  # one that came before the loop began
                self._transport.send(self._pong())
            case messages.Start():
                raise AssertionError("the engine is already started")
            case messages.Call(call_id, operation):
                self._perform(call_id, operation)

    def _add(self, message: messages.Add) -> None:
        request_id = message.request.request_id
        self._reports.count_request()
        try:
            self._engine.add(message.request)
            self._coalescer.add(message.request)
            if held := self._coalescer.flush():  # a step that computes a prompt is longer than the last one
                self._send(messages.Outputs(held))
        except VLoraError as error:
            self._refuse(request_id, error)
        except Exception as error:
            # An internal error fails only the request that caused it.
            traceback.print_exc()
            self._engine.cancel(request_id)
            self._refuse(
                request_id, StepFailed(f"the engine could not take the request: {type(error).__name__}: {error}")
            )

    def _refuse(self, request_id: str, error: VLoraError) -> None:
        refused = RequestOutput(request_id=request_id, finish_reason="error", error=ErrorValue.of(error))
        self._send_outputs((refused,))

    def _perform(self, call_id: int, operation: msgspec.Raw) -> None:
        done: Future[Any] = Future()
        try:
            found = perform(self._engine, messages.decode_operation(operation), self._send_outputs)
            if isinstance(found, Future):
                done = found
            else:
                done.set_result(found)
        except Exception as error:
            done.set_exception(error)
        # The engine completes others in its own thread, between two steps.
        done.add_done_callback(lambda _: self._send(_reply(call_id, done)))

    def _send_outputs(self, outputs: tuple[RequestOutput, ...]) -> None:
        if outputs := self._coalescer.coalesce(outputs):
            self._send(messages.Outputs(outputs))

    def _send(self, message: messages.FromEngine | messages.Reply[Any]) -> None:
        self._transport.send(messages.encode(message))


def _reply(call_id: int, done: Future[Any]) -> messages.Reply[Any]:
    try:
        return messages.Reply(call_id, done.result())
    except VLoraError as error:
        return messages.Reply(call_id, error=ErrorValue.of(error))
    except Exception as error:
        traceback.print_exc()
        return messages.Reply(call_id, error=ErrorValue("error", f"{type(error).__name__}: {error}"))


PACE_S = 0.04
"""Streamed tokens are sent at most once in this time (25 times a second) if steps are shorter."""

SEARCH_PACE_S = 0.01
"""The same for answers with stop strings, where tokens computed after the stop string are wasted."""


class OutputCoalescer:
    """Holds back the tokens of requests for whole answers (`Request.whole`), and briefly those of streams.

    A message costs the sender, the socket and the readers about the same regardless of its size, and much of the cost
    delays the next step, because the readers wake up while it runs. With steps of 1 to 2 ms, one message per step makes
    steps a tenth longer (docs/decisions/0034).

    A stream's first tokens and its end are never held, and each message includes the held tokens of all streams. Held
    tokens are sent before a step if one as long as the last would delay them beyond their pace.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        version_of: Callable[[str], str | None] = lambda request_id: None,
    ) -> None:
        """Start without requests.

        Args:
            version_of: The content hash of a request's adapter, which is sent with its first tokens.
        """
        self._clock = clock
        self._version_of = version_of
        self._held: dict[str, tuple[list[int], list[TokenScore]]] = {}
        self._whole: set[str] = set()
        self._searched: set[str] = set()
        self._started: set[str] = set()  # streams with their first tokens already sent
        self._sent_s = self._last_step_s = clock()

    def add(self, request: Request) -> None:
        """Hold the outputs of this request. If `whole`, all tokens are held until its last message."""
        if request.whole:
            self._whole.add(request.request_id)
        elif request.sampling.stop:
            self._searched.add(request.request_id)

    def coalesce(self, outputs: Iterable[RequestOutput]) -> tuple[RequestOutput, ...]:
        """The outputs to send now: of this step, and held ones that are due."""
        now_s = self._clock()
        step_s, self._last_step_s = now_s - self._last_step_s, now_s
        due: list[RequestOutput] = []
        for output in outputs:
            # Most outputs of a step are appended to held ones, on the shortest path (see EngineWorker.loop).
            if output.finish_reason is None and (held := self._held.get(output.request_id)) is not None:
                held[0].extend(output.token_ids)
                held[1].extend(output.scores)
            elif (now := self._hold_or_send(output)) is not None:
                due.append(now)
        due_s = now_s - self._sent_s + step_s
        if due or due_s > PACE_S or (due_s > SEARCH_PACE_S and not self._searched.isdisjoint(self._held)):
            due += self.flush()
        return tuple(due)

    def flush(self) -> tuple[RequestOutput, ...]:
        """Flush the held tokens of streams, because the next step may take long."""
        self._sent_s = self._clock()
        names = [name for name in self._held if name not in self._whole]
        return tuple(self._with_held(RequestOutput(request_id=name)) for name in names)

    def _hold_or_send(self, output: RequestOutput) -> RequestOutput | None:
        name = output.request_id
        if output.finished:
            self._whole.discard(name)
            self._searched.discard(name)
            self._started.discard(name)
            return self._with_held(output)
        if name not in self._whole and name not in self._started:
            self._started.add(name)
            return msgspec.structs.replace(output, adapter_version=self._version_of(name))
        self._held[name] = ([*output.token_ids], [*output.scores])
        return None

    def _with_held(self, output: RequestOutput) -> RequestOutput:
        if output.request_id not in self._held:
            return output
        token_ids, scores = self._held.pop(output.request_id)
        token_ids += output.token_ids
        scores += output.scores
        return msgspec.structs.replace(output, token_ids=tuple(token_ids), scores=tuple(scores))


if __name__ == "__main__":
    main()
