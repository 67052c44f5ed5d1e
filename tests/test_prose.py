"""The project's prose is standard technical English: words that personify software or replace terms are rare.

Prose is every docstring, comment, string constant of more than four words, and line of Markdown outside code blocks.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RARE = re.compile(
    r"\b(who|whom|whose|whoever|nobody|somebody|anybody|everybody|told|tells?|telling|anew|of late|at hand|in vain)\b",
    re.IGNORECASE,
)
MOST_PER_1000 = 0.17  # of all words, which is about 0.5 of those of prose
COMMENTED = (".cpp", ".h", ".cu")


def listed() -> list[Path]:
    """Files under version control, or all of an exported tree."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return [ROOT / name for name in done.stdout.split("\0") if name]
    return [path for path in ROOT.rglob("*") if ".venv" not in path.parts]


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each piece of prose in a file."""
    text = path.read_text(errors="replace")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 4:
                yield node.lineno, node.value
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        return
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if path.suffix in COMMENTED:
            if "//" in line:
                yield number, line.split("//", 1)[1]
        elif not in_code:
            yield number, line


def test_words_that_personify_are_rare() -> None:
    words, found = 0, []
    for path in listed():
        if path.suffix in (".py", ".md", *COMMENTED) and path.is_file():
            content = path.read_text(errors="replace")
            words += len(content.split())
            for line, text in prose_of(path) if RARE.search(content) else ():  # parsing all files takes 6 seconds
                found += [f"{path.relative_to(ROOT)}:{line}: {match[0]}" for match in RARE.finditer(text)]
    assert words > 100_000, "the project's files were not found"
    density = 1000 * len(found) / words
    assert density <= MOST_PER_1000, f"{density:.2f} per 1,000 words:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    (
        ("a.py", '"""One, for whom it may concern."""\nx = "who"  # told\n', ["whom", "told"]),
        ("a.md", "Nobody waits.\n```\nwho\n```\nIt tells.\n", ["Nobody", "tells"]),
        ("a.cpp", "int who;  // anew\n", ["anew"]),
    ),
)
def test_the_meter_finds_them(name: str, text: str, expected: list[str], tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert [match[0] for _, prose in prose_of(file) for match in RARE.finditer(prose)] == expected
