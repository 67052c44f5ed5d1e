"""OpenAI's `response_format` as a grammar: what an answer in JSON may look like."""

from __future__ import annotations

import json
from typing import Any

from vlora.errors import BadRequest
from vlora.types import MAX_GRAMMAR_CHARS

# Free space is bounded: a model that writes nothing else would never come to an end.
_RULES = {"whitespace_pattern": r"[ \n]{0,16}", "lenient": False, "coerce_one_of": False}
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
    grammar = f"start: / ?/ value\nvalue: %json {json.dumps({**schema, 'x-guidance': _RULES})}"
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise _wrong(f"the schema takes {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are read")
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
