"""Events, and the sinks of a plan or a camera that they are sent to."""

from __future__ import annotations

import datetime
import functools
import importlib.util
import ipaddress
import os
import re
from typing import TYPE_CHECKING

import msgspec
from pydantic import Field, model_validator

from vlora.client import Answer
from vlora.errors import BadConfig, BadRequest
from vlora.plan_files.fields import Number, PlanModel, PlanPath, Whole

if TYPE_CHECKING:
    import httpx
    import jinja2

NAME = r"^[A-Za-z0-9_-]+$"  # also used in file names and topics
_TOPIC = r"^[\w-]+(/[\w-]+)*$"
_MOST_CHARACTERS = 2**18  # of a body made by a template
_NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


class EventResult(msgspec.Struct, frozen=True, kw_only=True):
    """An event, with the answer to its question. As JSON, what sinks send without a template.

    id: unique; an event that is sent again keeps it. start_s: of the frame, from the beginning of the source. time:
    when a camera took the frame, or a file's was answered; UTC. label, confidence, count, track: of the answer or the
    object that made it happen. picture, snapshot, clip: the frame, the frame with boxes, and the time around it, which
    is complete later; files relative to the results' folder. verified: None without a verification, and if it was not
    answered. text: None without a question, and after an error, which is then `problem`. latency_s: from the event to
    the answer.
    """

    id: str
    source: str
    event: str
    start_s: float
    time: datetime.datetime
    head: str
    label: str
    confidence: float
    count: int | None = None
    track: int | None = None
    picture: str | None = None
    snapshot: str | None = None
    clip: str | None = None
    verified: bool | None = None
    adapter: str | None = None
    question: str = ""
    text: Answer | None = None
    problem: str | None = None
    latency_s: float = 0.0


class Secret(PlanModel):
    """A secret outside the plan: an environment variable, or a file, without the newline at its end."""

    env: str | None = None
    file: PlanPath | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_place(cls, value: object) -> object:
        """Without the value, which may be a secret."""
        name = value.get("env", "_") if isinstance(value, dict) and len(value) == 1 else None
        if not isinstance(name, str) or re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
            raise ValueError("must be {env: NAME} or {file: PATH}; a plan contains no secrets")
        return value

    def read(self, sink: str) -> str:
        """The secret. Raises BadConfig with the sink's name."""
        place = f"environment variable {self.env}" if self.file is None else repr(str(self.file))
        try:
            if found := os.environ.get(self.env or "") if self.file is None else self.file.read_text().rstrip("\r\n"):
                return found
            why = "it is empty or not set"
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", "it is not UTF-8 text")
        raise BadConfig(f"sink {sink}: cannot read {place}: {why}")


class Webhook(PlanModel):
    """An HTTP receiver. url_from: a URL that is secret. secret: of signatures. allow_private: not only public hosts."""

    url: str | None = None
    url_from: Secret | None = None
    secret: Secret | None = None
    content_type: str = Field("application/json", pattern=r"^[\x21-\x7e][\x20-\x7e]*$")
    allow_private: bool = False

    @model_validator(mode="after")
    def _one_url(self) -> Webhook:
        _require("httpx")
        if (self.url is None) == (self.url_from is None):
            raise ValueError("needs exactly one of `url` and `url_from`")
        if self.url is not None:
            self.target(self.url)
        return self

    def target(self, url: str | None) -> httpx.URL:
        """The parsed URL. Raises ValueError, without the URL, if it is invalid or a private address."""
        from vlora.public_hosts import is_public, parse_url

        try:
            target = parse_url(url or "", "webhook")
        except BadRequest as error:
            raise ValueError(str(error)) from error
        try:
            public = is_public(str(ipaddress.ip_address(target.host)))
        except ValueError:
            public = True  # a name: its address is checked when it is known
        if not public and not self.allow_private:
            raise ValueError(f"webhook: {target.host!r} is not a public address; set `allow_private: true` to use it")
        return target


