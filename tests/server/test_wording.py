"""No message to a user has a validation library's wording; every error type has its own message."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import yaml

from vlora.client.values import sampling_params
from vlora.errors import BadRequest
from vlora.server.http.chat_request import ChatRequest
from vlora.server.http.text_completions import CompletionRequest
from vlora.wording import json_errors, msgspec_errors, pydantic_errors, yaml_errors
from vlora.wording.shown import shown

THEIRS = ("Input should", "should have", "Expected `", "valid ", "Unable to", "Object ", "$.", "required field")


def kinds_of(schema: Any) -> set[str]:
    """Error types that a pydantic schema's values can have."""
    found: set[str] = set()
    if isinstance(schema, dict):
        kind = schema.get("type")
        if isinstance(kind, str):
            found |= {
                "str": {"string_type", "string_unicode"},
                "int": {"int_type", "int_parsing", "int_parsing_size", "int_from_float", "finite_number"},
                "float": {"float_type", "float_parsing", "finite_number"},
                "bool": {"bool_type", "bool_parsing"},
                "list": {"list_type"},
                "dict": {"dict_type"},
                "model": {"model_type", "model_attributes_type", "missing", "extra_forbidden"},
                "literal": {"literal_error"},
                "tagged-union": {"union_tag_invalid", "union_tag_not_found"},
            }.get(kind, set())
        for value in schema.values():
            found |= kinds_of(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            found |= kinds_of(value)
    return found


@pytest.mark.parametrize("form", [ChatRequest, CompletionRequest])
def test_every_pydantic_error_type_has_a_message(form: Any) -> None:
    kinds = kinds_of(form.__pydantic_core_schema__)
    assert len(kinds) > 12
    context = {"expected": "'a' or 'b'", "discriminator": "'type'", "tag": "c", "expected_tags": "'a', 'b'"}
    for kind in kinds:
        words = pydantic_errors.described({"type": kind, "input": 7, "ctx": context, "msg": "Input should be theirs"})
        assert "not accepted here" not in words and "theirs" not in words, kind


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ({"type": "less_than_equal", "ctx": {"le": 0.5}, "input": 1}, "is 1; it must be at most 0.5"),
        ({"type": "too_long", "ctx": {"max_length": 3, "actual_length": None}, "input": [1]}, "has more than 3 items;"),
        ({"type": "string_too_short", "ctx": {"min_length": 1}, "input": ""}, "has 0 characters; it must have at leas"),
        ({"type": "int_type", "input": "x" * 100}, f"is '{'x' * 40}'...; it must be a whole number"),
        ({"type": "date_past", "input": None}, "is null, which is not accepted here"),
        ({"type": "json_invalid", "ctx": {"error": "expected value at line 2 column 3"}}, "is not JSON: see line 2, c"),
    ],
)
def test_pydantics_errors(error: dict[str, Any], words: str) -> None:
    assert pydantic_errors.described(error).startswith(words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stop": [1]}, "stop[0] is 1; it must be a string"),
        ({"logit_bias": [[1]]}, "logit_bias[0] is a list of 1 item; it must be a list of 2 items"),
        ({"temperature": 10**400}, "temperature is out of range (a whole number of 1329 bits)"),
    ],
)
def test_sampling_options_over_rpyc(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        sampling_params(options)
    assert str(caught.value) == words and not any(theirs in str(caught.value) for theirs in THEIRS)


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    secret: str
    count: int = 0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "the field 'secret' is missing"),
        ({"secret": "a", "other": 1}, "unknown field 'other'; check its spelling"),
        ({1: 2}, "a key of the object must be a string"),
        ({"secret": "a", "count": "much"}, "count is a string; it must be a whole number"),
        (None, "the value is null; it must be an object"),
    ],
)
def test_msgspecs_errors_without_values(value: Any, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(value, Entry)
    assert msgspec_errors.described(caught.value) == words


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


def test_values_in_messages_are_shortened() -> None:
    values = {"true": True, "3 bytes": b"abc", "a list of 1 item": [1], "a list of 2 items": (1, 2)}
    assert list(map(shown, values.values())) == list(values)
    assert len(shown(10**5000)) < 50 and len(shown("\ud800" * 100)) < 300
