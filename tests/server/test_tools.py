"""Tools: the grammar of calls, calls in an answer's text, and templates without tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from pydantic import TypeAdapter

from vlora.errors import BadRequest
from vlora.server.http.tools import Choice, Tool, ToolCallParser, as_messages, call_grammar

COUNT = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "count things",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string"}, "most": {"type": "integer"}},
            "required": ["what"],
            "additionalProperties": False,
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
BYTES = LLTokenizer("byte")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def in_grammar(text: str, choice: Any = "auto", parallel: bool = True) -> bool:
    tools = [Tool.model_validate(each) for each in (COUNT, STOP)]
    chosen = TypeAdapter(Choice).validate_python(choice)
    matcher = LLMatcher(BYTES, call_grammar(tools, chosen, parallel), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


NO_OBJECT = '<tool_call>{"name": "x", "arguments": 5}</tool_call>'


@pytest.mark.parametrize(
    ("text", "auto", "one", "required", "named"),
    [
        ("", True, True, False, False),
        ("two < three, <tool>", True, True, False, False),
        (call("count", what="cars"), True, True, True, False),
        (call("stop"), True, True, True, True),
        (call("count", what="cars") + "\n" + call("stop"), True, False, True, False),
        ("I look. " + call("stop"), True, True, False, False),
        (call("count", most=3), False, False, False, False),  # required argument
        (call("count", what="cars", more=1), False, False, False, False),
        (call("shout"), False, False, False, False),
        ("<tool_call>", False, False, False, False),
        (call("stop")[:-1], False, False, False, False),
    ],
)
def test_calls_follow_the_declared_schema(text: str, auto: bool, one: bool, required: bool, named: bool) -> None:
    assert in_grammar(text) == auto
    assert in_grammar(text, parallel=False) == one
    assert in_grammar(text, "required") == required
    assert in_grammar(text, STOP) == named


@pytest.mark.parametrize(
    ("parameters", "empty"),
    [
        ({}, True),
        (None, True),
        ({"type": "object"}, True),
        ({"type": "object", "properties": {}}, True),
        ({"$schema": "https://json-schema.org/draft/2020-12/schema", "description": "none"}, True),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, False),
        ({"anyOf": [{"type": "object"}]}, False),
        ({"required": ["a"]}, False),
    ],
)
def test_a_function_without_parameters_takes_no_arguments(parameters: Any, empty: bool) -> None:
    function = {"name": "now"} | ({} if parameters == {} else {"parameters": parameters})
    for declared in (function, {"name": "now", "parameters": parameters}):
        tool = Tool.model_validate({"type": "function", "function": declared})
        matcher = LLMatcher(BYTES, call_grammar([tool], "required", False), log_level=0)
        assert matcher.validate_tokens(list(call("now", a=1).encode())) == len(call("now", a=1)) or empty
        assert not empty or matcher.validate_tokens(list(call("now").encode())) == len(call("now"))
        assert not empty or matcher.validate_tokens(list(call("now", a=1).encode())) < len(call("now", a=1))


def test_wrong_tools_are_refused() -> None:
    tools = [Tool.model_validate(each) for each in (COUNT, COUNT)]
    with pytest.raises(BadRequest, match="two functions named 'count'"):
        call_grammar(tools, "auto", True)
    with pytest.raises(BadRequest, match="tool_choice is 'shout'; declared tools: count"):
        chosen = TypeAdapter(Choice).validate_python({"type": "function", "function": {"name": "shout"}})
        call_grammar(tools[:1], chosen, True)
    long = {"type": "function", "function": {"name": "f", "parameters": {"description": "x" * 70_000}}}
    with pytest.raises(BadRequest, match="tools: the schemas have 70"):
        call_grammar([Tool.model_validate(long)], "auto", True)


def read(*pieces: str) -> tuple[str, list[tuple[str, Any]]]:
    reader = ToolCallParser()
    text, calls = "", []
    for piece in pieces:
        passed, found = reader.feed(piece)
        text += passed
        calls += [(each.name, json.loads(each.arguments)) for each in found]
    return text + reader.finish(), calls


@pytest.mark.parametrize(
    ("text", "around", "names"),
    [
        ("a < b ", "a < b ", []),
        (call("stop"), "", ["stop"]),
        (f"I look.\n{call('stop')}\n{call('count', what='x')}\n", "I look.", ["stop", "count"]),
        (f"{call('stop')}\n done now ", "done now", ["stop"]),
        ("<tool_call>\n{\n</tool_call> x", "<tool_call>\n{\n</tool_call> x", []),
        ('cut <tool_call>\n{"name": "st', 'cut <tool_call>\n{"name": "st', []),
        (NO_OBJECT, NO_OBJECT, []),
        ("ends with <tool", "ends with <tool", []),
    ],
)
def test_calls_and_the_text_around_them(text: str, around: str, names: list[str]) -> None:
    found = read(text)
    assert (found[0], [name for name, _ in found[1]]) == (around, names)


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "<", "a", " ", "\n", call("stop"), call("count", what="<")])
    ),
    st.data(),
)
def test_piece_boundaries_do_not_change_the_calls(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(*pieces) == read(text)


def test_a_template_without_tools_gets_text() -> None:
    called = {"type": "function", "function": {"name": "count", "arguments": {"what": "cars"}}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many cars ?"}]},
        {"role": "assistant", "content": [], "tool_calls": [called, called]},
        {"role": "tool", "content": [{"type": "text", "text": "3"}]},
        {"role": "tool", "content": [{"type": "text", "text": "4"}]},
    ]
    made = as_messages(messages, [COUNT])
    assert [message["role"] for message in made] == ["system", "user", "assistant", "user"]
    texts = ["".join(part.get("text", "IMAGE") for part in message["content"]) for message in made]
    assert texts[0].startswith("Be brief.") and json.dumps(COUNT) in texts[0]
    assert texts[1] == "IMAGEhow many cars ?"
    assert texts[2] == f"{call('count', what='cars')}\n{call('count', what='cars')}"
    assert texts[3] == "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert as_messages(messages[1:2], [COUNT])[0]["role"] == "system" and len(as_messages(messages[1:2], [])) == 1
