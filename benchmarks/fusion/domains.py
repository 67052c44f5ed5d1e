"""Domains of real pixels, made from pictures and fonts of packages of Debian 12 and npm, as files of a plan of
`vlora fuse`. `packages.sha256` pins each package's version and content; `sha256sum -c` checks a folder of them.

`python -m benchmarks.fusion.domains FOLDER` writes FOLDER/domains/plan.yaml and a folder per domain. Drawings of emoji
by four vendors, stamps cut out of photographs, and words in fonts are put onto photographs. Answers are known by
construction. No part of a domain shares a drawing, a stamp, a family of fonts or a region of a photograph with another
part.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import hashlib
import itertools
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import unquote

import numpy as np
import yaml
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from atmm.tuning.tables import user_folder
from benchmarks.adapters import cut
from fusion.data.load import load_domains
from fusion.data.samples import NamedBox, Splits
from fusion.plan.schema import Plan, read_plan_file
from fusion.synthetic.sources import COLUMNS
from vlora.errors import BadConfig
from vlora.plan_files.errors import PlanErrors
from vlora.run_folder import whole
from vlora.training.records import PARTS, Part

SIDE = 96
SIZES: Mapping[Part, int] = {"train": 1000, "validation": 300, "test": 400}
"""Samples in each part of a domain."""

EMOJI = {
    "creatures": ("Animals & Nature", 30),
    "foods": ("Food & Drink", 30),
    "objects": ("Objects", 30),
    "flags": ("Flags", 250),
}
"""Category of emoji, and at most so many of them, by domain."""
_VENDORS = ("apple", "facebook", "twitter")
_STAMPS = {
    "animal": "animals/mammals",
    "flower": "plants/flowers",
    "house": "town/houses",
    "sign": "town/roadsigns",
    "vehicle": "vehicles",
}
"""Folder of stamps by kind."""
KINDS = tuple(_STAMPS)
_WORDS = ("bike", "box", "cat", "coffee", "fish", "glass", "hat", "kind", "moon", "window")
_SHARES = {"train": 0.6, "validation": 0.15, "test": 0.25}

Answer = str | tuple[NamedBox, ...]
Item = TypeVar("Item")


class Drawn(NamedTuple):
    """A sample. group: of samples that show the same drawing, which are in one part."""

    picture: Image.Image
    answer: Answer
    question: str = ""
    group: str = ""


@dataclasses.dataclass(frozen=True)
class Pictures:
    """What the packages hold.

    Attributes:
        photos: Photographs.
        stamps: By kind, variants of one together, such as its mirror image.
        fonts: Files by family.
        emoji: By category, and by name the drawings of it.
    """

    photos: Sequence[Image.Image]
    stamps: Mapping[str, Sequence[Sequence[Path]]]
    fonts: Mapping[str, Sequence[Path]]
    emoji: Mapping[str, Mapping[str, Sequence[Callable[[], Image.Image]]]]

    @classmethod
    def of(cls, folder: Path) -> Pictures:
        """Of the unpacked packages."""
        photos = sorted((folder / "mate-backgrounds/usr/share/backgrounds/mate/nature").glob("*.jpg"))
        stamps = folder / "tuxpaint-stamps-default/usr/share/tuxpaint/stamps"
        fonts: dict[str, list[Path]] = {}
        for file in sorted(folder.glob("fonts-*/usr/share/fonts/*/*/*.[ot]tf")):
            fonts.setdefault(file.parents[5].name.removeprefix("fonts-"), []).append(file)
        (noto,) = fonts.pop("noto-color-emoji")
        emoji: dict[str, dict[str, list[Callable[[], Image.Image]]]] = {}
        for each in json.loads((folder / "emoji-datasource-twitter/package/emoji.json").read_text()):
            files = [
                folder / f"emoji-datasource-{vendor}/package/img/{vendor}/64/{each['image']}" for vendor in _VENDORS
            ]
            text = "".join(chr(int(code, 16)) for code in each["unified"].split("-"))
            calls = [functools.partial(_opened, file) for file in files if file.exists()]
            if len(calls) == len(_VENDORS):
                own = emoji.setdefault(each["category"], {})
                own[each["short_name"]] = [functools.partial(_glyph, noto, text), *calls]
        return cls(
            [Image.open(file).convert("RGB").resize((1280, 800)) for file in photos],
            {kind: variants((stamps / place).rglob("*.png")) for kind, place in _STAMPS.items()},
            fonts,
            emoji,
        )

    def ground(self, part: Part, rng: np.random.Generator) -> Image.Image:
        """A region of a photograph that no other part shows."""
        photo = self.photos[int(rng.integers(len(self.photos)))]
        left, right = (int(photo.width * share) for share in COLUMNS[part])
        side = int(rng.integers(SIDE, min(right - left, photo.height, 4 * SIDE)))
        x, y = int(rng.integers(left, right - side + 1)), int(rng.integers(0, photo.height - side + 1))
        return photo.resize((SIDE, SIDE), box=(x, y, x + side, y + side))


def variants(files: Iterable[Path]) -> list[list[Path]]:
    """Files with the same first word: "cow", "cow_white"."""
    found: dict[str, list[Path]] = {}
    for file in sorted(files):
        found.setdefault(re.split(r"[-_\d]", file.stem)[0], []).append(file)
    return list(found.values())


@functools.lru_cache(4096)
def _opened(file: Path) -> Image.Image:
    return Image.open(file).convert("RGBA")


@functools.lru_cache(4096)
def _glyph(font: Path, text: str) -> Image.Image:
    """A drawing of a font of bitmaps of the size 109 only."""
    drawn = Image.new("RGBA", (136, 128))
    ImageDraw.Draw(drawn).text((0, 0), text, font=ImageFont.truetype(font, 109), embedded_color=True)
    return drawn


def divided(items: Sequence[Item], part: Part) -> list[Item]:
    """Those of a part: in an order that depends on their names only, at least one for each part."""
    order = np.random.default_rng([len(items), 7]).permutation(len(items))
    count = {each: max(1, round(share * len(items))) for each, share in _SHARES.items() if each != "train"}
    ends = list(itertools.accumulate((len(items) - sum(count.values()), count["validation"], count["test"])))
    place = PARTS.index(part)
    return [items[at] for at in sorted(order[([0, *ends])[place] : ends[place]])]


def put(
    ground: Image.Image, drawn: Image.Image, size: int, center: tuple[int, int], rng: np.random.Generator
) -> NamedBox:
    """Paste a drawing with a shadow; returns what it covers, without a label. size: its longer side."""
    drawn = drawn.crop(drawn.getchannel("A").getbbox())
    scale = size / max(drawn.size)
    drawn = drawn.resize([max(4, round(side * scale)) for side in drawn.size])
    x, y = center[0] - drawn.width // 2, center[1] - drawn.height // 2
    alpha = drawn.getchannel("A")
    shadow = Image.new("L", (SIDE, SIDE))
    shadow.paste(alpha.point(lambda value: value // 2), (x + int(rng.integers(2, 5)), y + int(rng.integers(2, 5))))
    ground.paste((0, 0, 0), mask=shadow.filter(ImageFilter.GaussianBlur(2)))
    ground.paste(drawn, (x, y), alpha)
    edges = x, y, x + drawn.width, y + drawn.height
    return NamedBox("", *(min(SIDE, max(0, edge)) / SIDE for edge in edges))


Draw = Callable[[Pictures, Part, int, np.random.Generator], Drawn]
"""Draws a sample of a part; its number chooses the label, so that every part shows all of them."""


def _emoji(category: str, most: int) -> Draw:
    def draw(found: Pictures, part: Part, number: int, rng: np.random.Generator) -> Drawn:
        names = sorted(found.emoji[category])[:most]
        name = names[number % len(names)]
        drawings = found.emoji[category][name]
        order = np.random.default_rng([*name.encode()]).permutation(len(drawings))  # of the parts, by name
        which = {"train": order[rng.integers(len(drawings) - 2)], "validation": order[-2], "test": order[-1]}[part]
        ground, middle = found.ground(part, rng), SIDE // 2
        center = (middle + int(rng.integers(-8, 9)), middle + int(rng.integers(-8, 9)))
        turned = drawings[which]().rotate(rng.uniform(-12, 12), Image.Resampling.BICUBIC, expand=True)
        put(ground, turned, int(rng.integers(60, 82)), center, rng)
        return Drawn(ground, name, group=f"{name} {which}")

    return draw


def _stamp(found: Pictures, kind: str, part: Part, rng: np.random.Generator) -> Image.Image:
    stamps = divided(found.stamps[kind], part)
    files = stamps[int(rng.integers(len(stamps)))]
    stamp = _opened(files[int(rng.integers(len(files)))])
    return stamp.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else stamp


def _several(found: Pictures, part: Part, kinds: Sequence[str], rng: np.random.Generator) -> Drawn:
    """Stamps of these kinds in cells of a grid of two by two; the answer has their boxes."""
    ground, boxes = found.ground(part, rng), []
    for kind, cell in zip(kinds, rng.permutation(4), strict=False):
        x, y = (24 + 48 * int(at) + int(rng.integers(-5, 6)) for at in (cell % 2, cell // 2))
        size = int(rng.integers(34, 48))
        boxes.append(put(ground, _stamp(found, kind, part, rng), size, (x, y), rng)._replace(label=kind))
    return Drawn(ground, tuple(boxes))


def _boxes(found: Pictures, part: Part, number: int, rng: np.random.Generator) -> Drawn:
    return _several(found, part, rng.choice(KINDS, 1 + number % 4).tolist(), rng)


def _count(found: Pictures, part: Part, number: int, rng: np.random.Generator) -> Drawn:
    count = number % 5
    return _several(found, part, rng.choice(KINDS, count).tolist(), rng)._replace(answer=str(count))


def _pair(found: Pictures, part: Part, rng: np.random.Generator, *, stacked: bool) -> tuple[Image.Image, list[str]]:
    """Two stamps of two kinds, one over the other or side by side."""
    ground, kinds = found.ground(part, rng), rng.permutation(KINDS)[:2].tolist()
    for place, kind in enumerate(kinds):
        along, across = 24 + 48 * place + int(rng.integers(-3, 4)), 48 + int(rng.integers(-14, 15))
        center = (across, along) if stacked else (along, across)
        put(ground, _stamp(found, kind, part, rng), int(rng.integers(38, 47)), center, rng)
    return ground, kinds


def _side(found: Pictures, part: Part, number: int, rng: np.random.Generator) -> Drawn:
    picture, kinds = _pair(found, part, rng, stacked=False)
    side = number % 2
    return Drawn(picture, kinds[side], f"what is on the {('left', 'right')[side]} ?")


def _caption(found: Pictures, part: Part, number: int, rng: np.random.Generator) -> Drawn:
    picture, (one, other) = _pair(found, part, rng, stacked=bool(number % 2))
    return Drawn(picture, f"{one} {('beside', 'over')[number % 2]} {other}")


def _written(found: Pictures, part: Part, word: str, font: Path, rng: np.random.Generator) -> Image.Image:
    """A word in a photograph, light or dark, with a shadow."""
    letters = ImageFont.truetype(font, 60)
    left, top, right, bottom = letters.getbbox(word)
    drawn = Image.new("RGBA", (int(right - left) + 4, int(bottom - top) + 4))
    color = tuple((rng.integers(190, 256, 3) if rng.random() < 0.5 else rng.integers(0, 70, 3)).tolist())
    ImageDraw.Draw(drawn).text((2 - left, 2 - top), word, (*color, 255), letters)
    drawn = drawn.rotate(rng.uniform(-8, 8), Image.Resampling.BICUBIC, expand=True)
    ground = found.ground(part, rng)
    put(ground, drawn, int(rng.integers(68, 90)), (48 + int(rng.integers(-3, 4)), int(rng.integers(30, 66))), rng)
    return ground


def _word(found: Pictures, part: Part, number: int, rng: np.random.Generator) -> Drawn:
    """Fonts of other families in each part."""
    families = divided(sorted(found.fonts), part)
    files, word = found.fonts[families[int(rng.integers(len(families)))]], _WORDS[number % len(_WORDS)]
    return Drawn(_written(found, part, word, files[int(rng.integers(len(files)))], rng), word)


class RealDomain(NamedTuple):
    name: str
    task: str
    question: str
    draw: Draw


SUITE = (
    *(
        RealDomain(name, "classification", f"which of the {name} is shown ?", _emoji(*which))
        for name, which in EMOJI.items()
    ),
    RealDomain("words", "vqa", "what is the word ?", _word),
    RealDomain("sides", "vqa", "what is shown ?", _side),
    RealDomain("captions", "captioning", "describe the picture .", _caption),
    RealDomain("counts", "counting", "how many things are there ?", _count),
    RealDomain("boxes", "detection", "find all things .", _boxes),
)


def samples(domain: RealDomain, found: Pictures, part: Part, number: int, seed: int) -> Iterator[Drawn]:
    rng = np.random.default_rng([seed, PARTS.index(part), *domain.name.encode()])
    for each in range(number):
        yield domain.draw(found, part, each, rng)


def write(found: Pictures, folder: Path, sizes: Mapping[Part, int], seed: int = 0) -> Path:
    """Write the plan with its data; returns the plan's file."""
    domains = []
    for domain in SUITE:
        own = folder / domain.name
        own.mkdir(parents=True)
        rows, boxes = [], []
        for part, size in sizes.items():
            for number, drawn in enumerate(samples(domain, found, part, size, seed)):
                file = f"{part}-{number:04}.jpg"
                drawn.picture.save(own / file, quality=92)
                if isinstance(drawn.answer, str):
                    rows.append([file, drawn.answer, drawn.question, part, drawn.group or file])
                else:
                    boxes.append((part, file, drawn.answer))
        if rows:
            with (own / "data.csv").open("w", newline="") as opened:
                csv.writer(opened).writerows([["image", "answer", "question", "split", "group"], *rows])
        for part in sizes if boxes else ():
            (own / f"{part}.json").write_text(json.dumps(_coco([each[1:] for each in boxes if each[0] == part])))
        data = {"format": "questions", "path": f"{domain.name}/data.csv"}
        if boxes:
            data = {"format": "coco", "path": domain.name, "images": domain.name}
        about = {"name": domain.name, "task": domain.task, "question": domain.question, "data": data}
        domains.append({**about, "threshold": {"relative_to": "alone", "minus": 0.1}})
    plan = {"base": "embedded", "seed": seed, "lora": {"rank": 8, "alpha": 16}, "domains": domains}
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    return folder / "plan.yaml"


