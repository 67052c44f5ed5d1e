"""Data as tools and people write it: layouts and oddities of each format, read exactly or refused with the remedy."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fusion.data.coco import COCO
from fusion.data.load import DomainData
from fusion.report.examples import contact_sheet
from fusion.training.text_metrics import box_in_words, box_of_words, overlap
from heads import Box
from heads.answer import iou
from tests.fusion.made import load_plan, picture, write_plan
from vlora.errors import BadPlan
from vlora.training.records import PARTS

WIDTH, HEIGHT, COUNT = 48, 32, 12
NAMES = ("car", "bus")
PARTS_OF = {"train": range(8), "val": range(8, 10), "test": range(10, 12)}
Build = Callable[[Path], str]
"""Writes data into a folder. Returns `data` of its plan."""


def edges(number: int) -> tuple[int, int, int, int]:
    """The bright square of a picture, in pixels; that of the first is in the corner."""
    left, top = 2 * number, number
    return left, top, left + 14, top + 11


def shot(file: Path, number: int, exif: int = 1) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 50, (HEIGHT, WIDTH, 3)).astype(np.uint8)
    left, top, right, bottom = edges(number)
    pixels[top:bottom, left:right] = 240
    tags = Image.Exif()
    tags[0x0112] = exif
    Image.fromarray(pixels).save(file, quality=95, exif=tags)
    return file


def put(file: Path, text: str, encoding: str = "utf-8") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode(encoding))


def of(build: Callable[..., str], *args: Any, **options: Any) -> Build:
    return lambda root: build(root, *args, **options)


# -- YOLO -------------------------------------------------------------------------------------------------------------


def yolo(number: int) -> str:
    left, top, right, bottom = edges(number)
    x, y = (left + right) / 2 / WIDTH, (top + bottom) / 2 / HEIGHT
    return f"{number % 2} {x} {y} {(right - left) / WIDTH} {(bottom - top) / HEIGHT}\n"


def yolo_of(number: int, *corners: tuple[float, float]) -> str:
    return f"{number % 2} {' '.join(f'{across / WIDTH} {down / HEIGHT}' for across, down in corners)}\n"


def polygon(number: int) -> str:
    left, top, right, bottom = edges(number)
    x, y = (left + right) / 2, (top + bottom) / 2
    return yolo_of(number, (x, top), (right, y), (x, bottom), (left, y))


def corners(number: int) -> str:
    left, top, right, bottom = edges(number)
    return yolo_of(number, (left, top), (right, top), (right, bottom), (left, bottom))


def floats(number: int) -> str:
    return " ".join(f"{float(word):.18e}" for word in yolo(number).split()) + "\n"


def yolo_pairs(
    root: Path,
    folders: dict[str, tuple[str, str]],
    line: Callable[[int], str] = yolo,
    suffix: str = ".jpg",
    exif: int = 1,
) -> None:
    """folders: part ("" for all) -> folders of pictures and of label files."""
    for part, (pictures, labels) in folders.items():
        for number in PARTS_OF.get(part, range(COUNT)):
            shot(root / pictures / f"{number}{suffix}", number, exif)
            put(root / labels / f"{number}.txt", line(number))


BY_PART = {part: (f"images/{part}", f"labels/{part}") for part in PARTS_OF}
IN_ONE_FOLDER = {"": ("images", "labels")}
ROBOFLOW = {"train": "train", "val": "valid", "test": "test"}


def ultralytics(root: Path, head: str = "path: .\nnames: {0: car, 1: bus}\n", **options: Any) -> str:
    yolo_pairs(root, BY_PART, **options)
    put(root / "data.yaml", head + "train: images/train\nval: images/val\ntest: images/test\n")
    return "{format: yolo, path: data.yaml}"


def roboflow_yolo(root: Path, parts: Iterable[str] = PARTS_OF) -> str:
    yolo_pairs(root, {part: (f"{ROBOFLOW[part]}/images", f"{ROBOFLOW[part]}/labels") for part in parts})
    put(root / "README.roboflow.txt", "Exported")
    lines = "train: ../train/images\nval: ../valid/images\ntest: ../test/images\n\n"  # of a folder beside it
    put(root / "data.yaml", f"{lines}nc: 2\nnames: ['car', 'bus']\n")
    return "{format: yolo, path: .}"


def yolo_lists(root: Path, listed: Callable[[str], str] = str, train: str = "train.txt") -> str:
    yolo_pairs(root, BY_PART)
    for part, numbers in PARTS_OF.items():
        put(root / f"{part}.txt", "".join(f"{listed(f'images/{part}/{number}.jpg')}\n" for number in numbers) + "\n")
    put(root / "data.yaml", f"path: /content/lots\nnames: [car, bus]\ntrain: {train}\nval: val.txt\ntest: test.txt\n")
    return "{format: yolo, path: data.yaml}"


def cvat_yolo(root: Path) -> str:
    yolo_pairs(root, {"": ("obj_train_data", "obj_train_data")})
    put(root / "obj.names", "car\nbus\n")
    put(root / "obj.data", "classes = 2\ntrain = data/train.txt\nnames = data/obj.names\nbackup = backup/\n")
    put(root / "train.txt", "".join(f"data/obj_train_data/{number}.jpg\n" for number in range(COUNT)))
    return "{format: yolo, path: .}"


def label_studio_yolo(root: Path, labels: str = "labels") -> str:
    yolo_pairs(root, {"": ("images", labels)})
    put(root / "classes.txt", "car\nbus\n")
    put(root / "notes.json", json.dumps({"categories": [{"id": 0, "name": "car"}]}))
    return "{format: yolo, path: .}"


def labelimg_yolo(root: Path) -> str:
    yolo_pairs(root, {"": ("lots", "lots")}, suffix=".JPG")
    put(root / "lots" / "classes.txt", "car\nbus\n")
    return "{format: yolo, path: lots}"


def one_folder_yolo(root: Path, **options: Any) -> str:
    yolo_pairs(root, IN_ONE_FOLDER, **options)
    put(root / "data.yaml", "path: .\ntrain: images\nval: images\nnames: {0: car, 1: bus}\n")
    return "{format: yolo, path: data.yaml}"


def nested_yolo(root: Path) -> str:
    for part, numbers in PARTS_OF.items():
        for number in numbers:
            shot(root / "images" / part / f"cam{number % 2}" / f"{number}.jpg", number)
            put(root / "labels" / part / f"cam{number % 2}" / f"{number}.txt", yolo(number))
    lines = ("train: images/train", "val: images/val", "test: images/test", "names: {'0': car, '1': bus}", "")
    put(root / "data.yaml", "\r\n".join(lines))
    return "{format: yolo, path: .}"


# -- Pascal VOC -------------------------------------------------------------------------------------------------------


def voc(number: int, start: float = 0, filename: str | None = None, more: str = "", size: str = "") -> str:
    left, top, right, bottom = edges(number)
    box = f"<xmin>{left + start}</xmin><ymin>{top + start}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax>"
    size = size or f"<width>{WIDTH}</width><height>{HEIGHT}</height>"
    return (
        f"<annotation><filename>{filename or f'{number}.jpg'}</filename><path>C:\\me\\{number}.jpg</path><size>{size}"
        f"<depth>3</depth></size><object><name>{NAMES[number % 2]}</name><truncated>1</truncated>{more}"
        f"<bndbox>{box}</bndbox></object></annotation>"
    )


def voc_pairs(
    root: Path, pictures: str, xml: str, part: str = "", suffix: str = ".jpg", exif: int = 1, **options: Any
) -> None:
    for number in PARTS_OF.get(part, range(COUNT)):
        shot(root / pictures / f"{number}{suffix}", number, exif)
        put(root / xml / f"{number}.xml", voc(number, **options))


def pascal(root: Path, lists: Iterable[str] = PARTS_OF, **options: Any) -> str:
    voc_pairs(root, "JPEGImages", "Annotations", **options)
    for name in lists:
        numbers = PARTS_OF.get(name, range(10))
        put(root / "ImageSets" / "Main" / f"{name}.txt", "".join(f"{number}\n" for number in numbers))
        put(root / "ImageSets" / "Main" / f"car_{name}.txt", "".join(f"{number}  -1\n" for number in numbers))
    return "{format: voc, path: .}"


def roboflow_voc(root: Path) -> str:
    for part, folder in ROBOFLOW.items():
        voc_pairs(root, folder, folder, part, start=1)
    return "{format: voc, path: .}"


def labelimg_voc(root: Path, **options: Any) -> str:
    voc_pairs(root, "pictures", "pictures", **options)
    return "{format: voc, path: pictures}"


def in_xml(change: Callable[[str], str], encoding: str = "utf-8") -> Build:
    def built(root: Path) -> str:
        data = pascal(root)
        for file in (root / "Annotations").iterdir():
            put(file, change(file.read_text()), encoding)
        return data

    return built


def cvat_voc(root: Path) -> str:
    """Of tasks in subsets: pictures in folders, and one list that names no part."""
    for number in range(COUNT):
        shot(root / "JPEGImages" / "day" / f"{number}.jpg", number)
        put(root / "Annotations" / "day" / f"{number}.xml", voc(number, filename=f"day/{number}.jpg"))
    put(root / "ImageSets" / "Main" / "default.txt", "".join(f"day/{number}\n" for number in range(COUNT)))
    put(root / "labelmap.txt", "# label:color_rgb:parts:actions\ncar:::\nbus:::\n")
    return "{format: voc, path: .}"


# -- COCO -------------------------------------------------------------------------------------------------------------


def coco(root: Path, folder: str, numbers: Sequence[int] = range(COUNT), listed: str = "") -> dict[str, Any]:
    kinds = [{"id": number, "name": name} for number, name in enumerate(("lots", *NAMES))]  # Roboflow's first has none
    content: dict[str, Any] = {"images": [], "annotations": [], "categories": kinds}
    for number in numbers:
        shot(root / folder / f"{number}.jpg", number)
        left, top, right, bottom = edges(number)
        image = {"id": number, "file_name": f"{listed}{number}.jpg", "width": WIDTH, "height": HEIGHT}
        content["images"].append(image)
        box = {"bbox": [left, top, right - left, bottom - top], "iscrowd": 0, "segmentation": []}
        content["annotations"].append({"id": number + 1, "image_id": number, "category_id": 1 + number % 2, **box})
    crowd = {"counts": "PQR", "size": [HEIGHT, WIDTH]}
    content["annotations"].append({"id": 99, "image_id": numbers[0], "iscrowd": 1, "segmentation": crowd})  # no object
    return content


def roboflow_coco(root: Path) -> str:
    for part, folder in ROBOFLOW.items():
        put(root / folder / "_annotations.coco.json", json.dumps(coco(root, folder, PARTS_OF[part])))
    return "{format: coco, path: .}"


def benchmark_coco(root: Path) -> str:
    for part, numbers in PARTS_OF.items():
        content = json.dumps(coco(root, f"{part}2017", numbers))
        put(root / "annotations" / f"instances_{part}2017.json", content)
        put(root / "annotations" / f"captions_{part}2017.json", content)
    return "{format: coco, path: .}"


def cvat_coco(root: Path) -> str:
    put(root / "annotations" / "instances_default.json", json.dumps(coco(root, "images/default")))
    for number in range(COUNT):
        (root / "images" / "default" / f"{number}.jpg").rename(root / "images" / f"{number}.jpg")
    return "{format: coco, path: .}"


def label_studio_coco(root: Path, listed: str = "images\\") -> str:
    put(root / "result.json", "\ufeff" + json.dumps(coco(root, "images", listed=listed)))
    return "{format: coco, path: result.json}"


def two_files(root: Path) -> str:
    for name in ("a.json", "b.json"):
        put(root / name, json.dumps(coco(root, "images")))
    return "{format: coco, path: .}"


def in_coco(*changes: Callable[[dict[str, Any], dict[str, Any]], object]) -> Build:
    """changes: called with each picture and its annotation."""

    def built(root: Path) -> str:
        content = coco(root, "images")
        content["annotations"].pop()  # the crowd
        for image, annotation in zip(content["images"], content["annotations"], strict=True):
            for change in changes:
                change(image, annotation)
        put(root / "result.json", json.dumps(content))
        return "{format: coco, path: result.json}"

    return built


def named_ids(image: dict[str, Any], annotation: dict[str, Any]) -> None:
    image["id"] = annotation["image_id"] = f"img_{image['id']}"
    annotation["category_id"] = str(annotation["category_id"])


def url(image: dict[str, Any], annotation: dict[str, Any]) -> None:
    image["file_name"] = f"https://labels.example.org/data/up%20load/7/{image['file_name']}"


def shares(image: dict[str, Any], annotation: dict[str, Any]) -> None:
    annotation["bbox"] = [edge / side for edge, side in zip(annotation["bbox"], (WIDTH, HEIGHT) * 2, strict=True)]


def polygons(image: dict[str, Any], annotation: dict[str, Any]) -> None:
    left, top, width, height = annotation.pop("bbox")
    middle = [left + width / 2, top, left + width, top + height / 2]
    annotation["segmentation"] = [middle, [left + width / 2, top + height, left, top + height / 2]]


def flat(image: dict[str, Any], annotation: dict[str, Any]) -> None:
    annotation.update(bbox=[], segmentation=[*itertools.chain(*annotation["segmentation"])])


def nulls(image: dict[str, Any], annotation: dict[str, Any]) -> None:
    annotation.update(iscrowd=None, segmentation=None, caption=None)
    image.update(width=None, height=None)


def bare(image: dict[str, Any], annotation: dict[str, Any]) -> None:
    image["file_name"] = image["file_name"].removesuffix(".jpg")


def cvat_attributes(image: dict[str, Any], annotation: dict[str, Any]) -> None:
    image |= {"width": float(WIDTH), "height": str(HEIGHT), "license": 0, "coco_url": "", "date_captured": 0}
    size = {"size": [HEIGHT, WIDTH], "counts": "abc"}
    annotation |= {"segmentation": size, "iscrowd": False, "area": 12.5, "attributes": {"occluded": False}}
    annotation["bbox"] = [str(float(edge)) for edge in annotation["bbox"]]


# -- layouts ----------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """counts: of the parts. note: a part of the notes."""

    build: Build
    note: str = ""
    counts: tuple[int, int, int] = (8, 2, 2)


def edit(build: Build, file: str, old: str, new: str) -> Build:
    """Replace text in a file; all of it if `old` is empty."""

    def built(root: Path) -> str:
        data = build(root)
        put(root / file, (root / file).read_text().replace(old, new) if old else new)
        return data

    return built


def without(build: Build, file: str) -> Build:
    def built(root: Path) -> str:
        data = build(root)
        (root / file).unlink()
        return data

    return built


def keypoints(number: int) -> str:
    return yolo(number).strip() + " 0.5 0.5 2 0 0 0\n"


def confidences(number: int) -> str:
    """With blank and repeated lines."""
    return f"\n{yolo(number).strip()} 0.9\r\n{yolo(number).strip()} 0.9\n \n"


def in_gbk(text: str) -> str:
    return f'<?xml version="1.0" encoding="gbk"?>\n{text}'.replace("C:\\me", "C:\\照片")


VOC_PART = "<part><name>wheel</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax></bndbox></part>"
FROM_ALL = "validation (2) and test (2) split off from all 12"
LISTS: dict[str, Callable[[str], str]] = {
    "paths": lambda path: f"./{path}",
    "Windows": lambda path: path.replace("/", "\\"),
    "another machine": lambda path: f"/content/lots/{path}",
    "CVAT": lambda path: f"data/{path}",
}

LAYOUTS = {
    "yolo, Ultralytics": Layout(ultralytics),
    "yolo, names as a list": Layout(of(ultralytics, "names: [car, bus]\n")),
    "yolo, polygons": Layout(of(ultralytics, line=polygon)),
    "yolo, keypoints": Layout(of(ultralytics, "kpt_shape: [2, 3]\nnames: [car, bus]\n", line=keypoints)),
    "yolo, confidences": Layout(of(ultralytics, line=confidences)),
    "yolo, Roboflow": Layout(roboflow_yolo),
    "yolo, Roboflow without test": Layout(
        of(roboflow_yolo, ("train", "val")), "test (2) split off from train with seed 0", (6, 2, 2)
    ),
    **{f"yolo, lists of {name}": Layout(of(yolo_lists, listed)) for name, listed in LISTS.items()},
    "yolo, a list of folders": Layout(of(yolo_lists, str, "[images/train, images/train]")),
    "yolo, CVAT": Layout(cvat_yolo, "split off from train"),
    "yolo, Label Studio": Layout(label_studio_yolo, FROM_ALL),
    "yolo, labelImg": Layout(labelimg_yolo),
    "yolo, one folder for train and val": Layout(one_folder_yolo, "validation has the same pictures as train"),
    "yolo, oriented boxes": Layout(of(ultralytics, line=corners)),
    "yolo, numbers of numpy": Layout(of(ultralytics, line=floats)),
    "yolo, folders of cameras": Layout(nested_yolo),
    "yolo, folders named from above": Layout(
        lambda root: edit(ultralytics, "data.yaml", ": images/", f": {root.name}/images/")(root)
    ),
    "voc, Pascal": Layout(pascal),
    "voc, counted from 1": Layout(of(pascal, start=1), "counted from 1, as in Pascal VOC"),
    "voc, trainval": Layout(of(pascal, ("trainval", "test")), "validation (2) split off from train"),
    "voc, difficult": Layout(of(pascal, more="<difficult>1</difficult>"), "12 objects marked as difficult are kept"),
    "voc, unlisted": Layout(of(pascal, ("train", "val")), "2 XML files are in none of train.txt", (6, 2, 2)),
    "voc, floats": Layout(of(pascal, start=0.25)),
    "voc, parts of objects": Layout(in_xml(lambda text: text.replace("</object>", f"{VOC_PART}</object>"))),
    "voc, names on lines of their own": Layout(
        in_xml(lambda text: text.replace("<name>", "<name>\n  ").replace("</name>", "\n</name>"))
    ),
    "voc, declared as GBK": Layout(in_xml(in_gbk, "gbk")),
    "voc, CVAT's subsets": Layout(cvat_voc, FROM_ALL),
    "voc, Roboflow": Layout(roboflow_voc),
    "voc, labelImg": Layout(labelimg_voc),
    "voc, renamed pictures of a camera": Layout(of(labelimg_voc, filename="IMG_7", suffix=".JPG")),
    "voc, no size": Layout(of(labelimg_voc, size="<width>0</width><height>0</height>")),
    "coco, Roboflow": Layout(roboflow_coco),
    "coco, the benchmark's": Layout(benchmark_coco),
    "coco, CVAT": Layout(cvat_coco),
    "coco, Label Studio on Windows": Layout(label_studio_coco),
    "coco, Label Studio's server": Layout(of(label_studio_coco, "../../label-studio/data/media/upload/1/images/")),
    "coco, ids that are names": Layout(in_coco(named_ids)),
    "coco, pictures by URL": Layout(in_coco(url)),
    "coco, pictures without a suffix": Layout(in_coco(bare)),
    "coco, attributes of CVAT": Layout(in_coco(cvat_attributes)),
    "coco, shares": Layout(in_coco(shares), "all boxes are within 0 to 1; they are read as shares"),
    "coco, polygons": Layout(in_coco(polygons)),
    "coco, polygons in shares": Layout(in_coco(shares, polygons), "they are read as shares"),
    "coco, flat polygons": Layout(in_coco(polygons, flat)),
    "coco, nulls": Layout(in_coco(nulls)),
    "coco, annotations without ids": Layout(in_coco(lambda image, annotation: annotation.pop("id"))),
    "coco, one id for all": Layout(in_coco(lambda image, annotation: annotation.update(id=7))),
    "coco, no sizes": Layout(in_coco(lambda image, annotation: [image.pop(side) for side in ("width", "height")])),
    "coco, absolute paths": Layout(of(label_studio_coco, "C:\\Users\\me\\lots\\images\\")),
}


def read(root: Path, data: str, more: str = "") -> DomainData:
    (loaded,) = load_plan(write_plan(root, f"data: {data}{more}")).values()
    return loaded


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_has_its_boxes_labels_and_parts(tmp_path: Path, layout: str) -> None:
    build, note, counts = LAYOUTS[layout]
    loaded = read(tmp_path, build(tmp_path))
    splits = loaded.splits
    assert splits.task == "detection" and splits.labels == ("bus", "car")
    assert tuple(map(len, splits.parts.values())) == counts
    seen = {}
    for part, samples in splits.parts.items():
        for sample in samples:
            number = int(sample.frames.file.stem)  # type: ignore[attr-defined]
            (box,) = sample.target  # type: ignore[misc, str-unpack]
            assert isinstance(box, Box) and splits.labels[box.label] == NAMES[number % 2]
            wanted = [edge / side for edge, side in zip(edges(number), (WIDTH, HEIGHT) * 2, strict=True)]
            assert [box.left, box.top, box.right, box.bottom] == pytest.approx(wanted, abs=0.3 / HEIGHT)
            seen[number] = part
    if not any("split off" in note for note in loaded.notes):
        assert seen == {n: part for part, own in zip(PARTS, PARTS_OF.values(), strict=True) for n in own}
    assert note in " ".join(loaded.notes)


def line(text: str) -> Build:
    return edit(ultralytics, "labels/train/3.txt", "", text)


def names(old: str, new: str) -> Build:
    return edit(ultralytics, "data.yaml", old, new)


def xml(old: str, new: str) -> Build:
    return edit(pascal, "Annotations/3.xml", old, new)


WRONG: list[tuple[Build, str]] = [
    (line("1 30 20 14 11\n"), "3.txt, line 1: '1 30 20 14 11' has numbers above 1; they are shares"),
    (line(f"{yolo(3)}\n2 .5 .5 .1 .1"), "3.txt, line 3: class 2 is unknown; known: 0 (car), 1 (bus)"),
    (line("car 0.5 0.5 0.1 0.1"), "3.txt, line 1: 'car 0.5 0.5 0.1 0.1' is not all numbers"),
    (line("1 0,5 0,5 0,1 0,1"), "3.txt, line 1: '1 0,5 0,5 0,1 0,1' is not all numbers"),
    (line("1 .5 .5 .1"), "has 3 numbers after the class; a box has 4, a polygon has pairs"),
    (line("1 .5 .5 0 .1"), "'1 .5 .5 0 .1' has no area"),
    (line("1 .9 .5 .4 .1"), "'1 .9 .5 .4 .1' extends beyond its picture of 48 x 32"),
    (line("1 nan .5 .4 .1"), "has numbers above 1"),
    (names("path: .", "nc: 3\npath: ."), "`nc` is 3, but `names` has 2 classes; correct one of them"),
    (names("0: car", "2: car"), "numbers 2, 1; they must be 0, 1, 2"),
    (names("names", "name"), "`names` is None; it must name the classes"),
    (names("train: images/train", ""), "but none of train"),
    (names("images/train", "images/tran"), "images/tran, which is named for"),
    (names("train: images/", "train: v2/images/"), "v2/images/train, which is named for train"),
    (names("val: images/val", "val: /v2/images/train"), "images/train and /v2/images/train are both"),
    (names("path: .", "names: [a"), "data.yaml, line 2: not YAML"),
    (edit(yolo_lists, "data.yaml", "train.txt", "v2/train.txt"), "there is no file"),
    (edit(yolo_lists, "train.txt", "7.jpg\n", "7.jpg\ngone.jpg\n"), "train.txt, line 9: th"),
    (without(labelimg_yolo, "lots/classes.txt"), "has no data.yaml and no classes.txt or obj.names or _darknet"),
    (lambda root: "{format: yolo, path: nowhere}", "there is no folder"),
    (of(label_studio_yolo, "elsewhere"), "none of 12 pictures has a label file; expected is, for the first, "),
    (of(ultralytics, exif=3), "is rotated by EXIF (orientation 3), and nothing shows"),
    (xml("</annotation>", ""), "3.xml is not XML: "),
    (xml("xmin", "x"), "3.xml, object 1: bndbox [None, 3,"),
    (xml("<name>bus", "<name>"), "object 1: has no <name>"),
    (xml(">20<", ">200<"), "extends beyond its picture of"),
    (xml(">6<", ">20<"), "bndbox [20, 3, 20, 14] has no area"),
    (xml(">48<", ">96<"), "has size (96, 32), but"),
    (edit(pascal, "ImageSets/Main/val.txt", "9\n", "9\n77\n"), "val.txt, line 3: there is no XML file of '77'"),
    (without(pascal, "JPEGImages/3.jpg"), "Annotations/3.xml: there is no picture"),
    (of(labelimg_voc, exif=3), "rotated by EXIF (orientation 3)"),
    (lambda root: "{format: voc, path: .}", "contains no XML file with an <annotation>"),
    (two_files, "has 2 JSON files that name no part (train, validation, test): a.json, b.json; set"),
    (lambda root: "{format: coco, path: .}", "has no JSON file, nor has a folder in it"),
    (lambda root: "{format: coco, path: none.json}", "there is no file or folder"),
]


@pytest.mark.parametrize(("build", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_cannot_be_read_is_named_with_the_remedy(tmp_path: Path, build: Build, message: str) -> None:
    with pytest.raises(BadPlan) as caught:
        read(tmp_path, build(tmp_path))
    assert message in str(caught.value)


def test_ids_that_are_no_plain_numbers_remain_texts() -> None:
    ids = {7: 7, "7": 7, "0": 0, "1_12": "1_12", "11_2": "11_2", "0001": "0001", "1.0": "1.0", " 1": " 1"}
    images = [{"id": given, "file_name": "a.jpg"} for given in ids]
    found = COCO.validate_json(json.dumps({"images": images, "annotations": []}))
    assert [image.id for image in found.images] == list(ids.values())


ROTATED = {"yolo": of(one_folder_yolo, exif=3), "voc": of(labelimg_voc, exif=3, size="<width/>")}


@pytest.mark.parametrize("form", ROTATED)
@pytest.mark.parametrize("stated", ["ignore", "apply"])
def test_exif_is_as_the_plan_says(tmp_path: Path, form: str, stated: str) -> None:
    """Boxes of the pixels as stored cover the square if the tool ignored EXIF. See `test_data` for COCO."""
    data, covered = ROTATED[form](tmp_path), []
    for part in read(tmp_path, data.replace("}", f", exif: {stated}}}")).splits.parts.values():
        for sample in part:
            bright = sample.frames[0][..., 0] > 150
            (box,) = sample.target  # type: ignore[misc, str-unpack]
            assert isinstance(box, Box) and bright.shape == (HEIGHT, WIDTH)
            rows = slice(round(box.top * HEIGHT), round(box.bottom * HEIGHT))
            covered.append(bright[rows, round(box.left * WIDTH) : round(box.right * WIDTH)].mean())
    assert len(covered) == COUNT and (min(covered) > 0.95) == (stated == "ignore")


# -- tables and folders -----------------------------------------------------------------------------------------------

ROWS = [(f"{number}.jpg", NAMES[number % 2]) for number in range(COUNT)]


def table(mark: str, *header: str, rows: Iterable[tuple[str, ...]] = ROWS) -> str:
    return "".join(f"{mark.join(row)}\n" for row in (header, *rows))


def paths(form: str) -> list[tuple[str, str]]:
    """Rows with paths to the pictures. form: with `{}` in place of a picture's name."""
    return [(form.format(name), label) for name, label in ROWS]


