"""A door and peers that have proved nothing: garbage, silence, too many of them, and text for the log."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl

import msgspec
import pytest

from tests.cluster.running import SECRET, run
from tests.cluster.test_doors import HEAD, answer, line, refused, replica, served, written
from vlora.cluster import door, handshake
from vlora.cluster.door import Address, Certificate, connect
from vlora.errors import Disconnected
from vlora.types import ErrorValue

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return written(tmp_path_factory.mktemp("certificate"))


FORGED = "1.0\n\x1b[31mERROR a forged line " + 1000 * "x"


@pytest.mark.parametrize("where", ["version", "tag"])
def test_a_stranger_writes_no_lines_of_the_log(where: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with replica() as found:
            reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
            hello = {"type": "Hello", "protocol": 1, "version": "1", "nonce": bytes(32), "beat_s": 1.0}
            data = msgspec.msgpack.encode(
                {**hello, **({"version": FORGED} if where == "version" else {"type": FORGED})}
            )
            writer.write(HEAD.pack(len(data)) + data)
            await reader.read()
            writer.close()

    run(main())
    (message,) = [record.getMessage() for record in caplog.records if "was refused" in record.getMessage()]
    assert message.isprintable() and len(message) < 700 and "a forged line" in message


def test_an_impostor_writes_no_lines_of_the_log() -> None:
    async def main() -> None:
        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            data = handshake.encode(handshake.Refused(ErrorValue("unauthorized", FORGED)))
            writer.write(HEAD.pack(len(data)) + data)
            await reader.read()
            writer.close()

        async with served(impostor) as address:
            error = await refused(connect(address, SECRET, tls=False, beat_s=1))
            assert str(error).isprintable() and len(str(error)) <= 500 and "a forged line" in str(error)

    run(main())


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEAD.pack(1 << 62),
        HEAD.pack(10) + b"not msgpack",
        HEAD.pack(0) * 100,
        HEAD.pack(5000) + bytes(5000),
        secrets.token_bytes(4096),
    ],
    ids=["http", "huge", "text", "empty", "long", "random"],
)
def test_garbage_on_either_end_is_one_typed_error(data: bytes) -> None:
    async def main() -> None:
        async with replica() as found:
            reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
            writer.write(data)
            async with asyncio.timeout(2):
                with contextlib.suppress(ConnectionError):
                    await reader.read()
            writer.close()
            assert await answer(await line(found)) == 5

        async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
                writer.close()

        async with served(answering) as address:
            error = await refused(connect(address, SECRET, tls=False, beat_s=1))
            assert isinstance(error, Disconnected)

    run(main())


@pytest.mark.parametrize("tls", [False, True])
def test_peers_that_say_nothing_are_closed_after_a_time(
    tls: bool, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(door, "MAX_STRANGERS", 4)

    async def main() -> None:
        async with replica(certificate if tls else None) as found:
            silent = [await asyncio.open_connection("127.0.0.1", found.port) for _ in range(8)]
            async with asyncio.timeout(2):
                await asyncio.gather(*(reader.read() for reader, _ in silent))  # until they are closed
            for _, writer in silent:
                writer.close()
            assert await answer(await line(found, tls=tls)) == 5

        async def saying_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        async with served(saying_nothing) as address:
            error = await refused(connect(address, SECRET, tls=False, beat_s=1))
            assert isinstance(error, Disconnected) and "did not answer within 0.3 s" in str(error)
        gone = await refused(connect(Address("127.0.0.1", 1), SECRET, tls=False, beat_s=1))
        assert isinstance(gone, Disconnected) and "no connection to a replica at 127.0.0.1:1" in str(gone)

    run(main())


@pytest.mark.parametrize("what", ["says nothing", "does not prove itself"])
def test_strangers_of_a_door_with_tls_are_counted(
    what: str, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before TLS; and after a refusal, until the connection is closed."""
    monkeypatch.setattr(door, "MAX_STRANGERS", 4)

    def try_to_read(end: socket.socket) -> bytes | None:
        end.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            return end.recv(1)
        return None

    async def main() -> None:
        async with replica(certificate) as found:
            address = ("127.0.0.1", found.port)
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            ends: list[socket.socket] = []
            for number in range(12):
                end = await asyncio.to_thread(socket.create_connection, address)
                if what != "says nothing" and number < 4:
                    end = await asyncio.to_thread(context.wrap_socket, end)
                    await asyncio.to_thread(end.sendall, HEAD.pack(4) + b"text")
                ends.append(end)
            late = await asyncio.gather(*(asyncio.to_thread(try_to_read, end) for end in ends[4:]))
            assert late == [b""] * 8  # closed at once
            if what == "says nothing":
                early = await asyncio.gather(*(asyncio.to_thread(try_to_read, end) for end in ends[:4]))
                assert early == [None] * 4  # still open
            assert isinstance(await refused(line(found, tls=True)), Disconnected)
            for end in ends:
                end.close()
            await asyncio.sleep(0.1)
            assert await answer(await line(found, tls=True)) == 5  # they are not counted any more

    run(main())
