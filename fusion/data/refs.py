"""Referring expressions in the format of RefCOCO, RefCOCO+ and RefCOCOg (Yu et al. 2016,
https://github.com/lichengunc/refer): each entry names an object of a COCO file in the words of several annotators.

The public `refs(...).p` files are pickles, which can run code when they are loaded; this module reads the same list as
JSON.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from pydantic import BaseModel, TypeAdapter

from fusion.data.boxes import View, box_of, view_of
from fusion.data.coco import COCO, parse, picture_folders
from fusion.data.frames import Picture, find_file
from fusion.data.items import Item
from fusion.plan.data_formats import References
from fusion.training.text_metrics import box_in_words
from vlora.plan_files.errors import PlanErrors
from vlora.training.records import PART_NAMES

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
    refs = parse(data.path, _REFS, "path", errors)
    boxes = parse(data.instances, COCO, "instances", errors)
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
