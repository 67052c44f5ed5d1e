"""Sends events to sinks (webhooks, MQTT brokers, files), at least once each, from one queue on disk."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import hmac
import os
import random
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from apps.video_analytics.plan.schema import CameraPlan
from apps.video_analytics.sink_plan import EventResult, Jsonl, Mqtt, SinkPlan, Webhook
from vlora.errors import BadConfig
from vlora.run_folder import append, lock_folder

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0  # before an event is sent again
_REFUSALS = 3  # of an event, before it is given up
_FLUSH_S = 10.0  # at the end
_QUEUE = "queue.sqlite"
_SEND_S = 10.0  # for one message
CONNECT_S = 5.0
_REFUSING = (400, 413, 415, 422)  # statuses that concern the body; others may pass
_ENCODED = "whsec_"


class Message(NamedTuple):
    """An event for one sink. number: its place in the queue. topic: CAMERA/EVENT."""

    number: int
    id: str
    topic: str
    body: bytes


class Unsent(Exception):
    """A message was not acknowledged, and is to be sent again. Its text contains no secret and no URL."""


class Refused(Unsent):
    """The receiver does not accept this message."""


class _WebhookSender:
    """POST requests with the headers of Standard Webhooks (standardwebhooks.com)."""

    def __init__(self, name: str, plan: Webhook) -> None:
        import httpx

        self._plan = plan
        try:
            self._target = plan.target(plan.url if plan.url_from is None else plan.url_from.read(name))
            secret = "" if plan.secret is None else plan.secret.read(name)
            encoded = secret.startswith(_ENCODED)
            self._key = base64.b64decode(secret.removeprefix(_ENCODED)) if encoded else secret.encode()
        except ValueError as error:
            raise BadConfig(f"sink {name}: {error}") from error
        self._runner = asyncio.Runner()
        limits = httpx.Limits(max_keepalive_connections=0)
        # A proxy from the environment would connect to an unchecked address.
        self._client = httpx.AsyncClient(trust_env=False, timeout=_SEND_S, limits=limits)

    def send(self, message: Message) -> None:
        host, status = self._target.host, self._runner.run(self._post(message))
        if not 200 <= status < 300:
            note = "; redirects are not followed" if status < 400 else ""
            raise (Refused if status in _REFUSING else Unsent)(f"{host!r} answers with status {status}{note}")

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    async def _post(self, message: Message) -> int:
        """The response's status."""
        import httpx

        from vlora.public_hosts import addresses_of, is_public, request_to

        host, stamp = self._target.host, str(int(time.time()))
        headers = {"Content-Type": self._plan.content_type, "User-Agent": "vlora"}
        headers |= {"webhook-id": message.id, "webhook-timestamp": stamp}
        if self._key:
            signed = hmac.digest(self._key, f"{message.id}.{stamp}.".encode() + message.body, hashlib.sha256)
            headers["webhook-signature"] = f"v1,{base64.b64encode(signed).decode()}"
        try:
            async with asyncio.timeout(_SEND_S):
                addresses = await addresses_of(self._target)
                if not self._plan.allow_private and not all(map(is_public, addresses)):
                    raise Unsent(f"{host!r} is not a public address; set `allow_private: true` to send there")
                to = request_to(random.choice(addresses), self._target, headers)
                async with self._client.stream("POST", content=message.body, **to) as response:
                    return response.status_code
        except TimeoutError as error:
            raise Unsent(f"{host!r} does not answer within {_SEND_S:g} s") from error
        except (OSError, UnicodeError) as error:
            raise Unsent(f"cannot resolve host {host!r}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unsent(f"cannot send to {host!r}: {type(error).__name__}") from error


class _MqttSender:
    """QoS 1 messages. TOPIC/status is `online`, or `offline` by the last will; both retained."""

    def __init__(self, name: str, plan: Mqtt, events: Collection[tuple[str, str]], is_json: bool) -> None:
        from paho.mqtt import client as paho

        self._plan = plan
        self._status = f"{plan.topic}/status"
        self._retained = [(self._status, b"online")]
        if plan.discovery is not None:
            self._retained += [_discovery(plan, *event, is_json) for event in sorted(events)]
        port = plan.port or (8883 if plan.tls else 1883)
        self._problem = f"no connection to {plan.host}:{port}"
        self._connected = threading.Event()
        self._client = client = paho.Client(paho.CallbackAPIVersion.VERSION2, f"vlora-{secrets.token_hex(8)}")
        if plan.user is not None:
            client.username_pw_set(plan.user.read(name), None if plan.password is None else plan.password.read(name))
        if plan.tls:
            try:
                client.tls_set(None if plan.ca is None else str(plan.ca))
            except OSError as error:  # of a file that is missing or contains no certificate
                raise BadConfig(f"sink {name}: cannot read certificates from {str(plan.ca)!r}: {error}") from error
        client.will_set(self._status, b"offline", qos=1, retain=True)
        client.on_connect = self._on_connect
        client.on_disconnect = lambda *_: self._connected.clear()
        client.reconnect_delay_set(1, 60)
        client.connect_async(plan.host, port, keepalive=30)
        client.loop_start()

    def send(self, message: Message) -> None:
        topic = f"{self._plan.topic}/{message.topic}"
        if not (self._connected.wait(CONNECT_S) and self._publish(topic, message.body, _SEND_S)):
            raise Unsent(self._problem)

    def close(self) -> None:
        if self._connected.is_set():
            self._publish(self._status, b"offline", 1, retain=True)
        self._client.disconnect()
        self._client.loop_stop()

    def _publish(self, topic: str, body: bytes, seconds: float, *, retain: bool = False) -> bool:
        """Whether the broker acknowledges a message in time. After a lost connection the client sends it again."""
        info = self._client.publish(topic, body, 1, retain)
        with contextlib.suppress(RuntimeError, ValueError):  # there was no connection
            info.wait_for_publish(seconds)
            return info.is_published()
        return False

    def _on_connect(self, client: Any, _: object, __: object, reason: Any, ___: object) -> None:
        if reason.is_failure:
            self._problem = f"{self._plan.host} refuses the connection: {reason}"
            return
        for topic, body in self._retained:
            client.publish(topic, body, qos=1, retain=True)
        self._problem = f"no acknowledgement from {self._plan.host}"
        self._connected.set()


def _discovery(plan: Mqtt, camera: str, event: str, is_json: bool) -> tuple[str, bytes]:
    """Topic and body of Home Assistant's discovery message for an event entity. is_json: the event's body is."""
    topic = f"{plan.topic}/{camera}/{event}"
    unique = topic.replace("/", "_")
    content = f"dict(value_json, event_type='{event}')" if is_json else f"{{'event_type': '{event}'}}"
    device = {"identifiers": [f"{plan.topic}/{camera}"], "name": camera, "manufacturer": "V-LoRA"}
    message = {"name": event, "unique_id": unique, "device": device, "origin": {"name": "vlora"}}
    message |= {"state_topic": topic, "availability_topic": f"{plan.topic}/status", "event_types": [event]}
    message |= {"value_template": f"{{{{ {content} | tojson }}}}"}
    return f"{plan.discovery}/event/{unique}/config", msgspec.json.encode(message)


class _JsonlSender:
    def __init__(self, plan: Jsonl, folder: Path) -> None:
        self._most_bytes = plan.max_mib * 2**20
        self._paths = [folder / f"{plan.file}{(number and f'.{number}') or ''}" for number in range(plan.keep + 1)]

    def send(self, message: Message) -> None:
        path, line = self._paths[0], message.body + b"\n"
        try:
            size = path.stat().st_size if path.exists() else 0
            if size and size + len(line) > self._most_bytes:
                for old, new in reversed([*zip(self._paths, self._paths[1:], strict=False)]):
                    if old.exists():
                        os.replace(old, new)
            append(path, line)
        except OSError as error:
            raise Unsent(f"cannot write {str(path)!r}: {error.strerror}") from error

    def close(self) -> None:
        pass


Sender = _WebhookSender | _MqttSender | _JsonlSender
"""`send` sends a message, and returns when it is acknowledged; it raises Unsent. Used from one thread."""


class SinkStatus(msgspec.Struct, kw_only=True):
    """Numbers since the start, of the queue for `waiting`. problem: why the oldest event is not sent yet."""

    name: str
    waiting: int = 0
    sent: int = 0
    dropped: int = 0
    refused: int = 0
    problem: str | None = None


class EventQueue:
    """Messages of all sinks, in order, in an SQLite file. Used from several threads.

    A message is on disk when `add` returns, and stays until `remove`. Methods raise sqlite3.Error; the first BadConfig.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.executescript(
                "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"  # also after a loss of power
                "CREATE TABLE IF NOT EXISTS messages (number INTEGER PRIMARY KEY AUTOINCREMENT, sink TEXT NOT NULL, "
                "id TEXT NOT NULL, topic TEXT NOT NULL, body BLOB NOT NULL, size INTEGER NOT NULL);"
                "CREATE INDEX IF NOT EXISTS sizes ON messages (sink, number, size)"
            )
        except sqlite3.Error as error:
            raise BadConfig(f"cannot use the queue {str(path)!r}: {error}; move the file away") from error

    def add(self, sink: str, event_id: str, topic: str, body: bytes, most_bytes: float) -> int:
        """Add a message. Returns how many of the sink's oldest were dropped for the bound."""
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            sizes = "SELECT number, size FROM messages WHERE sink = ? ORDER BY number"
            old = self._db.execute(sizes, (sink,)).fetchall()
            excess, dropped = sum(size for _, size in old) + len(body) - most_bytes, 0
            for number, size in old:
                if excess <= 0:
                    break
                self._db.execute("DELETE FROM messages WHERE number = ?", (number,))
                excess, dropped = excess - size, dropped + 1
            self._db.execute(
                "INSERT INTO messages (sink, id, topic, body, size) VALUES (?, ?, ?, ?, ?)",
                (sink, event_id, topic, body, len(body)),
            )
        return dropped

    def first(self, sink: str) -> Message | None:
        oldest = "SELECT number, id, topic, body FROM messages WHERE sink = ? ORDER BY number LIMIT 1"
        with self._lock:
            row = self._db.execute(oldest, (sink,)).fetchone()
        return None if row is None else Message(*row)

    def remove(self, message: Message) -> None:
        with self._lock:
            self._db.execute("DELETE FROM messages WHERE number = ?", (message.number,))

    def waiting(self) -> dict[str, int]:
        """The number of messages by sink."""
        with self._lock:
            return dict(self._db.execute("SELECT sink, count(*) FROM messages GROUP BY sink").fetchall())

    def close(self) -> None:
        with self._lock:
            self._db.close()


@dataclasses.dataclass
class _Sink:
    """events: those that it is sent, as pairs of camera and event."""

    plan: SinkPlan
    events: frozenset[tuple[str, str]]
    sender: Sender
    status: SinkStatus
    refusals: int = 0  # of the oldest message


class Sinks:
    """Sends events, for each sink in a thread and in order. Made by `open_sinks`."""

    def __init__(self, queue: EventQueue, sinks: Sequence[_Sink], say: Callable[[str], None]) -> None:
        self._queue, self._sinks, self._say = queue, sinks, say
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._deliver, args=(sink,), daemon=True) for sink in sinks]
        for thread in self._threads:
            thread.start()

    def send(self, event: EventResult) -> None:
        """Queue an event for its sinks: it is on disk afterwards. An error is reported, and counts as dropped."""
        for sink in self._sinks:
            if (event.source, event.event) in sink.events:
                self._add(sink, event)
        with self._changed:
            self._changed.notify_all()

    def status(self) -> list[SinkStatus]:
        waiting = self._queue.waiting()
        return [msgspec.structs.replace(sink.status, waiting=waiting.get(sink.status.name, 0)) for sink in self._sinks]

    def close(self) -> None:
        """Send what can be sent at once, and report what waits for the next start."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        end = time.monotonic() + _FLUSH_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        for each in self.status():
            left = {"wait for the next start": each.waiting, "dropped": each.dropped, "refused": each.refused}
            counts = "".join(f", {count} {what}" for what, count in left.items() if count)
            self._say(f"sink {each.name}: {each.sent} sent{counts}")
        self._queue.close()

    def _add(self, sink: _Sink, event: EventResult) -> None:
        status, most, why = sink.status, sink.plan.queue_mib, "it is full"
        try:
            body = sink.plan.body(event)
        except ValueError as error:
            self._say(f"sink {status.name}: {error}; event {event.id} is sent without the template")
            body = msgspec.json.encode(event)
        try:
            dropped = self._queue.add(status.name, event.id, f"{event.source}/{event.event}", body, most * 2**20)
        except sqlite3.Error as error:
            dropped, why = 1, str(error)
        status.dropped += dropped
        if status.dropped.bit_length() > (status.dropped - dropped).bit_length():  # at 1, 2, 4 and so on
            self._say(f"sink {status.name}: {status.dropped} events were dropped from the queue: {why}")

    def _deliver(self, sink: _Sink) -> None:
        """Send a sink's messages until the queue is closed."""
        pause_s, status = FIRST_PAUSE_S, sink.status
        with contextlib.closing(sink.sender):
            while (problem := self._send_next(sink)) is None or not self._closing.is_set():
                before, status.problem = status.problem, problem
                if problem is None:
                    pause_s = FIRST_PAUSE_S
                    if before is not None:
                        self._say(f"sink {status.name}: sends again")
                    continue
                if problem != before:
                    self._say(f"sink {status.name}: {problem}; retrying")
                self._closing.wait(pause_s * random.uniform(0.5, 1))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _send_next(self, sink: _Sink) -> str | None:
        """Wait for a message, and send the oldest one. Returns why it is to be sent again; "" if none will come."""
        try:
            with self._changed:
                while (message := self._queue.first(sink.status.name)) is None:
                    if self._closing.is_set():
                        return ""
                    self._changed.wait()
            try:
                sink.sender.send(message)
                sink.status.sent += 1
            except Refused as error:
                sink.refusals += 1
                if sink.refusals < _REFUSALS:
                    raise
                sink.status.refused += 1
                self._say(f"sink {sink.status.name}: {error}; event {message.id} is not sent again")
            self._queue.remove(message)
            sink.refusals = 0
            return None
        except (Unsent, sqlite3.Error) as error:
            return str(error)
        except Exception as error:  # its text might contain a secret
            return f"internal error ({type(error).__name__})"


