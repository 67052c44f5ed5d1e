"""The form of the HTTP API over a scripted engine: routes, bodies, fields, events, tools, and errors that name a field,
in this project's wording.

What it answers is in `test_protocol.py`, with the other wires.
"""

from __future__ import annotations

import gzip
import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

from tests.example_counts import scaled
from tests.server.api import Api, data_url, events, image_part, running_api
from tests.server.running import png
from tests.server.scripted import write_adapter
from tests.server.test_grammars import COUNT, STOP, call
from vlora.client.values import sampling_params
from vlora.errors import BadRequest
from vlora.server.http import server as http_server
from vlora.server.http.operator_routes import ROWS
from vlora.wording import json_errors, msgspec_errors, pydantic_errors, yaml_errors
from vlora.wording.shown import shown

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
IMAGE = data_url(png(250))
ADAPTERS: dict[str, dict[str, int]] = {
    "cam": {"night": 1, "motion": 4},
    "one": {"night": 1},
    "tasks": {"classification": 1, "counting": 1, "multi_label": 1, "regression": 1, "detection": 2},
}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    limits: dict[str, Any] = {"max_message_bytes": 200_000, "max_image_bytes": 50_000, "image_hosts": ("*",)}
    folder = str(tmp_path_factory.mktemp("pictures"))
    with running_api(adapters=ADAPTERS, image_folder=folder, **limits) as made:
        yield made


@pytest.fixture(autouse=True)
def is_alive(api: Api) -> Iterator[None]:
    yield
    assert api.idle() and api.chat("say:alive")[0] == 200


def complete(api: Api, prompt: Any, **fields: Any) -> tuple[int, Any]:
    return api.call("POST", TEXT, {"model": "base", "prompt": prompt, **fields})


def test_health_models_and_other_routes(api: Api) -> None:
    assert api.call("GET", "/health") == (200, {"status": "ok", "model": "base"})
    assert api.call("HEAD", "/ready") == api.call("HEAD", "/health") == (200, "")
    listed = api.call("GET", "/v1/models")[1]["data"]
    domains = {head: "one" if head == "night" else name for name, heads in ADAPTERS.items() for head in heads}
    parents = [("base", None), *((name, "base") for name in ADAPTERS), *domains.items()]
    assert sorted((each["id"], each["parent"]) for each in listed[1:]) == sorted(parents[1:])
    assert api.call("GET", "/v1/models/one")[1]["root"] == "base" and api.call("GET", "/v1/models/absent")[0] == 404
    status, answer = api.call("GET", "/nowhere")
    assert status == 404 and answer["error"]["message"].startswith("there is no route '/nowhere'; the API is under /v1")
    status, answer = api.call("GET", CHAT)
    assert (status, answer["error"]["message"]) == (405, f"GET is not allowed for '{CHAT}'; use POST")
    for path in ("/v1/adapters/..", "/v1/adapters/../../etc", "/v1/adapters/..%2f..%2fetc/pin", "/v1/models/..%2fx"):
        for method in ("GET", "PUT", "DELETE"):
            assert api.call(method, path)[0] in (400, 404, 405), "a path is no adapter's name"


def test_readiness_and_names_with_a_slash() -> None:
    rpyc = SimpleNamespace(listening=True)
    with running_api(model="Someone/Model-2B", rpyc_listens=lambda: rpyc.listening) as api:
        for path in ("/v1/models/Someone/Model-2B", "/v1/models/Someone%2FModel-2B"):
            assert api.call("GET", path)[1]["id"] == "Someone/Model-2B"
        assert api.call("GET", "/ready") == (200, {"status": "ready"})
        rpyc.listening = False
        assert api.call("GET", "/ready") == (503, {"status": "rpyc takes no connections"})
        rpyc.listening = True
        api.on_loop(api.front_end.drain())
        assert api.call("GET", "/ready") == (503, {"status": "draining"})
        status, answer = api.chat("say:x", model="Someone/Model-2B")
        assert status == 429 and answer["error"]["type"] == "rate_limit_error" and api.call("GET", "/health")[0] == 200


def test_answers_have_the_form_of_openai(api: Api) -> None:
    status, answer = api.chat([{"type": "text", "text": "say:grün"}, image_part(png())], model="cam", max_tokens=20)
    assert (status, answer["object"], answer["model"]) == (200, "chat.completion", "cam")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "grün"} and choice["finish_reason"] == "stop"
    counts = {"prompt_tokens": 10, "completion_tokens": 6, "total_tokens": 16}
    assert answer["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0, "adapter_tokens": 0}}
    assert api.chat("forever", max_completion_tokens=3)[1]["choices"][0]["finish_reason"] == "length"
    assert api.chat("say:x", model="one + 0.5*cam")[1]["model"] == "one + 0.5*cam"
    status, answer = complete(api, "say:abc")
    assert (status, answer["object"], answer["id"][:5]) == (200, "text_completion", "cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop"}]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (7, 4)


