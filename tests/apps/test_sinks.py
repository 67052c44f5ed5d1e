"""Sinks of events: delivery over killed senders and receivers, plans that are refused, and secrets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import hashlib
import hmac
import http.server
import json
import os
import re
import signal
import socket
import socketserver
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from apps.video_analytics import sinks as sinks_module
from apps.video_analytics.plan.plan_file import read_plan
from apps.video_analytics.plan.schema import CameraPlan
from apps.video_analytics.sink_plan import EventResult, SinkPlan
from apps.video_analytics.sinks import EventQueue, Sinks, open_sinks
from tests.processes import in_child, until
from vlora.errors import BadConfig, BadPlan

SECRET = "hunter2-of-the-test"
AT = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
WHEN = {"head": "cam/one", "label": "bright"}
EVENTS = [{"name": "jam", "when": WHEN}, {"name": "full", "when": WHEN}]
CAMERA = CameraPlan.model_validate({"name": "gate", "source": "0", "tasks": [{"head": "cam/one"}], "events": EVENTS})
HAPPENED = EventResult(
    id="", source="gate", event="jam", start_s=1.5, time=AT, head="cam/one", label='a "b"', confidence=0.9
)


def event(number: int, **fields: Any) -> EventResult:
    return msgspec.structs.replace(HAPPENED, id=f"id{number}", **fields)


def webhook(port: int, **fields: Any) -> SinkPlan:
    kind = {"url": f"http://127.0.0.1:{port}/hook?key={SECRET}", "secret": {"env": "HOOK"}, "allow_private": True}
    own = {key: fields.pop(key) for key in tuple(fields) if key in ("url", "allow_private", "secret")}
    return SinkPlan.model_validate({"name": "hook", "webhook": kind | own} | fields)


@contextlib.contextmanager
def opened(folder: Path, *plans: SinkPlan, said: list[str] | None = None) -> Iterator[Sinks]:
    with open_sinks(folder, [CAMERA], plans, ([] if said is None else said).append) as running:
        yield running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", SECRET)
    monkeypatch.setattr(sinks_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(sinks_module, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(sinks_module, "CONNECT_S", 0.5)


class Receiver(http.server.ThreadingHTTPServer):
    """A webhook's receiver. status: of the answer to a request. ids, got: of the events that it accepted."""

    daemon_threads = True

    def __init__(self, port: int = 0, status: Callable[[], int] = lambda: 204) -> None:
        self.ids: list[str] = []
        self.got: list[tuple[Any, bytes]] = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body, code = self.rfile.read(int(self.headers["Content-Length"])), status()
                if code < 300:
                    receiver.ids.append(self.headers["webhook-id"])
                    receiver.got.append((self.headers, body))
                self.send_response(code)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", port), Handler)
        self.port = int(self.server_address[1])
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


# -- delivery ---------------------------------------------------------------------------------------------------------


def test_a_receiver_that_is_restarted_gets_every_event(tmp_path: Path) -> None:
    """In order, signed, once per id; after errors too."""
    said: list[str] = []
    with Receiver() as first:
        port = first.port
        with opened(tmp_path, webhook(port), said=said) as running:
            for number in range(3):
                running.send(event(number))
            until(lambda: len(first.got) == 3)
            first.__exit__()
            for number in range(3, 6):
                running.send(event(number))
            until(lambda: running.status()[0].problem is not None)
            assert (running.status()[0].waiting, running.status()[0].sent) == (3, 3)
            answers = iter([503, 302, *[204] * 9])
            with Receiver(port, lambda: next(answers)) as second:
                until(lambda: len(second.got) == 3)
                until(lambda: running.status()[0].waiting == 0)
    assert first.ids + second.ids == [f"id{number}" for number in range(6)]
    assert said == [
        "sink hook: cannot send to '127.0.0.1': ConnectError; retrying",
        "sink hook: '127.0.0.1' answers with status 503; retrying",
        "sink hook: '127.0.0.1' answers with status 302; redirects are not followed; retrying",
        "sink hook: sends again",
        "sink hook: 6 sent",
    ]
    headers, body = second.got[0]
    assert json.loads(body)["label"] == 'a "b"' and json.loads(body)["time"] == "2026-01-02T00:00:00Z"
    stamp = headers["webhook-timestamp"]
    signed = hmac.new(SECRET.encode(), f"id3.{stamp}.".encode() + body, hashlib.sha256).digest()
    assert headers["webhook-signature"] == "v1," + base64.b64encode(signed).decode()
    assert abs(int(stamp) - time.time()) < 60 and headers["content-type"] == "application/json"


