"""Where a domain's pictures come from: built-in sources that need no network, or a folder of the user's own.

Every source says whether its pixels are real or rendered, and cuts itself into train, validation and test parts that share no
picture (and, where pictures are crops of a few photographs, no region of one).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np

from fusion.embedded import world
from vlora.errors import BadPlan


@dataclasses.dataclass(frozen=True)
class Sample:
    """frames: RGB uint8 pictures [height, width, 3], one or several. label: index into the domain's labels."""

    frames: tuple[np.ndarray, ...]
    label: int


@dataclasses.dataclass(frozen=True)
class Splits:
    """A domain's samples. real: photographed or scanned pixels, as opposed to rendered (synthetic) ones."""

    labels: tuple[str, ...]
    train: Sequence[Sample]
    validation: Sequence[Sample]
    test: Sequence[Sample]
    real: bool

    @property
    def num_frames(self) -> int:
        return len(self.train[0].frames)


def load_source(source: str, seed: int) -> Splits:
    """A built-in source by name, or a folder DIR/{train,validation,test}/LABEL/*.png|jpg. Raises BadPlan."""
    if source in BUILT_IN:
        return BUILT_IN[source](seed)
    folder = Path(source)
    if folder.is_dir():
        return _folder(folder)
    raise BadPlan(f"source {source!r} is neither a folder nor built in ({', '.join(sorted(BUILT_IN))})")


def _digits(seed: int) -> Splits:
    """scikit-learn's 1,797 scanned handwritten digits (8 x 8 real pixels, enlarged)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.images))
    samples = []
    for index in order:
        small = (data.images[index] * 15.9).astype(np.uint8)
        canvas = np.zeros((world.SIZE, world.SIZE), np.uint8)
        canvas[12:84, 12:84] = cv2.resize(small, (72, 72), interpolation=cv2.INTER_CUBIC)
        samples.append(Sample((cv2.cvtColor(canvas, cv2.COLOR_GRAY2RGB),), int(data.target[index])))
    return Splits(world.NUMBERS, samples[:1100], samples[1100:1400], samples[1400:], real=True)


# Label -> picture that ships inside scikit-image or scikit-learn.
_PHOTOS = {
    "brick": "brick.png",
    "grass": "grass.png",
    "gravel": "gravel.png",
    "cat": "chelsea.png",
    "coffee": "coffee.png",
    "stars": "hubble_deep_field.jpg",
    "coins": "coins.png",
    "text": "page.png",
    "building": "china.jpg",
    "flower": "flower.jpg",
}
# Shares of each photograph's width: crops of one part never touch another part.
_COLUMNS = {"train": (0.0, 0.54), "validation": (0.56, 0.74), "test": (0.76, 1.0)}


def _photos(seed: int) -> Splits:
    """Crops of ten photographs (real pixels). Train and test see different regions of the same ten: an easy test."""
    import skimage
    import sklearn

    folders = (Path(skimage.__file__).parent / "data", Path(sklearn.__file__).parent / "datasets" / "images")
    photos = []
    for file in _PHOTOS.values():
        path = next(folder / file for folder in folders if (folder / file).exists())
        photos.append(cv2.cvtColor(cv2.imread(str(path), cv2.IMREAD_GRAYSCALE), cv2.COLOR_GRAY2RGB))
    rng = np.random.default_rng(seed)
    parts: dict[str, list[Sample]] = {}
    for part, count in (("train", 1100), ("validation", 300), ("test", 400)):
        left, right = _COLUMNS[part]
        parts[part] = []
        for _ in range(count):
            label = int(rng.integers(len(photos)))
            width = photos[label].shape[1]
            region = photos[label][:, int(width * left) : int(width * right)]
            parts[part].append(Sample((_crop(region, rng),), label))
    return Splits(tuple(_PHOTOS), parts["train"], parts["validation"], parts["test"], real=True)


def _crop(region: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A square crop, perhaps mirrored, with other brightness and contrast."""
    side = int(rng.integers(44, min(100, *region.shape[:2]) + 1))
    top, left = (int(rng.integers(0, extent - side + 1)) for extent in region.shape[:2])
    crop = cv2.resize(region[top : top + side, left : left + side], (world.SIZE, world.SIZE))
    crop = crop[:, ::-1] if rng.random() < 0.5 else crop
    return np.clip(crop * rng.uniform(0.7, 1.3) + rng.uniform(-25, 25), 0, 255).astype(np.uint8)


