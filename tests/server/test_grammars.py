"""Grammars of JSON schemas and of calls of tools: every answer matches its schema, and others are refused by name."""

from __future__ import annotations

import copy
import json
import random
import warnings
from typing import Any, Literal

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, TypeAdapter

from tests.example_counts import scaled
from vlora.errors import BadRequest
from vlora.server.http.schemas.json_schema import MAX_DEPTH, grammar_schema
from vlora.server.http.tools import Choice, Tool, ToolCallParser, as_messages, call_grammar, json_grammar

BYTES = LLTokenizer("byte")


def matcher(schema: dict[str, Any]) -> LLMatcher:
    """Raises BadRequest for a schema that this project or the library refuses."""
    made = LLMatcher(BYTES, json_grammar("json_schema", {"name": "x", "schema": schema}) or "", log_level=0)
    if made.is_error():
        raise BadRequest(made.get_error())
    return made


def accepts(schema: dict[str, Any], text: str) -> bool:
    return ends(matcher(schema), text)


def ends(grammar: LLMatcher, text: str) -> bool:
    cursor = grammar.deep_copy()
    return all(cursor.consume_token(byte) for byte in text.encode()) and cursor.is_accepting()


def sample(grammar: LLMatcher, source: random.Random) -> str | None:
    """An answer of a random model that prefers to end; None if it does not."""
    cursor, text = grammar.deep_copy(), b""
    for _ in range(150):
        bits = np.unpackbits(np.frombuffer(cursor.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:256])
        if cursor.is_accepting() and (not len(allowed) or source.random() < 0.5):
            return text.decode()
        if not len(allowed):
            return None
        closing = [byte for byte in allowed if byte in b'"]}']
        byte = int(source.choice(closing if closing and source.random() < 0.4 else list(allowed)))
        cursor.consume_token(byte)
        text += bytes([byte])
    return None


def check(schema: dict[str, Any], texts: list[str], source: random.Random) -> None:
    """All answers of the grammar match the schema, and so do those of these texts that it accepts."""
    grammar, oracle = matcher(schema), jsonschema.Draft202012Validator(schema)
    for text in [*texts, *(sample(grammar, source) for _ in range(4))]:
        if text is not None and ends(grammar, text):
            assert oracle.is_valid(json.loads(text)), (schema, text)


INT, TEXT, ANY = {"type": "integer"}, {"type": "string"}, dict[str, Any]()


