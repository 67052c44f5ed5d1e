"""Checkpoints with a part that is missing, broken, or of another family: `vlora check` names it, and the remedy.

What is complete in spite of it answers as the whole checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.hub.checkpoints import SavedBy, make
from tests.hub.law import EQUAL, Served
from tests.hub.oracle import Oracle
from vlora.errors import VLoraError
from vlora.models.loading import load_model
from vlora.models.processing import InputProcessor

pytestmark = pytest.mark.slow

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\nsize 4967673352\n"
)
REMEDIES = ("download", "copy", "git lfs pull")
CHANGES: Mapping[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda whole: None,
    "empty": lambda whole: b"",
    "truncated": lambda whole: whole[: len(whole) // 2],
    "a page": lambda whole: b"<html>404</html>",
    "a pointer": lambda whole: POINTER,
}
OTHER = "of another family"
"""A change: the file of that name in another checkpoint, if it has one."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A file of a checkpoint.

    other: a checkpoint of another family. harmless: changes with which it answers as before. stem: a word in the
    message that names the part as well as the file does.
    """

    name: str
    saved_by: SavedBy
    other: str
    file: str
    harmless: tuple[str, ...] = ()
    stem: str = ""

    def __str__(self) -> str:
        return f"{self.name}-{self.saved_by}-{self.file}"


UNREAD = ("missing", "empty", "truncated", "a page", OTHER)
"""Changes of files that are not needed beside others. Pointers are named all the same."""
_LLAVA: tuple[str, SavedBy, str] = ("llava-1.5-7b", "4.57", "Qwen2.5-VL-3B")
_QWEN: tuple[str, SavedBy, str] = ("Qwen2.5-VL-3B", "hub", "Qwen3-VL-2B")
_QWEN3: tuple[str, SavedBy, str] = ("Qwen3-VL-2B", "hub", "llava-onevision-qwen2-0.5b")
_QWEN_VL: tuple[str, SavedBy, str] = ("Qwen-VL-Chat", "hub", "Qwen2.5-VL-3B")
FAST = (
    Case(*_LLAVA, "config.json"),
    Case(*_LLAVA, "chat_template.jinja"),
    Case(*_LLAVA, "tokenizer.json"),
    Case(*_LLAVA, "tokenizer_config.json", harmless=("missing", OTHER)),
    Case(*_LLAVA, "preprocessor_config.json"),
    Case(*_LLAVA, "model.safetensors", stem="weights"),
)
OTHERS = (
    Case(*_LLAVA, "generation_config.json", harmless=("missing", OTHER)),
    Case(*_LLAVA, "processor_config.json", harmless=("missing",)),
    Case(*_LLAVA, "added_tokens.json", harmless=UNREAD),
    Case(*_LLAVA, "special_tokens_map.json", harmless=UNREAD),
    Case(*_LLAVA, "tokenizer.model", harmless=UNREAD),
    Case(*_QWEN, "model.safetensors.index.json"),
    Case(*_QWEN, "model-00002-of-00002.safetensors"),
    Case(*_QWEN, "chat_template.json", harmless=(OTHER,)),  # Qwen3-VL's has the same markers
    Case(*_QWEN, "preprocessor_config.json"),
    Case(*_QWEN, "tokenizer.json", harmless=("missing", OTHER)),  # read from vocab.json and merges.txt; more tokens
    Case(*_QWEN, "vocab.json", harmless=UNREAD),
    Case(*_QWEN, "merges.txt", harmless=UNREAD),
    Case(*_QWEN3, "video_preprocessor_config.json", harmless=("missing", OTHER)),
    Case("Qwen2.5-VL-3B", "5.23", "Qwen3-VL-2B", "processor_config.json"),
    Case(*_QWEN_VL, "qwen.tiktoken"),
    Case(*_QWEN_VL, "generation_config.json", harmless=("missing", OTHER)),
    Case(*_QWEN_VL, "pytorch_model.bin.index.json"),
    Case(*_QWEN_VL, "pytorch_model-00003-of-00010.bin"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, SavedBy], Path]:
    """A checkpoint, made once."""
    made: dict[tuple[str, SavedBy], Path] = {}

    def get(name: str, saved_by: SavedBy) -> Path:
        if (name, saved_by) not in made:
            made[name, saved_by] = make(name, tmp_path_factory.mktemp("whole") / "model", saved_by)
        return made[name, saved_by]

    return get


@pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in OTHERS)], ids=str
)
def test_a_broken_part_is_named(case: Case, whole: Callable[[str, SavedBy], Path], tmp_path: Path) -> None:
    source = whole(case.name, case.saved_by)
    other = whole(case.other, "hub") / case.file
    contents = {change: made((source / case.file).read_bytes()) for change, made in CHANGES.items()}
    if other.exists():
        contents[OTHER] = other.read_bytes()
    wrong = {}
    for change, content in contents.items():
        folder = tmp_path / change / "model"
        folder.mkdir(parents=True)
        for path in source.iterdir():
            if path.name != case.file:
                os.link(path, folder / path.name)
        if content is not None:
            (folder / case.file).write_bytes(content)
        served = Served(case.name, folder)
        template = change == OTHER and "chat_template" in case.file  # the prompts are then those of the folder
        served.oracle = Oracle(case.name, folder if template else source, source)
        found = _outcome(served, [case.file, *[case.stem] * bool(case.stem)])
        if found != (EQUAL if change in case.harmless else "named"):
            wrong[change] = found
    assert not wrong


def _outcome(served: Served, parts: list[str]) -> str:
    """`named`, EQUAL, or what is wrong."""
    try:
        found = "; ".join(served.check().problems)
    except VLoraError as error:
        found = str(error)
    try:
        InputProcessor.from_pretrained(str(served.folder))
        load_model(served.config())
    except VLoraError as error:
        if not found:
            return f"complete, but serve refuses it: {error}"
        named = any(part in found for part in parts) and any(word in found for word in REMEDIES)
        return "named" if named else f"without part or remedy: {found}"
    if found:
        return f"refused by check only: {found}"
    return served.answer("picture")
