"""Both ends of a line: peers with another secret or version, garbage after the proof, and front ends that are lost."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import trustme

from tests.cluster.running import SECRET, SLEEPING, ReplicaProcess, run
from tests.cluster.sleeping_engine import COMMAND
from vlora.cluster import door, handshake
from vlora.cluster.door import Address, Certificate, Door, connect
from vlora.cluster.replica import Replica
from vlora.engine.ipc import messages
from vlora.engine.ipc.client import EngineClient
from vlora.engine.ipc.transport import ClientTransport
from vlora.errors import BadConfig, Disconnected, EngineDead, Unauthorized, VLoraError
from vlora.types import Request, SamplingParams

LOOPBACK = Address("127.0.0.1", 0)
HEAD = struct.Struct("<Q")

pytestmark = pytest.mark.slow


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
async def replica(certificate: Certificate | None = None) -> AsyncIterator[Replica]:
    found = await Replica.start(SLEEPING, SECRET, LOOPBACK, certificate=certificate, command=COMMAND)
    try:
        yield found
    finally:
        await found.close()


async def line(
    found: Replica, *, tls: bool = False, secret: bytes = SECRET, version: str | None = None
) -> EngineClient:
    return await connect(Address("127.0.0.1", found.port), secret, tls=tls, beat_s=0.2, version=version)


async def answer(client: EngineClient, name: str = "r", num_tokens: int = 5) -> int:
    sampling = SamplingParams(max_tokens=num_tokens, seed=0)
    request = Request(request_id=name, prompt_ids=(1, 2), sampling=sampling)
    return sum([len(output.token_ids) async for output in client.generate(request)])


async def refused(connecting: Awaitable[EngineClient]) -> VLoraError:
    with pytest.raises(VLoraError) as caught:
        await connecting
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("tls", [False, True])
def test_a_line_with_and_without_tls(tls: bool, certificate: Certificate) -> None:
    async def main() -> None:
        async with replica(certificate if tls else None) as found:
            client = await line(found, tls=tls)
            assert client.ready.block_size == 16 and client.ready.max_batch_size == 8
            assert client.ready.num_blocks == 1000
            assert await answer(client, num_tokens=50) == 50
            await client.disconnect("the end")
            with pytest.raises(EngineDead, match="the end"):
                await client.stats()

    run(main())


def test_a_wrong_secret_is_refused_by_both_ends(certificate: Certificate) -> None:
    async def main() -> None:
        for tls in (False, True):
            async with replica(certificate if tls else None) as found:
                error = await refused(line(found, tls=tls, secret=secrets.token_bytes(32)))
                assert isinstance(error, Unauthorized) and "the cluster's secret differs" in str(error)
                assert await answer(await line(found, tls=tls)) == 5  # the replica serves others
        assert "has 5 bytes" in str(await refused(connect(LOOPBACK, b"short", tls=False, beat_s=1)))
        with pytest.raises(BadConfig, match="has 5 bytes; it needs at least 16"):
            await Door.open(LOOPBACK, b"short", lambda *_: None)

    run(main())


def test_a_server_that_does_not_know_the_secret_is_refused() -> None:
    """It accepts any proof, as an impostor would."""

    async def main() -> None:
        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async def receive() -> bytes:
                return await reader.readexactly(HEAD.unpack(await reader.readexactly(HEAD.size))[0])

            def send(message: handshake.Message) -> None:
                data = handshake.encode(message)
                writer.write(HEAD.pack(len(data)) + data)

            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                seen.append(await receive())
                send(handshake.Challenge(handshake.PROTOCOL, handshake.own_version(), bytes(32)))
                seen.append(await receive())
                send(handshake.Welcome(bytes(32)))
                await reader.read()
            writer.close()

        seen: list[bytes] = []
        async with served(impostor) as address:
            error = await refused(connect(address, SECRET, tls=False, beat_s=1))
            assert isinstance(error, Unauthorized) and "did not prove that it knows" in str(error)
        assert len(seen) == 2 and not any(SECRET in data for data in seen)

    run(main())


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


def test_a_third_party_between_two_ends_of_tls_is_refused(certificate: Certificate, tmp_path: Path) -> None:
    """It passes on every byte under a certificate of its own; without TLS nothing would stop it."""

    async def main() -> None:
        async with replica(certificate) as found:

            async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                context = ssl.create_default_context()
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                there = await asyncio.open_connection("127.0.0.1", found.port, ssl=context)

                async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
                    with contextlib.suppress(ConnectionError):
                        while data := await source.read(1 << 16):
                            passed.append(data)
                            target.write(data)
                    target.close()

                await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

            passed: list[bytes] = []
            async with served(between, written(tmp_path).context()) as address:
                error = await refused(connect(address, SECRET, tls=True, beat_s=1))
                assert isinstance(error, Unauthorized) and passed
            assert await answer(await line(found, tls=True)) == 5

    run(main())


def test_another_version_is_refused_with_both_versions() -> None:
    async def main() -> None:
        async with replica() as found:
            error = await refused(line(found, version="99.1"))
            assert isinstance(error, BadConfig)
            assert f"runs vlora {handshake.own_version()!r} with protocol 1, this front end vlora '99.1'" in str(error)

    run(main())


def test_tls_on_one_end_only(certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_S", 1.0)

    async def main() -> None:
        async with replica() as plain, replica(certificate) as secure:
            assert isinstance(await refused(line(plain, tls=True)), Disconnected)
            assert isinstance(await refused(line(secure)), Disconnected)

    run(main())


def test_garbage_from_a_peer_that_has_proved_itself() -> None:
    """The replica closes the line and cancels its requests; the front end's calls fail with the cause."""

    async def main() -> None:
        async with replica() as found:
            address = Address("127.0.0.1", found.port)
            request = Request(request_id="r", prompt_ids=(1,), sampling=SamplingParams(max_tokens=100_000, seed=0))
            for data in (b"\xc1", messages.encode(messages.Stop()), messages.encode(messages.Start(SLEEPING))):
                opened = await door.open_line(address, SECRET, tls=False, beat_s=1)
                opened.transport.send(messages.encode(messages.Add(request)))
                await asyncio.wait_for(opened.inbox.get(), 2)
                opened.transport.send(data)
                await asyncio.wait_for(asyncio.wait({opened.transport.closed}), 2)
                later = await line(found)
                assert (await later.stats()).num_running == 0
                await later.disconnect("")

        transports: list[ClientTransport] = []
        impostor = await Door.open(LOOPBACK, SECRET, lambda transport, *_: transports.append(transport))
        ready = messages.encode(messages.Ready("", 1, 1))

        async def send_ready() -> None:
            while not transports:
                await asyncio.sleep(0.01)
            transports[0].send(ready)

        for bad in (b"\xc1\xc1", b"{}"):
            transports.clear()
            sending = asyncio.create_task(send_ready())
            client = await connect(Address("127.0.0.1", impostor.port), SECRET, tls=False, beat_s=1)
            await sending
            pending = asyncio.create_task(answer(client))
            await asyncio.sleep(0)
            transports[0].send(bad)
            assert "the engine sent a message that cannot be read" in await asyncio.wait_for(client.wait_dead(), 2)
            assert await pending == 0
        impostor.close()

    run(main())


