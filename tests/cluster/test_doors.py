"""Both ends of a line: hostile peers, TLS, slow messages, and front ends that replace each other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import trustme

from tests.cluster.running import SECRET, SLEEPING, ReplicaProcess, real
from tests.cluster.sleeping_engine import COMMAND
from tests.processes import PATIENCE_S
from vlora.cluster import door, handshake
from vlora.cluster.door import Address, Certificate, Door, Inbox, connect, open_line, watch_beats
from vlora.cluster.handshake import Hello
from vlora.cluster.replica import MISSED_BEATS, Replica
from vlora.engine.ipc import messages
from vlora.engine.ipc.client import EngineClient
from vlora.engine.ipc.transport import ClientTransport
from vlora.engine.operations import GetStats, ListAdapters
from vlora.errors import BadConfig, Disconnected, EngineDead, Unauthorized, VLoraError
from vlora.types import ErrorValue, Request, RequestOutput, SamplingParams

LOOPBACK = Address("127.0.0.1", 0)
HEAD = struct.Struct("<Q")
READY = messages.encode(messages.Ready("", 1, 1000, 8, 16))
FORGED = "1.0\n\x1b[31mERROR a forged line " + 1000 * "x"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return written(tmp_path_factory.mktemp("certificate"))


def written(folder: Path) -> Certificate:
    issued = trustme.CA().issue_cert("replica.example")
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    for number, part in enumerate(issued.cert_chain_pems):
        part.write_to_path(str(folder / "cert.pem"), append=number > 0)
    return Certificate(str(folder / "cert.pem"), str(folder / "key.pem"))


def packed(data: bytes) -> bytes:
    return HEAD.pack(len(data)) + data


@contextlib.asynccontextmanager
async def a_door(certificate: Certificate | None = None) -> AsyncIterator[tuple[Address, list[ClientTransport]]]:
    """The address of a door without an engine, and its lines after their proofs."""
    lines: list[ClientTransport] = []

    def greet(transport: ClientTransport, *_: Any) -> None:
        lines.append(transport)
        transport.send(READY)

    found = await Door.open(LOOPBACK, SECRET, greet, certificate=certificate)
    try:
        yield Address("127.0.0.1", found.port), lines
    finally:
        found.close()


@contextlib.asynccontextmanager
async def replica(certificate: Certificate | None = None) -> AsyncIterator[Address]:
    """The address of a replica with an engine's process."""
    found = await Replica.start(SLEEPING, SECRET, LOOPBACK, certificate=certificate, command=COMMAND)
    try:
        yield Address("127.0.0.1", found.port)
    finally:
        await found.close()


@contextlib.asynccontextmanager
async def served(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[Address]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    try:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()


async def line(address: Address, *, tls: bool = False, beat_s: float = 0.2, **settings: Any) -> EngineClient:
    return await connect(address, settings.pop("secret", SECRET), tls=tls, beat_s=beat_s, **settings)


async def admits(address: Address, *, tls: bool = False) -> None:
    """Check that a door still serves a front end with the secret."""
    await (await line(address, tls=tls)).disconnect("")


async def answer(client: EngineClient, name: str = "r", num_tokens: int = 5) -> int:
    sampling = SamplingParams(max_tokens=num_tokens, seed=0)
    request = Request(request_id=name, prompt_ids=(1, 2), sampling=sampling)
    return sum([len(output.token_ids) async for output in client.generate(request)])


async def refused(connecting: Awaitable[EngineClient], kind: type[VLoraError], reason: str = "") -> str:
    with pytest.raises(kind) as caught:
        await asyncio.wait_for(connecting, PATIENCE_S)
    message = str(caught.value)
    assert message.isprintable() and len(message) <= 700 and reason in message
    return message


# -- peers that have proved nothing -----------------------------------------------------------------------------------


def hello(**fields: Any) -> bytes:
    plain = {"type": "Hello", "protocol": 1, "version": "1", "nonce": bytes(32), "beat_s": 1.0}
    return packed(msgspec.msgpack.encode(plain | fields))


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "huge": HEAD.pack(1 << 62),
    "text": packed(b"not msgpack"),
    "empty": HEAD.pack(0) * 100,
    "long": packed(bytes(5000)),
    "random": secrets.token_bytes(4096),
}
STRANGERS = {**GARBAGE, "forged version": hello(version=FORGED), "forged tag": hello(type=FORGED), "silent": b""}