IDS = [(name.removesuffix(".jpg"), label) for name, label in ROWS]
TWO_LABELS = table(",", "path", "Label", "label", rows=[(*row, "?") for row in ROWS])
LABEL_STUDIO = [("1", label, "7", f"/data/upload/1/{name}") for name, label in ROWS]
TABLES: dict[str, tuple[str | bytes, str]] = {  # -> the file, more of `data`
    "path,label": (table(",", "path", "label"), ""),
    "header with spaces and case": (table(", ", " File Name ", "Class"), ""),
    "columns of the plan": (
        table(";", "Foto", "Was", "label", rows=[(*row, "?") for row in ROWS]),
        ", columns: {image: foto, answer: Was}",
    ),
    "byte order mark, tabs": (b"\xef\xbb\xbf" + table("\t", "filename", "category").encode(), ""),
    "UTF-16 without a mark": (table(";", "image", "answer").encode("utf-16-le"), ""),
    "a spreadsheet's sep": ("sep=;\r\n" + table(";", "image", "answer"), ""),
    "blank lines and rows": ("\n\n" + table(",", "image", "answer", "") + "\n,,\n , \n", ""),
    "quoted cells": (table(",", '"path"', '"label"', rows=[(f'"{a}"', f'"{b}"') for a, b in ROWS]), ""),
    "one of columns that differ in case": (TWO_LABELS, ", columns: {answer: Label}"),
    "an index column": (table(",", "", "path", "label", rows=[("7", *row) for row in ROWS]), ""),
    "paths of Windows": (table(",", "path", "label", rows=paths(".\\pictures\\{}")), ""),
    "paths of another machine": (table(",", "path", "label", rows=paths("/home/me/{}")), ""),
    "Kaggle's ids": (table(",", "id", "breed", rows=IDS), ", columns: {image: id, answer: breed}"),
    "Label Studio's": (
        table(",", "annotator", "choice", "id", "image", rows=LABEL_STUDIO),
        ", columns: {answer: choice}",
    ),
    "pictures in a bucket": (table(",", "path", "label", rows=paths("s3://me/lots/{}")), ""),
    "separated by bars": (table("|", "path", "label"), ""),
    "bars in a name": (table(",", "path", "label (car|bus|van)"), ", columns: {answer: label (car|bus|van)}"),
    "ImageNet's ids": (table(",", "path", "label", rows=[(f"net/{name}", label) for name, label in IDS]), ""),
}
TABLE_ERRORS: list[tuple[str | bytes, str, str]] = [  # the file, more of `data`, and a part of the error
    (
        table(",", "path", "filename", "label", rows=[(a, a, b) for a, b in ROWS]),
        "",
        "rows.csv, line 2: path and filename may each be the image; name one: `columns: {image: path}`",
    ),
    (
        TWO_LABELS,
        "",
        "rows.csv, line 2: Label and label may each be the answer; name one: `columns: {answer: Label}`",
    ),
    (table(",", "path", "label"), ", columns: {answer: what}", "line 2: has no column 'what'; has path"),
    (table(",", *ROWS[0], rows=ROWS[1:]), "", "line 2: lacks `image` and `answer`; has 0.jpg, car; name"),
    (
        table(",", "path", "label", rows=[("0.jpg", "grün")]).encode("cp1252"),
        "",
        "rows.csv, line 2: '0.jpg,grün' (read as cp1252) is not UTF-8; save it as UTF-8, in a spreadsheet as 'CSV",
    ),
    ("path,label\n./gone/0.jpg,car\n", "", "there is no picture"),
    ("path,label\nnet/both,car\n", "", "both.JPEG and "),
    ("path,label\n0.JPG,car\n", "", "its name in the folder is 0.jpg"),
    ("image,answer\n0.jpg,\n", "", "rows.csv, line 2: `answer` is empty"),
    (f"image,answer\n{'a caption ' * 40},0.jpg\n", "", "rows.csv, line 2: there is no picture"),
    (
        "image,answer,split,group\n0.jpg,car,train,gate\n1.jpg,bus,test,gate\n",
        "",
        "line 3: group 'gate' is in test, before in train",
    ),
    ("image,words\n0.jpg,car\n1.jpg,car", "", "rows.csv, line 2: lacks `answer`; has image, words"),
    ("image,answer\n0.jpg,car,bus\n", "", "line 2: has more cells than the first line"),
    ("image,answer,split\n0.jpg,car,eval\n", "", "line 2: `split` is 'eval'; choose train, validation, test"),
    ("image,answer,split\n0.jpg,car,train\n1.jpg,bus,\n", "", "1 of 2 samples have no split"),
    ("image,answer\n0.jpg,car\n1.jpg,cow\n", "", "line 3: the label 'cow' is unknown; known: car, bus"),
    ("", "", "rows.csv, line 1: the file is empty, or has only a line of columns; add rows"),
    ("path,label\n\n ;\n,\n", "", "rows.csv, line 1: the file is empty, or has only a line of columns; add"),
    ('image,answer\n0.jpg,"car\n1.jpg,bus\n', "", "line 2: invalid CSV from this line on (unexpected end of data)"),
    ('image,answer\n0.jpg,car\n1.jpg,"car"s\n', "", "line 3: invalid CSV from this line on (',' expected after"),
    (f"image,answer\n0.jpg,{'c' * 200_000}\n", "", "line 2: invalid CSV from this line on (field larger than field"),
    ("image,answer,answer\n0.jpg,car,bus\n", "", "line 1: names a column twice: image, answer, answer"),
]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures, with the same ones in two folders in it."""
    folder = tmp_path_factory.mktemp("tables") / "pictures"
    for number in range(COUNT):
        for place in (f"{number}.jpg", f"pictures/{number}.jpg", f"net/{number}.JPEG"):
            shot(folder / place, number)
    for suffix in ("JPEG", "png"):
        shot(folder / "net" / f"both.{suffix}", 0)
    return folder


def read_table(root: Path, pictures: Path, content: str | bytes, more: str, fields: str = "") -> DomainData:
    (root / "rows.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    data = f"{{format: questions, path: rows.csv, images: {pictures}{more}}}"
    return read(root, data, f"\ntask: classification{fields}")


@pytest.mark.parametrize("name", TABLES)
def test_tables(tmp_path: Path, pictures: Path, name: str) -> None:
    splits = read_table(tmp_path, pictures, *TABLES[name]).splits
    assert splits.labels == ("bus", "car") and sum(map(len, splits.parts.values())) == COUNT
    for part in splits.parts.values():
        for sample in part:
            assert splits.labels[sample.target] == NAMES[int(sample.frames.file.stem) % 2]  # type: ignore[attr-defined, index]


@pytest.mark.parametrize(("content", "more", "message"), TABLE_ERRORS, ids=[row[2][:40] for row in TABLE_ERRORS])
def test_errors_in_tables(tmp_path: Path, pictures: Path, content: str | bytes, more: str, message: str) -> None:
    with pytest.raises(BadPlan) as caught:
        read_table(tmp_path, pictures, content, more, "\nlabels: [car, bus]")
    assert message in str(caught.value)


def test_a_table_of_boxes_read_as_labels_is_named(tmp_path: Path) -> None:
    """Roboflow's CSV has a row for each object, so a picture has several classes."""
    for number in range(COUNT):
        shot(tmp_path / f"{number}.jpg", number)
    rows = [(name, label, "1", "9") for name, label in (*ROWS, ("0.jpg", "bus"), ("0.jpg", "car"))]
    put(tmp_path / "_annotations.csv", table(",", "filename", "class", "xmin", "xmax", rows=rows))
    notes = read(tmp_path, "{format: questions, path: _annotations.csv}\ntask: classification").notes
    (note,) = (note for note in notes if note.startswith("warning"))
    assert "1 samples contradict an earlier one of the same picture, the first at" in note and "line 14; for" in note


