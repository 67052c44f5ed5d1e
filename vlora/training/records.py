"""Questions and answers to learn from, as JSON lines: the `questions` format of `vlora fuse`."""

from __future__ import annotations

import hashlib
import json
import os
import random
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vlora.plan_files.errors import PlanErrors
from vlora.wording.shown import shown

FILE_NAME = "questions.jsonl"
MAX_BYTES = 256 * 2**20
"""Of a file: records are kept in memory."""
_PARTS = ("train", "validation", "test")


class Record(NamedTuple):
    """One question with its answer. place: file and line, for errors."""

    question: str
    answer: str
    image: Path | None
    place: str


class Records(NamedTuple):
    """train, held_out: in the file's order. digest: changes with the file's text."""

    train: tuple[Record, ...]
    held_out: tuple[Record, ...]
    digest: str


def read_records(path: Path, question: str | None, *, held_out: float, seed: int, errors: PlanErrors) -> Records:
    """Read rows answer[, question, image, split, group].

    Rows with a `split` of validation are held out, those of test are ignored. Without any, a share is drawn; rows of
    one group, else of one image, are in one part.

    Args:
        path: A JSONL file, or a folder with `questions.jsonl`. Images are relative to its folder.
        question: For rows without one.
        held_out: The share.
        seed: Of the draw.
        errors: Collects the errors, each with its line.
    """
    file = path / FILE_NAME if path.is_dir() else path
    rows = list(_rows(file, errors))
    found: list[tuple[Record, str | None, str]] = []
    digest = hashlib.blake2b(digest_size=16)
    for place, row in rows:
        record = _record(file.parent, place, row, question, errors)
        part = row.get("split")
        if part is not None and part not in _PARTS:
            errors.add(f"{place}: `split` is {shown(part)}; use one of {', '.join(_PARTS)}", "data")
        elif record is not None:
            group = str(row.get("group") or record.image or place)
            found.append((record, part, group))
            digest.update(json.dumps([record.question, record.answer, str(row.get("image")), part]).encode())
    if len(unsplit := {part is None for _, part, _ in found}) > 1:
        errors.add(f"{file}: some rows have a `split`, others do not; give it to all rows, or to none", "data")
    drawn = _draw([group for _, _, group in found], held_out, seed) if unsplit == {True} else set()
    kept = tuple(record for record, part, group in found if part == "train" or (part is None and group not in drawn))
    held = tuple(record for record, part, group in found if part == "validation" or group in drawn)
    return Records(kept, held, digest.hexdigest())


def _draw(groups: list[str], share: float, seed: int) -> set[str]:
    """Groups with about this share of the rows, never all of them."""
    counts = Counter(groups)
    names = list(counts)
    random.Random(seed).shuffle(names)
    drawn: set[str] = set()
    num_rows, num_drawn = share * len(groups), 0.0
    for name in names[:-1]:
        if num_drawn + counts[name] / 2 > num_rows:
            break
        drawn.add(name)
        num_drawn += counts[name]
    return drawn


def unreadable(file: Path) -> str | None:
    """Why a file must not be opened: a pipe or a device may have no end, or block its reader for ever."""
    try:
        found = file.stat()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return "cannot be read: it is not a file"
    if found.st_size > MAX_BYTES:
        return f"has {found.st_size} bytes; at most {MAX_BYTES} are read, so divide it"
    return None


def _rows(file: Path, errors: PlanErrors) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if problem := unreadable(file):
        errors.add(f"{file} {problem}", "data")
        return
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        errors.add(f"{file} cannot be read: {error.strerror}", "data")
        return
    except UnicodeDecodeError:
        errors.add(f"{file} is not UTF-8 text", "data")
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            errors.add(f"{place}: not JSON: {error}", "data")
            continue
        if isinstance(row, dict):
            yield place, row
        else:
            errors.add(f"{place}: is not an object with the fields `question` and `answer`", "data")


def _record(
    folder: Path, place: str, row: Mapping[str, Any], question: str | None, errors: PlanErrors
) -> Record | None:
    asked, answer, image = row.get("question", question), row.get("answer"), row.get("image")
    if not isinstance(answer, str) or not answer.strip():
        errors.add(f"{place}: `answer` is {shown(answer)}; it must be text", "data")
    elif not isinstance(asked, str) or not asked.strip():
        errors.add(f"{place}: `question` is {shown(asked)}; it must be text (or set `question` in the plan)", "data")
    elif image is not None and not (isinstance(image, str) and os.path.isfile(folder / image)):
        errors.add(f"{place}: `image` is {shown(image)}; there is no such file in {folder}", "data")
    else:
        return Record(asked, answer, None if image is None else folder / image, place)
    return None
