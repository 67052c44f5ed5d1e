"""Compositions of adapters over HTTP and RPyC: their forms, their errors, heads and metrics."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.api import Api, image_part, running_api
from tests.server.running import Running, png, running_server
from vlora.client import AsyncClient, Client, TextQuestion
from vlora.errors import BadRequest, UnknownAdapter
from vlora.server.metrics import MAX_ADAPTERS

ADAPTERS: dict[str, dict[str, int]] = {"a": {"night": 1}, "b": {"night": 1}, "c": {"motion": 1}}


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with running_api(adapters=ADAPTERS) as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(ADAPTERS) as made:
        yield made


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    with Client(port=server.port) as made:
        yield made


def asked(api: Api) -> list[str | None]:
    """The adapters of the requests that the engine gets from now on."""
    names: list[str | None] = []
    inner = api.engine.engine.add

    def add(request: Any) -> None:
        names.append(request.adapter)
        inner(request)

    api.engine.engine.add = add
    return names


@pytest.mark.parametrize(
    ("model", "shown", "name"),
    [
        ("a+b", "a+b", "a+b"),
        ("b + 0.5*a", "b + 0.5*a", "0.5*a+b"),
        ({"b": 0.3, "a": 0.7}, "0.7*a+0.3*b", "0.7*a+0.3*b"),
        ({"a": 1}, "a", "a"),
    ],
)
def test_the_model_of_a_request_may_be_a_composition(api: Api, model: Any, shown: str, name: str) -> None:
    names = asked(api)
    status, answer = api.chat("say:x", model=model)
    assert status == 200 and answer["model"] == shown
    status, answer = api.call("POST", "/v1/completions", {"model": model, "prompt": ["say:x", "say:y"]})
    assert status == 200 and [choice["text"] for choice in answer["choices"]] == ["x", "y"]
    status, text = api.chat("say:x", model=model, stream=True)
    assert status == 200 and text.endswith("data: [DONE]\n\n")
    assert names == [name] * 4


@pytest.mark.parametrize(
    ("model", "status", "message"),
    [
        ("a+", 400, "composition 'a+' is invalid: '' is no adapter's name; write a+b, or 0.7*a+0.3*b"),
        ("a+a", 400, "composition 'a+a' is invalid: it names 'a' twice; give it one weight, as in 2*a"),
        ("0*a+b", 400, "the weight of 'a' is 0; it must be from -100 to 100, and not 0"),
        ("a+x", 404, "no adapter named 'x'; registered: a, b, c"),
        ({}, 400, "it names no adapter"),
        ({"a": "much"}, 400, "the weight of 'a' is of type str; it must be a number"),
        ({"a": None}, 400, "the weight of 'a' is of type NoneType; it must be a number"),
        ({"a": 1e300}, 400, "the weight of 'a' is 1e+300"),
        ({"a+b": 1.0}, 400, "'a+b' is no adapter's name"),
        ({"base": 0.5}, 404, "no adapter named 'base'"),
        (5, 400, "model"),
        ([["a", 1]], 400, "model"),
    ],
)
def test_a_bad_composition_names_the_value_and_the_field(api: Api, model: Any, status: int, message: str) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say:x"}]}),
        ("/v1/completions", {"prompt": "say:x"}),
    ):
        found, answer = api.call("POST", path, {"model": model, **body})
        assert found == status and answer["error"]["param"] == "model", answer
        assert message in answer["error"]["message"]


def test_an_image_without_text_gets_the_only_question_of_the_parts(api: Api) -> None:
    counts = [api.chat([image_part(png())], model=model)[1]["usage"]["prompt_tokens"] for model in ("a", "a+b")]
    assert counts[0] == counts[1]
    status, answer = api.chat([image_part(png())], model="a+c")
    assert status == 400 and "'a+c' has several questions: is it motion?, is it night?" in answer["error"]["message"]


def test_a_head_belongs_to_one_adapter(api: Api, client: Client) -> None:
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    message = "adapter 'a+b' is a composition; a task head belongs to one adapter: name that one"
    status, answer = api.call("POST", "/v1/heads/a+b/night", {"images": [url]})
    assert status == 404 and answer["error"]["message"] == message
    heads = [{"adapter": name, "head": "night"} for name in ("a+b", "a")]
    status, answer = api.call("POST", "/v1/heads", {"images": [url], "heads": heads})
    assert answer["data"][0]["error"]["message"] == message and answer["data"][1]["label"] == "bright"
    with pytest.raises(UnknownAdapter, match=r"'a\+b' is a composition; a task head belongs to one adapter"):
        client.ask_head([png()], "a+b", "night")
    with pytest.raises(UnknownAdapter, match=r"'a\+b' is a composition; a task head belongs to one adapter"):
        client.open_stream(adapter="a+b", head="night")


def test_a_stream_asks_a_composition_in_words(client: Client) -> None:
    with client.open_stream(questions=[TextQuestion("say:x", "b+a")], drop="none") as stream:
        stream.send(png())
        (answer,) = next(stream).answers
    assert answer.label == "x" and answer.text is not None and answer.text.adapter == "a+b"
    with pytest.raises(UnknownAdapter, match="no adapter named 'x'; registered: a, b, c"):
        client.open_stream(questions=[TextQuestion("say:x", "a+x")])


def test_administration_knows_single_adapters_only(api: Api, client: Client) -> None:
    assert api.call("DELETE", "/v1/adapters/a+b")[0] == api.call("PUT", "/v1/adapters/a+b/pin")[0] == 404
    assert [each["id"] for each in api.call("GET", "/v1/models")[1]["data"]] == ["base", "a", "b", "c"]
    assert [status.name for status in client.adapters()] == ["a", "b", "c"]


def test_compositions_have_one_series_of_metrics() -> None:
    with running_api(adapters=ADAPTERS) as api:
        for number in range(1, 2 * MAX_ADAPTERS):
            assert api.chat("say:x", model={"a": 1 + number / 1000, "b": 1})[0] == 200
        assert api.chat("say:x", model="1.0*a")[0] == 200 and api.chat("fail", model="a+b")[0] == 500
        found = {
            (sample.labels["adapter"], sample.labels["outcome"]): sample.value
            for family in text_string_to_metric_families(api.call("GET", "/metrics")[1])
            for sample in family.samples
            if sample.name == "vlora_requests_total"
        }
        assert {name for name, _ in found} == {"base", "unknown", "composed", "other", "a", "b", "c"}
        assert found["composed", "ok"] == 2 * MAX_ADAPTERS - 1 and found["composed", "step_failed"] == 1
        assert found["a", "ok"] == 1


def test_both_clients_take_text_and_weights(server: Running, client: Client) -> None:
    async def ask() -> list[str | None]:
        async with AsyncClient(port=server.port) as other:
            answers = [await other.generate("say:x", adapter=each) for each in ("b+a", {"a": 0.7, "b": -0.3})]
            streamed = [part async for part in other.stream("say:x", adapter={"a": 2})]
            return [*(answer.adapter for answer in answers), getattr(streamed[-1], "adapter", "")]

    assert asyncio.run(ask()) == ["a+b", "0.7*a+-0.3*b", "2*a"]
    assert client.generate("say:x", adapter={"b": 1, "a": 0.5}).adapter == "0.5*a+b"
    stream = client.stream("say:x", adapter="b+a")
    assert "".join(stream) == "x" and stream.answer is not None and stream.answer.adapter == "a+b"
    with pytest.raises(BadRequest, match="the weight of 'a' is nan"):
        client.generate("say:x", adapter={"a": float("nan")})
    with pytest.raises(UnknownAdapter, match="no adapter named 'x'; registered: a, b, c"):
        client.generate("say:x", adapter="a+x")
