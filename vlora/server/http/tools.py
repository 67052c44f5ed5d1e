"""Tools of chat completions: their declarations, their text for the model, the grammar of calls, and their parser.

Calls have the form of the Qwen families' chat templates (Hermes): `<tool_call>`, a line with the JSON object of name
and arguments, `</tool_call>`. With a chat template without tools, they become text of the system message.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, StringConstraints, field_validator

from vlora.errors import BadRequest
from vlora.server.http.sampling_fields import StrictModel
from vlora.server.http.schemas.json_schema import DESCRIBE_PROPERTIES, check_depth, grammar_schema, too_deep
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


MAX_TOOLS = 128
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
_ANSWER_BEGIN, _ANSWER_END = "<tool_response>", "</tool_response>"

Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(StrictModel):
    """parameters: a JSON schema of the arguments; calls always follow it, also without `strict`."""

    name: Name
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    @field_validator("parameters")
    @classmethod
    def check_parameters(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        """A schema that names no properties is an empty list of parameters, as in OpenAI's API."""
        kind = parameters.get("type", "object")
        if kind != "object":
            raise ValueError(f"has type {str(kind)[:64]!r}; arguments are an object")
        named: dict[str, Any] = {"properties": {}} if DESCRIBE_PROPERTIES.isdisjoint(parameters) else {}
        return {"type": "object", **named, **parameters}


class Tool(StrictModel):
    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    name: str


class NamedTool(StrictModel):
    type: Literal["function"]
    function: FunctionName


Choice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(StrictModel):
    """arguments: the text of a JSON object, as in an answer."""

    name: str
    arguments: str


class ToolCall(StrictModel):
    """index: of streamed calls, which clients send back."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def as_value(self) -> dict[str, Any]:
        """The call for a chat template. Raises BadRequest when the arguments are not a JSON object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except RecursionError as error:
            raise too_deep("the arguments of a call", "messages") from error
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise BadRequest(
                f"arguments of the call of {self.function.name[:64]!r} are not a JSON object; send them unchanged",
                field="messages",
            )
        check_depth(arguments, "the arguments of a call", "messages")
        return {"type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def call_grammar(tools: Sequence[Tool], choice: Choice, parallel: bool) -> str:
    """The grammar of an answer that may call tools.

    choice: auto for text or calls, required for at least one call, a tool for one call of it.

    Raises BadRequest if it names an undeclared tool, a name is declared twice, or the schemas are too long.
    """
    names = [tool.function.name for tool in tools]
    double = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if double is not None:
        raise BadRequest(f"tools has two functions named {double!r}; names must differ", field="tools")
    if isinstance(choice, NamedTool):
        wanted = choice.function.name
        tools = [tool for tool in tools if tool.function.name == wanted]
        if not tools:
            raise BadRequest(f"tool_choice is {wanted[:64]!r}; declared tools: {', '.join(names)}", field="tool_choice")
    several = parallel and not isinstance(choice, NamedTool)
    lines = []
    if choice == "auto":
        # The tag always begins a call, because a lazy terminal ends as early as possible.
        lines += [
            f"start: {'call* text' if several else 'text | call'}",
            "text: TEXT",
            r"TEXT: /(.|\n)*/",
            f"begin[lazy]: TEXT {json.dumps(CALL_BEGIN)}",
        ]
    else:
        lines += [
            f"start: / ?/ call{' more*' if several else ''}",
            'more: "\\n" call' if several else "",
            f"begin: {json.dumps(CALL_BEGIN)}",
        ]
    lines.append(
        f"call: begin {json.dumps(chr(10))} ({' | '.join(f'call_{i}' for i in range(len(tools)))}) "
        + json.dumps(f"\n{CALL_END}")
    )
    for i, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.function.name)}, "arguments": '
        lines += [
            f'call_{i}: {json.dumps(head)} arguments_{i} "}}"',
            f"arguments_{i}: {json_value(tool.function.parameters, 'tools')}",
        ]
    return checked_size("\n".join(line for line in lines if line), "tools")


