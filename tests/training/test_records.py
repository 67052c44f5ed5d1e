"""Records of a training: which are held out, and what changes their digest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlora.errors import BadPlan
from vlora.plan_files.errors import PlanErrors, PlanText
from vlora.training.records import Records, read_records


def read(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Records:
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    errors = PlanErrors(PlanText())
    found = read_records(folder, None, **{"held_out": 0.25, "seed": 0, **settings}, errors=errors)
    errors.raise_if_any()
    return found


ROWS = [{"question": "what ?", "answer": f"{number}", "group": f"g{number // 4}"} for number in range(40)]


def test_a_share_of_whole_groups_is_held_out(tmp_path: Path) -> None:
    found = read(tmp_path, ROWS)
    held, trained = ({int(record.answer) // 4 for record in part} for part in (found.held_out, found.train))
    assert len(found.held_out) in (8, 12) and len(found.train) + len(found.held_out) == 40
    assert held.isdisjoint(trained)
    assert read(tmp_path, ROWS) == found
    assert read(tmp_path, ROWS, seed=1).held_out != found.held_out
    assert read(tmp_path, ROWS, held_out=0.0).held_out == ()


def test_a_byte_order_mark_and_windows_line_ends_make_no_difference(tmp_path: Path) -> None:
    found, file = read(tmp_path, ROWS), tmp_path / "questions.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    errors = PlanErrors(PlanText())
    assert read_records(tmp_path, None, held_out=0.25, seed=0, errors=errors).train == found.train and not errors


def test_one_group_alone_is_trained_on(tmp_path: Path) -> None:
    found = read(tmp_path, ROWS[:4], held_out=0.9)
    assert len(found.train) == 4 and not found.held_out


def test_given_splits_replace_the_share(tmp_path: Path) -> None:
    parts = ("train", "validation", "test", "train")
    found = read(tmp_path, [{**row, "split": parts[place % 4]} for place, row in enumerate(ROWS)])
    assert len(found.train) == 20 and len(found.held_out) == 10
    with pytest.raises(BadPlan, match="some rows have a `split`, others do not"):
        read(tmp_path, [{**ROWS[0], "split": "train"}, *ROWS[1:]])


def test_the_digest_changes_with_the_text(tmp_path: Path) -> None:
    found = read(tmp_path, ROWS)
    assert read(tmp_path, [*ROWS[:-1], {**ROWS[-1], "answer": "other"}]).digest != found.digest
