"""The main of an engine process: one `Engine`, one step loop, one socket to the client that started it.

Run as `python -m vlora.engine.process ADDRESS`. Standard input is a leash: it never carries anything, and when it
closes, the parent is gone and the engine ends too. Interrupt and terminate signals are for the parent, which drains.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import zmq

from vlora.config import EngineConfig
from vlora.engine import wire
from vlora.engine.gathering import Gathering
from vlora.errors import EngineDead, StepFailed, VLoraError
from vlora.logs import configure
from vlora.types import ErrorValue, RequestOutput

if TYPE_CHECKING:
    from vlora.engine.engine import Engine

_LAST_WORDS_MS = 1000  # how long a closing socket may take to hand over what was sent


def main() -> None:
    from transformers.utils import logging

    from vlora.engine.engine import Engine

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    configure(os.environ)
    code = run(sys.argv[1], Engine)
    # Taking torch apart again takes seconds that whoever stops the server would wait; nothing is left to save.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(address: str, make_engine: Callable[[EngineConfig], Engine]) -> int:
    """Serve the client at `address` until it says stop or is gone; the process's exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)  # never drop and never block: the client bounds what is under way
    socket.connect(address)
    try:
        start = wire.decode_to_engine(socket.recv())
        assert isinstance(start, wire.Start)
        engine = make_engine(start.config)
        gc.freeze()  # what is there by now stays: a full collection would look at all of it again, between two steps
        socket.send(wire.encode(wire.Ready(start.config.model, os.getpid(), engine.limits.max_context)))
        EngineWorker(engine, socket).loop()
    except VLoraError as error:
        socket.send(wire.encode(wire.Failed(ErrorValue.of(error))))
        return 1
    except Exception as error:
        traceback.print_exc()
        cause = EngineDead(f"the engine stopped: {type(error).__name__}: {error}")
        socket.send(wire.encode(wire.Failed(ErrorValue.of(cause))))
        return 1
    finally:
        gc.unfreeze()  # or libraries would report as leaked, at exit, what nothing collected
        socket.close(linger=_LAST_WORDS_MS)
        context.term()
    return 0


class EngineWorker:
    """Takes messages between steps: without waiting while there is work, blocking when there is none."""

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._socket = socket
        self._leash = sys.stdin.fileno()
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._leash, zmq.POLLIN)
        if engine.alarm is not None:
            self._poller.register(engine.alarm, zmq.POLLIN)
        self._gathering = Gathering()
        self._stopping = False

    def loop(self) -> None:
        while True:
            for message in self._messages(block=not self._engine.has_work):
                self._handle(message)
            if self._stopping:
                break
            self._engine.check_ranks()
            if self._engine.has_work:
                self._send_outputs(self._engine.step())
        self._send_outputs(self._engine.close())

    def _messages(self, *, block: bool) -> Iterator[wire.ToEngine]:
        ready = dict(self._poller.poll(None if block else 0))
        if self._leash in ready:
            self._stopping = True
            return
        while self._socket in ready and not self._stopping:
            yield wire.decode_to_engine(self._socket.recv())
            ready = dict(self._poller.poll(0))

    def _handle(self, message: wire.ToEngine) -> None:
        match message:
            case wire.Add():
                self._add(message)
            case wire.Cancel():
                output = self._engine.cancel(message.request_id)
                self._send_outputs(() if output is None else (output,))
            case wire.Stop():
                self._stopping = True
            case wire.Start():
                raise AssertionError("the engine is already started")
            case call:
                self._send(self._reply(call))

    def _add(self, message: wire.Add) -> None:
        request_id = message.request.request_id
        try:
            self._engine.add(message.request)
            if message.request.whole:
                self._gathering.hold(request_id)
        except VLoraError as error:
            self._refuse(request_id, error)
        except Exception as error:
            # A request that trips over a mistake of ours fails alone.
            traceback.print_exc()
            self._engine.cancel(request_id)
            self._refuse(
                request_id, StepFailed(f"the engine could not take the request: {type(error).__name__}: {error}")
            )

    def _refuse(self, request_id: str, error: VLoraError) -> None:
        refused = RequestOutput(request_id=request_id, finish_reason="error", error=ErrorValue.of(error))
        self._send_outputs((refused,))

    def _reply(self, call: wire.Call) -> wire.Reply:
        try:
            match call:
                case wire.RegisterAdapters():
                    self._engine.register_adapters(call.paths)
                    return wire.Reply(call_id=call.call_id)
                case wire.LoadAdapter():
                    return wire.Reply(call_id=call.call_id, adapters=(self._engine.load_adapter(call.name, call.path),))
                case wire.UnloadAdapter():
                    self._send_outputs(self._engine.unload_adapter(call.name, call.drain))
                    return wire.Reply(call_id=call.call_id)
                case wire.PinAdapter():
                    return wire.Reply(
                        call_id=call.call_id, adapters=(self._engine.pin_adapter(call.name, call.pinned),)
                    )
                case wire.ListAdapters():
                    page = self._engine.adapters(call.after, wire.ADAPTERS_PER_REPLY)
                    return wire.Reply(call_id=call.call_id, adapters=page)
                case wire.GetStats():
                    return wire.Reply(call_id=call.call_id, stats=self._engine.stats())
                case wire.GetSnapshot():
                    return wire.Reply(call_id=call.call_id, snapshot=self._engine.snapshot(call.since))
        except VLoraError as error:
            return wire.Reply(call_id=call.call_id, error=ErrorValue.of(error))
        except Exception as error:
            traceback.print_exc()
            return wire.Reply(call_id=call.call_id, error=ErrorValue("error", f"{type(error).__name__}: {error}"))

    def _send_outputs(self, outputs: tuple[RequestOutput, ...]) -> None:
        if outputs := self._gathering.pass_on(outputs):
            self._send(wire.Outputs(outputs))

    def _send(self, message: wire.FromEngine) -> None:
        self._socket.send(wire.encode(message))


if __name__ == "__main__":
    main()
