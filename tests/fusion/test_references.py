"""Referring expressions in RefCOCO's format: read with their boxes, answered in words, scored by overlap."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.training.text_metrics import box_in_words, box_of_words, overlap
from heads.boxes import Box, iou
from tests.fusion.made import load_plan, picture, write_plan
from vlora.errors import BadPlan

LINES = "data: {format: references, path: refs.json, instances: things.json}\nmetric: overlap"
SPLITS = ("train", "train", "val", "testA", "testB")


def write(folder: Path, question: str = "where is {expression} ?", lines: str = LINES) -> Path:
    """Five pictures of 40 x 20 with one object each, which two annotators name differently."""
    things: dict[str, Any] = {"images": [], "annotations": [], "categories": [{"id": 7, "name": "cow"}]}
    refs = []
    for number, split in enumerate(SPLITS):
        picture(folder / f"{number}.png", number, size=(20, 40))
        things["images"].append({"id": 100 + number, "file_name": f"{number}.png", "width": 40, "height": 20})
        box = {"bbox": [10, 5, 20, 10 + number], "category_id": 7}
        things["annotations"].append({"id": 200 + number, "image_id": 100 + number, **box})
        sentences = [{"sent": f"cow {number}", "raw": f"Cow {number}!", "sent_id": 1}, {"raw": f"Other {number}"}]
        refs.append(
            {"ref_id": number, "ann_id": 200 + number, "image_id": 100 + number, "split": split, "sentences": sentences}
        )
    (folder / "things.json").write_text(json.dumps(things))
    (folder / "refs.json").write_text(json.dumps(refs))
    file = write_plan(folder, lines)
    file.write_text(file.read_text().replace("what is it ?", f"'{question}'"))
    return file


def test_an_expression_asks_for_the_box_that_it_names(tmp_path: Path) -> None:
    (data,) = load_plan(write(tmp_path)).values()
    splits = data.splits
    assert splits.task == "referring" and splits.labels == ()
    assert [len(part) for part in splits.parts.values()] == [4, 2, 4]
    targets = {sample.question: sample.target for part in splits.parts.values() for sample in part}
    assert targets["where is cow 0 ?"] == targets["where is Other 0 ?"] == "[250, 250, 750, 750]"
    assert targets["where is cow 4 ?"] == "[250, 250, 750, 950]"
    for part in splits.parts.values():  # expressions about one picture stay together
        assert all(part[0].group != other.group or part[0].target == other.target for other in part)
    assert len({sample.group for sample in splits.train}) == 2


def test_references_without_parts_are_split(tmp_path: Path) -> None:
    plan = write(tmp_path)
    refs = json.loads((tmp_path / "refs.json").read_text())
    (tmp_path / "refs.json").write_text(json.dumps([{**ref, "split": None} for ref in refs]))
    (data,) = load_plan(plan).values()
    homes = [{int(sample.frames.file.stem) for sample in part} for part in data.splits.parts.values()]  # type: ignore[attr-defined]
    assert sorted(number for home in homes for number in home) == [0, 1, 2, 3, 4]


def change(**fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda refs: refs[1].update(fields)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change(ann_id=999), "refs.json, ref 1: .*things.json has no annotation 999"),
        (change(image_id=100), "ref 1: annotation 201 is of image 101, not 100"),
        (change(split="testC"), "ref 1: `split` is 'testC'; choose train, val"),
        (change(sentences=[]), "ref 1: has no sentence"),
        (change(sentences=[{"sent": " "}]), "ref 1: has no sentence"),
        (change(ref_id="one"), r"`\[1\].ref_id`: is 'one'; it must be a whole number"),
        (lambda refs: refs.clear(), "train is empty"),
    ],
)
def test_errors_in_references(tmp_path: Path, spoil: Callable[[list[dict[str, Any]]], None], message: str) -> None:
    plan = write(tmp_path)
    refs = json.loads((tmp_path / "refs.json").read_text())
    spoil(refs)
    (tmp_path / "refs.json").write_text(json.dumps(refs))
    with pytest.raises(BadPlan, match=message):
        load_plan(plan)


@pytest.mark.parametrize(
    ("written", "change", "message"),
    [
        ({}, lambda things: things["images"].pop(0), r"ref 0: .*things.json has no image 100"),
        ({}, lambda things: things["annotations"][0].update(bbox=None), "things.json has no bbox for annotation 200"),
        ({}, lambda things: things["annotations"][0].update(id=201), "things.json has 2 annotations 201"),
        ({"question": "where ?"}, len, r"field `domains.0..question`: must contain {expression} in place of"),
        ({"lines": LINES.replace("metric: overlap", "task: referring")}, len, r"has no `metric`; .* use `overlap`"),
        ({"lines": LINES.replace("refs.json", "refs.p")}, len, "refs.p is a pickle, which can run any code"),
        (
            {"lines": "source: drawn-traffic-references\nmetric: overlap"},
            len,
            r"field `domains.0..metric`: is 'overlap', but the answer '.* lane .*'",
        ),
    ],
)
def test_errors_in_instances_and_fields(
    tmp_path: Path, written: dict[str, str], change: Callable[[dict[str, Any]], object], message: str
) -> None:
    (tmp_path / "refs.p").write_bytes(pickle.dumps([]))
    plan, file = write(tmp_path, **written), tmp_path / "things.json"
    things = json.loads(file.read_text())
    change(things)
    file.write_text(json.dumps(things))
    with pytest.raises(BadPlan, match=message):
        load_plan(plan)


@given(st.tuples(*[st.floats(0, 0.9)] * 2, *[st.floats(0.05, 1)] * 2))
def test_boxes_come_back_from_words(place: tuple[float, float, float, float]) -> None:
    left, top, width, height = place
    box = Box(0, left, top, min(1.0, left + width), min(1.0, top + height))
    answer = box_in_words((box.left, box.top, box.right, box.bottom))
    again = box_of_words(answer)
    assert again is not None and iou(box, again) > 0.9
    assert overlap(f"It is here: ({answer.strip('[]').replace(',', ' ;')}).", answer) == 1.0


def test_half_of_the_union_is_enough_and_an_answer_that_is_no_box_scores_zero() -> None:
    wrong = ("", "left", "[1, 2, 3]", "[0.1, 0.2, 0.3, 0.4]", "[5, 5, 5, 9]", "[9, 0, 1, 5]", "[0, 0, 1001, 9]")
    for answer in (*wrong, f"{'9' * 99} 1 2 3"):
        assert box_of_words(answer) is None and overlap(answer, "[0, 0, 500, 500]") == 0.0
    assert overlap("[0, 0, 500, 1000]", "[0, 0, 1000, 1000]") == 1.0
    assert overlap("[0, 0, 499, 1000]", "[0, 0, 1000, 1000]") == 0.0
