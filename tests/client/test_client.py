"""The client's own part: its imports and signatures, what it sends, other programs at the address, and waiting."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import vlora.client
from tests.processes import PATIENCE_S, until
from tests.server.running import Running, png, running_server
from vlora.client import AsyncClient, Client, wait_for_server
from vlora.client.inputs import Image
from vlora.client.sockets import PlainStream, TlsStream, shut_down
from vlora.client.values import DEFAULT_HOST, DEFAULT_PORT
from vlora.config import ServerConfig
from vlora.errors import BadConfig, BadRequest, Disconnected, EngineDead, VLoraError

NOBODY = 1  # a port that accepts no connection


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    limits: dict[str, Any] = {"max_image_bytes": 100_000, "max_message_bytes": 1_000_000}
    with running_server({"cam": {"day": 1}}, **limits) as running:
        yield running


def test_both_clients_have_the_same_calls_with_signatures_and_docstrings() -> None:
    assert vlora.client.__all__ == sorted(vlora.client.__all__)
    assert (ServerConfig().host, ServerConfig().rpyc_port) == (DEFAULT_HOST, DEFAULT_PORT)
    calls = {name for name, value in vars(Client).items() if callable(value) and not name.startswith("_")}
    assert calls == {name for name, value in vars(AsyncClient).items() if callable(value) and not name.startswith("_")}
    for name in calls - {"close"}:
        blocking, awaited = getattr(Client, name), getattr(AsyncClient, name)
        signature = inspect.signature(blocking)
        assert next(iter(signature.parameters)) == "self"
        assert signature.parameters == inspect.signature(awaited).parameters
        returned = {"stream": "TextStream", "open_stream": "FrameStream"}
        assert signature.return_annotation == returned.get(name, inspect.signature(awaited).return_annotation)
        assert blocking.__doc__ and awaited.__doc__
        assert inspect.iscoroutinefunction(awaited) or (name == "stream" and inspect.isasyncgenfunction(awaited))


def test_a_stream_may_be_collected_while_its_connection_is_locked(client: Client) -> None:
    streams = [client.stream("forever", max_tokens=90_000)]

    def collect() -> None:
        with client.connection()._lock:  # noqa: SLF001
            streams.clear()

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(PATIENCE_S)
    assert not collecting.is_alive()


def test_images_are_bytes_or_paths(client: Client, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    images: list[Image] = [png(), tmp_path / "a.png", str(tmp_path / "a.png"), bytearray(png()), memoryview(png())]
    answer = client.generate("say:x", images)
    assert answer.num_prompt_tokens == 10 and answer.timings.latency_s > 0 and answer.total_s > 0


# Prompt, images, fields, code, and part of the message.
NOT_SENT: list[tuple[Any, list[Any], dict[str, Any], str, str]] = [
    ("say:x", ["nowhere.png"], {}, "bad_image", "cannot read image 'nowhere.png': No such file"),
    ("say:x", [b"x" * 100_000] * 12, {}, "too_large", "the request has 1200"),
    ("say:x", [], {"max_token": 1}, "bad_request", "unknown sampling option 'max_token'; known: max_tokens"),
    ("say:x", [], {"temperature": "hot"}, "bad_request", "temperature is 'hot'; it must be a number"),
    ("an unpaired surrogate: \ud800", [], {}, "bad_request", "the request cannot be sent: 'utf-8' codec"),
    (["a", "list"], [], {}, "bad_request", "question is a list; it must be a string"),
    (7, [], {}, "bad_request", "question is a whole number; it must be a string"),
    ("say:x", [], {"adapter": {"a": float("nan")}}, "bad_request", "the weight of 'a' is nan"),
    ("trip", [], {}, "error", "internal server error (ValueError: tripped"),
]


def test_what_cannot_be_sent_is_a_typed_error(client: Client) -> None:
    for prompt, images, fields, code, message in NOT_SENT:
        with pytest.raises(VLoraError) as caught:
            client.generate(prompt, images, **fields)
        assert caught.value.code == code and message in str(caught.value), message
        assert client.generate("say:still here").text == "still here"


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        struct.pack("!LB", 5, 0) + b"\xff" * 5 + b"\n",  # an unknown message type
        struct.pack("!LB", 5, 1) + b"\xff" * 5 + b"\n",  # a message that does not decompress
        struct.pack("!LB", 0, 0) + b"\n",
    ],
)
def test_any_other_kind_of_server_is_reported(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    unheard: list[object] = []
    monkeypatch.setattr(threading, "excepthook", unheard.append)

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with peer:
                    peer.sendall(data)
                    peer.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        with Client(port=listener.getsockname()[1]) as client, pytest.raises(Disconnected, match="cannot reach a serv"):
            client.stats()
        # Otherwise the thread may accept on a later listener whose file descriptor is the same.
        listener.shutdown(socket.SHUT_RDWR)
        answering.join()
    assert not unheard


class Sparing:
    """A socket that accepts a thousand bytes at a time, and records them."""

    def __init__(self) -> None:
        self.taken = b""
        self.owners: set[int] = set()

    def send(self, data: Any) -> int:
        self.owners.add(id(memoryview(data).obj))
        self.taken += bytes(data[:1000])
        return min(len(data), 1000)


def test_a_large_message_is_sent_whole_without_copies() -> None:
    data, sock = os.urandom(300_500), Sparing()
    PlainStream(sock).write(data)
    assert sock.taken == data
    assert sock.owners == {id(data)}, "every piece is a view of the message itself"
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as threads:
        writing = threads.submit(PlainStream(ours).write, data)
        assert PlainStream(theirs).read(len(data)) == data
        writing.result()


def test_a_silent_or_closed_peer_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(0.05)
    stream = PlainStream(ours)
    with pytest.raises(EOFError):
        stream.write(b"x" * 10_000_000)
    assert stream.closed
    theirs.close()
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(EOFError):
        PlainStream(ours).write(b"x")


def test_closing_ends_the_plain_socket_before_its_tls_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may write meanwhile: nothing leaves unencrypted."""
    ours, theirs = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    stream = TlsStream(context.wrap_socket(ours, do_handshake_on_connect=False), 1.0)
    order: list[str] = []
    plain_shutdown, tls_shutdown = socket.socket.shutdown, ssl.SSLSocket.shutdown

    def write() -> None:
        with pytest.raises(EOFError):
            stream.write(b"secret")
        order.append("written")

    writing = threading.Thread(target=write)

    def plain(self: Any, how: int) -> None:
        order.append("plain")
        plain_shutdown(self, how)

    def secure(self: Any, how: int) -> None:
        writing.start()
        writing.join(0.1)  # it waits for the lock
        order.append("tls")
        tls_shutdown(self, how)

    monkeypatch.setattr(socket.socket, "shutdown", plain)
    monkeypatch.setattr(ssl.SSLSocket, "shutdown", secure)
    stream.close()
    writing.join(PATIENCE_S)
    assert order[:2] == ["plain", "tls"] and order[-1] == "written" and theirs.recv(100) == b""
    theirs.close()


