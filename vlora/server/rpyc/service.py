"""The RPyC service: `call(bytes)` and `stream(bytes)`, each with a `vlora.client.requests.ClientCall` in msgpack.

A reply is `(True, msgpack)` or `(False, code, message)`; streamed text is sent as several replies to one call. A broken
connection cancels all of its active requests. Frame streams stay open and wait for their client to reconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from concurrent.futures import Future
from typing import Any

import msgspec
import rpyc

from vlora.client.requests import (
    AskHead,
    AskHeads,
    Authenticate,
    Cancel,
    CancellableCall,
    ClientCall,
    CloseFrames,
    EndFrames,
    Generate,
    InputCall,
    OpenFrames,
    PullResults,
    SendFrame,
)
from vlora.client.values import PROTOCOL_VERSION, Answer, Hello, Reply, StreamPart, failure, success
from vlora.config import Token
from vlora.errors import Aborted, BadRequest, DeadlineMissed, Disconnected, UnknownStream, VLoraError
from vlora.operations import Operation
from vlora.server.embeddings import perform_input_call
from vlora.server.frontend import FrontEnd
from vlora.server.images import RawImage
from vlora.server.operations import perform
from vlora.server.prompts import TextRequest
from vlora.server.rpyc.protocol import Peer, StreamedReply
from vlora.server.security.access import Access, name_of
from vlora.server.security.limits import ByteCharge
from vlora.server.security.public_errors import error_for, shown_to, to_vlora_error
from vlora.server.streams.frame_questions import images_per_frame
from vlora.server.streams.frame_stream import StreamSession
from vlora.wording import msgspec_errors

AUTHENTICATE_S = 10.0  # a connection must authenticate within this time

_decoder = msgspec.msgpack.Decoder(ClientCall)


class TextReply(StreamedReply):
    """The reply to a text stream: its text as `StreamPart`s."""

    def encode(self, text: str) -> Reply:
        return success(StreamPart(text=text))


class VLoraService(rpyc.Service):
    """One per connection. Its exposed methods run in the connection's thread and only schedule work on the event
    loop."""

    def __init__(
        self, front_end: FrontEnd, loop: asyncio.AbstractEventLoop, model: str, access: Access, peer: Peer
    ) -> None:
        self._front_end = front_end
        self._loop = loop
        self._model = model
        self._access = access
        self._peer = peer
        self._token: str | None = None
        self._authenticated = not access.required
        if self._authenticated:
            peer.set_authenticated()
        else:
            peer.restrict()
            loop.call_soon_threadsafe(loop.call_later, AUTHENTICATE_S, self._close_unauthenticated)
        self._tasks: dict[object, asyncio.Task[Any]] = {}  # by call id, or an object of its own for 0
        self._closed = False

    def on_disconnect(self, conn: rpyc.Connection) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._loop.call_soon_threadsafe(self._cancel_all)

    # -- in the connection's thread -----------------------------------------------------------------------------------

    def exposed_call(self, data: bytes) -> Future[Reply]:
        """Perform a call -> its result."""
        return self._schedule(data)

    def exposed_stream(self, data: bytes) -> TextReply:
        """Perform a `Generate` -> StreamPart repeatedly, the last with the Answer."""
        reply = TextReply()
        reply.end = self._schedule(data, reply)
        return reply

    def _schedule(self, data: bytes, stream: TextReply | None = None) -> Future[Reply]:
        call: Operation | VLoraError
        try:
            call = _decoder.decode(data)
            if stream is not None and not isinstance(call, Generate):
                call = BadRequest("only Generate is streamed; send other calls with `call`")
        except VLoraError as error:
            call = error
        except (msgspec.MsgspecError, OverflowError, TypeError, RecursionError) as error:
            call = BadRequest(msgspec_errors.described(error))
        # An accepted frame is held longer than its call runs.
        charge = self._peer.take_charge() if isinstance(call, SendFrame) else None
        reply = asyncio.run_coroutine_threadsafe(self._reply(call, stream, charge), self._loop)
        if charge is not None:
            reply.add_done_callback(functools.partial(_release, charge))
        return reply

    # -- on the event loop --------------------------------------------------------------------------------------------

    async def _reply(self, call: Operation | VLoraError, stream: TextReply | None, charge: ByteCharge | None) -> Reply:
        """The outcome of a call as a value. The token is checked with every call, because it may expire."""
        if isinstance(call, Authenticate):
            return self._authenticate(call)
        try:
            caller = self._access.check(self._token)
        except VLoraError as error:
            return failure(error)
        limit_s = self._front_end.config.request_timeout_s + 1  # the front end bounds requests already
        key: object = None
        try:
            if isinstance(call, VLoraError):
                raise call
            within: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if isinstance(call, CancellableCall):
                key = self._register(call.call_id)
                if self._front_end.tracing is not None:
                    within = self._front_end.tracing.within({"traceparent": call.traceparent})
            async with asyncio.timeout(limit_s):
                with within:
                    return success(shown_to(await self._perform(call, caller, stream, charge), caller))
        except asyncio.CancelledError:
            return failure(Aborted("the request was cancelled"))
        except TimeoutError:
            return failure(DeadlineMissed(f"the call took longer than {limit_s:g} s"))
        except Exception as error:
            return failure(error_for(to_vlora_error(error), caller))
        finally:
            if key is not None:
                del self._tasks[key]

    async def _perform(
        self, call: Operation, caller: Token | None, stream: TextReply | None, charge: ByteCharge | None
    ) -> Any:
        tenant = name_of(caller)
        streams = self._front_end.streams
        match call:
            case Generate():
                return await self._generate(call, tenant, stream)
            case AskHead():
                levels: dict[str, Any] = {"max_latency_s": call.max_latency_s, "priority": call.priority}
                return await self._front_end.ask_head(call.images, call.adapter, call.head, tenant=tenant, **levels)
            case AskHeads():
                levels = {"max_latency_s": call.max_latency_s, "priority": call.priority}
                return await self._front_end.ask_heads(call.images, call.heads, tenant=tenant, **levels)
            case Cancel(call_id):
                if (task := self._tasks.get(call_id)) is not None:
                    task.cancel()
            case OpenFrames(options):
                num_images = await images_per_frame(options, self._front_end.adapters, self._front_end.config)
                self._check_open()
                return streams.open(options, num_images, caller, self)
            case SendFrame(stream_id, number, images, wait_s):
                assert charge is not None
                frame = tuple(image if isinstance(image, bytes) else RawImage(*image) for image in images)
                for image in frame:
                    if isinstance(image, RawImage):
                        image.check(self._front_end.config)
                return await self._frames(stream_id, caller).send(number, frame, wait_s, charge.move())
            case PullResults(stream_id, acknowledged, wait_s):
                return await self._frames(stream_id, caller).pull(acknowledged, wait_s)
            case EndFrames(stream_id):
                self._frames(stream_id, caller).end()
            case CloseFrames(stream_id):
                with contextlib.suppress(UnknownStream):
                    self._frames(stream_id, caller)
                    streams.discard(stream_id)
            case _ if isinstance(call, InputCall):
                return await perform_input_call(self._front_end, call, tenant)
            case _:
                return await perform(self._front_end, call, caller, f"rpyc {self._peer.address}")

    async def _generate(self, call: Generate, tenant: str | None, stream: TextReply | None) -> Answer | StreamPart:
        answer: Answer | None = None
        asked = TextRequest(
            call.question,
            call.images,
            adapter=call.adapter,
            sampling=call.sampling,
            max_latency_s=call.max_latency_s,
            max_ttft_s=call.max_ttft_s,
            priority=call.priority,
            tenant=tenant,
            whole=stream is None,
            answer=call.answer,
        )
        async with contextlib.aclosing(self._front_end.generate(asked)) as parts:
            async for _, part in parts:  # to its end, which counts the request as answered
                if isinstance(part, Answer):
                    answer = part
                elif stream is not None and part.text:
                    stream.put(part.text)
        assert answer is not None, "an answer is the last part"
        return answer if stream is None else StreamPart(answer=answer)

    def _authenticate(self, call: Authenticate) -> Reply:
        try:
            self._access.check(call.token, peer=self._peer.address)
        except VLoraError as error:
            return failure(error)
        self._token, self._authenticated = call.token, True
        self._peer.set_authenticated()
        limit = self._front_end.config.max_message_bytes
        # A message has a call and a small overhead.
        return success(Hello(protocol=PROTOCOL_VERSION, model=self._model, max_message_bytes=limit - limit // 16))

    def _register(self, number: int) -> object:
        self._check_open()  # the call may begin after the end of its connection
        if number in self._tasks:
            raise BadRequest(f"call id {number} is already in use")
        task = asyncio.current_task()
        assert task is not None
        key = number or object()
        self._tasks[key] = task
        return key

    # -- the connection -----------------------------------------------------------------------------------------------

    def _close_unauthenticated(self) -> None:
        if not self._authenticated:
            self._peer.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Disconnected("the connection is closed")

    def _frames(self, stream_id: str, caller: Token | None) -> StreamSession:
        self._check_open()
        return self._front_end.streams.use(stream_id, caller, self)

    def _cancel_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._closed = True
        self._front_end.streams.leave(self)


def _release(charge: ByteCharge, _: Future[Reply]) -> None:
    charge.release()