@contextlib.contextmanager
def open_sinks(
    out: Path | None, cameras: Sequence[CameraPlan], shared: Sequence[SinkPlan], say: Callable[[str], None]
) -> Iterator[Sinks]:
    """Start the sinks of cameras: their own, and the shared ones. At the end of the block, what could not be sent stays
    for the next start. Queue and files are in OUT/sinks; say: called with problems, from several threads.

    Raises BadConfig if that folder is missing, in use or cannot be written, or a secret is missing.
    """
    found = [(each.name, each, cameras) for each in shared]
    found += [(f"{camera.name}.{each.name}", each, [camera]) for camera in cameras for each in camera.sinks]
    if not found:
        yield Sinks(EventQueue(Path(":memory:")), [], say)
        return
    if out is None:
        raise BadConfig("sinks need a folder for events that wait; set `out` in the plan, or give --out")
    with contextlib.ExitStack() as scope:
        scope.enter_context(lock_folder(folder := out / "sinks"))
        queue = EventQueue(folder / _QUEUE)
        sinks: list[_Sink] = []
        with contextlib.ExitStack() as unstarted:
            for name, plan, its in found:
                pairs = [(camera.name, event.name) for camera in its for event in camera.events]
                events = frozenset(pair for pair in pairs if not plan.events or pair[1] in plan.events)
                if plan.webhook is not None:
                    sender: Sender = _WebhookSender(name, plan.webhook)
                elif plan.mqtt is not None:
                    sender = _MqttSender(name, plan.mqtt, events, plan.template is None)
                else:
                    assert plan.jsonl is not None, "a sink is of one kind"
                    sender = _JsonlSender(plan.jsonl, folder)
                unstarted.callback(sender.close)
                sinks.append(_Sink(plan, events, sender, SinkStatus(name=name)))
            unstarted.pop_all()
        running = Sinks(queue, sinks, say)
        scope.callback(running.close)
        yield running
