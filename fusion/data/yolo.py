"""YOLO's text files: an object a line, `class center_x center_y width height` in shares of the picture, or the corners
of a polygon (https://docs.ultralytics.com/datasets/detect, https://docs.ultralytics.com/datasets/segment)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

from fusion.data.boxes import Annotated, Drawn, Edges, boxed_items
from fusion.data.folders import files_in, note_skipped
from fusion.data.frames import find_file, read_text
from fusion.data.samples import Item
from fusion.plan.data_formats import Yolo
from vlora.errors import BadPlan
from vlora.plan_files.errors import PlanErrors
from vlora.plan_files.reading import read_yaml
from vlora.training.records import PART_NAMES, PARTS, Part
from vlora.types.video import PICTURE_SUFFIXES

_NAMES = ("classes.txt", "obj.names", "_darknet.labels", "labels/classes.txt", "predefined_classes.txt")
_LISTS: dict[str, Part] = {"train": "train", "val": "validation", "valid": "validation", "test": "test"}
_BESIDE = {"images": "labels", "Images": "Labels", "JPEGImages": "labels"}
_OF_CVAT = {"data"}  # the folder of its server, in names of lists and pictures
_SHOWN = 60  # characters of a line in an error


class _Set(NamedTuple):
    """parts: pictures of each part, or of none. keypoints: whether lines end with keypoints."""

    names: Sequence[str]
    parts: dict[Part | None, list[Path]]
    keypoints: bool = False


def read_yolo(data: Yolo, task: str, errors: PlanErrors) -> list[Item]:
    """Read one item per picture (`boxed_items`); a picture without a label file has no objects."""
    path = data.path
    if path.is_dir():
        described = [file for file in sorted(path.glob("*.y*ml")) if re.search(r"(?m)^names\s*:", _text(file, errors))]
        described += [path / "obj.data"]
        path = next((file for file in described if file.is_file()), path)
    if path.suffix in (".yaml", ".yml"):
        found = _from_yaml(path, errors)
    elif path.is_file() and path.suffix == ".data":
        found = _from_darknet(path, errors)
    elif path.is_dir():
        found = _from_folder(path, data.images, errors)
    else:
        errors.add(f"there is no folder {path}, and it is no data.yaml")
        return []
    if found is None:
        return []
    pictures, unlabelled, expected = [], 0, ""
    for part, files in _without_repetition(found.parts, errors).items():
        for file in files:
            places = _label_files(file)
            labels = next((place for place in places if place.is_file()), None)
            if labels is None:
                unlabelled, expected = unlabelled + 1, expected or str(places[0])
            objects = [] if labels is None else list(_read(labels, found, errors))
            pictures.append(Annotated(file, objects, str(labels or file), part))
    if pictures and unlabelled == len(pictures):
        errors.add(f"none of {len(pictures)} pictures has a label file; expected is, for the first, {expected}")
    elif unlabelled:
        errors.note(f"{unlabelled} of {len(pictures)} pictures have no label file and are read as without objects")
    return list(boxed_items(pictures, task, data.exif, True, errors))


def _from_yaml(file: Path, errors: PlanErrors) -> _Set | None:
    """Ultralytics' data.yaml: `path`, `names` (a list, or by number), and for each part a folder, a list of folders, or
    a text file with a picture a line."""
    try:
        _, content = read_yaml(file)
    except BadPlan as error:
        errors.add(str(error))
        return None
    content = content if isinstance(content, dict) else {}
    names = content.get("names")
    if isinstance(names, dict):
        numbers = {int(key) for key in names if str(key).isdecimal()}
        if len(numbers) < len(names) or numbers != set(range(len(names))):
            errors.add(f"{file}: `names` has the numbers {', '.join(map(str, names))}; they must be 0, 1, 2, ...")
            return None
        names = [name for _, name in sorted(names.items(), key=lambda entry: int(entry[0]))]
    if not isinstance(names, list) or not names:
        errors.add(f"{file}: `names` is {names!r}; it must name the classes, for example `names: [car, bus]`")
        return None
    if content.get("nc") not in (None, len(names)):
        errors.add(f"{file}: `nc` is {content['nc']!r}, but `names` has {len(names)} classes; correct one of them")
    bases = [file.parent]
    root = str(content.get("path") or ".")
    if not isinstance(base := find_file(file.parent, root, "folder"), str):
        bases.insert(0, base)
    above = {file.resolve().parent.name, PureWindowsPath(root).name}
    parts: dict[Part | None, list[Path]] = {}
    read: dict[str, list[Path]] = {}
    for key, part in _LISTS.items():
        given = content.get(key)
        for name in given if isinstance(given, list) else [given]:
            if name:
                read[str(name)] = pictures = _pictures(bases, above, str(name), part, errors)
                parts.setdefault(part, []).extend(pictures)
                others = [other for other, files in read.items() if Path(other) != Path(name) and files == pictures]
                if pictures and others and not name.endswith(".txt"):
                    errors.add(f"{file}: {others[0]} and {name} are both {pictures[0].parent}; correct one")
    if not parts:
        errors.add(f"{file}: `train` is missing; it is a folder of pictures, a list of folders, or a text file")
    return _Set(
        [str(name) for name in names],
        {part: files for part, files in parts.items() if files},
        bool(content.get("kpt_shape")),
    )


def _find(bases: list[Path], above: set[str], name: str, what: str) -> Path | str:
    """`find_file`, also without the first folder of the name if it is one of those above the data."""
    first, _, below = name.replace("\\", "/").partition("/")
    found = [find_file(bases, each, what) for each in ((name, below) if below and first in above else (name,))]
    return next((each for each in found if isinstance(each, Path)), found[0])


def _pictures(bases: list[Path], above: set[str], name: str, part: Part | None, errors: PlanErrors) -> list[Path]:
    folder = _find(bases, above, name, "folder")
    if isinstance(folder, Path):
        return _in_folder(folder, errors)
    if not name.endswith(".txt"):
        (errors.add if part == "train" else errors.note)(f"{folder}, which is named for {part}")
        return []
    if isinstance(listed := _find(bases, above, name, "file"), str):
        errors.add(listed)
        return []
    pictures = []
    for number, line in enumerate(_text(listed, errors).splitlines(), 1):
        found = _find([listed.parent, *bases], above | _OF_CVAT, line.strip(), "picture") if line.strip() else None
        if isinstance(found, Path):
            pictures.append(found)
        elif found:
            errors.add(f"{listed}, line {number}: {found}")
    return pictures


def _from_darknet(file: Path, errors: PlanErrors) -> _Set | None:
    """obj.data, as CVAT exports it: `names = data/obj.names`, `train = data/train.txt`."""
    fields = dict(re.findall(r"^\s*(\w+)\s*=\s*(.+?)\s*$", _text(file, errors), re.MULTILINE))
    names = _find([file.parent], _OF_CVAT, fields.get("names", "obj.names"), "file")
    if isinstance(names, str):
        errors.add(f"{file}: {names}")
        return None
    parts: dict[Part | None, list[Path]] = {}
    for key, part in _LISTS.items():
        if key in fields:
            parts.setdefault(part, []).extend(_pictures([file.parent], _OF_CVAT, fields[key], part, errors))
    if not parts:
        parts[None] = _in_folder(file.parent, errors)
    return _Set(_lines(names, errors), {part: files for part, files in parts.items() if files})


def _from_folder(root: Path, images: Path | None, errors: PlanErrors) -> _Set | None:
    """Pictures with label files, by parts (train/images or images/train) or not, and a list of the classes' names."""
    pictures = _in_folder(images or root, errors)
    named = [root / name for name in _NAMES] + [file.parent / "classes.txt" for file in pictures[:1]]
    names = next((file for file in named if file.is_file()), None)
    if names is None:
        errors.add(
            f"{root} has no data.yaml and no {' or '.join(_NAMES[:3])} that names the classes; write classes.txt with "
            "a class a line, in the order of their numbers"
        )
        return None
    parts: dict[Part | None, list[Path]] = {}
    for file in pictures:
        steps = file.relative_to(images or root).parts[:-1]
        part = next((PART_NAMES[step.lower()] for step in steps if step.lower() in PART_NAMES), None)
        parts.setdefault(part, []).append(file)
    if not pictures:
        errors.add(f"{images or root} contains no picture")
    return _Set(_lines(names, errors), parts)