def test_choices_are_generated_concurrently_and_fail_together(api: Api) -> None:
    status, answer = api.chat("say:grün", n=3)
    assert status == 200 and [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"grün"}
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (9, 18)
    _, text = api.chat("say:grün", n=2, stream=True, stream_options={"include_usage": True})
    *chunks, usage = events(text)
    assert len({chunk["id"] for chunk in (*chunks, usage)}) == 1 and usage["choices"] == []
    for index in range(2):
        first, *mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert [choice["delta"].get("content") for choice in mine] == ["g", "r", "ü", "n", None]
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]
    assert usage["usage"]["completion_tokens"] == 12
    assert api.chat("fail", n=4)[1]["error"]["code"] == "step_failed" and api.idle()
    status, answer = complete(api, ["say:a", "say:bb"], n=2)
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [(0, "a"), (1, "a"), (2, "bb"), (3, "bb")]
    # Each prompt counts once, plus each choice's tokens.
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5 + 6, 2 + 2 + 3 + 3)


def test_prompts_of_text_completions(api: Api) -> None:
    ids = list(b"say:ok")  # used unchanged
    for prompt, texts in ((ids, ["ok"]), ([ids, ids], ["ok"] * 2), ("  ", ["yes"])):
        status, answer = complete(api, prompt)
        assert status == 200 and [each["text"] for each in answer["choices"]] == texts
    assert complete(api, "say:x", echo=True)[1]["choices"][0]["text"] == "say:xx"
    text = complete(api, "say:x", echo=True, stream=True)[1]
    assert "".join(each["choices"][0]["text"] for each in events(text)) == "say:xx"
    answer = complete(api, "forever")[1]
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("ask", [complete, Api.chat], ids=["text", "chat"])
def test_a_stream_has_running_token_counts(api: Api, ask: Callable[..., tuple[int, Any]]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    status, text = ask(api, "say:abc", stream=True, stream_options=options)
    counts = [each["usage"]["completion_tokens"] for each in events(text)]
    assert status == 200 and counts == sorted(counts) and counts[-1] == 4 and {1, 2, 3} <= set(counts)
    assert {each["usage"]["prompt_tokens"] for each in events(text)[1:]} == {7}
    assert not any("usage" in each for each in events(ask(api, "say:abc", stream=True)[1]))


def test_running_token_counts_of_several_prompts(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = complete(api, ["say:a", "say:bb"], n=2, stream=True, stream_options=options)[1]
    *_, last, total = (each["usage"]["prompt_tokens"] for each in events(text))
    assert last == total == 5 + 6


@pytest.mark.parametrize("tools", [[], [STOP]], ids=["no tools", "tools"])
def test_an_image_without_text_gets_the_adapters_question(api: Api, tools: list[Any]) -> None:
    counts = [
        api.chat([*text, image_part(png())], model="one", tools=tools, answer="words")[1]["usage"]["prompt_tokens"]
        for text in ([], [{"type": "text", "text": " "}], [{"type": "text", "text": "is it night?"}])
    ]
    assert counts[0] == counts[2] == counts[1] - 1


def test_every_task_has_its_own_response_fields(api: Api) -> None:
    pictures = [png(255, (80, 40)), png(255, (10, 20))]
    common = {"adapter", "head", "task", "label", "confidence", "total_s"}
    scores = {"scores": {"dark": 0.0, "bright": 1.0}}
    # From -0.1 to 0.5 of the width (10 pixels), from 0.25 to 1.5 of the height (20): clipped to the second image.
    box = {"left": 0.0, "right": 5.0, "top": 5.0, "bottom": 20.0, "image": 1}
    own: dict[str, dict[str, Any]] = {
        "classification": {"label_id": 1, **scores},
        "counting": {"count": 1, **scores},
        "multi_label": {"chosen": ["bright"], **scores},
        "regression": {"values": {"dark": 1.0, "bright": 1.0}, "deviations": {"dark": 0.1, "bright": 0.2}},
        "detection": {"boxes": [{"label": "bright", "label_id": 1, "score": 1.0, **box}]},
    }
    for task, fields in own.items():
        images = list(map(data_url, pictures if task == "detection" else pictures[:1]))
        status, answer = api.call("POST", f"/v1/heads/tasks/{task}", {"images": images})
        assert status == 200 and answer["task"] == task and answer["label"] == "bright"
        assert {name: answer[name] for name in answer.keys() - common} == fields
    with api.client() as client:
        (found,) = client.ask_head(pictures, "tasks", "detection").boxes
        values = client.ask_head(pictures[:1], "tasks", "regression")
    assert {name: getattr(found, name) for name in box} == box and values.deviations == (0.1, 0.2)


def test_fields_that_change_nothing_are_accepted(api: Api) -> None:
    nothing: dict[str, Any] = dict.fromkeys(("stop", "stream_options", "seed", "max_latency_s", "priority"))
    nothing |= {"user": "me", "metadata": {"a": "b"}, "frequency_penalty": 0.0, "logit_bias": {}, "tools": []}
    nothing |= {"tool_choice": "auto", "response_format": {"type": "text"}, "top_logprobs": 0, "stop": ["x" * 1000]}
    assert api.chat("say:fine", **nothing)[0] == 200
    # As copied from answers.
    empty = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
    messages = [
        {"role": "user", "content": "say:x", "name": "bob"},
        {"role": "assistant", "content": "x", **empty},
        {"role": "user", "content": [{"type": "text", "text": "say:y", "cache_control": None}]},
    ]
    assert api.chat("", messages=messages)[0] == 200
    assert api.chat("say:x", stream=True, stream_options={"include_obfuscation": False})[0] == 200


def test_a_response_format_reaches_the_engine_as_a_grammar(api: Api) -> None:
    """The scripted engine answers `grammar:` and the grammar of the request."""
    schema = {"type": "object", "properties": {"a": {"const": "\ud800"}}, "x-guidance": {"lenient": True}}
    for form, part in (
        ({"type": "json_object"}, 'start: / ?/ value\nvalue: %json {"type": "object", "x-guidance": {'),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}, '"const": "\\ud800"'),
        ({"type": "json_schema", "json_schema": {"schema": schema}}, '"lenient": false'),
        ({"type": "text"}, "grammar:None"),
    ):
        status, answer = api.chat("grammar", response_format=form, max_tokens=2000)
        assert status == 200 and part in answer["choices"][0]["message"]["content"], answer


