"""Questions and answers to learn from, as JSON lines, the `questions` format of `vlora fuse`; order and progress of a
training on them.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import itertools
import json
import os
import random
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vlora.plan_files.errors import PlanErrors
from vlora.wording.shown import shown

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")
PART_NAMES: dict[str, Part] = {  # in lower case, as tools write them
    **{"train": "train", "training": "train", "val": "validation", "valid": "validation", "validation": "validation"},
    "dev": "validation",
    **{"test": "test", "testing": "test", "testa": "test", "testb": "test"},  # RefCOCO's: people, and other objects
}
FILE_NAME = "questions.jsonl"
MAX_BYTES = 256 * 2**20
"""Of a file: records are kept in memory."""
MAX_NAMED = 8
"""Reasons that are kept, of records that cannot be used. All are counted."""


class Record(NamedTuple):
    """One question with its answer. place: file and line, for errors."""

    question: str
    answer: str
    image: Path | None
    place: str


class Records(NamedTuple):
    """The records of a training.

    Attributes:
        train, held_out: In the file's order.
        digest: Changes with the file's text.
        num_bad: Lines that are no records and were left out.
        bad: The first of them: file, line and reason.
    """

    train: tuple[Record, ...]
    held_out: tuple[Record, ...]
    digest: str
    num_bad: int = 0
    bad: tuple[str, ...] = ()


class _BadLine(Exception):
    """A line that is no record, and why."""


def read_records(
    path: Path, question: str | None, *, held_out: float, seed: int, errors: PlanErrors, skips: bool = False
) -> Records:
    """Read rows answer[, question, image, split, group].

    Rows with a `split` of validation are held out, those of test are ignored; names are those of `vlora fuse`. Without
    any, a share is drawn; rows of one group, else of one image, are in one part.

    Args:
        path: A JSONL file, or a folder with `questions.jsonl`. Images are relative to its folder.
        question: For rows without one.
        skips: Leave out lines that are no records, unless more than half are; images are looked for when they are
            used. Otherwise each is an error.
    """
    file = path / FILE_NAME if path.is_dir() else path
    found: list[tuple[Record, Part | None, str]] = []
    bad: list[str] = []
    digest = hashlib.blake2b(digest_size=16)
    for number, row in json_rows(_content(file, errors)):
        place = f"{file}, line {number}"
        try:
            record, part = _record(file.parent, place, row, question, needs_image=not skips)
        except _BadLine as error:
            bad.append(f"{place}: {error}")
            continue
        assert isinstance(row, dict)
        found.append((record, part, str(row.get("group") or record.image or place)))
        # Where no `split` does, the group decides what is held out. Rows without groups keep the digest that they had.
        group = [row["group"]] if part is None and row.get("group") else []
        digest.update(
            json.dumps([record.question, record.answer, str(row.get("image")), row.get("split"), *group]).encode()
        )
    if not skips or too_many(len(bad), len(bad) + len(found)):
        for problem in bad:
            errors.add(problem, "data")
    if len(unsplit := {part is None for _, part, _ in found}) > 1:
        errors.add(f"{file}: some rows have a `split`, others do not; give it to all rows, or to none", "data")
    drawn = _draw([group for _, _, group in found], held_out, seed) if unsplit == {True} else set()
    kept = tuple(record for record, part, group in found if part == "train" or (part is None and group not in drawn))
    held = tuple(record for record, part, group in found if part == "validation" or group in drawn)
    return Records(kept, held, digest.hexdigest(), len(bad), tuple(bad[:MAX_NAMED]))


def json_rows(data: bytes) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """The number of each line that is not empty, from 1, with its object, or why it has none."""
    # `splitlines` of text divides at characters that JSON may contain.
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
            if b"\\u" in line:
                json.dumps(row, ensure_ascii=False).encode()  # refuses unpaired surrogates, which JSON allows
        except UnicodeDecodeError:
            yield number, "is not UTF-8 text"
        except (ValueError, RecursionError) as error:
            yield number, f"is not JSON: {error}"
        else:
            yield number, row if isinstance(row, dict) else f"is {type(row).__name__}; a row must be an object"


def too_many(num_bad: int, num_records: int) -> bool:
    """Whether the records that cannot be used are so many that the data is not what it should be."""
    return 2 * num_bad > num_records


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


def _content(file: Path, errors: PlanErrors) -> bytes:
    problem = unreadable(file)
    if not problem:
        try:
            return file.read_bytes()
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
    errors.add(f"{file} {problem}", "data")
    return b""


def _record(
    folder: Path, place: str, row: dict[str, Any] | str, question: str | None, *, needs_image: bool
) -> tuple[Record, Part | None]:
    if isinstance(row, str):
        raise _BadLine(row)
    asked, answer, image, part = row.get("question", question), row.get("answer"), row.get("image"), row.get("split")
    if not isinstance(answer, str) or not answer.strip():
        raise _BadLine(f"`answer` is {shown(answer)}; it must be text")
    if not isinstance(asked, str) or not asked.strip():
        raise _BadLine(f"`question` is {shown(asked)}; it must be text (or set `question` in the plan)")
    if image is not None and not (isinstance(image, str) and (not needs_image or os.path.isfile(folder / image))):
        raise _BadLine(f"`image` is {shown(image)}; there is no such file in {folder}")
    if part is not None and str(part).lower() not in PART_NAMES:
        raise _BadLine(f"`split` is {shown(part)}; use one of {', '.join(PARTS)}")
    record = Record(asked, answer, None if image is None else folder / image, place)
    return record, None if part is None else PART_NAMES[part.lower()]


Phase = Literal["before", "train", "after", "done"]


@dataclasses.dataclass
class Progress:
    """All numbers of a training that change.

    Attributes:
        phase: Evaluation before the first step, training, evaluation after the last step, or complete.
        place: Records used in the current optimizer step, or in the current evaluation.
        num_passed: Records of the training part that were passed over, because they cannot be used.
        bad, bad_held_out: Places of the records that cannot be used, in both parts.
        reasons: Of the first of them, with file and line.
        num_tokens: Tokens of all micro-steps so far, evaluations included.
        total, count: Sum of losses and number of tokens in the current evaluation.
        held_out_before, held_out_after: Mean losses over the held-out part.
        seconds: Time of the engine's thread.
    """

    phase: Phase = "before"
    step: int = 0
    place: int = 0
    num_passed: int = 0
    bad: list[int] = dataclasses.field(default_factory=list)
    bad_held_out: list[int] = dataclasses.field(default_factory=list)
    reasons: list[str] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    total: float = 0.0
    count: int = 0
    held_out_before: float | None = None
    held_out_after: float | None = None
    seconds: float = 0.0


class RecordOrder:
    """All records of the training part in a random order, then all in another one, and so on without an end.

    A record's number counts in this order, records that cannot be used included.
    """

    def __init__(self, records: Records, seed: int, bad: Iterable[int], bad_held_out: Iterable[int]) -> None:
        """bad, bad_held_out: places, in both parts, of records that cannot be used."""
        self._train = records.train
        self._seed = seed
        self._bad = set(bad)
        left_out = set(bad_held_out)
        self._held_out = {place: one for place, one in enumerate(records.held_out) if place not in left_out}
        self._orders: dict[int, list[int]] = {}  # of the last two epochs

    @property
    def num_train(self) -> int:
        return len(self._train) - len(self._bad)

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    def held_out(self, first: int, most: int) -> list[Record]:
        return list(itertools.islice(self._held_out.values(), first, first + most))

    def usable(self, first: int) -> Iterator[int]:
        """Numbers, from `first` on, of the records that can be used."""
        while self.num_train:
            if self._place(first) not in self._bad:
                yield first
            first += 1

    def record(self, number: int) -> Record:
        return self._train[self._place(number)]

    def set_aside(self, number: int) -> int:
        place = self._place(number)
        self._bad.add(place)
        return place

    def set_held_out_aside(self, number: int) -> int:
        place = next(itertools.islice(self._held_out, number, None))
        del self._held_out[place]
        return place

    def _place(self, number: int) -> int:
        epoch, place = divmod(number, len(self._train))
        if epoch not in self._orders:
            order = list(range(len(self._train)))
            random.Random(f"{self._seed} {epoch}").shuffle(order)
            self._orders = {epoch: order} | {one: own for one, own in self._orders.items() if abs(one - epoch) == 1}
        return self._orders[epoch][place]
