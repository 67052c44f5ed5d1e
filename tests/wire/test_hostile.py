"""Hostile peers at every wire: each is refused with one printable line, sees no secret, and delays nobody else."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import trustme

from tests.processes import PATIENCE_S, until
from tests.split.running import serving
from vlora.cluster import connection as replica
from vlora.config import Token
from vlora.engine.ipc import messages
from vlora.errors import BadConfig, Disconnected, Unauthorized, VLoraError
from vlora.split import connect, frames, transport
from vlora.split.admission import Limits
from vlora.types import ErrorValue
from vlora.wire import connection, framing, handshake
from vlora.wire.address import Address
from vlora.wire.handshake import Challenge, Proof, Protocol, Refused, Welcome
from vlora.wire.tls import Certificate, client_context

SECRET = "a-secret-of-more-than-32-characters"
FORGED = "1.0\n\x1b[31mERROR a forged line " + 1000 * "x"
LIMIT_S = 2.5  # of a handshake
SHORT_S = 0.4  # where nothing completes one
LOOPBACK = Address("127.0.0.1", 0)


class Wire(NamedTuple):
    """One kind of connection. ask: connect as an honest client does, to an address. secret: of the handshake."""

    protocol: Protocol
    secret: bytes
    tls: bool
    address: Address
    ask: Callable[[Address], object]

    def dial(self, *, tls: bool | None = None) -> socket.socket:
        encrypted = self.tls if tls is None else tls
        return transport.open_connection(self.address, client_context() if encrypted else None, PATIENCE_S)

    def introduce(self, sock: socket.socket, secret: bytes | None, sent: list[bytes]) -> None:
        certificate = sock.getpeercert(True) if self.tls and self.protocol != frames.PROTOCOL else b""  # type: ignore[attr-defined]
        exchange = handshake.introduce(self.protocol, secret, peer="it", about=b"", certificate=certificate)

        def send(message: bytes) -> None:
            sent.append(message)
            framing.send(sock, message)

        handshake.run(exchange, send, lambda: framing.receive(sock, 1 << 20, time.monotonic() + PATIENCE_S))


@contextlib.contextmanager
def event_loop() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines in the loop of another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _closed(found: connection.Listener) -> None:
    found.close()
    await asyncio.sleep(0)


@contextlib.contextmanager
def a_replica(certificate: Certificate | None) -> Iterator[Wire]:
    ready = messages.encode(messages.Ready("", 1, 1000, 8, 16))
    protocol, tls = replica.protocol(), certificate is not None

    async def ask(address: Address) -> None:
        await (await replica.connect(address, SECRET.encode(), tls=tls, beat_s=1.0, key="k")).disconnect("")

    def admit(sock: framing.MessageTransport, about: bytes, peer: str) -> bytes:
        replica.said_by(about)
        return ready

    with event_loop() as run:
        opened = connection.Listener.open(LOOPBACK, protocol, SECRET.encode(), admit, certificate=certificate)
        found = run(opened)
        address = Address("127.0.0.1", found.port)
        yield Wire(protocol, SECRET.encode(), tls, address, lambda at: asyncio.run(ask(at)))
        run(_closed(found))


@contextlib.contextmanager
def a_base(folder: Path, kind: str) -> Iterator[Wire]:
    authority = trustme.CA()
    server, client = None, None
    if kind == "tls":
        server, client = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
        authority.issue_cert("127.0.0.1").configure_cert(server)
        authority.configure_trust(client)
    tokens = (Token(name="a", secret=SECRET), Token(name="b", secret="another-token-that-is-valid"))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with serving(model, folder, tokens=tokens, tls=server, limits=Limits(handshake_s=LIMIT_S)) as served:
        address = Address.parse(served.unix if kind == "unix" else served.tcp)
        yield Wire(
            frames.PROTOCOL,
            SECRET.encode(),
            kind == "tls",
            address,
            lambda at: connect(str(at), token=SECRET, tls=client, patience_s=PATIENCE_S).close(),
        )


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    folder = tmp_path_factory.mktemp("certificate")
    issued = trustme.CA().issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    return Certificate(str(folder / "cert.pem"), str(folder / "key.pem"))


@pytest.fixture(params=["replica", "replica tls", "base unix", "base tcp", "base tls"])
def wire(
    request: pytest.FixtureRequest, certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Wire]:
    monkeypatch.setattr(connection, "HANDSHAKE_S", LIMIT_S)
    server, _, kind = request.param.partition(" ")
    making = a_replica(certificate if kind else None) if server == "replica" else a_base(tmp_path, kind)
    with making as found:
        yield found


def all_of(sock: socket.socket) -> bytes:
    """All bytes until the other end closes the connection."""
    data = b""
    sock.settimeout(PATIENCE_S)
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while part := sock.recv(4096):
            data += part
    return data


# -- clients ----------------------------------------------------------------------------------------------------------


def hello(wire: Wire, **fields: Any) -> bytes:
    plain = {"type": "Hello", "version": wire.protocol.version, "nonce": bytes(32), "about": b""}
    return framing.pack(msgspec.msgpack.encode(plain | fields))


NESTED = b"\x81\xa1x" + b"\x91" * 12_000 + b"\xc0"
GARBAGE = {
    "silence": b"",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "oversized length": framing.HEAD.pack(1 << 62),
    "long message": framing.pack(bytes(handshake.MAX_BYTES + 1)),
    "text": framing.pack(b"not msgpack"),
    "empty messages": framing.HEAD.pack(0) * 100,
    "truncated frame": framing.HEAD.pack(100) + b"x",
    "nested": framing.pack(NESTED),
    "random": secrets.token_bytes(4096),
}


def _send(data: Callable[[Wire], bytes], *, tls: bool | None = None) -> Callable[[Wire], None]:
    def attack(wire: Wire) -> None:
        with wire.dial(tls=tls) as sock:
            sock.sendall(data(wire))
            answer = all_of(sock)
            assert SECRET.encode() not in answer and wire.secret not in answer
            assert b"Welcome" not in answer and b"vlora.split" not in answer

    return attack


def _slowly(wire: Wire) -> None:
    with wire.dial() as sock, contextlib.suppress(ConnectionError, ssl.SSLError):
        for byte in hello(wire):
            sock.sendall(bytes([byte]))
            time.sleep(LIMIT_S / 20)
        raise AssertionError("the handshake has no deadline")


def _prove(secret: bytes | None, reason: str) -> Callable[[Wire], None]:
    def attack(wire: Wire) -> None:
        with wire.dial() as sock, pytest.raises(Unauthorized, match=reason):
            wire.introduce(sock, secret, [])

    return attack


def _replay(wire: Wire) -> None:
    """Both messages of another client that has just been admitted."""
    sent: list[bytes] = []
    unreadable = r"what the client says of itself cannot be read: .*; install the same version on both"
    with wire.dial() as sock, pytest.raises(BadConfig, match=unreadable):  # it says nothing of itself
        wire.introduce(sock, wire.secret, sent)
    first, proof = sent
    with wire.dial() as sock:
        framing.send(sock, first)
        framing.receive(sock, 4096, time.monotonic() + PATIENCE_S)
        framing.send(sock, proof)
        assert b"unauthorized" in all_of(sock)


ATTACKS: dict[str, Callable[[Wire], None]] = {
    **{name: _send(lambda _, data=data: data) for name, data in GARBAGE.items()},  # type: ignore[misc]
    "slow bytes": _slowly,
    "forged version": _send(lambda wire: hello(wire, version=FORGED) + framing.pack(b"")),
    "forged tag": _send(lambda wire: hello(wire, type=FORGED)),
    "short nonce": _send(lambda wire: hello(wire, nonce=b"") + framing.pack(b"")),
    "proof first": _send(lambda wire: framing.pack(handshake.encode(Proof(bytes(32))))),
    "another secret": _prove(b"another secret of 16 bytes", "is not valid for this"),
    "no proof": _prove(None, "requires a"),
}


def test_hostile_clients(wire: Wire, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at the same time. An honest client is admitted after them."""
    caplog.set_level(logging.WARNING)
    attacks = ATTACKS | ({"no TLS": _send(lambda wire: hello(wire), tls=False)} if wire.tls else {})
    with concurrent.futures.ThreadPoolExecutor(len(attacks)) as pool:
        running = {name: pool.submit(attack, wire) for name, attack in attacks.items()}
        for name, attack in running.items():
            assert attack.exception(PATIENCE_S) is None, (name, attack.exception())
    lines = [record.getMessage() for record in caplog.records if "was refused" in record.getMessage()]
    assert len(lines) == len(attacks), lines
    assert all(line.isprintable() and len(line) < 700 and SECRET not in line for line in lines)
    caplog.clear()
    monkeypatch.setattr(connection, "HANDSHAKE_S", PATIENCE_S)
    wire.ask(wire.address)
    assert not caplog.records
    _replay(wire)


