"""What callers are promised, in process and over every wire: answers, errors, heads, adapters, tenants, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import msgspec
import pytest

from tests.cluster.in_process import LocalReplica, connecting
from tests.cluster.running import QUICK, SECRET, asked, check, joined, outputs_of
from tests.processes import PATIENCE_S, until
from tests.server.api import Api, image_part, running_api
from tests.server.running import png, running_server
from tests.server.scripted import ByteProcessor, ScriptedEngine, ScriptedInterface, write_adapter
from tests.server.test_security import ADMIN, TOKENS, USER
from tests.server.wires import WIRES, Http, InProcess, Wire
from vlora.client import AsyncClient, Client
from vlora.cluster import members
from vlora.cluster.cluster import Cluster
from vlora.config import EngineConfig, ServerConfig, Token
from vlora.errors import (
    Aborted,
    BadAdapter,
    BadPlan,
    BadRequest,
    DeadlineMissed,
    Disconnected,
    EngineDead,
    Forbidden,
    UnknownAdapter,
    UnknownReplica,
    VLoraError,
)
from vlora.routing import Router
from vlora.server.frontend import FrontEnd
from vlora.server.http.routes import make_app
from vlora.server.security.access import Access
from vlora.server.security.public_errors import shown_to
from vlora.types import AdapterStatus, ErrorValue, Request, RequestOutput, SamplingParams
from vlora.types.replicas import DOWN, AdapterPlace, ClusterStatus, ReplicaStatus
from vlora.types.visibility import HIDDEN
from vlora.wire.address import Address

PNG = png()
ADAPTERS = {
    "a": {"night": 1},
    "b": {"night": 1},
    "c": {"motion": 1},
    "cam": {"night": 1, "motion": 4},
    "plain": {},
    "levels": {"overloaded": 1},
    "tasks": {"classification": 1, "counting": 1, "multi_label": 1, "regression": 1},
}
LIMITS: dict[str, Any] = {"max_images": 4, "max_prompt_chars": 1000, "max_image_bytes": 50_000}


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with running_api(adapters=ADAPTERS, **LIMITS) as made:
        yield made


@pytest.fixture(scope="module")
def guarded() -> Iterator[Api]:
    """With tokens."""
    with running_api(adapters={"signs": {"night": 1}}, tokens=TOKENS) as made:
        yield made


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest, api: Api) -> Iterator[Wire]:
    yield WIRES[request.param](api)
    assert api.idle() and api.front_end.num_active == 0


@pytest.fixture(params=["rpyc", "asyncio", "http"])
def guarded_wire(request: pytest.FixtureRequest, guarded: Api) -> Callable[[str], Wire]:
    """By token. In process there are no tokens."""
    return lambda token: WIRES[request.param](guarded._replace(token=token))


ANSWERS: dict[str, tuple[str, int, dict[str, Any], tuple[str, str, int, int]]] = {
    "text": ("say:grün", 0, {}, ("grün", "stop", 9, 6)),
    "with images": ("say:fünf Bilder", 2, {}, ("fünf Bilder", "stop", 18, 13)),
    "cut at a limit": ("forever", 0, {"max_tokens": 5}, ("xxxxx", "length", 7, 5)),
    "stopped": ("say:one, END two", 0, {"stop": ("END", "zzz")}, ("one, ", "stop", 16, 8)),
    "stopped by the last token": ("say:abEND", 0, {"stop": "END"}, ("ab", "stop", 9, 5)),
    "not stopped": ("say:abEN", 0, {"stop": ("END",)}, ("abEN", "stop", 8, 5)),
    "of an adapter": ("say:x", 1, {"adapter": "cam"}, ("x", "stop", 6, 2)),
    "to an adapter's only question": ("", 1, {"adapter": "a", "answer": "words"}, ("yes", "stop", 13, 4)),
    "to an adapter's only head": ("", 1, {"adapter": "a"}, ("bright", "stop", 13, 0)),
    "to the question that all parts have": ("", 1, {"adapter": "a+b"}, ("yes", "stop", 13, 4)),
    "seeded": ("say:x", 0, {"temperature": 1.0, "seed": 3, "top_p": 0.5, "priority": -3}, ("x", "stop", 5, 2)),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_the_same_over_each_wire(wire: Wire, name: str, stream: bool) -> None:
    prompt, num_images, fields, (text, reason, num_prompt, num_completion) = ANSWERS[name]
    found = wire.ask(prompt, [PNG] * num_images, stream=stream, **fields)
    by = "words" if num_completion else "head"
    assert found == (text, reason, fields.get("adapter"), (num_prompt, num_completion), by)


@pytest.mark.parametrize(
    ("adapter", "name"),
    [("a+b", "a+b"), ("b + 0.5*a", "0.5*a+b"), ({"b": -0.3, "a": 0.7}, "0.7*a+-0.3*b"), ({"a": 1}, "a")],
)
def test_an_adapter_may_be_a_composition(wire: Wire, adapter: Any, name: str, requested: list[Request]) -> None:
    for stream in (False, True):
        assert wire.ask("say:x", adapter=adapter, stream=stream).text == "x"
    assert [request.adapter for request in requested] == [name] * 2


SAMPLING: dict[str, Any] = {
    **{"max_tokens": 9, "min_tokens": 1, "ignore_eos": True, "stop": ("zzz", "END"), "seed": 7},
    **{"temperature": 0.5, "top_p": 0.4, "top_k": 3, "min_p": 0.25, "logit_bias": ((7, -5.0), (9, 0.5))},
    **{"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": -0.5},
}


def test_each_option_of_sampling_reaches_the_engine(wire: Wire, requested: list[Request]) -> None:
    options = {**SAMPLING, "logit_bias": dict(SAMPLING["logit_bias"])} if isinstance(wire, Http) else SAMPLING
    for stream in (False, True):
        wire.ask("say:x", stream=stream, **options)
    assert [request.sampling for request in requested] == [SamplingParams(**SAMPLING)] * 2


# Prompt, images, fields, code, and part of the message.
LATE = {"max_latency_s": 9.0, "max_ttft_s": 0.5, "priority": -3}
ERRORS: dict[str, tuple[str, list[bytes], dict[str, Any], str, str]] = {
    "nothing": ("", [], {}, "bad_request", "the prompt is empty"),
    "only images": (" \n", [PNG], {}, "bad_request", "has images but no text, and the base model has no default"),
    "no question": ("", [PNG], {"adapter": "plain"}, "bad_request", "adapter 'plain' has no default question"),
    "many questions": ("", [PNG], {"adapter": "a+c"}, "bad_request", "several questions: is it motion?, is it night?"),
    "no picture": ("say:x", [b"broken"], {}, "bad_image", "image 1 (6 bytes) is broken or not one of JPEG"),
    "no picture, no text": ("", [b"broken"], {}, "bad_image", "image 1 (6 bytes) is broken or not one of JPEG"),
    "odd picture": ("say:x", [png(size=(900, 1))], {}, "bad_image", "aspect ratio"),
    "large picture": ("say:x", [b"x" * 60_000], {}, "too_large", "image 1 has 60000 bytes"),
    "many pictures": ("say:x", [PNG] * 5, {}, "too_large", "5 images; this server takes at most 4"),
    "long prompt": ("x" * 1001, [], {}, "too_large", "1001 characters; this server takes at most 1000"),
    "long answer": ("say:x", [], {"max_tokens": 10**6}, "prompt_too_long", "up to 1000000 output tokens"),
    "many stop strings": ("say:x", [], {"stop": ("s",) * 17}, "bad_request", "stop has 17"),
    "long stop string": ("say:x", [], {"stop": "x" * 1001}, "bad_request", "1000"),
    "empty stop string": ("say:x", [], {"stop": ("",)}, "bad_request", "stop contains an empty string"),
    "max_tokens": ("say:x", [], {"max_tokens": 0}, "bad_request", "max_tokens is 0"),
    "temperature": ("say:x", [], {"temperature": -1}, "bad_request", "temperature is -1"),
    "min_tokens": ("say:x", [], {"min_tokens": 9, "max_tokens": 8}, "bad_request", "min_tokens is 9; it must be betwe"),
    "priority": ("say:x", [], {"priority": 11}, "bad_request", "priority is 11"),
    "latency": ("say:x", [], {"max_latency_s": 0}, "bad_request", "max_latency_s is 0"),
    "ttft": ("say:x", [], {"max_ttft_s": -1}, "bad_request", "max_ttft_s is -1"),
    "adapter": ("say:x", [], {"adapter": "no"}, "unknown_adapter", "no adapter named 'no'; registered: a, b, c, cam, "),
    "part": ("say:x", [], {"adapter": "a+x"}, "unknown_adapter", "no adapter named 'x'; registered: a, b, c, cam, "),
    "half": ("say:x", [], {"adapter": "a+"}, "bad_request", "'' is no adapter's name; write a+b, or 0.7*a+0.3*b"),
    "twice": ("say:x", [], {"adapter": "a+a"}, "bad_request", "it names 'a' twice; give it one weight, as in 2*a"),
    "weight 0": ("say:x", [], {"adapter": "0*a+b"}, "bad_request", "weight of 'a' is 0; it must be from -100 to 100"),
    "weight of text": ("say:x", [], {"adapter": {"a": "2"}}, "bad_request", "the weight of 'a' is of type str"),
    "weight": ("say:x", [], {"adapter": {"a": 1e300}}, "bad_request", "the weight of 'a' is 1e+300"),
    "nested": ("say:x", [], {"adapter": {"a+b": 1.0}}, "bad_request", "'a+b' is no adapter's name"),
    "a step fails": ("fail", [], {}, "step_failed", "the script says fail"),
    "a mistake": ("trip", [], {}, "error", "internal server error (ValueError"),
    "too late": ("overloaded", [], LATE, "deadline_unreachable", "latency 9.0 ttft 0.5 -3"),
    "as late as it may": ("overloaded", [], {}, "deadline_unreachable", "latency None ttft None +0"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_the_same_over_each_wire_and_the_next_request_is_served(wire: Wire, name: str) -> None:
    prompt, images, fields, code, message = ERRORS[name]
    for stream in (False, True):
        if isinstance(wire, InProcess) and name in ("priority", "latency", "ttft"):
            continue  # the wires check these
        with pytest.raises(VLoraError) as caught:
            wire.ask(prompt, images, stream=stream, **fields)
        assert caught.value.code == code and message in str(caught.value)
    assert wire.ask("say:fine", adapter="cam", max_tokens=9).text == "fine"


def test_many_requests_at_once_get_their_own_answers(wire: Wire) -> None:
    def ask(number: int) -> str:
        if number % 7 == 0:
            with pytest.raises(VLoraError):
                wire.ask("fail" if number % 2 else "say:x", [b"broken"] * (number % 2 == 0))
        return wire.ask(f"say:number {number}", [png(number)] * (number % 2), stream=number % 3 == 0).text

    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(ask, range(24))) == [f"number {number}" for number in range(24)]


def test_a_dead_engine_is_reported_with_its_cause(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire.api.engine, "dead", "the engine process was killed by SIGKILL")
    with pytest.raises(EngineDead, match="SIGKILL"):
        wire.ask("say:x")


def test_heads_answer_together_and_each_error_is_its_own(wire: Wire) -> None:
    tasks = list(ADAPTERS["tasks"])
    pairs = [("cam", "night"), *(("tasks", task) for task in tasks)]
    for brightness, label in ((10, "dark"), (255, "bright")):
        expected = [("classification", label), *((task, label) for task in tasks)]
        assert wire.heads([png(brightness)], pairs) == expected
    # Pair, code, part of the message.
    rows = [
        (("cam", "motion"), "bad_request", "head 'motion' of adapter 'cam' reads 4 images per request; got 1"),
        (("cam", "kind"), "unknown_head", "adapter 'cam' has no head 'kind'; its heads: night, motion"),
        (("c", "night"), "unknown_head", "its heads: motion; head 'night' belongs to adapter 'a', 'b', 'cam'"),
        (("zoo", "night"), "unknown_adapter", "no adapter named 'zoo'; registered: a, b, c"),
        (("a+b", "night"), "unknown_adapter", "'a+b' is a composition; a task head belongs to one adapter: name that"),
        (("levels", "overloaded"), "deadline_unreachable", "latency 2.0 ttft None +1"),
    ]
    found = wire.heads([PNG], [pair for pair, _, _ in rows], max_latency_s=2.0, priority=1)
    for (pair, code, message), (got, text) in zip(rows, found, strict=True):
        assert got == code and message in text, pair
    assert wire.heads([PNG] * 4, [("cam", "motion")]) == [("classification", "bright")]
    assert [code for code, _ in wire.heads([b"broken"], [("cam", "night")] * 2)] == ["bad_image"] * 2
    with pytest.raises(BadRequest, match="heads"):
        wire.heads([PNG], [])


def test_adapters_are_loaded_pinned_listed_and_unloaded(wire: Wire, tmp_path: Path) -> None:
    def listed() -> dict[str, bool]:
        return {each["name"]: each["pinned"] for each in wire.do("adapters") if each["name"] not in ADAPTERS}

    made = wire.do("load_adapter", "signs", write_adapter(tmp_path / "signs", {"kind": 1}))
    assert (made["name"], made["rank"], made["heads"][0]["name"]) == ("signs", 8, "kind")
    assert wire.heads([PNG], [("signs", "kind")]) == [("classification", "bright")]
    assert [each.keys() for each in wire.do("adapters") if each["name"] == "signs"] == [made.keys()]
    for pinned in (True, False):
        assert wire.do("pin_adapter", "signs", pinned)["pinned"] is pinned and listed() == {"signs": pinned}
    wire.do("load_adapter", "signs", write_adapter(tmp_path / "other", {"rain": 1}))  # replaces its heads
    assert [code for code, _ in wire.heads([PNG], [("signs", "kind")])] == ["unknown_head"]
    wire.do("unload_adapter", "signs")
    assert listed() == {}
    for call, args, error, message in (
        ("unload_adapter", ("signs",), UnknownAdapter, "'signs'"),
        ("pin_adapter", ("a+b", True), UnknownAdapter, r"'a\+b'"),
        ("load_adapter", ("signs", str(tmp_path)), BadAdapter, "no adapter_config.json"),
        ("load_adapter", ("base", str(tmp_path / "signs")), BadAdapter, "is the base model's name"),
        *(("load_adapter", (name, "/x"), BadAdapter, "is invalid") for name in ("..", "a/b", "a\nb", "", "x" * 129)),
    ):
        with pytest.raises(error, match=message) as caught:
            wire.do(call, *args)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("drain", [False, True])
def test_unloading_aborts_requests_or_waits_for_them(wire: Wire, drain: bool, tmp_path: Path) -> None:
    wire.do("load_adapter", "going", write_adapter(tmp_path / "going"))
    asked = 60 if drain else 90_000
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(wire.ask, "forever", adapter="going", max_tokens=asked, stream=True)
        until(lambda: bool(wire.api.engine.engine.running))
        wire.do("unload_adapter", "going", drain=drain)
        with pytest.raises(UnknownAdapter):
            wire.ask("say:x", adapter="going")
        if drain:
            assert asking.result().num_tokens[1] == 60
        else:
            with pytest.raises(Aborted, match="adapter 'going' was unloaded"):
                asking.result()


def test_trainings_are_submitted_listed_and_cancelled(wire: Wire) -> None:
    name = f"signs-{type(wire).__name__}"
    (made,) = wire.do("train", f"/plans/{name}")
    assert (made["name"], made["state"], made["loss"]) == (name, "running", 0.5)
    assert made in wire.do("trainings") and wire.do("cancel_training", name)["state"] == "cancelled"
    with pytest.raises(BadRequest, match="no training named 'absent' is running"):
        wire.do("cancel_training", "absent")
    with pytest.raises(BadPlan):
        wire.do("train", "/plans/bad")


def test_stats_name_the_model_and_not_its_folder() -> None:
    with running_api(ScriptedInterface(EngineConfig(model="/folders/of/the/operator")), model="embedded") as api:
        assert api.client().stats().model == "embedded" == api.on_loop(api.front_end.snapshot()).stats.model
        state = api.call("GET", "/console/state")[1]
        assert "/folders" not in json.dumps(state)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that the engine gets."""
    found: list[Request] = []
    add = ScriptedEngine.add

    def recorded(self: ScriptedEngine, request: Request) -> None:
        found.append(request)
        add(self, request)

    monkeypatch.setattr(ScriptedEngine, "add", recorded)
    return found


