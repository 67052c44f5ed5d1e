"""COCO's JSON: pictures, categories, boxes and captions (https://cocodataset.org/#format-data)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, Field, FiniteFloat, TypeAdapter, ValidationError, field_validator

from fusion.data.frames import QUARTER_TURNS, Picture, find_file, read_text
from fusion.data.items import PARTS, Answer, Item, NamedBox, Part
from fusion.plan.data_formats import Coco, Orientation
from vlora.plan_files.errors import PlanErrors
from vlora.wording import pydantic_errors

Parsed = TypeVar("Parsed")
_SLACK = 1.0  # pixels by which a box may exceed its picture, since annotators round


class _Image(BaseModel):
    """width, height: None for those of the file."""

    id: int
    file_name: str
    width: int | None = Field(None, gt=0, lt=2**31)
    height: int | None = Field(None, gt=0, lt=2**31)


class _Category(BaseModel):
    id: int
    name: str = Field(min_length=1)


_Bbox = tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat]


class _Annotation(BaseModel):
    """bbox: left, top, width, height in pixels, or all of a file as shares of the picture. segmentation: the bbox of
    its polygons, None for other forms. iscrowd: a region with many objects, which COCO's metrics ignore."""

    id: int | None = None
    image_id: int
    category_id: int | None = None
    bbox: _Bbox | None = None
    segmentation: _Bbox | None = None
    caption: str | None = None
    iscrowd: int | None = 0

    @field_validator("bbox", mode="before")
    @classmethod
    def _without_empty(cls, value: object) -> object:
        return None if value == [] else value

    @field_validator("segmentation", mode="before")
    @classmethod
    def _around_polygons(cls, value: object) -> object:
        """The polygons themselves, x, y, x, y, ..., would fill the memory."""
        polygons = value if isinstance(value, list) else []
        points = [number for each in polygons for number in (each if isinstance(each, list) else [each])]
        if len(points) < 6 or not all(isinstance(number, int | float) for number in points):
            return None
        across, down = points[::2], points[1::2]
        return min(across), min(down), max(across) - min(across), max(down) - min(down)

    @property
    def box(self) -> _Bbox | None:
        return self.bbox or self.segmentation


class CocoFile(BaseModel):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category] | None = None

    @property
    def in_shares(self) -> bool:
        """Whether all boxes are shares of their pictures: with fractions, and none beyond 1."""
        boxes = [annotation.box for annotation in self.annotations if annotation.box is not None]
        inside = all(_within_1(box) for box in boxes)
        return inside and any(number % 1 for box in boxes for number in box)


class View(NamedTuple):
    """What a picture's boxes refer to. size: width and height. orientation: by which EXIF turns boxes with the picture.
    in_shares: whether they are shares instead of pixels."""

    size: tuple[int, int]
    orientation: int
    in_shares: bool

    @property
    def upright(self) -> tuple[int, int]:
        """The size of the picture as shown."""
        return (self.size[1], self.size[0]) if self.orientation in QUARTER_TURNS else self.size


COCO = TypeAdapter(CocoFile)


def read_coco(data: Coco, task: str, errors: PlanErrors) -> list[Item]:
    """Read one item per picture with its boxes (detection), its labels (multi_label) or the number of its boxes
    (counting), or one item per caption (captioning)."""
    items: list[Item] = []
    for part, file in _files(data.path, errors):
        found = parse(file, COCO, "path", errors)
        if found is not None:
            items += _items(found, file, data, task, part, errors)
    return items


def _files(path: Path, errors: PlanErrors) -> Iterator[tuple[Part | None, Path]]:
    if path.is_dir():
        for part in PARTS:
            if (path / f"{part}.json").is_file():
                yield part, path / f"{part}.json"
            else:
                errors.add(f"{path} lacks {part}.json", "path")
    elif path.is_file():
        yield None, path
    else:
        errors.add(f"there is no file or folder {path}", "path")


def parse(file: Path, shape: TypeAdapter[Parsed], field: str, errors: PlanErrors) -> Parsed | None:
    """Parse a JSON file of a known schema.

    Args:
        field: the plan's field that names the file.

    Returns:
        The content, or None after reporting an error if the file cannot be read.
    """
    try:
        return shape.validate_json(read_text(file))
    except OSError as error:
        errors.add(f"{file} cannot be read: {error.strerror}", field)
    except UnicodeDecodeError as error:
        errors.add(f"{file} is not UTF-8 ({error}); save it as UTF-8", field)
    except ValidationError as error:
        for entry in error.errors():
            place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in entry["loc"])
            errors.add(f"{file}, `{place.lstrip('.') or 'file'}`: {pydantic_errors.described(entry)}", field)
    return None


