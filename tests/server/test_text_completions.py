"""/v1/completions and the counts in each event, on a scripted engine that echoes its prompt's script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.api import Api, events, running_api


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with running_api() as made:
        yield made


def complete(api: Api, prompt: Any, **fields: Any) -> tuple[int, Any]:
    return api.call("POST", "/v1/completions", {"model": "base", "prompt": prompt, **fields})


def test_an_answer_has_the_form_of_openai(api: Api) -> None:
    status, answer = complete(api, "say:abc")
    assert status == 200 and answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop"}]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (7, 4)


def test_choices_of_several_prompts_are_numbered_consecutively(api: Api) -> None:
    status, answer = complete(api, ["say:a", "say:bb"], n=2)
    assert status == 200
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [(0, "a"), (1, "a"), (2, "bb"), (3, "bb")]
    # Each prompt counts once, plus each choice's tokens.
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5 + 6, 2 + 2 + 3 + 3)


@pytest.mark.parametrize("several", [False, True])
def test_token_ids_are_used_unchanged(api: Api, several: bool) -> None:
    ids = list(b"say:ok")
    status, answer = complete(api, [ids, ids] if several else ids)
    assert status == 200 and [each["text"] for each in answer["choices"]] == ["ok"] * (2 if several else 1)


def test_echo_puts_the_prompt_first(api: Api) -> None:
    assert complete(api, "say:x", echo=True)[1]["choices"][0]["text"] == "say:xx"
    text = complete(api, "say:x", echo=True, stream=True)[1]
    assert "".join(each["choices"][0]["text"] for each in events(text)) == "say:xx"


def test_the_default_limit_is_that_of_openai(api: Api) -> None:
    answer = complete(api, "forever")[1]
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 16


def test_a_stream_has_running_token_counts(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for call in (complete, lambda api, text, **fields: api.chat(text, **fields)):
        status, text = call(api, "say:abc", stream=True, stream_options=options)
        counts = [each["usage"]["completion_tokens"] for each in events(text)]
        assert status == 200 and counts == sorted(counts) and counts[-1] == 4
        assert {1, 2, 3} <= set(counts)
        assert {each["usage"]["prompt_tokens"] for each in events(text)[1:]} == {7}
        _, without = call(api, "say:abc", stream=True)
        assert not any("usage" in each for each in events(without))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"prompt": ""}, "the prompt is empty", "prompt"),
        ({"prompt": []}, "prompt has 0 entries; send 1 to 64", "prompt"),
        ({"prompt": ["a"] * 65}, "prompt has 65 entries; send 1 to 64", "prompt"),
        ({"prompt": [1, "a"]}, "prompt has 1; send a text, a list of texts, token ids", "prompt"),
        ({"prompt": 5}, "prompt has 5; send a text, a list of texts, token ids", "prompt"),
        ({"prompt": {"a": 1}}, "prompt has {'a': 1}; send", "prompt"),
        ({"prompt": [[1, True]]}, "prompt has [1, True]; send", "prompt"),
        ({"prompt": [5], "echo": True}, "echo is supported for text prompts only", "echo"),
        ({"echo": True, "logprobs": 1}, "echo and logprobs cannot be combined", "echo"),
        ({"suffix": "x"}, "suffix: this field is not supported; text is completed at its end only", "suffix"),
        ({"best_of": 2}, "best_of: this field is not supported; use n", "best_of"),
        ({"model": "absent"}, "no adapter named 'absent'", "model"),
    ],
)
def test_errors_name_the_field(api: Api, stream: bool, fields: dict[str, Any], message: str, param: str) -> None:
    status, answer = complete(api, **{"prompt": "say:x", "stream": stream, **fields})
    assert status in (400, 404) and message in answer["error"]["message"] and answer["error"]["param"] == param
    assert json.dumps(answer)
    assert api.idle()


def test_blanks_are_a_valid_prompt(api: Api) -> None:
    assert complete(api, "  ")[0] == 200
