"""The token of a request decides which tenant's share it uses."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.families import build_model
from tests.server.api import Api, running_api
from tests.server.running import png, running_server
from tests.server.scripted import ByteProcessor, Encoded, Processed, write_adapter
from vlora.client import Client
from vlora.config import EngineConfig, Token
from vlora.engine import LocalEngine
from vlora.errors import BadConfig

CROWD, GUEST = "c" * 20, "g" * 20
TOKENS = (Token(name="crowd", secret=CROWD), Token(name="guest", secret=GUEST))


class SmallVocabulary(ByteProcessor):
    """Bytes as token ids, valid for any model."""

    def encode_processed(self, prompt: str, images: Processed) -> Encoded:
        return Encoded(tuple(3 + byte % 32 for byte in prompt.encode()), (), ())


def finished_by_the_crowd_when_the_guest_is_answered(tenant_weight: tuple[str, ...]) -> int:
    """One tenant requests 16 answers of 40 tokens at once, then a guest requests one."""
    config = EngineConfig(
        model="llava",
        arena_bytes=64 * 2**20,
        max_context=128,
        max_batch_size=2,
        max_step_tokens=64,
        theta_s=100.0,  # so that a long wait does not override shares
        tenant_weight=tenant_weight,
    )
    engine = LocalEngine(config, model=build_model("llava"))

    def stats(api: Api) -> Any:
        return api.on_loop(api.front_end.stats())

    with running_api(engine, SmallVocabulary(), tokens=TOKENS, max_requests=64) as api:
        crowd, guest = api._replace(token=CROWD), api._replace(token=GUEST)
        answers: list[Any] = []
        flood = threading.Thread(target=lambda: answers.append(crowd.chat("many", n=16, max_tokens=40)))
        flood.start()
        deadline = time.monotonic() + 30
        while stats(api).num_waiting < 12 and time.monotonic() < deadline:
            time.sleep(0.005)
        status, answer = guest.chat("one", max_tokens=4)
        finished = stats(api).num_finished - 1
        assert status == 200 and answer["usage"]["completion_tokens"] >= 1
        flood.join(60)
        status, answer = answers[0]
        assert status == 200 and len(answer["choices"]) == 16, "no request of the first tenant is refused"
        assert answer["usage"]["completion_tokens"] >= 320, "the answers are not short"
    return finished


@pytest.mark.slow
def test_many_requests_of_one_token_do_not_delay_another() -> None:
    assert finished_by_the_crowd_when_the_guest_is_answered(("*=1",)) <= 7
    # Negative control: without shares the guest is served last.
    assert finished_by_the_crowd_when_the_guest_is_answered(()) >= 10


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | None]]:
    """Tenants of the requests that reached a scripted engine, in order."""
    from tests.server.scripted import ScriptedEngine

    tenants: list[str | None] = []
    inner = ScriptedEngine.add

    def add(self: ScriptedEngine, request: Any) -> None:
        tenants.append(request.tenant)
        inner(self, request)

    monkeypatch.setattr(ScriptedEngine, "add", add)
    yield tenants


def test_every_kind_of_request_has_its_tokens_name(seen: list[str | None], tmp_path: Any) -> None:
    folder = write_adapter(tmp_path / "cam", {"night": 1})
    with running_api(tokens=TOKENS) as api:
        api.on_loop(api.front_end.adapters.load("cam", folder))
        assert api._replace(token=CROWD).chat("say:x")[0] == 200
        assert api._replace(token=GUEST).chat("say:x", n=2)[0] == 200
        body = {"images": ["data:image/png;base64,x"]}
        api._replace(token=GUEST).call("POST", "/v1/heads/cam/night", body)  # no image: it never reaches the engine
    assert seen == ["crowd", "guest", "guest"]
    seen.clear()
    with running_server(tokens=TOKENS) as server:
        server.on_loop(server.front_end.adapters.load("cam", folder))
        with Client(port=server.port, token=GUEST) as client:
            client.generate("say:x")
            client.ask_head([png()], "cam", "night")
            with client.open_stream(adapter="cam", head="night") as stream:
                stream.send(png())
                next(iter(stream))
    assert seen == ["guest"] * 3
    seen.clear()
    with running_api() as api:
        assert api.chat("say:x")[0] == 200
    assert seen == [None], "without tokens there are no tenants"


@pytest.mark.parametrize("pair", ["crowd", "crowd=0", "=2", "crowd=nan"])
def test_an_invalid_weight_is_refused(pair: str) -> None:
    with pytest.raises(BadConfig, match="tenant_weight is "):
        EngineConfig(model="m", tenant_weight=(pair,))
    with pytest.raises(BadConfig, match="tenant_weight sets 'a' twice"):
        EngineConfig(model="m", tenant_weight=("a=1", "a=2"))
    assert dataclasses.replace(EngineConfig(model="m"), tenant_weight=("a=2",)).tenant_weights == {"a": 2.0}