def folder_of_labels(root: Path, parts: Iterable[str] = ("",)) -> Path:
    for part in parts:
        for number in PARTS_OF.get(part, range(COUNT)):
            shot(root / "pictures" / part / NAMES[number % 2] / f"{number}.jpg", number)
    return root / "pictures"


OF_A_FILE_MANAGER = [f"{name}/{n}.txt" for name in NAMES for n in range(9)]
OF_A_FILE_MANAGER += ["car/Thumbs.db", "bus/.DS_Store", "car/._3.jpg"]
SKIPPED = "skipped 21 files that are no pictures: 18 .txt, 1 .DS_Store, 1 ._*, 1 Thumbs.db"
OF_OTHERS = ["desktop.ini", "__MACOSX/car/._1.jpg", "car/a.json", "car/clip.mp4"]


@pytest.mark.parametrize(
    ("parts", "beside", "counts", "notes"),
    [
        (("",), OF_A_FILE_MANAGER, (8, 2, 2), [SKIPPED, "with seed 0"]),
        (("",), OF_OTHERS, (8, 2, 2), ["no pictures: 1 "]),
        (("",), ["bike/notes.xml"], (8, 2, 2), ["bike contains no pictures, so 'bike' has no samples in any part"]),
        (("train", "test"), [], (6, 2, 2), ["validation (2) split off from train with seed 0: in proportion"]),
        (("train",), [], (4, 2, 2), ["validation (2) and test (2) split off from train"]),
        (("train", "val", "test"), ["extra/old.txt"], (8, 2, 2), ["only test, train, val are read, not extra"]),
    ],
)
def test_folders_with_other_files_and_without_parts(
    tmp_path: Path, parts: tuple[str, ...], beside: list[str], counts: tuple[int, int, int], notes: list[str]
) -> None:
    folder = folder_of_labels(tmp_path, parts)
    for name in beside:
        put(folder / name, "beside")
    loaded, again = (read(tmp_path, "{format: image_folder, path: pictures}") for _ in range(2))
    assert loaded.splits.real and loaded.splits.task == "classification" and set(loaded.splits.labels) >= set(NAMES)
    assert tuple(map(len, loaded.splits.parts.values())) == counts
    assert all(any(note in own for own in loaded.notes) for note in notes)
    files = [[[s.frames.file for s in p] for p in one.splits.parts.values()] for one in (loaded, again)]  # type: ignore[attr-defined]
    assert files[0] == files[1]


