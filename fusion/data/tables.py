"""CSV and JSONL: one row per sample; each error is reported with file and line."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fusion.data.frames import Clip, Picture, find_file, read_text
from fusion.data.samples import Answer, Item
from fusion.plan.data_formats import Questions, VideoFolder
from vlora.plan_files.errors import PlanErrors
from vlora.training.records import PART_NAMES, PARTS, Part, json_rows

_LONGEST_S = 1e6  # seconds of a video
_SEVERAL = ";"  # between labels of one cell, as in "car;person"
_FILE = ("path", "file", "filename", "file_name", "filepath", "file_path")
_LABEL = ("class", "class_name", "category", "target")
# Names of a field's column beside its own; several of them in one file are ambiguous.
_ALSO: dict[str, tuple[str, ...]] = {
    "image": (*_FILE, "image_path", "image_name", "image_file", "img", "img_path", "picture"),
    "video": (*_FILE, "video_path", "video_name", "clip"),
    "answer": ("label", *_LABEL, "caption"),
    "label": _LABEL,
    "split": ("part", "subset", "data_set"),
}


def read_questions(data: Questions, several: bool, errors: PlanErrors) -> list[Item]:
    """Read rows image, answer[, question, split, group]. several: an answer is a list of labels, possibly empty."""
    folder = data.images or data.path.parent
    items = []
    parts: dict[str, Part | None] = {}
    for place, row in _rows(data.path, ("image", "answer"), "path", data.columns, errors):
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
    for place, row in _rows(data.labels, ("video", "label"), "labels", data.columns, errors):
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
    file: Path, needed: tuple[str, ...], field: str, columns: Mapping[Any, str], errors: PlanErrors
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Rows that have the required fields, each with its file and line. columns: the plan's."""
    read = {".csv": _csv, ".tsv": _csv, ".jsonl": _jsonl}.get(file.suffix.lower())
    if read is None:
        sheets = dict.fromkeys((".xlsx", ".xls", ".ods"), "; save the sheet as 'CSV UTF-8'")
        sheets[".json"] = f"; write its list as lines: jq -c '.[]' {file.name} > {file.stem}.jsonl"
        sheet = sheets.get(file.suffix.lower(), "")
        errors.add(f"{file} is neither .csv nor .jsonl{sheet}", field)
        return
    if not file.is_file():
        errors.add(f"there is no file {file}", field)
        return
    reported: set[str] = set()
    known: dict[tuple[str, ...], dict[str, str]] = {}
    line = 0
    try:
        for line, row in read(file):
            place = f"{file}, line {line}"
            if not isinstance(row, dict):
                errors.add(f"{place}: {row}", field)
                continue
            if tuple(row) not in known:
                known[tuple(row)] = _named(tuple(row), needed, columns, place, field, errors)
            named = {name: row[column] for name, column in known[tuple(row)].items()}
            missing = [name for name in needed if named.get(name) is None]
            if not missing:
                yield place, named
            # A missing column is missing in every row, so it is reported once.
            elif file.suffix.lower() == ".jsonl" or not reported.issuperset(missing):
                reported.update(missing)
                lacks = f"lacks {' and '.join(f'`{name}`' for name in missing)}; has {', '.join(row)}"
                errors.add(f"{place}: {lacks}; name another column with `columns: {{{missing[0]}: NAME}}`", field)
    except OSError as error:
        errors.add(f"{file} cannot be read: {error}", field)
    except ValueError as error:
        errors.add(str(error), field)
    else:
        if not line:
            header = "" if file.suffix.lower() == ".jsonl" else f" after a line of columns ({','.join(needed)})"
            errors.add(f"{file}, line 1: the file is empty, or has only a line of columns; add rows{header}", field)


def _named(
    row: tuple[str, ...],
    needed: tuple[str, ...],
    columns: Mapping[Any, str],
    place: str,
    field: str,
    errors: PlanErrors,
) -> dict[str, str]:
    """The column of each field of a row: that of the plan, else that of its own name, else one with a known name."""
    by_name: dict[str, list[str]] = {}
    for column in row:
        by_name.setdefault(_plain(column), []).append(column)
    found: dict[str, str] = {}
    for name in dict.fromkeys((*needed, "question", "split", "group", "start_s", "end_s", *columns)):
        wanted = columns.get(name, name)
        there = [wanted] if name in columns and wanted in row else by_name.get(_plain(wanted), [])
        if name in columns and not there:
            errors.add(f"{place}: has no column {columns[name]!r}; has {', '.join(row)}", "columns", name)
        elif name not in columns and not there:
            there = [column for each in _ALSO.get(name, ()) if each not in needed for column in by_name.get(each, ())]
        if len(there) > 1:
            errors.add(
                f"{place}: {' and '.join(there)} may each be the {name}; name one: `columns: {{{name}: {there[0]}}}`",
                field,
            )
        found.update(dict.fromkeys([name], there[0]) if there else {})
    return found


def _plain(column: str) -> str:
    return "_".join(column.lower().replace("-", " ").replace("_", " ").split())


def _csv(file: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    with io.StringIO(read_text(file), newline="") as source:
        # Others separate by semicolons, tabs or bars, and may say so in a first line (sep=;); blank lines may
        # precede the columns.
        before, start, first = 0, 0, source.readline()
        while first and (not first.strip() or first.startswith("sep=")):
            before, start, first = before + 1, source.tell(), source.readline()
        delimiter = max(",;\t|", key=lambda mark: (mark != "|" and mark in first, first.count(mark)))
        source.seek(start)
        # Strict: otherwise an unclosed quote would join all following rows into one cell.
        reader = csv.DictReader(source, strict=True, delimiter=delimiter, skipinitialspace=delimiter != "\t")
        last = before  # the last line that could be read
        try:
            columns = [column for column in reader.fieldnames or () if column.strip()]
            if len(set(columns)) < len(columns):
                yield before + 1, f"names a column twice: {', '.join(columns)}"
                return
            last = before + reader.line_num
            for row in reader:
                last = before + reader.line_num
                if any(more := row.pop(None, None) or ()):  # cells without a column
                    yield last, f"has more cells than the first line; put quotes around commas: {more!r}"
                elif any((cell or "").strip(" ,;\t") for cell in row.values()):
                    row.pop("", None)
                    yield last, row
        except csv.Error as error:
            yield last + 1, f"invalid CSV from this line on ({error}); look for an unclosed quote"


def _jsonl(file: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    return json_rows(read_text(file).encode())


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
    if given and given.lower() not in PART_NAMES:
        errors.add(f"{place}: `split` is {given!r}; choose {', '.join(PARTS)}, or omit it", field)
    return PART_NAMES.get(given.lower())


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