def _coco(pictures: Sequence[tuple[str, tuple[NamedBox, ...]]]) -> dict[str, object]:
    annotations = [
        {"image_id": place, "category_id": KINDS.index(box.label), "bbox": [x * SIDE for x in _corner_and_size(box)]}
        for place, (_, boxes) in enumerate(pictures)
        for box in boxes
    ]
    return {
        "images": [
            {"id": place, "file_name": file, "width": SIDE, "height": SIDE} for place, (file, _) in enumerate(pictures)
        ],
        "categories": [{"id": place, "name": name} for place, name in enumerate(KINDS)],
        "annotations": [{"id": place, **each} for place, each in enumerate(annotations)],
    }


def _corner_and_size(box: NamedBox) -> tuple[float, float, float, float]:
    return box.left, box.top, box.right - box.left, box.bottom - box.top


def made(folder: Path) -> Path:
    """The plan of the domains in a folder, with everything that it needs, fetched and written at the first call."""
    if not (folder / "domains").is_dir():
        found = Pictures.of(fetch(folder / "packages"))
        with whole(folder / "domains", durable=False) as fresh:
            fresh.mkdir()
            write(found, fresh, SIZES)
    return folder / "domains" / "plan.yaml"


def load(quick: bool) -> tuple[Plan, dict[str, Splits]]:
    """The plan and the samples of this user's copy (`$XDG_DATA_HOME/vlora/domains`); quick: few samples."""
    file = read_plan_file(made(user_folder().with_name("domains")))
    errors = PlanErrors(file.text)
    data = load_domains(file.plan, errors)
    errors.raise_if_any()
    sizes = (120, 60, 60) if quick else SIZES.values()
    return file.plan, {name: cut(own.splits, *sizes) for name, own in data.items()}


