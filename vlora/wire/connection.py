"""TCP connections of an event loop whose ends have proved a shared secret: TLS, then `handshake`, then messages."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Generic, NamedTuple

import msgspec

from vlora.errors import BadConfig, Disconnected, VLoraError
from vlora.wire import handshake
from vlora.wire.address import Address
from vlora.wire.framing import MessageTransport
from vlora.wire.handshake import Protocol, T
from vlora.wire.tls import Certificate, client_context

log = logging.getLogger("vlora.wire")

HANDSHAKE_S = 5.0
MAX_MESSAGE_BYTES = 1 << 30  # with the images of a request
MAX_UNPROVED = 64  # connections without a proof at a time; further ones are closed
_MIN_SECRET_BYTES = 16


def check_secret(secret: bytes) -> bytes:
    """Raises BadConfig for a secret that could be guessed."""
    if len(secret) < _MIN_SECRET_BYTES:
        raise BadConfig(
            f"the cluster's secret has {len(secret)} bytes; it needs at least {_MIN_SECRET_BYTES}, for example from "
            "`openssl rand -hex 32`"
        )
    return secret


class Inbox:
    """The messages of a new connection in order, until another reader takes over."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()

    def put(self, data: bytes) -> None:
        self._messages.put_nowait(data)

    def end(self, closed: asyncio.Future[None]) -> None:
        closed.cancelled() or closed.exception()  # the reader raises Disconnected
        self._messages.put_nowait(None)

    def __len__(self) -> int:
        return self._messages.qsize()

    async def get(self) -> bytes:
        """The next message. Raises Disconnected at the end of the connection."""
        data = await self._messages.get()
        if data is None:
            raise Disconnected("the connection was closed before the other end had proved itself")
        return data

    def hand_over(self, transport: MessageTransport, on_message: Callable[[bytes], object]) -> None:
        """Pass messages to `on_message` from now on, first those that were not read."""
        transport.on_message = on_message
        while not self._messages.empty():
            if (data := self._messages.get_nowait()) is not None:
                on_message(data)


# -- the server's end -------------------------------------------------------------------------------------------------

OnClient = Callable[[MessageTransport, bytes, str], bytes]
"""Called with the transport of a client that has proved itself, `about` of its Hello, and its address.

Returns `about` of the Welcome. Sets `on_message`, and sends nothing. Raises VLoraError to refuse the client.
"""


class Listener:
    """Accepts clients. Created by `open`.

    Attributes:
        secret: That of new clients.
    """

    def __init__(self, protocol: Protocol, secret: bytes, on_client: OnClient, certificate: Certificate | None) -> None:
        self._protocol = protocol
        self.secret = check_secret(secret)
        self._on_client = on_client
        self._context = None if certificate is None else certificate.context()
        self._der = b"" if certificate is None else certificate.der()
        self._server: asyncio.Server | None = None
        self._unproved: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls, address: Address, protocol: Protocol, secret: bytes, admit: OnClient, *, certificate: Certificate | None
    ) -> Listener:
        """Listen at an address; port 0 chooses one.

        Raises:
            BadConfig: The address, the secret or the certificate cannot be used.
        """
        assert not address.path  # of a Unix socket
        if certificate is None and not address.is_local:
            raise BadConfig(
                f"{address} is reachable from other machines, and requests would be sent in clear text; give the "
                f"{protocol.server} a certificate, or let it listen on 127.0.0.1"
            )
        self = cls(protocol, secret, admit, certificate)
        try:
            # TLS begins later, so that connections without it are counted too.
            self._server = await asyncio.get_running_loop().create_server(
                lambda: _Accepted(self._begin), address.host, address.port
            )
        except OSError as error:
            raise BadConfig(f"the {protocol.server} cannot listen at {address}: {error}") from error
        return self

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in tuple(self._unproved):
            task.cancel()

    def _begin(self, accepted: _Accepted) -> None:
        if len(self._unproved) >= MAX_UNPROVED:
            reason = f"{MAX_UNPROVED} other connections have not proved themselves yet"
            log.warning("a connection from %s was refused: %s", accepted.peer, reason)
            accepted.close()
            return
        task = asyncio.create_task(self._admit(accepted), name="vlora-handshake")
        self._unproved.add(task)
        task.add_done_callback(self._unproved.discard)

    async def _admit(self, accepted: _Accepted) -> None:
        peer = accepted.peer
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await accepted.begin(self._context)
                exchange = handshake.admit(self._protocol, lambda: (self.secret,), peer=peer, certificate=self._der)
                client = await handshake.run_async(exchange, accepted.send, accepted.inbox.get)
            if accepted.inbox:
                raise Disconnected("it sent messages before it was admitted")
            accepted.max_bytes = MAX_MESSAGE_BYTES
            accepted.send(client.welcome(self._on_client(accepted, client.about, peer)))
        except (VLoraError, OSError) as error:
            if isinstance(error, VLoraError):
                accepted.send(handshake.refusal(error))
            reason = f"no proof within {HANDSHAKE_S:g} s" if isinstance(error, TimeoutError) else str(error)
            log.warning("a connection from %s was refused: %s", peer, reason)
            await accepted.end()
        except BaseException as error:
            accepted.close()
            if not isinstance(error, Exception):
                raise
            log.exception("a connection from %s was closed after an error of this process", peer)


