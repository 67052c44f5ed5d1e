"""The blocking client. One may be shared by many threads; their requests are under way at the same time."""

from __future__ import annotations

import contextlib
import os
import queue
import ssl
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Self, TypeVar

from vlora.client import calls
from vlora.client.calls import Call, Image
from vlora.client.connection import ServerConnection
from vlora.client.frame_stream import FrameStream
from vlora.client.own_question import head_of_question
from vlora.client.values import DEFAULT_HOST, DEFAULT_PORT, Answer, HeadResult, StreamOptions, StreamPart
from vlora.errors import DeadlineMissed, VLoraError
from vlora.types import AdapterStatus, EngineStats

T = TypeVar("T")

TIMEOUT_S = 150.0  # above the server's own limit, whose error says more


class Client:
    """Talks to `vlora serve` over RPyC. Connects at the first call, and again after a connection broke.

    ::

        with Client() as client:
            print(client.generate("What is this?", ["photo.jpg"]).text)
            print(client.ask_head(["frame.png"], adapter="traffic", head="jam").label)

    Errors are the classes of `vlora.errors`: BadRequest's kinds for what is wrong with the request, Disconnected when
    there is no server, DeadlineMissed after `timeout_s`, EngineDead when the server lost its engine, Unauthorized and
    Forbidden when it does not take the token.

    tls: how to check the server's certificate, and perhaps which one to show; `ssl.create_default_context(cafile=...)`
    makes one. Without it the connection is plain.
    """

    def __init__(
        self,
        host: str = DEFAULT_HOST,
        port: int = DEFAULT_PORT,
        *,
        timeout_s: float = TIMEOUT_S,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._token = token
        self._tls = tls
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._live: ServerConnection | None = None

    def generate(
        self,
        question: str,
        images: Sequence[Image] = (),
        adapter: str | None = None,
        *,
        max_latency_s: float | None = None,
        max_ttft_s: float | None = None,
        priority: int = 0,
        **sampling: Any,
    ) -> Answer:
        """Ask in words, about images if there are any. sampling: fields of `vlora.types.SamplingParams`.

        max_latency_s: an answer after that is none (DeadlineMissed). max_ttft_s: bound on the first token. Where the
        server sees that it cannot keep a bound, it says so at once (DeadlineUnreachable). priority: who waits with a
        higher one comes first, from -10 to 10.
        """
        connection = self.connection()
        call_id = connection.new_id()
        return self._wait(
            connection,
            calls.generate(call_id, question, images, adapter, max_latency_s, max_ttft_s, priority, sampling),
            call_id,
        )

    def stream(
        self,
        question: str,
        images: Sequence[Image] = (),
        adapter: str | None = None,
        *,
        max_latency_s: float | None = None,
        max_ttft_s: float | None = None,
        priority: int = 0,
        **sampling: Any,
    ) -> TextStream:
        """As `generate`, but pieces of text as they come. Leaving the stream early cancels the request."""
        connection = self.connection()
        call_id = connection.new_id()
        call = calls.stream(call_id, question, images, adapter, max_latency_s, max_ttft_s, priority, sampling)
        return TextStream(_parts(connection, call, call_id, self._timeout_s))

    def ask_head(
        self,
        images: Sequence[Image],
        adapter: str,
        head: str,
        *,
        max_latency_s: float | None = None,
        priority: int = 0,
    ) -> HeadResult:
        """Ask a task head, which answers in one pass and brings its own question; images: as many as it has frames."""
        connection = self.connection()
        call_id = connection.new_id()
        return self._wait(connection, calls.ask_head(call_id, images, adapter, head, max_latency_s, priority), call_id)

    def head_of(self, question: str, adapter: str | None, num_images: int = 1) -> str | None:
        """Name of the adapter's only head for this question about so many images, or for its own where it is empty;
        None where there is none, or several. `ask_head` then answers better than text, which is trained beside it."""
        return None if adapter is None else head_of_question(self.adapters(), question, num_images, adapter)

    def open_stream(
        self,
        *,
        adapter: str,
        head: str,
        max_latency_s: float | None = None,
        fps: float | None = None,
        drop: Literal["newest", "none"] = "newest",
        priority: int = 0,
    ) -> FrameStream:
        """A stream of frames to one head; each frame gets a result, in order. Raises UnknownAdapter, UnknownHead,
        OverCapacity when the server has too many streams.

        max_latency_s bounds each frame; fps is how many a second are started at most; drop is what happens when frames
        come faster than they are answered: "newest" lets a newer one take the place of one that waits (whose result
        then says so), "none" makes sending wait; priority is that of its requests among all that wait.
        """
        options = StreamOptions(
            adapter=adapter, head=head, max_latency_s=max_latency_s, fps=fps, drop=drop, priority=priority
        )
        stream_id = self._wait(self.connection(), calls.open_frames(options))
        return FrameStream(stream_id, lambda call: self._wait(self.connection(), call), self._timeout_s)

    def adapters(self) -> tuple[AdapterStatus, ...]:
        """Every adapter of the server, with its heads."""
        return self._wait(self.connection(), calls.adapters())

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> AdapterStatus:
        """Register an adapter folder of the server's file system under a name. Raises BadAdapter with the reason."""
        return self._wait(self.connection(), calls.load_adapter(name, path))

    def unload_adapter(self, name: str, *, drain: bool = False) -> None:
        """Forget an adapter: new requests for it are refused at once. Raises UnknownAdapter.

        Its requests under way are cancelled; with `drain` they finish, and its memory is freed with the last of them.
        """
        self._wait(self.connection(), calls.unload_adapter(name, drain))

    def pin_adapter(self, name: str, pinned: bool = True) -> AdapterStatus:
        """Keep an adapter on the server's device, or let it go. Raises UnknownAdapter, OverCapacity."""
        return self._wait(self.connection(), calls.pin_adapter(name, pinned))

    def stats(self) -> EngineStats:
        """Counters of the engine since it started."""
        return self._wait(self.connection(), calls.stats())

    def close(self) -> None:
        """Close the connection; what is still under way on it is cancelled."""
        with self._lock:
            live, self._live = self._live, None
        if live is not None:
            live.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def connection(self) -> ServerConnection:
        """The live connection; a new one when there is none. Raises Disconnected."""
        with self._lock:
            if self._live is None or self._live.closed:
                self._live = ServerConnection(self._host, self._port, self._token, self._tls)
            return self._live

    def _wait(self, connection: ServerConnection, call: Call[T], call_id: int | None = None) -> T:
        """call_id: what to cancel on the server when the caller gives up."""
        future = connection.start(call)
        try:
            return connection.wait(future, self._timeout_s)
        except (DeadlineMissed, KeyboardInterrupt):
            if call_id is not None:
                abandon(connection, call_id)
            raise


class TextStream(Iterator[str]):
    """Pieces of an answer's text; `answer` is set when they have all come."""

    def __init__(self, parts: Iterator[str | Answer]) -> None:
        self._parts = parts
        next(parts)  # nothing yet: the request is sent
        self.answer: Answer | None = None

    def __next__(self) -> str:
        part = next(self._parts)
        if isinstance(part, Answer):
            self.answer = part
            raise StopIteration
        return part

    def close(self) -> None:
        """Cancel what has not come yet."""
        self._parts.close()  # type: ignore[attr-defined]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _parts(
    connection: ServerConnection, call: Call[StreamPart], call_id: int, timeout_s: float
) -> Iterator[str | Answer]:
    """Nothing once the request is sent; then its text, and its answer. Leaving earlier cancels it on the server."""
    arrived: queue.SimpleQueue[StreamPart | Future[StreamPart]] = queue.SimpleQueue()

    def hear(part: StreamPart) -> bool:
        if part.answer is None:
            arrived.put(part)
        return part.answer is None

    future = connection.start(call, hear)
    future.add_done_callback(arrived.put)
    try:
        yield ""
        while True:
            part = arrived.get(timeout=timeout_s)
            if isinstance(part, Future):
                break
            yield part.text
        answer = part.result().answer
        assert answer is not None
        yield answer
    except queue.Empty as error:
        raise DeadlineMissed(f"no word from the server within {timeout_s:g} s") from error
    finally:
        if not future.done():
            abandon(connection, call_id)


def abandon(connection: ServerConnection, call_id: int) -> None:
    """Tell the server that nobody waits any more; without a connection it knows already."""
    with contextlib.suppress(VLoraError):
        connection.start(calls.cancel(call_id))
