"""Folders of pictures or videos, labelled by folder name or unlabelled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from fusion.data.frames import PICTURE_SUFFIXES, VIDEO_SUFFIXES, Clip, Frames, Picture
from fusion.data.items import PARTS, Item, Part
from fusion.plan.data_formats import ImageFolder, Unlabelled, VideoFolder
from vlora.plan_files.errors import PlanErrors

_OF_WINDOWS = ("Thumbs.db", "desktop.ini")


def read_images(data: ImageFolder, errors: PlanErrors) -> list[Item]:
    """Read DIR/LABEL/PICTURE, or DIR/PART/LABEL/PICTURE. Pictures in a subfolder of a label folder form one group, like
    the frames of a clip."""
    return _labelled(data.path, Picture, "pictures", errors)


def read_videos(data: VideoFolder, errors: PlanErrors) -> list[Item]:
    """Like `read_images`, for videos."""
    return _labelled(data.path, lambda file: Clip(file, data.frames), "videos", errors)


def read_unlabelled(data: Unlabelled, errors: PlanErrors) -> list[Item]:
    """Read pictures or videos at any depth of DIR, or of DIR/PART. Files with other suffixes are ignored."""
    items: list[Item] = []
    for part, folder in _parts(data.path, errors):
        for file in _files(folder, errors):
            suffix = file.suffix.lower()
            if suffix in PICTURE_SUFFIXES:
                items.append(Item(Picture(file), None, str(file), part=part))
            elif suffix in VIDEO_SUFFIXES:
                items.append(Item(Clip(file, data.frames), None, str(file), part=part))
    if len({type(item.frames) for item in items}) > 1:
        errors.add(f"{data.path} contains both pictures and videos; a domain takes only one kind", "path")
    elif not items and data.path.is_dir():
        errors.add(f"{data.path} contains no picture ({', '.join(PICTURE_SUFFIXES)}) and no video", "path")
    return items


def _labelled(root: Path, frames: Callable[[Path], Frames], what: str, errors: PlanErrors) -> list[Item]:
    items: list[Item] = []
    for part, folder in _parts(root, errors):
        labels = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        for file in sorted(folder.iterdir()):
            if file.suffix.lower() in PICTURE_SUFFIXES + VIDEO_SUFFIXES:
                errors.add(f"{file} is in no label folder", "path")
        if not labels:
            errors.add(f"{folder} has no folders LABEL/ with {what}", "path")
        for label in labels:
            if not label.name.isprintable():
                errors.add(f"{str(label)!r}: a label must be one line of UTF-8 text", "path")
            for file in _files(label, errors):
                group = "" if file.parent == label else str(file.parent)
                items.append(Item(frames(file), label.name, str(file), group=group, part=part))
    return items


def _parts(root: Path, errors: PlanErrors) -> Iterator[tuple[Part | None, Path]]:
    if not root.is_dir():
        errors.add(f"{root} is not a folder", "path")
        return
    there = [part for part in PARTS if (root / part).is_dir()]
    if not there:
        yield None, root
    elif len(there) < len(PARTS):
        missing = [part for part in PARTS if part not in there]
        errors.add(f"{root} has {', '.join(there)}, but no {' and no '.join(missing)}", "path")
    else:
        yield from ((part, root / part) for part in PARTS)


def _files(folder: Path, errors: PlanErrors) -> list[Path]:
    """List all files in order, without hidden ones and others that file managers create. Broken links are included, so
    that reading them fails with an error."""
    found = []
    for file in sorted(folder.rglob("*")):
        if any(part.startswith(".") for part in file.relative_to(folder).parts) or file.name in _OF_WINDOWS:
            continue
        if file.is_symlink() and file.is_dir():
            errors.add(f"{file} is a link to a folder, which is not followed; name that folder, or copy it", "path")
        elif file.is_file() or (file.is_symlink() and not file.exists()):
            found.append(file)
    return found
