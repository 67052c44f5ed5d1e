"""JSON schemas (Draft 2020-12) in a form that the grammar library follows exactly.

The library's grammar of some schemas accepts values that do not match them, such as 0 for `exclusiveMinimum: 0`. They
are rewritten if the result is exact, else refused. The oracle is the Python package `jsonschema`: numbers are 64-bit
floats, patterns are Python's.
"""

from __future__ import annotations

import itertools
import math
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter
from typing import Any

from vlora.errors import BadRequest
from vlora.server.http.schemas.patterns import FORMATS, translated

MAX_DEPTH = 100
"""Nested arrays and objects in a schema, or in the arguments of a call."""

_MOST_NAME_PATTERNS = 32  # in one object; the library compares each pair
# The library keeps bounds in 64-bit integers, and reads up to this many digits and decimal places exactly.
_LARGEST, _SMALLEST, _DIGITS = 1e18, Decimal("1e-18"), 15
_EXACT = 2**53  # floats represent all integers up to this one
_MOST_DIVISORS = 2**32  # product of all, as decimals without a point; the library multiplies in 32 bits
_MOST_ALTERNATIVES = 100  # of a oneOf; each pair is compared
_MOST_LEVELS = 30  # of properties that are compared
_MOST_COMPARED = 1_000_000  # keywords and members of the schemas in all pairs; half a second
_SHOWN = 100  # characters

_UNSUPPORTED = {
    *("not", "if", "then", "else", "propertyNames", "dependentSchemas", "dependentRequired", "dependencies"),
    *("unevaluatedProperties", "unevaluatedItems", "uniqueItems", "contains", "minContains", "maxContains"),
    *("$dynamicRef", "$dynamicAnchor", "$recursiveRef"),
}
_APPLIED = ("allOf", "anyOf", "oneOf", "$ref")  # to the same value
_OPEN = {"additionalProperties", "patternProperties", "minProperties", *_APPLIED}
_OF_NAMES = {"properties", "patternProperties", "$defs", "definitions"}  # from names to schemas
_OF_OBJECTS = {"properties", "required", "additionalProperties", "patternProperties", "minProperties"}
DESCRIBE_PROPERTIES = frozenset(_UNSUPPORTED | _OF_OBJECTS | {*_APPLIED, "enum", "const"})
"""Keywords of a schema that describes the properties of an object."""

_NO_SCHEMAS = {"enum", "const", "default", "examples", "example", "discriminator"}
_FORMATS = {"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}  # of the library; others are annotations
_BOUNDS = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))
_TYPES = {"null": (type(None),), "boolean": (bool,), "number": (int, float), "string": (str,), "array": (list,)}
_ALL_TYPES = frozenset({*_TYPES, "object"})
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def check_depth(value: Any, what: str, field: str) -> None:
    """Raises BadRequest for a value with more than MAX_DEPTH nested arrays and objects."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for each in level for _, inner in _inner(each)]
        if not level:
            return
    raise too_deep(what, field)


def too_deep(what: str, field: str) -> BadRequest:
    return BadRequest(
        f"{field}: more than {MAX_DEPTH} levels of nested arrays and objects in {what}, which is the limit", field=field
    )


def grammar_schema(schema: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The schema in a form whose grammar accepts only values of the schema.

    Objects allow only the properties that they name: clients omit `additionalProperties` and mean that there are none
    (pydantic's schemas do so), and a model that invents more fills max_tokens with them. An object that defines its
    other properties stays open. So does a schema that combines several schemas for one value, because closing could
    make it unsatisfiable.

    schema: after `check_depth`. field: the request's, for errors. Raises BadRequest if it cannot be followed exactly.
    """
    return _Rewriting(schema, field).schema