def test_the_token_decides_the_tenant(
    guarded_wire: Callable[[str], Wire], guarded: Api, requested: list[Request]
) -> None:
    for token in (USER, ADMIN):
        wire = guarded_wire(token)
        wire.ask("say:x")
        wire.ask("say:x", stream=True)
        wire.heads([PNG], [("signs", "night")])
    with guarded._replace(token=USER).client() as client, client.open_stream(adapter="signs", head="night") as stream:
        stream.send(PNG)
        next(stream)
    assert [request.tenant for request in requested] == ["cameras"] * 3 + ["ops"] * 3 + ["cameras"]


FOLDER, CAUSE = "/srv/my: adapters/signs", "no adapter_config.json; an adapter is a folder in PEFT's format"
FAILURE = ErrorValue("bad_adapter", f"{FOLDER}: {CAUSE}")


@pytest.fixture
def failing(guarded: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine fail each request after a token, and report the failure in the adapter's status."""
    listed = guarded.engine.adapters

    async def generate(request: Request, until: float | None = None) -> AsyncIterator[RequestOutput]:
        if not request.head:
            yield RequestOutput(request_id=request.request_id, token_ids=(65,))
        yield RequestOutput(request_id=request.request_id, finish_reason="error", error=FAILURE)

    async def adapters() -> tuple[AdapterStatus, ...]:
        return tuple(msgspec.structs.replace(each, error=FAILURE.message) for each in await listed())

    monkeypatch.setattr(guarded.engine, "generate", generate)
    monkeypatch.setattr(guarded.engine, "adapters", adapters)
    guarded.front_end.adapters.invalidate()


@pytest.mark.parametrize(
    ("token", "reason"), [(USER, CAUSE), (ADMIN, f"{FOLDER}: {CAUSE}")], ids=["a user", "an operator"]
)
def test_only_operators_see_paths_in_errors(
    guarded_wire: Callable[[str], Wire], guarded: Api, failing: None, token: str, reason: str
) -> None:
    wire, message = guarded_wire(token), f"adapter 'signs': {reason}"
    for stream in (False, True):
        with pytest.raises(BadAdapter) as caught:
            wire.ask("say:x", adapter="signs", stream=stream)
        assert str(caught.value) == message
    assert wire.heads([PNG], [("signs", "night")]) == [("bad_adapter", message)]
    assert [each["error"] for each in wire.do("adapters")] == [reason]
    status, alone = wire.api.call("POST", "/v1/heads/signs/night", {"images": [image_part(PNG)["image_url"]["url"]]})
    assert (status, alone["error"]["message"]) == (400, message)
    with wire.api.client() as client, client.open_stream(adapter="signs", head="night") as frames:
        frames.send(PNG)
        result = next(frames)
    assert result.error is not None and result.error.message == message and result.answers[0].error == result.error


NOT_LEARNING, ONE_ENGINE = "no adapter of this server learns", "this server has one engine; start it with --replicas 2"


def test_user_tokens_may_ask_and_admin_tokens_change(guarded_wire: Callable[[str], Wire], tmp_path: Path) -> None:
    user, admin = guarded_wire(USER), guarded_wire(ADMIN)
    assert user.ask("say:x").text == "x" and len(user.do("adapters")) == 1
    # A call, its arguments, and the error for an administrator.
    for call, args, error in (
        ("load_adapter", ("cam", write_adapter(tmp_path / "cam")), None),
        ("pin_adapter", ("cam", True), None),
        ("unload_adapter", ("cam",), None),
        ("train", ("/plans/spoiled",), None),
        ("cancel_training", ("spoiled",), None),
        *((f"{change}_replica", ("a",), ONE_ENGINE) for change in ("drain", "resume")),
        ("scale", (2,), ONE_ENGINE),
        ("promote", ("signs",), NOT_LEARNING),
        ("roll_back", ("signs",), NOT_LEARNING),
    ):
        with pytest.raises(Forbidden, match="requires an admin token"):
            user.do(call, *args)
        if error is None:
            admin.do(call, *args)
        else:
            with pytest.raises(VLoraError, match=error):
                admin.do(call, *args)
    for wire in (user, admin):
        with pytest.raises(UnknownReplica, match=ONE_ENGINE):
            wire.do("cluster")
    # The files that a training's records were in are for operators.
    assert [bool(each["bad"]) for wire in (user, admin) for each in wire.do("trainings")] == [False, True]


def leave_http(api: Api, stream: bool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.http_port)
    messages = [{"role": "user", "content": "forever"}]
    body = {"model": "base", "messages": messages, "max_tokens": 90_000, "stream": stream}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    if stream:
        assert connection.getresponse().read(10)
    until(lambda: bool(api.engine.engine.running))
    connection.close()


def leave_rpyc(api: Api, how: str) -> None:
    with api.client(timeout_s=0.2 if how == "time out" else PATIENCE_S) as client:
        if how == "time out":
            with pytest.raises(DeadlineMissed, match=r"within 0\.2 s"):
                client.generate("never")
        else:
            stream = client.stream("forever", max_tokens=90_000)
            assert next(stream).startswith("x") and api.engine.engine.running
            if how == "close":
                stream.close()
            elif how == "drop":
                del stream
            else:
                client.close()
        assert api.idle(), "cancelled while the client is connected"


def leave_asyncio(api: Api, how: str) -> None:
    async def main() -> None:
        async with AsyncClient(port=api.port, timeout_s=0.2 if how == "time out" else PATIENCE_S) as client:
            if how == "close":
                stream = client.stream("forever", max_tokens=90_000)
                await anext(stream)
                await stream.aclose()  # type: ignore[attr-defined]
            else:
                task = asyncio.create_task(client.generate("never"))
                while not api.engine.engine.running:
                    await asyncio.sleep(0.01)
                if how == "cancel":
                    task.cancel()
                with pytest.raises(asyncio.CancelledError if how == "cancel" else DeadlineMissed):
                    await task
            assert await asyncio.to_thread(api.idle), "cancelled while the client is connected"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("leave", "how"),
    [
        *((leave_http, stream) for stream in (False, True)),
        *((leave_rpyc, how) for how in ("close", "drop", "disconnect", "time out")),
        *((leave_asyncio, how) for how in ("cancel", "close", "time out")),
    ],
)
def test_leaving_frees_the_request(api: Api, leave: Callable[[Api, Any], None], how: Any) -> None:
    leave(api, how)
    assert api.idle() and api.front_end.num_active == 0


