"""Errors of adapters for callers without an admin token: adapter and cause, no path of the server."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from tests.server.api import image_part, running_api
from tests.server.running import running_server
from tests.server.test_console import CAMERAS, OPS, open_stream, send, state, wait_for
from tests.server.test_security import ADMIN, TOKENS, USER
from vlora.client import Client
from vlora.config import Token
from vlora.errors import BadAdapter, BadRequest, EngineDead, VLoraError
from vlora.lora.peft_format import read_header
from vlora.server.security.public_errors import error_for, named, without_places
from vlora.types import AdapterStatus, EngineStats, ErrorValue, Request, RequestOutput

FOLDER = "/srv/my: adapters/signs"
CAUSE = "no adapter_config.json; an adapter is a folder in PEFT's format"
FAILURE = ErrorValue("bad_adapter", f"{FOLDER}: {CAUSE}")
SHOWN = f"adapter 'signs': {CAUSE}"
WHOLE = f"adapter 'signs': {FOLDER}: {CAUSE}"


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    return file.getvalue()


def fail(engine: Any, *, after: int = 0) -> None:
    """Let the engine fail each request, with some tokens before, and report the failure in the adapter's status."""
    listed = engine.adapters

    async def generate(request: Request, until: float | None = None) -> AsyncIterator[RequestOutput]:
        for _ in range(after):
            yield RequestOutput(request_id=request.request_id, token_ids=(65,))
        yield RequestOutput(request_id=request.request_id, finish_reason="error", error=FAILURE)

    async def adapters() -> tuple[AdapterStatus, ...]:
        return tuple(msgspec.structs.replace(each, error=FAILURE.message) for each in await listed())

    engine.generate, engine.adapters = generate, adapters


@pytest.mark.parametrize(
    "folder", ["plain", "with spaces", "a: b", "it's", 'quote"s', "(1); x", "ünï-code", "a b/c: d"]
)
def test_errors_of_files_show_no_folder(folder: str, tmp_path: Path) -> None:
    path = tmp_path / folder

    def error() -> str:
        with pytest.raises(BadAdapter) as caught:
            read_header(path, {}, 8)
        return str(caught.value)

    def check(cause: str) -> None:
        message = error()
        assert str(path) in message  # the control
        for prefix in ("", "adapter 'x': ", "replica 'replica-0': ", "replica 'it\\'s': adapter \"y's\": "):
            shown = without_places(prefix + message)
            assert shown.startswith(prefix) and shown.endswith(cause) and "/" not in shown.removeprefix(prefix)

    check("no adapter_config.json; there is no such folder")
    path.mkdir(parents=True)
    check("no adapter_config.json; an adapter is a folder in PEFT's format")
    (path / "adapter_config.json").write_text("{")
    check(error().rpartition(": is not JSON: ")[2])
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    check("no adapter_model.safetensors; pickled weights (.bin) are not supported, save as safetensors")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("rel/ative: no such file", "no such file"),
        (
            "the engine is gone: [Errno 2] No such file: '/srv/a b/c.json'",
            "the engine is gone: [Errno 2] No such file: 'c.json'",
        ),
        ("reading failed (No such file: /srv/a b/c.json)", "reading failed (No such file: c.json)"),
        (
            "layer 'visual.blocks.0' has shapes (3, 4) and/or (4, 3)",
            "layer 'visual.blocks.0' has shapes (3, 4) and/or (4, 3)",
        ),
        ("see https://a.example/b/c", "see https://a.example/b/c"),
        ("see https://a.example/b: no file '/srv/a b/c'", "see https://a.example/b: no file 'c'"),
        ("no file '/srv/a b/c'; see https://a.example/b/c", "no file 'c'; see https://a.example/b/c"),
        ("", ""),
    ],
)
def test_paths_within_a_message(message: str, shown: str) -> None:
    assert without_places(message) == shown


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "no connection to a replica at 10.0.0.2:7001: [Errno 111] Connect call failed ('10.0.0.2', 7001)",
            "no connection to a replica at [address]: [Errno 111] Connect call failed [address]",
        ),
        (
            "a: [fe80::1%eth0]:7001 did not answer; b: gpu-a.example:7001 did not",
            "a: [address] did not answer; b: [address] did not",
        ),
        ("Connect call failed ('::1', 7001, 0, 0)", "Connect call failed [address]"),
        (
            "the engine ended with code -9: runner.cpp:123, rank 1:2",
            "the engine ended with code -9: runner.cpp:123, rank 1:2",
        ),
        ("adapter '10.0.0.2:7001': no such file", "adapter '10.0.0.2:7001': no such file"),
    ],
)
def test_addresses_of_machines_are_not_shown(message: str, shown: str) -> None:
    assert without_places(message) == shown
    dead = EngineDead(message)
    user, admin, _ = TOKENS
    assert (
        admin.admin and str(error_for(dead, user)) == shown and error_for(dead, admin) is error_for(dead, None) is dead
    )