def test_a_closed_socket_is_shut_down_without_an_error() -> None:
    ours, theirs = socket.socketpair()
    reading = threading.Thread(target=ours.recv, args=(1,))
    reading.start()
    shut_down(ours)
    reading.join(PATIENCE_S)
    assert not reading.is_alive()
    ours.close()
    theirs.close()
    shut_down(ours)


class Coming:
    """A server that is ready after some errors."""

    def __init__(self, *errors: VLoraError) -> None:
        self.errors = list(errors)

    def stats(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


def wait(client: Any, wait_s: float, stop: threading.Event | None = None) -> list[str]:
    messages: list[str] = []
    wait_for_server(client, wait_s, stop, messages.append)
    return messages


def test_a_client_with_several_addresses_goes_on_with_the_next() -> None:
    with contextlib.ExitStack() as first, running_server() as second:
        addresses = [f"127.0.0.1:{port}" for port in (first.enter_context(running_server()).port, second.port)]
        with Client(servers=[f"127.0.0.1:{NOBODY}", *addresses]) as client:
            assert client.generate("say:a").text == "a" and not second.engine.engine.num_steps
            stream = client.stream("forever", max_tokens=90_000)
            next(stream)
            first.close()
            with pytest.raises(VLoraError):
                list(stream)
            until(lambda: client.generate("say:b").text == "b")
        nobody = [f"127.0.0.1:{NOBODY}", addresses[0]]
        with Client(servers=nobody) as client, pytest.raises(Disconnected, match=r":1: .*; cannot reach a server at"):
            client.stats()
    with pytest.raises(BadConfig, match="an address of a server is 'nowhere'; write HOST:PORT"):
        Client(servers=["nowhere"])


def test_a_server_is_awaited_until_it_answers(client: Client) -> None:
    assert wait(client, 0.0) == [], "a ready server causes no wait"
    coming = Coming(Disconnected("no server"), EngineDead("its engine died"))
    assert wait(coming, PATIENCE_S) == ["no server; waiting for it"] and coming.errors == []
    with pytest.raises(BadRequest):  # waiting cannot fix it
        wait(Coming(BadRequest("another protocol")), 3600.0)
    # Waiting ends at its limit, and at the stop event.
    with Client(port=NOBODY) as client, pytest.raises(Disconnected, match="vlora serve"):
        wait(client, 0.1)
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(Disconnected):
        wait(Client(port=NOBODY), 3600.0, stop)
