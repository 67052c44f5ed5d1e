"""The blocking client: the coroutines of `AsyncClient`, which here wait by blocking (`vlora.client.calling`)."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from vlora.client.aio import AsyncClient
from vlora.client.calling import Blocking, Caller, Closing, TextParts, run
from vlora.client.frame_stream import FrameStream
from vlora.client.inputs import text_request
from vlora.client.values import Answer
from vlora.errors import Disconnected, EngineDead

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Client, P], T]:
    @functools.wraps(method)
    def call(self: Client, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self, *args, **kwargs))

    return call


def _streamed(method: Callable[Concatenate[Any, P], Any]) -> Callable[Concatenate[Client, P], TextStream]:
    @functools.wraps(method)
    def call(self: Client, *args: P.args, **kwargs: P.kwargs) -> TextStream:
        return TextStream(run(self._begin(text_request(*args, **kwargs))))  # type: ignore[arg-type]

    call.__signature__ = inspect.signature(method).replace(return_annotation="TextStream")  # type: ignore[attr-defined]
    return call


def _opened(method: Callable[Concatenate[Any, P], Any]) -> Callable[Concatenate[Client, P], FrameStream]:
    @functools.wraps(method)
    def call(self: Client, *args: P.args, **kwargs: P.kwargs) -> FrameStream:
        return FrameStream(run(method(self, *args, **kwargs)))

    call.__signature__ = inspect.signature(method).replace(return_annotation="FrameStream")  # type: ignore[attr-defined]
    return call


class TextStream(Closing, Iterator[str]):
    """Pieces of an answer's text; `answer` is set after the last piece."""

    def __init__(self, parts: TextParts) -> None:
        self._parts = parts
        self.answer: Answer | None = None

    def __next__(self) -> str:
        part = None if self._parts.ended else run(self._parts.next())
        if isinstance(part, str):
            return part
        self.answer = self.answer or part
        raise StopIteration

    def close(self) -> None:
        """Cancel the rest of the answer."""
        self._parts.close()

    def __del__(self) -> None:
        self.close()


class Client(Closing, Caller):
    """Client of `vlora serve` over RPyC. Connects at the first call, and reconnects after a connection broke. Many
    threads may share one; their requests run concurrently.

    ::

        with Client() as client:
            print(client.generate("What is this?", ["photo.jpg"]).text)
            print(client.ask_head(["frame.png"], adapter="traffic", head="jam").label)

    Errors are the classes of `vlora.errors`: subclasses of BadRequest for invalid requests, Disconnected if the server
    cannot be reached, DeadlineMissed after `timeout_s`, EngineDead if the server lost its engine, Unauthorized and
    Forbidden if it rejects the token.

    servers: HOST:PORT of each front end of a service, instead of host and port. If the connection is lost, its calls
    fail, and the next one goes to the next server that answers.

    host: Without it, the address, token and TLS files are those of the commands: VLORA_SERVER (HOST:PORT, several
    with commas; by default this machine), VLORA_TOKEN, VLORA_TLS_CA, VLORA_TLS_CERT and VLORA_TLS_KEY. tls: an SSL
    context that verifies the server's certificate and optionally presents a client certificate;
    `ssl.create_default_context(cafile=...)` makes one. Without it the connection is plain.
    """

    waiting = Blocking()

    call = _blocking(AsyncClient.call)
    generate = _blocking(AsyncClient.generate)
    stream = _streamed(AsyncClient.stream)
    ask_head = _blocking(AsyncClient.ask_head)
    ask_heads = _blocking(AsyncClient.ask_heads)
    embed = _blocking(AsyncClient.embed)
    score = _blocking(AsyncClient.score)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    open_stream = _opened(AsyncClient.open_stream)
    adapters = _blocking(AsyncClient.adapters)
    load_adapter = _blocking(AsyncClient.load_adapter)
    unload_adapter = _blocking(AsyncClient.unload_adapter)
    pin_adapter = _blocking(AsyncClient.pin_adapter)
    train = _blocking(AsyncClient.train)
    trainings = _blocking(AsyncClient.trainings)
    cancel_training = _blocking(AsyncClient.cancel_training)
    correct = _blocking(AsyncClient.correct)
    learning = _blocking(AsyncClient.learning)
    promote = _blocking(AsyncClient.promote)
    roll_back = _blocking(AsyncClient.roll_back)
    stats = _blocking(AsyncClient.stats)
    cluster = _blocking(AsyncClient.cluster)
    cluster_adapters = _blocking(AsyncClient.cluster_adapters)
    drain_replica = _blocking(AsyncClient.drain_replica)
    resume_replica = _blocking(AsyncClient.resume_replica)
    scale = _blocking(AsyncClient.scale)

    def close(self) -> None:
        """Close the connection; the server cancels the connection's running requests."""
        self._close()


PAUSE_S = 0.5


def wait_for_server(
    client: Client,
    wait_s: float,
    stop: threading.Event | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Return once the server answers; after `wait_s` seconds, or when `stop` is set, raise Disconnected or EngineDead.

    say is called once, with the reason for waiting.
    """
    stop = stop or threading.Event()
    deadline = time.monotonic() + wait_s
    reported = False
    while True:
        try:
            client.stats()
            return
        except (Disconnected, EngineDead) as error:
            if stop.is_set() or time.monotonic() >= deadline:
                raise
            if not reported:
                say(f"{error}; waiting for it")
                reported = True
            stop.wait(min(PAUSE_S, max(0.0, deadline - time.monotonic())))
