"""Both ends of a connection to a replica: TLS, slow messages, and front ends that replace each other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import trustme

from tests.cluster.running import SECRET, SLEEPING, ReplicaProcess, real
from tests.cluster.sleeping_engine import COMMAND
from tests.processes import PATIENCE_S
from vlora.cluster.connection import connect, protocol, said_by, watch_beats
from vlora.cluster.replica import MISSED_BEATS, Replica
from vlora.engine.ipc import messages
from vlora.engine.ipc.client import EngineClient
from vlora.engine.operations import KeepAdapters, ListAdapters
from vlora.engine.snapshot import EngineLoad
from vlora.errors import BadConfig, Disconnected, EngineDead, Unauthorized, VLoraError
from vlora.operations import GetStats
from vlora.types import ErrorValue, Request, RequestOutput, SamplingParams
from vlora.wire import connection
from vlora.wire.address import Address
from vlora.wire.connection import Connected, Listener
from vlora.wire.framing import MessageTransport, pack
from vlora.wire.tls import Certificate

LOOPBACK = Address("127.0.0.1", 0)
READY = messages.encode(messages.Ready("", 1, 1000, 8, 16))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return written(tmp_path_factory.mktemp("certificate"))


def written(folder: Path) -> Certificate:
    issued = trustme.CA().issue_cert("replica.example")
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    for number, part in enumerate(issued.cert_chain_pems):
        part.write_to_path(str(folder / "cert.pem"), append=number > 0)
    return Certificate(str(folder / "cert.pem"), str(folder / "key.pem"))


@contextlib.asynccontextmanager
async def a_listener(certificate: Certificate | None = None) -> AsyncIterator[tuple[Address, list[MessageTransport]]]:
    """The address of a listener without an engine, and its connections."""
    admitted: list[MessageTransport] = []

    def admit(transport: MessageTransport, about: bytes, _: str) -> bytes:
        said_by(about)
        admitted.append(transport)
        return READY

    found = await Listener.open(LOOPBACK, protocol(), SECRET, admit, certificate=certificate)
    try:
        yield Address("127.0.0.1", found.port), admitted
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
    return await connect(address, SECRET, tls=tls, beat_s=beat_s, **{"key": "first", **settings})


async def opened_by(address: Address, *, tls: bool = False, beat_s: float = 1.0) -> Connected[messages.Ready]:
    about = msgspec.msgpack.encode(("first", beat_s))
    return await connection.connect(address, protocol(), SECRET, messages.Ready, tls=tls, about=about)


async def admits(address: Address, *, tls: bool = False) -> None:
    """Check that a listener still serves a front end with the secret."""
    await (await line(address, tls=tls)).disconnect("")


async def answer(client: EngineClient, name: str = "r", num_tokens: int = 5) -> int:
    sampling = SamplingParams(max_tokens=num_tokens, seed=0)
    request = Request(request_id=name, prompt_ids=(1, 2), sampling=sampling)
    return sum([len(output.token_ids) async for output in client.generate(request)])


async def refused(connecting: Awaitable[EngineClient], kind: type[VLoraError], reason: str | None = None) -> None:
    with pytest.raises(kind, match=reason):
        await asyncio.wait_for(connecting, PATIENCE_S)


# -- peers that have proved nothing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["says nothing", "does not prove itself"])
@real
async def test_connections_without_a_proof_are_counted(
    what: str, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before TLS; and after a refusal, until the connection is closed."""
    monkeypatch.setattr(connection, "MAX_UNPROVED", 4)

    def try_to_read(end: socket.socket, patience_s: float) -> bytes | None:
        end.settimeout(patience_s)
        with contextlib.suppress(TimeoutError):
            return end.recv(1)
        return None

    async with a_listener(certificate) as (address, _):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        ends: list[socket.socket] = []
        for number in range(12):
            end = await asyncio.to_thread(socket.create_connection, address[:2])
            if what != "says nothing" and number < 4:
                end = await asyncio.to_thread(context.wrap_socket, end)
                await asyncio.to_thread(end.sendall, pack(b"text"))
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


