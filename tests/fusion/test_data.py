"""User data: reading, checking and splitting; errors are reported with line, field and file."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fusion.data.frames import Clip, Picture
from fusion.data.load import DomainData
from fusion.data.samples import Sample
from fusion.data.split import clusters_of, split
from heads import Box
from tests.example_counts import scaled
from tests.fusion.made import load_plan, picture, video, write_plan
from vlora.errors import BadPlan
from vlora.training.records import PARTS


def load(plan: Path) -> DomainData:
    (data,) = load_plan(plan).values()
    return data


def errors_of(plan: Path) -> list[str]:
    with pytest.raises(BadPlan) as caught:
        load_plan(plan)
    return str(caught.value).splitlines()


def image_folder(root: Path, counts: dict[str, int], labels: Sequence[str] = ("cat", "dog")) -> None:
    """counts: part (or "" for none) -> pictures per label."""
    seed = 0
    for part, count in counts.items():
        for label in labels:
            for number in range(count):
                seed += 1
                picture(root / part / label / f"{number}.png", seed)


IMAGES = "data: {format: image_folder, path: pictures}"


# -- formats ----------------------------------------------------------------------------------------------------------


def test_an_image_folder_with_parts(tmp_path: Path) -> None:
    image_folder(tmp_path / "pictures", {"train": 3, "validation": 1, "test": 2})
    (tmp_path / "pictures" / "train" / "cat" / "Thumbs.db").write_bytes(b"of a file manager")
    splits = load(write_plan(tmp_path, IMAGES)).splits
    assert splits.task == "classification" and splits.labels == ("cat", "dog") and splits.real
    assert [len(part) for part in splits.parts.values()] == [6, 2, 4]
    assert splits.train[0].frames[0].shape == (24, 32, 3) and splits.num_frames == 1
    assert sorted(sample.target for sample in splits.test) == [0, 0, 1, 1]


def test_an_image_folder_is_split_the_same_way_for_a_seed(tmp_path: Path) -> None:
    image_folder(tmp_path / "pictures", {"": 20})

    def files(seed: int) -> list[list[Path]]:
        splits = load(write_plan(tmp_path, IMAGES, more=f"seed: {seed}\n")).splits
        return [[file_of(sample) for sample in part] for part in splits.parts.values()]

    assert files(0) == files(0) != files(1)
    for part, count in zip(files(0), (14, 3, 3), strict=True):
        assert Counter(file.parent.name for file in part) == {"cat": count, "dog": count}


@pytest.mark.parametrize("parts", [{"": 60}, {"train": 42, "validation": 9, "test": 9}])
def test_the_first_samples_of_a_part_have_all_labels(tmp_path: Path, parts: dict[str, int]) -> None:
    """Training holds back the first samples for early stopping; in file order they would all have one label."""
    image_folder(tmp_path / "pictures", parts)
    for part in load(write_plan(tmp_path, IMAGES)).splits.parts.values():
        assert {sample.target for sample in part[:8]} == {0, 1}


def test_frames_of_a_clip_and_equal_pictures_stay_together(tmp_path: Path) -> None:
    for number, (label, place) in enumerate(itertools.product(("cat", "dog"), range(30))):
        picture(tmp_path / "pictures" / label / f"clip{place // 5}" / f"{place}.png", number)
    for label, first in (("cat", 0), ("dog", 100)):
        for number in range(30):
            picture(tmp_path / "equal" / label / f"{number}.png", first + number % 6)
    splits = load(write_plan(tmp_path, IMAGES)).splits
    clips = [{file_of(sample).parent for sample in part} for part in splits.parts.values()]
    assert sum(map(len, clips)) == 12 and all(clips)
    splits = load(write_plan(tmp_path, IMAGES.replace("pictures", "equal"))).splits
    assert sum(len({file_of(sample).read_bytes() for sample in part}) for part in splits.parts.values()) == 12


def coco(folder: Path, count: int = 9) -> dict[str, Any]:
    kinds = [{"id": 3, "name": "car"}, {"id": 8, "name": "van"}]
    content: dict[str, Any] = {"images": [], "annotations": [], "categories": kinds}
    for number in range(1, count + 1):
        picture(folder / "pictures" / f"{number}.jpg", number)
        content["images"].append({"id": number, "file_name": f"{number}.jpg", "width": 32, "height": 24})
        for which, category in enumerate((3, 8)):
            entry = {"image_id": number, "category_id": category, "caption": f"picture {number}"}
            content["annotations"].append({"id": 2 * number + which, "bbox": [8 * which, 6, 8, 12], **entry})
    return content


COCO = "data: {format: coco, path: boxes.json, images: pictures}"


def coco_plan(folder: Path, content: dict[str, Any], *more: str) -> Path:
    (folder / "boxes.json").write_text(json.dumps(content))
    return write_plan(folder, "\n".join((COCO, *more)))


BOTH = (Box(0, 0.0, 0.25, 0.25, 0.75), Box(1, 0.25, 0.25, 0.5, 0.75))


@pytest.mark.parametrize(
    ("task", "target"), [("detection", BOTH), ("multi_label", (0, 1)), ("counting", 2), ("captioning", None)]
)
def test_coco_for_each_task(tmp_path: Path, task: str, target: object) -> None:
    splits = load(coco_plan(tmp_path, coco(tmp_path), f"task: {task}")).splits
    samples = [sample for part in splits.parts.values() for sample in part]
    assert all(sample.target == (target or f"picture {file_of(sample).stem}") for sample in samples)
    seen = [{file_of(sample) for sample in part} for part in splits.parts.values()]
    assert sum(map(len, seen)) == 9, "both captions of a picture are in one part"
    if task == "detection":
        assert (splits.task, splits.labels) == ("detection", ("car", "van"))


@pytest.mark.parametrize("suffix", ("jpg", "png", "tif"))
@pytest.mark.parametrize("orientation", range(2, 9))
def test_boxes_turn_with_pictures_that_exif_rotates(tmp_path: Path, suffix: str, orientation: int) -> None:
    """Each box is around the one bright square of its picture. Sizes decide where EXIF exchanges width and height."""
    for stated in ("ignore", "apply", None):
        content, exif = coco(tmp_path), Image.Exif()
        exif[0x0112] = orientation
        content["annotations"] = []
        for image in content["images"]:
            stored = np.zeros((24, 32), np.uint8)
            stored[2:8, 4 : 12 + image["id"]] = 250
            image["file_name"] = f"{image['id']}.{suffix}"
            Image.fromarray(stored).save(tmp_path / "pictures" / image["file_name"], exif=exif)
            shown = Picture(tmp_path / "pictures" / image["file_name"])[0][..., 0]
            if stated == "apply":
                image["height"], image["width"] = shown.shape
            down, across = ((shown if stated == "apply" else stored) > 150).nonzero()
            edges = [int(edge) for edge in (across.min(), down.min(), np.ptp(across) + 1, np.ptp(down) + 1)]
            content["annotations"] += [{"image_id": image["id"], "category_id": 3, "bbox": edges}]
        plan = coco_plan(tmp_path, content)
        if stated is not None:
            plan.write_text(plan.read_text().replace("images: pictures", f"images: pictures, exif: {stated}"))
        if stated is None and orientation < 5:
            assert f"EXIF (orientation {orientation})" in (error := errors_of(plan)[0]) and "`exif: ignore` if" in error
            continue
        for sample in load(plan).splits.train:
            ((_, left, top, right, bottom, *_),) = sample.target  # type: ignore[union-attr, misc, str-unpack]
            bright = sample.frames[0][..., 0] > 150
            height, width = bright.shape
            inside = bright[round(top * height) : round(bottom * height), round(left * width) : round(right * width)]
            assert inside.mean() > 0.9 and inside.sum() > 0.9 * bright.sum()


def each(*changes: Callable[[dict[str, Any]], object], key: str = "annotations") -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for change, entry in itertools.product(changes, content[key]):
            change(entry)

    return change


def as_shares(entry: dict[str, Any]) -> None:
    left, top, width, height = entry["bbox"]
    entry["bbox"] = [left / 32, top / 24, width / 32, height / 24]


def as_polygon(entry: dict[str, Any]) -> None:
    left, top, width, height = entry.pop("bbox")
    middle = [left + width / 2, top, left + width, top + height / 2]
    entry["segmentation"] = [middle, [left + width / 2, top + height, left, top + height / 2]]


def flat(polygons: list[list[float]]) -> list[float]:
    return [*itertools.chain(*polygons)]


CROWD = {"id": 99, "image_id": 1, "iscrowd": 1, "segmentation": {"counts": "PQR", "size": [24, 32]}}


@pytest.mark.parametrize(
    "change",
    [
        each(as_shares),
        each(as_polygon),
        each(as_shares, as_polygon),
        each(as_polygon, lambda entry: entry.update(bbox=[], segmentation=flat(entry["segmentation"]))),
        each(lambda entry: entry.update(iscrowd=None, segmentation=None, caption=None)),
        each(lambda entry: entry.pop("id")),
        each(lambda entry: entry.update(id=7)),
        each(lambda entry: entry.update(width=None, height=None), key="images"),
        each(lambda entry: (entry.pop("width"), entry.pop("height")), key="images"),
        each(lambda entry: entry.update(file_name="..\\pictures\\" + entry["file_name"]), key="images"),
        lambda content: content["annotations"].append(CROWD),
    ],
)
def test_coco_as_tools_write_it(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = coco(tmp_path)
    change(content)
    assert all(sample.target == BOTH for sample in load(coco_plan(tmp_path, content)).splits.train)


def test_rotated_pictures_without_boxes_and_absolute_paths(tmp_path: Path) -> None:
    content, exif = coco(tmp_path), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (32, 24)).save(tmp_path / "pictures" / "9.jpg", exif=exif)
    assert load(coco_plan(tmp_path, content, "task: captioning")).splits.task == "captioning"
    content["annotations"] = [each for each in content["annotations"] if each["image_id"] != 9]
    splits = load(coco_plan(tmp_path, content)).splits
    assert sum(sample.target == () for part in splits.parts.values() for sample in part) == 1
    each(lambda entry: entry.update(file_name=str(tmp_path / "pictures" / entry["file_name"])), key="images")(content)
    plan = coco_plan(tmp_path, content)
    plan.write_text(plan.read_text().replace(", images: pictures", ""))
    assert len(load(plan).splits.train) > 3


ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-32")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("end", ("\n", "\r\n"))
def test_files_of_any_encoding_and_line_end(tmp_path: Path, encoding: str, end: str) -> None:
    """Of Windows and its spreadsheets."""
    plan = coco_plan(tmp_path, content := coco(tmp_path))
    (tmp_path / "boxes.json").write_bytes(json.dumps(content, indent=1).replace("\n", end).encode(encoding))
    assert load(plan).splits.labels == ("car", "van")
    rows = [(f"pictures\\{number}.jpg", f"ein Auto, grün {number % 2}") for number in range(1, 10)]
    tables = {
        f"{name}.csv": [f"image{mark}answer", *(f'{image}{mark}"{answer}"' for image, answer in rows)]
        for name, mark in (("comma", ","), ("semicolon", ";"), ("tab", "\t"))
    }
    tables["rows.jsonl"] = [json.dumps({"image": a, "answer": b}, ensure_ascii=False) for a, b in rows]
    for name, lines in tables.items():
        (tmp_path / name).write_bytes((end.join(lines) + end).encode(encoding))
        splits = load(write_plan(tmp_path, f"data: {{format: questions, path: {name}}}")).splits
        assert {sample.target for sample in splits.train} <= {"ein Auto, grün 0", "ein Auto, grün 1"}


def test_a_file_of_another_encoding_is_refused_with_the_remedy(tmp_path: Path) -> None:
    picture(tmp_path / "0.png", 0)
    (tmp_path / "rows.csv").write_bytes("image,answer\n0.png,grün\n".encode("latin-1"))
    (tmp_path / "boxes.json").write_bytes('{"images": "grün"}'.encode("latin-1"))
    for lines in ("data: {format: questions, path: rows.csv}", "data: {format: coco, path: boxes.json}"):
        (error,) = errors_of(write_plan(tmp_path, lines))
        assert ", line " in error and "grün" in error and "is not UTF-8; save it as UTF-8" in error


def test_videos_in_folders(tmp_path: Path) -> None:
    for number in range(6):
        for label in ("left", "right"):
            video(tmp_path / "videos" / label / f"{number}.avi", 10 * number + len(label))
    splits = load(write_plan(tmp_path, "data: {format: video_folder, path: videos, frames: 3}")).splits
    assert splits.task == "action" and splits.labels == ("left", "right") and splits.num_frames == 3
    brightness = [float(frame.mean()) for frame in splits.train[0].frames]
    assert brightness == pytest.approx([1.5, 121.5, 221.5], abs=8)  # frames 0, 6 and 11 of 12


def test_videos_with_a_table(tmp_path: Path) -> None:
    rows = []
    for number in range(5):
        video(tmp_path / "videos" / f"{number}.avi", number)
        rows += [[f"{number}.avi", "early", "0", "1"], [f"{number}.avi", "late", "1", ""]]
    write_csv(tmp_path / "labels.csv", ["video", "label", "start_s", "end_s"], rows)
    lines = "data: {format: video_folder, path: videos, labels: labels.csv, frames: 1}"
    segments = load(write_plan(tmp_path, f"{lines}\ntask: classification"))
    assert not any("contradict" in note for note in segments.notes)
    splits = load(write_plan(tmp_path, lines)).splits
    for name, part in splits.parts.items():
        for sample in part:
            # At 6 frames per second, the middle of the first second is frame 3, that of the second is frame 9.
            assert float(sample.frames[0].mean()) == pytest.approx(61.5 if sample.target == 0 else 181.5, abs=8)
        assert Counter(file_of(sample) for sample in part).most_common(1)[0][1] == 2, name


@pytest.mark.parametrize(
    ("task", "answers", "labels", "targets"),
    [
        ("vqa", ["a cat", "a dog"], (), {"a cat", "a dog"}),
        ("classification", ["cat", "dog"], ("cat", "dog"), {0, 1}),
        ("binary", ["True", "no"], ("no", "yes"), {0, 1}),
        ("counting", ["0", "3"], ("0", "1", "2", "3"), {0, 3}),
        ("multi_label", ["cat;dog", "dog"], ("cat", "dog"), {(0, 1), (1,)}),
        ("regression", ["1.5", "-2"], ("value",), {1.5, -2.0}),
    ],
)
@pytest.mark.parametrize("suffix", ("csv", "jsonl"))
def test_questions(
    tmp_path: Path, suffix: str, task: str, answers: list[str], labels: tuple[str, ...], targets: set[object]
) -> None:
    rows = []
    for number in range(24):
        picture(tmp_path / "pictures" / f"{number}.png", number)
        question = f"question {number} ?" if task == "vqa" else ("what is it ?", "")[number % 3 == 0]
        rows.append([f"{number}.png", question, answers[number % 2]])
    if suffix == "csv":
        write_csv(tmp_path / "rows.csv", ["image", "question", "answer"], rows)
    else:
        lines = [json.dumps(dict(zip(("image", "question", "answer"), row, strict=True))) for row in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    lines_ = f"task: {task}\ndata: {{format: questions, path: rows.{suffix}, images: pictures}}"
    splits = load(write_plan(tmp_path, lines_)).splits
    assert splits.labels == labels and {sample.target for sample in splits.train} == targets
    if task == "vqa":
        assert splits.train[0].question == f"question {file_of(splits.train[0]).stem} ?"


@pytest.mark.parametrize("task", ("classification", "multi_label"))
def test_a_head_answers_only_the_questions_of_its_domain(tmp_path: Path, task: str) -> None:
    rows = [[str(picture(tmp_path / f"{n}.png", n).name), "what is it ?", ("cat", "dog")[n % 2]] for n in range(24)]
    rows[3][1] = "what is that ?"
    write_csv(tmp_path / "rows.csv", ["image", "question", "answer"], rows)
    lines = f"task: {task}\ndata: {{format: questions, path: rows.csv}}"
    (error,) = errors_of(write_plan(tmp_path, lines))
    assert "rows.csv, line 5: the question 'what is that ?' is not the domain's 'what is it ?'" in error
    assert ("use `head: words`, task vqa" in error) == (task == "classification") and "task vqa, or one" in error
    if task == "classification":
        assert load(write_plan(tmp_path, f"{lines}\nhead: words")).splits.task == "vqa"


def test_groups_of_a_table_stay_together_and_its_parts_are_kept(tmp_path: Path) -> None:
    rows = [[str(picture(tmp_path / f"{n}.png", n).name), "yes", f"camera {n // 4}"] for n in range(24)]
    write_csv(tmp_path / "rows.csv", ["image", "answer", "group"], rows)
    lines = "data: {format: questions, path: rows.csv}"
    splits = load(write_plan(tmp_path, lines)).splits
    cameras = [{int(file_of(sample).stem) // 4 for sample in part} for part in splits.parts.values()]
    assert sum(map(len, cameras)) == 6
    parts = ["test", "train", "validation"]
    write_csv(
        tmp_path / "rows.csv", ["image", "answer", "split"], [[*row[:2], parts[n % 3]] for n, row in enumerate(rows)]
    )
    assert [int(file_of(s).stem) % 3 for s in load(write_plan(tmp_path, lines)).splits.train] == [1] * 8


def test_labels_may_be_answered_in_words(tmp_path: Path) -> None:
    image_folder(tmp_path / "pictures", {"train": 3, "validation": 1, "test": 2})
    splits = load(write_plan(tmp_path, f"{IMAGES}\nhead: words")).splits
    assert splits.labels == () and {sample.target for sample in splits.validation} == {"cat", "dog"}


@pytest.mark.parametrize(("task", "answers"), [("multi_label", ["a;b", "b"]), ("regression", ["1.5", "-2"])])
def test_words_for_a_task_without_them_are_an_error_like_others(tmp_path: Path, task: str, answers: list[str]) -> None:
    rows = [[picture(tmp_path / f"{number}.png", number).name, answers[number % 2]] for number in range(24)]
    write_csv(tmp_path / "rows.csv", ["image", "answer"], rows)
    (tmp_path / "boxes.json").write_text(json.dumps(coco(tmp_path)))
    lines = f"task: {task}\nhead: words\ndata: {{format: questions, path: rows.csv}}"
    errors = errors_of(write_plan(tmp_path, lines, f"{COCO}\nhead: words", "source: nowhere"))
    assert [error.split("`")[1] for error in errors] == ["domains[0].head", "domains[1].head", "domains[2].source"]
    assert f"is 'words'; the task {task!r} is answered by {task}" in errors[0]


def test_a_short_clip_repeats_frames(tmp_path: Path) -> None:
    clip = Clip(video(tmp_path / "a.avi", 0, num_frames=2), 4)
    assert len(list(clip)) == len(clip) == 4
    assert [round(float(frame.mean()) / 20) for frame in clip] == [0, 0, 1, 1]


# -- splits -----------------------------------------------------------------------------------------------------------


@settings(max_examples=scaled(60))
@given(
    items=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=80), seed=st.integers(0, 9)
)
def test_groups_are_never_cut(items: list[tuple[int, int]], seed: int) -> None:
    labels, groups = [[label] for label, _ in items], [[str(group)] for _, group in items]
    parts = split(labels, clusters_of(groups), dict(zip(PARTS, (0.7, 0.15, 0.15), strict=True)), seed)
    assert parts == split(labels, clusters_of(groups), dict(zip(PARTS, (0.7, 0.15, 0.15), strict=True)), seed)
    homes: dict[str, set[str]] = {}
    for (group,), part in zip(groups, parts, strict=True):
        homes.setdefault(group, set()).add(part)
    assert all(len(home) == 1 for home in homes.values())


@settings(max_examples=scaled(60))
@given(counts=st.lists(st.integers(3, 60), min_size=1, max_size=5), seed=st.integers(0, 9))
def test_every_part_has_every_label_in_proportion(counts: list[int], seed: int) -> None:
    labels = [[label] for label, count in enumerate(counts) for _ in range(count)]
    parts = split(labels, range(len(labels)), dict(zip(PARTS, (0.6, 0.2, 0.2), strict=True)), seed)
    for label, count in enumerate(counts):
        found = Counter(part for (own,), part in zip(labels, parts, strict=True) if own == label)
        for part, share in zip(PARTS, (0.6, 0.2, 0.2), strict=True):
            assert found[part] >= 1 and abs(found[part] - share * count) <= 1.5


def test_samples_carry_their_groups(tmp_path: Path) -> None:
    """Groups come from the file and from identical pictures; held-back samples respect them."""
    rows = []
    for number in range(24):
        picture(tmp_path / f"{number}.png", 3 if number == 20 else number)
        rows.append({"image": f"{number}.png", "answer": "x", "group": f"film {number // 2}"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    splits = load(write_plan(tmp_path, "data: {format: questions, path: rows.jsonl}")).splits
    groups: dict[str, set[int]] = {}
    for sample in (sample for part in splits.parts.values() for sample in part):
        groups.setdefault(sample.group, set()).add(int(sample.frames.file.stem))  # type: ignore[attr-defined]
    pairs = [[n, n + 1] for n in range(0, 24, 2) if n not in (2, 20)]
    assert sorted(map(sorted, groups.values())) == sorted([*pairs, [2, 3, 20, 21]])


def test_patience_needs_samples_that_can_be_held_back(tmp_path: Path) -> None:
    image_folder(tmp_path / "pictures", {"train": 4, "validation": 1, "test": 1})
    (error,) = errors_of(write_plan(tmp_path, IMAGES, more="training: {patience: 3}\n"))
    assert "field `domains[0]`: `training.patience`" in error and "none of these 8 can be held back" in error


# -- errors ---------------------------------------------------------------------------------------------------------


def remove(file: str) -> Callable[[Path], None]:
    return lambda root: (root / file).unlink()


def copy(source: str, target: str) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        (root / target).write_bytes((root / source).read_bytes())

    return spoil


def link(file: str, to: str) -> Callable[[Path], None]:
    return lambda root: (root / file).symlink_to(to)


def cut(file: str) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        (root / file).write_bytes((root / file).read_bytes()[:200])

    return spoil


@pytest.mark.parametrize(
    ("lines", "spoil", "field", "message"),
    [
        ("data: {format: image_folder, path: nowhere}", None, "data.path", "nowhere is not a folder"),
        ("source: nowhere", None, "source", "neither a folder nor built in"),
        (f"{IMAGES}\nmetric: map", None, "metric", "classification by a head supports accuracy, f1"),
        (f"{IMAGES}\nmetric: mae", None, "metric", "score from 0 to 1"),
        (f"{IMAGES}\nmetric: f1\nhead: words", None, "metric", "in words supports exact_match"),
        (f"{IMAGES}\nhead: detection", None, "head", "is answered by classification, words"),
        (f"{IMAGES}\ntask: detection", None, "task", "supports classification"),
        (f"{IMAGES}\nlabels: [cat, bird]", None, "data", "the label 'dog' is unknown; known: cat, bird"),
        (
            f"{IMAGES}\nlabels: [cat, dog, bird]",
            None,
            "data.path",
            "'bird' is missing from train and validation and test",
        ),
        (IMAGES, cut("pictures/train/cat/1.png"), "data.path", "pictures/train/cat/1.png is not a valid picture (JPEG"),
        (IMAGES, remove("pictures/test/dog/0.png"), "data.path", "'dog' is missing from test: 2 in train"),
        (
            IMAGES,
            copy("pictures/train/cat/0.png", "pictures/test/cat/copy.png"),
            "data.path",
            "copy.png in test is identical to",
        ),
        (
            "source: pictures",
            copy("pictures/train/cat/0.png", "pictures/test/cat/copy.png"),
            "source",
            "parts must not share a picture",
        ),
        (IMAGES, copy("pictures/train/cat/0.png", "pictures/test/loose.png"), "data.path", "is in no label folder"),
        (IMAGES, link("pictures/train/cat/9.png", "gone.png"), "data.path", "9.png cannot be read: No such file"),
        (IMAGES, link("pictures/train/cat/9.png", "9.png"), "data.path", "9.png cannot be read: Too many levels"),
        (IMAGES, link("pictures/train/cat/clip", "../dog"), "data.path", "clip is a link to a folder, which is not"),
        (IMAGES, link("pictures/train/\udcff", "cat"), "data.path", "a label must be one line of UTF-8 text"),
        (IMAGES, link("pictures/train/a\nb", "cat"), "data.path", "a label must be one line of UTF-8 text"),
        (IMAGES.replace("}", ", split: {test: 0.3}}"), None, "data.split", "defines its own parts"),
        ("source: lfw-faces\ntask: action", None, "task", "is for 'classification'"),
        ("source: lfw-faces\nlabels: [a, b]", None, "labels", "has its own labels"),
        ("source: lfw-faces\nmetric: token_f1", None, "metric", "supports accuracy"),
    ],
)
def test_errors_in_a_folder(
    tmp_path: Path, lines: str, spoil: Callable[[Path], None] | None, field: str, message: str
) -> None:
    image_folder(tmp_path / "pictures", {"train": 2, "validation": 1, "test": 1})
    if spoil is not None:
        spoil(tmp_path)
    plan = write_plan(tmp_path, lines)
    error = errors_of(plan)[0]
    line = 1 + next(
        number for number, text in enumerate(plan.read_text().splitlines()) if f" {field.split('.')[0]}:" in text
    )
    assert error.startswith(f"{plan}, line {line}, field `domains[0].{field}`: ") and message in error


def test_a_part_that_is_missing_or_empty(tmp_path: Path) -> None:
    image_folder(tmp_path / "pictures", {"validation": 2, "test": 1})
    assert "has samples of test and validation, but none of train" in errors_of(write_plan(tmp_path, IMAGES))[-1]
    image_folder(tmp_path / "pictures", {"train": 2, "test": 1})
    shutil.rmtree(tmp_path / "pictures" / "validation")
    for label in ("cat", "dog"):
        (tmp_path / "pictures" / "validation" / label).mkdir(parents=True)
    loaded = load(write_plan(tmp_path, IMAGES))
    assert [len(part) for part in loaded.splits.parts.values()] == [2, 2, 2]
    assert "validation/cat contains no pictures" in loaded.notes[0] and "validation (2) split off" in loaded.notes[2]


@pytest.mark.parametrize("threshold", ["{relative_to: alone}", "{relative_to: alone, minus: 0}"])
def test_a_threshold_of_the_score_alone_is_refused_with_a_confidence(tmp_path: Path, threshold: str) -> None:
    image_folder(tmp_path / "pictures", {"train": 2, "validation": 10, "test": 1})
    lines = f"{IMAGES}\nthreshold: {threshold}"
    (error,) = errors_of(write_plan(tmp_path, lines, more="confidence: 0.9\n"))
    assert "`domains[0].threshold`: is the score alone with `minus: 0`" in error and "confidence of 0.9 cannot" in error
    load(write_plan(tmp_path, lines, more="confidence: null\n"))
    load(write_plan(tmp_path, f"{IMAGES}\nthreshold: {{relative_to: alone, minus: 0.1}}", more="confidence: 0.9\n"))


def test_a_threshold_above_the_best_possible_bound_is_refused(tmp_path: Path) -> None:
    image_folder(tmp_path / "pictures", {"train": 2, "validation": 10, "test": 1})
    (error,) = errors_of(write_plan(tmp_path, f"{IMAGES}\nthreshold: 0.9", more="confidence: 0.95\n"))
    # Clopper and Pearson: the bound of 20 correct out of 20 is 0.05 ** (1 / 20).
    assert "`domains[0].threshold`: 0.9 cannot be reached: with 20 validation samples" in error and "0.861" in error
    load(write_plan(tmp_path, f"{IMAGES}\nthreshold: 0.86", more="confidence: 0.95\n"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"annotations": [{"image_id": 77}]}, "annotation 2: there is no image 77"),
        ({"annotations": [{"category_id": 5}]}, "annotation 2: category 5 is unknown; known: 3 (car), 8 (van)"),
        (
            {"annotations": [{"bbox": [20, 6, 20, 12]}]},
            "annotation 2: bbox [20.0, 6.0, 20.0, 12.0] extends beyond its picture",
        ),
        ({"annotations": [{"bbox": [20, 6, 0, 12]}]}, "has no area"),
        ({"annotations": [{"bbox": [20, 6, -5, 12]}]}, "has no area"),
        (
            {"annotations": [{"bbox": [0.25, 0.5, 0.1, 0.2]}]},
            "is in one pixel, so it seems to be in shares, but",
        ),
        ({"annotations": [{"bbox": None}]}, "annotation 2: has no bbox and no polygon in its segmentation; add a bbox"),
        ({"annotations": [{"bbox": None, **{k: CROWD[k] for k in ("segmentation",)}}]}, "no polygon in its segm"),
        ({"annotations": [{"id": None, "bbox": None}]}, "annotation at index 0: has no bbox"),
        ({"images": [{}, {"file_name": "1.jpg"}]}, "1.jpg has several entries; each would have"),
        ({"images": [{"file_name": "1.JPG"}]}, "its name in the folder is 1.jpg"),
        (
            {"annotations": [{"bbox": [20, 6, float("nan"), 12]}]},
            "`annotations[0].bbox[2]`: is nan; it must be a finite number",
        ),
        ({"annotations": [{"bbox": [1, 2]}]}, "`annotations[0].bbox[2]`: is missing"),
        ({"images": [{"file_name": "gone.jpg"}]}, "image 1: there is no picture"),
        ({"images": [{"width": 10**400}]}, "`images[0].width`: is a whole number of 1329 bits; it must be below"),
        ({"categories": [{"name": ""}]}, "`categories[0].name`: has 0 characters; it must have at least 1"),
        ({"images": [{"width": 64}]}, "image 1 has size (64, 24), but"),
        ({"images": []}, "2 images have the id 1"),
        ({"categories": []}, "2 categories have"),
    ],
)
def test_errors_in_coco(tmp_path: Path, change: dict[str, list[dict[str, Any]]], message: str) -> None:
    """change: fields of the first entries; an empty list repeats the first one, as merged files do."""
    content = coco(tmp_path)
    for key, entries in change.items():
        content[key] += content[key][:1] * (not entries)
        for number, entry in enumerate(entries):
            content[key][number].update(entry)
    error = errors_of(coco_plan(tmp_path, content))[0]
    assert "line 5, field `domains[0].data.path`" in error and "boxes.json" in error and message in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image,answer\n0.png,\n", "rows.csv, line 2: `answer` is empty"),
        ("image,answer\n9.png,cat\n", "rows.csv, line 2: there is no picture"),
        (f"image,answer\n{'a caption ' * 40},0.png\n", "rows.csv, line 2: there is no picture"),
        (
            "image,answer,split,group\n0.png,cat,train,gate\n1.png,dog,test,gate\n",
            "line 3: group 'gate' is in test, before in train",
        ),
        ("image,words\n0.png,cat\n1.png,cat", "rows.csv, line 2: lacks `answer`; has image, words"),
        ("image,answer\n0.png,cat,dog\n", "line 2: has more cells than the first line"),
        ("image,answer,split\n0.png,cat,eval\n", "line 2: `split` is 'eval'; choose train, validation, test"),
        ("image,answer,split\n0.png,cat,train\n1.png,dog,\n", "1 of 2 samples have no split"),
        ("image,answer\n0.png,cat\n1.png,cow\n", "line 3: the label 'cow' is unknown; known: cat, dog"),
        ("", "rows.csv, line 1: the file is empty, or has only a line of columns; add rows after a line of col"),
        ("image,answer\n\n ;\n,\n", "rows.csv, line 1: the file is empty, or has only a line of columns"),
        ('image,answer\n0.png,"cat\n1.png,dog\n', "line 2: invalid CSV from this line on (unexpected end of data)"),
        ('image,answer\n0.png,cat\n1.png,"cat"s\n', "line 3: invalid CSV from this line on (',' expected after"),
        (f"image,answer\n0.png,{'c' * 200_000}\n", "line 2: invalid CSV from this line on (field larger than field"),
        ("image,answer,answer\n0.png,cat,dog\n", "line 1: names a column twice: image, answer, answer"),
    ],
)
def test_errors_in_a_table(tmp_path: Path, text: str, message: str) -> None:
    for number in range(3):
        picture(tmp_path / f"{number}.png", number)
    (tmp_path / "rows.csv").write_text(text)
    lines = "task: classification\nlabels: [cat, dog]\ndata: {format: questions, path: rows.csv}"
    assert message in errors_of(write_plan(tmp_path, lines))[0]


@pytest.mark.parametrize(
    ("more", "answer", "message"),
    [
        ("task: vqa\nlabels: [it is, it is not]", "1", "`domains[0].labels`: vqa takes no labels; remove them"),
        ("task: regression\nlabels: [metres, feet]", "1", "`domains[0].labels`: regression takes no labels"),
        ("task: binary\nlabels: ['no', maybe, 'yes']", "1", "binary takes two labels: negative, then positive"),
        ("task: counting", "9" * 5000, "a count of 0 to 1 is expected"),
    ],
    ids=["vqa", "regression", "binary", "counting"],
)
def test_labels_and_answers_that_a_task_cannot_have(tmp_path: Path, more: str, answer: str, message: str) -> None:
    picture(tmp_path / "0.png", 0)
    (tmp_path / "rows.csv").write_text(f"image,answer\n0.png,{answer}\n")
    error = errors_of(write_plan(tmp_path, f"{more}\ndata: {{format: questions, path: rows.csv}}"))[0]
    assert message in error and ("labels" not in more or "line 6, field `domains[0].labels`" in error)


def test_lines_that_are_no_json(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"image": "0.png", "answer"\n[1]\n' + "[" * 100_000)
    errors = errors_of(write_plan(tmp_path, "data: {format: questions, path: rows.jsonl}"))
    assert "line 1: is not JSON" in errors[0] and "line 2: is list; a row must be an object" in errors[1]
    assert "line 3: is not JSON" in errors[2]
    (tmp_path / "rows.jsonl").write_text('{"image": "0.png", "answer": "\\ud83d"}')
    errors = errors_of(write_plan(tmp_path, "data: {format: questions, path: rows.jsonl}"))
    assert "line 1: is not JSON" in errors[0] and "surrogates not allowed" in errors[0]


def test_videos_that_do_not_open(tmp_path: Path) -> None:
    for label in ("left", "right"):
        (tmp_path / "videos" / label).mkdir(parents=True)
        (tmp_path / "videos" / label / "a.mp4").write_bytes(b"no video " + label.encode())
    errors = errors_of(write_plan(tmp_path, "data: {format: video_folder, path: videos}"))
    assert len(errors) == 2 and "left/a.mp4: it is not a video that this machine can decode" in errors[0]
    video(tmp_path / "b.avi", 0)
    write_csv(tmp_path / "labels.csv", ["video", "label", "start_s"], [["b.avi", "x", "7"], ["b.avi", "x", "soon"]])
    errors = errors_of(write_plan(tmp_path, "data: {format: video_folder, path: ., labels: labels.csv}"))
    assert "labels.csv, line 3: `start_s` is 'soon'" in errors[0]
    assert "has no frame from second 7 to its end; its duration is 2.00 s" in errors[1]
    for start in ("nan", "inf", "1e308", "-1"):
        write_csv(tmp_path / "labels.csv", ["video", "label", "start_s"], [["b.avi", "x", start]])
        errors = errors_of(write_plan(tmp_path, "data: {format: video_folder, path: ., labels: labels.csv}"))
        assert f"labels.csv, line 2: `start_s` is '{start}'; it must be seconds" in errors[0]


def test_the_errors_of_every_domain_are_reported(tmp_path: Path) -> None:
    errors = errors_of(write_plan(tmp_path, IMAGES, "source: nowhere", "data: {format: coco, path: none.json}"))
    assert [line.split("`")[1] for line in errors] == [
        "domains[0].data.path",
        "domains[1].source",
        "domains[2].data.path",
    ]


def write_csv(file: Path, header: list[str], rows: list[list[str]]) -> None:
    with file.open("w", newline="") as target:
        csv.writer(target).writerows([header, *rows])


def file_of(sample: Sample) -> Path:
    assert isinstance(sample.frames, Picture | Clip)
    return sample.frames.file
