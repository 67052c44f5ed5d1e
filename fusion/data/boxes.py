"""Boxes as files describe them, in pixels or shares of a picture that EXIF may rotate, to items of three tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fusion.data.frames import QUARTER_TURNS, Picture
from fusion.data.samples import Item, NamedBox, answer_of, source_picture
from fusion.plan.data_formats import Exif
from vlora.plan_files.errors import PlanErrors
from vlora.training.records import Part

Edges = tuple[float, float, float, float]
_SLACK = 1.0  # pixels by which a box may exceed its picture, since annotators round


class Drawn(NamedTuple):
    """An object as a file describes it. edges: left, top, right, bottom. written: as in the file, for errors."""

    label: str
    edges: Edges
    place: str
    written: str


class Annotated(NamedTuple):
    """A picture with its objects. file: the picture, or why there is none. size: width and height that the file states,
    or None."""

    file: Path | str
    objects: Sequence[Drawn]
    place: str
    part: Part | None
    size: tuple[int | None, int | None] = (None, None)


class View(NamedTuple):
    """What a picture's boxes refer to. size: width and height. orientation: by which EXIF turns boxes with the picture.
    in_shares: whether they are shares instead of pixels."""

    size: tuple[int, int]
    orientation: int
    in_shares: bool

    @property
    def upright(self) -> tuple[int, int]:
        return (self.size[1], self.size[0]) if self.orientation in QUARTER_TURNS else self.size


def boxed_items(
    pictures: Iterable[Annotated], task: str, exif: Exif | None, in_shares: bool, errors: PlanErrors
) -> Iterator[Item]:
    """One item per picture with its boxes (detection), its labels (multi_label) or the number of its boxes (counting).
    in_shares: whether the edges are shares of the picture."""
    times: Counter[Path] = Counter()
    for picture in pictures:
        if isinstance(picture.file, str):
            errors.add(f"{picture.place}: {picture.file}")
            continue
        times[picture.file] += 1
        if times[picture.file] == 2:
            errors.add(f"{picture.place}: {picture.file} has several entries; each would have a part of its boxes")
        size, boxes = None, []
        if picture.objects:  # without boxes it makes no difference what they refer to
            view = view_of(picture.size, picture.file, in_shares, exif if task == "detection" else "apply")
            if isinstance(view, str):
                errors.add(f"{picture.place}: {view}")
                continue
            size = view.upright
            for drawn in picture.objects:
                box = box_of(drawn.edges, drawn.label, view, drawn.written)
                if isinstance(box, str):
                    errors.add(f"{drawn.place}: {box}")
                else:
                    boxes.append(box)
        answer, group = answer_of(boxes, task), source_picture(picture.file)
        yield Item(Picture(picture.file), answer, picture.place, group=group, part=picture.part, size=size)


def seem_shares(all_edges: Iterable[Edges]) -> bool:
    """Whether all boxes are shares of their pictures: with fractions, and none beyond 1."""
    every = list(all_edges)
    return all(map(_within_1, every)) and any(edge % 1 for edges in every for edge in edges)


def view_of(stated: tuple[int | None, int | None], file: Path, in_shares: bool, exif: Exif | None) -> View | str:
    """What the boxes of a picture refer to, or why that is unknown.

    Args:
        stated: width and height in the file with the boxes. They decide for pictures that EXIF rotates, if `exif` does
            not.
        in_shares: whether the file's boxes are shares.
        exif: the plan's.
    """
    try:
        stored, orientation = Picture(file).stored()
    except ValueError as error:
        return str(error)
    upright = (stored[1], stored[0]) if orientation in QUARTER_TURNS else stored
    declared = (stated[0] or upright[0], stated[1] or upright[1])
    if orientation == 1:
        return View(declared, 1, in_shares)
    if exif is None and stored != upright and all(stated):
        if declared not in (stored, upright):
            return View(declared, 1, in_shares)  # the wrong size is reported when the picture is decoded
        exif = "ignore" if declared == stored else "apply"
    if exif is None:
        return (
            f"{file} is rotated by EXIF (orientation {orientation}), and nothing shows whether the boxes are of the "
            "pixels as stored or as shown; set in `data` `exif: ignore` if the tool that drew them ignored EXIF, "
            "`exif: apply` if it showed the picture rotated"
        )
    return View(stored, orientation, in_shares) if exif == "ignore" else View(upright, 1, in_shares)


def box_of(edges: Edges, label: str, view: View, written: str) -> NamedBox | str:
    """Convert edges to shares of their upright picture, or return why they are invalid."""
    left, top, right, bottom = edges
    if right <= left or bottom <= top:
        return f"{written} has no area"
    if not view.in_shares and _within_1(edges):
        return f"{written} is in one pixel, so it seems to be in shares, but others of the file are in pixels"
    across, down = (1, 1) if view.in_shares else view.size
    slack = 0.01 if view.in_shares else _SLACK
    if min(left, top) < -slack or right > across + slack or bottom > down + slack:
        return f"{written} extends beyond its picture of {view.size[0]} x {view.size[1]}"
    shares = left / across, top / down, right / across, bottom / down
    return NamedBox(label, *_turned([min(1.0, max(0.0, share)) for share in shares], view.orientation))


def _turned(edges: Sequence[float], orientation: int) -> Edges:
    left, top, right, bottom = edges
    if orientation in QUARTER_TURNS:
        left, top, right, bottom = top, left, bottom, right
    if orientation in (2, 3, 6, 7):
        left, right = 1 - right, 1 - left
    if orientation in (3, 4, 7, 8):
        top, bottom = 1 - bottom, 1 - top
    return left, top, right, bottom


def _within_1(edges: Edges) -> bool:
    return min(edges) >= -0.01 and max(edges) <= 1.01