def test_a_killed_sender_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed with events in the queue, and between an acknowledgement and its record, which is sent again."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = int(unused.getsockname()[1])

    def queue_and_die(numbers: range, dies_at_removal: bool) -> None:
        die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        if dies_at_removal:
            monkeypatch.setattr(EventQueue, "remove", die)
        with opened(tmp_path, webhook(port)) as running:
            for number in numbers:
                running.send(event(number))
            time.sleep(20 if dies_at_removal else 0)
            die()

    assert in_child(queue_and_die, range(3), False) == signal.SIGKILL
    with Receiver(port) as receiver:
        assert in_child(queue_and_die, range(3, 5), True) == signal.SIGKILL
        assert receiver.ids == ["id0"]
        with opened(tmp_path, webhook(port)):
            until(lambda: len(receiver.got) >= 6)
    assert receiver.ids == ["id0", "id0", "id1", "id2", "id3", "id4"]


def test_a_full_queue_drops_the_oldest_and_a_refused_event_does_not_block(tmp_path: Path) -> None:
    said: list[str] = []
    away = webhook(1, name="away", queue_mib=2 * len(msgspec.json.encode(event(0))) / 2**20)
    tries = iter(range(100))
    receiver = Receiver(status=lambda: 400 if next(tries) < 6 else 204)
    with receiver, opened(tmp_path, webhook(receiver.port), away, said=said) as running:
        for number in range(5):
            running.send(event(number))
        until(lambda: running.status()[0].waiting == 0)
        hook, lost = running.status()
        assert (hook.refused, hook.sent, receiver.ids) == (2, 3, ["id2", "id3", "id4"])
        assert (lost.waiting, lost.dropped) == (2, 3) and lost.problem is not None
    assert "sink away: 1 events were dropped from the queue: it is full" in said
    assert "sink away: 0 sent, 2 wait for the next start, 3 dropped" in said
    assert "sink hook: '127.0.0.1' answers with status 400; event id1 is not sent again" in said
    with opened(tmp_path, away) as running, pytest.raises(BadConfig, match="is in use by process"):
        assert running.status()[0].waiting == 2
        with opened(tmp_path, away):
            pass


