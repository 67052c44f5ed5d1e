"""PyYAML's errors in this project's words."""

from __future__ import annotations

import yaml

_WORDS = (
    ("mapping values are not allowed", "a second colon on one line; put quotes around text that has a colon"),
    ("found character '\\t'", "a tab; indent with spaces"),
    ("that cannot start any token", "text that begins with a reserved character; put quotes around it"),
    ("found unexpected end of stream", "a quote that is not closed"),
    ("found undefined alias", "a reference (*NAME) to nothing; put quotes around text that begins with *"),
    ("found duplicate anchor", "an anchor (&NAME) that is defined twice"),
    ("found unhashable key", "a list or a mapping where a name belongs"),
    (
        "could not determine a constructor",
        "a tag (!NAME); tags are not read, put quotes around text that begins with !",
    ),
    ("could not find expected ':'", "a name without a colon behind it"),
    ("'<stream end>'", "a bracket that is not closed"),
    ("expected ',' or", "a bracket that is not closed, or a missing comma"),
    ("expected <block end>", "a line whose indentation fits none above it"),
    ("expected the node content", "an item that is empty or out of place"),
    ("expected a single document", "a second document; one file holds one"),
)


def described(error: yaml.YAMLError) -> str:
    """What is wrong, with its line where it is known: "line 3: a tab; indent with spaces"."""
    mark = getattr(error, "problem_mark", None)
    return ("" if mark is None else f"line {mark.line + 1}: ") + problem(error)


def problem(error: yaml.YAMLError) -> str:
    """What is wrong, without its place."""
    if isinstance(error, yaml.reader.ReaderError):
        return f"a character that text files do not have, at position {error.position}"
    said = str(getattr(error, "problem", None) or "")
    return next((ours for theirs, ours in _WORDS if theirs in said), "text out of place; check indentation and quotes")
