"""Error messages for errors of Python's JSON parser."""

from __future__ import annotations

import json

_WORDS = {
    "Expecting value": "a value is expected",
    "Expecting property name enclosed in double quotes": "a field's name in double quotes is expected",
    "Expecting ':' delimiter": "a colon is expected",
    "Expecting ',' delimiter": "a comma or a closing bracket is expected",
    "Illegal trailing comma before end of object": "a comma before the closing bracket",
    "Illegal trailing comma before end of array": "a comma before the closing bracket",
    "Extra data": "extra text after the value",
    "Unterminated string starting at": "an unterminated string",
    "Invalid control character at": "a control character in a string; write it with a backslash",
    "Invalid control character": "a control character in a string; write it with a backslash",
    "Invalid \\escape": "an invalid escape sequence",
    "Invalid \\escape: ": "an invalid escape sequence",
    "Invalid \\uXXXX escape": "a \\u without four hexadecimal digits",
    "Unexpected UTF-8 BOM (decode using utf-8-sig)": "a byte order mark; save the file without one",
}


def problem(message: str) -> str:
    """The problem named by `JSONDecodeError.msg`."""
    return _WORDS.get(message.strip(), _WORDS.get(message, "text that is not JSON"))


def described(error: ValueError) -> str:
    """The problem with its position: "line 1, column 2: a value is expected"."""
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}, column {error.colno}: {problem(error.msg)}"
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "a number in it is too long"
