"""The blocking client. Many threads may share one; their requests run concurrently."""

from __future__ import annotations

import functools
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

from vlora.client import calls
from vlora.client.calls import Adapter, Call, Image, Visual
from vlora.client.connection import ServerConnection, address_of
from vlora.client.frame_stream import FrameStream
from vlora.client.text_stream import TextStream
from vlora.client.tls import client_context
from vlora.client.values import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    Answer,
    HeadOutcome,
    HeadResult,
    StreamPart,
    TextQuestion,
)
from vlora.errors import DeadlineMissed, Disconnected, EngineDead
from vlora.types import AdapterStatus, EngineStats, TrainingStatus
from vlora.types.domain import Way
from vlora.types.learning import Correction, LearningStatus
from vlora.types.replicas import AdapterPlace, ClusterStatus

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_S = 150.0  # above the server's own limit, so that the server's more specific error arrives first


def _asks(make: Callable[Concatenate[Client, P], Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """The method that sends a call and waits for its value. `AsyncClient` awaits the same call (`__wrapped__`)."""
    make.__annotations__["return"] = make.__annotations__["return"].removeprefix("Call[").removesuffix("]")

    @functools.wraps(make)
    def ask(self: Client, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait(make(self, *args, **kwargs))

    return ask


def _streams(make: Callable[Concatenate[Client, P], Call[StreamPart]]) -> Callable[Concatenate[Client, P], TextStream]:
    """The method that sends a call and returns the stream of its values."""
    make.__annotations__["return"] = "TextStream"

    @functools.wraps(make)
    def stream(self: Client, *args: P.args, **kwargs: P.kwargs) -> TextStream:
        return TextStream(self.connection(), make(self, *args, **kwargs), self._timeout_s)

    return stream


def _opens(make: Callable[Concatenate[Client, P], Call[str]]) -> Callable[Concatenate[Client, P], FrameStream]:
    """The method that sends a call and returns the stream of frames that it opened."""
    make.__annotations__["return"] = "FrameStream"

    @functools.wraps(make)
    def open_stream(self: Client, *args: P.args, **kwargs: P.kwargs) -> FrameStream:
        return FrameStream(self._wait(make(self, *args, **kwargs)), self._wait, self._timeout_s)

    return open_stream


class Client:
    """Client of `vlora serve` over RPyC. Connects at the first call, and reconnects after a connection broke.

    ::

        with Client() as client:
            print(client.generate("What is this?", ["photo.jpg"]).text)
            print(client.ask_head(["frame.png"], adapter="traffic", head="jam").label)

    Errors are the classes of `vlora.errors`: subclasses of BadRequest for invalid requests, Disconnected if the server
    cannot be reached, DeadlineMissed after `timeout_s`, EngineDead if the server lost its engine, Unauthorized and
    Forbidden if it rejects the token.

    host: Without it, the address, token and TLS files are those of the commands: VLORA_SERVER (HOST:PORT, by default
    this machine), VLORA_TOKEN, VLORA_TLS_CA, VLORA_TLS_CERT and VLORA_TLS_KEY. tls: an SSL context that verifies the
    server's certificate and optionally presents a client certificate; `ssl.create_default_context(cafile=...)` makes
    one. Without it the connection is plain.
    """

    def __init__(
        self,
        host: str | None = None,
        port: int | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if host is None and port is None:
            host, port = address_of(os.environ.get("VLORA_SERVER") or f"{DEFAULT_HOST}:{DEFAULT_PORT}", "VLORA_SERVER")
            token = token or os.environ.get("VLORA_TOKEN") or None
            files = (os.environ.get(f"VLORA_TLS_{name}") or None for name in ("CA", "CERT", "KEY"))
            tls = tls or client_context(*files)
        self._host = host or DEFAULT_HOST
        self._port = port or DEFAULT_PORT
        self._token = token
        self._tls = tls
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._live: ServerConnection | None = None

    @_asks
    def generate(
        self,
        question: str,
        images: Sequence[Visual] = (),
        adapter: Adapter | None = None,
        *,
        max_latency_s: float | None = None,
        max_ttft_s: float | None = None,
        priority: int = 0,
        answer: Way | None = None,
        **sampling: Any,
    ) -> Call[Answer]:
        """Answer a question, optionally about images and videos (`vlora.client.Video`), in words or by a domain's head.

        Args:
            adapter: The name of an adapter or of a domain. Several adapters are composed: "a+b", or
                {"a": 0.7, "b": 0.3} with weights.
            sampling: fields of `vlora.types.SamplingParams`.
            max_latency_s: bound on the whole answer; a later answer raises DeadlineMissed.
            max_ttft_s: bound on the first token. If the server predicts that it cannot meet a bound, it rejects the
                request immediately (DeadlineUnreachable).
            priority: from -10 to 10; waiting requests of higher priority are scheduled first.
            answer: "head" or "words"; None: the way that was more accurate on the domain's validation data, if the
                question is the domain's (or empty) and no option of sampling is given; `Answer.answered_by` says which.
        """
        args, num_bytes = calls.text_args(
            question, images, adapter, max_latency_s, max_ttft_s, priority, answer, sampling
        )
        return Call("generate", args, Answer, num_bytes, cancellable=True)

    @_streams
    def stream(
        self,
        question: str,
        images: Sequence[Visual] = (),
        adapter: Adapter | None = None,
        *,
        max_latency_s: float | None = None,
        max_ttft_s: float | None = None,
        priority: int = 0,
        answer: Way | None = None,
        **sampling: Any,
    ) -> Call[StreamPart]:
        """As `generate`, but yields pieces of text as they arrive; `AsyncClient` yields the complete Answer last.

        Leaving the stream early cancels the request.
        """
        args, num_bytes = calls.text_args(
            question, images, adapter, max_latency_s, max_ttft_s, priority, answer, sampling
        )
        return Call("stream", args, StreamPart, num_bytes, cancellable=True)

    @_asks
    def ask_head(
        self,
        images: Sequence[Image],
        adapter: str,
        head: str | None = None,
        *,
        max_latency_s: float | None = None,
        priority: int = 0,
    ) -> Call[HeadResult]:
        """Query a task head, which answers in one pass and has a fixed question; images: as many as it has frames.

        adapter: The name of an adapter or a domain. head: without it, the domain's.
        """
        encoded = calls.read_images(images)
        args = (encoded, adapter, head, max_latency_s, priority)
        return Call("ask_head", args, HeadResult, sum(map(len, encoded)), cancellable=True)

    @_asks
    def ask_heads(
        self,
        images: Sequence[Image],
        heads: Sequence[tuple[str, str | None]],
        *,
        max_latency_s: float | None = None,
        priority: int = 0,
    ) -> Call[tuple[HeadOutcome, ...]]:
        """Query several task heads about the same images in one request.

        The images are sent, read and encoded once for all adapters that do not change the vision side. Activated
        adapters also share the computation of the prompt before their invocation.

        Args:
            images: As many as each of the heads reads.
            heads: Pairs of an adapter or a domain and a head; None for the domain's.
            max_latency_s: Bound on each answer, as in `generate`.
            priority: As in `generate`.

        Returns:
            For each pair, in order, its answer or its error: a head that fails does not affect the others.
        """
        encoded = calls.read_images(images)
        args = (encoded, tuple((adapter, head) for adapter, head in heads), max_latency_s, priority)
        return Call("ask_heads", args, tuple[HeadOutcome, ...], sum(map(len, encoded)), cancellable=True)

    @_opens
    def open_stream(
        self,
        *,
        adapter: str | None = None,
        head: str | None = None,
        heads: Sequence[tuple[str, str]] = (),
        questions: Sequence[TextQuestion] = (),
        max_latency_s: float | None = None,
        fps: float | None = None,
        drop: Literal["newest", "none"] = "newest",
        priority: int = 0,
        name: str = "",
    ) -> Call[str]:
        """Open a stream of frames, each of which one or several heads and questions answer; results are in order.

        The images of a frame are sent and read once, and encoded once for all adapters that do not change the vision
        side. Activated adapters also share the computation of the prompt before their invocation.

        Args:
            adapter, head: the only head, or the first one.
            heads: more pairs of an adapter and one of its heads; all read the same number of images.
            questions: questions that an adapter or the base model answers in words.
            max_latency_s: bound on each answer, from the frame's arrival.
            fps: maximum number of frames started per second.
            drop: policy when frames arrive faster than they are answered: "newest" replaces a waiting frame by a newer
                one (the replaced frame's result reports it), "none" makes sending wait.
            priority: priority of the stream's requests among all waiting requests.
            name: of the camera, which the console shows beside what is asked.

        Raises:
            UnknownAdapter, UnknownHead: the server does not have them.
            BadRequest: there is no head and no question, one is given twice, or the heads read different numbers of
                images.
            OverCapacity: the server has too many streams.
        """
        asked = calls.stream_heads(adapter, head, heads), calls.stream_questions(questions)
        return Call("open_frames", (*asked, max_latency_s, fps, drop, priority, name), str)

    @_asks
    def adapters(self) -> Call[tuple[AdapterStatus, ...]]:
        """Every adapter of the server, with its heads."""
        return Call("adapters", (), tuple[AdapterStatus, ...])

    @_asks
    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> Call[AdapterStatus]:
        """Register an adapter folder of the server's file system under a name. Raises BadAdapter with the cause."""
        return Call("load_adapter", (name, os.fspath(path)), AdapterStatus)

    @_asks
    def unload_adapter(self, name: str, *, drain: bool = False) -> Call[None]:
        """Unregister an adapter: new requests for it are rejected immediately. Raises UnknownAdapter.

        Its running requests are cancelled; with `drain` they finish, and its memory is freed after the last of them.
        """
        return Call("unload_adapter", (name, drain), type(None))

    @_asks
    def pin_adapter(self, name: str, pinned: bool = True) -> Call[AdapterStatus]:
        """Keep an adapter on the server's device, or allow its eviction. Raises UnknownAdapter, OverCapacity."""
        return Call("pin_adapter", (name, pinned), AdapterStatus)

    @_asks
    def train(self, plan: str | os.PathLike[str]) -> Call[tuple[TrainingStatus, ...]]:
        """Begin or continue the trainings of a plan file of the server's file system.

        Raises:
            BadPlan: The plan or its data cannot be used.
            BadRequest: The engine cannot train, the model lacks a target, or the name of a training is in use.
        """
        return Call("train", (os.fspath(plan),), tuple[TrainingStatus, ...])

    @_asks
    def trainings(self) -> Call[tuple[TrainingStatus, ...]]:
        """Every training since the server's engine started."""
        return Call("trainings", (), tuple[TrainingStatus, ...])

    @_asks
    def cancel_training(self, name: str) -> Call[TrainingStatus]:
        """End a training; `train` with its plan continues it. Raises BadRequest if it is not running."""
        return Call("cancel_training", (name,), TrainingStatus)

    @_asks
    def correct(self, answer: Answer | str, label: str) -> Call[Correction]:
        """Send the right answer of a request, for the training of the adapter that answered.

        Returns once the server has it on disk. A later correction of the same answer replaces it.

        Args:
            answer: Of this caller, or its `request_id`; an admin token corrects all.
            label: The right answer.

        Raises:
            BadRequest: The answer is not kept (any longer), or the label is empty.
        """
        return Call("correct", (answer if isinstance(answer, str) else answer.request_id, label), Correction)

    @_asks
    def learning(self) -> Call[tuple[LearningStatus, ...]]:
        """The adapters that learn, with their versions."""
        return Call("learning", (), tuple[LearningStatus, ...])

    @_asks
    def promote(
        self,
        name: str,
        *,
        version: str | None = None,
        path: str | os.PathLike[str] | None = None,
        force: bool = False,
    ) -> Call[LearningStatus]:
        """Evaluate a version of a learning adapter in the background, and serve it if it is better.

        Args:
            name: Of the adapter.
            version: One on disk; its first digits suffice. None: the last one that was not promoted.
            path: A folder of the server's file system, instead.
            force: Serve it at once, without evaluation.

        Raises:
            BadRequest: The adapter does not learn, or there is no such version.
            BadAdapter: The folder cannot be served.
        """
        return Call("promote", (name, version, None if path is None else os.fspath(path), force), LearningStatus)

    @_asks
    def roll_back(self, name: str, version: str | None = None) -> Call[LearningStatus]:
        """Serve an earlier version of a learning adapter. version: its first digits suffice; None: the one before."""
        return Call("roll_back", (name, version), LearningStatus)

    @_asks
    def stats(self) -> Call[EngineStats]:
        """Counters of the engine since its start."""
        return Call("stats", (), EngineStats)

    @_asks
    def cluster(self) -> Call[ClusterStatus]:
        """The server's replicas. Raises UnknownReplica if it has one engine."""
        return Call("cluster", (), ClusterStatus)

    @_asks
    def cluster_adapters(self) -> Call[tuple[AdapterPlace, ...]]:
        """Where each adapter is, replica by replica, and why one cannot be used. Raises BadRequest for one engine."""
        return Call("cluster_adapters", (), tuple[AdapterPlace, ...])

    @_asks
    def drain_replica(self, name: str, *, wait_s: float = 5.0) -> Call[bool]:
        """Move a replica's requests to others, and send it no further ones until `resume_replica`.

        While no replica has room, a few of them wait at a time, with precedence over others. Raises UnknownReplica if
        there is no such replica, and BadRequest if no other one serves.

        Args:
            wait_s: How long to wait, at most 30 seconds.

        Returns:
            Whether it has no requests left; it is drained in both cases.
        """
        return Call("drain_replica", (name, wait_s), bool)

    @_asks
    def resume_replica(self, name: str) -> Call[None]:
        """Send requests to a drained replica again. Raises UnknownReplica if there is none."""
        return Call("resume_replica", (name,), type(None))

    @_asks
    def scale(self, number: int | Literal["auto"], *, wait_s: float = 5.0) -> Call[bool]:
        """Have another number of replicas: start further ones, or drain the last ones and then end them.

        Raises BadRequest for a number over the server's limit.

        Args:
            number: Their number, which holds until another call; "auto": the load decides from now on.
            wait_s: How long to wait, at most 30 seconds.

        Returns:
            Whether it is done. If not, starts go on, but what drains is ended by another call only.
        """
        return Call("scale", (number, wait_s), bool)

    def close(self) -> None:
        """Close the connection; the server cancels the connection's running requests."""
        with self._lock:
            live, self._live = self._live, None
        if live is not None:
            live.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def connection(self) -> ServerConnection:
        """The live connection; connects if there is none. Raises Disconnected."""
        with self._lock:
            if self._live is None or self._live.closed:
                self._live = ServerConnection(self._host, self._port, self._token, self._tls)
            return self._live

    def _wait(self, call: Call[T]) -> T:
        """The value of a call. Abandoning the wait cancels the request on the server."""
        connection = self.connection()
        call = connection.numbered(call)
        future = connection.start(call)
        try:
            return connection.wait(future, self._timeout_s)
        except (DeadlineMissed, KeyboardInterrupt):
            connection.abandon(call)
            raise


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
