"""Callers that send or read slowly, or not at all: their resources are freed."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

from tests.server.api import Api, running_api
from vlora.config import Token
from vlora.server.http import protocol, server

TOKEN = "u" * 20
ASK = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connect(api: Api, data: bytes = b"", *, receive_buffer: int | None = None) -> socket.socket:
    made = socket.socket()
    if receive_buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(5)
    made.connect(("127.0.0.1", api.port))
    made.sendall(data)
    return made


def ended_after(connection: socket.socket) -> float:
    started = time.monotonic()
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    finally:
        connection.close()
    return time.monotonic() - started


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pytest.param(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n", marks=pytest.mark.slow),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he", marks=pytest.mark.slow),
        pytest.param(ASK + b"Content-Length: 100\r\n\r\n{", marks=pytest.mark.slow),
        ASK + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
)
@pytest.mark.parametrize("token", [None, pytest.param(TOKEN, marks=pytest.mark.slow)])
def test_silent_connections_have_a_time_limit(data: bytes, token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADER_S", 0.3)
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 1)
    monkeypatch.setattr(protocol, "BODY_S", 0.3)
    tokens = () if token is None else (Token(name="u", secret=token),)
    with running_api(tokens=tokens) as api:
        assert ended_after(connect(api, data)) < 3
        assert api._replace(token=token).chat("say:x")[0] == 200


@pytest.mark.slow
def test_a_body_may_take_long_while_data_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "BODY_S", 0.3)
    monkeypatch.setattr(protocol, "LEAST_BYTES_PER_S", 10)
    with running_api() as api:
        body = json.dumps({"model": "base", "messages": [{"role": "user", "content": "say:x"}]}).encode()
        connection = connect(api, ASK + b"Content-Length: %d\r\n\r\n" % len(body))
        for place in range(0, len(body), 10):
            connection.sendall(body[place : place + 10])
            time.sleep(0.1)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()


@pytest.mark.slow
def test_a_peer_that_does_not_read_frees_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SEND_S", 0.3)
    with running_api(max_requests=4, request_timeout_s=60.0) as api:
        api.engine.engine.limits.max_context = 10**9
        messages = [{"role": "user", "content": "forever"}]
        fields: dict[str, Any] = {"model": "base", "n": 4, "stream": True, "max_tokens": 10**6, "messages": messages}
        body = json.dumps(fields).encode()
        connection = connect(api, ASK + b"Content-Length: %d\r\n\r\n" % len(body) + body, receive_buffer=2048)
        deadline = time.monotonic() + 20
        while api.front_end.num_active < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert api.chat("say:x")[0] == 429
        while api.front_end.num_active and time.monotonic() < deadline:
            time.sleep(0.05)
        assert api.chat("say:x")[0] == 200 and api.idle()
        connection.close()


def test_silent_connections_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "connection_share", lambda: 5)
    with running_api() as api:
        silent = [connect(api) for _ in range(12)]
        assert api.call("GET", "/health")[0] == 200
        assert all(ended_after(first) < 1 for first in silent[:7])
        for each in silent:
            each.close()