class _Accepted(MessageTransport):
    """A connection to a listener. Nothing is read before `begin`."""

    def __init__(self, on_open: Callable[[_Accepted], None]) -> None:
        self.inbox = Inbox()
        super().__init__(self.inbox.put, handshake.MAX_BYTES)
        self._on_open = on_open
        self.closed.add_done_callback(self.inbox.end)

    @property
    def peer(self) -> str:
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


# -- the client's end -------------------------------------------------------------------------------------------------


class Connected(NamedTuple, Generic[T]):
    """A connection after both ends have proved themselves.

    Attributes:
        about: Of the server's Welcome.
        inbox: Later messages, until they are handed over.
    """

    transport: MessageTransport
    inbox: Inbox
    about: T


async def connect(
    address: Address, protocol: Protocol, secret: bytes, kind: type[T], *, tls: bool, about: bytes = b""
) -> Connected[T]:
    """Connect to a `Listener`. kind: of the server's `about`. about: of this end's Hello.

    Raises:
        Unauthorized, BadConfig, VLoraError: As `handshake.introduce`.
        Disconnected: There is no such server at the address, or it does not answer in time.
    """
    check_secret(secret)
    inbox = Inbox()
    transport: MessageTransport | None = None
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            transport = await _open(address, inbox, tls, protocol.server)
            certificate: bytes = transport.extra("ssl_object").getpeercert(binary_form=True) if tls else b""
            exchange = handshake.introduce(protocol, secret, peer=str(address), about=about, certificate=certificate)
            found = await handshake.run_async(exchange, transport.send, inbox.get)
        transport.max_bytes = MAX_MESSAGE_BYTES
        return Connected(transport, inbox, msgspec.msgpack.decode(found, type=kind))
    except BaseException as error:
        if transport is not None:
            transport.close()
        if isinstance(error, TimeoutError):
            raise Disconnected(f"{address} did not answer within {HANDSHAKE_S:g} s") from error
        why: BaseException | None = error if isinstance(error, handshake.UNREADABLE) else None
        if isinstance(error, Disconnected) and transport is not None and transport.closed.done():
            why = transport.closed.exception()  # of an invalid message, which has ended the connection
        if why is not None:
            raise handshake.other_protocol(protocol, str(address), why) from error
        raise


async def _open(address: Address, inbox: Inbox, tls: bool, server: str) -> MessageTransport:
    try:
        context = client_context() if tls else None
        _, transport = await asyncio.get_running_loop().create_connection(
            lambda: MessageTransport(inbox.put, handshake.MAX_WELCOME_BYTES), *address[:2], ssl=context
        )
    except (OSError, ssl.SSLError) as error:
        raise Disconnected(f"no connection to a {server} at {address}: {error}") from error
    transport.closed.add_done_callback(inbox.end)
    return transport