def as_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation for a chat template without tools: declarations, calls and results become text."""
    found: list[dict[str, Any]] = []
    for message in messages:
        parts = list(message["content"])
        match message["role"]:
            case "assistant":
                calls = [_tagged(CALL_BEGIN, _call_text(call), CALL_END) for call in message.get("tool_calls", ())]
                joined = ("\n" if parts and calls else "") + "\n".join(calls)
                found.append({"role": "assistant", "content": [*parts, _text(joined)] if calls else parts})
            case "tool":
                result = [_text(f"{_ANSWER_BEGIN}\n"), *parts, _text(f"\n{_ANSWER_END}")]
                if found and found[-1].get("results"):
                    found[-1]["content"] += [_text("\n"), *result]
                else:
                    found.append({"role": "user", "content": result, "results": True})
            case role:
                found.append({"role": role, "content": parts})
    for message in found:
        message.pop("results", None)
    if tools:
        if found and found[0]["role"] == "system":
            found[0]["content"] = [*found[0]["content"], _text(f"\n\n{_declared(tools)}")]
        else:
            found.insert(0, {"role": "system", "content": [_text(_declared(tools))]})
    return found


def _declared(tools: Sequence[Mapping[str, Any]]) -> str:
    functions = "\n".join(map(json.dumps, tools))
    return (
        f"# Tools\n\nThese functions can be called:\n<tools>\n{functions}\n</tools>\n\nTo call one, write its name and "
        f'arguments as a JSON object between tags:\n{CALL_BEGIN}\n{{"name": NAME, "arguments": OBJECT}}\n{CALL_END}'
    )


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {json.dumps(function["arguments"])}}}'


def _tagged(begin: str, text: str, end: str) -> str:
    return f"{begin}\n{text}\n{end}"


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


# -- parsing of calls -------------------------------------------------------------------------------------------------


class ParsedCall(NamedTuple):
    """One call. arguments: the text of a JSON object."""

    call_id: str
    name: str
    arguments: str

    def as_value(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class ToolCallParser:
    """Splits the text of one answer into calls and other text.

    An incomplete call, or one that is not a JSON object of name and arguments, is text. Whitespace around calls is
    dropped.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._pending = ""  # undecided: an incomplete call, a tag prefix, or trailing whitespace
        self._behind_call = False  # with only whitespace since

    def feed(self, text: str) -> tuple[str, list[ParsedCall]]:
        """The newly decided text and calls."""
        self._pending += text
        passed, calls = "", []
        while True:
            before, begin, rest = self._pending.partition(CALL_BEGIN)
            inside, end, after = rest.partition(CALL_END)
            if not end:
                break
            call = _parse_call(inside)
            if call is None:
                passed += self._pass(before + begin + inside + end)
            else:
                passed += self._pass(before.rstrip())
                calls.append(call)
                self.num_calls += 1
                self._behind_call = True
            self._pending = after
        kept = len(before.rstrip()) if begin else len(self._pending) - _undecided(self._pending)
        passed += self._pass(self._pending[:kept])
        self._pending = self._pending[kept:]
        return passed, calls

    def finish(self) -> str:
        """Release the undecided text at the end of the answer."""
        text, self._pending = self._pending, ""
        return "" if self.num_calls and not text.strip() else self._pass(text)

    def _pass(self, text: str) -> str:
        text = text.lstrip() if self._behind_call else text
        self._behind_call = self._behind_call and not text
        return text


def _parse_call(text: str) -> ParsedCall | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not (
        isinstance(found, dict) and isinstance(found.get("name"), str) and isinstance(found.get("arguments"), dict)
    ):
        return None
    return ParsedCall(
        f"call_{uuid.uuid4().hex[:24]}", found["name"], json.dumps(found["arguments"], ensure_ascii=False)
    )


def _undecided(text: str) -> int:
    """Length of the suffix that may begin a call, with the whitespace before it."""
    tag = next(
        (size for size in range(min(len(text), len(CALL_BEGIN)), 0, -1) if CALL_BEGIN.startswith(text[-size:])), 0
    )
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip())
