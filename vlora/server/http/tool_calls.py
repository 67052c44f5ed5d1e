"""Incremental parser of tool calls in the text of an answer."""

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
    """Splits the text of one answer into calls and other text.

    An incomplete call, or one that is not a JSON object of name and arguments, is text. Whitespace around calls is
    dropped.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._pending = ""  # undecided: an incomplete call, a tag prefix, or trailing whitespace
        self._behind_call = False  # with only whitespace since

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """The newly decided text and calls."""
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
        """Release the undecided text at the end of the answer."""
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
    """Length of the suffix that may begin a call, with the whitespace before it."""
    tag = next(
        (size for size in range(min(len(text), len(CALL_BEGIN)), 0, -1) if CALL_BEGIN.startswith(text[-size:])), 0
    )
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip())
