"""Pascal VOC's XML files, one a picture (http://host.robots.ox.ac.uk/pascal/VOC): the benchmark's own layout, and those
of labelling tools, with the XML files beside their pictures or in a folder of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from fusion.data.boxes import Annotated, Drawn, boxed_items, seem_shares
from fusion.data.frames import find_file, read_text
from fusion.data.samples import Item
from fusion.plan.data_formats import Voc
from vlora.plan_files.errors import PlanErrors
from vlora.training.records import PART_NAMES, Part
from vlora.types.video import PICTURE_SUFFIXES

_ENCODING = re.compile(rb"""<\?xml[^>]*encoding=["']([\w.-]+)""")
_PICTURES = ("JPEGImages", "images", "Images")
_LISTS: dict[str, Part] = {"train": "train", "val": "validation", "test": "test", "trainval": "train"}


def read_voc(data: Voc, task: str, errors: PlanErrors) -> list[Item]:
    """Read one item per XML file (`boxed_items`). Pictures without one are left out."""
    root = data.path
    if not root.is_dir():
        errors.add(f"{root} is not a folder")
        return []
    parsed = [
        (file, part, content) for file, part in _files(root, errors) if (content := _parse(file, errors)) is not None
    ]
    if not parsed and not errors:
        errors.add(f"{root} contains no XML file with an <annotation>")
    objects = [list(_objects(file, content, errors)) for file, _, content in parsed]
    edges = [drawn.edges for own in objects for drawn in own]
    in_shares = seem_shares(edges)
    if in_shares:
        errors.note("warning: all boxes are within 0 to 1; they are read as shares of the picture")
    elif edges and all(edge % 1 == 0 for own in edges for edge in own) and min(map(min, edges)) >= 1:
        # Pascal VOC counts pixels from 1, and a box contains its last pixel; tools that count from 0 write some zeros.
        errors.note("no box begins at 0, so pixels are counted from 1, as in Pascal VOC")
        objects = [
            [one._replace(edges=(one.edges[0] - 1, one.edges[1] - 1, *one.edges[2:])) for one in own] for own in objects
        ]
    if difficult := sum(one.findtext("difficult") == "1" for _, _, content in parsed for one in content.iter("object")):
        errors.note(f"{difficult} objects marked as difficult are kept like others")
    pictures = [
        Annotated(_picture(file, content, root, data.images), own, str(file), part, _size(content))
        for (file, part, content), own in zip(parsed, objects, strict=True)
    ]
    return list(boxed_items(pictures, task, data.exif, in_shares, errors))


def _files(root: Path, errors: PlanErrors) -> list[tuple[Path, Part | None]]:
    """XML files with their parts: by ImageSets/Main/PART.txt, or by a folder PART/."""
    files = sorted(
        file for file in root.rglob("*.xml") if not any(each[0] == "." for each in file.relative_to(root).parts)
    )
    lists = {name: root / "ImageSets" / "Main" / f"{name}.txt" for name in _LISTS}
    lists = {name: file for name, file in lists.items() if file.is_file()}
    if "train" in lists or "val" in lists:
        lists.pop("trainval", None)
    if not lists:
        folders = [[each.lower() for each in file.relative_to(root).parts[:-1]] for file in files]
        named = [[PART_NAMES[each] for each in own if each in PART_NAMES] for own in folders]
        return [(file, parts[0] if parts else None) for file, parts in zip(files, named, strict=True)]
    by_name = {
        file.relative_to(root / "Annotations").with_suffix("").as_posix(): file
        for file in files
        if (root / "Annotations") in file.parents
    }
    by_name |= {file.name.removesuffix(".xml"): file for file in files}
    chosen: list[tuple[Path, Part | None]] = []
    for name, listed in lists.items():
        for number, line in enumerate(read_text(listed).splitlines(), 1):
            if words := line.split():
                entry = line.strip() if line.strip() in by_name else words[0]
                if entry in by_name:
                    chosen.append((by_name[entry], _LISTS[name]))
                else:
                    errors.add(f"{listed}, line {number}: there is no XML file of {entry!r}")
    if left := len(files) - len({file for file, _ in chosen}):
        errors.note(
            f"{left} XML files are in none of {', '.join(file.name for file in lists.values())} and are left out"
        )
    return chosen


def _parse(file: Path, errors: PlanErrors) -> ElementTree.Element | None:
    try:
        data = file.read_bytes()
        declared = _ENCODING.match(data)  # expat reads none with several bytes a character
        content = ElementTree.fromstring(data.decode(declared[1].decode()) if declared else data)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        errors.add(f"{file} is not XML: {error}")
        return None
    return content if content.tag == "annotation" else None


def _objects(file: Path, content: ElementTree.Element, errors: PlanErrors) -> Iterator[Drawn]:
    for number, one in enumerate(content.iter("object"), 1):
        name, place = (one.findtext("name") or "").strip(), f"{file}, object {number}"
        texts = [one.findtext(f"bndbox/{edge}") for edge in ("xmin", "ymin", "xmax", "ymax")]
        written = f"bndbox [{', '.join(str(text) for text in texts)}]"
        try:
            left, top, right, bottom = (float(text or "") for text in texts)
        except ValueError:
            errors.add(f"{place}: {written} is no box; expected are the numbers xmin, ymin, xmax, ymax")
            continue
        if not name:
            errors.add(f"{place}: has no <name>")
        elif not all(abs(edge) < 2**31 for edge in (left, top, right, bottom)):
            errors.add(f"{place}: {written} is not in pixels")
        else:
            yield Drawn(name, (left, top, right, bottom), place, written)


def _size(content: ElementTree.Element) -> tuple[int | None, int | None]:
    texts = [(content.findtext(f"size/{name}") or "").strip() for name in ("width", "height")]
    width, height = (int(text) if text.isdecimal() and len(text) < 10 else 0 for text in texts)
    return width or None, height or None


def _picture(file: Path, content: ElementTree.Element, root: Path, images: Path | None) -> Path | str:
    """The picture named like its XML file, or as that says: beside it, or in the folder of pictures."""
    steps = file.parent.parts
    place = max((index for index, step in enumerate(steps) if step.lower() == "annotations"), default=None)
    homes = [] if place is None else [Path(*steps[:place], name, *steps[place + 1 :]) for name in _PICTURES]
    folders = [images] if images else [file.parent, *homes, *(root / name for name in _PICTURES), root]
    stem = file.name.removesuffix(".xml")
    for folder in folders:
        for suffix in PICTURE_SUFFIXES:
            for name in (stem + suffix, stem + suffix.upper()):
                if (folder / name).is_file():
                    return folder / name
    named = (content.findtext("filename") or "").strip() or f"{stem}.jpg"
    return find_file(folders, named, "picture", by_end=True)