def test_the_caller_s_own_words_stay() -> None:
    user = TOKENS[0]
    error = BadRequest("image 0: /home/me/a.png is no URL", field="images")
    assert not user.admin and error_for(error, user) is error
    shown = error_for(VLoraError("internal server error (OSError: /srv/x); see the server log"), user)
    assert str(shown) == "internal server error (OSError: x); see the server log"


def test_an_error_names_the_adapter_once() -> None:
    assert str(named(FAILURE, "signs")) == WHOLE
    assert str(named(ErrorValue("bad_adapter", SHOWN), "signs")) == SHOWN
    assert str(named(FAILURE, None)) == FAILURE.message


@pytest.mark.parametrize(("token", "message"), [(USER, SHOWN), (ADMIN, WHOLE)])
def test_http_shows_paths_to_admins_only(token: str, message: str) -> None:
    with running_api(adapters={"signs": {"night": 1}}, tokens=TOKENS) as api:
        api = api._replace(token=token)
        fail(api.engine)
        asked = {"model": "signs", "messages": [{"role": "user", "content": "say:x"}]}
        for body in (asked, asked | {"stream": True}):
            status, answer = api.call("POST", "/v1/chat/completions", body)
            assert (status, answer["error"]["message"]) == (400, message)
        images = {"images": [image_part(png())["image_url"]["url"]]}
        assert api.call("POST", "/v1/heads/signs/night", images)[1]["error"]["message"] == message
        heads = {**images, "heads": [{"adapter": "signs", "head": "night"}]}
        assert api.call("POST", "/v1/heads", heads)[1]["data"][0]["error"]["message"] == message
        (listed,) = api.call("GET", "/v1/adapters")[1]["data"]
        assert listed["error"] == message.removeprefix("adapter 'signs': ")
        fail(api.engine, after=3)
        text = api.call("POST", "/v1/chat/completions", asked | {"stream": True})[1]
        assert json.dumps(message)[1:-1] in text and (FOLDER in text) == (token == ADMIN)


@pytest.mark.parametrize("tokens", [TOKENS, ()])
def test_health_checks_show_no_places_where_there_are_tokens(tokens: tuple[Token, ...]) -> None:
    """They need none. Without tokens the server is for its operator only."""

    async def stats() -> EngineStats:
        raise EngineDead("a: no connection to a replica at 10.0.0.2:7001; /srv/x: no such file")

    with running_api(tokens=tokens) as api:
        api.engine.stats = stats  # type: ignore[method-assign]
        for path in ("/health", "/ready"):
            status, answer = api._replace(token=None).call("GET", path)
            assert status == 503 and ("10.0.0.2" in str(answer) or "/srv" in str(answer)) == (not tokens)
            assert "no such file" in str(answer)


def test_the_console_shows_paths_to_admins_only() -> None:
    with running_api(adapters={"cam": {"night": 1}}, tokens=(CAMERAS, OPS)) as api:
        stream_id = open_stream(api, CAMERAS)
        fail(api.engine)
        send(api, stream_id, CAMERAS, 0)
        wait_for(lambda: api.front_end.streams.watched()[0].stream.num_failed == 1)
        problems = [state(api, token)["streams"][0]["last"]["problem"] for token in (CAMERAS, OPS)]
        assert problems == [f"adapter 'cam': {CAUSE}", f"adapter 'cam': {FOLDER}: {CAUSE}"]


@pytest.mark.parametrize(("token", "message"), [(USER, SHOWN), (ADMIN, WHOLE)])
def test_rpyc_shows_paths_to_admins_only(token: str, message: str) -> None:
    with running_server(adapters={"signs": {"night": 1}}, tokens=TOKENS) as server:
        fail(server.engine)
        with Client(port=server.port, token=token) as client:

            def error_of(call: Callable[[], object]) -> str:
                with pytest.raises(BadAdapter) as caught:
                    call()
                return str(caught.value)

            assert error_of(lambda: client.generate("say:x", adapter="signs")) == message
            assert error_of(lambda: list(client.stream("say:x", adapter="signs"))) == message
            assert error_of(lambda: client.ask_head([png()], "signs", "night")) == message
            (outcome,) = client.ask_heads([png()], [("signs", "night")])
            assert outcome.error is not None and outcome.error.message == message
            (status,) = client.adapters()
            assert status.error == message.removeprefix("adapter 'signs': ")
            with client.open_stream(adapter="signs", head="night") as stream:
                stream.send(png())
                result = next(iter(stream))
                assert result.error is not None and result.error.message == message
                assert result.answers[0].error == result.error
