"""JSON schemas as grammars: OpenAI's `response_format`, and JSON values inside other grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vlora.errors import BadRequest
from vlora.server.http.schemas.json_schema import check_depth, grammar_schema
from vlora.types import MAX_GRAMMAR_CHARS

# One line, with at most one space between JSON tokens: with free whitespace a model may fill max_tokens with it.
# Word-level tokenizers put a space before every word. With \uXXXX a name could be written in two ways, and the library
# would accept the second one as another property.
_RULES = {
    "whitespace_pattern": " ?",
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": 'nrbtf\\"',
}
_KNOWN = {"name", "description", "schema", "strict"}


def json_grammar(kind: str, json_schema: dict[str, Any] | None) -> str | None:
    """The grammar of `response_format`'s type; None for text. Raises BadRequest for an invalid form or schema."""
    if kind != "json_schema" and json_schema is not None:
        raise _invalid(f"json_schema was given with type {kind!r}; set type to 'json_schema'")
    if kind == "text":
        return None
    schema = {"type": "object"} if kind == "json_object" else _schema(json_schema)
    # Allow a space before the value, because word-level tokenizers put one before every word.
    return checked_size(f"start: / ?/ value\nvalue: {json_value(schema, 'response_format')}", "response_format")


def json_value(schema: Mapping[str, Any], field: str) -> str:
    """The right side of a grammar rule for a value of this schema; objects have only the properties that it names.

    Raises BadRequest, with the field's name, for a schema that is too long or that the grammar cannot follow exactly.
    """
    check_depth(schema, "the schema", field)
    checked_size(json.dumps(schema), field)
    return f"%json {json.dumps({**grammar_schema(schema, field), 'x-guidance': _RULES})}"


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
