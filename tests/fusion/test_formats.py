"""Data as tools and people write it: layouts and oddities of each format, read exactly or refused with the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fusion.data.coco import COCO
from fusion.data.load import DomainData
from fusion.report.examples import contact_sheet
from heads import Box
from tests.fusion.made import load_plan, write_plan
from vlora.errors import BadPlan
from vlora.training.records import PARTS

WIDTH, HEIGHT, COUNT = 48, 32, 12
NAMES = ("car", "bus")
PARTS_OF = {"train": range(8), "val": range(8, 10), "test": range(10, 12)}
EACH = (8, 2, 2)


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


def yolo(number: int) -> str:
    left, top, right, bottom = edges(number)
    x, y = (left + right) / 2 / WIDTH, (top + bottom) / 2 / HEIGHT
    return f"{number % 2} {x} {y} {(right - left) / WIDTH} {(bottom - top) / HEIGHT}\n"


def polygon(number: int) -> str:
    left, top, right, bottom = edges(number)
    x, y = (left + right) / 2, (top + bottom) / 2
    corners = [(x, top), (right, y), (x, bottom), (left, y)]
    return f"{number % 2} {' '.join(f'{across / WIDTH} {down / HEIGHT}' for across, down in corners)}\n"


def put(file: Path, text: str, encoding: str = "utf-8") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode(encoding))


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


def yolo_lists(root: Path, listed: Callable[[str], str], train: str = "train.txt") -> str:
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


def label_studio_yolo(root: Path) -> str:
    yolo_pairs(root, {"": ("images", "labels")})
    put(root / "classes.txt", "car\nbus\n")
    put(root / "notes.json", json.dumps({"categories": [{"id": 0, "name": "car"}]}))
    return "{format: yolo, path: .}"


def labelimg_yolo(root: Path, names: str = "car\nbus\n") -> str:
    yolo_pairs(root, {"": ("lots", "lots")}, suffix=".JPG")
    put(root / "lots" / "classes.txt", names)
    return "{format: yolo, path: lots}"


def one_folder_yolo(root: Path, **options: Any) -> str:
    yolo_pairs(root, {"": ("images", "labels")}, **options)
    put(root / "data.yaml", "path: .\ntrain: images\nval: images\nnames: {0: car, 1: bus}\n")
    return "{format: yolo, path: data.yaml}"


def voc(number: int, start: int = 0, filename: str | None = None, more: str = "", size: str = "") -> str:
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


def coco(
    root: Path, folder: str, numbers: Iterable[int] = range(COUNT), listed: str = "", exif: int = 1
) -> dict[str, Any]:
    kinds = [{"id": number, "name": name} for number, name in enumerate(("lots", *NAMES))]  # Roboflow's first has none
    content: dict[str, Any] = {"images": [], "annotations": [], "categories": kinds}
    for number in numbers:
        shot(root / folder / f"{number}.jpg", number, exif)
        left, top, right, bottom = edges(number)
        image = {"id": number, "file_name": f"{listed}{number}.jpg", "width": WIDTH, "height": HEIGHT}
        content["images"].append(image)
        box = {"bbox": [left, top, right - left, bottom - top], "iscrowd": 0, "segmentation": []}
        content["annotations"].append({"id": number + 1, "image_id": number, "category_id": 1 + number % 2, **box})
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


def label_studio_coco(root: Path, listed: str = "images\\", exif: int = 1) -> str:
    put(root / "result.json", "\ufeff" + json.dumps(coco(root, "images", listed=listed, exif=exif)))
    return "{format: coco, path: result.json}"


def corners(number: int) -> str:
    left, top, right, bottom = edges(number)
    points = [(left, top), (right, top), (right, bottom), (left, bottom)]
    return f"{number % 2} {' '.join(f'{across / WIDTH} {down / HEIGHT}' for across, down in points)}\n"


def floats(number: int) -> str:
    return " ".join(f"{float(word):.18e}" for word in yolo(number).split()) + "\n"


def nested_yolo(root: Path) -> str:
    for part, numbers in PARTS_OF.items():
        for number in numbers:
            shot(root / "images" / part / f"cam{number % 2}" / f"{number}.jpg", number)
            put(root / "labels" / part / f"cam{number % 2}" / f"{number}.txt", yolo(number))
    put(
        root / "data.yaml",
        "train: images/train\r\nval: images/val\r\ntest: images/test\r\nnames: {'0': car, '1': bus}\n",
    )
    return "{format: yolo, path: .}"


def in_xml(change: Callable[[str], str], encoding: str = "utf-8", **options: Any) -> Callable[[Path], str]:
    def built(root: Path) -> str:
        data = pascal(root, **options)
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


def in_coco(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Callable[[Path], str]:
    """change: called with each picture and its annotation."""

    def built(root: Path) -> str:
        content = coco(root, "images")
        for image, annotation in zip(content["images"], content["annotations"], strict=True):
            change(image, annotation)
        put(root / "result.json", json.dumps(content))
        return "{format: coco, path: result.json}"

    return built


def named_ids(image: dict[str, Any], annotation: dict[str, Any]) -> None:
    image["id"] = annotation["image_id"] = f"img_{image['id']}"
    annotation["category_id"] = str(annotation["category_id"])


def url(image: dict[str, Any], annotation: dict[str, Any]) -> None:
    image["file_name"] = f"https://labels.example.org/data/up%20load/7/{image['file_name']}"


def bare(image: dict[str, Any], annotation: dict[str, Any]) -> None:
    image["file_name"] = image["file_name"].removesuffix(".jpg")


def cvat_attributes(image: dict[str, Any], annotation: dict[str, Any]) -> None:
    image |= {"width": float(WIDTH), "height": str(HEIGHT), "license": 0, "coco_url": "", "date_captured": 0}
    size = {"size": [HEIGHT, WIDTH], "counts": "abc"}
    annotation |= {"segmentation": size, "iscrowd": False, "area": 12.5, "attributes": {"occluded": False}}
    annotation["bbox"] = [str(float(edge)) for edge in annotation["bbox"]]


VOC_PART = "<part><name>wheel</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax></bndbox></part>"

LAYOUTS: dict[str, tuple[Callable[[Path], str], tuple[int, int, int], str]] = {
    "yolo, Ultralytics": (ultralytics, EACH, ""),
    "yolo, names as a list": (lambda root: ultralytics(root, "names: [car, bus]\n"), EACH, ""),
    "yolo, polygons": (lambda root: ultralytics(root, line=polygon), EACH, ""),
    "yolo, keypoints": (
        lambda root: ultralytics(
            root, "kpt_shape: [2, 3]\nnames: [car, bus]\n", line=lambda n: yolo(n).strip() + " 0.5 0.5 2 0 0 0\n"
        ),
        EACH,
        "",
    ),
    "yolo, confidences, blank and repeated lines": (
        lambda root: ultralytics(root, line=lambda n: f"\n{yolo(n).strip()} 0.9\r\n{yolo(n).strip()} 0.9\n \n"),
        EACH,
        "",
    ),
    "yolo, Roboflow": (roboflow_yolo, EACH, ""),
    "yolo, Roboflow without test": (
        lambda root: roboflow_yolo(root, ("train", "val")),
        (6, 2, 2),
        "test (2) split off from train with seed 0",
    ),
    "yolo, lists of paths": (lambda root: yolo_lists(root, lambda path: f"./{path}"), EACH, ""),
    "yolo, lists of Windows": (lambda root: yolo_lists(root, lambda path: path.replace("/", "\\")), EACH, ""),
    "yolo, lists of another machine": (lambda root: yolo_lists(root, lambda path: f"/content/lots/{path}"), EACH, ""),
    "yolo, lists of CVAT": (lambda root: yolo_lists(root, lambda path: f"data/{path}"), EACH, ""),
    "yolo, a list of folders": (lambda root: yolo_lists(root, str, "[images/train, images/train]"), EACH, ""),
    "yolo, CVAT": (cvat_yolo, EACH, "split off from train"),
    "yolo, Label Studio": (
        label_studio_yolo,
        EACH,
        "validation (2) and test (2) split off from all 12",
    ),
    "yolo, labelImg": (labelimg_yolo, EACH, ""),
    "yolo, one folder for train and val": (one_folder_yolo, EACH, "validation has the same pictures as train"),
    "yolo, oriented boxes": (lambda root: ultralytics(root, line=corners), EACH, ""),
    "yolo, numbers of numpy": (lambda root: ultralytics(root, line=floats), EACH, ""),
    "yolo, folders of cameras": (nested_yolo, EACH, ""),
    "yolo, folders named from above": (
        lambda root: edit("data.yaml", lambda text: text.replace(": images/", f": {root.name}/images/"))(root),
        EACH,
        "",
    ),
    "voc, Pascal": (pascal, EACH, ""),
    "voc, counted from 1": (lambda root: pascal(root, start=1), EACH, "counted from 1, as in Pascal VOC"),
    "voc, trainval": (
        lambda root: pascal(root, ("trainval", "test")),
        (8, 2, 2),
        "validation (2) split off from train",
    ),
    "voc, difficult": (
        lambda root: pascal(root, more="<difficult>1</difficult>"),
        EACH,
        "12 objects marked as difficult are kept",
    ),
    "voc, unlisted": (lambda root: pascal(root, ("train", "val")), (6, 2, 2), "2 XML files are in none of train.txt"),
    "voc, floats": (lambda root: pascal(root, start=0.25), EACH, ""),
    "voc, parts of objects": (in_xml(lambda text: text.replace("</object>", f"{VOC_PART}</object>")), EACH, ""),
    "voc, names on lines of their own": (
        in_xml(lambda text: text.replace("<name>", "<name>\n  ").replace("</name>", "\n</name>")),
        EACH,
        "",
    ),
    "voc, declared as GBK": (
        in_xml(lambda text: f'<?xml version="1.0" encoding="gbk"?>\n{text}'.replace("C:\\me", "C:\\照片"), "gbk"),
        EACH,
        "",
    ),
    "voc, CVAT's subsets": (cvat_voc, EACH, "validation (2) and test (2) split off from all 12"),
    "voc, Roboflow": (roboflow_voc, EACH, ""),
    "voc, labelImg": (labelimg_voc, EACH, ""),
    "voc, renamed pictures of a camera": (lambda root: labelimg_voc(root, filename="IMG_7", suffix=".JPG"), EACH, ""),
    "voc, no size": (lambda root: labelimg_voc(root, size="<width>0</width><height>0</height>"), EACH, ""),
    "coco, Roboflow": (roboflow_coco, EACH, ""),
    "coco, the benchmark's": (benchmark_coco, EACH, ""),
    "coco, CVAT": (cvat_coco, EACH, ""),
    "coco, Label Studio on Windows": (label_studio_coco, EACH, ""),
    "coco, Label Studio's server": (
        lambda root: label_studio_coco(root, "../../label-studio/data/media/upload/1/images/"),
        EACH,
        "",
    ),
    "coco, ids that are names": (in_coco(named_ids), EACH, ""),
    "coco, pictures by URL": (in_coco(url), EACH, ""),
    "coco, pictures without a suffix": (in_coco(bare), EACH, ""),
    "coco, attributes of CVAT": (in_coco(cvat_attributes), EACH, ""),
    "coco, absolute paths": (lambda root: label_studio_coco(root, "C:\\Users\\me\\lots\\images\\"), EACH, ""),
}


def read(root: Path, data: str, more: str = "") -> DomainData:
    (loaded,) = load_plan(write_plan(root, f"data: {data}{more}")).values()
    return loaded


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_has_its_boxes_labels_and_parts(tmp_path: Path, layout: str) -> None:
    build, counts, note = LAYOUTS[layout]  # counts: of the parts
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


def edit(file: str, change: Callable[[str], str], build: Callable[[Path], str] = ultralytics) -> Callable[[Path], str]:
    def built(root: Path) -> str:
        data = build(root)
        put(root / file, change((root / file).read_text()))
        return data

    return built


def without(file: str, build: Callable[[Path], str] = ultralytics) -> Callable[[Path], str]:
    def built(root: Path) -> str:
        data = build(root)
        (root / file).unlink()
        return data

    return built


def unmatched_labels(root: Path) -> str:
    yolo_pairs(root, {"": ("images", "elsewhere")})
    put(root / "classes.txt", "car\nbus\n")
    return "{format: yolo, path: .}"


def two_files(root: Path) -> str:
    for name in ("a.json", "b.json"):
        put(root / name, json.dumps(coco(root, "images")))
    return "{format: coco, path: .}"


LINE = "labels/train/3.txt"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            edit(LINE, lambda text: "1 30 20 14 11\n"),
            "3.txt, line 1: '1 30 20 14 11' has numbers above 1; they are shares",
        ),
        (
            edit(LINE, lambda text: text + "\n2 .5 .5 .1 .1"),
            "3.txt, line 3: class 2 is unknown; known: 0 (car), 1 (bus)",
        ),
        (edit(LINE, lambda text: "car 0.5 0.5 0.1 0.1"), "3.txt, line 1: 'car 0.5 0.5 0.1 0.1' is not all numbers"),
        (edit(LINE, lambda text: "1 0,5 0,5 0,1 0,1"), "3.txt, line 1: '1 0,5 0,5 0,1 0,1' is not all numbers"),
        (edit(LINE, lambda text: "1 .5 .5 .1"), "has 3 numbers after the class; a box has 4, a polygon has pairs"),
        (edit(LINE, lambda text: "1 .5 .5 0 .1"), "'1 .5 .5 0 .1' has no area"),
        (edit(LINE, lambda text: "1 .9 .5 .4 .1"), "'1 .9 .5 .4 .1' extends beyond its picture of 48 x 32"),
        (edit(LINE, lambda text: "1 nan .5 .4 .1"), "has numbers above 1"),
        (edit("data.yaml", lambda text: text + "nc: 3\n"), "`nc` is 3, but `names` has 2 classes; correct one of them"),
        (edit("data.yaml", lambda text: text.replace("0: car", "2: car")), "numbers 2, 1; they must be 0, 1, 2"),
        (edit("data.yaml", lambda text: text.replace("names", "name")), "`names` is None; it must name the classes"),
        (edit("data.yaml", lambda text: text.replace("train: images/train", "")), "but none of train"),
        (
            edit("data.yaml", lambda text: text.replace("images/train", "images/tran")),
            "images/tran, which is named for",
        ),
        (
            edit("data.yaml", lambda text: text.replace("train: images/", "train: v2/images/")),
            "v2/images/train, which is named for train",
        ),
        (
            edit("data.yaml", lambda text: text.replace("val: images/val", "val: /v2/images/train")),
            "images/train and /v2/images/train are both",
        ),
        (
            edit(
                "data.yaml", lambda text: text.replace("train.txt", "v2/train.txt"), lambda root: yolo_lists(root, str)
            ),
            "there is no file",
        ),
        (edit("data.yaml", lambda text: text + "names: [a"), "data.yaml, line 6: not YAML"),
        (without("lots/classes.txt", labelimg_yolo), "has no data.yaml and no classes.txt or obj.names or _darknet"),
        (lambda root: "{format: yolo, path: nowhere}", "there is no folder"),
        (unmatched_labels, "none of 12 pictures has a label file; expected is, for the first, "),
        (lambda root: ultralytics(root, exif=3), "is rotated by EXIF (orientation 3), and nothing shows"),
        (
            edit("train.txt", lambda text: text + "gone.jpg", lambda root: yolo_lists(root, str)),
            "train.txt, line 10: th",
        ),
        (edit("Annotations/3.xml", lambda text: text[:-9], pascal), "3.xml is not XML: "),
        (
            edit("Annotations/3.xml", lambda text: text.replace("xmin", "x"), pascal),
            "3.xml, object 1: bndbox [None, 3,",
        ),
        (
            edit("Annotations/3.xml", lambda text: text.replace("<name>bus", "<name>"), pascal),
            "object 1: has no <name>",
        ),
        (
            edit("Annotations/3.xml", lambda text: text.replace(">20<", ">200<"), pascal),
            "extends beyond its picture of",
        ),
        (
            edit("Annotations/3.xml", lambda text: text.replace(">6<", ">20<"), pascal),
            "bndbox [20, 3, 20, 14] has no area",
        ),
        (edit("Annotations/3.xml", lambda text: text.replace(">48<", ">96<"), pascal), "has size (96, 32), but"),
        (
            edit("ImageSets/Main/val.txt", lambda text: text + "77\n", pascal),
            "val.txt, line 3: there is no XML file of '77'",
        ),
        (without("JPEGImages/3.jpg", pascal), "Annotations/3.xml: there is no picture"),
        (lambda root: labelimg_voc(root, exif=3), "rotated by EXIF (orientation 3)"),
        (lambda root: "{format: voc, path: .}", "contains no XML file with an <annotation>"),
        (two_files, "has 2 JSON files that name no part (train, validation, test): a.json, b.json; set"),
        (lambda root: "{format: coco, path: .}", "has no JSON file, nor has a folder in it"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_remedy(
    tmp_path: Path, build: Callable[[Path], str], message: str
) -> None:
    with pytest.raises(BadPlan) as caught:
        read(tmp_path, build(tmp_path))
    assert message in str(caught.value)


def test_ids_that_are_no_plain_numbers_remain_texts() -> None:
    ids = {7: 7, "7": 7, "0": 0, "1_12": "1_12", "11_2": "11_2", "0001": "0001", "1.0": "1.0", " 1": " 1"}
    images = [{"id": given, "file_name": "a.jpg"} for given in ids]
    found = COCO.validate_json(json.dumps({"images": images, "annotations": []}))
    assert [image.id for image in found.images] == list(ids.values())


@pytest.mark.parametrize("build", [one_folder_yolo, labelimg_voc, label_studio_coco])
@pytest.mark.parametrize(("exif", "stated"), [(3, "ignore"), (6, "ignore"), (3, "apply")])
def test_exif_is_as_the_plan_says(tmp_path: Path, build: Callable[..., str], exif: int, stated: str) -> None:
    """Boxes of the pixels as stored cover the square if the tool ignored EXIF; the tool's size may not show it."""
    data = build(tmp_path, exif=exif)
    if build is label_studio_coco:
        content = json.loads((tmp_path / "result.json").read_text("utf-8-sig"))
        for image in content["images"]:
            image.update(width=0, height=0)
        put(tmp_path / "result.json", json.dumps(content))
    elif build is labelimg_voc:
        data = build(tmp_path, exif=exif, size="<width/>")
    covered = []
    for part in read(tmp_path, data.replace("}", f", exif: {stated}}}")).splits.parts.values():
        for sample in part:
            bright = sample.frames[0][..., 0] > 150
            height, width = bright.shape
            (box,) = sample.target  # type: ignore[misc, str-unpack]
            assert isinstance(box, Box) and (height, width) == ((HEIGHT, WIDTH) if exif == 3 else (WIDTH, HEIGHT))
            rows = slice(round(box.top * height), round(box.bottom * height))
            covered.append(bright[rows, round(box.left * width) : round(box.right * width)].mean())
    assert len(covered) == COUNT and (min(covered) > 0.95) == (stated == "ignore")