def _in_folder(folder: Path, errors: PlanErrors) -> list[Path]:
    skipped: Counter[str] = Counter()
    pictures = files_in(folder, PICTURE_SUFFIXES, skipped, errors)
    for own in (".txt", ".yaml", ".json", ".cache", ".names", ".data"):
        del skipped[own]
    note_skipped(skipped, "pictures", errors)
    return pictures


def _without_repetition(parts: dict[Part | None, list[Path]], errors: PlanErrors) -> dict[Part | None, list[Path]]:
    """Without parts that are those before them: a data.yaml may name one folder for all."""
    kept: dict[Part | None, list[Path]] = {}
    for part in (None, *PARTS):
        files = list(dict.fromkeys(parts.get(part, [])))
        same = next((other for other, before in kept.items() if set(before) == set(files)), None)
        if same is not None:
            errors.note(f"{part} has the same pictures as {same}, so it is not used")
        elif files:
            kept[part] = files
    return kept


def _label_files(picture: Path) -> list[Path]:
    """Where a picture's labels may be: images/ exchanged with labels/, or beside it."""
    beside = picture.with_suffix(".txt")
    steps = list(beside.parts)
    for place in reversed(range(len(steps) - 1)):
        if steps[place] in _BESIDE:
            steps[place] = _BESIDE[steps[place]]
            return [Path(*steps), beside]
    return [beside]


