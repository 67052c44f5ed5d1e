"""Errors of Python's JSON reader in this project's words."""

from __future__ import annotations

import json

_WORDS = {
    "Expecting value": "a value is expected",
    "Expecting property name enclosed in double quotes": "a field's name in double quotes is expected",
    "Expecting ':' delimiter": "a colon is expected",
    "Expecting ',' delimiter": "a comma or a closing bracket is expected",
    "Illegal trailing comma before end of object": "a comma before the closing bracket",
    "Illegal trailing comma before end of array": "a comma before the closing bracket",
    "Extra data": "more text behind the value",
    "Unterminated string starting at": "a string that is not closed",
    "Invalid control character at": "a control character in a string; write it with a backslash",
    "Invalid control character": "a control character in a string; write it with a backslash",
    "Invalid \\escape": "a backslash that begins no escape",
    "Invalid \\escape: ": "a backslash that begins no escape",
    "Invalid \\uXXXX escape": "a \\u without four hexadecimal digits",
    "Unexpected UTF-8 BOM (decode using utf-8-sig)": "a byte order mark; save the file without one",
}


def problem(message: str) -> str:
    """What is wrong, from `JSONDecodeError.msg`."""
    return _WORDS.get(message.strip(), _WORDS.get(message, "text that is not JSON"))


def described(error: ValueError) -> str:
    """What is wrong and where: "line 1, column 2: a value is expected"."""
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}, column {error.colno}: {problem(error.msg)}"
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "a number in it is too long"