@pytest.mark.parametrize("tls", [False, True])
@real
async def test_a_door_closes_strangers_and_serves_on(
    tls: bool, certificate: Certificate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is one printable line of the log, whatever it sends, and ends soon if it sends nothing."""
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.3)
    async with a_door(certificate if tls else None) as (address, _):
        for name, data in STRANGERS.items():
            caplog.clear()
            reader, writer = await asyncio.open_connection(*address)
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), PATIENCE_S)  # until it is closed
            writer.close()
            async with asyncio.timeout(PATIENCE_S):
                while not (found := [each.getMessage() for each in caplog.records if "was refused" in each.message]):
                    await asyncio.sleep(0.01)
            assert len(found) == 1 and found[0].isprintable() and len(found[0]) < 700, name
            assert tls or "forged" not in name or "a forged line" in found[0], name
        monkeypatch.setattr(door, "HANDSHAKE_S", PATIENCE_S)
        await admits(address, tls=tls)


@pytest.mark.parametrize("what", ["says nothing", "does not prove itself"])
@real
async def test_strangers_of_a_door_with_tls_are_counted(
    what: str, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before TLS; and after a refusal, until the connection is closed."""
    monkeypatch.setattr(door, "MAX_STRANGERS", 4)

    def try_to_read(end: socket.socket, patience_s: float) -> bytes | None:
        end.settimeout(patience_s)
        with contextlib.suppress(TimeoutError):
            return end.recv(1)
        return None

    async with a_door(certificate) as (address, _):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        ends: list[socket.socket] = []
        for number in range(12):
            end = await asyncio.to_thread(socket.create_connection, address)
            if what != "says nothing" and number < 4:
                end = await asyncio.to_thread(context.wrap_socket, end)
                await asyncio.to_thread(end.sendall, packed(b"text"))
            ends.append(end)
        late = await asyncio.gather(*(asyncio.to_thread(try_to_read, end, PATIENCE_S) for end in ends[4:]))
        assert late == [b""] * 8  # closed at once
        if what == "says nothing":
            early = await asyncio.gather(*(asyncio.to_thread(try_to_read, end, 0.1) for end in ends[:4]))
            assert early == [None] * 4  # still open
        await refused(line(address, tls=True), Disconnected)
        for end in ends:
            end.close()
        async with asyncio.timeout(PATIENCE_S):  # they are not counted any more
            while True:
                with contextlib.suppress(Disconnected):
                    await admits(address, tls=True)
                    break


async def challenged(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[bytes, bytes]:
    """As a server does, challenge a front end. Returns its messages."""

    async def receive() -> bytes:
        return await reader.readexactly(HEAD.unpack(await reader.readexactly(HEAD.size))[0])

    first = await receive()
    writer.write(packed(handshake.encode(handshake.Challenge(handshake.PROTOCOL, handshake.own_version(), bytes(32)))))
    return first, await receive()


IMPOSTORS: dict[str, tuple[bytes | str, type[VLoraError], str]] = {
    **{name: (data, Disconnected, "") for name, data in GARBAGE.items()},
    "accepts any proof": ("zeros", Unauthorized, "did not prove that it knows"),
    "sends the proof back": ("echo", Unauthorized, "did not prove that it knows"),
    "forged refusal": (
        packed(handshake.encode(handshake.Refused(ErrorValue("unauthorized", FORGED)))),
        Unauthorized,
        "a forged line",
    ),
    "silent": (b"", Disconnected, "did not answer within 0.3 s"),
}


@real
async def test_a_front_end_refuses_impostors_and_sends_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (data, kind, reason) in IMPOSTORS.items():
        seen: list[bytes] = []

        async def impostor(
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
            data: bytes | str = data,
            seen: list[bytes] = seen,
        ) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                if isinstance(data, str):
                    seen += await challenged(reader, writer)
                    proof = msgspec.msgpack.decode(seen[1])["digest"]
                    data = packed(handshake.encode(handshake.Welcome(proof if data == "echo" else bytes(32))))
                else:
                    seen.append(await reader.read(1))
                writer.write(data)
                await writer.drain()
                await reader.read()
            writer.close()

        monkeypatch.setattr(door, "HANDSHAKE_S", 0.3 if name == "silent" else PATIENCE_S)
        async with served(impostor) as address:
            assert len(await refused(line(address), kind, reason)) <= 500, name
        assert seen and not any(SECRET in each for each in seen), name
    gone = "no connection to a replica at 127.0.0.1:1"
    await refused(line(Address("127.0.0.1", 1)), Disconnected, gone)


@real
async def test_other_secrets_versions_beats_and_tls_are_refused(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tls in (False, True):
        async with a_door(certificate if tls else None) as (address, _):
            other = secrets.token_bytes(32)
            await refused(line(address, tls=tls, secret=other), Unauthorized, "the cluster's secret differs")
            both = f"with protocol {handshake.PROTOCOL}, this front end vlora '99.1'"
            await refused(line(address, tls=tls, version="99.1"), BadConfig, both)
            for beat_s in (0.0, -1.0, 1e9, float("nan")):
                message = "it must be between 0.01 and 60 seconds"
                await refused(line(address, tls=tls, beat_s=beat_s), BadConfig, message)
            with monkeypatch.context() as patched:
                patched.setattr(door, "HANDSHAKE_S", 1.0)
                await refused(line(address, tls=not tls), Disconnected)
            await admits(address, tls=tls)
    await refused(connect(LOOPBACK, b"short", tls=False, beat_s=1), BadConfig, "has 5 bytes")
    missing = Certificate("/nothing", "/nothing")
    for address, secret, given, reason in (
        (LOOPBACK, b"short", None, "has 5 bytes; it needs at least 16"),
        (Address("0.0.0.0", 0), SECRET, None, "requests would be sent in clear text; give the replica a certificate"),
        (LOOPBACK, SECRET, missing, "cannot be used"),
    ):
        with pytest.raises(BadConfig, match=reason):
            await Door.open(address, secret, lambda *_: None, certificate=given)


@real
async def test_a_third_party_between_two_ends_of_tls_is_refused(certificate: Certificate, tmp_path: Path) -> None:
    """It passes on every byte under a certificate of its own; without TLS nothing would stop it."""
    passed: list[bytes] = []
    async with a_door(certificate) as (there, _):

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            further = await asyncio.open_connection(*there, ssl=context)

            async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
                with contextlib.suppress(ConnectionError):
                    while data := await source.read(1 << 16):
                        passed.append(data)
                        target.write(data)
                target.close()

            await asyncio.gather(pump(reader, further[1]), pump(further[0], writer))

        async with served(between, written(tmp_path).context()) as address:
            await refused(line(address, tls=True), Unauthorized)
        assert passed
        await admits(there, tls=True)


@real
async def test_a_certificate_after_text_or_after_its_key(certificate: Certificate, tmp_path: Path) -> None:
    """As `openssl x509 -text` writes it; and one file with both."""
    cert, key = Path(certificate.cert_file).read_text(), Path(certificate.key_file).read_text()
    text, both = tmp_path / "text.pem", tmp_path / "both.pem"
    text.write_bytes("Certificate:\n    Subject: Zürich\n".encode("latin-1") + cert.encode())
    both.write_text(key + cert)
    for given in (Certificate(str(text), certificate.key_file), Certificate(str(both), str(both))):
        async with a_door(given) as (address, _):
            await admits(address, tls=True)
    assert Certificate(str(text), "").der() == certificate.der()
    with pytest.raises(BadConfig, match="has no line '-----BEGIN CERTIFICATE-----'"):
        Certificate(certificate.key_file, "").der()


# -- peers that have proved themselves --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True])
@real
async def test_a_front_end_that_is_replaced_or_lost_leaves_no_request(tls: bool, certificate: Certificate) -> None:
    """Closed, replaced by another one, after garbage, or without a sign of life, as after a cut cable."""
    long = Request(request_id="r", prompt_ids=(1,), sampling=SamplingParams(max_tokens=100_000, seed=0))
    async with replica(certificate if tls else None) as address:

        async def check_idle() -> None:
            later = await line(address, tls=tls)
            assert (await later.stats()).num_running == 0
            assert later.ready.block_size == 16 and later.ready.num_blocks == 1000
            await later.disconnect("the end")
            with pytest.raises(EngineDead, match="the end"):
                await later.stats()

        for garbage in (b"\xc1", messages.encode(messages.Stop()), messages.encode(messages.Start(SLEEPING))):
            opened = await open_line(address, SECRET, tls=tls, beat_s=1)
            opened.transport.send(messages.encode(messages.Add(long)))
            await asyncio.wait_for(opened.inbox.get(), PATIENCE_S)
            opened.transport.send(garbage)
            await asyncio.wait_for(asyncio.wait({opened.transport.closed}), PATIENCE_S)
            await check_idle()
        for how in ("closes", "says nothing more"):
            client = await line(address, tls=tls, beat_s=0.02)
            pending = asyncio.create_task(answer(client, num_tokens=100_000))
            await asyncio.sleep(0.05)
            if how == "closes":
                await client.disconnect("gone")
            await asyncio.wait_for(client.wait_dead(), PATIENCE_S)  # otherwise it sends no pings: 20 beats
            await pending
            await check_idle()
        first = await line(address, tls=tls)
        pending = asyncio.create_task(answer(first, "same id", num_tokens=10_000))
        await asyncio.sleep(0.05)
        second = await line(address, tls=tls)
        await asyncio.wait_for(first.wait_dead(), PATIENCE_S)
        await pending
        assert await answer(second, "same id") == 5 and (await second.stats()).num_running == 0


@real
async def test_garbage_from_a_replica_fails_the_calls_with_the_cause() -> None:
    async with a_door() as (address, lines):
        for bad in (b"\xc1\xc1", b"{}"):
            client = await line(address)
            pending = asyncio.create_task(answer(client))
            await asyncio.sleep(0)
            lines[-1].send(bad)
            cause = await asyncio.wait_for(client.wait_dead(), PATIENCE_S)
            assert "the engine sent a message that cannot be read" in cause and await pending == 0


@pytest.mark.slow
@real
async def test_a_replica_ends_with_its_engine_and_with_its_parent() -> None:
    first = await ReplicaProcess.start()
    first.signal(signal.SIGKILL, actor=False)
    assert await asyncio.wait_for(first.process.wait(), PATIENCE_S) == 1
    second = await ReplicaProcess.start()
    await second.stop()
    assert second.process.returncode == 0


# -- messages that arrive slowly --------------------------------------------------------------------------------------

BEAT_S = 0.02


async def trickle(transport: ClientTransport, data: bytes, duration_s: float) -> None:
    """Send a message in pieces over a time."""
    descriptor, stream = transport.extra("socket").fileno(), packed(data)
    size = 1 + int(len(stream) * BEAT_S / duration_s)
    for begin in range(0, len(stream), size):
        os.write(descriptor, stream[begin : begin + size])
        await asyncio.sleep(BEAT_S)


@pytest.mark.slow
@real
async def test_a_front_end_is_alive_while_a_message_arrives() -> None:
    async with replica() as address:
        opened = await open_line(address, SECRET, tls=False, beat_s=BEAT_S)
        request = Request(request_id="r", prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=1, seed=0))
        await trickle(opened.transport, messages.encode(messages.Add(request)), 3 * MISSED_BEATS * BEAT_S)
        assert not opened.transport.closed.done()
        # Meanwhile the replica has pinged the engine in the front end's place.
        found = [messages.decode_from_engine(await opened.inbox.get())]
        while not isinstance(found[-1], messages.Outputs):
            found.append(messages.decode_from_engine(await opened.inbox.get()))
        assert len(found) > MISSED_BEATS and all(isinstance(each, messages.Pong) for each in found[:-1])
        assert found[-1].outputs[0].request_id == "r"
        await asyncio.wait_for(asyncio.wait({opened.transport.closed}), PATIENCE_S)  # 20 beats without a byte


@real
async def test_a_replica_is_alive_while_a_message_arrives() -> None:
    async with a_door() as (address, lines):
        client = await line(address)
        long = RequestOutput(request_id="unknown", token_ids=tuple(range(500)))
        watching = asyncio.create_task(watch_beats(client, 5 * BEAT_S, 4, 60.0))
        await trickle(lines[0], messages.encode(messages.Outputs((long,))), 1.2)
        assert not watching.done()
        assert await asyncio.wait_for(watching, PATIENCE_S) == "it gave no sign of life for 0.4 s"
        await client.disconnect("")


# -- two front ends, without an engine --------------------------------------------------------------------------------


class Wire:
    """In place of a transport: keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.num_bytes_received = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_message: Any = None

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        pass

    def say(self, message: Any) -> None:
        self.on_message(messages.encode(message))

    def got(self, kind: type) -> list[Any]:
        """The messages of a kind that were sent there."""
        found: list[Any] = [messages.decode_from_engine(data) for data in self.sent]
        return [each for each in found if isinstance(each, kind)]

    @property
    def outputs(self) -> list[RequestOutput]:
        return [output for each in self.got(messages.Outputs) for output in each.outputs]


class Between:
    """A replica without an engine."""

    def __init__(self) -> None:
        self.engine = Wire()
        process = cast(asyncio.subprocess.Process, None)
        self.replica = Replica(process, cast(ClientTransport, self.engine), messages.Ready("", 1, 1))

    def front_end(self, *requests: str) -> Wire:
        """A new one that replaces the one before, with requests."""
        wire = Wire()
        self.replica._admit(cast(ClientTransport, wire), Inbox(), Hello(1, "", bytes(32), 60.0), "")  # noqa: SLF001
        for name in requests:
            wire.say(messages.Add(Request(request_id=name, prompt_ids=(1,))))
        return wire

    def answer(self, *outputs: RequestOutput) -> None:
        self.engine.say(messages.Outputs(outputs))

    @property
    def cancelled(self) -> list[str]:
        """Ids of the cancellations that were sent to the engine."""
        found = [messages.decode_to_engine(data) for data in self.engine.sent]
        return sorted(each.request_id for each in found if isinstance(each, messages.Cancel))


def tokens(name: str, token: int) -> RequestOutput:
    return RequestOutput(request_id=name, token_ids=(token,))


def end(name: str) -> RequestOutput:
    return RequestOutput(request_id=name, finish_reason="cancelled")


@real
async def test_a_front_end_gets_no_output_of_the_one_before() -> None:
    here = Between()
    first = here.front_end("same", "other", "ended")
    here.answer(tokens("same", 1), end("ended"))
    second = here.front_end("same", "ended")
    assert here.cancelled == ["other", "same"]
    # The step of the former requests ends, then the engine reads the cancellations.
    here.answer(tokens("same", 666), tokens("other", 666))
    here.answer(end("other"), tokens("ended", 2))
    here.answer(end("same"))
    here.answer(tokens("same", 3))
    here.answer(end("same"))
    assert first.outputs == [tokens("same", 1), end("ended")]
    assert second.outputs == [tokens("ended", 2), tokens("same", 3), end("same")]
    third = here.front_end()
    assert here.cancelled == ["ended", "other", "same"]  # of the second, only what had not ended
    here.answer(end("ended"))
    assert third.outputs == []


@real
async def test_a_front_end_gets_no_reply_to_the_one_before() -> None:
    """Both number their calls from 1 on."""
    here = Between()
    first = here.front_end()
    first.say(messages.Call(1, ListAdapters()))
    second = here.front_end()
    second.say(messages.Call(1, GetStats()))
    for data in here.engine.sent:
        call = messages.decode_to_engine(data)
        assert isinstance(call, messages.Call)
        kind = type(messages.decode_operation(call.operation)).__name__
        here.engine.say(messages.Reply(call.call_id, error=ErrorValue("aborted", kind)))
    replies = [(each.call_id, each.error.message) for each in second.got(messages.Reply)]
    assert replies == [(1, "GetStats")] and not first.got(messages.Reply)


@real
async def test_outputs_of_a_lost_front_end_and_of_an_id_that_was_used_twice() -> None:
    """The front end cancelled its first request of an id, and asked again before the cancellation arrived."""
    here = Between()
    first = here.front_end("r")
    first.closed.set_result(None)
    await asyncio.sleep(0.01)
    assert here.cancelled == ["r"]
    here.answer(tokens("r", 666), end("r"))
    second = here.front_end("r")
    here.answer(tokens("r", 1))
    assert second.outputs == [tokens("r", 1)]
    twice = Between()
    twice.front_end("r", "r")
    twice.answer(end("r"))
    later = twice.front_end("r")
    assert twice.cancelled == ["r"]
    twice.answer(tokens("r", 666), end("r"), tokens("r", 1))
    assert later.outputs == [tokens("r", 1)]