def test_requests_of_one_client_run_concurrently(api: Api) -> None:
    with api.client() as client, contextlib.ExitStack() as slow:
        for _ in range(3):
            assert next(slow.enter_context(client.stream("forever", max_tokens=90_000))).startswith("x")
        assert client.generate("say:quick").text == "quick" and len(api.engine.engine.running) == 3
    assert api.idle()


def test_a_lost_server_is_reported_and_a_new_one_found() -> None:
    with pytest.raises(Disconnected, match=r"cannot reach a server at 127.0.0.1:1: .*vlora serve"):
        Client(port=1).stats()
    with ThreadPoolExecutor(1) as threads:
        with running_server() as first:
            client = Client(port=first.port)
            waiting = threads.submit(client.generate, "never")
            until(lambda: bool(first.engine.engine.running))
        assert isinstance(waiting.exception(), Disconnected | Aborted)
    with pytest.raises(Disconnected):
        client.stats()
    with running_server(port=first.port):
        assert client.stats().model == "scripted"
        client.close()


DRAIN_A = "/v1/cluster/replicas/a/drain"


def states(answer: Any) -> dict[str, str]:
    return {each["name"]: each["state"] for each in answer["replicas"]}


async def test_replicas_are_drained_and_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = {0: LocalReplica(), 1: LocalReplica()}
    monkeypatch.setattr(members, "connect", connecting(replicas))
    cluster = Cluster(Router("round_robin"), SECRET, health=QUICK)
    for port, name in enumerate("ab"):
        await joined(cluster, name, Address("127.0.0.1", port))
    front_end = FrontEnd(cluster, ByteProcessor(), ServerConfig(), "base")  # type: ignore[arg-type]
    transport = httpx.ASGITransport(make_app(front_end, "base", Access(())))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

        async def call(method: str, path: str, body: Any = None) -> tuple[int, Any]:
            response = await client.request(method, path, json=body)
            return response.status_code, response.json()

        answering = asyncio.create_task(outputs_of(cluster, asked("r", 100)))
        await asyncio.sleep(0.1)
        status, answer = await call("GET", "/v1/cluster")
        assert status == 200 and states(answer) == {"a": "serving", "b": "serving"}
        assert answer["num_waiting"] == 0 and answer["scaling"] is None
        assert cluster.where("r") == "a"
        status, answer = await call("PUT", f"{DRAIN_A}?wait_s=0")
        assert (status, answer["done"], states(answer)["a"]) == (202, False, "draining")
        status, answer = await call("PUT", f"{DRAIN_A}?wait_s=10")
        assert (status, answer["done"], answer["num_moves"]) == (200, True, 1)
        check(asked("r", 100), await answering)
        status, answer = await call("PUT", "/v1/cluster/replicas/b/drain")
        assert status == 400 and answer["error"]["message"].startswith("no other replica than 'b' serves")
        status, answer = await call("DELETE", DRAIN_A)
        assert (status, answer["done"], states(answer)["a"]) == (200, True, "serving")
        status, answer = await call("DELETE", "/v1/cluster/replicas/c/drain")
        assert (status, answer["error"]["code"]) == (404, "unknown_replica")
        status, answer = await call("PUT", "/v1/cluster/scale", {"replicas": 3})
        assert status == 400 and answer["error"]["message"].endswith("their number cannot be changed here")
    await front_end.close()
    await cluster.close()
    for replica in replicas.values():
        replica.kill()