@pytest.mark.parametrize("beat_s", [0.0, -1.0, 1e9, float("nan")])
def test_an_invalid_beat_is_refused(beat_s: float) -> None:
    async def main() -> None:
        async with replica() as found:
            error = await refused(connect(Address("127.0.0.1", found.port), SECRET, tls=False, beat_s=beat_s))
            assert isinstance(error, BadConfig) and "it must be between 0.01 and 60 seconds" in str(error)

    run(main())


def test_a_second_front_end_replaces_the_first() -> None:
    async def main() -> None:
        async with replica() as found:
            first = await line(found)
            pending = asyncio.create_task(answer(first, "same id", num_tokens=10_000))
            await asyncio.sleep(0.05)
            second = await line(found)
            await asyncio.wait_for(first.wait_dead(), 2)
            await pending
            assert await answer(second, "same id") == 5
            assert (await second.stats()).num_running == 0

    run(main())


@pytest.mark.parametrize("closes", [True, False])
def test_a_replica_cancels_what_a_lost_front_end_asked_for(closes: bool) -> None:
    """Also if the connection stays open, as after a cut cable."""

    async def main() -> None:
        async with replica() as found:
            client = await connect(Address("127.0.0.1", found.port), SECRET, tls=False, beat_s=0.02)
            pending = asyncio.create_task(answer(client, num_tokens=100_000))
            await asyncio.sleep(0.05)
            if closes:
                await client.disconnect("gone")
            # Otherwise it sends no pings: 20 beats.
            await asyncio.wait_for(client.wait_dead(), 3)
            await pending
            later = await line(found)
            assert (await later.stats()).num_running == 0

    run(main())


def test_a_door_without_tls_is_not_opened_to_other_machines() -> None:
    async def main() -> None:
        with pytest.raises(BadConfig, match="requests would be sent in clear text; give the replica a certificate"):
            await Door.open(Address("0.0.0.0", 0), SECRET, lambda *_: None)
        with pytest.raises(BadConfig, match="cannot be used"):
            await Door.open(LOOPBACK, SECRET, lambda *_: None, certificate=Certificate("/nothing", "/nothing"))

    run(main())


def test_a_certificate_after_text_or_after_its_key(certificate: Certificate, tmp_path: Path) -> None:
    """As `openssl x509 -text` writes it; and one file with both."""

    async def main(cert_file: str, key_file: str) -> None:
        async with replica(Certificate(cert_file, key_file)) as found:
            assert await answer(await line(found, tls=True)) == 5

    cert, key = Path(certificate.cert_file).read_text(), Path(certificate.key_file).read_text()
    (tmp_path / "text.pem").write_bytes("Certificate:\n    Subject: Zürich\n".encode("latin-1") + cert.encode())
    (tmp_path / "both.pem").write_text(key + cert)
    run(main(str(tmp_path / "text.pem"), certificate.key_file))
    run(main(str(tmp_path / "both.pem"), str(tmp_path / "both.pem")))
    assert Certificate(str(tmp_path / "text.pem"), "").der() == certificate.der()
    with pytest.raises(BadConfig, match="has no line '-----BEGIN CERTIFICATE-----'"):
        Certificate(certificate.key_file, "").der()


def test_a_replica_ends_with_its_engine_and_with_its_parent() -> None:
    async def main() -> None:
        first = await ReplicaProcess.start()
        first.signal(signal.SIGKILL, actor=False)
        assert await asyncio.wait_for(first.process.wait(), 5) == 1
        second = await ReplicaProcess.start()
        await second.stop()
        assert second.process.returncode == 0

    run(main())
