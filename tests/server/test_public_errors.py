"""Errors of adapters for callers without an admin token: adapter and cause, no path of the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.api import running_api
from tests.server.test_security import TOKENS
from vlora.config import Token
from vlora.errors import BadAdapter, BadRequest, EngineDead, VLoraError
from vlora.lora.peft_format import read_header
from vlora.server.security.public_errors import error_for, named, without_places
from vlora.types import EngineStats, ErrorValue

FOLDER = "/srv/my: adapters/signs"
CAUSE = "no adapter_config.json; an adapter is a folder in PEFT's format"
FAILURE = ErrorValue("bad_adapter", f"{FOLDER}: {CAUSE}")
SHOWN = f"adapter 'signs': {CAUSE}"
WHOLE = f"adapter 'signs': {FOLDER}: {CAUSE}"


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


ENDED = "the engine ended with code -9: runner.cpp:123, rank 1:2"
SHAPES = "layer 'visual.blocks.0' has shapes (3, 4) and/or (4, 3)"
REFUSED = "[Errno 111] Connect call failed"
PLACES = {
    "rel/ative: no such file": "no such file",
    "gone: [Errno 2] No such file: '/srv/a b/c.json'": "gone: [Errno 2] No such file: 'c.json'",
    "reading failed (No such file: /srv/a b/c.json)": "reading failed (No such file: c.json)",
    SHAPES: SHAPES,
    "see https://a.example/b/c": "see https://a.example/b/c",
    "see https://a.example/b: no file '/srv/a b/c'": "see https://a.example/b: no file 'c'",
    "no file '/srv/a b/c'; see https://a.example/b/c": "no file 'c'; see https://a.example/b/c",
    "": "",
    f"no replica at 10.0.0.2:7001: {REFUSED} ('10.0.0.2', 7001)": f"no replica at [address]: {REFUSED} [address]",
    "a: [fe80::1%eth0]:7001 did not; b: gpu-a.example:7001 did not": "a: [address] did not; b: [address] did not",
    "Connect call failed ('::1', 7001, 0, 0)": "Connect call failed [address]",
    ENDED: ENDED,
    "adapter '10.0.0.2:7001': no such file": "adapter '10.0.0.2:7001': no such file",
}


def test_paths_and_addresses_within_a_message_are_for_admins() -> None:
    user, admin, _ = TOKENS
    for message, shown in PLACES.items():
        assert without_places(message) == shown
        dead = EngineDead(message)
        assert str(error_for(dead, user)) == shown and error_for(dead, admin) is error_for(dead, None) is dead


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
