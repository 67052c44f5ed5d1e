"""Data checks: unreadable files, one picture in two parts, empty parts, and labels missing from a part."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fusion.data.frames import FileInfo, Frames
from fusion.data.items import Item
from fusion.data.samples import Splits
from fusion.data.targets import labels_shown
from fusion.progress.progress import Progress
from vlora.plan_files.errors import PlanErrors

_SHOWS_LABELS = ("classification", "binary", "action", "multi_label", "detection")  # every part needs every label


def verify_items(items: Sequence[Item], errors: PlanErrors, progress: Progress, name: str) -> list[FileInfo]:
    """Decode every file once, and report pictures that occur in two parts. name: the domain's name."""
    field = "path"
    different = list(dict.fromkeys(item.frames for item in items))  # a picture may have many questions
    found: dict[Frames, FileInfo | str] = {}
    with (
        ThreadPoolExecutor() as pool,
        progress.work(f"checking the files of {name}", len(different), "files") as update,
    ):
        for frames, one in zip(different, pool.map(_verify_file, different), strict=True):
            found[frames] = one
            update(len(found))
    files: list[FileInfo] = []
    first: dict[str, Item] = {}
    reported: set[tuple[str, Path]] = set()
    for why in found.values():
        if isinstance(why, str):
            errors.add(why, field)
    for item in items:
        one = found[item.frames]
        if isinstance(one, str):
            continue
        files.append(one)
        if item.size not in (None, one.size):
            errors.add(f"{item.place} has size {item.size}, but {item.frames.file} has {one.size}", field)
        before = first.setdefault(one.digest, item)
        pair = (one.digest, item.frames.file)
        if before.part != item.part and pair not in reported:
            reported.add(pair)
            same = (
                "is also in" if before.frames.file == item.frames.file else f"is identical to {before.frames.file} in"
            )
            errors.add(
                f"{item.frames.file} in {item.part} {same} {before.part}; parts must not share a picture",
                field,
            )
    return files


def _verify_file(frames: Frames) -> FileInfo | str:
    try:
        return frames.verify()
    except ValueError as error:
        return str(error)


def check_parts(splits: Splits, errors: PlanErrors) -> None:
    """Check that every part has samples, and samples of every label."""
    for name, part in splits.parts.items():
        if not part:
            errors.add(f"{name} is empty", "path")
    if errors or splits.task not in _SHOWS_LABELS:
        return
    shown = {
        name: Counter(itertools.chain.from_iterable(labels_shown(splits.task, sample.target) for sample in part))
        for name, part in splits.parts.items()
    }
    for number, label in enumerate(splits.labels):
        missing = [name for name, counts in shown.items() if not counts[number]]
        if missing:
            there = ", ".join(f"{counts[number]} in {name}" for name, counts in shown.items() if counts[number])
            errors.add(
                f"the label {label!r} is missing from {' and '.join(missing)}: {there or 'none anywhere'}", "path"
            )
