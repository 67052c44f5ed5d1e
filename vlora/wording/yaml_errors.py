"""Error messages for errors of PyYAML."""

from __future__ import annotations

import yaml

_WORDS = (
    ("mapping values are not allowed", "a second colon on one line; put quotes around text that has a colon"),
    ("found character '\\t'", "a tab; indent with spaces"),
    ("that cannot start any token", "text that begins with a reserved character; put quotes around it"),
    ("found unexpected end of stream", "a quote that is not closed"),
    ("found undefined alias", "a reference (*NAME) to nothing; put quotes around text that begins with *"),
    ("found duplicate anchor", "an anchor (&NAME) that is defined twice"),
    ("found unhashable key", "a list or a mapping in place of a name"),
    (
        "could not determine a constructor",
        "a tag (!NAME); tags are not supported, put quotes around text that begins with !",
    ),
    ("could not find expected ':'", "a name without a colon after it"),
    ("'<stream end>'", "a bracket that is not closed"),
    ("expected ',' or", "a bracket that is not closed, or a missing comma"),
    ("expected <block end>", "a line with indentation that matches no line above it"),
    ("expected the node content", "an item that is empty or out of place"),
    ("expected a single document", "a second document; a file must have exactly one"),
)


def described(error: yaml.YAMLError) -> str:
    """The problem, with its line where known: "line 3: a tab; indent with spaces"."""
    mark = getattr(error, "problem_mark", None)
    return ("" if mark is None else f"line {mark.line + 1}: ") + problem(error)


def problem(error: yaml.YAMLError) -> str:
    """The problem without its position."""
    if isinstance(error, yaml.reader.ReaderError):
        return f"a character that is not allowed in YAML, at position {error.position}"
    said = str(getattr(error, "problem", None) or "")
    return next((ours for theirs, ours in _WORDS if theirs in said), "unexpected text; check indentation and quotes")