# -- packages ----------------------------------------------------------------------------------------------------------

_TABLE = Path(__file__).with_name("packages.sha256")
_KEPT = "/64/"  # of npm's emoji, the pictures of 64 pixels


def fetch(folder: Path, table: Path = _TABLE) -> Path:
    """Download the packages that are missing in `folder`, check and unpack them.

    Returns:
        A folder with a folder per package, by its name.

    Raises:
        BadConfig: A package cannot be downloaded, or has another content.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for line in table.read_text().splitlines():
        wanted, file = line.split()
        path, unpacked = folder / file, folder / "unpacked" / name_of(file)
        if unpacked.is_dir():
            continue
        if not path.exists():
            _download(path)
        with path.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != wanted:
            raise BadConfig(f"{path} has the SHA-256 {found} instead of {wanted}; delete it and fetch it again")
        with whole(unpacked, durable=False) as made:
            made.mkdir(parents=True)
            _unpack(path, made)
    return folder / "unpacked"


def name_of(file: str) -> str:
    """Of a package, by the name of its file: NAME_VERSION_all.deb or NAME-VERSION.tgz."""
    return file.partition("_")[0] if file.endswith(".deb") else file.rpartition("-")[0]


def _download(path: Path) -> None:
    name = name_of(path.name)
    if path.suffix == ".deb":
        command = ["apt-get", "download", f"{name}={unquote(path.name.split('_')[1])}"]
    else:
        command = ["npm", "pack", "--silent", f"{name}@{path.name.removeprefix(f'{name}-').removesuffix('.tgz')}"]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        try:
            ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            said = ended.stderr.strip().splitlines()
        except OSError as error:
            said = [f"{command[0]}: {error.strerror}"]
        if (found := Path(folder) / path.name).exists():
            found.replace(path)
    if not path.exists():
        raise BadConfig(
            f"{path.name} cannot be fetched by '{' '.join(command)}' ({said[-1] if said else 'no message'}); run it on "
            f"a machine with a network (packages of Debian 12, npm), and copy the file into {path.parent}"
        )


def _unpack(path: Path, folder: Path) -> None:
    if path.suffix == ".deb":
        if shutil.which("dpkg-deb") is None:
            raise BadConfig(f"dpkg-deb, which unpacks {path.name}, is not installed; install the package dpkg")
        subprocess.run(["dpkg-deb", "-x", path, folder], check=True)
        return
    with tarfile.open(path) as archive:
        members = [each for each in archive if _KEPT in each.name or each.name == "package/emoji.json"]
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later
        archive.extractall(folder, members)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fetch packages, and write domains of real pixels with their plan.")
    parser.add_argument("folder", type=Path)
    print(made(parser.parse_args().folder))