def test_calls_of_tools_have_the_form_of_openai(api: Api) -> None:
    def ask(text: str, **fields: Any) -> Any:
        # The script is the end of the prompt, after the declared tools.
        return api.chat(f"say:{text}", **{"tools": [COUNT, STOP], "max_tokens": 500, **fields})[1]

    two = f"I look.\n{call('count', what='é')}\n{call('stop')}"
    (choice,) = ask(two)["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I look."
    first, second = choice["message"]["tool_calls"]
    assert first["type"] == "function" and first["id"] != second["id"]
    assert (first["function"]["name"], json.loads(first["function"]["arguments"])) == ("count", {"what": "é"})
    assert second["function"] == {"name": "stop", "arguments": "{}"}
    message = ask(call("stop"))["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1
    plain = ask("no car")["choices"][0]
    assert plain["finish_reason"] == "stop" and plain["message"] == {"role": "assistant", "content": "no car"}
    cut = ask(call("stop"), max_tokens=20)["choices"][0]
    assert cut["finish_reason"] == "length" and cut["message"]["content"] == call("stop")[:20]
    # A stream sends each call as a whole.
    chunks = [each["choices"][0] for each in events(ask(two, stream=True))]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "I look."
    calls = [made for chunk in chunks for made in chunk["delta"].get("tool_calls", ())]
    assert [(made["index"], made["function"]["name"]) for made in calls] == [(0, "count"), (1, "stop")]
    assert chunks[-1]["finish_reason"] == "tool_calls"
    # Tools are in the prompt unless none may be called, and so are results.
    counts = [ask("x", tool_choice=each)["usage"]["prompt_tokens"] for each in ("auto", "required", "none")]
    assert counts[0] == counts[1] > counts[2] + 100
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "say:stopped"}
    assert api.chat("", messages=[{"role": "user", "content": "stop"}, message, result], tools=[STOP])[0] == 200


def form(**fields: Any) -> dict[str, Any]:
    return {"response_format": fields}


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def called(arguments: str) -> dict[str, Any]:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    return {"messages": [{"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "x"}]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


DEEP = '{"items": ' * 400 + "{}" + "}" * 400
IN_PART, PARAMETERS, TOOLS = "messages.0.content.0", "tools.0.function.parameters", {"tools": [COUNT, STOP]}
# Fields of a chat, the field that the error names, and the begin of its message.
CHAT_FIELDS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"stop": ["a"] * 17}, "stop", "stop has 17 items; at most 16 are allowed"),
    ({"stop": [1]}, "stop.0", "stop.0 is 1; it must be a string"),
    ({"stop": 1}, "stop", "stop is 1; it must be a string or a list"),
    ({"stop": ["a" * 10_000]}, "stop", "a stop string has 10000 characters"),
    (user([{"type": "audio"}]), IN_PART, f"{IN_PART} has type 'audio'; choose one of 'text', 'image_url'"),
    (user(1), "messages.0.content", "messages.0.content is 1; it must be a string or a list"),
    (user([{"type": "image_url", "image_url": "data:,"}]), f"{IN_PART}.image_url", f"{IN_PART}.image_url is 'data:"),
    (user([{"type": "text", "text": "x", "size": 1}]), f"{IN_PART}.size", f"{IN_PART}.size: this field is not supp"),
    (user([{"text": "x"}]), IN_PART, f"{IN_PART} has no"),
    (user([{"type": "text", "text": "x"}, image_part(b"")]), None, "image 1 is empty"),
    (user(" "), "messages", "the prompt is empty"),
    ({"messages": []}, "messages", "messages has 0 items; it must have at least 1"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "messages.0.role is 'robot'"),
    ({"messages": [{"role": "user"}]}, "messages.0", "messages.0: a message has no content"),
    ({"tool_choice": "maybe"}, "tool_choice", "tool_choice is 'maybe'; it must be 'none', 'auto' or 'required', or an"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "tool_choice.function is missing"),
    ({"seed": float("nan")}, "seed", "seed is nan; it must be a finite number"),
    ({"stream": 7}, "stream", "stream is 7; it must be true or false"),
    ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation", "stream"),
    ({"logit_bias": {"7": "b"}}, "logit_bias.7", "logit_bias.7 is 'b'; it must be a number"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias has key 'a'; keys are token ids"),
    ({"body": 1}, "body", "body: this field is not supported"),
    ({"functions": [{"name": "f"}]}, "functions", "functions: this field is not supported; use tools"),
    ({"best_of": 2}, "best_of", "best_of: this field is not supported; use n"),
    ({"suffix": "y"}, "suffix", "suffix: this field is not supported; text is completed at"),
    ({"n": 17}, "n", "n is 17; it must be at most 16"),
    ({"max_tokens": 10**30}, "max_tokens", f"max_tokens is {10**30}; it must be at most 2147483647"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens is -1; it must be"),
    ({"temperature": -0.5}, "temperature", "temperature is -0.5; it must be a finite number"),
    ({"top_p": 1.5}, "top_p", "top_p is 1.5; it must be above 0 and at most 1"),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs: requires logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs"),
    ({"max_latency_s": 0}, "max_latency_s", "max_latency_s is 0; it must be above 0"),
    ({"priority": 0.5}, "priority", "priority"),
    ({"model": "absent"}, "model", "no adapter named 'absent'"),
    ({"model": {}}, "model", "composition '' is invalid: it names no adapter"),
    ({"model": {"cam": None}}, "model", "composition 'cam' is invalid: the weight of 'cam' is of type NoneType"),
    ({"model": 5}, "model", "model"),
    ({"model": [["cam", 1]]}, "model", "model"),
    (form(type="xml"), "response_format.type", "response_format.type is 'xml'; choose 'text', "),
    (form(type="json_schema"), "response_format", "response_format: type 'json_schema' requires {'json_schema': {'na"),
    (form(type="json_schema", json_schema={"schema": "x"}), "response_format", "response_format: type 'json_schema' "),
    (form(type="json_schema", json_schema={"schema": {}, "\ud800": 1}), "response_format", "response_format: json_s"),
    (form(type="json_object", json_schema={"schema": {}}), "response_format", "response_format"),
    (form(type="json_schema", json_schema={"schema": {"enum": ["x" * 70_000]}}), "response_format", "response_format"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0.type", "tools.0.type"),
    (tool(name="a b"), "tools.0.function.name", "tools.0.function.name"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "tool_choice requires a call, but there are no tools"),
    ({**TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "tool_choice is 'f'; d"),
    ({**TOOLS, **form(type="json_object")}, "response_format", "response_format and tools cannot be combined"),
    ({**TOOLS, "min_tokens": 1}, "min_tokens", "min_tokens cannot be combined with a grammar"),
    ({**TOOLS, **called("{")}, "messages", "arguments of the call of 'f' are not a JSON object"),
    ({**TOOLS, **called(DEEP)}, "messages", "messages: more than 100 levels of nested arrays and objects"),
    ({**TOOLS, **called("[" * 100_000)}, "messages", "messages: more than 100 levels of nested arrays and objects"),
    (tool(parameters=json.loads(DEEP)), "tools", "tools: more than 100 levels"),
    (tool(parameters={"type": "array"}), PARAMETERS, f"{PARAMETERS}: has type 'array'; arguments are an object"),
]
TEXT_FIELDS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": ""}, "prompt", "the prompt is empty"),
    ({"prompt": []}, "prompt", "prompt has 0 entries; send 1 to 64"),
    ({"prompt": ["a"] * 65}, "prompt", "prompt has 65 entries; send 1 to 64"),
    ({"prompt": [1, "a"]}, "prompt", "prompt has 1; send a text, a list of texts, token ids"),
    ({"prompt": 5}, "prompt", "prompt has 5; send a text, a list of texts, token ids"),
    ({"prompt": {"a": 1}}, "prompt", "prompt has {'a': 1}; send"),
    ({"prompt": [[1, True]]}, "prompt", "prompt has [1, True]; send"),
    ({"prompt": [5], "echo": True}, "echo", "echo is supported for text prompts only"),
    ({"echo": True, "logprobs": 1}, "echo", "echo and logprobs cannot be combined"),
    ({"model": {"cam+one": 1}}, "model", "composition 'cam+one' is invalid"),
]


RESPONSE_FIELDS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"input": []}, "input", "input has 0 items; it must have at least 1"),
    ({"input": " "}, "input", "the prompt is empty"),
    ({"input": [{"type": "function_call"}]}, "input.0.type", "input.0.type is 'function_call'"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0", "input.0.content.0 has"),
    (
        {"previous_response_id": "r"},
        "previous_response_id",
        "previous_response_id: this field is not supported; send the",
    ),
    ({"conversation": "c"}, "conversation", "conversation: this field is not supported; send the whole"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools: this field is not supported; use /v1/chat/completions"),
    ({"max_tokens": 5}, "max_tokens", "max_tokens: this field is not supported"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0; it must be at least 1"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text.format has no type 'text'"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        "text",
        "response_format: type 'json_schema' requires",
    ),
    ({"model": "absent"}, "model", "no adapter named 'absent'"),
]


LIBRARIES = ("Input should", "should have", "Expected `", "valid ", "Unable to", "Object ", "$.", "required field")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_errors_name_the_field(api: Api, stream: bool) -> None:
    for path, needed, rows in (
        (CHAT, user("say:x"), CHAT_FIELDS),
        (TEXT, {"prompt": "say:x"}, TEXT_FIELDS),
        ("/v1/responses", {"input": "say:x"}, RESPONSE_FIELDS),
    ):
        for fields, param, message in rows:
            body = {"model": "base", "stream": stream, **needed, **fields}
            status, answer = api.call("POST", path, body)
            assert status in (400, 404), (fields, answer)
            error = answer["error"]
            assert error["message"].startswith(message) and error["param"] == param, (fields, answer)
            assert error["type"] == "invalid_request_error", answer
            assert not any(theirs in error["message"] for theirs in LIBRARIES), answer


def respond(api: Api, said: Any, **fields: Any) -> Any:
    return api.call("POST", "/v1/responses", {"model": "base", "input": said, **fields})[1]


def test_responses_are_answers_without_state(api: Api) -> None:
    answer = respond(api, "say:grün", instructions="", temperature=0.5, store=True, tools=[])
    assert (answer["object"], answer["status"], answer["temperature"]) == ("response", "completed", 0.5)
    (item,) = answer["output"]
    assert item["content"] == [{"type": "output_text", "text": "grün", "annotations": [], "logprobs": []}]
    assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == (9, 6)
    picture = {"role": "user", "content": [{"type": "input_image", "image_url": IMAGE, "detail": "auto"}]}
    text = {"role": "user", "content": [{"type": "input_text", "text": "say:next"}]}
    assert respond(api, [picture, item, text])["output"][0]["content"][0]["text"] == "next"
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object", "title": "sign"}, "strict": True}
    assert '"title": "sign"' in str(respond(api, "grammar", text={"format": form}, max_output_tokens=2000)["output"])
    cut = respond(api, "forever", max_output_tokens=3)
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    head = respond(api, [picture], model="night")
    assert head["output"][0]["content"][0]["text"] == "bright" and head["answered_by"] == "head"
    found = events(respond(api, "say:grün", stream=True))
    assert [each["sequence_number"] for each in found] == list(range(12))
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == "".join(each.get("delta", "") for each in found)


def test_adapters_are_loaded_and_unloaded_by_the_calls_of_vllm(api: Api, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "lora", {"rain": 1})
    load, unload, gone = {"lora_name": "lora", "lora_path": path}, {"lora_name": "lora"}, {"lora_name": "x{y}"}
    for what, body, status, message in (
        ("load", load, 200, "Success: LoRA adapter 'lora' added successfully."),
        ("load", load, 400, "The lora adapter 'lora' has already been loaded. If you want to load the adapter in"),
        ("load", {**load, "load_inplace": True}, 200, "Success: LoRA adapter 'lora' added successfully."),
        ("load", {"lora_name": "y", "lora_path": str(tmp_path)}, 400, f"{tmp_path}: no adapter_config.json"),
        ("load", unload, 400, "lora_path is missing"),
        ("load", {**load, "is_3d_lora_weight": True}, 400, "is_3d_lora_weight: this field is not supported"),
        ("unload", {**unload, "lora_int_id": 7}, 200, "Success: LoRA adapter 'lora' removed successfully."),
        ("unload", gone, 404, "no adapter named 'x{y}'"),
        ("unload", {}, 400, "lora_name is missing"),
    ):
        found, answer = api.call("POST", f"/v1/{what}_lora_adapter", body)
        text = answer if isinstance(answer, str) else answer["error"]["message"]
        assert found == status and text.startswith(message), answer


NO_NUMBER = 'replicas: it must be a whole number, or "auto"'


@pytest.mark.parametrize(
    ("method", "path", "body", "message"),
    [
        ("POST", "heads/cam/rain", {"images": [IMAGE]}, "adapter 'cam' has no head 'rain'; its heads: night, motion"),
        ("POST", "heads/cam/night", {"images": []}, "images has 0 items; it must have at least 1"),
        ("POST", "heads/cam/night", {"images": [IMAGE], "priority": 11}, "priority is 11; it must be at most 10"),
        ("POST", "heads/cam/night", {"images": [IMAGE], "question": "?"}, "question: this field is not supported"),
        ("POST", "heads", {"images": [IMAGE], "heads": []}, "heads has 0 items; it must have at least 1"),
        ("POST", "heads", {"images": [IMAGE], "heads": ["cam/night"]}, "heads.0"),
        ("POST", "heads", {"images": [IMAGE], "heads": [{"head": "night"}]}, "heads.0.adapter"),
        ("POST", "heads", {"heads": [{"adapter": "cam", "head": "night"}]}, "images"),
        ("POST", "trainings", {"path": "/plans/signs"}, "plan is missing"),
        ("DELETE", "adapters/one?drain=perhaps", None, "query.drain"),
        *(("PUT", "cluster/scale", {"replicas": each}, NO_NUMBER) for each in ("two", True, 1.5)),
        ("PUT", "cluster/scale", {}, "replicas is missing"),
        ("PUT", "cluster/scale", {"replicas": 2, "max": 3}, "max: this field is not supported"),
        ("PUT", "cluster/scale?wait_s=31", {"replicas": 2}, "query.wait_s is '31'; it must be at most 30"),
        ("PUT", "cluster/scale?wait_s=nan", {"replicas": 2}, "query.wait_s is 'nan'; it must be a finite number"),
        ("PUT", "cluster/replicas/a/drain?wait_s=-1", None, "query.wait_s is '-1'; it must be at least 0"),
    ],
)
def test_errors_of_other_routes(api: Api, method: str, path: str, body: Any, message: str) -> None:
    status, answer = api.call(method, f"/v1/{path}", body)
    assert status in (400, 404) and message in answer["error"]["message"], answer


NOT_JSON = "the body is not JSON: it is not UTF-8 text, or it is compressed"
ASK = b'{"model": "base", "messages": [{"role": "user", "content": "say:x"}], '
BODIES: dict[str, tuple[bytes, str]] = {
    "cut": (b"{", "the body is not JSON: a field's name in double quotes is expected at character 1"),
    "not UTF-8": (b"\xff\xfe", "the body is not JSON"),
    "empty": (b"", "the body is empty; send a JSON object"),
    "deep": (b'{"a":' * 30_000, "the body cannot be parsed: it is nested too deeply or contains a number that is too"),
    "deep list": (b"[" * 100_000, "the body "),
    "long number": (ASK + b'"seed": ' + b"9" * 10_000 + b"}", "the body cannot be parsed: "),
    "list": (b"[]", "the body is not a JSON object"),
    "null": (b"null", "the body is not a JSON object"),
    "text": (b'"text"', "the body is not a JSON object"),
    "Latin-1": ('{"model": "grün"}'.encode("latin-1"), NOT_JSON),
    "compressed": (gzip.compress(b"{}", mtime=0), NOT_JSON),
    "control character": (b'{"model": "a\0"}', "the body is not JSON: a control character in a string; write it with"),
    "surrogate": (b'{"model": "base", "messages": [{"role": "user", "content": "\\ud800"}]}', ""),
    "surrogate in a name": (b'{"model": "\\ud800", "messages": [{"role": "user", "content": "say:x"}]}', ""),
    "surrogate in a field": (ASK + b'"\\ud800": 1}', ""),
    "not finite": (ASK + b'"temperature": NaN}', ""),
    "infinite": (ASK + b'"temperature": 1e999}', ""),
    "61 digits": (ASK + b'"max_tokens": 1' + b"0" * 60 + b"}", ""),
}


def test_an_invalid_body_is_refused_with_its_problem(api: Api) -> None:
    for name, (raw, message) in BODIES.items():
        status, answer = api.call("POST", CHAT, raw=raw)
        assert status in (400, 404) and answer["error"]["message"].startswith(message), (name, answer)
        assert not message or answer["error"]["param"] is None, name
    body = json.dumps({"model": "base", **user("say:x")}).encode()
    for kind, status in (("application/json; charset=utf-8", 200), ("text/plain", 400)):
        got, answer = api.call("POST", CHAT, raw=body, headers={"Content-Type": kind})
        assert got == status
    assert answer["error"]["message"] == "the body is not a JSON object; send one with Content-Type: application/json"


@pytest.mark.parametrize(
    ("length", "begin", "status", "message"),
    [
        (200_001, b"", 413, "the body exceeds this server's limit of 200000 bytes"),
        (150_000, b"x" * 70_000, 400, "the body is not a JSON object; the rest of it was not read"),
        (150_000, b" \n[" + b"x" * 70_000, 400, "the body is not a JSON object; the rest of it was not read"),
        (None, b"{" + b"x" * 50_000, 413, "the body exceeds this server's limit of 200000 bytes"),
    ],
)
def test_a_body_is_refused_before_all_of_it_is_received(
    api: Api, length: int | None, begin: bytes, status: int, message: str
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.http_port)
    if length is None:
        connection.request("POST", CHAT, iter([begin] * 10), encode_chunked=True)
    else:
        connection.putrequest("POST", CHAT)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(length))
        connection.endheaders(begin)
    response = connection.getresponse()
    assert response.status == status and json.loads(response.read())["error"]["message"] == message
    connection.close()


START = b'{"model": "base", "messages": [{"role": "user", "content": "x"}'
PARTS = b'{"model":"base","messages":[{"role":"user","content":['
LARGE_BODIES = {
    "numbers for messages": b'{"model": "base", "messages": [' + b"0," * 400_000 + b"0]}",
    "unknown fields": START + b"]," + b",".join(b'"%x": 0' % each for each in range(100_000)) + b"}",
    "fields of a message": START[:-1] + b",".join([b"", *(b'"%x":0' % each for each in range(99_999))]) + b"}]}",
    "messages": START + b',{"role": "user", "content": ""}' * 50_000 + b"]}",
    "numbers for parts": PARTS + b"0," * 400_000 + b"0]}]}",
    "parts": PARTS + b",".join([b'{"type":"text","text":""}'] * 50_000) + b"]}]}",
    "stop strings": START + b'], "stop": [' + b'"a",' * 400_000 + b'"a"]}',
    "commas": START + b'], "metadata": [' + b"{}," * 1_100_000 + b"{}]}",
}
MOST_CPU_S = 1.5  # of the server's thread for one body, which blocks all others meanwhile


def test_a_body_of_many_values_is_refused_quickly() -> None:
    """Bodies that are small on the wire and large in memory."""

    async def cpu_s() -> float:
        return time.thread_time()

    with running_api() as api:
        for name, body in LARGE_BODIES.items():
            began_s = api.on_loop(cpu_s())
            status, answer = api.call("POST", CHAT, raw=body)
            assert status in (400, 413) and len(answer["error"]["message"]) < 1000, name
            assert api.on_loop(cpu_s()) - began_s < MOST_CPU_S, name


LINES = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NOWHERE = LINES.replace(b"chat/completions", b"nowhere")
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
LONG = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000


@pytest.mark.parametrize(
    ("parts", "statuses"),
    [
        ((b"hello\r\n\r\n",), [400]),
        ((LONG,), [400]),
        ((LONG, b"x" * 200_000, b"x" * 10), [400]),
        ((LINES + CHUNKED + b"5\r\n{'a':\r\nzz\r\n",), [400]),
        ((LINES + CHUNKED, b"5\r\n{'a':\r\n", b"zz\r\n"), [400]),
        ((NOWHERE + CHUNKED + b"zz\r\n",), [400]),
        ((NOWHERE + CHUNKED, b"zz\r\n"), [404]),
        ((LINES + b"Content-Length: 100\r\n\r\n{",), []),
        ((LINES + CHUNKED, b"1\r\n{\r\n"), []),
    ],
)
def test_invalid_or_truncated_http_is_no_server_error(
    api: Api, parts: tuple[bytes, ...], statuses: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", api.http_port)) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.05)  # so that it arrives alone
        if not statuses:
            connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", received)] == statuses
    if statuses:
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_request"
    assert [record.getMessage() for record in caplog.records] == []


def test_small_packets_are_sent_without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each response of two packets waits 40 ms for the caller's acknowledgement."""
    options: list[int] = []
    made = http_server.BoundedProtocol.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        options.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    monkeypatch.setattr(http_server.BoundedProtocol, "connection_made", connection_made)
    with running_api() as api:
        assert api.call("GET", "/health")[0] == 200
    assert options == [1]


NAMES = (
    *("adapters", "load_adapter", "upload_adapter", "unload_adapter", "pin_adapter", "unpin_adapter"),
    *("trainings", "train", "cancel_training", "correct", "statuses", "promote", "roll_back"),
    *("status", "scale", "drain", "resume", "load_lora_adapter", "unload_lora_adapter"),
    *("cameras", "get_frame", "add_camera", "change_camera", "remove_camera"),
)
"""Of the operator's routes in the OpenAPI document, in the order of `ROWS`; clients are generated from them."""


def test_operator_routes_keep_their_operation_ids_and_have_summaries_of_words(api: Api) -> None:
    paths = api.call("GET", "/openapi.json")[1]["paths"]
    for row, name in zip(ROWS, NAMES, strict=True):
        described = paths[row.path][row.method.lower()]
        place = re.sub(r"\W", "_", row.path)
        assert described["operationId"] == f"{name}{place}_{row.method.lower()}"
        assert described["summary"] == name.replace("_", " ").title() and described["description"].endswith(".")
    assert paths["/v1/adapters/{name}/pin"]["delete"]["description"].startswith("Unpin")
    assert "202" in paths["/v1/cluster/scale"]["put"]["description"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_of_the_openapi_document_is_answered_with_500(api: Api, mode: GenerationMode) -> None:
    document = schemathesis.openapi.from_url(f"{api.url}/openapi.json")
    results = list(document.get_all_operations())
    operations = [result.ok() for result in results if isinstance(result, Ok)]
    assert len(operations) == len(results) >= 12
    few: dict[str, Any] = {"max_examples": scaled(8), "phases": [Phase.explicit, Phase.generate]}
    for operation in operations:
        if mode.is_negative and not operation.body:
            continue  # names in paths may be anything

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(suppress_health_check=list(HealthCheck), **few)
        def send(case: Any) -> None:
            case.call_and_validate(checks=(not_a_server_error,), timeout=60)

        send()


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    secret: str
    count: int = 0


PYDANTIC: list[tuple[dict[str, Any], str]] = [
    ({"type": "less_than_equal", "ctx": {"le": 0.5}, "input": 1}, "is 1; it must be at most 0.5"),
    ({"type": "too_long", "ctx": {"max_length": 3, "actual_length": None}, "input": [1]}, "has more than 3 items;"),
    ({"type": "string_too_short", "ctx": {"min_length": 1}, "input": ""}, "has 0 characters; it must have at leas"),
    ({"type": "int_type", "input": "x" * 100}, f"is '{'x' * 40}'...; it must be a whole number"),
    ({"type": "date_past", "input": None}, "is null, which is not accepted here"),
    ({"type": "json_invalid", "ctx": {"error": "expected value at line 2 column 3"}}, "is not JSON: see line 2, c"),
]
MSGSPEC: list[tuple[Any, str]] = [
    ({}, "the field 'secret' is missing"),
    ({"secret": "a", "other": 1}, "unknown field 'other'; check its spelling"),
    ({1: 2}, "a key of the object must be a string"),
    ({"secret": "a", "count": "much"}, "count is a string; it must be a whole number"),
    (None, "the value is null; it must be an object"),
]
SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"stop": [1]}, "stop[0] is 1; it must be a string"),
    ({"logit_bias": [[1]]}, "logit_bias[0] is a list of 1 item; it must be a list of 2 items"),
    ({"temperature": 10**400}, "temperature is out of range (a whole number of 1329 bits)"),
]


def test_errors_of_values_are_in_this_projects_words() -> None:
    for error, words in PYDANTIC:
        assert pydantic_errors.described(error).startswith(words)
    for value, words in MSGSPEC:
        with pytest.raises(msgspec.ValidationError) as invalid:
            msgspec.convert(value, Entry)
        assert msgspec_errors.described(invalid.value) == words
    for options, words in SAMPLING:  # over RPyC
        with pytest.raises(BadRequest) as caught:
            sampling_params(options)
        assert str(caught.value) == words and not any(theirs in words for theirs in LIBRARIES)
    values = {"true": True, "3 bytes": b"abc", "a list of 1 item": [1], "a list of 2 items": (1, 2)}
    assert list(map(shown, values.values())) == list(values)
    assert len(shown(10**5000)) < 50 and len(shown("\ud800" * 100)) < 300


def test_errors_of_yaml_and_json() -> None:
    for text, words in (
        ("a: 1\nb: c: d", "line 2: a second colon on one line"),
        ("a:\n\tb: 1", "line 2: a tab"),
        ("a: 'x", "line 1: a quote that is not closed"),
        ("- a\nb: c", "line 2: a line with indentation that matches no line above it"),
        ("a: @x", "line 1: text that begins with a reserved character"),
        ("a: !x 1", "line 1: a tag"),
        ("%", "line 1: unexpected text"),
        ("\0", "a character that is not allowed in YAML, at position 0"),
    ):
        with pytest.raises(yaml.YAMLError) as bad:
            yaml.safe_load(text)
        assert yaml_errors.described(bad.value).startswith(words)
    for text in ("", "{", '{"a" 1}', "[1 2]", "[1,]", "1 2", '"a', '"\\x"', '"\\u12"', '"\n"'):
        with pytest.raises(json.JSONDecodeError) as caught:
            json.loads(text)
        words = json_errors.described(caught.value)
        assert words.startswith("line 1, column ") and "text that is not JSON" not in words, caught.value.msg