def test_pictures_of_a_kind_that_is_not_read(tmp_path: Path) -> None:
    for number in range(3):
        put(folder_of_labels(tmp_path) / "car" / f"IMG_{number}.HEIC", "a phone's")
    with pytest.raises(BadPlan, match=r"IMG_0.HEIC is of a kind .* has 3 of them \(.heic\); convert them to one of"):
        read(tmp_path, "{format: image_folder, path: pictures}")


def test_pictures_that_another_domain_trains_on_are_named(tmp_path: Path) -> None:
    """By their pixels; detection heads train by themselves, so their domains share nothing with others."""
    folder_of_labels(tmp_path, PARTS_OF)
    for number in range(COUNT):  # the parts exchanged
        home = tmp_path / "other" / ("test" if number < 4 else "val" if number < 6 else "train") / NAMES[number % 2]
        home.mkdir(parents=True, exist_ok=True)
        with Image.open(next((tmp_path / "pictures").rglob(f"{number}.jpg"))) as picture:
            picture.save(home / f"{number}.bmp")
    lines = [f"data: {{format: image_folder, path: {name}}}" for name in ("pictures", "other")]
    loaded = load_plan(write_plan(tmp_path, *lines, f"data: {one_folder_yolo(tmp_path)}"))
    notes = {name: " ".join(own.notes) for name, own in loaded.items()}
    assert "warning: 2 of 2 validation and 2 of 2 test pictures are training pictures of domain1" in notes["domain0"]
    assert "warning: 2 of 2 validation and 4 of 4 test pictures are training pictures of domain0" in notes["domain1"]
    assert "warning" not in notes["domain2"] and "domain2" not in notes["domain0"]


