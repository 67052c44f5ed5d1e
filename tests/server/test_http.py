"""The HTTP API over a scripted engine, through real sockets."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.api import Api, events, image_part, running_api
from tests.server.running import png
from tests.server.scripted import write_adapter


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    adapters = {"cam": {"night": 1, "motion": 4}}
    with running_api(adapters=adapters, max_message_bytes=200_000, max_image_bytes=50_000) as made:
        yield made


def asked_with(url: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "say:x"}, {"type": "image_url", "image_url": {"url": url}}]


def test_health_and_models(api: Api) -> None:
    assert api.call("GET", "/health") == (200, {"status": "ok", "model": "base"})
    status, listed = api.call("GET", "/v1/models")
    assert status == 200 and [(each["id"], each["parent"], each["root"]) for each in listed["data"]] == [
        ("base", None, "base"),
        ("cam", "base", "base"),
    ]


def test_model_names_may_contain_a_slash() -> None:
    with running_api(model="Someone/Model-2B") as api:
        for path in ("/v1/models/Someone/Model-2B", "/v1/models/Someone%2FModel-2B"):
            assert api.call("GET", path)[1]["id"] == "Someone/Model-2B"
        assert api.chat("say:x", model="Someone/Model-2B")[0] == 200


def test_a_complete_answer(api: Api) -> None:
    status, answer = api.chat([{"type": "text", "text": "say:grün"}, image_part(png())], model="cam", max_tokens=20)
    assert status == 200 and answer["object"] == "chat.completion" and answer["model"] == "cam"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "grün"} and choice["finish_reason"] == "stop"
    details = {"cached_tokens": 0, "adapter_tokens": 0}
    assert answer["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 6,
        "total_tokens": 16,
        "prompt_tokens_details": details,
    }
    assert api.chat("say:a.b", stop=".")[1]["choices"][0]["message"]["content"] == "a"
    assert api.chat("forever", max_completion_tokens=3)[1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "f"}}]])
def test_an_image_without_text_gets_the_adapters_question(api: Api, tmp_path: Path, tools: list[Any]) -> None:
    api.on_loop(api.front_end.adapters.load("one", write_adapter(tmp_path / "one", {"night": 1})))
    answers = [
        api.chat([*text, image_part(png())], model="one", tools=tools)[1]
        for text in ([], [{"type": "text", "text": " "}], [{"type": "text", "text": "is it night?"}])
    ]
    counts = [answer["usage"]["prompt_tokens"] for answer in answers]
    assert counts[0] == counts[2] == counts[1] - 1
    api.on_loop(api.front_end.adapters.unload("one"))


def test_a_streamed_answer(api: Api) -> None:
    status, text = api.chat("say:grün", stream=True, stream_options={"include_usage": True})
    first, *pieces, last, usage = events(text)
    assert status == 200 and first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [piece["choices"][0]["delta"]["content"] for piece in pieces] == ["g", "r", "ü", "n"]
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6
    assert len({chunk["id"] for chunk in (first, *pieces, last, usage)}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("content", "fields", "status", "code", "message"),
    [
        ("say:x", {"model": "absent"}, 404, "unknown_adapter", "no adapter named 'absent'; registered: cam"),
        ("", {}, 400, "bad_request", "the prompt is empty"),
        ("say:x", {"max_tokens": 0}, 400, "bad_request", "max_tokens is 0"),
        ("say:x", {"max_tokens": 10**6}, 400, "prompt_too_long", "tokens and up to 1000000 output tokens"),
        ("say:x", {"temperature": -1}, 400, "bad_request", "temperature is -1"),
        ("say:x", {"n": 17}, 400, "bad_request", "n is 17; it must be at most 16"),
        ("say:x", {"suffix": "y"}, 400, "bad_request", "suffix: this field is not supported; text is completed at"),
        ("say:x", {"logit_bias": {"a": 1}}, 400, "bad_request", "logit_bias has key 'a'; keys are token ids"),
        ("say:x", {"logit_bias": {"9" * 99: 1}}, 400, "bad_request", "99'; keys are token ids"),
        ("say:x", {"min_tokens": 9, "max_tokens": 8}, 400, "bad_request", "min_tokens is 9; it must be between 0 and"),
        ("say:x", {"messages": []}, 400, "bad_request", "messages has 0 items"),
        ("say:x", {"messages": [{"role": "robot", "content": "x"}]}, 400, "bad_request", "messages.0.role is 'robot'"),
        (7, {}, 400, "bad_request", "messages.0.content"),
        ([{"type": "video"}], {}, 400, "bad_request", "messages.0.content"),
        ([image_part(b"broken")], {}, 400, "bad_image", "image 1 (6 bytes) is broken or not one of"),
        ([image_part(png())], {}, 400, "bad_request", "the prompt has images but no text, and the base model has no"),
        (
            [image_part(png())],
            {"model": "cam"},
            400,
            "bad_request",
            "adapter 'cam' has several questions: is it motion?, is it night?; send a question with the images",
        ),
        (
            [{"type": "text", "text": "say:x"}, image_part(b"broken")],
            {},
            400,
            "bad_image",
            "image 1 (6 bytes) is broken or not one of",
        ),
        (
            [{"type": "text", "text": "say:x"}, image_part(b"x" * 60_000)],
            {},
            413,
            "too_large",
            "image 1 has 60000 bytes",
        ),
        (
            asked_with("http://x/y.png"),
            {},
            400,
            "bad_request",
            "does not fetch images from 'x'",
        ),
        (
            asked_with("file:///etc/passwd"),
            {},
            400,
            "bad_request",
            "this server does not read files",
        ),
        (
            asked_with("data:;base64,*"),
            {},
            400,
            "bad_image",
            "image 1 is not base64",
        ),
        ("say:" + "x" * 300_000, {}, 413, "too_large", "the body exceeds this server's limit of 200000 bytes"),
        ("fail", {}, 500, "step_failed", "the script says fail"),
    ],
)
def test_errors_have_status_code_and_reason(
    api: Api, stream: bool, content: Any, fields: dict[str, Any], status: int, code: str, message: str
) -> None:
    got, answer = api.chat(content, stream=stream, **fields)
    assert got == status and answer["error"]["code"] == code and message in answer["error"]["message"], answer
    assert api.chat("say:fine")[0] == 200


def test_invalid_requests_are_refused(api: Api) -> None:
    assert api.call("POST", "/v1/chat/completions", raw=b"{not json")[1]["error"]["code"] == "bad_request"
    status, answer = api.call("GET", "/nowhere")
    assert status == 404 and answer["error"]["message"].startswith("there is no route '/nowhere'; the API is under /v1")
    status, answer = api.call("GET", "/v1/chat/completions")
    assert (status, answer["error"]["message"]) == (405, "GET is not allowed for '/v1/chat/completions'; use POST")
    status, answer = api.call("POST", "/v1/chat/completions", raw=b'"text"')
    assert status == 400 and answer["error"]["code"] == "bad_request"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{", "the body is not JSON: a field's name in double quotes is expected at character 1"),
        (b"\xff\xfe", "the body is not JSON"),
        (b"", "the body is empty; send a JSON object"),
        (b'{"a":' * 30_000, "the body cannot be parsed: it is nested too deeply or contains a number that is too long"),
        (b'{"model": "base", "seed": ' + b"9" * 10_000 + b"}", "the body cannot be parsed: "),
        (b"[]", "the body is not a JSON object"),
        ('{"model": "grün"}'.encode("latin-1"), "the body is not JSON: it is not UTF-8 text, or it is compressed"),
        (gzip.compress(b"{}", mtime=0), "the body is not JSON: it is not UTF-8 text, or it is compressed"),
        (
            b'{"model": "a\0"}',
            "the body is not JSON: a control character in a string; write it with a backslash at character 12",
        ),
    ],
)
def test_an_invalid_body_is_refused_with_its_problem(api: Api, raw: bytes, message: str) -> None:
    status, answer = api.call("POST", "/v1/chat/completions", raw=raw)
    assert status == 400 and answer["error"]["message"].startswith(message), answer
    assert answer["error"]["param"] is None


def test_the_content_type_must_be_json(api: Api) -> None:
    body = json.dumps({"model": "base", "messages": [{"role": "user", "content": "say:x"}]}).encode()
    for kind, status in (("application/json; charset=utf-8", 200), ("text/plain", 400)):
        got, answer = api.call("POST", "/v1/chat/completions", raw=body, headers={"Content-Type": kind})
        assert got == status
    assert answer["error"]["message"] == "the body is not a JSON object; send one with Content-Type: application/json"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"stop": ["a"] * 17}, "stop", "stop has 17 items; at most 16 are allowed"),
        ({"stop": [1]}, "stop.0", "stop.0 is 1; it must be a string"),
        ({"stop": 1}, "stop", "stop is 1; it must be a string or a list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            "messages.0.content.0",
            "messages.0.content.0 has type 'audio'; choose one of 'text', 'image_url'",
        ),
        (
            {"messages": [{"role": "user", "content": 1}]},
            "messages.0.content",
            "messages.0.content is 1; it must be a string or a list",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}]},
            "messages.0.content.0.image_url",
            "messages.0.content.0.image_url is 'data:,'; it must be an object",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "say:x", "size": 1}]}]},
            "messages.0.content.0.size",
            "messages.0.content.0.size: this field is not supported",
        ),
        (
            {"tool_choice": "maybe"},
            "tool_choice",
            "tool_choice is 'maybe'; it must be 'none', 'auto' or 'required', or an",
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "tool_choice.function is missing"),
        ({"seed": float("nan")}, "seed", "seed is nan; it must be a finite number"),
        ({"stream": 7}, "stream", "stream is 7; it must be true or false"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "response_format.type is 'xml'; choose 'text', ",
        ),
        ({"logit_bias": {"7": "b"}}, "logit_bias.7", "logit_bias.7 is 'b'; it must be a number"),
        ({"messages": []}, "messages", "messages has 0 items; it must have at least 1"),
        (
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            "messages.0.content.0",
            "messages.0.content.0 has no",
        ),
        ({"body": 1}, "body", "body: this field is not supported"),
        (
            {"max_tokens": 10**30},
            "max_tokens",
            "max_tokens is 1000000000000000000000000000000; it must be at most 2147483647",
        ),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be at least 1"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens is -1; it must be"),
        ({"temperature": -0.5}, "temperature", "temperature is -0.5; it must be a finite number"),
        ({"top_p": 0}, "top_p", "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p", "top_p is 1.5; it must be above 0 and at most 1"),
        ({"stop": ["a", ""]}, "stop", "stop contains an empty string"),
        ({"stop": ["a" * 10_000]}, "stop", "a stop string has 10000 characters"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs: requires logprobs"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "response_format: type 'json_schema' requires",
        ),
        ({"model": "absent"}, "model", "no adapter named 'absent'"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages", "the prompt is empty"),
    ],
)
def test_errors_of_a_union_field_name_the_field(api: Api, fields: dict[str, Any], param: str, message: str) -> None:
    body = {"model": "base", "messages": [{"role": "user", "content": "say:x"}], **fields}
    status, answer = api.call("POST", "/v1/chat/completions", body)
    assert status in (400, 404) and answer["error"]["message"].startswith(message), answer
    assert answer["error"]["param"] == param


def test_a_body_without_length_is_bounded_too(api: Api) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=10)
    connection.request("POST", "/v1/chat/completions", iter([b"{" + b"x" * 50_000] * 10), encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 413 and json.loads(response.read())["error"]["code"] == "too_large"
    connection.close()


@pytest.mark.parametrize(
    ("length", "begin", "status", "message"),
    [
        (200_001, b"", 413, "the body exceeds this server's limit of 200000 bytes"),
        (150_000, b"x" * 70_000, 400, "the body is not a JSON object; the rest of it was not read"),
        (150_000, b" \n[" + b"x" * 70_000, 400, "the body is not a JSON object; the rest of it was not read"),
    ],
)
def test_an_invalid_body_is_refused_before_all_of_it_is_received(
    api: Api, length: int, begin: bytes, status: int, message: str
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=10)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(length))
    connection.endheaders(begin)
    response = connection.getresponse()
    assert response.status == status and json.loads(response.read())["error"]["message"] == message
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnecting_client_frees_its_request(api: Api, stream: bool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=10)
    messages = [{"role": "user", "content": "forever"}]
    body = {"model": "base", "messages": messages, "max_tokens": 90_000, "stream": stream}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    if stream:
        assert connection.getresponse().read(10)
    while not api.engine.engine.running:
        time.sleep(0.01)
    assert connection.sock is not None or stream
    connection.close()
    assert api.idle()


def test_an_error_in_the_middle_of_a_stream_is_an_event(api: Api) -> None:
    with ThreadPoolExecutor(1) as threads:
        streaming = threads.submit(api.chat, "forever", model="cam", stream=True, max_tokens=90_000)
        while not api.engine.engine.running:
            time.sleep(0.01)
        time.sleep(0.05)
        (request_id,) = api.engine.engine.running
        # The result of a cancellation by the operator.
        output = api.engine.engine.cancel(request_id)
        assert output is not None
        api.engine.deliver(output)
        status, text = streaming.result(10)
    assert status == 200 and events(text)[-1]["error"]["code"] == "aborted"


CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NOWHERE = CHAT.replace(b"chat/completions", b"nowhere")
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "statuses"),
    [
        ((b"hello\r\n\r\n",), [400]),
        ((b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000,), [400]),
        ((b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000, b"x" * 200_000, b"x" * 10), [400]),
        ((CHAT + CHUNKED + b"5\r\n{'a':\r\nzz\r\n",), [400]),
        ((CHAT + CHUNKED, b"5\r\n{'a':\r\n", b"zz\r\n"), [400]),
        ((NOWHERE + CHUNKED + b"zz\r\n",), [400]),
        ((NOWHERE + CHUNKED, b"zz\r\n"), [404]),
        ((CHAT + b"Content-Length: 100\r\n\r\n{",), []),
        ((CHAT + CHUNKED, b"1\r\n{\r\n"), []),
    ],
)
def test_invalid_or_truncated_http_is_no_server_error(
    api: Api, parts: tuple[bytes, ...], statuses: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.05)
        if not statuses:
            connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", received)] == statuses
    if statuses:
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_request"
    assert api.chat("say:fine")[0] == 200
    assert [record.getMessage() for record in caplog.records] == []


def test_small_answers_are_sent_without_delay(api: Api) -> None:
    """On one connection, after its first packets; 40 ms is TCP's delayed acknowledgement."""
    times = []
    with httpx.Client(base_url=api.url) as client:
        for _ in range(40):
            started = time.monotonic()
            assert client.get("/health").status_code == 200
            times.append(time.monotonic() - started)
    assert min(times[20:]) < 0.035, times