# -- servers ----------------------------------------------------------------------------------------------------------


Answer = Callable[[Wire, socket.socket], bytes]
"""What an impostor does with a client. Returns what it has read."""


@contextlib.contextmanager
def impostor(wire: Wire, certificate: Certificate, answer: Answer) -> Iterator[Any]:
    """In place of a server: its address, and all that it receives."""
    received = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                sock, _ = listener.accept()
                if wire.tls:
                    sock = certificate.context().wrap_socket(sock, server_side=True)
                with sock:
                    sock.settimeout(PATIENCE_S)
                    received.extend(answer(wire, sock))
                    received.extend(all_of(sock))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Address("127.0.0.1", listener.getsockname()[1]), received
        finally:
            thread.join(PATIENCE_S)


def _answer(data: bytes) -> Answer:
    def answer(wire: Wire, sock: socket.socket) -> bytes:
        sock.sendall(data)
        return b""

    return answer


def _challenge(welcome: Callable[[bytes], bytes], *, needs_proof: bool = True) -> Answer:
    """Challenge a client, then admit it with a digest that depends on its own."""

    def answer(wire: Wire, sock: socket.socket) -> bytes:
        deadline = time.monotonic() + PATIENCE_S
        first = framing.receive(sock, 1 << 20, deadline)
        framing.send(sock, handshake.encode(Challenge(wire.protocol.version, bytes(32), needs_proof)))
        proof = framing.receive(sock, 4096, deadline)
        digest = msgspec.msgpack.decode(proof)["digest"]
        framing.send(sock, handshake.encode(Welcome(welcome(digest), b"")))
        return first + proof

    return answer