class _Rewriting:
    """One schema and its references. schema: the result."""

    def __init__(self, root: Mapping[str, Any], field: str) -> None:
        self._root = root
        self._field = field
        self._targets: dict[str, Any] = {}  # by $ref
        self._divisors: set[Fraction] = set()
        self._disjoint_pairs: dict[tuple[frozenset[int], frozenset[str]], bool] = {}
        self._compared = 0
        self._schemas: set[int] = set()  # ids
        self._combining: list[Mapping[str, Any]] = []  # of several schemas for one value
        self._find_targets(root, "#")
        for reference, target in self._targets.items():
            if not (target is None or isinstance(target, bool) or id(target) in self._schemas):
                raise self._refused(reference, "is no schema, but a $ref refers to it")
        self._check_cycles()
        self._closing = not self._combines()
        self._targets = {reference: self._resolved(target) for reference, target in self._targets.items()}
        self.schema: dict[str, Any] = self._schema(root, "#")

    def _refused(self, place: str, why: str) -> BadRequest:
        return BadRequest(f"{self._field}: the schema at {place[:_SHOWN]!r} {why}", field=self._field)

    # -- references ---------------------------------------------------------------------------------------------------

    def _find_targets(self, node: Any, place: str, names: bool = False) -> None:
        """Check the forms of keywords, and find what each reference leads to and which schemas are combined."""
        for key, each in _inner(node):
            here = f"{place}/{key}"
            if isinstance(node, Mapping) and not names:
                if not _has_form(key, each):
                    raise self._refused(here, f"is {_shown(each)}, which is not valid in JSON Schema")
                if key == "$ref" and each not in self._targets:
                    self._targets[each] = self._target(each, place)
            if names or _holds_schemas(key):
                self._find_targets(each, here, not names and key in _OF_NAMES)
        if isinstance(node, Mapping) and not names:
            self._schemas.add(id(node))
            parts = sum(len(node[key]) if key == "allOf" else 1 for key in _APPLIED if key in node)
            if parts + (not _OF_OBJECTS.isdisjoint(node)) > 1:
                self._combining.append(node)

    def _target(self, reference: str, place: str) -> Any:
        """What a reference leads to; None for what the library resolves: anchors, and ids in the same document."""
        pointer = urllib.parse.unquote(reference.removeprefix("#"))
        if not reference.startswith("#") and "$id" not in self._root:
            why = f"refers to another document, {reference[:_SHOWN]!r}; none is fetched, so put the schema into $defs"
            raise self._refused(place, why)
        if not reference.startswith("#") or (pointer and not pointer.startswith("/")):
            return None
        found: Any = self._root
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key) if isinstance(found, list) else key]
            except (LookupError, TypeError, ValueError) as error:
                raise self._refused(place, f"refers to {reference[:_SHOWN]!r}, which does not exist") from error
        return found

    def _check_cycles(self) -> None:
        """Refuse references that lead back to themselves for the same value, which describes nothing."""
        try:
            TopologicalSorter({each: set(_applied(target)) for each, target in self._targets.items()}).prepare()
        except CycleError as error:
            cycle = " -> ".join(reference[:_SHOWN] for reference in reversed(error.args[1][:8]))
            raise BadRequest(
                f"{self._field}: the schema has a cycle of $ref that describes no value: {cycle}; a recursive schema "
                "refers to itself from a property or an item",
                field=self._field,
            ) from error

    def _resolved(self, node: Any) -> Any:
        while isinstance(node, Mapping) and "$ref" in node:
            node = self._targets.get(node["$ref"])
        return node

    def _combines(self) -> bool:
        """Whether a schema that names properties is one of several for the same value: closing it rules out theirs."""
        known: set[int] = set()
        branches = [branch for node in self._combining for branch in self._branches(node)]
        while branches:
            node = branches.pop()
            if node is None or (isinstance(node, Mapping) and "properties" in node):
                return True
            if isinstance(node, Mapping) and id(node) not in known:
                known.add(id(node))
                branches += self._branches(node)
        return False

    def _branches(self, node: Mapping[str, Any]) -> list[Any]:
        """The schemas that this one applies to the same value; None for one that the library finds."""
        parts = [each for key in ("allOf", "anyOf", "oneOf") for each in node.get(key, ())]
        return [*parts, self._targets[node["$ref"]]] if "$ref" in node else parts

    def _closes(self, node: Mapping[str, Any]) -> bool:
        named = "properties" in node and all(name in node["properties"] for name in node.get("required", ()))
        return self._closing and named and _OPEN.isdisjoint(node)

    # -- rewriting ----------------------------------------------------------------------------------------------------

    def _schema(self, node: Any, place: str) -> Any:
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            raise self._refused(place, f"is {_shown(node)}; a schema is an object, true or false")
        found: dict[str, Any] = {}
        for key, value in node.items():
            here = f"{place}/{key}"
            if key in _UNSUPPORTED and (key, value) != ("uniqueItems", False):
                raise self._refused(here, "cannot be followed by a grammar; describe the values by other keywords")
            if not _holds_schemas(key):
                if key in ("const", "enum"):
                    self._check_value(value, here)
                    found[key] = value
            elif key in _OF_NAMES and isinstance(value, Mapping):
                found[key] = {name: self._schema(each, f"{here}/{name}") for name, each in value.items()}
            elif isinstance(value, Mapping):
                found[key] = self._schema(value, here)
            elif isinstance(value, list):
                found[key] = [
                    self._schema(each, f"{here}/{number}") if isinstance(each, Mapping) else each
                    for number, each in enumerate(value)
                ]
            elif (key, value) != ("uniqueItems", False):
                found[key] = value
        found.pop("$schema", None)
        if self._closes(node):
            found["additionalProperties"] = False
        if "oneOf" in node:
            self._check_alternatives(node, f"{place}/oneOf")
            _add(found, "anyOf", found.pop("oneOf"))
        self._rewrite_items(found)
        self._rewrite_numbers(found, place)
        self._rewrite_texts(found, place)
        self._rewrite_names(found, place)
        return found

    def _check_value(self, value: Any, place: str) -> None:
        """Refuse a constant that the library writes as another one."""
        for key, each in _inner(value):
            self._check_value([key, each] if isinstance(key, str) else each, place)
        if isinstance(value, str) and _UNWRITABLE.search(value):
            raise self._refused(place, "has a control character, which answers cannot contain")
        if isinstance(value, int | float) and not isinstance(value, bool) and not _is_exact(value):
            raise self._refused(place, f"has the number {_shown(value)}; the grammar takes {_DIGITS} digits")

    def _check_alternatives(self, node: Mapping[str, Any], place: str) -> None:
        """Alternatives of which a value matches one at most are the library's anyOf; others are refused."""
        options, types = node["oneOf"], frozenset(_types(node))
        if len(options) > _MOST_ALTERNATIVES:
            raise self._refused(place, f"has {len(options)} alternatives; at most {_MOST_ALTERNATIVES} are allowed")
        for (first, one), (second, other) in itertools.combinations(enumerate(options), 2):
            if not self._disjoint(one, other, types):
                raise self._refused(
                    place,
                    f"has alternatives {first} and {second} that one value may match; use anyOf, or give both a "
                    "required property with different constants",
                )

    def _disjoint(self, one: Any, other: Any, types: frozenset[str] = _ALL_TYPES, depth: int = 0) -> bool:
        """Whether evidently no value of these types in the grammar of one matches the other."""
        one, other = self._resolved(one), self._resolved(other)
        if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
            return one is False or other is False
        pair = frozenset({id(one), id(other)}), types
        if pair not in self._disjoint_pairs:
            self._disjoint_pairs[pair] = False  # while it is compared: recursive schemas
            self._compared += _size(one) + _size(other)
            if self._compared <= _MOST_COMPARED and depth <= _MOST_LEVELS:
                self._disjoint_pairs[pair] = self._exclude(one, other, types, depth)
        return self._disjoint_pairs[pair]

    def _exclude(self, one: Mapping[str, Any], other: Mapping[str, Any], types: frozenset[str], depth: int) -> bool:
        types &= _types(one) & _types(other)
        if types != {"object"}:
            values = _constants(one), _constants(other)
            return not types or (None not in values and not values[0] & values[1])  # type: ignore[operator]
        unlisted = 0  # sides that require a name that the other does not list
        for mine, others in ((one, other), (other, one)):
            ours, theirs = mine.get("properties", {}), others.get("properties", {})
            required = dict.fromkeys(mine.get("required", ()))
            for name in required:
                if name in theirs and self._disjoint(ours.get(name, True), theirs[name], depth=depth + 1):
                    return True
            if not required.keys() <= theirs.keys():
                if "patternProperties" not in others and others.get("additionalProperties") is False:
                    return True
                unlisted += 1
        return unlisted == 2 and self._closes(one) and self._closes(other)

    def _rewrite_items(self, found: dict[str, Any]) -> None:
        """The form of older drafts becomes today's."""
        rest = found.pop("additionalItems", None)
        if isinstance(found.get("items"), list):
            found["prefixItems"] = found.pop("items")
            found |= {} if rest is None else {"items": rest}

    def _rewrite_numbers(self, found: dict[str, Any], place: str) -> None:
        """Bounds become inclusive ones that hold for every decimal that is read as a float."""
        most = self._check_divisor(found["multipleOf"], place) if "multipleOf" in found else _LARGEST
        for name, exclusive, inward in _BOUNDS:
            given = {key: found.pop(key) for key in (name, exclusive) if key in found}
            limits = [_within(bound, inward, key == exclusive) for key, bound in given.items()]
            if limits or most < _LARGEST:
                limit = max((limit * inward for limit in limits), default=-most) * inward
                limit = max(limit * inward, -most) * inward
                if limit * inward > most:
                    raise self._refused(place, f"has {_shown(given)}; numbers up to {most:g} are supported")
                found[name] = int(limit) if limit.is_integer() else limit

    def _check_divisor(self, divisor: Any, place: str) -> float:
        """The largest number whose divisibility is decided exactly."""
        exact = Fraction(divisor)
        if exact <= 0 or exact != Fraction(repr(divisor)):
            raise self._refused(
                place,
                f"has multipleOf {_shown(divisor)}; it must be above 0 and exact in binary, such as 5 or 0.25: "
                "validators disagree on the multiples of others. Use a smaller unit, or a string with a pattern",
            )
        self._divisors.add(exact)
        if math.prod(each.numerator * each.denominator**6 for each in self._divisors) >= _MOST_DIVISORS:
            raise self._refused(place, "has multipleOf of too many digits together with the others of the schema")
        return _LARGEST if isinstance(divisor, int) else _EXACT / exact.denominator

    def _rewrite_texts(self, found: dict[str, Any], place: str) -> None:
        if "pattern" in found:
            found["pattern"] = self._pattern(found["pattern"], place)
        if found.get("format") in FORMATS:
            _add(found, "pattern", FORMATS[found.pop("format")])
        elif found.get("format") not in _FORMATS:
            found.pop("format", None)

    def _rewrite_names(self, found: dict[str, Any], place: str) -> None:
        patterns = found.get("patternProperties", {})
        if len(patterns) > _MOST_NAME_PATTERNS:
            raise self._refused(
                place, f"has {len(patterns)} patternProperties; at most {_MOST_NAME_PATTERNS} are allowed"
            )
        if patterns:
            found["patternProperties"] = {
                self._pattern(name, place, of_names=True): patterns[name] for name in patterns
            }
        least = found.get("minProperties", 0)
        unnamed = patterns or found.get("additionalProperties") is not False
        if unnamed and least > len(set(found.get("required", []))) + 1:
            raise self._refused(
                place,
                f"has minProperties {least}, but a grammar cannot count different names; name them in properties and "
                "required",
            )

    def _pattern(self, pattern: str, place: str, *, of_names: bool = False) -> str:
        try:
            return translated(pattern, of_names)
        except ValueError as error:
            raise self._refused(
                place, f"has the pattern {_shown(pattern)} with {error}, which is not supported"
            ) from None


