"""User data: tasks, splits and groups; errors are reported with line, field and file. See also `test_formats`."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
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

IMAGES = "data: {format: image_folder, path: pictures}"
ROWS = "data: {format: questions, path: rows.csv}"
COCO = "data: {format: coco, path: boxes.json, images: pictures}"
HEADER = ["image", "question", "answer"]


def load(plan: Path) -> DomainData:
    (data,) = load_plan(plan).values()
    return data


def errors_of(plan: Path) -> list[str]:
    with pytest.raises(BadPlan) as caught:
        load_plan(plan)
    return str(caught.value).splitlines()


def image_folder(root: Path, counts: dict[str, int]) -> None:
    """counts: part (or "" for none) -> pictures of a cat, and of a dog."""
    places = ((part, label, n) for part, count in counts.items() for label in ("cat", "dog") for n in range(count))
    for seed, (part, label, number) in enumerate(places):
        picture(root / part / label / f"{number}.png", seed)


def write_csv(file: Path, header: list[str], rows: list[list[str]]) -> None:
    with file.open("w", newline="") as target:
        csv.writer(target).writerows([header, *rows])


def file_of(sample: Sample) -> Path:
    assert isinstance(sample.frames, Picture | Clip)
    return sample.frames.file


# -- COCO -------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("orientation", range(2, 9))
def test_boxes_turn_with_pictures_that_exif_rotates(tmp_path: Path, orientation: int) -> None:
    """Each box is around the one bright square of its picture. Sizes decide where EXIF exchanges width and height."""
    suffix = ("jpg", "png", "tif")[orientation % 3]
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


CROWD = {"id": 99, "image_id": 1, "iscrowd": 1, "segmentation": {"counts": "PQR", "size": [24, 32]}}


def test_rotated_pictures_without_boxes_and_absolute_paths(tmp_path: Path) -> None:
    content, exif = coco(tmp_path), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (32, 24)).save(tmp_path / "pictures" / "9.jpg", exif=exif)
    assert load(coco_plan(tmp_path, content, "task: captioning")).splits.task == "captioning"
    content["annotations"] = [each for each in content["annotations"] if each["image_id"] != 9]
    splits = load(coco_plan(tmp_path, content)).splits
    assert sum(sample.target == () for part in splits.parts.values() for sample in part) == 1
    for image in content["images"]:
        image["file_name"] = str(tmp_path / "pictures" / image["file_name"])
    plan = coco_plan(tmp_path, content)
    plan.write_text(plan.read_text().replace(", images: pictures", ""))
    assert len(load(plan).splits.train) > 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"annotations": [{"image_id": 77}]}, "annotation 2: there is no image 77"),
        ({"annotations": [{"category_id": 5}]}, "annotation 2: category 5 is unknown; known: 3 (car), 8 (van)"),
        ({"annotations": [{"bbox": [20, 6, 20, 12]}]}, "bbox [20.0, 6.0, 20.0, 12.0] extends beyond its picture"),
        ({"annotations": [{"bbox": [20, 6, 0, 12]}]}, "has no area"),
        ({"annotations": [{"bbox": [20, 6, -5, 12]}]}, "has no area"),
        ({"annotations": [{"bbox": [0.25, 0.5, 0.1, 0.2]}]}, "is in one pixel, so it seems to be in shares, but"),
        ({"annotations": [{"bbox": None}]}, "annotation 2: has no bbox and no polygon in its segmentation; add a bbox"),
        ({"annotations": [{"bbox": None, "segmentation": CROWD["segmentation"]}]}, "no polygon in its segm"),
        ({"annotations": [{"id": None, "bbox": None}]}, "annotation at index 0: has no bbox"),
        (
            {"annotations": [{"bbox": [20, 6, float("nan"), 12]}]},
            "`annotations[0].bbox[2]`: is nan; it must be a finite",
        ),
        ({"annotations": [{"bbox": [1, 2]}]}, "`annotations[0].bbox[2]`: is missing"),
        ({"images": [{}, {"file_name": "1.jpg"}]}, "1.jpg has several entries; each would have"),
        ({"images": [{"file_name": "1.JPG"}]}, "its name in the folder is 1.jpg"),
        ({"images": [{"file_name": "gone.jpg"}]}, "image 1: there is no picture"),
        ({"images": [{"width": 10**400}]}, "`images[0].width`: is a whole number of 1329 bits; it must be below"),
        ({"images": [{"width": 64}]}, "image 1 has size (64, 24), but"),
        ({"images": []}, "2 images have the id 1"),
        ({"categories": [{"name": ""}]}, "`categories[0].name`: has 0 characters; it must have at least 1"),
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


# -- tables, lines and videos -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ("utf-8", "utf-8-sig", "utf-16", "utf-32"))
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


@pytest.mark.parametrize(
    ("name", "content", "messages"),
    [
        (
            "rows.jsonl",
            b'{"image": "0.png", "answer"\n[1]\n',
            ["line 1: is not JSON", "line 2: is list; a row must be"],
        ),
        ("rows.jsonl", b"[" * 100_000, ["line 1: is not JSON"]),
        ("rows.jsonl", b'{"image": "0.png", "answer": "\\ud83d"}', ["line 1: is not JSON (surrogates not allowed"]),
        (
            "boxes.json",
            '{"images": "grün"}'.encode("latin-1"),
            ["grün (read as cp1252) is not UTF-8; save it as UTF-8"],
        ),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, messages: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    form = "coco" if name == "boxes.json" else "questions"
    errors = errors_of(write_plan(tmp_path, f"data: {{format: {form}, path: {name}}}"))
    for error, message in zip(errors, messages, strict=True):
        assert all(part in error for part in message.replace(" (", "|").split("|")) and f"{name}, line " in error


def test_videos_in_folders_and_with_a_table(tmp_path: Path) -> None:
    for number, label in itertools.product(range(6), ("left", "right")):
        video(tmp_path / "videos" / label / f"{number}.avi", 10 * number + len(label))
    splits = load(write_plan(tmp_path, "data: {format: video_folder, path: videos, frames: 3}")).splits
    assert splits.task == "action" and splits.labels == ("left", "right") and splits.num_frames == 3
    brightness = [float(frame.mean()) for frame in splits.train[0].frames]
    assert brightness == pytest.approx([1.5, 121.5, 221.5], abs=8)  # frames 0, 6 and 11 of 12
    rows = [[f"left/{n}.avi", *one] for n in range(5) for one in (("early", "0", "1"), ("late", "1", ""))]
    write_csv(tmp_path / "labels.csv", ["video", "label", "start_s", "end_s"], rows)
    lines = "data: {format: video_folder, path: videos, labels: labels.csv, frames: 1}"
    assert not any("contradict" in note for note in load(write_plan(tmp_path, f"{lines}\ntask: classification")).notes)
    for name, part in load(write_plan(tmp_path, lines)).splits.parts.items():
        for sample in part:
            # At 6 frames per second, the middle of the first second is frame 3, that of the second is frame 9.
            assert float(sample.frames[0].mean()) == pytest.approx(61.5 if sample.target == 0 else 181.5, abs=8)
        assert Counter(file_of(sample) for sample in part).most_common(1)[0][1] == 2, name
    short = Clip(video(tmp_path / "short.avi", 0, num_frames=2), 4)  # frames are repeated
    assert [round(float(frame.mean()) / 20) for frame in short] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("rows", "messages"),
    [
        ([["b.avi", "x", "7"]], ["has no frame from second 7 to its end; its duration is 2.00 s"]),
        *(
            ([["b.avi", "x", start]], [f"labels.csv, line 2: `start_s` is '{start}'; it must be seconds"])
            for start in ("soon", "nan", "inf", "1e308", "-1")
        ),
        ([["a.mp4", "x", "0"]], ["a.mp4: it is not a video that this machine can decode"]),
    ],
)
def test_errors_in_videos(tmp_path: Path, rows: list[list[str]], messages: list[str]) -> None:
    video(tmp_path / "b.avi", 0)
    (tmp_path / "a.mp4").write_bytes(b"no video")
    write_csv(tmp_path / "labels.csv", ["video", "label", "start_s"], rows)
    errors = errors_of(write_plan(tmp_path, "data: {format: video_folder, path: ., labels: labels.csv}"))
    assert all(message in error for error, message in zip(errors, messages, strict=False))


# -- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "answers", "labels", "targets"),
    [
        ("vqa", ["a cat", "a dog"], (), {"a cat", "a dog"}),
        ("classification", ["cat", "dog"], ("cat", "dog"), {0, 1}),
        ("classification\nhead: words", ["cat", "dog"], (), {"cat", "dog"}),
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
        write_csv(tmp_path / "rows.csv", HEADER, rows)
    else:
        lines = [json.dumps(dict(zip(HEADER, row, strict=True))) for row in rows]
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
    write_csv(tmp_path / "rows.csv", HEADER, rows)
    (error,) = errors_of(write_plan(tmp_path, f"task: {task}\n{ROWS}"))
    assert "rows.csv, line 5: the question 'what is that ?' is not the domain's 'what is it ?'" in error
    assert ("use `head: words`, task vqa" in error) == (task == "classification") and "task vqa, or one" in error
    if task == "classification":
        assert load(write_plan(tmp_path, f"task: {task}\n{ROWS}\nhead: words")).splits.task == "vqa"


@pytest.mark.parametrize(("task", "answers"), [("multi_label", ["a;b", "b"]), ("regression", ["1.5", "-2"])])
def test_words_for_a_task_without_them_and_errors_of_every_domain(
    tmp_path: Path, task: str, answers: list[str]
) -> None:
    rows = [[picture(tmp_path / f"{number}.png", number).name, answers[number % 2]] for number in range(24)]
    write_csv(tmp_path / "rows.csv", ["image", "answer"], rows)
    (tmp_path / "boxes.json").write_text(json.dumps(coco(tmp_path)))
    domains = (f"task: {task}\nhead: words\n{ROWS}", f"{COCO}\nhead: words", "source: nowhere")
    errors = errors_of(write_plan(tmp_path, *domains))
    assert [error.split("`")[1] for error in errors] == ["domains[0].head", "domains[1].head", "domains[2].source"]
    assert f"is 'words'; the task {task!r} is answered by {task}" in errors[0]


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
    error = errors_of(write_plan(tmp_path, f"{more}\n{ROWS}"))[0]
    assert message in error and ("labels" not in more or "line 6, field `domains[0].labels`" in error)


# -- splits -----------------------------------------------------------------------------------------------------------


@settings(max_examples=scaled(60))
@given(
    items=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=80), seed=st.integers(0, 9)
)
def test_groups_are_never_cut(items: list[tuple[int, int]], seed: int) -> None:
    labels, groups = [[label] for label, _ in items], [[str(group)] for _, group in items]
    shares = dict(zip(PARTS, (0.7, 0.15, 0.15), strict=True))
    parts, again = (split(labels, clusters_of(groups), shares, seed) for _ in range(2))
    homes: dict[str, set[str]] = {}
    for (group,), part in zip(groups, parts, strict=True):
        homes.setdefault(group, set()).add(part)
    assert all(len(home) == 1 for home in homes.values()) and parts == again


@settings(max_examples=scaled(60))
@given(counts=st.lists(st.integers(3, 60), min_size=1, max_size=5), seed=st.integers(0, 9))
def test_every_part_has_every_label_in_proportion(counts: list[int], seed: int) -> None:
    labels = [[label] for label, count in enumerate(counts) for _ in range(count)]
    parts = split(labels, range(len(labels)), dict(zip(PARTS, (0.6, 0.2, 0.2), strict=True)), seed)
    for label, count in enumerate(counts):
        found = Counter(part for (own,), part in zip(labels, parts, strict=True) if own == label)
        for part, share in zip(PARTS, (0.6, 0.2, 0.2), strict=True):
            assert found[part] >= 1 and abs(found[part] - share * count) <= 1.5


@pytest.mark.parametrize("parts", [{"": 60}, {"train": 42, "validation": 9, "test": 9}])
def test_a_part_begins_with_all_labels_and_depends_on_the_seed(tmp_path: Path, parts: dict[str, int]) -> None:
    """Training holds back the first samples for early stopping; in file order they would all have one label."""
    image_folder(tmp_path / "pictures", parts)
    found = [load(write_plan(tmp_path, IMAGES, more=f"seed: {seed}\n")).splits.parts for seed in (0, 1)]
    for part in found[0].values():
        assert {sample.target for sample in part[:8]} == {0, 1}
    if "" in parts:
        assert len({tuple(map(file_of, own["test"])) for own in found}) == 2


def clips_of_frames(root: Path) -> Iterator[str]:
    for number, (label, place) in enumerate(itertools.product(("cat", "dog"), range(30))):
        yield str(picture(root / label / f"clip{place // 5}" / f"{place}.png", number).parent)


def equal_pictures(root: Path) -> Iterator[str]:
    for label, place in itertools.product((0, 100), range(30)):
        yield str(picture(root / ("cat", "dog")[label > 0] / f"{place}.png", label + place % 6).read_bytes())


def augmented_copies(root: Path) -> Iterator[str]:
    """Roboflow names them SOURCE.rf.HASH.jpg."""
    for number in range(24):
        source, label = f"{number // 4}_jpg", ("cat", "dog")[number % 2]
        picture(root / label / f"{source}.rf.{number:04x}.jpg", number)
        yield f"{source} {label}"


def cameras(root: Path) -> Iterator[str]:
    rows = [[f"pictures/{picture(root / f'{n}.png', n).name}", "yes", f"camera {n // 4}"] for n in range(24)]
    write_csv(root.with_name("rows.csv"), ["image", "answer", "group"], rows)
    yield from (row[2] for row in rows)


@pytest.mark.parametrize("make", [clips_of_frames, equal_pictures, augmented_copies, cameras])
def test_what_belongs_together_is_in_one_part(tmp_path: Path, make: Callable[[Path], Iterator[str]]) -> None:
    together = set(make(tmp_path / "pictures"))
    splits = load(write_plan(tmp_path, ROWS if make is cameras else IMAGES)).splits
    groups = [{sample.group for sample in part} for part in splits.parts.values()]
    assert all(groups) and sum(map(len, groups)) == len(set().union(*groups)) == len(together)


def test_groups_are_of_files_and_of_identical_pictures_and_parts_of_a_table_are_kept(tmp_path: Path) -> None:
    """Held-back samples respect them."""
    numbers = range(24)
    for number in numbers:
        picture(tmp_path / f"{number}.png", 3 if number == 20 else number)
    write_csv(
        tmp_path / "rows.csv", ["image", "answer", "group"], [[f"{n}.png", "x", f"film {n // 2}"] for n in numbers]
    )
    groups: dict[str, set[int]] = {}
    for sample in (sample for part in load(write_plan(tmp_path, ROWS)).splits.parts.values() for sample in part):
        groups.setdefault(sample.group, set()).add(int(file_of(sample).stem))
    pairs = [[n, n + 1] for n in range(0, 24, 2) if n not in (2, 20)]
    assert sorted(map(sorted, groups.values())) == sorted([*pairs, [2, 3, 20, 21]])
    write_csv(tmp_path / "rows.csv", ["image", "answer", "split"], [[f"{n}.png", "x", PARTS[n % 3]] for n in range(18)])
    assert [int(file_of(s).stem) % 3 for s in load(write_plan(tmp_path, ROWS)).splits.train] == [0] * 6


# -- errors in folders and fields -------------------------------------------------------------------------------------

Spoil = Callable[[Path], object]


def remove(file: str) -> Spoil:
    return lambda root: (root / file).unlink()


def copy(target: str) -> Spoil:
    return lambda root: shutil.copy(root / "pictures/train/cat/0.png", root / target)


def link(file: str, to: str) -> Spoil:
    return lambda root: (root / "pictures/train" / file).symlink_to(to)


def cut(file: str) -> Spoil:
    return lambda root: (root / file).write_bytes((root / file).read_bytes()[:200])


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
            f"{IMAGES}\nlabels: [cat, dog, owl]",
            None,
            "data.path",
            "'owl' is missing from train and validation and test",
        ),
        (IMAGES, cut("pictures/train/cat/1.png"), "data.path", "pictures/train/cat/1.png is not a valid picture (JPEG"),
        (IMAGES, remove("pictures/test/dog/0.png"), "data.path", "'dog' is missing from test: 2 in train"),
        (IMAGES, copy("pictures/test/cat/copy.png"), "data.path", "copy.png in test is identical to"),
        ("source: pictures", copy("pictures/test/cat/copy.png"), "source", "parts must not share a picture"),
        (IMAGES, copy("pictures/test/loose.png"), "data.path", "is in no label folder"),
        (IMAGES, link("cat/9.png", "gone.png"), "data.path", "9.png cannot be read: No such file"),
        (IMAGES, link("cat/9.png", "9.png"), "data.path", "9.png cannot be read: Too many levels"),
        (IMAGES, link("cat/clip", "../dog"), "data.path", "clip is a link to a folder, which is not"),
        (IMAGES, link("\udcff", "cat"), "data.path", "a label must be one line of UTF-8 text"),
        (IMAGES, link("a\nb", "cat"), "data.path", "a label must be one line of UTF-8 text"),
        (IMAGES.replace("}", ", split: {test: 0.3}}"), None, "data.split", "defines its own parts"),
        ("source: lfw-faces\ntask: action", None, "task", "is for 'classification'"),
        ("source: lfw-faces\nlabels: [a, b]", None, "labels", "has its own labels"),
        ("source: lfw-faces\nmetric: token_f1", None, "metric", "supports accuracy"),
    ],
)
def test_errors_in_a_folder(tmp_path: Path, lines: str, spoil: Spoil | None, field: str, message: str) -> None:
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


ALONE = "threshold: {relative_to: alone, minus: 0}"


@pytest.mark.parametrize(
    ("more", "lines", "field", "message"),
    [
        ("training: {patience: 3}", "", "", "`training.patience` .*none of these 4 can be held back"),
        ("confidence: 0.9", ALONE, ".threshold", "score alone with `minus: 0`.*confidence of 0.9 cannot"),
        ("confidence: null", ALONE, "", None),
        ("confidence: 0.9", ALONE.replace("0}", "0.1}"), "", None),
        # Clopper and Pearson: the bound of 20 correct out of 20 is 0.05 ** (1 / 20).
        ("confidence: 0.95", "threshold: 0.9", ".threshold", "0.9 cannot be reached: with 20 validation .*0.861"),
        ("confidence: 0.95", "threshold: 0.86", "", None),
    ],
)
def test_samples_must_suffice_for_what_a_plan_promises(
    tmp_path: Path, more: str, lines: str, field: str, message: str | None
) -> None:
    image_folder(tmp_path / "pictures", {"train": 2, "validation": 10, "test": 1})
    plan = write_plan(tmp_path, f"{IMAGES}\n{lines}", more=f"{more}\n")
    if message is None:
        load(plan)
        return
    with pytest.raises(BadPlan, match=rf"field `domains\[0\]{field}`: .*{message}"):
        load_plan(plan)
