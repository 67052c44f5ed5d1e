"""The RPyC server, and the calls of a connection: each is a `vlora.client.requests.ClientCall` in msgpack.

A reply is `(True, msgpack)` or `(False, code, message)`; streamed text is sent as several replies to one call. A broken
connection cancels all of its active requests. Frame streams stay open and wait for their client to reconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
import threading
import time
from concurrent.futures import Future
from typing import Any

import msgspec

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
from vlora.client.sockets import PlainStream, TlsStream, enable_keepalive, shut_down
from vlora.client.values import PROTOCOL_VERSION, Answer, Hello, Reply, StreamPart, failure, success
from vlora.config import Token
from vlora.errors import Aborted, BadRequest, DeadlineMissed, Disconnected, UnknownStream, VLoraError
from vlora.operations import Operation
from vlora.server.embeddings import perform_input_call
from vlora.server.frontend import FrontEnd
from vlora.server.images import RawImage
from vlora.server.operations import perform
from vlora.server.prompts import Level, TextRequest
from vlora.server.rpyc.protocol import BoundedChannel, ByteConnection, StreamedReply, end_after
from vlora.server.security.access import Access, name_of
from vlora.server.security.limits import (
    ByteCharge,
    ConnectionLimits,
    PeerSocket,
    bound_socket,
    connection_share,
    listening_at,
)
from vlora.server.security.public_errors import error_for, shown_to, to_vlora_error
from vlora.server.streams.frame_questions import images_per_frame
from vlora.server.streams.frame_stream import StreamSession
from vlora.wording import msgspec_errors

log = logging.getLogger(__name__)

AUTHENTICATE_S = 10.0  # a connection must authenticate within this time
HANDSHAKE_S = 10.0
MAX_UNAUTHENTICATED = 64  # connections
_SEND_S = 30.0  # a peer that reads nothing for this long is disconnected
_LAST_REPLIES_S = 1.0
_ACCEPT_PAUSE_S = 0.1  # after the system refuses a connection; descriptors are freed when connections end

_decoder = msgspec.msgpack.Decoder(ClientCall)


class VLoraService:
    """One per connection, whose thread calls `schedule` and `leave`; all else runs on the event loop."""

    def __init__(
        self, front_end: FrontEnd, loop: asyncio.AbstractEventLoop, model: str, access: Access, peer: ByteConnection
    ) -> None:
        self._front_end = front_end
        self._loop = loop
        self._model = model
        self._access = access
        self._peer = peer
        self._token: str | None = None
        self._authenticated = not access.required
        peer.set_authenticated(self._authenticated)
        if not self._authenticated:
            loop.call_soon_threadsafe(loop.call_later, AUTHENTICATE_S, self._close_unauthenticated)
        self._tasks: dict[object, asyncio.Task[Any]] = {}  # by call id, or an object of its own for 0
        self._closed = False

    # -- in the connection's thread -----------------------------------------------------------------------------------

    def leave(self) -> None:
        """At the end of the connection."""
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._loop.call_soon_threadsafe(self._cancel_all)

    def schedule(self, data: bytes, stream: StreamedReply | None) -> Future[Reply]:
        """Begin a call."""
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

    async def _reply(
        self, call: Operation | VLoraError, stream: StreamedReply | None, charge: ByteCharge | None
    ) -> Reply:
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
        self, call: Operation, caller: Token | None, stream: StreamedReply | None, charge: ByteCharge | None
    ) -> Any:
        tenant = name_of(caller)
        streams = self._front_end.streams
        match call:
            case Generate():
                return await self._generate(call, tenant, stream)
            case AskHead():
                level = Level.of(call, tenant)
                return await self._front_end.ask_head(call.images, call.adapter, call.head, level)
            case AskHeads():
                return await self._front_end.ask_heads(call.images, call.heads, Level.of(call, tenant))
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

    async def _generate(self, call: Generate, tenant: str | None, stream: StreamedReply | None) -> Answer | StreamPart:
        answer: Answer | None = None
        asked = TextRequest(
            call.question,
            call.images,
            adapter=call.adapter,
            sampling=call.sampling,
            level=Level.of(call, tenant),
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
        self._peer.set_authenticated(True)
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


class RpycServer:
    """Accepts connections in a thread and reads each in its own thread. Raises BadConfig when it cannot listen.

    tls: None for plain connections.
    """

    def __init__(self, host: str, port: int, max_message_bytes: int, tls: ssl.SSLContext | None = None) -> None:
        self._address = f"{host}:{port}"
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        self._peers: set[PeerSocket] = set()
        self._connections: set[ByteConnection] = set()
        self._lock = threading.Lock()
        self._limits = ConnectionLimits(connection_share(), MAX_UNAUTHENTICATED)
        self._accepting: threading.Thread | None = None
        self._closed = False
        self._listener = bound_socket(host, port, "--rpyc-port")
        self.host, self.port = self._listener.getsockname()[:2]

    def start_in_thread(self, front_end: FrontEnd, loop: asyncio.AbstractEventLoop, model: str, access: Access) -> None:
        """Listen, and serve every connection with its own `VLoraService`. loop: the front end's event loop.

        Raises BadConfig if another server has taken the address since.
        """
        self._budget = front_end.message_budget
        self._service = functools.partial(VLoraService, front_end, loop, model, access)
        with listening_at(self._address, "--rpyc-port"):
            self._listener.listen(socket.SOMAXCONN)
        self._accepting = threading.Thread(target=self._accept, name="vlora-rpyc-accept", daemon=True)
        self._accepting.start()

    @property
    def listening(self) -> bool:
        """Whether new connections are accepted."""
        return self._accepting is not None and self._accepting.is_alive()

    def close(self) -> None:
        """Stop. Replies that are ready, or become ready shortly after, are still sent."""
        deadline = time.monotonic() + _LAST_REPLIES_S
        with self._lock:
            connections = tuple(self._connections)
        for connection in connections:
            connection.wait_answered(max(0.0, deadline - time.monotonic()))
        self._closed = True
        shut_down(self._listener)
        with self._lock:
            peers = tuple(self._peers)
        for peer in peers:
            peer.end()
        self._listener.close()

    def _accept(self) -> None:
        """Accept connections. A lack of descriptors or threads fails one connection only."""
        while not self._closed:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("cannot accept a connection: %s", error)
                    time.sleep(_ACCEPT_PAUSE_S)
                continue
            peer = PeerSocket(sock)
            with self._lock:
                self._peers.add(peer)
            if self._closed:  # after `close` has looked
                self._forget(peer)
                return
            try:
                if self._limits.admit(peer):
                    threading.Thread(
                        target=self._serve, args=(peer, address[0]), name="vlora-rpyc-reader", daemon=True
                    ).start()
                    continue
                log.warning("a connection from %s was refused: too many connections", address[0])
            except RuntimeError as error:  # the system has no more threads
                log.warning("a connection from %s was closed: %s", address[0], error)
            self._forget(peer)

    def _serve(self, peer: PeerSocket, address: str) -> None:
        try:
            sock = peer.sock
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            enable_keepalive(sock)
            if self._tls is not None:
                peer.sock = sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                if peer.ended:
                    return
                with end_after(HANDSHAKE_S, peer):
                    sock.do_handshake()
            sock.settimeout(_SEND_S)
            stream = TlsStream(sock, _SEND_S) if isinstance(sock, ssl.SSLSocket) else PlainStream(sock)
            channel = BoundedChannel(stream, self._max_message_bytes, self._budget, peer)
            connection = ByteConnection(channel, peer, self._max_message_bytes)
            service = self._service(connection)
            with self._lock:
                self._connections.add(connection)
            try:
                connection.serve(service.schedule)
            finally:
                service.leave()
                with self._lock:
                    self._connections.discard(connection)
        except Exception as error:
            log.warning("a connection from %s was closed: %s: %s", address, type(error).__name__, error)
        finally:
            self._forget(peer)

    def _forget(self, peer: PeerSocket) -> None:
        self._limits.remove(peer)
        with self._lock:
            self._peers.discard(peer)
        peer.sock.close()
