"""JSON schemas as grammars: OpenAI's `response_format`, and JSON values inside other grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vlora.errors import BadRequest
from vlora.types import MAX_GRAMMAR_CHARS

# One line, with at most one space between JSON tokens: with free whitespace a model may fill max_tokens with it.
# Word-level tokenizers put a space before every word.
_RULES = {"whitespace_pattern": " ?", "lenient": False, "coerce_one_of": False}
_KNOWN = {"name", "description", "schema", "strict"}
_COMBINED = {"allOf", "if", "then", "else", "not", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"}
_OPEN = {"additionalProperties", "patternProperties", "propertyNames", "minProperties", "anyOf", "oneOf", "$ref"}
_OF_NAMES = {"properties", "$defs", "definitions"}  # these map names to schemas; their keys are not keywords


def json_grammar(kind: str, json_schema: dict[str, Any] | None) -> str | None:
    """The grammar of `response_format`'s type; None for text. Raises BadRequest for an invalid form.

    The schema itself is checked when the grammar is compiled.
    """
    if kind != "json_schema" and json_schema is not None:
        raise _invalid(f"json_schema was given with type {kind!r}; set type to 'json_schema'")
    if kind == "text":
        return None
    schema = {"type": "object"} if kind == "json_object" else _schema(json_schema)
    # Allow a space before the value, because word-level tokenizers put one before every word.
    return checked_size(f"start: / ?/ value\nvalue: {json_value(schema)}", "response_format")


def json_value(schema: Mapping[str, Any]) -> str:
    """The right side of a grammar rule for a value of this schema; objects have only the properties that it names."""
    return f"%json {json.dumps({**closed(schema), 'x-guidance': _RULES})}"


def checked_size(grammar: str, field: str) -> str:
    """Return the grammar. Raises BadRequest, with the field's name, when it is too long."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise BadRequest(
            f"{field}: the schemas have {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are allowed", field=field
        )
    return grammar


def _schema(json_schema: dict[str, Any] | None) -> dict[str, Any]:
    if json_schema is None or not isinstance(json_schema.get("schema"), dict):
        raise _invalid("type 'json_schema' requires {'json_schema': {'name': ..., 'schema': {...}}}")
    unknown = next((field for field in json_schema if field not in _KNOWN), None)
    if unknown is not None:
        raise _invalid(f"json_schema has a field {unknown[:50]!r}; known: {', '.join(sorted(_KNOWN))}")
    schema: dict[str, Any] = json_schema["schema"]
    return schema


def _invalid(why: str) -> BadRequest:
    return BadRequest(f"response_format: {why}", field="response_format")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the schema in which objects allow only the properties that they name.

    Clients omit `additionalProperties` and mean that there are none (pydantic's schemas do so); a model that invents
    more properties fills max_tokens with them. An object that defines its other properties stays unchanged. So does a
    schema that combines several schemas for one value, because closing could make it unsatisfiable.
    """
    return dict(schema) if _combines(schema) else _closed(schema)


def _combines(value: Any, names: bool = False) -> bool:
    if isinstance(value, Mapping):
        if not names and not _COMBINED.isdisjoint(value):
            return True
        return any(_combines(each, not names and key in _OF_NAMES) for key, each in value.items())
    return isinstance(value, list) and any(map(_combines, value))


def _closed(value: Any, names: bool = False) -> Any:
    if isinstance(value, list):
        return [_closed(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    found = {
        key: each
        if not names and key in ("enum", "const", "default", "examples")
        else _closed(each, not names and key in _OF_NAMES)
        for key, each in value.items()
    }
    properties = value.get("properties")
    if not names and isinstance(properties, Mapping) and _OPEN.isdisjoint(value):
        required = value.get("required", [])
        if isinstance(required, list) and all(name in properties for name in required):
            found["additionalProperties"] = False
    return found