def test_requests_are_answered_concurrently(api: Api) -> None:
    with ThreadPoolExecutor(16) as threads:
        texts = [
            answer[1]["choices"][0]["message"]["content"]
            for answer in threads.map(api.chat, map("say:{}".format, range(48)))
        ]
    assert texts == [str(i) for i in range(48)]


def test_several_choices_are_generated_concurrently(api: Api) -> None:
    status, answer = api.chat("say:grün", n=3)
    assert status == 200 and [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"grün"}
    usage = {key: answer["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert usage == {"prompt_tokens": 9, "completion_tokens": 18, "total_tokens": 27}
    _, text = api.chat("say:grün", n=2, stream=True, stream_options={"include_usage": True})
    *chunks, usage = events(text)
    for index in range(2):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "grün"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]
    assert usage["usage"]["completion_tokens"] == 12
    # One failed choice ends and frees all.
    assert api.chat("fail", n=4)[1]["error"]["code"] == "step_failed" and api.idle()


def test_fields_without_effect_are_accepted_and_unknown_ones_refused(api: Api) -> None:
    nothing = {
        "user": "me",
        "metadata": {"a": "b"},
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "stop": None,
        "stream_options": None,
        "seed": None,
    }
    assert api.chat("say:fine", **nothing)[0] == 200
    for name, value, instead in (
        ("functions", [{"name": "f"}], "; use tools"),
        ("best_of", 2, "; use n"),
        ("top_q", 5, ""),
    ):
        status, answer = api.chat("say:x", **{name: value})
        assert status == 400 and answer["error"] == {
            "message": f"{name}: this field is not supported{instead}",
            "type": "invalid_request_error",
            "code": "bad_request",
            "param": name,
        }
    assert "logprobs to true" in api.chat("say:x", top_logprobs=2)[1]["error"]["message"]
    assert api.chat("say:x", top_logprobs=0)[0] == 200
    assert api.chat("say:x", logprobs=True, top_logprobs=21)[1]["error"]["param"] == "top_logprobs"


def test_a_response_format_reaches_the_engine_as_a_grammar(api: Api) -> None:
    # The scripted engine answers `grammar:` and the grammar of the request.
    schema = {"type": "object", "properties": {"a": {"const": "\ud800"}}, "x-guidance": {"lenient": True}}
    for form, part in (
        ({"type": "json_object"}, 'start: / ?/ value\nvalue: %json {"type": "object", "x-guidance": {'),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}, '"const": "\\ud800"'),
        ({"type": "json_schema", "json_schema": {"schema": schema}}, '"lenient": false'),
        ({"type": "text"}, "grammar:None"),
    ):
        status, answer = api.chat("grammar", response_format=form, max_tokens=2000)
        assert status == 200 and part in answer["choices"][0]["message"]["content"], answer
    for form, message in (
        ({"type": "json_schema"}, "requires {'json_schema': {'name': ..., 'schema': {...}}}"),
        ({"type": "json_schema", "json_schema": {"schema": "x"}}, "requires {'json_schema'"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "sc\ud800": 1}}, "has a field 'sc"),
        ({"type": "json_object", "json_schema": {"schema": {}}}, "set type to 'json_schema'"),
        ({"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}}, "at most 65536 are allowed"),
        ({"type": "grammar"}, "response_format.type"),
    ):
        status, answer = api.chat("grammar", response_format=form)
        assert status == 400 and message in answer["error"]["message"], answer


def test_heads_answer_in_one_pass(api: Api) -> None:
    image = image_part(png(250))["image_url"]["url"]
    status, answer = api.call("POST", "/v1/heads/cam/night", {"images": [image]})
    assert status == 200 and answer["label"] == "bright" and answer["label_id"] == 1
    assert answer["scores"] == {"dark": 1 - answer["confidence"], "bright": answer["confidence"]}
    for path, body, code, message in (
        ("cam/rain", {"images": [image]}, 404, "adapter 'cam' has no head 'rain'; its heads: night, motion"),
        ("absent/night", {"images": [image]}, 404, "no adapter named 'absent'"),
        ("cam/motion", {"images": [image]}, 400, "reads 4 images per request; got 1"),
        ("cam/night", {"images": ["data:image/png;base64,AAAA"]}, 400, "image 1 (3 bytes) is broken or not one of"),
        ("cam/night", {"images": []}, 400, "images has 0 items; it must have at least 1"),
        ("cam/night", {"images": [image], "max_latency_s": 0}, 400, "max_latency_s is 0; it must be above 0"),
        ("cam/night", {"images": [image], "priority": 11}, 400, "priority is 11; it must be at most 10"),
        ("cam/night", {"images": [image], "question": "?"}, 400, "question: this field is not supported"),
    ):
        status, answer = api.call("POST", f"/v1/heads/{path}", body)
        assert status == code and message in answer["error"]["message"], answer


def test_several_heads_about_one_picture(api: Api) -> None:
    image = image_part(png(250))["image_url"]["url"]
    names = [("cam", "night"), ("cam", "motion"), ("absent\ud800", "night"), ("cam", "rain")]
    heads = [{"adapter": adapter, "head": head} for adapter, head in names]
    status, answer = api.call("POST", "/v1/heads", {"images": [image], "heads": heads})
    assert status == 200 and answer["object"] == "list"
    one, *others = answer["data"]
    assert (one["adapter"], one["head"], one["label"]) == ("cam", "night", "bright")
    codes = ["bad_request", "unknown_adapter", "unknown_head"]
    assert [each["error"]["code"] for each in others] == codes
    for body, message in (
        ({"images": [image], "heads": []}, "heads has 0 items; it must have at least 1"),
        ({"images": [image], "heads": ["cam/night"]}, "heads.0"),
        ({"images": [image], "heads": [{"adapter": "cam"}]}, "heads.0.head"),
        ({"heads": heads}, "images"),
    ):
        status, answer = api.call("POST", "/v1/heads", body)
        assert status == 400 and message in answer["error"]["message"], answer


def test_service_levels_reach_the_engine_and_a_refusal_has_retry_after(api: Api, tmp_path: Path) -> None:
    fields = {"max_latency_s": 9, "max_ttft_s": 0.5, "priority": -3}
    status, answer = api.chat("overloaded", **fields)
    assert status == 503 and answer["error"]["code"] == "deadline_unreachable"
    assert answer["error"]["message"] == "latency 9.0 ttft 0.5 -3"
    assert api.chat("overloaded", **dict.fromkeys(fields))[1]["error"]["message"] == "latency None ttft None +0"
    for field, value in (("max_latency_s", 0), ("max_ttft_s", -1), ("priority", 11), ("priority", 0.5)):
        status, answer = api.chat("say:x", **{field: value})
        assert status == 400 and answer["error"]["param"] == field
    path = write_adapter(tmp_path, {"overloaded": 1})
    api.call("POST", "/v1/adapters", {"name": "levels", "path": path})
    body = {"images": [image_part(png())["image_url"]["url"]], "max_latency_s": 2, "priority": 10}
    status, answer = api.call("POST", "/v1/heads/levels/overloaded", body)
    assert status == 503 and answer["error"]["message"] == "latency 2.0 ttft None +10"
    api.call("DELETE", "/v1/adapters/levels")


def test_every_task_has_its_own_response_fields(api: Api, tmp_path: Path) -> None:
    heads = {"classification": 1, "counting": 1, "multi_label": 1, "regression": 1, "detection": 2}
    api.call("POST", "/v1/adapters", {"name": "tasks", "path": write_adapter(tmp_path, heads)})
    large, small = (image_part(png(255, size))["image_url"]["url"] for size in ((80, 40), (10, 20)))
    common = {"adapter", "head", "task", "label", "confidence", "total_s"}
    own: dict[str, dict[str, Any]] = {
        "classification": {"label_id": 1, "scores": {"dark": 0.0, "bright": 1.0}},
        "counting": {"count": 1, "scores": {"dark": 0.0, "bright": 1.0}},
        "multi_label": {"chosen": ["bright"], "scores": {"dark": 0.0, "bright": 1.0}},
        "regression": {"values": {"dark": 1.0, "bright": 1.0}, "deviations": {"dark": 0.1, "bright": 0.2}},
    }
    for task, fields in own.items():
        status, answer = api.call("POST", f"/v1/heads/tasks/{task}", {"images": [large]})
        assert status == 200 and answer["task"] == task and answer["label"] == "bright"
        assert {name: answer[name] for name in answer.keys() - common} == fields
    status, answer = api.call("POST", "/v1/heads/tasks/detection", {"images": [large, small]})
    assert status == 200 and answer.keys() - common == {"boxes"}
    # From -0.1 to 0.5 of the width (10 pixels), from 0.25 to 1.5 of the height (20): clipped to the second image.
    box = {"left": 0.0, "right": 5.0, "top": 5.0, "bottom": 20.0, "image": 1}
    assert answer["boxes"] == [{"label": "bright", "label_id": 1, "score": 1.0, **box}]
    api.call("DELETE", "/v1/adapters/tasks")


def test_adapters_are_loaded_pinned_and_unloaded_over_http(api: Api, tmp_path: Path) -> None:
    status, made = api.call("POST", "/v1/adapters", {"name": "signs", "path": write_adapter(tmp_path, {"kind": 1})})
    assert status == 201 and made["name"] == "signs" and made["heads"][0]["name"] == "kind"
    assert api.call("GET", "/v1/models/signs")[1]["parent"] == "base"
    assert api.call("PUT", "/v1/adapters/signs/pin")[1]["pinned"] is True
    (listed,) = [each for each in api.call("GET", "/v1/adapters")[1]["data"] if each["name"] == "signs"]
    assert listed.keys() == made.keys() and "replicas" not in listed  # there is one engine
    assert listed["pinned"] and listed["rank"] == 8
    assert api.call("DELETE", "/v1/adapters/signs/pin")[1]["pinned"] is False
    assert api.call("DELETE", "/v1/adapters/signs?drain=perhaps")[0] == 400
    assert api.call("DELETE", "/v1/adapters/signs?drain=true") == (204, "")
    assert api.call("DELETE", "/v1/adapters/signs")[1]["error"]["code"] == "unknown_adapter"
    assert api.call("GET", "/v1/models/signs")[0] == 404
    status, answer = api.call("POST", "/v1/adapters", {"name": "x", "path": "/nowhere"})
    assert status == 400 and answer["error"]["code"] == "bad_adapter"


def test_trainings_are_submitted_listed_and_cancelled_over_http(api: Api) -> None:
    assert api.call("GET", "/v1/trainings") == (200, {"object": "list", "data": []})
    status, made = api.call("POST", "/v1/trainings", {"plan": "/plans/signs"})
    assert status == 201 and [one["name"] for one in made["data"]] == ["signs"]
    (listed,) = api.call("GET", "/v1/trainings")[1]["data"]
    assert listed == made["data"][0] and listed["state"] == "running" and listed["loss"] == 0.5
    status, ended = api.call("DELETE", "/v1/trainings/signs")
    assert status == 200 and ended["state"] == "cancelled"
    status, answer = api.call("DELETE", "/v1/trainings/absent")
    assert status == 400 and answer["error"]["message"].startswith("no training named 'absent' is running")
    status, answer = api.call("POST", "/v1/trainings", {"plan": "/plans/bad"})
    assert status == 400 and answer["error"]["code"] == "bad_plan"
    assert api.call("POST", "/v1/trainings", {"path": "/plans/signs"})[0] == 400


def test_ready_fails_while_the_server_drains() -> None:
    with running_api() as api:
        assert api.call("GET", "/ready") == (200, {"status": "ready"})
        api.on_loop(api.front_end.drain())
        assert api.call("GET", "/ready") == (503, {"status": "draining"})
        status, answer = api.chat("say:x")
        assert status == 429 and answer["error"]["type"] == "rate_limit_error"
        assert api.call("GET", "/health")[0] == 200


def metrics(api: Api) -> dict[str, float]:
    """The metrics in a scraper's view."""
    status, text = api.call("GET", "/metrics")
    assert status == 200
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_requests_and_tokens() -> None:
    with running_api() as api:
        before = metrics(api)
        assert before["vlora_engine_up"] == 1 and before["vlora_requests_active"] == 0
        # The series exists before its first event; otherwise the first event is no increase.
        for series in ("requests_total base engine_dead", "frames_total dropped", "engine_steps_total mixed"):
            assert before[f"vlora_{series}"] == 0
        assert api.chat("say:four", n=2)[0] == 200
        assert api.chat("")[0] == 400
        api.chat("forever", stream=True, max_tokens=5)
        after = metrics(api)
        assert after["vlora_requests_total base ok"] == 2 and after["vlora_requests_total base bad_request"] == 1
        assert after["vlora_time_to_first_token_seconds_count base"] == 3
        assert after["vlora_time_per_output_token_seconds_count base"] == 3
        assert after["vlora_request_queue_seconds_count base"] == 3
        assert after["vlora_tokens_total base completion"] == 2 * 5 + 5
        assert after["vlora_server_info base 0.1.0"] == 1
        assert after["vlora_requests_active"] == after["vlora_queue_requests running"] == 0
        assert after["vlora_engine_steps_total unmerged"] > 0
        for name in (
            "vlora_switches_total",
            "vlora_arena_bytes kv",
            "vlora_arena_bytes adapters",
            "vlora_vision_cache_total hit",
            "vlora_encoded_patches_total",
            "vlora_encode_seconds_total",
            "vlora_adapter_requests_total hit",
            "vlora_engine_prompt_tokens_total reused",
            "vlora_highest_credit_seconds",
            "vlora_engine_restarts_total",
            "vlora_streams_open",
            "vlora_frames_taken_total",
        ):
            assert name in after
        api.engine.dead = "killed"
        assert metrics(api)["vlora_engine_up"] == 0 and metrics(api)["vlora_requests_total base ok"] == 2


def test_metrics_are_labelled_by_adapter(tmp_path: Path) -> None:
    with running_api() as api:
        for name in ("cam", "signs"):
            api.on_loop(api.front_end.adapters.load(name, write_adapter(tmp_path / name, {"night": 1})))
        before = metrics(api)
        assert before["vlora_requests_total signs step_failed"] == before["vlora_adapter_loads_total signs"] == 0
        assert api.chat("say:four", model="cam")[0] == 200
        assert api.chat("fail", model="signs")[0] == 500
        assert api.chat("say:x", model="absent")[0] == 404
        url = "data:image/png;base64," + base64.b64encode(png()).decode()
        assert api.call("POST", "/v1/heads/cam/night", {"images": [url]})[0] == 200
        after = metrics(api)
        assert after["vlora_requests_total cam ok"] == 2 and after["vlora_requests_total signs step_failed"] == 1
        assert after["vlora_requests_total unknown unknown_adapter"] == 1
        assert not any("absent" in name for name in after)
        assert after["vlora_tokens_total cam completion"] == 5 and after["vlora_request_seconds_count cam"] == 2
        assert after["vlora_request_seconds_count signs"] == 0


def test_a_path_is_no_adapter_name(api: Api) -> None:
    for path in ("/v1/adapters/..", "/v1/adapters/../../etc", "/v1/adapters/..%2f..%2fetc/pin", "/v1/models/..%2fx"):
        for method in ("GET", "PUT", "DELETE"):
            status, answer = api.call(method, path)
            assert status in (404, 405), (method, path, answer)
