"""A line over TCP between a front end and a replica: TLS, proof of the shared secret, and the engine's messages.

On both ends it is a `ClientTransport`: whole messages, in order. Both ends notice within a few beats that the other one
is gone, also if its connection stays open.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import msgspec

from vlora.cluster import handshake
from vlora.engine.ipc import messages
from vlora.engine.ipc.client import EngineClient
from vlora.engine.ipc.transport import ClientTransport
from vlora.errors import BadConfig, Disconnected, VLoraError

log = logging.getLogger("vlora.cluster")

T = TypeVar("T")

HANDSHAKE_S = 5.0
MAX_MESSAGE_BYTES = 1 << 30  # with the images of a request
MAX_STRANGERS = 64
"""Connections without a proof at a time; further ones are closed."""


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine reach it."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"


class Certificate(NamedTuple):
    """A replica's own certificate for TLS, as files in PEM. It may be signed by itself: see `handshake`."""

    cert_file: str
    key_file: str

    def context(self) -> ssl.SSLContext:
        """Raises BadConfig if the files cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            raise BadConfig(f"the certificate {self.cert_file} with {self.key_file} cannot be used: {error}") from error
        return context

    def der(self) -> bytes:
        """The certificate that a peer sees: the first one in the file, which may also have text and a key.

        Raises BadConfig if there is none.
        """
        with open(self.cert_file, encoding="ascii", errors="replace") as file:
            text = file.read()
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        start, stop = text.find(begin), text.find(end, text.find(begin))
        if start < 0 or stop < 0:
            raise BadConfig(f"{self.cert_file} has no line {begin!r}; convert it with `openssl x509`")
        return ssl.PEM_cert_to_DER_cert(text[start : stop + len(end)])


class Inbox:
    """The messages of a new line in order, until another reader takes over."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()

    def put(self, data: bytes) -> None:
        self._messages.put_nowait(data)

    def end(self, closed: asyncio.Future[None]) -> None:
        closed.cancelled() or closed.exception()  # the reader raises Disconnected
        self._messages.put_nowait(None)

    async def get(self) -> bytes:
        """The next message. Raises Disconnected at the end of the line."""
        data = await self._messages.get()
        if data is None:
            raise Disconnected("the connection was closed before the other end had proved itself")
        return data

    def hand_over(self, transport: ClientTransport, on_message: Callable[[bytes], object]) -> None:
        """Pass messages to `on_message` from now on, first those that were not read."""
        transport.on_message = on_message
        while not self._messages.empty():
            if (data := self._messages.get_nowait()) is not None:
                on_message(data)


# -- the replica's end ------------------------------------------------------------------------------------------------

OnPeer = Callable[[ClientTransport, Inbox, handshake.Hello, str], None]
"""Called with the transport of a front end that has proved itself, its messages so far, its Hello and its address."""