def _trickle(wire: Wire, sock: socket.socket) -> bytes:
    for byte in framing.pack(handshake.encode(Challenge(wire.protocol.version, bytes(32), True))):
        sock.sendall(bytes([byte]))
        time.sleep(LIMIT_S / 20)
    return b""


def _version(wire: Wire, sock: socket.socket) -> bytes:
    sock.sendall(framing.pack(handshake.encode(Challenge(FORGED, bytes(32), True))))
    return b""


OTHER_VERSION = "or another version of V-LoRA"
EARLIER = Refused(ErrorValue("disconnected", "it has no `protocol`"))
FORGED_REFUSAL = framing.pack(handshake.encode(Refused(ErrorValue("unauthorized", FORGED))))
IMPOSTORS: dict[str, tuple[Answer, str]] = {
    **{name: (_answer(data), "") for name, data in GARBAGE.items() if name != "long message"},
    "text": (_answer(GARBAGE["text"]), OTHER_VERSION),
    "nested": (_answer(GARBAGE["nested"]), OTHER_VERSION),
    "earlier version": (_answer(framing.pack(handshake.encode(EARLIER))), f"{OTHER_VERSION}: it has no `protocol`"),
    "slow bytes": (_trickle, ""),
    "forged version": (_version, "install the same version on both"),
    "forged refusal": (_answer(FORGED_REFUSAL), "a forged line"),
    "accepts any proof": (_challenge(lambda digest: bytes(32)), "did not prove that it knows"),
    "sends the proof back": (_challenge(lambda digest: digest), "did not prove that it knows"),
    "needs no proof": (_challenge(lambda digest: b"", needs_proof=False), "does not ask for a"),
}


