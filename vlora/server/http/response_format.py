"""JSON schemas as grammars: OpenAI's `response_format`, and the values that grammars of other forms have in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vlora.errors import BadRequest
from vlora.server.http.closed_schema import closed
from vlora.types import MAX_GRAMMAR_CHARS

# On one line, with at most a space between two tokens of JSON: where blanks are free, a model may fill max_tokens with
# them. Tokenizers of words put a space before every word.
_RULES = {"whitespace_pattern": " ?", "lenient": False, "coerce_one_of": False}
_KNOWN = {"name", "description", "schema", "strict"}


def json_grammar(kind: str, json_schema: dict[str, Any] | None) -> str | None:
    """The grammar of `response_format`'s type; None for text. Raises BadRequest for what is not OpenAI's form.

    What the schema itself says is judged where the grammar is compiled.
    """
    if kind != "json_schema" and json_schema is not None:
        raise _wrong(f"json_schema was given with type {kind!r}; set type to 'json_schema'")
    if kind == "text":
        return None
    schema = {"type": "object"} if kind == "json_object" else _schema(json_schema)
    # A space may stand before the value: tokenizers of words put one before every word.
    return checked_size(f"start: / ?/ value\nvalue: {json_value(schema)}", "response_format")


def json_value(schema: Mapping[str, Any]) -> str:
    """The right side of a grammar's rule for a value of this schema, whose objects have no properties that it does not
    name."""
    return f"%json {json.dumps({**closed(schema), 'x-guidance': _RULES})}"


def checked_size(grammar: str, field: str) -> str:
    """The grammar. Raises BadRequest with the field's name for one that is too long."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise BadRequest(
            f"{field}: the schemas take {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are read", field=field
        )
    return grammar


def _schema(json_schema: dict[str, Any] | None) -> dict[str, Any]:
    if json_schema is None or not isinstance(json_schema.get("schema"), dict):
        raise _wrong("type 'json_schema' takes {'json_schema': {'name': ..., 'schema': {...}}}")
    unknown = next((field for field in json_schema if field not in _KNOWN), None)
    if unknown is not None:
        raise _wrong(f"json_schema has a field {unknown[:50]!r}; known: {', '.join(sorted(_KNOWN))}")
    schema: dict[str, Any] = json_schema["schema"]
    return schema


def _wrong(why: str) -> BadRequest:
    return BadRequest(f"response_format: {why}", field="response_format")