class Door:
    """Accepts front ends. Created by `open`."""

    def __init__(self, secret: bytes, on_peer: OnPeer, certificate: Certificate | None) -> None:
        self._secret = handshake.check_secret(secret)
        self._on_peer = on_peer
        self._context = None if certificate is None else certificate.context()
        self._der = b"" if certificate is None else certificate.der()
        self._server: asyncio.Server | None = None
        self._strangers: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls, address: Address, secret: bytes, on_peer: OnPeer, *, certificate: Certificate | None = None
    ) -> Door:
        """Listen at an address; port 0 chooses one.

        Raises:
            BadConfig: The address, the secret or the certificate cannot be used.
        """
        if certificate is None and not address.is_loopback:
            raise BadConfig(
                f"{address} is reachable from other machines, and requests would be sent in clear text; give the "
                "replica a certificate, or let it listen on 127.0.0.1"
            )
        self = cls(secret, on_peer, certificate)
        try:
            # TLS begins later, so that connections without it are counted too.
            self._server = await asyncio.get_running_loop().create_server(
                lambda: _Visitor(self._begin), address.host, address.port
            )
        except OSError as error:
            raise BadConfig(f"the replica cannot listen at {address}: {error}") from error
        return self

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Accept no more front ends."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._strangers):
            task.cancel()

    def _begin(self, visitor: _Visitor) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            reason = f"{MAX_STRANGERS} other connections have not proved themselves yet"
            log.warning("a connection from %s was refused: %s", visitor.peer, reason)
            visitor.close()
            return
        task = asyncio.create_task(self._admit(visitor), name="vlora-door")
        self._strangers.add(task)
        task.add_done_callback(self._strangers.discard)

    async def _admit(self, visitor: _Visitor) -> None:
        peer, inbox = visitor.peer, visitor.inbox
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await visitor.begin(self._context)
                hello = await handshake.admit(visitor.send, inbox.get, self._secret, peer=peer, certificate=self._der)
        except (VLoraError, OSError) as error:
            reason = f"no proof within {HANDSHAKE_S:g} s" if isinstance(error, TimeoutError) else str(error)
            log.warning("a connection from %s was refused: %s", peer, reason)
            await visitor.end()
        except BaseException:
            visitor.close()
            raise
        else:
            visitor.max_bytes = MAX_MESSAGE_BYTES
            try:
                self._on_peer(visitor, inbox, hello, peer)
            except Exception as error:  # of a message that came with the proof
                log.warning("the line to %s is closed: %s", peer, error)
                visitor.close()


class _Visitor(ClientTransport):
    """A connection to a door. Nothing is read before `begin`."""

    def __init__(self, on_open: Callable[[_Visitor], None]) -> None:
        self.inbox = Inbox()
        super().__init__(self.inbox.put, handshake.MAX_BYTES)
        self._on_open = on_open
        self.closed.add_done_callback(self.inbox.end)

    @property
    def peer(self) -> str:
        """The address of the other end."""
        found = self.extra("peername")
        return str(Address(*found[:2])) if found else "an unknown peer"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._transport is not None
        self._transport.pause_reading()
        self._on_open(self)

    async def begin(self, context: ssl.SSLContext | None) -> None:
        """Begin to read, with TLS if there is a context. Raises OSError if TLS fails."""
        assert self._transport is not None
        if context is None:
            self._transport.resume_reading()
            return
        try:
            tls = await asyncio.get_running_loop().start_tls(self._transport, self, context, server_side=True)
            if tls is None:
                raise ConnectionResetError("the connection was closed during the handshake of TLS")
            self._transport = tls
        except BaseException:
            self.close()
            self.connection_lost(None)  # asyncio does not report it during the handshake of TLS
            raise

    async def end(self) -> None:
        """Close the connection; wait until the other end has closed it too, as it does in TLS, for a time."""
        self.close_after_sending()
        try:
            await asyncio.wait({self.closed}, timeout=HANDSHAKE_S)
        finally:
            self.close()


# -- the front end's end ----------------------------------------------------------------------------------------------


class _RemoteProcess:
    """An engine process behind a line: its end is known as the end of the line."""

    def __init__(self, transport: ClientTransport) -> None:
        self._transport = transport

    async def wait(self) -> int | None:
        await asyncio.wait({self._transport.closed})
        return None

    def kill(self) -> None:
        self._transport.close()


class Line(NamedTuple):
    """A line after both ends have proved themselves.

    Attributes:
        ready: The engine's first message.
        inbox: Its later messages, until they are handed over.
    """

    transport: ClientTransport
    inbox: Inbox
    ready: messages.Ready


async def connect(
    address: Address, secret: bytes, *, tls: bool, beat_s: float, version: str | None = None
) -> EngineClient:
    """Connect to a replica's engine. Arguments and errors are those of `open_line`."""
    line = await open_line(address, secret, tls=tls, beat_s=beat_s, version=version)
    client = EngineClient(_RemoteProcess(line.transport), line.transport, line.ready)
    line.inbox.hand_over(line.transport, line.transport.on_message)
    return client


