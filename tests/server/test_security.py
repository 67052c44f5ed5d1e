"""Authentication: tokens and TLS over RPyC and HTTP, and the errors of refused callers."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import math
import re
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import trustme

from tests.processes import PATIENCE_S, until
from tests.server.api import Api, running_api
from tests.server.conftest import Certificates
from tests.server.running import png, running_server
from vlora.client import Client
from vlora.config import ServerConfig, Token
from vlora.errors import BadConfig, Disconnected, OverCapacity, RateLimited, Unauthorized, VLoraError
from vlora.logging_format import write_audit_log
from vlora.operations import Operation
from vlora.rate_limits import MAX_PEERS, AuthRateLimit
from vlora.server.http.operator_routes import ROWS
from vlora.server.security.access import Access, read_tokens
from vlora.server.security.limits import Quotas
from vlora.wire.tls import server_context

ROOT = Path(__file__).parents[2]
USER, ADMIN, EXPIRED = "user-token-0123456789", "admin-token-0123456789", "expired-token-0123456789"
YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
TOKENS = (
    Token(name="cameras", secret=USER),
    Token(name="ops", secret=ADMIN, admin=True),
    Token(name="guest", secret=EXPIRED, expires=YESTERDAY),
)


def test_tokens_come_from_a_file_and_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text(
        f"cameras: {{token: {USER}, expires: 2027-01-31, requests_per_minute: 60, cameras: 4}}\n"
        f"ops:\n  token: {ADMIN}\n  admin: true\n  expires: 2027-01-31T12:00:00+01:00\n"
    )
    cameras, ops, own = read_tokens(file, {"VLORA_TOKEN": "from-the-environment", "VLORA_ADMIN_TOKEN": ""})
    assert (cameras.name, cameras.secret, cameras.admin) == ("cameras", USER, False)
    assert cameras.expires == datetime.datetime(2027, 1, 31, tzinfo=datetime.UTC)
    assert (cameras.requests_per_minute, cameras.tokens_per_day, cameras.cameras) == (60, None, 4)
    assert ops.admin and ops.expires == datetime.datetime(2027, 1, 31, 11, tzinfo=datetime.UTC)
    assert (own.name, own.secret, own.admin) == ("VLORA_TOKEN", "from-the-environment", False)
    assert USER not in repr(cameras) and USER not in repr(ServerConfig(tokens=(cameras,)))
    assert read_tokens(None, {}) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no tokens"),
        ("just text", "has no tokens"),
        ("a: {token: [s3cret-s3cret-s3cret", "is not YAML, line 1: a bracket that is not closed"),
        ("a: s3cret-s3cret-s3cret", "entry 'a': the value is a string; it must be an object"),
        ("a: {token: 7}", "entry 'a': token is a whole number; it must be a string"),
        ("a: {admin: true}", "entry 'a': the field 'token' is missing; write '{token: SECRET}'"),
        ("a: {token: s3cret}", "token 'a' cannot be used: a token has at least 16 characters"),
        ("a: {token: s3cret s3cret s3cret}", "token 'a' cannot be used"),
        ("a: {token: s3cret-s3cret-s3cret, until: 2027-01-01}", "unknown field 'until'"),
        ("a: {token: s3cret-s3cret-s3cret, expires: soon}", "entry 'a': expires is not a date"),
    ],
)
def test_errors_of_a_token_file_do_not_contain_its_secrets(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "tokens.yaml").write_text(text)
    with pytest.raises(BadConfig) as caught:
        read_tokens(tmp_path / "tokens.yaml", {})
    assert message in str(caught.value) and "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None
    with pytest.raises(BadConfig, match="cannot read the token file"):
        read_tokens(tmp_path / "nowhere.yaml", {})


def test_only_a_server_with_tokens_binds_beyond_loopback() -> None:
    for host in ("0.0.0.0", "192.168.1.7", "::", "example.org", ""):
        with pytest.raises(BadConfig, match="without authentication the server binds to loopback only"):
            ServerConfig(host=host)
        assert ServerConfig(host=host, tokens=TOKENS).host == host
    with pytest.raises(BadConfig, match="token 'a' has the same secret as another token"):
        ServerConfig(tokens=(Token(name="a", secret=USER), Token(name="b", secret=USER)))


def test_a_token_is_checked_at_every_call() -> None:
    now = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
    expires = now + datetime.timedelta(hours=1)
    access = Access((Token(name="a", secret=USER, expires=expires),), now=lambda: now)
    access.check(USER)
    now = expires
    with pytest.raises(Unauthorized, match="expired at 2026-11-21 01:00 UTC"):
        access.check(USER)
    for secret in (None, "", USER[:-1], USER + "x", "\ud800", "ü" * 20):
        with pytest.raises(Unauthorized) as caught:
            access.check(secret)
        assert not secret or secret not in str(caught.value)
    east = datetime.timezone(datetime.timedelta(hours=2))
    token = Token(name="x", secret="s" * 16, expires=datetime.datetime(2020, 1, 1, 2, tzinfo=east))
    with pytest.raises(Unauthorized, match="2020-01-01 00:00 UTC"):
        Access([token]).check("s" * 16)
    with pytest.raises(BadConfig, match="turned on or off"):
        Access(()).replace(TOKENS)
    Access(()).check(None)  # on loopback without tokens every call is allowed


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with running_api(adapters={"cam": {"night": 1}}, tokens=TOKENS) as made:
        yield made


CHAT = {"model": "base", "messages": [{"role": "user", "content": "say:x"}]}
AT_ONCE = 16  # less than the wrong tokens that one peer may send at once
CALLS: list[tuple[str, str, Any]] = [
    *(("GET", path, None) for path in ("/v1/models", "/v1/adapters", "/metrics", "/openapi.json", "/nowhere")),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/heads/cam/night", {}),
]
CALLS += [(row.method, re.sub(r"\{\w+\}", "absent", row.path), {}) for row in ROWS if row.method != "GET"]


URL = f"rtsp://me:{EXPIRED}@10.1.0.7/x"  # with a secret
VALUES: dict[str, Any] = {
    "camera": {"name": "gate", "source": URL, "sinks": [URL], URL: 1},
    "changes": {"source": URL},
    "files": {"adapter_config.json": USER.encode()},
    **{"path": URL, "plan": "/srv/plan.yaml", "name": "absent", "pinned": True, "replicas": 2},
    **{"lora_name": "absent", "lora_path": URL, "load_inplace": True},
}


@pytest.fixture
def audit_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("vlora.logging_format.AUDIT_BYTES", 2000)
    logger = logging.getLogger("vlora.audit")
    monkeypatch.setattr(logger, "propagate", True)
    write_audit_log(str(tmp_path / "audit.jsonl"))
    yield tmp_path / "audit.jsonl"
    for handler in logger.handlers:
        handler.close()
    logger.handlers = []


def test_operations_of_admins_need_their_token_and_are_in_the_audit_log(audit_file: Path, api: Api) -> None:
    expected: list[dict[str, Any]] = []

    def note(kind: type[Operation], by: str, surface: str, result: str) -> None:
        expected.append({"message": kind.__name__, "by": by, "from": f"{surface} 127.0.0.1", "result": result})

    for kind in Operation.__subclasses__():
        if kind.__module__ != "vlora.operations" or not kind.admin:
            continue
        needed = {field.name for field in msgspec.structs.fields(kind) if field.required}
        operation = kind(**{name: value for name, value in VALUES.items() if name in needed})
        rows = [row for row in ROWS if row.operation is kind]
        assert rows, f"{kind.__name__} has no route"
        for token, by in ((USER, "cameras"), (ADMIN, "ops")):
            code = "ok"
            with api.client(token=token) as client:
                try:
                    client.call(operation)
                except VLoraError as error:
                    code = error.code
            assert (code == "forbidden") == (by == "cameras"), operation
            note(kind, by, "rpyc", code)
            for row in rows:
                names = {row.names.get(name, name) for name in needed - {*row.fixed} if f"{{{name}}}" not in row.path}
                names |= {*row.more} & {*VALUES}
                body = VALUES[row.whole] if row.whole else {name: VALUES[name] for name in names}
                path = row.path.replace("{name}", "absent")
                if "files" in names:
                    parts = [("files", each) for each in body["files"].items()]
                    sent = httpx.put(api.url + path, files=parts, headers={"Authorization": f"Bearer {token}"})
                    status, answer = sent.status_code, sent.json()
                else:
                    status, answer = api._replace(token=token).call(row.method, path, body)
                assert (status == 403) == (by == "cameras"), (row, answer)
                note(kind, by, "http", answer["error"]["code"] if status >= 400 else "ok")
    files = sorted(audit_file.parent.glob("audit.jsonl*"), key=lambda file: -int(file.suffix[1:].replace("jsonl", "0")))
    assert 2 < len(files) <= 10, "it rotates"
    text = "".join(file.read_text() for file in files)
    assert not any(secret in text for secret in (USER, ADMIN, EXPIRED))
    found = [json.loads(line) for line in text.splitlines()]
    assert [{key: line[key] for key in expected[0]} for line in found] == expected[-len(found) :]
    assert all(re.fullmatch(r"20.*\+00:00", line["at"]) for line in found)
    shown = next(line["arguments"] for line in found if line["message"] == "AddCamera")
    assert shown == {"camera": {"name": "gate", "source": "...", "sinks": "..."}}


HEADERS = {
    **dict.fromkeys(("", "Bearer ", f"Basic {USER}"), "authentication required"),
    "Bearer wrong-token-0123456789": "not valid on this server",
    f"Bearer {EXPIRED}": "the token expired at",
}


@pytest.mark.parametrize("header", HEADERS)
def test_every_call_requires_a_valid_token(header: str) -> None:
    for begin in range(0, len(CALLS), AT_ONCE):
        with running_api(tokens=TOKENS) as api:  # a server of its own, which counts wrong tokens
            for method, path, body in CALLS[begin : begin + AT_ONCE]:
                status, answer = api.call(method, path, body, headers={"Authorization": header} if header else None)
                assert (status, answer["error"]["code"]) == (401, "unauthorized"), path
                assert answer["error"]["type"] == "authentication_error"
                assert HEADERS[header] in answer["error"]["message"] and EXPIRED not in str(answer)
    with running_api(tokens=TOKENS) as api:
        assert api.call("GET", "/health")[0] == api.call("GET", "/ready")[0] == 200  # for load balancers
        with socket.create_connection(("127.0.0.1", api.http_port), timeout=PATIENCE_S) as sock:
            sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 401"), "the body is not read"
        token = header.removeprefix("Bearer ") if "Basic" not in header else None
        with api.client(token=token) as client, pytest.raises(Unauthorized, match=HEADERS[header]):
            client.generate("say:x")


def test_secrets_and_texts_are_in_no_log_and_no_metric(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for token in (USER, ADMIN, EXPIRED, "wrong-token-0123456789"):
        mine = api._replace(token=token)
        mine.chat("say:between us", model="absent")
        with mine.client() as client, contextlib.suppress(Unauthorized):
            client.generate("say:between us")
    text = api._replace(token=USER).call("GET", "/metrics")[1]
    assert 'vlora_requests_total{adapter="unknown",outcome="unauthorized"}' in text
    for secret in (USER, ADMIN, EXPIRED, "wrong-token", "between us"):
        assert secret not in text and secret not in caplog.text


def test_guessing_is_rate_limited_on_both_surfaces() -> None:
    with running_api(tokens=TOKENS) as api, api._replace(token=USER).client() as known:
        known.adapters()
        guess = api._replace(token="x" * 20)
        assert [guess.call("GET", "/v1/models")[0] for _ in range(12)] == [401] * 12
        for _ in range(8):
            with guess.client() as client, pytest.raises(Unauthorized):
                client.adapters()
        assert [api._replace(token=token).call("GET", "/v1/models")[0] for token in ("x" * 20, USER)] == [429] * 2
        with api._replace(token=USER).client() as client, pytest.raises(OverCapacity, match="too many wrong tokens"):
            client.adapters()
        assert api.call("GET", "/health")[0] == 200 and known.adapters() == (), "authenticated ones stay open"


EVIL = ("evil.example", "localhost.evil.example", "me@localhost", "127.0.0.2", "[::1", "")
ORIGINS = ("http://evil.example", "null", "http://localhost.evil.example", "http://[", "")


def test_without_tokens_pages_of_other_hosts_and_origins_are_refused(api: Api) -> None:
    # DNS rebinding: a web page with its own name resolved to 127.0.0.1 reaches the server through a browser.
    def get(**headers: str) -> tuple[int, Any]:
        return plain.call("GET", "/v1/models", headers=headers)

    with running_api() as plain:
        for host in ("localhost", "LOCALHOST:99", "127.0.0.1:99", "[::1]", "[::1]:99"):
            assert get(Host=host)[0] == get(Origin=f"http://{host}")[0] == 200
        for host in EVIL:
            status, answer = get(Host=host)
            message = f"the request is for host {host!r}; without tokens"
            assert status == 400 and answer["error"]["message"].startswith(message)
        for origin in ORIGINS:
            assert get(Origin=origin)[0] == 403, origin
            assert api._replace(token=USER).call("GET", "/v1/models", headers={"Origin": origin})[0] == 200


def test_rpyc_over_tls_answers_many_threads_at_once(certificates: Certificates) -> None:
    with (
        running_server(tls_cert=certificates.cert, tls_key=certificates.key) as server,
        socket.create_connection(("127.0.0.1", server.port)),  # an unfinished handshake blocks no other
        Client(port=server.port, tls=certificates.context()) as client,
        ThreadPoolExecutor(8) as threads,
    ):

        def ask(number: int) -> str:
            image = png(size=(300, 300), kind="BMP")  # messages of many TLS records, both ways at once
            return "".join(client.stream(f"say:thread {number} " + "long " * 20, [image] * 4, max_tokens=400))

        assert list(threads.map(ask, range(8))) == [f"thread {number} " + "long " * 20 for number in range(8)]


def test_mutual_tls_accepts_certificates_of_the_authority_only(certificates: Certificates) -> None:
    tls = {"tls_cert": certificates.cert, "tls_key": certificates.key, "tls_client_ca": certificates.ca}
    stranger = certificates.context(own=trustme.CA().issue_cert("camera-7.example"))
    with running_api(**tls) as api:  # type: ignore[arg-type]
        known = api._replace(tls=certificates.context(own=certificates.client))
        with known.client() as client:
            assert client.generate("say:x").text == "x" and known.call("GET", "/health")[0] == 200
        for context in (certificates.context(), stranger):
            other = api._replace(tls=context)
            with other.client() as client, pytest.raises(Disconnected, match="--tls-cert"):
                client.stats()
            with pytest.raises((ssl.SSLError, ConnectionError)):
                other.call("GET", "/health")


def test_tls_mismatches_are_reported_with_their_remedy(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    others = ssl.create_default_context()
    with running_server(tls_cert=certificates.cert, tls_key=certificates.key) as server:
        for tls, remedy in ((None, "or require TLS"), (others, "certificate verify failed.* the CA of its")):
            with Client(port=server.port, tls=tls) as client, pytest.raises(Disconnected, match=remedy):
                client.stats()
        # The client fails before the server; stopping now would close the socket during the handshake.
        until(lambda: caplog.text.count("a connection from 127.0.0.1 was closed: SSL") >= 2)
    with (
        running_server() as plain,
        Client(port=plain.port, tls=certificates.context()) as client,
        pytest.raises(Disconnected, match="it may not use TLS"),
    ):
        client.stats()


def test_unusable_tls_and_token_files_are_named(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (file := tmp_path / "tokens.yaml").write_text(f"me: {{token: {USER}}}")
    cert, key, bad = certificates.cert, certificates.key, str(file)
    with pytest.raises(BadConfig, match="must be set together"):
        ServerConfig(tls_cert=cert)
    with pytest.raises(BadConfig, match="requires TLS"):
        ServerConfig(tls_client_ca=certificates.ca)
    for files in ((bad, key, None), (cert, bad, None), ("nowhere.pem", key, None), (cert, key, bad)):
        with pytest.raises(BadConfig, match=r"tls_client_ca .* cannot be used" if files[2] else "cannot be used"):
            server_context(ServerConfig(tls_cert=files[0], tls_key=files[1], tls_client_ca=files[2]))
    for mode in (0o600, 0o640, 0o604, 0o620):  # others may read or write the tokens
        caplog.clear()
        file.chmod(mode)
        assert len(read_tokens(file, {})) == 1
        assert ("chmod 600" in caplog.text) == (mode != 0o600) and USER not in caplog.text


def test_quotas_of_tokens_refill_evenly_and_keep_their_counts() -> None:
    now = 100.0
    token = Token(name="me", secret=USER, requests_per_minute=3, tokens_per_minute=600, tokens_per_day=1440)
    quotas = Quotas((token, Token(name="ops", secret=ADMIN)), clock=lambda: now)

    def limited(text: str, wait_s: float) -> None:
        with pytest.raises(
            RateLimited, match=f"'me' has used its quota of {text}; try again in {math.ceil(wait_s)} s"
        ) as why:
            quotas.count_request("me")
        assert why.value.retry_s == pytest.approx(wait_s)

    def headers() -> dict[str, str]:
        return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in quotas.headers("me")}

    for _ in range(3):
        quotas.count_request("me")
    for other in ("ops", "unknown", None):
        quotas.count_request(other)
        quotas.count_tokens(other, 10**9)
        assert quotas.headers(other) == []
    limited("3 requests per minute", 20)
    assert headers() == {
        **{"limit-requests": "3", "remaining-requests": "0", "reset-requests": "60.000s"},
        **{"limit-tokens": "600", "remaining-tokens": "600", "reset-tokens": "0.000s"},
    }
    now += 20
    quotas.count_request("me")
    limited("3 requests per minute", 20)
    now += 60
    quotas.count_tokens("me", 800)  # more than are left: 201 of them have to be refilled
    limited("600 tokens per minute", 20.1)
    quotas.replace((token,))  # unchanged quotas keep their counts
    limited("600 tokens per minute", 20.1)
    now += 20.1
    quotas.count_request("me")
    quotas.count_tokens("me", 641)
    now += 70
    limited("1440 tokens per day", 29.9)
    assert headers()["limit-tokens"] == "1440" and headers()["remaining-tokens"] == "0"
    quotas.replace((dataclasses.replace(token, tokens_per_day=None),))
    quotas.count_request("me")
    with pytest.raises(BadConfig, match="token 'me': cameras is 0; it must be at least 1"):
        Token(name="me", secret=USER, cameras=0)


def test_a_token_with_quotas_is_refused_over_both_surfaces() -> None:
    now = 100.0
    mine = Token(name="me", secret=USER, requests_per_minute=4, tokens_per_day=10**6, cameras=1)
    with running_api(adapters={"cam": {"night": 1}}, tokens=(mine, TOKENS[1])) as api:
        api.front_end.quotas.clock = lambda: now
        api = api._replace(token=USER)

        def post(body: Any) -> httpx.Response:
            return httpx.post(f"{api.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {USER}"})

        first = post(CHAT)
        assert first.status_code == 200 and "retry-after" not in first.headers
        used = first.json()["usage"]["total_tokens"]
        assert used > 2 and first.headers["x-ratelimit-remaining-tokens"] == str(10**6 - used)
        assert first.headers["x-ratelimit-remaining-requests"] == "3"
        assert post({**CHAT, "stream": True}).headers["x-ratelimit-remaining-requests"] == "2"
        with api.client() as client:
            client.generate("say:x")
            with client.open_stream(adapter="cam", head="night") as stream:
                with pytest.raises(OverCapacity, match="'me' has 1 streams open, its quota of cameras"):
                    client.open_stream(adapter="cam", head="night")
                stream.send(png())
                stream.send(png())
                stream.end()
                codes = [None if each.error is None else each.error.code for each in stream]
            assert sorted(map(str, codes)) == ["None", "rate_limited"], "each frame is a request"
            with pytest.raises(RateLimited, match="quota of 4 requests per minute; try again in 15 s"):
                client.generate("say:x")
        refused = post(CHAT)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "15")
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limited")
        assert api.call("GET", "/v1/models")[0] == api._replace(token=ADMIN).chat("say:x")[0] == 200
        now += 15
        assert post(CHAT).status_code == 200


def test_a_peer_that_guesses_tokens_has_to_wait() -> None:
    now = 1000.0
    rate_limit = AuthRateLimit(clock=lambda: now)
    access = Access(TOKENS, rate_limit=rate_limit)

    def check(
        secret: str | None, peer: str | None, error: type[VLoraError] | None, match: str = "", n: int = 1
    ) -> None:
        for _ in range(n):
            with contextlib.nullcontext() if error is None else pytest.raises(error, match=match or None):
                access.check(secret, peer=peer)

    check("x" * 20, "10.0.0.1", Unauthorized, "not valid on this server", n=20)
    for secret in ("x" * 20, USER, None):
        check(secret, "10.0.0.1", OverCapacity, r"too many wrong tokens from 10\.0\.0\.1; try again in 3 s")
    check(USER, "10.0.0.2", None)
    check(USER, None, None)
    now += 3.0  # one more attempt is refilled
    for secret, error in ((USER, None), ("x" * 20, Unauthorized), (USER, OverCapacity)):
        check(secret, "10.0.0.1", error)
    for secret in (None, EXPIRED):  # no guesses
        check(secret, "10.0.0.3", Unauthorized, n=30)
    # An IPv6 network is one peer, and the number of remembered peers is bounded.
    for number in range(20):
        rate_limit.record_failure(f"2001:db8::{number}")
    check(USER, "2001:db8::ffff", OverCapacity)
    check(USER, "2001:db8:0:1::1", None)
    for number in range(5000):
        rate_limit.record_failure(f"peer {number}")
    check(USER, "2001:db8::ffff", None)
    assert len(rate_limit) == MAX_PEERS == 4096