@real
async def test_other_beats_tls_and_listeners_without_security_are_refused(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tls in (False, True):
        async with a_listener(certificate if tls else None) as (address, _):
            for beat_s in (0.0, -1.0, 1e9, float("nan")):
                message = "it must be between 0.01 and 60 seconds"
                await refused(line(address, tls=tls, beat_s=beat_s), BadConfig, message)
            with monkeypatch.context() as patched:
                patched.setattr(connection, "HANDSHAKE_S", 1.0)
                await refused(line(address, tls=not tls), Disconnected)
            await admits(address, tls=tls)
    await refused(connect(LOOPBACK, b"short", tls=False, beat_s=1, key=""), BadConfig, "has 5 bytes")
    missing = Certificate("/nothing", "/nothing")
    for address, secret, given, reason in (
        (LOOPBACK, b"short", None, "has 5 bytes; it needs at least 16"),
        (Address("0.0.0.0", 0), SECRET, None, "requests would be sent in clear text; give the replica a certificate"),
        (LOOPBACK, SECRET, missing, "cannot be used"),
    ):
        with pytest.raises(BadConfig, match=reason):
            await Listener.open(address, protocol(), secret, lambda *_: b"", certificate=given)


@real
async def test_a_third_party_between_two_ends_of_tls_is_refused(certificate: Certificate, tmp_path: Path) -> None:
    """It passes on every byte under a certificate of its own; without TLS nothing would stop it."""
    passed: list[bytes] = []
    async with a_listener(certificate) as (there, _):

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            further = await asyncio.open_connection(*there[:2], ssl=context)

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
        async with a_listener(given) as (address, _):
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
            opened = await opened_by(address, tls=tls)
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
        pending = asyncio.create_task(answer(first, "first", num_tokens=10_000))
        await asyncio.sleep(0.05)
        second = await line(address, tls=tls)  # again, with its key
        await asyncio.wait_for(first.wait_dead(), PATIENCE_S)
        await pending
        assert await answer(second, "second") == 5 and (await second.stats()).num_running == 0


@real
async def test_garbage_from_a_replica_fails_the_calls_with_the_cause() -> None:
    async with a_listener() as (address, admitted):
        for bad in (b"\xc1\xc1", b"{}"):
            client = await line(address)
            pending = asyncio.create_task(answer(client))
            await asyncio.sleep(0)
            admitted[-1].send(bad)
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


async def trickle(transport: MessageTransport, data: bytes, duration_s: float) -> None:
    """Send a message in pieces over a time."""
    descriptor, stream = transport.extra("socket").fileno(), pack(data)
    size = 1 + int(len(stream) * BEAT_S / duration_s)
    for begin in range(0, len(stream), size):
        os.write(descriptor, stream[begin : begin + size])
        await asyncio.sleep(BEAT_S)


@pytest.mark.slow
@real
async def test_a_front_end_is_alive_while_a_message_arrives() -> None:
    async with replica() as address:
        opened = await opened_by(address, beat_s=BEAT_S)
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
    async with a_listener() as (address, admitted):
        client = await line(address)
        long = RequestOutput(request_id="unknown", token_ids=tuple(range(500)))
        watching = asyncio.create_task(watch_beats(client, 5 * BEAT_S, 4, 60.0))
        await trickle(admitted[0], messages.encode(messages.Outputs((long,))), 1.2)
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
        self.replica = Replica(process, cast(MessageTransport, self.engine), messages.Ready("", 1, 1))

    def front_end(self, key: str, *requests: str) -> Wire:
        """One with requests. It replaces that with the same key."""
        wire = Wire()
        self.replica._admit(cast(MessageTransport, wire), msgspec.msgpack.encode((key, 60.0)), "")  # noqa: SLF001
        for name in requests:
            wire.say(messages.Add(Request(request_id=name, prompt_ids=(1,))))
        return wire

    def answer(self, *outputs: RequestOutput) -> None:
        self.engine.say(messages.Outputs(outputs))

    def report(self, num_taken: int, num_running: int) -> None:
        load = EngineLoad(free_blocks=5, total_blocks=9, num_running=num_running, num_waiting=0)
        self.engine.say(messages.LoadReport(load=load, num_taken=num_taken))

    def asked(self, kind: type) -> list[Any]:
        """What the engine was asked of a kind."""
        found: list[Any] = [messages.decode_to_engine(data) for data in self.engine.sent]
        return [each for each in found if isinstance(each, kind)]

    @property
    def cancelled(self) -> list[str]:
        return sorted(each.request_id for each in self.asked(messages.Cancel))


def tokens(name: str, token: int) -> RequestOutput:
    return RequestOutput(request_id=name, token_ids=(token,))


def end(name: str) -> RequestOutput:
    return RequestOutput(request_id=name, finish_reason="cancelled")


@real
async def test_each_front_end_gets_its_own_outputs_replies_and_load() -> None:
    here = Between()
    first, second = here.front_end("a", "a1", "a2"), here.front_end("b", "b1")
    here.answer(tokens("a1", 1), tokens("b1", 2))
    here.answer(end("a1"), tokens("a2", 3))
    assert first.outputs == [tokens("a1", 1), end("a1"), tokens("a2", 3)] and second.outputs == [tokens("b1", 2)]
    here.report(2, 1)  # before the engine has read the third request
    here.report(3, 2)
    shares = [[(each.num_taken, each.num_ended) for each in wire.got(messages.LoadReport)] for wire in (first, second)]
    assert shares == [[(2, 1), (2, 1)], [(0, 0), (1, 0)]]
    assert {each.num_sharing for each in first.got(messages.LoadReport)} == {2}
    for wire, operation in ((first, ListAdapters()), (second, GetStats())):
        wire.say(messages.Call(1, operation))  # both number their calls from 1 on
    for call in here.asked(messages.Call):
        kind = type(messages.decode_operation(call.operation)).__name__
        here.engine.say(messages.Reply(call.call_id, error=ErrorValue("aborted", kind)))
    replies = [[each.error.message for each in wire.got(messages.Reply)] for wire in (first, second)]
    assert replies == [["ListAdapters"], ["GetStats"]]
    here.engine.say(messages.Pong(0.0))
    assert len(first.got(messages.Pong)) == len(second.got(messages.Pong)) == 1


@real
async def test_what_front_ends_keep_is_kept_until_none_does() -> None:
    here = Between()
    first, second = here.front_end("a"), here.front_end("b")
    calls: list[tuple[Wire, dict[str, tuple[str, ...]]]] = [
        (first, {"x": ("1",)}),
        (second, {"x": ("2", "1"), "y": ("3",)}),
        (first, {}),
        (second, {}),
    ]
    for wire, kept in calls:
        wire.say(messages.Call(1, KeepAdapters(kept)))
    found: list[Any] = [messages.decode_operation(each.operation) for each in here.asked(messages.Call)]
    both = {"x": ("1", "2"), "y": ("3",)}
    assert [each.versions for each in found] == [{"x": ("1",)}, both, {"x": ("2", "1"), "y": ("3",)}, {}]


@real
async def test_a_front_end_that_is_lost_or_connects_again_leaves_no_request_and_no_reply() -> None:
    here = Between()
    first, other = here.front_end("a", "a1", "ended"), here.front_end("b", "b1")
    first.say(messages.Call(7, GetStats()))
    here.answer(end("ended"))
    again = here.front_end("a", "a2")
    assert here.cancelled == ["a1"]
    # The step of the former request ends, then the engine reads the cancellation.
    here.answer(tokens("a1", 666), tokens("a2", 1), tokens("b1", 2))
    here.answer(end("a1"))
    here.engine.say(messages.Reply(0))
    assert first.outputs == [end("ended")] and not first.got(messages.Reply) and not again.got(messages.Reply)
    assert again.outputs == [tokens("a2", 1)] and other.outputs == [tokens("b1", 2)]
    again.closed.set_result(None)
    await asyncio.sleep(0.01)
    assert here.cancelled == ["a1", "a2"]
    here.answer(tokens("a2", 666), tokens("b1", 3))
    assert other.outputs == [tokens("b1", 2), tokens("b1", 3)] and again.outputs == [tokens("a2", 1)]
    here.report(4, 1)
    assert [(each.num_taken, each.num_sharing) for each in other.got(messages.LoadReport)] == [(1, 1)]
