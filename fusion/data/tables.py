"""CSV and JSONL: one row per sample; each error is reported with file and line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fusion.data.frames import Clip, Picture, find_file, read_text
from fusion.data.items import PARTS, Answer, Item, Part
from fusion.plan.data_formats import Questions, VideoFolder
from vlora.plan_files.errors import PlanErrors

_LONGEST_S = 1e6  # seconds of a video
_SEVERAL = ";"  # between labels of one cell, as in "car;person"


def read_questions(data: Questions, several: bool, errors: PlanErrors) -> list[Item]:
    """Read rows image, answer[, question, split, group]. several: an answer is a list of labels, possibly empty."""
    folder = data.images or data.path.parent
    items = []
    parts: dict[str, Part | None] = {}
    for place, row in _rows(data.path, ("image", "answer"), "path", errors):
        image, answer = _text(row, "image"), _answer(row["answer"], several)
        part = _part(row, place, "path", errors)
        if not image:
            errors.add(f"{place}: `image` is empty", "path")
        elif isinstance(file := find_file(folder, image, "picture"), str):
            errors.add(f"{place}: {file}", "path" if data.images is None else "images")
        elif answer == "":
            errors.add(f"{place}: `answer` is empty", "path")
        else:
            # Questions about one picture form one group unless the file defines groups.
            group = _text(row, "group") or image
            before = parts.setdefault(group, part)
            if group != image and before != part:
                errors.add(f"{place}: group {group!r} is in {part or 'no part'}, before in {before or 'none'}", "path")
            items.append(Item(Picture(file), answer, place, _text(row, "question"), group, part))
    return items


def read_labelled_videos(data: VideoFolder, errors: PlanErrors) -> list[Item]:
    """Read rows video, label[, split, start_s, end_s]. Clips of one video form one group."""
    assert data.labels is not None
    items = []
    for place, row in _rows(data.labels, ("video", "label"), "labels", errors):
        file, label = find_file(data.path, _text(row, "video"), "video"), _text(row, "label")
        part = _part(row, place, "labels", errors)
        start, end = (_seconds(row, field, place, errors) for field in ("start_s", "end_s"))
        if isinstance(file, str):
            errors.add(f"{place}: {file}", "labels")
        elif not label:
            errors.add(f"{place}: `label` is empty", "labels")
        else:
            items.append(Item(Clip(file, data.frames, start or 0.0, end), label, place, group=str(file), part=part))
    return items


def _rows(
    file: Path, needed: tuple[str, ...], field: str, errors: PlanErrors
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Rows that have the required fields, each with its file and line."""
    read = {".csv": _csv, ".jsonl": _jsonl}.get(file.suffix.lower())
    if read is None:
        errors.add(f"{file} is neither .csv nor .jsonl", field)
        return
    if not file.is_file():
        errors.add(f"there is no file {file}", field)
        return
    reported: set[str] = set()
    try:
        for line, row in read(file):
            place = f"{file}, line {line}"
            if not isinstance(row, dict):
                errors.add(f"{place}: {row}", field)
                continue
            missing = [name for name in needed if row.get(name) is None]
            if not missing:
                yield place, row
            # A missing column is missing in every row, so it is reported once.
            elif file.suffix.lower() != ".csv" or not reported.issuperset(missing):
                reported.update(missing)
                errors.add(
                    f"{place}: lacks {' and '.join(f'`{name}`' for name in missing)}; has {', '.join(row)}", field
                )
    except OSError as error:
        errors.add(f"{file} cannot be read: {error}", field)
    except UnicodeDecodeError as error:
        errors.add(f"{file} is not UTF-8 ({error}); save it as UTF-8", field)


def _csv(file: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    with io.StringIO(read_text(file), newline="") as source:
        # Spreadsheets also separate by semicolons and tabs.
        delimiter = max(",;\t", key=source.readline().count)
        source.seek(0)
        # Strict: otherwise an unclosed quote would join all following rows into one cell.
        reader = csv.DictReader(source, strict=True, delimiter=delimiter)
        last = 0  # the last line that could be read
        try:
            columns = list(reader.fieldnames or ())
            if len(set(columns)) < len(columns):
                yield 1, f"names a column twice: {', '.join(columns)}"
                return
            last = reader.line_num
            for row in reader:
                last = reader.line_num
                if None in row:
                    message = f"has more cells than the first line; put quotes around commas: {row[None]!r}"
                    yield reader.line_num, message
                else:
                    yield reader.line_num, row
        except csv.Error as error:
            yield last + 1, f"invalid CSV from this line on ({error}); look for an unclosed quote"


def _jsonl(file: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    with io.StringIO(read_text(file), newline=None) as source:
        for line, text in enumerate(source, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
                json.dumps(row, ensure_ascii=False).encode()  # refuses unpaired surrogates, which JSON allows
            except (ValueError, RecursionError) as error:
                yield line, f"is not JSON: {error}"
                continue
            yield line, row if isinstance(row, dict) else f"is {type(row).__name__}; a row must be an object"


def _answer(value: Any, several: bool) -> Answer:
    if several:
        labels = value if isinstance(value, list) else str(value).split(_SEVERAL)
        return tuple(label for label in (str(each).strip() for each in labels) if label)
    return str(value).strip()


def _text(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    return "" if value is None else str(value).strip()


def _part(row: Mapping[str, Any], place: str, field: str, errors: PlanErrors) -> Part | None:
    given = _text(row, "split")
    if given and given not in PARTS:
        errors.add(f"{place}: `split` is {given!r}; choose {', '.join(PARTS)}, or omit it", field)
    return next((part for part in PARTS if part == given), None)


def _seconds(row: Mapping[str, Any], field: str, place: str, errors: PlanErrors) -> float | None:
    given = _text(row, field)
    try:
        value = float(given) if given else None
    except ValueError:
        value = -1.0
    if value is not None and not 0 <= value <= _LONGEST_S:
        message = f"`{field}` is {given!r}; it must be seconds from the video's start, at most {_LONGEST_S:g}"
        errors.add(f"{place}: {message}", "labels")
        return None
    return value
