"""The RPyC service. Calls take values and return `(True, msgpack)` or `(False, code, message)`.

Streamed text is sent as several replies to one call.

A client numbers its requests, uniquely per connection, and cancels them by number. A broken connection cancels all of
its active requests. Frame streams stay open and wait for their client to reconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import rpyc

from vlora.client.values import (
    PROTOCOL_VERSION,
    Answer,
    FrameResults,
    HeadOutcome,
    HeadResult,
    Hello,
    Reply,
    StreamOptions,
    StreamPart,
    TextQuestion,
    failure,
    sampling_params,
    success,
)
from vlora.config import Token
from vlora.errors import Aborted, BadRequest, DeadlineMissed, Disconnected, UnknownStream, VLoraError
from vlora.server.frontend import FrontEnd
from vlora.server.internal_errors import to_vlora_error
from vlora.server.media.image_decoding import RawImage
from vlora.server.rpyc.arguments import bounded_wait_s, checked, encoded_images, frame_images, positional, visuals
from vlora.server.rpyc.channel import Peer
from vlora.server.rpyc.operations import Operations
from vlora.server.rpyc.protocol import StreamedReply
from vlora.server.security.access import Access
from vlora.server.security.message_budget import ByteCharge
from vlora.server.security.public_errors import error_for, outcomes_for, results_for
from vlora.server.streams.frame_questions import images_per_frame
from vlora.server.streams.frame_stream import StreamSession
from vlora.types.domain import Way

AUTHENTICATE_S = 10.0  # a connection must authenticate within this time


class TextReply(StreamedReply):
    """The reply to a text stream: its text as `StreamPart`s."""

    def encode(self, text: str) -> Reply:
        return success(StreamPart(text=text))


class VLoraService(rpyc.Service):
    """One per connection. Its exposed methods run in the connection's thread and only schedule work on the event loop:
    `exposed_NAME` schedules `_NAME`."""

    def __init__(
        self, front_end: FrontEnd, loop: asyncio.AbstractEventLoop, model: str, access: Access, peer: Peer
    ) -> None:
        self._front_end = front_end
        self._loop = loop
        self._model = model
        self._access = access
        self._operations = Operations(front_end, lambda: self._access.check(self._token))
        self._peer = peer
        self._token: str | None = None
        self._tenant: str | None = None
        self._authenticated = not access.required
        if self._authenticated:
            peer.set_authenticated()
        else:
            peer.restrict()
            loop.call_soon_threadsafe(loop.call_later, AUTHENTICATE_S, self._close_unauthenticated)
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._closed = False

    def on_disconnect(self, conn: rpyc.Connection) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._loop.call_soon_threadsafe(self._cancel_all)

    # -- calls of clients, in the connection's thread -----------------------------------------------------------------

    def exposed_hello(self, *args: Any) -> Future[Reply]:
        """(token or nothing) -> Hello. A valid token authenticates the connection for the other calls."""
        return asyncio.run_coroutine_threadsafe(self._reply(None, None, self._hello, args), self._loop)

    def exposed_generate(self, *args: Any) -> Future[Reply]:
        """(call_id, question, images, adapter, sampling pairs, max_latency_s, max_ttft_s, priority, answer) -> Answer

        images: bytes; of a video, (frames, times in seconds).
        """
        return self._schedule(self._generate, args, call_id=args[:1])

    def exposed_stream(self, *args: Any) -> TextReply:
        """As generate, streamed -> StreamPart repeatedly, the last with the Answer"""
        reply = TextReply()
        reply.end = self._schedule(self._stream, reply, args, call_id=args[:1])
        return reply

    def exposed_ask_head(self, *args: Any) -> Future[Reply]:
        """(call_id, images, adapter, head, max_latency_s, priority) -> HeadResult"""
        return self._schedule(self._ask_head, args, call_id=args[:1])

    def exposed_ask_heads(self, *args: Any) -> Future[Reply]:
        """(call_id, images, (adapter, head) pairs, max_latency_s, priority) -> HeadOutcome for each pair"""
        return self._schedule(self._ask_heads, args, call_id=args[:1])

    def exposed_cancel(self, call_id: Any) -> Future[Reply]:
        """Cancel a request. Unknown numbers are ignored."""
        return self._schedule(self._cancel, call_id)

    def exposed_open_frames(self, *args: Any) -> Future[Reply]:
        """((adapter, head) pairs, (question, adapter, max_tokens) triples, max_latency_s, fps, drop, priority) -> id of
        a frame stream
        """
        return self._schedule(self._open_frames, args)

    def exposed_send_frame(self, *args: Any) -> Future[Reply]:
        """(stream id, number, images, wait_s) -> whether it was accepted; waits up to wait_s for room.

        An image is bytes, or (bytes, height, width).
        """
        charge = self._peer.take_charge()  # an accepted frame is held longer than this call runs
        sending = self._schedule(self._send_frame, charge, args)
        sending.add_done_callback(functools.partial(_release, charge))
        return sending

    def exposed_pull_results(self, *args: Any) -> Future[Reply]:
        """(stream id, number of the last frame with a received result, wait_s) -> FrameResults"""
        return self._schedule(self._pull_results, args)

    def exposed_end_frames(self, *args: Any) -> Future[Reply]:
        """(stream id): end the stream's input; remaining results can still be pulled."""
        return self._schedule(self._end_frames, args)

    def exposed_close_frames(self, *args: Any) -> Future[Reply]:
        """(stream id): cancel active frames and discard unread results. Unknown streams are ignored."""
        return self._schedule(self._close_frames, args)

    def exposed_adapters(self) -> Future[Reply]:
        """Every adapter -> tuple of AdapterStatus"""
        return self._schedule(self._operations.adapters)

    def exposed_load_adapter(self, name: Any, path: Any) -> Future[Reply]:
        """Register an adapter folder -> AdapterStatus"""
        return self._schedule(self._operations.load_adapter, name, path, admin=True)

    def exposed_unload_adapter(self, name: Any, drain: Any = False) -> Future[Reply]:
        """Remove an adapter and cancel its requests, or with drain let them finish."""
        return self._schedule(self._operations.unload_adapter, name, drain, admin=True)

    def exposed_pin_adapter(self, name: Any, pinned: Any) -> Future[Reply]:
        """Pin or unpin an adapter on the device -> AdapterStatus"""
        return self._schedule(self._operations.pin_adapter, name, pinned, admin=True)

    def exposed_train(self, plan: Any) -> Future[Reply]:
        """Begin the trainings of a plan file -> TrainingStatus of each"""
        return self._schedule(self._operations.train, plan, admin=True)

    def exposed_trainings(self) -> Future[Reply]:
        """-> TrainingStatus of each"""
        return self._schedule(self._operations.trainings)

    def exposed_cancel_training(self, name: Any) -> Future[Reply]:
        """End a training -> TrainingStatus"""
        return self._schedule(self._operations.cancel_training, name, admin=True)

    def exposed_correct(self, request_id: Any, label: Any) -> Future[Reply]:
        """Keep the right answer of a request -> Correction"""
        return self._schedule(self._operations.correct, request_id, label)

    def exposed_learning(self) -> Future[Reply]:
        """-> LearningStatus of each learning adapter"""
        return self._schedule(self._operations.learning)

    def exposed_promote(self, *args: Any) -> Future[Reply]:
        """(adapter, version, path, force): evaluate a version and serve it if it is better -> LearningStatus"""
        return self._schedule(self._operations.promote, args, admin=True)

    def exposed_roll_back(self, name: Any, version: Any) -> Future[Reply]:
        """Serve an earlier version of an adapter -> LearningStatus"""
        return self._schedule(self._operations.roll_back, name, version, admin=True)

    def exposed_stats(self) -> Future[Reply]:
        """Engine counters -> EngineStats"""
        return self._schedule(self._front_end.stats)

    def exposed_cluster(self) -> Future[Reply]:
        """The replicas -> ClusterStatus"""
        return self._schedule(self._operations.cluster)

    def exposed_cluster_adapters(self) -> Future[Reply]:
        """Every adapter on every replica -> tuple of AdapterPlace"""
        return self._schedule(self._operations.cluster_adapters)

    def exposed_drain_replica(self, name: Any, wait_s: Any) -> Future[Reply]:
        """Drain a replica, and wait up to wait_s -> whether it has no requests left"""
        return self._schedule(self._operations.drain_replica, name, wait_s, admin=True)

    def exposed_scale(self, number: Any, wait_s: Any) -> Future[Reply]:
        """Have another number of replicas, or "auto", and wait up to wait_s -> whether it is done"""
        return self._schedule(self._operations.scale, number, wait_s, admin=True)

    def exposed_resume_replica(self, name: Any) -> Future[Reply]:
        """Send requests to a drained replica again."""
        return self._schedule(self._operations.resume_replica, name, admin=True)

    def _schedule(
        self,
        method: Callable[..., Awaitable[Any]],
        *args: Any,
        call_id: tuple[Any, ...] | None = None,
        admin: bool = False,
    ) -> Future[Reply]:
        """Call a method on the event loop, if the connection's token allows it.

        Args:
            call_id: Unvalidated id for cancelling the call; None for calls that end by themselves.
            admin: Whether the call requires an admin token.
        """
        return asyncio.run_coroutine_threadsafe(self._authorized(admin, call_id, method, *args), self._loop)

    # -- calls of clients, on the event loop --------------------------------------------------------------------------

    async def _hello(self, args: tuple[Any, ...]) -> Hello:
        secret = checked("token", args[0] if args else None, str | None)
        token = self._access.check(secret, peer=self._peer.address)
        self._token, self._authenticated = secret, True
        self._tenant = None if token is None else token.name
        self._peer.set_authenticated()
        limit = self._front_end.config.max_message_bytes
        # A message has its images and a small overhead.
        return Hello(protocol=PROTOCOL_VERSION, model=self._model, max_message_bytes=limit - limit // 16)

    async def _generate(self, args: tuple[Any, ...]) -> Answer:
        async with contextlib.aclosing(self._text_parts(args, whole=True)) as parts:
            *_, answer = [part async for part in parts]
        assert isinstance(answer, Answer)
        return answer

    async def _stream(self, reply: TextReply, args: tuple[Any, ...]) -> StreamPart:
        answer: Answer | None = None
        async with contextlib.aclosing(self._text_parts(args)) as parts:
            async for part in parts:  # to its end, which counts the request as answered
                if isinstance(part, Answer):
                    answer = part
                else:
                    reply.put(part)
        assert answer is not None, "a stream ends with its Answer"
        return StreamPart(answer=answer)

    def _text_parts(self, args: tuple[Any, ...], *, whole: bool = False) -> Any:
        _, question, images, adapter, sampling, max_latency_s, max_ttft_s, priority, answer = positional(
            "generate", args, 9
        )
        pairs = checked("sampling", sampling, tuple[tuple[str, Any], ...])
        return self._front_end.generate(
            checked("question", question, str),
            visuals(images),
            adapter=checked("adapter", adapter, str | None),
            sampling=sampling_params(dict(pairs)),
            max_latency_s=checked("max_latency_s", max_latency_s, float | None),
            max_ttft_s=checked("max_ttft_s", max_ttft_s, float | None),
            priority=checked("priority", priority, int),
            tenant=self._tenant,
            whole=whole,
            answer=checked("answer", answer, Way | None),
        )

    async def _ask_head(self, args: tuple[Any, ...]) -> HeadResult:
        _, images, adapter, head, max_latency_s, priority = positional("ask_head", args, 6)
        return await self._front_end.ask_head(
            encoded_images(images),
            checked("adapter", adapter, str),
            checked("head", head, str | None),
            max_latency_s=checked("max_latency_s", max_latency_s, float | None),
            priority=checked("priority", priority, int),
            tenant=self._tenant,
        )

    async def _ask_heads(self, args: tuple[Any, ...]) -> tuple[HeadOutcome, ...]:
        _, images, heads, max_latency_s, priority = positional("ask_heads", args, 5)
        outcomes = await self._front_end.ask_heads(
            encoded_images(images),
            checked("heads", heads, tuple[tuple[str, str | None], ...]),
            max_latency_s=checked("max_latency_s", max_latency_s, float | None),
            priority=checked("priority", priority, int),
            tenant=self._tenant,
        )
        return outcomes_for(outcomes, self._access.check(self._token))

    async def _cancel(self, call_id: Any) -> None:
        if (task := self._tasks.get(checked("call_id", call_id, int))) is not None:
            task.cancel()

    async def _open_frames(self, args: tuple[Any, ...]) -> str:
        heads, questions, max_latency_s, fps, drop, priority, name = positional("open_frames", args, 7)
        options = StreamOptions(
            heads=checked("heads", heads, tuple[tuple[str, str], ...]),
            questions=checked("questions", questions, tuple[TextQuestion, ...]),
            max_latency_s=checked("max_latency_s", max_latency_s, float | None),
            fps=checked("fps", fps, float | None),
            drop=checked("drop", drop, str),
            priority=checked("priority", priority, int),
            name=checked("name", name, str),
        )
        num_images = await images_per_frame(options, self._front_end.adapters, self._front_end.config)
        owner = self._frames_owner()
        return self._front_end.streams.open(options, num_images, owner, self)

    async def _send_frame(self, charge: ByteCharge, args: tuple[Any, ...]) -> bool:
        stream_id, number, images, wait_s = positional("send_frame", args, 4)
        stream = self._frame_stream(stream_id)
        frame = frame_images(images)
        for image in frame:
            if isinstance(image, RawImage):
                image.check(self._front_end.config)
        place, wait = checked("number", number, int), bounded_wait_s(wait_s)
        return await stream.send(place, frame, wait, charge.move())

    async def _pull_results(self, args: tuple[Any, ...]) -> FrameResults:
        stream_id, acknowledged, wait_s = positional("pull_results", args, 3)
        number = checked("acknowledged", acknowledged, int)
        found = await self._frame_stream(stream_id).pull(number, bounded_wait_s(wait_s))
        return results_for(found, self._access.check(self._token))

    async def _end_frames(self, args: tuple[Any, ...]) -> None:
        self._frame_stream(positional("end_frames", args, 1)[0]).end()

    async def _close_frames(self, args: tuple[Any, ...]) -> None:
        (stream_id,) = positional("close_frames", args, 1)
        with contextlib.suppress(UnknownStream):
            self._frame_stream(stream_id)
            self._front_end.streams.discard(stream_id)

    # -- replies ------------------------------------------------------------------------------------------------------

    async def _authorized(
        self, admin: bool, call_id: tuple[Any, ...] | None, method: Callable[..., Awaitable[Any]], *args: Any
    ) -> Reply:
        """Check the token, then call the method. Checked with every call: a token may expire during a connection."""
        try:
            caller = self._access.check(self._token, admin=admin)
        except VLoraError as error:
            return failure(error)
        return await self._reply(caller, call_id, method, *args)

    async def _reply(
        self, caller: Token | None, call_id: tuple[Any, ...] | None, method: Callable[..., Awaitable[Any]], *args: Any
    ) -> Reply:
        """The outcome of a call as a value."""
        limit_s = self._front_end.config.request_timeout_s + 1  # the front end bounds requests already
        number: int | None = None
        try:
            if call_id is not None:
                number = self._register(call_id)
            async with asyncio.timeout(limit_s):
                return success(await method(*args))
        except asyncio.CancelledError:
            return failure(Aborted("the request was cancelled"))
        except TimeoutError:
            return failure(DeadlineMissed(f"the call took longer than {limit_s:g} s"))
        except Exception as error:
            return failure(error_for(to_vlora_error(error), caller))
        finally:
            if number is not None:
                del self._tasks[number]

    def _register(self, call_id: tuple[Any, ...]) -> int:
        number: int = checked("call_id", call_id[0] if call_id else None, int)
        if number in self._tasks:
            raise BadRequest(f"call id {number} is already in use")
        task = asyncio.current_task()
        assert task is not None
        self._tasks[number] = task
        return number

    # -- the connection -----------------------------------------------------------------------------------------------

    def _close_unauthenticated(self) -> None:
        if not self._authenticated:
            self._peer.close()

    def _frames_owner(self) -> Token | None:
        """The token that owns this connection's frame streams. Raises Disconnected after the connection is closed."""
        if self._closed:
            raise Disconnected("the connection is closed")
        return self._access.check(self._token)

    def _frame_stream(self, stream_id: Any) -> StreamSession:
        return self._front_end.streams.use(checked("stream id", stream_id, str), self._frames_owner(), self)

    def _cancel_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._closed = True
        self._front_end.streams.leave(self)


def _release(charge: ByteCharge, _: Future[Reply]) -> None:
    charge.release()