def test_webhooks_connect_to_public_addresses_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that a name has when the event is sent counts, and all of several."""
    answers = {"inside.example": ["10.0.0.1"], "both.example": ["8.8.8.8", "127.0.0.1"], "none.example": []}

    async def getaddrinfo(_: Any, host: str, port: int, **__: Any) -> list[Any]:
        if not answers[host]:
            raise socket.gaierror("no such host")
        return [(0, 0, 0, "", (address, port)) for address in answers[host]]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    plans = [webhook(1, name=host[:4], url=f"https://{host}/{SECRET}", allow_private=False) for host in answers]
    with opened(tmp_path, *plans) as running:
        running.send(event(0))
        until(lambda: all(each.problem for each in running.status()))
        assert [each.problem for each in running.status()] == [
            "'inside.example' is not a public address; set `allow_private: true` to send there",
            "'both.example' is not a public address; set `allow_private: true` to send there",
            "cannot resolve host 'none.example'",
        ]


def test_lines_are_rotated_and_made_by_a_template(tmp_path: Path) -> None:
    made = '{"id": {{ event.id | tojson }},\n"what": {{ (event.source ~ ": " ~ event.label) | tojson }}}'
    falls = "{{ event.id | tojson }}{% if event.confidence > 2 %}{{ event.label / 0 }}{% endif %}"
    small: dict[str, Any] = {
        "name": "small",
        "jsonl": {"file": "all.jsonl", "max_mib": 3e-4, "keep": 2},
        "events": ["full"],
    }
    plans = [{"name": "a", "jsonl": {"file": "a.jsonl"}, "template": made}, small]
    plans += [{"name": "b", "jsonl": {"file": "b.jsonl"}, "template": falls}]
    said: list[str] = []
    with opened(tmp_path, *map(SinkPlan.model_validate, plans), said=said) as running:
        for number in range(7):
            running.send(event(number, event="full", confidence=3.0 if number == 6 else 0.9))
        running.send(event(7))
        running.send(event(8, source="other"))
    folder = tmp_path / "sinks"
    rows = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    assert rows == [{"id": f"id{number}", "what": 'gate: a "b"'} for number in range(8)]
    kept = "".join((folder / name).read_text() for name in ("all.jsonl.2", "all.jsonl.1", "all.jsonl"))
    assert [json.loads(line)["id"] for line in kept.splitlines()] == ["id4", "id5", "id6"]
    assert not (folder / "all.jsonl.3").exists()
    *fine, fallen, last = (folder / "b.jsonl").read_text().splitlines()
    assert json.loads(fallen)["id"] == "id6" and fine[0] == '"id0"' and last == '"id7"', "without the template"
    assert "event id6 is sent without the template" in "\n".join(said)


# -- MQTT -------------------------------------------------------------------------------------------------------------


class Broker(socketserver.ThreadingTCPServer):
    """The part of MQTT 3.1.1 that senders use, with TLS.

    connects: the packets of connections, which have the will and the password. got: topic, body, and whether retained.
    loses: published messages that end their connection without an acknowledgement. code: 5 refuses connections.
    """

    daemon_threads = True

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.connects: list[bytes] = []
        self.got: list[tuple[str, bytes, bool]] = []
        self.loses = self.code = 0
        self._context, self.port = context, int(self.server_address[1])
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        with contextlib.suppress(OSError), self._context.wrap_socket(request, server_side=True) as link:
            stream = link.makefile("rb")
            while head := stream.read(1):
                size, shift = 0, 0
                while (byte := stream.read(1)[0]) & 128:
                    size, shift = size | (byte & 127) << shift, shift + 7
                packet = stream.read(size | byte << shift)
                if head[0] >> 4 == 1:
                    self.connects.append(packet)
                    link.sendall(bytes((0x20, 2, 0, self.code)))
                elif head[0] >> 4 == 3:
                    end, retained = 2 + struct.unpack(">H", packet[:2])[0], bool(head[0] & 1)
                    if not retained and self.loses > 0:
                        self.loses -= 1
                        return
                    self.got.append((packet[2:end].decode(), packet[end + 2 :], retained))
                    link.sendall(b"\x40\x02" + packet[end : end + 2])

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    (tmp_path / "password").write_text(f"{SECRET}\n")
    with Broker(context) as running:
        yield running


def mqtt(port: int, folder: Path, **fields: Any) -> SinkPlan:
    kind = {"host": "127.0.0.1", "port": port, "tls": True, "ca": str(folder / "ca.pem"), "discovery": "homeassistant"}
    kind |= {"user": {"env": "HOOK"}, "password": {"file": str(folder / "password")}}
    return SinkPlan.model_validate({"name": "home", "mqtt": kind} | fields)


def test_events_reach_a_broker_with_its_availability_and_discovery(broker: Broker, tmp_path: Path) -> None:
    broker.loses = 1
    with opened(tmp_path, mqtt(broker.port, tmp_path)) as running:
        for number in range(3):
            running.send(event(number))
        until(lambda: running.status()[0].waiting == 0)
    sent = [json.loads(body)["id"] for topic, body, _ in broker.got if topic == "vlora/gate/jam"]
    assert list(dict.fromkeys(sent)) == ["id0", "id1", "id2"], "also after the lost acknowledgement"
    assert len(broker.connects) == 2
    for part in (b"vlora/status", b"offline", SECRET.encode()):
        assert part in broker.connects[0]
    retained = {topic: body for topic, body, kept in broker.got if kept}
    assert broker.got[0] == ("vlora/status", b"online", True) and retained.pop("vlora/status") == b"offline"
    assert set(retained) == {f"homeassistant/event/vlora_gate_{name}/config" for name in ("jam", "full")}
    found = json.loads(retained["homeassistant/event/vlora_gate_jam/config"])
    assert (found["state_topic"], found["event_types"]) == ("vlora/gate/jam", ["jam"])
    assert found["value_template"] == "{{ dict(value_json, event_type='jam') | tojson }}"
    assert found["availability_topic"] == "vlora/status" and found["device"]["name"] == "gate"


# -- plans and secrets ------------------------------------------------------------------------------------------------

PLAN = """
cameras:
  - name: gate
    source: 0
    tasks: [{head: cam/one}]
    events: [{name: jam, when: {head: cam/one, label: bright}}]