PLACE = AdapterPlace(
    adapter="signs", replica="a", state="failed", version="", pinned=False, cause="/srv/signs: no adapter_config.json"
)


def test_values_that_not_every_caller_may_see_are_in_tuples_only() -> None:
    class Listed(msgspec.Struct):
        replicas: list[ReplicaStatus]

    user = Token(name="user", secret="s" * 16)
    assert shown_to((LOST,), user) == (hidden(LOST),)
    for value in ([LOST], {"a": LOST}, {LOST}, Listed([LOST])):
        with pytest.raises(AssertionError, match="use a tuple"):
            shown_to(value, user)


NONE: dict[str, Any] = dict.fromkeys(("num_waiting", "num_deaths", "num_resubmitted", "num_moves"), 0)
LOST = ReplicaStatus(name="a", state=DOWN, cause="/srv/model: no such folder", num_requests=0)
STATUS = ClusterStatus(replicas=(LOST,), **NONE)


def hidden(value: Any) -> Any:
    return msgspec.structs.replace(value, cause=HIDDEN)


def test_user_tokens_see_no_causes_of_replicas_and_adapters() -> None:
    with running_api(adapters={"signs": {}}, tokens=TOKENS) as api:
        places = mock.AsyncMock(return_value=(PLACE,))
        api.front_end.cluster = mock.Mock(**{"status.return_value": STATUS, "adapter_places": places})
        for token, cause, why in (
            (USER, HIDDEN, "an admin token shows the reason"),
            (ADMIN, "/srv/model: no such folder", PLACE.cause),
        ):
            mine = api._replace(token=token)
            (replica,) = mine.call("GET", "/v1/cluster")[1]["replicas"]
            assert (replica["state"], replica["cause"]) == (DOWN, cause)
            (listed,) = [each for named in mine.call("GET", "/v1/adapters")[1]["data"] for each in named["replicas"]]
            assert (listed["state"], listed["cause"]) == ("failed", why)
        with api._replace(token=USER).client() as user, api._replace(token=ADMIN).client() as admin:
            assert (admin.cluster(), user.cluster()) == (
                STATUS,
                msgspec.structs.replace(STATUS, replicas=(hidden(LOST),)),
            )
            assert (admin.cluster_adapters(), user.cluster_adapters()) == ((PLACE,), (hidden(PLACE),))
            assert "/srv" not in str(user.cluster_adapters())
