"""Calls of tools in the text of an answer, as it comes."""

from __future__ import annotations

import json
import uuid
from typing import Any, NamedTuple

from vlora.server.http.tools import CALL_BEGIN, CALL_END


class Call(NamedTuple):
    """One call. arguments: the text of a JSON object."""

    call_id: str
    name: str
    arguments: str

    def as_value(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class CallReader:
    """Divides the text of one answer into calls and what stands around them.

    A call that is cut, or whose text is no JSON object of name and arguments, is text. Blanks beside calls are left
    out.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._pending = ""  # not decided yet: a call, the beginning of a tag, or blanks at the end
        self._behind_call = False  # and nothing but blanks since

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """The text and the calls that became certain."""
        self._pending += text
        passed, calls = "", []
        while True:
            before, begin, rest = self._pending.partition(CALL_BEGIN)
            inside, end, after = rest.partition(CALL_END)
            if not end:
                break
            call = _read(inside)
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
        """The text that was not decided, now that nothing follows."""
        text, self._pending = self._pending, ""
        return "" if self.num_calls and not text.strip() else self._pass(text)

    def _pass(self, text: str) -> str:
        text = text.lstrip() if self._behind_call else text
        self._behind_call = self._behind_call and not text
        return text


def _read(text: str) -> Call | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not (
        isinstance(found, dict) and isinstance(found.get("name"), str) and isinstance(found.get("arguments"), dict)
    ):
        return None
    return Call(f"call_{uuid.uuid4().hex[:24]}", found["name"], json.dumps(found["arguments"], ensure_ascii=False))


def _undecided(text: str) -> int:
    """Length of the end of a text that may begin a call, with the blanks before it."""
    tag = next(
        (size for size in range(min(len(text), len(CALL_BEGIN)), 0, -1) if CALL_BEGIN.startswith(text[-size:])), 0
    )
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip())
