"""Closing of JSON schemas: objects allow no properties other than the named ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COMBINED = {"allOf", "if", "then", "else", "not", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"}
_OPEN = {"additionalProperties", "patternProperties", "propertyNames", "minProperties", "anyOf", "oneOf", "$ref"}
_OF_NAMES = {"properties", "$defs", "definitions"}  # these map names to schemas; their keys are not keywords


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
