"""COCO's JSON: pictures, categories, boxes and captions (https://cocodataset.org/#format-data)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field, FiniteFloat, TypeAdapter, ValidationError

from fusion.data.frames import Picture
from fusion.data.items import PARTS, Answer, Item, NamedBox, Part
from fusion.plan.data_formats import Coco
from vlora.plan_files.errors import PlanErrors
from vlora.wording import pydantic_errors

Parsed = TypeVar("Parsed")
_SLACK = 1.0  # pixels by which a box may exceed its picture, since annotators round


class _Image(BaseModel):
    id: int
    file_name: str
    width: int = Field(gt=0, lt=2**31)
    height: int = Field(gt=0, lt=2**31)


class _Category(BaseModel):
    id: int
    name: str = Field(min_length=1)


class _Annotation(BaseModel):
    """bbox: left, top, width, height in pixels. iscrowd: a region with many objects, which COCO's metrics ignore."""

    id: int
    image_id: int
    category_id: int | None = None
    bbox: tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat] | None = None
    caption: str | None = None
    iscrowd: int = 0


class CocoFile(BaseModel):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category] = []


COCO = TypeAdapter(CocoFile)


def read_coco(data: Coco, task: str, errors: PlanErrors) -> list[Item]:
    """Read one item per picture with its boxes (detection), its labels (multi_label) or the number of its boxes
    (counting), or one item per caption (captioning)."""
    items: list[Item] = []
    for part, file in _files(data.path, errors):
        found = parse(file, COCO, "path", errors)
        if found is not None:
            items += _items(found, file, data.images or file.parent, task, part, errors)
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
        return shape.validate_json(file.read_bytes())
    except OSError as error:
        errors.add(f"{file} cannot be read: {error.strerror}", field)
    except ValidationError as error:
        for entry in error.errors():
            place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in entry["loc"])
            errors.add(f"{file}, `{place.lstrip('.') or 'file'}`: {pydantic_errors.described(entry)}", field)
    return None


def _items(
    found: CocoFile, file: Path, folder: Path, task: str, part: Part | None, errors: PlanErrors
) -> Iterator[Item]:
    # In files merged without new ids, annotations would be assigned to the wrong images or categories.
    for what, entries in (("images", found.images), ("categories", found.categories)):
        for number, count in Counter(entry.id for entry in entries).items():
            if count > 1:
                errors.add(f"{file}: {count} {what} have the id {number}", "path")
    names = {category.id: category.name for category in found.categories}
    images = {image.id: image for image in found.images}
    boxes: dict[int, list[NamedBox]] = {image.id: [] for image in found.images}
    captions: dict[int, list[str]] = {image.id: [] for image in found.images}
    for annotation in found.annotations:
        place = f"{file}, annotation {annotation.id}"
        image = images.get(annotation.image_id)
        if image is None:
            errors.add(f"{place}: there is no image {annotation.image_id}", "path")
        elif task == "captioning":
            if annotation.caption:
                captions[image.id].append(annotation.caption.strip())
            else:
                errors.add(f"{place}: has no caption", "path")
        elif annotation.category_id not in names:
            errors.add(f"{place}: category {annotation.category_id} is unknown; known: {_list(names)}", "path")
        elif annotation.bbox is None:
            errors.add(f"{place}: has no bbox", "path")
        elif not annotation.iscrowd:
            box = box_of(annotation.bbox, names[annotation.category_id], image)
            if isinstance(box, str):
                errors.add(f"{place}: {box}", "path")
            else:
                boxes[image.id].append(box)
    for image in found.images:
        place = f"{file}, image {image.id}"
        if not os.path.isfile(folder / image.file_name):  # also false for a name that is too long
            errors.add(f"{place}: there is no picture {folder / image.file_name}", "path")
            continue
        for answer in _answers(task, boxes[image.id], captions[image.id]):
            yield Item(
                Picture(folder / image.file_name),
                answer,
                place,
                group=image.file_name,
                part=part,
                size=(image.width, image.height),
            )


def _answers(task: str, boxes: list[NamedBox], captions: list[str]) -> list[Answer]:
    if task == "captioning":
        return list(captions)
    if task == "counting":
        return [str(len(boxes))]
    if task == "multi_label":
        return [tuple(sorted({box.label for box in boxes}))]
    return [tuple(boxes)]


def box_of(bbox: tuple[float, float, float, float], label: str, image: _Image) -> NamedBox | str:
    """Convert a bbox to shares of its picture, or return why it is invalid."""
    left, top, width, height = bbox
    right, bottom = left + width, top + height
    if width <= 0 or height <= 0:
        return f"bbox {list(bbox)} has no area; it is [left, top, width, height] in pixels"
    if min(left, top) < -_SLACK or right > image.width + _SLACK or bottom > image.height + _SLACK:
        return f"bbox {list(bbox)} extends beyond its picture of {image.width} x {image.height}"
    across, down = (
        [min(1.0, max(0.0, edge)) for edge in edges]
        for edges in ((left / image.width, right / image.width), (top / image.height, bottom / image.height))
    )
    return NamedBox(label, across[0], down[0], across[1], down[1])


def _list(names: dict[int, str]) -> str:
    return ", ".join(f"{number} ({name})" for number, name in list(names.items())[:10]) or "none"