class Mqtt(PlanModel):
    """A broker. port: None for 1883, or 8883 with TLS. ca: trusted instead of the system's certificates. topic: prefix
    of all topics. discovery: Home Assistant's prefix; None publishes no discovery messages.
    """

    host: str = Field(min_length=1, pattern=r"^\S+$")
    port: Whole | None = Field(None, ge=1, le=65535)
    tls: bool = False
    ca: PlanPath | None = None
    user: Secret | None = None
    password: Secret | None = None
    topic: str = Field("vlora", max_length=100, pattern=_TOPIC)
    discovery: str | None = Field(None, max_length=100, pattern=_TOPIC)

    @model_validator(mode="after")
    def _fits(self) -> Mqtt:
        _require("paho-mqtt")
        if self.ca is not None and not self.tls:
            raise ValueError("`ca` is for TLS; add `tls: true`, or remove `ca`")
        if self.password is not None and self.user is None:
            raise ValueError("`password` needs a `user`")
        return self


class Jsonl(PlanModel):
    """A file in OUT/sinks. Above `max_mib` it becomes FILE.1, that FILE.2 and so on; `keep` of them are kept."""

    file: str = Field(max_length=100, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*\.jsonl$")
    max_mib: Number = Field(64.0, gt=0)
    keep: Whole = Field(4, ge=1, le=1000)


class SinkPlan(PlanModel):
    """Where events are sent. events: names of those to send; empty for all. template: of the body (Jinja2) with the
    variable `event`; None sends the event as JSON. queue_mib: bound on the bodies that wait; the oldest are dropped.
    """

    name: str = Field(max_length=60, pattern=NAME)
    webhook: Webhook | None = None
    mqtt: Mqtt | None = None
    jsonl: Jsonl | None = None
    events: tuple[str, ...] = ()
    template: str | None = None
    queue_mib: Number = Field(64.0, gt=0)

    @model_validator(mode="after")
    def _complete(self) -> SinkPlan:
        if sum(each is not None for each in (self.webhook, self.mqtt, self.jsonl)) != 1:
            raise ValueError("needs exactly one of `webhook`, `mqtt` and `jsonl`")
        if self.template is not None:
            _require("jinja2")
            for sample in _SAMPLES:
                self.body(sample)
        return self

    def body(self, event: EventResult) -> bytes:
        """What is sent for an event. Raises ValueError if the template fails."""
        if self.template is None:
            return msgspec.json.encode(event)
        try:
            text = _compiled(self.template).render(event=msgspec.to_builtins(event))
            if len(text) > _MOST_CHARACTERS:
                raise ValueError(f"it makes more than {_MOST_CHARACTERS} characters")
        except Exception as error:  # a template may raise any error, such as for 1 / 0
            why, line = " ".join(str(getattr(error, "message", error)).split()), getattr(error, "lineno", None)
            raise ValueError(f"`template` fails{f' in its line {line}' if line else ''}: {why}") from error
        if self.jsonl is None and (self.webhook is None or "json" not in self.webhook.content_type):
            return text.encode()
        try:
            return msgspec.json.encode(msgspec.json.decode(text))  # on one line
        except msgspec.DecodeError as error:
            hint = "write values as {{ event.label | tojson }}"
            raise ValueError(f"`template` makes no JSON ({error}); {hint}") from error


_SAMPLE = EventResult(
    id="0", source="camera", event="event", start_s=1.0, time=_NOON, head="adapter/head", label='"', confidence=0.9
)
_SAMPLES = (_SAMPLE, msgspec.structs.replace(_SAMPLE, track=1, count=2, picture="picture.jpg", problem='"'))


@functools.lru_cache(256)
def _compiled(template: str) -> jinja2.Template:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(template)


def _require(package: str) -> None:
    """Raise ValueError if a package of the extra `events` is missing."""
    if importlib.util.find_spec(package.partition("-")[0]) is None:
        install = "pip install 'vlora[events]', or in a checkout: pip install '.[events]'"
        raise ValueError(f"needs the package {package}; {install}")