async def open_line(address: Address, secret: bytes, *, tls: bool, beat_s: float, version: str | None = None) -> Line:
    """Open a line to a replica.

    Args:
        beat_s: How often a message will be sent at least, see `watch_beats`.
        version: For tests; None is the installed one.

    Raises:
        Unauthorized, BadConfig: As `handshake.introduce`.
        Disconnected: There is no replica at the address, or it does not answer in time.
    """

    async def receive(transport: ClientTransport, inbox: Inbox) -> Line:
        ready = messages.decode_from_engine(await inbox.get())
        if not isinstance(ready, messages.Ready):
            raise Disconnected(f"{address} sent {type(ready).__name__} before its engine was ready")
        return Line(transport, inbox, ready)

    return await open_proved(address, secret, receive, tls=tls, beat_s=beat_s, version=version)


async def open_proved(
    address: Address,
    secret: bytes,
    then: Callable[[ClientTransport, Inbox], Awaitable[T]],
    *,
    tls: bool,
    beat_s: float,
    version: str | None = None,
    peer: str = "replica",
) -> T:
    """Connect to a door, and exchange the first messages after both ends have proved themselves.

    Arguments and errors are those of `open_line`, and these:

    Args:
        then: Exchanges them, within the time for the proof. The connection stays open unless it fails.
    """
    handshake.check_secret(secret)
    inbox = Inbox()
    transport: ClientTransport | None = None
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            transport = await _open(address, inbox, tls, peer)
            certificate: bytes = transport.extra("ssl_object").getpeercert(binary_form=True) if tls else b""
            await handshake.introduce(
                transport.send,
                inbox.get,
                secret,
                peer=str(address),
                beat_s=beat_s,
                certificate=certificate,
                version=version,
                role=peer,
            )
            transport.max_bytes = MAX_MESSAGE_BYTES
            return await then(transport, inbox)
    except BaseException as error:
        if transport is not None:
            transport.close()
        if isinstance(error, TimeoutError):
            raise Disconnected(f"{address} did not answer within {HANDSHAKE_S:g} s") from error
        if isinstance(error, msgspec.MsgspecError):
            raise Disconnected(f"{address} does not speak the protocol of replicas: {error}") from error
        if isinstance(error, Disconnected) and (why := _failure(transport)) is not None:
            raise Disconnected(f"{address} does not speak the protocol of replicas: {why}") from error
        raise


async def _open(address: Address, inbox: Inbox, tls: bool, peer: str) -> ClientTransport:
    context: ssl.SSLContext | None = None
    if tls:
        # The certificate is checked by the proof, which covers it, not by an authority.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    try:
        _, transport = await asyncio.get_running_loop().create_connection(
            lambda: ClientTransport(inbox.put, handshake.MAX_BYTES), address.host, address.port, ssl=context
        )
    except (OSError, ssl.SSLError) as error:
        raise Disconnected(f"no connection to a {peer} at {address}: {error}") from error
    transport.closed.add_done_callback(inbox.end)
    return transport


def _failure(transport: ClientTransport | None) -> BaseException | None:
    """The error of an invalid message that ended a line; None if it ended otherwise."""
    if transport is None or not transport.closed.done():
        return None
    return transport.closed.exception()


async def watch_beats(client: EngineClient, beat_s: float, num_missed: int, step_s: float) -> str:
    """Ping an engine until it gives no more sign of life: until no bytes arrive.

    A ping may wait behind a large message. The replica pings the engine too while bytes arrive there, so the engine's
    answers come during a long transfer as well.

    Beats are counted, not seconds: after a pause of this process itself, the answers that have arrived are read before
    the next beat.

    Args:
        beat_s: The time between two pings.
        num_missed: Beats in a row without a byte from the engine that end this.
        step_s: A step that runs for longer ends this too.

    Returns:
        The reason.
    """
    missed = 0
    while True:
        received = client.num_bytes_received
        client.ping()
        await asyncio.sleep(beat_s)
        missed = missed + 1 if client.num_bytes_received == received else 0
        if missed >= num_missed:
            return f"it gave no sign of life for {missed * beat_s:g} s"
        pong = client.pong
        if pong is not None and pong.step_s > step_s:
            return f"its step has been running for {pong.step_s:.0f} s, over the limit of {step_s:g} s"