SIGNS = ("stop", "yield", "no entry", "parking", "speed limit", "turn left", "turn right", "crossing")


def _signs(seed: int) -> Splits:
    """Drawn road signs in front of drawn backgrounds (synthetic)."""
    rng = np.random.default_rng(seed + 1)

    def part(count: int) -> list[Sample]:
        drawn = []
        for _ in range(count):
            label = int(rng.integers(len(SIGNS)))
            drawn.append(Sample((draw_sign(SIGNS[label], rng),), label))
        return drawn

    return Splits(SIGNS, part(1100), part(300), part(400), real=False)


def draw_sign(name: str, rng: np.random.Generator) -> np.ndarray:
    """One picture of a road sign, anywhere, in any usual size, slightly turned, in any light."""
    image = world.background(rng)
    size = int(rng.integers(18, 34))
    x, y = (int(rng.integers(size + 2, world.SIZE - size - 2)) for _ in range(2))
    cv2.rectangle(image, (x - 2, y), (x + 2, world.SIZE), (90, 90, 90), -1)
    sign = image.copy()
    red, blue, white, black, yellow = (200, 30, 40), (30, 80, 190), (235, 235, 235), (20, 20, 20), (235, 200, 40)
    if name == "stop":
        world.draw_shape(sign, "circle", red, (x, y), size, 0)
        cv2.putText(sign, "STOP", (x - size * 3 // 4, y + size // 5), 0, size / 42, white, 2, cv2.LINE_AA)
    elif name == "yield":
        world.draw_shape(sign, "triangle", red, (x, y), size, np.pi)
        world.draw_shape(sign, "triangle", white, (x, y), size * 3 // 5, np.pi)
    elif name == "no entry":
        world.draw_shape(sign, "circle", red, (x, y), size, 0)
        cv2.rectangle(sign, (x - size * 2 // 3, y - size // 5), (x + size * 2 // 3, y + size // 5), white, -1)
    elif name == "parking":
        world.draw_shape(sign, "square", blue, (x, y), size, 0)
        cv2.putText(sign, "P", (x - size // 2, y + size // 2), 0, size / 20, white, 3, cv2.LINE_AA)
    elif name == "speed limit":
        world.draw_shape(sign, "circle", red, (x, y), size, 0)
        world.draw_shape(sign, "circle", white, (x, y), size * 3 // 4, 0)
        text = str(rng.choice([30, 50, 70, 80]))
        cv2.putText(sign, text, (x - size // 2, y + size // 4), 0, size / 34, black, 2, cv2.LINE_AA)
    elif name == "crossing":
        world.draw_shape(sign, "square", yellow, (x, y), size, np.pi / 4)
        world.draw_vehicle(sign, "person", (x, y), size // 2, black)
    else:
        world.draw_shape(sign, "circle", blue, (x, y), size, 0)
        ahead = -1 if name == "turn left" else 1
        start, end = (x - ahead * size // 2, y), (x + ahead * size // 2, y)
        cv2.arrowedLine(sign, start, end, white, max(2, size // 6), cv2.LINE_AA, tipLength=0.5)
    turn = cv2.getRotationMatrix2D((x, y), rng.uniform(-12, 12), 1.0)
    sign = cv2.warpAffine(sign, turn, (world.SIZE, world.SIZE), borderMode=cv2.BORDER_REFLECT)
    lit = sign * rng.uniform(0.6, 1.2) + rng.normal(0, 4, sign.shape)
    return np.clip(lit, 0, 255).astype(np.uint8)


ACTIONS = ("drives left", "drives right", "waits", "crossing")


def _actions(seed: int) -> Splits:
    """Four-frame clips of a drawn street: a vehicle that passes or waits, or a person who crosses (synthetic)."""
    rng = np.random.default_rng(seed + 2)

    def part(count: int) -> list[Sample]:
        labels = [int(rng.integers(len(ACTIONS))) for _ in range(count)]
        return [Sample(tuple(draw_action(ACTIONS[label], rng, world.FRAMES)), label) for label in labels]

    return Splits(ACTIONS, part(900), part(240), part(320), real=False)


def draw_action(name: str, rng: np.random.Generator, num_frames: int) -> list[np.ndarray]:
    """`num_frames` pictures of one action, evenly spread over about a second."""
    base = world.background(rng)
    horizon = int(rng.integers(24, 40))
    base[horizon:] = (base[horizon:] // 3 + 60).astype(np.uint8)
    kind = "person" if name == "crossing" else world.VEHICLES[rng.integers(3)]
    paint = tuple(int(v) for v in rng.integers(60, 240, 3))
    size, lane = int(rng.integers(9, 14)), int(rng.integers(horizon + 8, world.SIZE - 16))
    speed = float(rng.uniform(28, 56))  # pixels in the whole clip
    path = {"drives left": (-1, 0), "drives right": (1, 0), "waits": (0, 0), "crossing": (0, 0.6)}[name]
    x = 48 - path[0] * speed / 2 + rng.integers(-10, 11)
    y = (60 if name == "crossing" else lane) - path[1] * speed / 2
    frames = []
    for step in range(num_frames):
        done = step / max(1, num_frames - 1)
        frame = base.copy()
        center = (int(x + path[0] * speed * done), int(y + path[1] * speed * done))
        world.draw_vehicle(frame, kind, center, size, paint)
        noisy = frame + rng.normal(0, 3, frame.shape)
        frames.append(np.clip(noisy, 0, 255).astype(np.uint8))
    return frames


def render_stream(path: Path, seed: int, seconds: int = 8, fps: int = 30) -> list[str]:
    """Write a drawn street video (synthetic, mp4) in which one action happens each second; returns the labels in order."""
    rng = np.random.default_rng(seed + 3)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (world.SIZE, world.SIZE))
    if not writer.isOpened():
        raise OSError(f"OpenCV cannot write {path}")
    labels = [ACTIONS[int(rng.integers(len(ACTIONS)))] for _ in range(seconds)]
    for label in labels:
        for frame in draw_action(label, rng, fps):
            writer.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
    writer.release()
    return labels


def _folder(folder: Path) -> Splits:
    names = ("train", "validation", "test")
    labels = sorted({entry.name for entry in (folder / "train").glob("*") if entry.is_dir()})
    if len(labels) < 2:
        raise BadPlan(f"source {folder}: needs train/LABEL/ folders of at least two labels, found {labels or 'none'}")
    parts: dict[str, list[Sample]] = {}
    for name in names:
        parts[name] = []
        for label, text in enumerate(labels):
            for file in sorted((folder / name / text).glob("*")):
                picture = cv2.imread(str(file), cv2.IMREAD_COLOR)
                if picture is None:
                    raise BadPlan(f"source {folder}: {file} is not a picture OpenCV can read")
                parts[name].append(Sample((cv2.cvtColor(picture, cv2.COLOR_BGR2RGB),), label))
        if not parts[name]:
            raise BadPlan(f"source {folder}: {name}/ holds no pictures for the labels {', '.join(labels)}")
    return Splits(tuple(labels), parts["train"], parts["validation"], parts["test"], real=True)


BUILT_IN: dict[str, Callable[[int], Splits]] = {
    "sklearn-digits": _digits,
    "library-photos": _photos,
    "drawn-signs": _signs,
    "drawn-actions": _actions,
}