sinks:
  - name: a
    """
HOOK = PLAN + "webhook: {url: 'https://a.example/x'}\n    "
WRONG = [
    (PLAN + "events: [jam]", "`sinks[0]`: needs exactly one of `webhook`, `mqtt` and `jsonl`"),
    (HOOK + "jsonl: {file: a.jsonl}", "`sinks[0]`: needs exactly one of `webhook`, `mqtt` and `jsonl`"),
    (HOOK + "events: [jan]", "line 9, field `sinks[0].events[0]`: no event is named 'jan'; there are: jam"),
    (
        HOOK + "queue_mib: 1\n  - name: a\n    jsonl: {file: a.jsonl}",
        "`sinks[1].name`: two sinks are named 'a'; names",
    ),
    (
        PLAN + "webhook: {url: 'http://169.254.169.254/x'}",
        "'169.254.169.254' is not a public address; set `",
    ),
    (PLAN + f"webhook: {{url: 'https://me:{SECRET}@a.example'}}", "a URL must not contain a user name or password"),
    (
        PLAN + f"webhook: {{url: 'https://a.example', secret: {SECRET}}}",
        "must be {env: NAME} or {file: PATH}; a",
    ),
    (
        PLAN + f"webhook: {{url: 'https://a.example', secret: {{env: {SECRET}}}}}",
        "must be {env: NAME} or {file: PATH}; a",
    ),
    (PLAN + "mqtt: {host: a, ca: x.pem}", "`sinks[0].mqtt`: `ca` is for TLS; add `tls: true`, or remove `ca`"),
    (PLAN + "mqtt: {host: a, password: {env: X}}", "`sinks[0].mqtt`: `password` needs a `user`"),
    (PLAN + "jsonl: {file: ../a.jsonl}", "`sinks[0].jsonl.file`: is '../a.jsonl'; it must match the pattern"),
    (HOOK + "template: '{{ event.labl }}'", "`template` fails: 'dict object' has no attribute 'labl'"),
    (
        HOOK + "template: '\"{{ event.label }}\"'",
        "makes no JSON (JSON is malformed: trailing characters (byte 3)",
    ),
    (
        HOOK + "template: '{{ ().__class__.__mro__ }}'",
        "`template` fails: access to attribute '__class__' of 'tup",
    ),
    (HOOK + "template: '{{ \"x\" * 999999 }}'", "`template` fails: it makes more than 262144 characters"),
]


def test_plans_are_refused_with_what_is_wrong(tmp_path: Path) -> None:
    for text, error in WRONG:
        (path := tmp_path / "plan.yaml").write_text(text.strip() + "\n")
        with pytest.raises(BadPlan) as raised:
            read_plan(path)
        assert error in str(raised.value) and "\n" not in str(raised.value), (error, str(raised.value))
        assert SECRET not in str(raised.value)


def test_a_missing_package_and_a_missing_secret_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "binary").write_bytes(b"\xff")
    for kind, error in (
        ({"env": "NOT_SET"}, "environment variable NOT_SET: it is empty or not set"),
        ({"file": str(tmp_path / "none")}, f"'{tmp_path}/none': No such file or directory"),
        ({"file": str(tmp_path / "binary")}, f"'{tmp_path}/binary': it is not UTF-8 text"),
    ):
        refused = pytest.raises(BadConfig, match=re.escape(f"sink hook: cannot read {error}"))
        with refused, opened(tmp_path, webhook(1, secret=kind)):
            pass
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package paho-mqtt; pip install 'vlora\[events\]'"):
        mqtt(1, tmp_path)


def test_secrets_are_in_no_message_and_no_file(
    broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    broker.code = 5
    said: list[str] = []
    with (
        Receiver(status=lambda: 500) as receiver,
        opened(tmp_path, webhook(receiver.port), mqtt(broker.port, tmp_path), said=said) as running,
    ):
        running.send(event(0))
        until(lambda: all(each.problem for each in running.status()))
        shown = [*said, str(running.status()), caplog.text]
        assert running.status()[1].problem == "127.0.0.1 refuses the connection: Not authorized"
    files = [path.read_bytes() for path in (tmp_path / "sinks").iterdir()]
    assert files and all(SECRET.encode() not in content for content in files)
    assert all(SECRET not in text for text in (*shown, *said, caplog.text))
