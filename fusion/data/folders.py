"""Folders of pictures or videos, labelled by folder name or unlabelled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fusion.data.frames import Clip, Picture
from fusion.data.samples import Item, source_picture
from fusion.plan.data_formats import ImageFolder, Unlabelled, VideoFolder
from vlora.models.vision.images import FORMATS
from vlora.plan_files.errors import PlanErrors
from vlora.training.records import PART_NAMES, PARTS, Part
from vlora.types.video import PICTURE_SUFFIXES, VIDEO_SUFFIXES

_NOT_READ = (".heic", ".heif", ".avif", ".jxl", ".jp2", ".psd", ".svg", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raw")
_OF_ARCHIVES = ("__MACOSX", "@eaDir")  # folders that unpacking and network storage leave
_MOST_KINDS = 6


def read_unlabelled(data: Unlabelled, errors: PlanErrors) -> list[Item]:
    """Read pictures or videos at any depth of DIR, or of DIR/PART. Files with other suffixes are ignored."""
    items: list[Item] = []
    skipped: Counter[str] = Counter()
    for part, folder in parts_of(data.path, errors):
        for file in files_in(folder, PICTURE_SUFFIXES + VIDEO_SUFFIXES, skipped, errors):
            still = file.suffix.lower() in PICTURE_SUFFIXES
            items.append(Item(Picture(file) if still else Clip(file, data.frames), None, str(file), part=part))
    note_skipped(skipped, "pictures or videos", errors)
    if len({type(item.frames) for item in items}) > 1:
        errors.add(f"{data.path} contains both pictures and videos; a domain takes only one kind")
    elif not items and data.path.is_dir():
        errors.add(f"{data.path} contains no picture ({', '.join(PICTURE_SUFFIXES)}) and no video")
    return items


def read_labelled(data: ImageFolder | VideoFolder, errors: PlanErrors) -> list[Item]:
    """Read DIR/LABEL/FILE, or DIR/PART/LABEL/FILE. Files in a subfolder of a label folder form one group, like the
    frames of a clip."""
    suffixes = VIDEO_SUFFIXES if isinstance(data, VideoFolder) else PICTURE_SUFFIXES
    what = "videos" if isinstance(data, VideoFolder) else "pictures"
    items: list[Item] = []
    skipped: Counter[str] = Counter()
    for part, folder in parts_of(data.path, errors):
        labels = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not _is_hidden(entry.name))
        beside = [entry for entry in sorted(folder.iterdir()) if not entry.is_dir()]
        loose = [file for file in beside if file.suffix.lower() in PICTURE_SUFFIXES + VIDEO_SUFFIXES]
        skipped.update(map(_kind, set(beside).difference(loose)))
        if loose:
            more = f", like {len(loose) - 1} other files" if len(loose) > 1 else ""
            errors.add(f"{loose[0]} is in no label folder{more}")
        if not labels:
            errors.add(f"{folder} has no folders LABEL/ with {what}")
        for label in labels:
            if not label.name.isprintable():
                errors.add(f"{str(label)!r}: a label must be one line of UTF-8 text")
            files = files_in(label, suffixes, skipped, errors)
            if not files:
                errors.note(
                    f"warning: {label} contains no {what}, so {label.name!r} has no samples in {part or 'any part'}"
                )
            for file in files:
                group = source_picture(file) if ".rf." in file.name else ""
                group = group if file.parent == label else str(file.parent)
                frames = Clip(file, data.frames) if isinstance(data, VideoFolder) else Picture(file)
                items.append(Item(frames, label.name, str(file), group=group, part=part))
    note_skipped(skipped, what, errors)
    return items


def parts_of(root: Path, errors: PlanErrors) -> Iterator[tuple[Part | None, Path]]:
    """The folders of the parts in a folder, by any of their names; the folder itself if it has none."""
    if not root.is_dir():
        errors.add(f"{root} is not a folder")
        return
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and not _is_hidden(entry.name))
    found = [(PART_NAMES[each.name.lower()], each) for each in folders if each.name.lower() in PART_NAMES]
    for part, count in Counter(part for part, _ in found).items():
        if count > 1:
            names = ", ".join(folder.name for own, folder in found if own == part)
            errors.add(f"{root} has several folders of {part}: {names}; keep one")
    if found and len(found) < len(folders):
        others = [folder.name for folder in folders if folder.name.lower() not in PART_NAMES]
        errors.note(f"{root}: only {', '.join(each.name for _, each in found)} are read, not {', '.join(others)}")
    yield from sorted(found, key=lambda pair: PARTS.index(pair[0])) if found else [(None, root)]


def files_in(folder: Path, suffixes: tuple[str, ...], skipped: Counter[str], errors: PlanErrors) -> list[Path]:
    """List the files of these kinds at any depth, in order. Broken links are included, so that reading them fails with
    an error. skipped: counts the other files by suffix."""
    found: list[Path] = []
    unread: list[Path] = []
    for file in sorted(folder.rglob("*")):
        suffix = file.suffix.lower()
        if file.is_symlink() and file.is_dir():
            errors.add(f"{file} is a link to a folder, which is not followed; name that folder, or copy it")
        elif file.is_dir():
            continue
        elif any(map(_is_hidden, file.relative_to(folder).parts)) or suffix not in (*suffixes, *_NOT_READ):
            skipped[_kind(file)] += 1
        else:
            (unread if suffix in _NOT_READ else found).append(file)
    if unread:
        kinds = ", ".join(sorted({file.suffix.lower() for file in unread}))
        errors.add(
            f"{unread[0]} is of a kind that is not read; {folder} has {len(unread)} of them ({kinds}); convert them to "
            f"one of {', '.join(FORMATS)}, or remove them"
        )
    return found


def _kind(file: Path) -> str:
    if file.name.startswith("._"):
        return "._*"
    return file.name if file.suffix in ("", ".db", ".ini") else file.suffix.lower()


def note_skipped(skipped: Counter[str], what: str, errors: PlanErrors) -> None:
    if skipped:
        kinds = [f"{count:,} {kind}" for kind, count in skipped.most_common(_MOST_KINDS)]
        more = f" and {len(skipped) - _MOST_KINDS} other kinds" if len(skipped) > _MOST_KINDS else ""
        files = f"{skipped.total():,} file{'s' * (skipped.total() > 1)}"
        errors.note(f"skipped {files} that are no {what}: {', '.join(kinds)}{more}")


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in _OF_ARCHIVES
