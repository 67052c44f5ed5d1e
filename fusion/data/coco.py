"""COCO's JSON: pictures, categories, boxes and captions (https://cocodataset.org/#format-data)."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    FiniteFloat,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from fusion.data.boxes import Annotated, Drawn, Edges, View, box_of, boxed_items, seem_shares, view_of
from fusion.data.frames import Picture, find_file, read_text
from fusion.data.samples import Item, part_in
from fusion.plan.data_formats import Coco, References
from fusion.training.text_metrics import box_in_words
from vlora.plan_files.errors import PlanErrors
from vlora.training.records import PART_NAMES, Part
from vlora.wording import pydantic_errors

Parsed = TypeVar("Parsed")


def _number(value: int | str) -> int | str:
    return int(value) if isinstance(value, str) and re.fullmatch(r"0|[1-9][0-9]*", value) else value


_Id = typing.Annotated[int | str, AfterValidator(_number)]  # a number, also as text, or the name that some tools write


class _Image(BaseModel):
    """width, height: None or 0 for those of the file."""

    id: _Id
    file_name: str
    width: int | None = Field(None, ge=0, lt=2**31)
    height: int | None = Field(None, ge=0, lt=2**31)


class _Category(BaseModel):
    id: _Id
    name: typing.Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]


_Bbox = tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat]


class _Annotation(BaseModel):
    """bbox: left, top, width, height in pixels, or all of a file as shares of the picture. segmentation: the bbox of
    its polygons, None for other forms. iscrowd: a region with many objects, which COCO's metrics ignore."""

    id: _Id | None = None
    image_id: _Id
    category_id: _Id | None = None
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

    @property
    def edges(self) -> Edges:
        assert self.box is not None
        left, top, width, height = self.box
        return left, top, left + width, top + height


class CocoFile(BaseModel):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category] | None = None

    @property
    def in_shares(self) -> bool:
        return seem_shares(annotation.edges for annotation in self.annotations if annotation.box is not None)


COCO = TypeAdapter(CocoFile)


def read_coco(data: Coco, task: str, errors: PlanErrors) -> list[Item]:
    """Read one item per picture (`boxed_items`), or one per caption (captioning)."""
    items: list[Item] = []
    for part, file in _files(data.path, task, errors):
        found = parse(file, COCO, errors)
        if found is not None:
            items += _items(found, file, data, task, part, errors)
    return items


def _files(path: Path, task: str, errors: PlanErrors) -> list[tuple[Part | None, Path]]:
    """The file, or those of a folder: train.json, annotations/instances_train2017.json, train/_annotations.coco.json,
    result.json."""
    if path.is_file():
        return [(None, path)]
    if not path.is_dir():
        errors.add(f"there is no file or folder {path}")
        return []
    files = sorted(file for depth in ("*.json", "*/*.json") for file in path.glob(depth) if file.name != "notes.json")
    kind = "captions" if task == "captioning" else "instances"
    files = [file for file in files if kind in file.name] or files
    found = [
        (part_in(file.stem) or (part_in(file.parent.name) if file.parent != path else None), file) for file in files
    ]
    for part, count in Counter(part for part, _ in found).items():
        if count > 1:
            names = ", ".join(str(file.relative_to(path)) for own, file in found if own == part)
            what = f"of {part}" if part else "that name no part (train, validation, test)"
            errors.add(f"{path} has {count} JSON files {what}: {names}; set `path` to one, or remove the others")
    if not found:
        errors.add(f"{path} has no JSON file, nor has a folder in it; expected are train.json, validation.json, ...")
    return found


def picture_folders(images: Path | None, file: Path, part: Part | None) -> list[Path]:
    """Where a file's pictures may be: the plan's folder; or beside the file and where tools export them."""
    if images is not None:
        return [images]
    root, part = file.parent.parent, part or part_in(file.stem)
    names = [
        entry
        for base in (root / "images", root, file.parent)
        for entry in _folders(base)
        if part_in(entry.name) == part
    ]
    return [file.parent, *(names if part else []), file.parent / "images", root / "images", root]


def _folders(base: Path) -> list[Path]:
    return sorted(entry for entry in base.iterdir() if entry.is_dir()) if base.is_dir() else []


def parse(file: Path, shape: TypeAdapter[Parsed], errors: PlanErrors) -> Parsed | None:
    """The content of a JSON file, or None after reporting why it cannot be read."""
    try:
        return shape.validate_json(read_text(file))
    except OSError as error:
        errors.add(f"{file} cannot be read: {error.strerror}")
    except ValidationError as error:
        for entry in error.errors():
            place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in entry["loc"])
            errors.add(f"{file}, `{place.lstrip('.') or 'file'}`: {pydantic_errors.described(entry)}")
    except ValueError as error:
        errors.add(str(error))
    return None


