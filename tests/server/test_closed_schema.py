"""Objects allow only the properties named by their schema, where the schema does not define others."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.engine.test_grammar import Prefixes
from vlora.server.http.response_format import closed, json_grammar


class Wheel(BaseModel):
    size: int


class Car(BaseModel):
    kind: Literal["car", "bus"]
    wheels: list[Wheel]
    additionalProperties: bool = True  # a property's name, not a keyword


def accepts(schema: dict[str, Any], text: str) -> bool:
    grammar = json_grammar("json_schema", {"name": "x", "schema": schema})
    assert grammar is not None
    return Prefixes(grammar).ends(text)


def test_a_pydantic_model_has_its_own_properties_only() -> None:
    schema = Car.model_json_schema()
    assert "additionalProperties" not in schema
    assert accepts(schema, '{"kind": "car", "wheels": [{"size": 3}]}')
    assert not accepts(schema, '{"kind": "car", "wheels": [], "colour": "red"}')
    assert not accepts(schema, '{"kind": "car", "wheels": [{"size": 3, "x": 1}]}'), "nested objects as well"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "additionalProperties": {"type": "integer"}, "properties": {"a": {}}},
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},  # satisfiable only by an additional property
        {"type": "object", "properties": {"a": {}}, "minProperties": 2},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"$defs": {"base": {"properties": {"a": {}}}}, "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "$ref": "#/$defs/base", "$defs": {"base": {"type": "object"}}},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"enum": [{"properties": {"a": 1}}]},
        {"type": "object", "properties": {}, "not": {"required": ["a"]}},
    ],
)
def test_schemas_that_define_other_properties_stay_unchanged(schema: dict[str, Any]) -> None:
    before = copy.deepcopy(schema)
    assert closed(schema) == before == schema


def test_a_property_named_like_a_keyword_is_closed_too() -> None:
    schema = {"type": "object", "properties": {"allOf": {"type": "object", "properties": {"$ref": {}}}}}
    found = closed(schema)
    assert found["additionalProperties"] is False
    assert found["properties"]["allOf"]["additionalProperties"] is False


def test_every_alternative_is_closed_by_itself() -> None:
    schema = {"anyOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"type": "null"}]}
    assert accepts(schema, '{"a": 1}') and accepts(schema, "null") and not accepts(schema, '{"a": 1, "b": 2}')