def _lines(file: Path, errors: PlanErrors) -> list[str]:
    return [line.strip() for line in _text(file, errors).splitlines() if line.strip()]


def _text(file: Path, errors: PlanErrors) -> str:
    try:
        return read_text(file)
    except ValueError as error:
        errors.add(str(error))
        return ""


def _read(file: Path, found: _Set, errors: PlanErrors) -> Iterator[Drawn]:
    seen = set()
    for number, line in enumerate(_text(file, errors).splitlines(), 1):
        words = line.split()
        if not words or line in seen:
            continue
        seen.add(line)
        place = f"{file}, line {number}"
        shown = repr(line[:_SHOWN])
        try:
            numbers = [float(word) for word in words]
        except ValueError:
            errors.add(f"{place}: {shown} is not all numbers; expected are class, center x, center y, width, height")
            continue
        edges = _edges(numbers[1:], found.keypoints)
        if numbers[0] not in range(len(found.names)):
            known = ", ".join(f"{each} ({name})" for each, name in list(enumerate(found.names))[:10])
            errors.add(f"{place}: class {words[0]} is unknown; known: {known}")
        elif isinstance(edges, str):
            errors.add(f"{place}: {shown} {edges}")
        else:
            yield Drawn(found.names[int(numbers[0])], edges, place, shown)


def _edges(numbers: Sequence[float], keypoints: bool) -> Edges | str:
    if not all(abs(number) <= 1.01 for number in numbers[: 4 if keypoints else None]):
        return "has numbers above 1; they are shares of the picture's width and height, not pixels"
    if len(numbers) in (4, 5) or (keypoints and len(numbers) > 4):  # a fifth is a detector's confidence
        x, y, width, height = numbers[:4]
        return x - width / 2, y - height / 2, x + width / 2, y + height / 2
    if len(numbers) < 6 or len(numbers) % 2:
        return f"has {len(numbers)} numbers after the class; a box has 4, a polygon has pairs of x and y, 3 or more"
    across, down = numbers[::2], numbers[1::2]
    return min(across), min(down), max(across), max(down)