STRIPS = [(3, 2000, 3), (2000, 3, 3)]  # of line scans


def test_the_contact_sheet_shows_labels_and_boxes(tmp_path: Path) -> None:
    splits = read(tmp_path, ultralytics(tmp_path)).splits
    sheet = np.asarray(contact_sheet({"lots": splits})).astype(int)
    box = np.abs(sheet - (255, 90, 40)).max(-1) < 8
    bright = sheet.min(-1) > 225
    top, left = 32, 10  # of the first picture
    cell = np.s_[top : top + 149, left : left + 224]
    down, across = (box[cell] | bright[cell]).nonzero()
    (wanted,) = splits.train[0].target  # type: ignore[misc, str-unpack]
    assert isinstance(wanted, Box)
    edges_ = [across.min() / 224, across.max() / 224, down.max() / 149]
    assert edges_ == pytest.approx([wanted.left, wanted.right, wanted.bottom], abs=0.02)
    assert box.any(1).sum() > 100 and np.abs(np.diff(sheet[34:44, 10:60], axis=1)).max() > 40
    strips = [dataclasses.replace(splits.train[0], frames=[np.zeros(shape, np.uint8)]) for shape in STRIPS]
    contact_sheet({"strips": dataclasses.replace(splits, train=strips)})


# -- referring expressions in RefCOCO's format ----------------------------------------------------------------------