@pytest.mark.parametrize("name", IMPOSTORS)
def test_hostile_servers(name: str, certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client refuses them with a typed error, and sends neither its secret nor anything after the handshake."""
    limit_s = SHORT_S if name in ("silence", "truncated frame", "slow bytes") else PATIENCE_S
    monkeypatch.setattr(connection, "HANDSHAKE_S", limit_s)
    answer, reason = IMPOSTORS[name]

    async def ask_replica(address: Address, tls: bool) -> None:
        await replica.connect(address, SECRET.encode(), tls=tls, beat_s=1.0, key="k")

    for kind, ask in {
        "replica": lambda address: asyncio.run(ask_replica(address, False)),
        "replica tls": lambda address: asyncio.run(ask_replica(address, True)),
        "base": lambda address: connect(str(address), token=SECRET, patience_s=limit_s),
    }.items():
        protocol = frames.PROTOCOL if kind == "base" else replica.protocol()
        wire = Wire(protocol, SECRET.encode(), kind.endswith("tls"), LOOPBACK, ask)
        with impostor(wire, certificate, answer) as (address, received), pytest.raises(VLoraError) as caught:
            ask(address)
        message = str(caught.value)
        assert message.isprintable() and len(message) < 900 and reason in message, (kind, message)
        assert SECRET.encode() not in received


@pytest.mark.parametrize("about", [b"", NESTED, msgspec.msgpack.encode({"type": "Ready", "pid": 1})])
def test_a_server_with_the_secret_whose_welcome_cannot_be_read(about: bytes, certificate: Certificate) -> None:
    """A typed error, and no connection stays open."""
    admitted: list[framing.MessageTransport] = []

    def admit(sock: framing.MessageTransport, *_: object) -> bytes:
        admitted.append(sock)
        return about

    with event_loop() as run:
        found = run(
            connection.Listener.open(LOOPBACK, replica.protocol(), SECRET.encode(), admit, certificate=certificate)
        )
        reason = f"has another protocol than a replica, {OTHER_VERSION}: .*; check the address, and install the same"
        with pytest.raises(Disconnected, match=reason):
            run(replica.connect(Address("127.0.0.1", found.port), SECRET.encode(), tls=True, beat_s=1.0, key="k"))
        until(admitted[0].closed.done)
        run(_closed(found))


def test_an_error_of_the_server_itself_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def admit(*_: object) -> bytes:
        raise ZeroDivisionError

    async def main() -> None:
        found = await connection.Listener.open(LOOPBACK, replica.protocol(), SECRET.encode(), admit, certificate=None)
        with pytest.raises(Disconnected):
            await replica.connect(Address("127.0.0.1", found.port), SECRET.encode(), tls=False, beat_s=1.0, key="k")
        found.close()

    asyncio.run(main())
    gc.collect()
    (record,) = caplog.records
    assert record.exc_info is not None and record.getMessage().endswith("was closed after an error of this process")


def test_a_proof_is_of_its_role_transcript_and_certificate() -> None:
    """Any changed byte of the transcript, on either side, ends the handshake."""
    protocol = Protocol("test", "1", "secret")

    def run(change: Callable[[bytes], bytes] = lambda data: data, certificate: bytes = b"c") -> None:
        client = handshake.introduce(protocol, b"s" * 16, peer="p", about=b"me", certificate=b"c")
        server = handshake.admit(protocol, lambda: (b"s" * 16,), peer="p", certificate=certificate)
        next(server)
        challenge = server.send(change(next(client)))
        with pytest.raises(StopIteration) as admitted:
            server.send(client.send(challenge))
        with pytest.raises(StopIteration) as welcomed:
            client.send(admitted.value.value.welcome(b"you"))
        assert (admitted.value.value.about, welcomed.value.value) == (b"me", b"you")

    run()
    for change in (lambda data: data.replace(b"me", b"ME"), lambda data: data[:-1] + bytes([data[-1] ^ 1])):
        with pytest.raises(Unauthorized):
            run(change)
    with pytest.raises(Unauthorized):
        run(certificate=b"d")