# -- parts of schemas -------------------------------------------------------------------------------------------------


def _inner(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def _applied(node: Any) -> Iterator[str]:
    """The references that apply to the same value as this schema."""
    if isinstance(node, Mapping):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for key in ("allOf", "anyOf", "oneOf"):
            for _, each in _inner(node.get(key)):
                yield from _applied(each)


def _holds_schemas(keyword: Any) -> bool:
    return keyword not in _NO_SCHEMAS and not str(keyword).startswith("x-")


def _size(node: Mapping[str, Any]) -> int:
    return 1 + len(node) + sum(len(each) for each in node.values() if isinstance(each, list | dict))


def _add(found: dict[str, Any], keyword: str, value: Any) -> None:
    """Set a keyword, beside one that the schema has."""
    if keyword in found:
        found["allOf"] = [*found.get("allOf", []), {keyword: value}]
    else:
        found[keyword] = value


def _types(node: Mapping[str, Any]) -> set[str]:
    declared = node.get("type")
    if declared is not None:
        names = declared if isinstance(declared, list) else [declared]
        return {"number" if name == "integer" else str(name) for name in names}
    values = node.get("enum", [node["const"]] if "const" in node else None)
    if not isinstance(values, list):
        return {*_ALL_TYPES}
    return {next((name for name, kinds in _TYPES.items() if kind in kinds), "object") for kind in {*map(type, values)}}


def _constants(node: Mapping[str, Any]) -> set[Any] | None:
    """The values that a schema allows, if it lists them and they are no arrays or objects."""
    values = [node["const"]] if "const" in node else node.get("enum")
    if not isinstance(values, list) or any(isinstance(each, list | dict) for each in values):
        return None
    return {(isinstance(each, bool), each) for each in values}


def _within(bound: float, inward: int, exclusive: bool) -> float:
    """An inclusive bound: all decimals on its inner side are floats within the given one, and the library reads it
    exactly."""
    limit = float(max(min(bound, 2 * _LARGEST), -2 * _LARGEST))
    if limit * inward < bound * inward or (exclusive and limit == bound):
        limit = math.nextafter(limit, inward * math.inf)
    if limit.is_integer():
        return limit
    rounding = Context(prec=_DIGITS, rounding=ROUND_CEILING if inward > 0 else ROUND_FLOOR)
    rounded = rounding.plus(Decimal(repr(limit)))
    return float(rounded.quantize(_SMALLEST, context=rounding) if abs(limit) < 1e-3 else rounded)


def _is_exact(value: float) -> bool:
    """Whether the library reads a constant as this number, and its text is read as this number again."""
    if isinstance(value, int):
        return abs(value) < _LARGEST and int(float(value)) == value
    number = Decimal(repr(value))
    length = len(number.as_tuple().digits)
    return abs(value) < _LARGEST and length <= _DIGITS and length - number.adjusted() <= 23


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _has_form(key: str, value: Any) -> bool:
    """Whether a keyword's value has the type that the rewriting relies on."""
    match key:
        case "properties" | "patternProperties" | "$defs" | "definitions":
            return isinstance(value, Mapping)
        case "enum" | "allOf" | "anyOf" | "oneOf":
            return isinstance(value, list)
        case "required":
            return isinstance(value, list) and all(isinstance(each, str) for each in value)
        case "$ref" | "pattern" | "format":
            return isinstance(value, str)
        case "multipleOf" | "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "minProperties":
            return _is_number(value)
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
