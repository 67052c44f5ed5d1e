"""The RPyC server: accepts connections, performs TLS handshakes, and runs a service for each."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
import time

import rpyc
from rpyc.utils.server import ThreadedServer

from vlora.client.sockets import PlainStream, TlsStream, enable_keepalive, shut_down
from vlora.errors import BadConfig
from vlora.server.frontend import FrontEnd
from vlora.server.rpyc.protocol import PROTOCOL_CONFIG, BoundedChannel, ByteConnection, Peer, end_after
from vlora.server.rpyc.service import VLoraService
from vlora.server.security.access import Access
from vlora.server.security.limits import ConnectionLimits, PeerSocket, connection_share

log = logging.getLogger(__name__)

_SEND_S = 30.0  # a peer that reads nothing for this long is disconnected
_LAST_REPLIES_S = 1.0
HANDSHAKE_S = 10.0
MAX_UNAUTHENTICATED = 64  # connections
_ACCEPT_PAUSE_S = 0.1  # after the system refuses a connection; descriptors are freed when connections end


class RpycServer(ThreadedServer):
    """Accepts connections in a thread and reads each in its own thread. Raises BadConfig when it cannot listen.

    tls: None for plain connections.
    """

    def __init__(self, host: str, port: int, max_message_bytes: int, tls: ssl.SSLContext | None = None) -> None:
        self._address = f"{host}:{port}"
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        self._connections: set[ByteConnection] = set()
        self._lock = threading.Lock()
        self._limits = ConnectionLimits(connection_share(), MAX_UNAUTHENTICATED)
        self._accepting: threading.Thread | None = None
        try:
            super().__init__(
                rpyc.VoidService,
                hostname=host,
                ipv6=":" in host,
                port=port,
                protocol_config=dict(PROTOCOL_CONFIG),
                logger=log,
            )
        except OSError as error:
            raise self._cannot_listen(error) from error

    def start_in_thread(self, front_end: FrontEnd, loop: asyncio.AbstractEventLoop, model: str, access: Access) -> None:
        """Listen, and serve every connection with its own `VLoraService`. loop: the front end's event loop.

        Raises BadConfig if another server has taken the address since.
        """
        self._front_end = front_end
        self._loop = loop
        self._model = model
        self._access = access
        try:
            self._listen()
        except OSError as error:
            raise self._cannot_listen(error) from error
        self._accepting = threading.Thread(target=self.start, name="vlora-rpyc-accept", daemon=True)
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
        for sock in tuple(self.clients):
            shut_down(sock)  # before RPyC does it in a way that breaks a TLS writer
        super().close()

    def accept(self) -> None:
        """Accept one connection. A lack of descriptors or threads fails this connection only."""
        try:
            sock, address = self.listener.accept()
        except TimeoutError:
            return
        except OSError as error:
            if self.active:
                log.warning("cannot accept a connection: %s", error)
                time.sleep(_ACCEPT_PAUSE_S)
            return
        peer = PeerSocket(sock)
        self.clients.add(sock)
        try:
            sock.setblocking(True)
            if self._limits.admit(peer):
                threading.Thread(
                    target=self._serve, args=(peer, address[0]), name="vlora-rpyc-reader", daemon=True
                ).start()
                return
            log.warning("a connection from %s was refused: too many connections", address[0])
        except (OSError, RuntimeError) as error:  # RuntimeError: the system has no more threads
            log.warning("a connection from %s was closed: %s", address[0], error)
        self._forget(peer)

    def _cannot_listen(self, error: OSError) -> BadConfig:
        return BadConfig(f"cannot listen on {self._address}: {error.strerror}; choose another --rpyc-port")

    def _serve(self, peer: PeerSocket, address: str) -> None:
        try:
            sock = peer.sock
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            enable_keepalive(sock)
            if self._tls is not None:
                self.clients.discard(sock)
                peer.sock = sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                self.clients.add(sock)
                if peer.ended:
                    return
                with end_after(HANDSHAKE_S, peer):
                    sock.do_handshake()
            sock.settimeout(_SEND_S)
            stream = TlsStream(sock, _SEND_S) if isinstance(sock, ssl.SSLSocket) else PlainStream(sock)
            channel = BoundedChannel(stream, self._max_message_bytes, self._front_end.message_budget, peer)
            service = VLoraService(
                self._front_end, self._loop, self._model, self._access, Peer(channel, peer, self._max_message_bytes)
            )
            connection = ByteConnection(service, channel, self.protocol_config)
            with self._lock:
                self._connections.add(connection)
            try:
                connection.serve_all()
            finally:
                channel.take_charge().release()
                with self._lock:
                    self._connections.discard(connection)
        except Exception as error:
            log.warning("a connection from %s was closed: %s: %s", address, type(error).__name__, error)
        finally:
            self._forget(peer)

    def _forget(self, peer: PeerSocket) -> None:
        self._limits.remove(peer)
        self.clients.discard(peer.sock)
        peer.sock.close()