def _items(found: CocoFile, file: Path, data: Coco, task: str, part: Part | None, errors: PlanErrors) -> Iterator[Item]:
    # In files merged without new ids, annotations would be assigned to the wrong images or categories.
    categories = found.categories or []
    for what, ids in (("images", [one.id for one in found.images]), ("categories", [one.id for one in categories])):
        for value, count in Counter(ids).items():
            if count > 1:
                errors.add(f"{file}: {count} {what} have the id {value}")
    names = {category.id: category.name for category in categories}
    images = {image.id: image for image in found.images}
    objects: dict[int | str, list[Drawn]] = {image.id: [] for image in found.images}
    captions: dict[int | str, list[str]] = {image.id: [] for image in found.images}
    for index, annotation in enumerate(found.annotations):
        place = f"{file}, annotation {f'at index {index}' if annotation.id is None else annotation.id}"
        image = images.get(annotation.image_id)
        if image is None:
            errors.add(f"{place}: there is no image {annotation.image_id}")
        elif task == "captioning":
            if annotation.caption:
                captions[image.id].append(annotation.caption.strip())
            else:
                errors.add(f"{place}: has no caption")
        elif annotation.iscrowd:
            continue
        elif annotation.category_id not in names:
            known = ", ".join(f"{number} ({name})" for number, name in list(names.items())[:10]) or "none"
            errors.add(f"{place}: category {annotation.category_id} is unknown; known: {known}")
        elif annotation.box is None:
            errors.add(f"{place}: has no bbox and no polygon in its segmentation; add a bbox")
        else:
            label = names[annotation.category_id]
            objects[image.id].append(Drawn(label, annotation.edges, place, f"bbox {list(annotation.box)}"))
    folders = picture_folders(data.images, file, part)
    pictures = [
        Annotated(
            find_file(folders, image.file_name, "picture"),
            objects[image.id],
            f"{file}, image {image.id}",
            part,
            (image.width, image.height),
        )
        for image in found.images
    ]
    if task != "captioning":
        if found.in_shares:
            errors.note(f"warning: {file}: all boxes are within 0 to 1; they are read as shares of the picture")
        yield from boxed_items(pictures, task, data.exif, found.in_shares, errors)
        return
    for image, picture in zip(found.images, pictures, strict=True):
        if isinstance(picture.file, str):
            errors.add(f"{picture.place}: {picture.file}")
            continue
        for caption in captions[image.id]:
            yield Item(Picture(picture.file), caption, picture.place, group=str(picture.file), part=part)


EXPRESSION = "{expression}"


class _Sentence(BaseModel):
    """sent: the cleaned text. raw: the text as it was typed."""

    sent: str = ""
    raw: str = ""


class _Ref(BaseModel):
    ref_id: int
    ann_id: int
    image_id: int
    sentences: list[_Sentence]
    split: str | None = None

    @property
    def expressions(self) -> list[str]:
        return [(sentence.sent or sentence.raw).strip() for sentence in self.sentences]


_REFS = TypeAdapter(list[_Ref])


def read_references(data: References, question: str, errors: PlanErrors) -> list[Item]:
    """Read one item per expression: the question with the expression inserted, and the box of the named object in
    words. Expressions about one picture form one group."""
    if data.path.suffix in (".p", ".pkl", ".pickle"):
        errors.add(
            f"{data.path} is a pickle, which can run any code when it is loaded, so it is not read; if you trust it, "
            "convert its list to JSON",
            "path",
        )
        return []
    refs = parse(data.path, _REFS, errors.inside("path"))
    boxes = parse(data.instances, COCO, errors.inside("instances"))
    if refs is None or boxes is None:
        return []
    images = {image.id: image for image in boxes.images}
    things = {annotation.id: annotation for annotation in boxes.annotations}
    times = Counter(annotation.id for annotation in boxes.annotations)
    folders, in_shares = picture_folders(data.images, data.instances, None), boxes.in_shares
    views: dict[int, View | str] = {}
    items: list[Item] = []
    for ref in refs:
        place = f"{data.path}, ref {ref.ref_id}"
        thing, image = things.get(ref.ann_id), images.get(ref.image_id)
        if thing is None or thing.box is None or times[ref.ann_id] > 1:
            what = "has no bbox for annotation" if times[ref.ann_id] else "has no annotation"
            what = f"has {times[ref.ann_id]} annotations" if times[ref.ann_id] > 1 else what
            errors.add(f"{place}: {data.instances} {what} {ref.ann_id}", "path")
        elif thing.image_id != ref.image_id:
            errors.add(f"{place}: annotation {ref.ann_id} is of image {thing.image_id}, not {ref.image_id}", "path")
        elif image is None:
            errors.add(f"{place}: {data.instances} has no image {ref.image_id}", "path")
        elif ref.split is not None and ref.split.lower() not in PART_NAMES:
            errors.add(f"{place}: `split` is {ref.split!r}; choose train, val, testA or testB, or omit it", "path")
        elif isinstance(file := find_file(folders, image.file_name, "picture"), str):
            errors.add(f"{place}: {file}", "images" if data.images else "instances")
        elif isinstance(
            view := views.get(ref.image_id)
            or views.setdefault(ref.image_id, view_of((image.width, image.height), file, in_shares, data.exif)),
            str,
        ):
            errors.add(f"{place}: {view}", "instances")
        elif isinstance(box := box_of(thing.edges, "", view, f"bbox {list(thing.box)}"), str):
            errors.add(f"{place}: {box}", "instances")
        elif not ref.expressions or not all(ref.expressions):
            errors.add(f"{place}: has no sentence, or an empty one", "path")
        else:
            item = Item(
                Picture(file),
                box_in_words((box.left, box.top, box.right, box.bottom)),
                place,
                group=str(file),
                part=None if ref.split is None else PART_NAMES[ref.split.lower()],
                size=view.upright,
            )
            questions = (question.replace(EXPRESSION, words) for words in ref.expressions)
            items += [dataclasses.replace(item, question=one) for one in questions]
    return items
