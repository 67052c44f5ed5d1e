"""Tokens, TLS and what is sent during a greeting."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme

from tests.split.running import Serving, serving, tiny
from vlora.auth_rate_limit import AuthRateLimit
from vlora.config import Token
from vlora.errors import BadConfig, Disconnected, OverCapacity, Unauthorized, VLoraError
from vlora.split import challenge, connect, transport
from vlora.split.addresses import Address
from vlora.split.executor import BaseExecutor
from vlora.split.frames import NONCE_BYTES, Challenge, Direction, Hello, Proof, Welcome
from vlora.split.greeting import Greeter, Limits
from vlora.split.layers import frozen_layers

SECRET, OTHER = "correct-horse-battery", "staple-staple-staple"
TOKENS = (Token(name="a", secret=SECRET), Token(name="b", secret=OTHER))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("gpt2")


def ask(served: Serving, address: str, **settings: Any) -> None:
    with connect(address, patience_s=5.0, **settings) as base:
        layer = base.calls.groups[0][0]
        assert base.calls.call(Direction.FORWARD, 0, 1, [torch.zeros(1, layer.d_in)])[0].shape == (1, layer.d_out)


def test_only_a_right_token_is_admitted(model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(model, tmp_path, tokens=TOKENS) as served:
        for address in (served.unix, served.tcp):
            for secret in (SECRET, OTHER):
                ask(served, address, token=secret)
            for token, reason in ((None, "requires a token"), ("wrong-wrong-wrong-wrong", "is not valid")):
                with pytest.raises(Unauthorized, match=reason):
                    connect(address, token=token)
        assert served.server.num_clients <= 4
    refusals = [record.getMessage() for record in caplog.records if "was refused" in record.getMessage()]
    assert len(refusals) == 4 and not any(secret in caplog.text for secret in (SECRET, OTHER))


def test_an_expired_token_is_refused(model: Any, tmp_path: Path) -> None:
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    expired = Token(name="old", secret=SECRET, expires=past)
    with serving(model, tmp_path, tokens=(expired,)) as served, pytest.raises(Unauthorized, match="expired at 2020"):
        connect(served.unix, token=SECRET)


def test_a_client_with_a_token_refuses_an_executor_without(model: Any, tmp_path: Path) -> None:
    with serving(model, tmp_path) as served:
        for address in (served.unix, served.tcp):
            with pytest.raises(Unauthorized, match=r"does not ask for a token.* connect without token= ") as refusal:
                connect(address, token=SECRET)
            assert "\n" not in str(refusal.value)
            ask(served, address)


class Impostor:
    """An executor without tokens that answers greetings as it likes, and records calls."""

    def __init__(self, executor: BaseExecutor, *, token_required: bool) -> None:
        self.received = bytearray()
        self._executor = executor
        self._token_required = token_required
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        sock, _ = self._listener.accept()
        deadline = time.monotonic() + 5
        limits, executor = Limits(), self._executor
        with self._listener, sock, contextlib.suppress(OSError):
            transport.receive_message(sock, Hello, 4096, deadline)
            transport.send_message(sock, Challenge(b"n" * NONCE_BYTES, self._token_required))
            transport.receive_message(sock, Proof, 4096, deadline)
            sizes = limits.max_rows, limits.half_bytes
            transport.send_message(
                sock, Welcome(b"", "tiny", "f", "float32", (0, 1), tuple(executor.groups), *sizes, executor.instance)
            )
            self.received += sock.recv(4096)

    def seen(self) -> bytes:
        """Bytes that a client sent after the greeting."""
        self._thread.join()
        return bytes(self.received)


@pytest.mark.parametrize("token_required", [False, True])
def test_an_impostor_without_the_token_receives_nothing(token_required: bool, model: Any) -> None:
    impostor = Impostor(BaseExecutor(frozen_layers(model)), token_required=token_required)
    with pytest.raises(Unauthorized, match=r"does not (ask for a token|know the token)"):
        connect(impostor.address, token=SECRET, patience_s=5.0).calls.call(Direction.FORWARD, 0, 1, [torch.ones(1, 64)])
    assert impostor.seen() == b""
    # It receives the calls of a client that has no token to check it by.
    trusted = Impostor(BaseExecutor(frozen_layers(model)), token_required=False)
    with pytest.raises(Disconnected):
        connect(trusted.address, patience_s=0.2).calls.call(Direction.FORWARD, 0, 1, [torch.ones(1, 64)])
    assert trusted.seen() != b""


class Relay:
    """Passes a connection on and records its bytes."""

    def __init__(self, address: str) -> None:
        self.recorded = bytearray()
        self._target = Address.parse(address)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection((self._target.host, self._target.port))
        threading.Thread(target=self._pump, args=(server, client), daemon=True).start()
        self._pump(client, server)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError), target:
            while data := source.recv(65_536):
                self.recorded += data
                target.sendall(data)


def test_the_token_is_never_sent(model: Any, tmp_path: Path) -> None:
    with serving(model, tmp_path, tokens=TOKENS) as served:
        relay = Relay(served.tcp)
        ask(served, relay.address, token=SECRET)
        assert len(relay.recorded) > 1000 and SECRET.encode() not in relay.recorded
        second = Relay(served.tcp)
        ask(served, second.address, token=SECRET)
        proofs = [challenge.prove(SECRET, role, b"c" * 32, b"b" * 32) for role in ("client", "base")]
        assert len({*proofs}) == 2, "a proof could be sent back as the other side's"
        assert relay.recorded[:200] != second.recorded[:200], "a recorded greeting could be sent again"


def test_a_client_notices_an_executor_that_does_not_know_the_token(model: Any, tmp_path: Path) -> None:
    """An impostor that accepts any proof would otherwise receive activations."""
    import vlora.split.greeting as greeting

    class Gullible:
        def check(self, *_: object) -> Token:
            return Token(name="x", secret="an-impostors-own-secret")

        def prove(self, *arguments: Any) -> bytes:
            return challenge.prove(*arguments)

    with pytest.MonkeyPatch.context() as patch, serving(model, tmp_path, tokens=TOKENS) as served:
        patch.setattr(greeting, "challenge", Gullible())
        with pytest.raises(Unauthorized, match="does not know the token"):
            connect(served.tcp, token=SECRET)


def test_wrong_tokens_are_limited(model: Any, tmp_path: Path) -> None:
    with serving(model, tmp_path, tokens=TOKENS) as served:
        limited = Greeter(
            served.executor, Limits(), tokens=TOKENS, rate_limit=AuthRateLimit(), places=served.server.places
        )
        sock = transport.listen(Address.parse("127.0.0.1:0"))
        served.server.listen(sock, limited)
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(OverCapacity, match="too many wrong tokens from 127"):
            for _ in range(50):
                with pytest.raises(Unauthorized):
                    connect(address, token="wrong-wrong-wrong-wrong")
        with pytest.raises(OverCapacity):
            connect(address, token=SECRET)


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of the executor, and of its clients."""
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client


def test_tls(model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server, client = contexts()
    with serving(model, tmp_path, tls=server, tokens=TOKENS) as served:
        ask(served, served.tcp, token=SECRET, tls=client)
        ask(served, served.unix, token=SECRET)  # on one machine there is no network to protect
        relay = Relay(served.tcp)
        ask(served, relay.address, token=SECRET, tls=client)
        assert b"c_attn" not in relay.recorded
        refused: list[tuple[dict[str, Any], type[VLoraError], str]] = [
            ({"tls": contexts()[1]}, Disconnected, "no TLS connection"),
            ({}, Disconnected, "require TLS"),
        ]
        for settings, kind, reason in refused:
            with pytest.raises(kind, match=reason):
                connect(served.tcp, token=SECRET, patience_s=5.0, **settings)
        ask(served, served.tcp, token=SECRET, tls=client)
    with serving(model, tmp_path) as plain, pytest.raises(Disconnected, match="no TLS connection"):
        connect(plain.tcp, tls=client, patience_s=5.0)


def test_a_connection_needs_an_address() -> None:
    with pytest.raises(BadConfig, match="needs the address"):
        connect()