def _items(found: CocoFile, file: Path, data: Coco, task: str, part: Part | None, errors: PlanErrors) -> Iterator[Item]:
    # In files merged without new ids, annotations would be assigned to the wrong images or categories; of one picture
    # with two ids, each would have a part of the boxes.
    categories = found.categories or []
    unique: list[tuple[str, Iterable[int | str]]] = [
        ("images have the id", (entry.id for entry in found.images)),
        ("categories have the id", (entry.id for entry in categories)),
    ]
    if task != "captioning":
        unique.append(("images have the file_name", (entry.file_name for entry in found.images)))
    for what, values in unique:
        for value, count in Counter(values).items():
            if count > 1:
                errors.add(f"{file}: {count} {what} {value}", "path")
    names = {category.id: category.name for category in categories}
    images = {image.id: image for image in found.images}
    folder, in_shares = data.images or file.parent, found.in_shares
    pictures = {image.id: find_file(folder, image.file_name, "picture") for image in found.images}
    stated = data.orientation if task == "detection" else "upright"
    views: dict[int, View | str] = {}
    boxes: dict[int, list[NamedBox]] = {image.id: [] for image in found.images}
    captions: dict[int, list[str]] = {image.id: [] for image in found.images}
    for index, annotation in enumerate(found.annotations):
        place = f"{file}, annotation {f'at index {index}' if annotation.id is None else annotation.id}"
        image = images.get(annotation.image_id)
        if image is None:
            errors.add(f"{place}: there is no image {annotation.image_id}", "path")
        elif task == "captioning":
            if annotation.caption:
                captions[image.id].append(annotation.caption.strip())
            else:
                errors.add(f"{place}: has no caption", "path")
        elif annotation.iscrowd:
            continue
        elif annotation.category_id not in names:
            errors.add(f"{place}: category {annotation.category_id} is unknown; known: {_list(names)}", "path")
        elif annotation.box is None:
            errors.add(f"{place}: has no bbox and no polygon in its segmentation; add a bbox", "path")
        elif isinstance(picture := pictures[image.id], Path):
            if image.id not in views:
                views[image.id] = view_of(image, picture, in_shares, stated)
                if isinstance(view := views[image.id], str):
                    errors.add(f"{file}, image {image.id}: {view}", "path")
            if isinstance(view := views[image.id], View):
                box = box_of(annotation.box, names[annotation.category_id], view)
                if isinstance(box, str):
                    errors.add(f"{place}: {box}", "path")
                else:
                    boxes[image.id].append(box)
    for image in found.images:
        place, picture = f"{file}, image {image.id}", pictures[image.id]
        if isinstance(picture, str):
            errors.add(f"{place}: {picture}", "path")
            continue
        for answer in _answers(task, boxes[image.id], captions[image.id]):
            shown = views.get(image.id)
            size = shown.upright if isinstance(shown, View) else None  # without boxes it makes no difference
            yield Item(Picture(picture), answer, place, group=image.file_name, part=part, size=size)


def _answers(task: str, boxes: list[NamedBox], captions: list[str]) -> list[Answer]:
    if task == "captioning":
        return list(captions)
    if task == "counting":
        return [str(len(boxes))]
    if task == "multi_label":
        return [tuple(sorted({box.label for box in boxes}))]
    return [tuple(boxes)]


def view_of(image: _Image, file: Path, in_shares: bool, stated: Orientation | None) -> View | str:
    """What the boxes of a picture refer to, or why that is unknown.

    Args:
        in_shares: whether the file's boxes are shares.
        stated: the plan's `orientation`. Without it, the size in the COCO file decides for pictures that EXIF rotates.
    """
    try:
        stored, orientation = Picture(file).stored()
    except ValueError as error:
        return str(error)
    upright = (stored[1], stored[0]) if orientation in QUARTER_TURNS else stored
    declared = (image.width or upright[0], image.height or upright[1])
    if orientation == 1:
        return View(declared, 1, in_shares)
    if stated is None and stored != upright and image.width and image.height:
        if declared not in (stored, upright):
            return View(declared, 1, in_shares)  # the wrong size is reported when the picture is decoded
        stated = "stored" if declared == stored else "upright"
    if stated is None:
        return (
            f"{file} is rotated by EXIF (orientation {orientation}), and its size does not show whether the boxes are "
            "of the pixels as stored or as shown; set `orientation: stored` or `orientation: upright` in `data`"
        )
    return View(stored, orientation, in_shares) if stated == "stored" else View(upright, 1, in_shares)


def box_of(bbox: tuple[float, float, float, float], label: str, view: View) -> NamedBox | str:
    """Convert a bbox to shares of its upright picture, or return why it is invalid."""
    left, top, width, height = bbox
    if width <= 0 or height <= 0:
        return f"bbox {list(bbox)} has no area; it is [left, top, width, height] in pixels"
    if not view.in_shares and _within_1(bbox):
        return f"bbox {list(bbox)} is in one pixel, so it seems to be in shares, but others of the file are in pixels"
    across, down = (1, 1) if view.in_shares else view.size
    slack = 0.01 if view.in_shares else _SLACK
    if min(left, top) < -slack or left + width > across + slack or top + height > down + slack:
        return f"bbox {list(bbox)} extends beyond its picture of {view.size[0]} x {view.size[1]}"
    edges = left / across, top / down, (left + width) / across, (top + height) / down
    return NamedBox(label, *_turned([min(1.0, max(0.0, edge)) for edge in edges], view.orientation))


def _turned(edges: Sequence[float], orientation: int) -> tuple[float, float, float, float]:
    """Edges in a stored picture as edges in the upright one."""
    left, top, right, bottom = edges
    if orientation in QUARTER_TURNS:
        left, top, right, bottom = top, left, bottom, right
    if orientation in (2, 3, 6, 7):
        left, right = 1 - right, 1 - left
    if orientation in (3, 4, 7, 8):
        top, bottom = 1 - bottom, 1 - top
    return left, top, right, bottom


def _within_1(bbox: Sequence[float]) -> bool:
    left, top, width, height = bbox
    return min(left, top) >= -0.01 and max(left + width, top + height) <= 1.01


def _list(names: dict[int, str]) -> str:
    return ", ".join(f"{number} ({name})" for number, name in list(names.items())[:10]) or "none"