LINES = "data: {format: references, path: refs.json, instances: things.json}\nmetric: overlap"
SPLITS = ("train", "train", "val", "testA", "testB")


def write_references(folder: Path, question: str = "where is {expression} ?", lines: str = LINES) -> Path:
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
    (data,) = load_plan(write_references(tmp_path)).values()
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
    plan = write_references(tmp_path)
    refs = json.loads((tmp_path / "refs.json").read_text())
    (tmp_path / "refs.json").write_text(json.dumps([{**ref, "split": None} for ref in refs]))
    (data,) = load_plan(plan).values()
    homes = [{int(sample.frames.file.stem) for sample in part} for part in data.splits.parts.values()]  # type: ignore[attr-defined]
    assert sorted(number for home in homes for number in home) == [0, 1, 2, 3, 4]


Change = Callable[[list[dict[str, Any]], dict[str, Any]], object]
"""Of the references and the instances."""


def ref(**fields: Any) -> Change:
    return lambda refs, things: refs[1].update(fields)


def thing(**fields: Any) -> Change:
    return lambda refs, things: things["annotations"][0].update(fields)


NO_CHANGE: Change = lambda refs, things: None  # noqa: E731
OF_STREETS = "source: drawn-traffic-references\nmetric: overlap"


@pytest.mark.parametrize(
    ("written", "change", "message"),
    [
        ({}, ref(ann_id=999), "refs.json, ref 1: .*things.json has no annotation 999"),
        ({}, ref(image_id=100), "ref 1: annotation 201 is of image 101, not 100"),
        ({}, ref(split="testC"), "ref 1: `split` is 'testC'; choose train, val"),
        ({}, ref(sentences=[]), "ref 1: has no sentence"),
        ({}, ref(sentences=[{"sent": " "}]), "ref 1: has no sentence"),
        ({}, ref(ref_id="one"), r"`\[1\].ref_id`: is 'one'; it must be a whole number"),
        ({}, lambda refs, things: refs.clear(), "train is empty"),
        ({}, lambda refs, things: things["images"].pop(0), r"ref 0: .*things.json has no image 100"),
        ({}, thing(bbox=None), "things.json has no bbox for annotation 200"),
        ({}, thing(id=201), "things.json has 2 annotations 201"),
        ({"question": "where ?"}, NO_CHANGE, r"field `domains.0..question`: must contain {expression} in place of"),
        (
            {"lines": LINES.replace("metric: overlap", "task: referring")},
            NO_CHANGE,
            r"has no `metric`; .* use `overlap`",
        ),
        ({"lines": LINES.replace("refs.json", "refs.p")}, NO_CHANGE, "refs.p is a pickle, which can run any code"),
        ({"lines": OF_STREETS}, NO_CHANGE, r"field `domains.0..metric`: is 'overlap', but the answer '.* lane .*'"),
    ],
)
def test_errors_in_references(tmp_path: Path, written: dict[str, str], change: Change, message: str) -> None:
    (tmp_path / "refs.p").write_bytes(pickle.dumps([]))
    plan, files = write_references(tmp_path, **written), [tmp_path / name for name in ("refs.json", "things.json")]
    contents = [json.loads(file.read_text()) for file in files]
    change(*contents)
    for file, content in zip(files, contents, strict=True):
        file.write_text(json.dumps(content))
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