ROWS = [(f"{number}.jpg", NAMES[number % 2]) for number in range(COUNT)]


def table(mark: str, *header: str, rows: Iterable[tuple[str, ...]] = ROWS) -> str:
    return "".join(f"{mark.join(row)}\n" for row in (header, *rows))


TABLES: dict[str, tuple[str | bytes, str, str]] = {  # -> the file, more of `data`, part of an error ("" for none)
    "path,label": (table(",", "path", "label"), "", ""),
    "header with spaces and case": (table(", ", " File Name ", "Class"), "", ""),
    "columns of the plan": (
        table(";", "Foto", "Was", "label", rows=[(*row, "?") for row in ROWS]),
        "columns: {image: foto, answer: Was}",
        "",
    ),
    "byte order mark, tabs": (b"\xef\xbb\xbf" + table("\t", "filename", "category").encode(), "", ""),
    "UTF-16 without a mark": (table(";", "image", "answer").encode("utf-16-le"), "", ""),
    "a spreadsheet's sep": ("sep=;\r\n" + table(";", "image", "answer"), "", ""),
    "blank lines and rows": ("\n\n" + table(",", "image", "answer", "") + "\n,,\n , \n", "", ""),
    "quoted cells": (table(",", '"path"', '"label"', rows=[(f'"{a}"', f'"{b}"') for a, b in ROWS]), "", ""),
    "an index column": (table(",", "", "path", "label", rows=[("7", *row) for row in ROWS]), "", ""),
    "paths of Windows": (table(",", "path", "label", rows=[(f".\\pictures\\{a}", b) for a, b in ROWS]), "", ""),
    "paths of another machine": (table(",", "path", "label", rows=[(f"/home/me/{a}", b) for a, b in ROWS]), "", ""),
    "two columns for one field": (
        table(",", "path", "filename", "label", rows=[(a, a, b) for a, b in ROWS]),
        "",
        "rows.csv, line 2: path and filename may each be the image; name one: `columns: {image: path}`",
    ),
    "columns that differ in case": (
        table(",", "path", "Label", "label", rows=[(*row, "?") for row in ROWS]),
        "",
        "rows.csv, line 2: Label and label may each be the answer; name one: `columns: {answer: Label}`",
    ),
    "one of columns that differ in case": (
        table(",", "path", "Label", "label", rows=[(*row, "?") for row in ROWS]),
        "columns: {answer: Label}",
        "",
    ),
    "no such column": (
        table(",", "path", "label"),
        "columns: {answer: what}",
        "line 2: has no column 'what'; has path",
    ),
    "no header": (table(",", *ROWS[0], rows=ROWS[1:]), "", "line 2: lacks `image` and `answer`; has 0.jpg, car; name"),
    "cp1252": (
        table(",", "path", "label", rows=[("0.jpg", "grün")]).encode("cp1252"),
        "",
        "rows.csv, line 2: '0.jpg,grün' (read as cp1252) is not UTF-8; save it as UTF-8, in a spreadsheet as 'CSV",
    ),
    "empty": ("", "", "rows.csv, line 1: the file is empty, or has only a line of columns; add rows"),
    "only columns": ("path,label\n\n", "", "rows.csv, line 1: the file is empty, or has only a line of columns; add"),
    "a folder that is missing": (
        table(",", "path", "label", rows=[("./gone/0.jpg", "car")]),
        "",
        "there is no picture",
    ),
    "Kaggle's ids": (
        table(",", "id", "breed", rows=[(a.removesuffix(".jpg"), b) for a, b in ROWS]),
        "columns: {image: id, answer: breed}",
        "",
    ),
    "Label Studio's": (
        table(",", "annotator", "choice", "id", "image", rows=[("1", b, "7", f"/data/upload/1/{a}") for a, b in ROWS]),
        "columns: {answer: choice}",
        "",
    ),
    "pictures in a bucket": (table(",", "path", "label", rows=[(f"s3://me/lots/{a}", b) for a, b in ROWS]), "", ""),
    "separated by bars": (table("|", "path", "label"), "", ""),
    "bars in a name": (table(",", "path", "label (car|bus|van)"), "columns: {answer: label (car|bus|van)}", ""),
    "ImageNet's ids": (
        table(",", "path", "label", rows=[(f"net/{a.removesuffix('.jpg')}", b) for a, b in ROWS]),
        "",
        "",
    ),
    "two pictures of one id": (table(",", "path", "label", rows=[("net/both", "car")]), "", "both.JPEG and "),
    "another case": (table(",", "path", "label", rows=[("0.JPG", "car")]), "", "its name in the folder is 0.jpg"),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables(tmp_path: Path, name: str) -> None:
    content, more, message = TABLES[name]
    for number in range(COUNT):
        shot(tmp_path / "pictures" / f"{number}.jpg", number)
        shot(tmp_path / f"pictures/pictures/{number}.jpg", number)
        shot(tmp_path / f"pictures/net/{number}.JPEG", number)
    for suffix in ("JPEG", "png"):
        shot(tmp_path / f"pictures/net/both.{suffix}", 0)
    (tmp_path / "rows.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    data = f"{{format: questions, path: rows.csv, images: pictures{', ' * bool(more)}{more}}}\ntask: classification"
    if message:
        with pytest.raises(BadPlan) as caught:
            read(tmp_path, data)
        assert message in str(caught.value)
        return
    splits = read(tmp_path, data).splits
    assert splits.labels == ("bus", "car") and sum(map(len, splits.parts.values())) == COUNT
    for part in splits.parts.values():
        for sample in part:
            assert splits.labels[sample.target] == NAMES[int(sample.frames.file.stem) % 2]  # type: ignore[attr-defined, index]


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


@pytest.mark.parametrize(
    ("parts", "beside", "counts", "notes"),
    [
        (
            ("",),
            [*(f"{name}/{n}.txt" for name in NAMES for n in range(9)), "car/Thumbs.db", "bus/.DS_Store", "car/._3.jpg"],
            (8, 2, 2),
            ["skipped 21 files that are no pictures: 18 .txt, 1 .DS_Store, 1 ._*, 1 Thumbs.db", "with seed 0"],
        ),
        (("",), ["desktop.ini", "__MACOSX/car/._1.jpg", "car/a.json", "car/clip.mp4"], (8, 2, 2), ["no pictures: 1 "]),
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
    loaded = read(tmp_path, "{format: image_folder, path: pictures}")
    assert tuple(map(len, loaded.splits.parts.values())) == counts
    assert all(any(note in own for own in loaded.notes) for note in notes)
    again = read(tmp_path, "{format: image_folder, path: pictures}")
    assert [[s.frames.file for s in part] for part in again.splits.parts.values()] == [  # type: ignore[attr-defined]
        [s.frames.file for s in part]  # type: ignore[attr-defined]
        for part in loaded.splits.parts.values()
    ]


def test_pictures_of_a_kind_that_is_not_read(tmp_path: Path) -> None:
    for number in range(3):
        put(folder_of_labels(tmp_path) / "car" / f"IMG_{number}.HEIC", "a phone's")
    with pytest.raises(BadPlan, match=r"IMG_0.HEIC is of a kind .* has 3 of them \(.heic\); convert them to one of"):
        read(tmp_path, "{format: image_folder, path: pictures}")


def test_augmented_copies_of_one_picture_stay_together(tmp_path: Path) -> None:
    """Roboflow names them SOURCE.rf.HASH.jpg."""
    for number in range(24):
        shot(tmp_path / "pictures" / NAMES[number % 2] / f"{number // 4}_jpg.rf.{number:04x}.jpg", number)
    parts = read(tmp_path, "{format: image_folder, path: pictures}").splits.parts
    homes = [{s.frames.file.name.split(".rf.")[0] + s.frames.file.parent.name for s in part} for part in parts.values()]  # type: ignore[attr-defined]
    assert sum(map(len, homes)) == 12 and len(set().union(*homes)) == 12


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