def closed(**properties: Any) -> dict[str, Any]:
    """An object that requires these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def loose(properties: dict[str, Any] | None = None, **keywords: Any) -> dict[str, Any]:
    """An object of these properties, and other keywords."""
    return {"type": "object", **({} if properties is None else {"properties": properties}), **keywords}


def either(*schemas: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"oneOf": list(schemas), **more}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


NUMBERS = st.sampled_from(
    [0, -0.0, 0.5, 1, -1, 3, 3.5, 1e-7, 0.1, 0.3, 99, 1e15, 2**53 + 1, 2**63, 1e17, 5e-324, 1e-20, -0.001, -123.456]
) | st.floats(-1e4, 1e4)
BOUNDS = st.fixed_dictionaries(
    {"type": st.sampled_from(["number", "integer", ["integer", "null"]])},
    optional={
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), NUMBERS),
        "multipleOf": st.sampled_from([1, 3, 10, 0.5, 2.5]),
    },
)


@given(BOUNDS, st.integers(0, 2**20))
@settings(max_examples=scaled(40), deadline=None)
def test_numbers_are_within_their_bounds(schema: dict[str, Any], seed: int) -> None:
    near = []
    for bound in (value for value in schema.values() if isinstance(value, int | float)):
        shown = f"{bound:.20f}".rstrip("0").rstrip(".")
        many = f"{shown}{'' if '.' in shown else '.'}{'0' * 15}1"
        near += [shown, f"{bound:.25f}", f"{bound:.0f}", many, f"-{shown}"]
    try:
        check(schema, [*near, "0", "-0", "0.0", "1", "1.0", "null"], random.Random(seed))
    except BadRequest as error:
        assert "Unsatisfiable" in str(error) or "numbers up to" in str(error) or "float range" in str(error), error


PATTERNS = [
    r"^\S+$", r"^\W$", r"^\D\d$", r"[^\w\s]", r"^[\W]$", r"^[^\W]$", "^[[:alpha:]]", "^[a&&b]$", "^[^[]$", "^(a|b)c?$",
    "^a$|^b", "(?i)^k+$", "(?s)^.$", "^.$", r"^\u0061\x62$", r"\.", "a{2,}?b", r"^\p{Lu}$", "^[a-z_][a-z0-9_]*$", "é",
]  # fmt: skip
TEXTS = [
    *("a", "b", "é", "٣", "a٣", "\x85", "\ufeff", "\u2028", "\u212a", "a\n", "&", "[", ":]", "A", "ac", "k", "aab", "_")
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_what_they_mean_in_python(pattern: str) -> None:
    texts = [json.dumps(text, ensure_ascii=False) for text in TEXTS]
    names = loose(patternProperties={pattern: INT}, additionalProperties=TEXT)
    with warnings.catch_warnings(action="ignore"):
        if pattern == r"^\p{Lu}$":  # not Python's
            assert accepts({**TEXT, "pattern": pattern}, '"A"')
            return
        check({**TEXT, "pattern": pattern}, [*texts, r'"\u001c"'], random.Random(1))
        check(names, [f"{{{text}: {value}}}" for text in texts for value in ('"x"', "1")], random.Random(1))


ONE, OTHER = closed(a=INT), closed(b=INT)
OPEN_OTHER = {key: value for key, value in OTHER.items() if key != "type"}
K = {"properties": {"k": INT}, "required": ["k"]}
DATE = {**TEXT, "format": "date"}
NAMED = {"properties": {"a": ANY}}


def number(**bounds: Any) -> dict[str, Any]:
    return {"type": "number", **bounds}


ACCEPTED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # Bounds are rewritten.
    (number(exclusiveMinimum=0, maximum=0.5), ["0.5", "0.000001"], ["0", "0.51"]),
    (number(minimum=-0.5, exclusiveMaximum=0), ["-0.5", "-0.1"], ["0", "-0", "0.0"]),
    (number(minimum=0.1, maximum=0.3), ["0.1", "0.3", "0.2999"], ["0"]),
    (number(minimum=-1e-7, maximum=2**60), ["-0.0000001", "0", "1000.5"], []),
    (number(exclusiveMinimum=3, exclusiveMaximum=3.5), ["3.1", "3.49990"], ["3", "3.0", "3.5"]),
    ({**INT, "exclusiveMinimum": 3, "maximum": 2**63 - 1}, ["4", "1000"], ["3"]),
    ({"enum": [0.1, 1e20 / 1e3, -5, "é\n", None, True, [1, {"a": 2}]]}, ["0.1", "-5", "null", '[1, {"a": 2}]'], ["0"]),
    # A name has one spelling, so another one is no additional property.
    (
        loose({"a": INT}, additionalProperties=TEXT),
        ['{"a": 1}', '{"b": "x"}'],
        [r'{"\u0061": "x"}', r'{"a": 1, "\u0061": "x"}'],
    ),
    ({"type": "array", "uniqueItems": False, "items": True, "examples": [{"minimum": "a"}, 1]}, ["[1, 1]"], []),
    ({"type": "array", "items": [INT], "additionalItems": False}, ["[1]"], ['["a"]', "[1, 2]"]),
    ({"type": "array", "prefixItems": [INT], "additionalItems": False}, ["[1, 2]"], ['["a"]']),
    # Alternatives that exclude each other, also behind references, as pydantic writes them.
    (
        {
            **either(ref("a~1b"), ref("c%20d")),
            "$defs": {"a/b": loose({"k": {"const": 1}, "v": {}}, required=["k"]), "c d": closed(k={"enum": [2, 3]})},
        },
        ['{"k": 1, "v": 0}', '{"k": 3}'],
        ['{"k": 3, "v": 0}', '{"k": 4}', "{}"],
    ),
    (either(INT, {"type": ["string", "null"]}), ["1", "null"], ["true"]),
    # Closed objects exclude each other, if each requires what the other does not name.
    *(
        ({**schema, "$defs": {"A": ONE, "B": OTHER}}, ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}', "{}", "1"])
        for schema in (
            either(ONE, OTHER),
            either(ref("A"), ref("B")),
            either(*({**each, "type": ["object", "null"]} for each in (ONE, OTHER)), type="object"),
            either(*({**each, "pattern": "a", "format": "date"} for each in (ONE, OTHER))),
        )
    ),
    # Objects, also nested, in alternatives and named like keywords, have their own properties only.
    ({"anyOf": [loose({"a": INT}), {"type": "null"}]}, ['{"a": 1}', "null"], ['{"a": 1, "b": 2}']),
    (closed(allOf=closed(**{"$ref": INT})), ['{"allOf": {"$ref": 1}}'], ['{"allOf": {"$ref": 1, "x": 1}}']),
    # Annotations.
    *(({**TEXT, "format": name}, ['"é"'], ["1"]) for name in ("password", "binary", "path", "regex")),
    ({**TEXT, "format": "uuid"}, [], ['"é"']),
    (
        {
            "discriminator": {"mapping": {"enum": "#/$defs/A", "required": "#"}},
            "x-ui": {"required": True, "enum": "Colour"},
            "type": "null",
        },
        ["null"],
        ["1"],
    ),
    # One schema alone combines nothing.
    (
        closed(n={"allOf": [ONE], "description": "a"}),
        ['{"n": {"a": 1}}'],
        ['{"n": {"a": 1, "b": 1}}', '{"n": {"a": 1}, "b": 1}'],
    ),
    (DATE, ['"2024-02-29"', '"2000-02-29"', '"0001-01-31"'], ['"2023-02-29"', '"1900-02-29"', '"0000-01-01"']),
    ({**DATE, "pattern": "^2"}, ['"2024-02-29"'], ['"1999-01-01"', '"2023-02-29"']),
    ({"$defs": {"n": loose({"n": ref("n")})}, **ref("n")}, ['{"n": {}}'], []),
    (loose(minProperties=1, additionalProperties=INT), ['{"a": 1}'], ["{}"]),
]


@pytest.mark.parametrize(("schema", "accepted", "others"), ACCEPTED)
def test_what_a_grammar_accepts(schema: dict[str, Any], accepted: list[str], others: list[str]) -> None:
    grammar = matcher(schema)
    assert [text for text in [*accepted, *others] if ends(grammar, text)] == accepted
    if not isinstance(schema.get("items"), list):
        check(schema, accepted, random.Random(2))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("required", [["k"], []])
@pytest.mark.parametrize(
    "schema",
    [{"anyOf": [OPEN_OTHER, ONE]}, {"oneOf": [OPEN_OTHER]}, {"$ref": "#/$defs/b"}, {"allOf": [OTHER]}],
)
def test_schemas_for_one_value_are_not_closed(schema: dict[str, Any], required: list[str]) -> None:
    schema = {"type": "object", **K, "required": required, **schema, "$defs": {"b": {"anyOf": [OTHER]}}}
    check(schema, ['{"k": 1, "b": 2}', '{"k": 1}', '{"b": 1}'], random.Random(3))
    assert accepts(schema, '{"k": 1, "b": 2}') and not accepts(schema, '{"k": 1}')
    assert accepts(schema, '{"b": 1}') == (not required)


def recursive(branches: int) -> dict[str, Any]:
    """Two schemas that no comparison of their properties tells apart."""
    names = [f"p{number}" for number in range(branches)]
    defined = {each: closed(**dict.fromkeys(names, ref(each))) for each in "AB"}
    return {**either(ref("A"), ref("B")), "$defs": defined}


def wide() -> dict[str, Any]:
    """Many comparisons with a long list."""
    names = [f"p{number}" for number in range(500)]
    alternatives = (closed(**dict.fromkeys(names, value)) for value in (ref("e"), {"enum": ["a"]}))
    return {**either(*alternatives), "$defs": {"e": {"enum": ["a"] * 3000}}}


def deep() -> dict[str, Any]:
    """A long way to the properties that differ."""
    chain = {f"{side}{depth}": closed(n=ref(f"{side}{depth + 1}")) for side in "AB" for depth in range(300)}
    ends = {f"{side}300": {"const": side} for side in "AB"}
    return {**either(ref("A0"), ref("B0")), "$defs": chain | ends}


@pytest.mark.parametrize("schema", [recursive(10), recursive(400), wide(), deep()])
@pytest.mark.timeout(60)  # without a bound, hours
def test_alternatives_are_compared_in_bounded_time(schema: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="alternatives 0 and 1"):
        matcher(schema)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (nested(MAX_DEPTH + 1), "more than 100 levels of nested arrays and objects in the schema"),
    (nested(5000), "more than 100 levels"),
    ({"$ref": "#"}, r"a cycle of \$ref that describes no value: # -> #"),
    (
        {**ref("a"), "$defs": {"a": ref("b"), "b": ref("a")}},
        "cycle.*(#/.defs/a -> #/.defs/b -> #/.defs/a|#/.defs/b -> #/.defs/a -> #/.defs/b)",
    ),
    ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "cycle.*# -> #"),
    (loose({"a": ref("b")}), "'#/properties/a' refers to '#/.defs/b', which does not"),
    ({"$ref": "http://e.example/s.json"}, "another document, 'http://e.example/s.json'; none is fetched"),
    ({"multipleOf": 0.1}, "multipleOf 0.1; it must be above 0 and exact in binary"),
    ({"multipleOf": 0}, "multipleOf 0;"),
    ({"minimum": 0, "exclusiveMinimum": True}, "exclusiveMinimum' is True, which is not valid"),
    (number(minimum=1e19), r"has ..minimum.: 1e\+19.; numbers up to 1e\+18"),
    ({"const": 2**53 + 1}, "number 9007199254740993; the grammar takes 15 digits"),
    ({"enum": [0.30000000000000004]}, "number 0.30000000000000004"),
    ({"enum": [{"a\x01": 1}]}, "control character"),
    (loose(minProperties=2), "minProperties 2, but a grammar cannot count different names"),
    (either(INT, number()), "alternatives 0 and 1 that one value may match"),
    (either(closed(a={}), loose({"b": {}})), "alternatives 0 and 1"),
    (either(*({"const": number} for number in range(101))), "101 alternatives; at most 100"),
    ({**either(ref("a"), ref("b")), "$defs": {each: closed(n=ref(each)) for each in "ab"}}, "alternatives 0 and 1"),
    ({"enum": ["x" * 70_000]}, "the schemas have 70"),
    ({**TEXT, "pattern": "^a*+a$"}, "with a possessive repeat, which is not supported"),
    ({**TEXT, "pattern": "(?!a)b"}, "with a lookaround"),
    ({**TEXT, "pattern": r"\bcat\b"}, r"with \\b or \\B"),
    (loose(patternProperties={f"^{n}$": {} for n in range(33)}), "33 patternProperties; at most 32"),
    *(
        (loose({"a": {key: value}}), f"'#/properties/a/{key}' cannot be followed by a grammar")
        for key, value in [("not", {}), ("uniqueItems", True), ("if", {}), ("contains", {}), ("propertyNames", {})]
    ),
    ({"const": [float("nan")]}, "has the number nan"),
    ({"enum": [-float("inf")]}, "has the number -inf"),
    ({"$ref": "#/properties", "properties": {"$ref": {}}}, "'#/properties' is no schema"),
    ({"$ref": "#/const", "const": {"allOf": 5}}, "'#/const' is no schema"),
    (either(ONE, loose({"a": {}, "b": {}}, required=["b"])), "alternatives 0 and 1"),
    (either(ONE, OTHER, properties={"c": {}}), "alternatives 0 and 1"),
    ({"required": [1]}, "'#/required' is .1., which is not valid in JSON Schema"),
    ({"properties": {"a": 5}}, "'#/properties/a' is 5; a schema is an object, true or false"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_other_schemas_are_refused_by_name(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        matcher(schema)


class Wheel(BaseModel):
    size: int


class Car(BaseModel):
    kind: Literal["car", "bus"]
    wheels: list[Wheel]
    additionalProperties: bool = True  # a property's name, not a keyword


def test_a_pydantic_model_has_its_own_properties_only() -> None:
    grammar = matcher(Car.model_json_schema())
    assert ends(grammar, '{"kind": "car", "wheels": [{"size": 3}]}')
    assert not ends(grammar, '{"kind": "car", "wheels": [], "colour": "red"}')
    assert not ends(grammar, '{"kind": "car", "wheels": [{"size": 3, "x": 1}]}'), "nested objects as well"


OPEN = [
    loose(),
    loose({"a": {}}, additionalProperties=INT),
    loose({"a": {}}, patternProperties={"^x": {}}),
    loose({"a": {}}, required=["b"]),  # satisfiable only by an additional property
    loose({"a": {}}, minProperties=1),
    {"allOf": [NAMED, {"properties": {"b": {}}}]},
    {"$defs": {"base": NAMED}, "allOf": [ref("base"), {"properties": {"b": {}}}]},
    {**NAMED, **ref("base"), "$defs": {"base": loose()}},
    {**NAMED, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"enum": [{"properties": {"a": 1}}]},
]


def test_schemas_that_define_other_properties_stay_unchanged() -> None:
    for schema in OPEN:
        before = copy.deepcopy(schema)
        assert grammar_schema(schema, "tools") == before == schema


COUNT = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "count things",
        "parameters": loose({"what": TEXT, "most": INT}, required=["what"], additionalProperties=False),
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def in_call_grammar(text: str, choice: Any = "auto", parallel: bool = True) -> bool:
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
    assert in_call_grammar(text) == auto
    assert in_call_grammar(text, parallel=False) == one
    assert in_call_grammar(text, "required") == required
    assert in_call_grammar(text, STOP) == named


NO_PARAMETERS: list[dict[str, Any]] = [
    *({}, *({"parameters": each} for each in ({}, None, loose(), loose({})))),
    {"parameters": {"$schema": "https://json-schema.org/draft/2020-12/schema", "description": "none"}},
]
ANY_OBJECT = (loose(additionalProperties=INT), {"anyOf": [loose()]})


def test_a_function_without_parameters_takes_no_arguments() -> None:
    def accepted(function: dict[str, Any], **arguments: Any) -> bool:
        tool = Tool.model_validate({"type": "function", "function": {"name": "now", **function}})
        text = call("now", **arguments).encode()
        found: int = LLMatcher(BYTES, call_grammar([tool], "required", False), log_level=0).validate_tokens(list(text))
        return found == len(text)

    for function in NO_PARAMETERS:
        assert accepted(function) and not accepted(function, a=1), function
    for parameters in (*ANY_OBJECT, {"required": ["a"]}):
        assert accepted({"parameters": parameters}, a=1), parameters


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
