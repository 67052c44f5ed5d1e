"""Built-in sources of pictures, which need no network; `fusion.data` reads user data.

Every source states whether its pixels are real or rendered, and splits into train, validation and test parts that share
no picture (and, if pictures are crops of a few photographs, no region of one).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

from fusion.data.samples import Sample, Splits
from fusion.embedded.drawing import NUMBERS, SIZE
from fusion.synthetic import drawn

Source = Callable[[int], Splits]


def load_source(source: str, seed: int) -> Splits:
    """Load a built-in source by name. Raises ImportError if the library that contains it is not installed."""
    return BUILT_IN[source](seed)


def _digits(seed: int) -> Splits:
    """scikit-learn's 1,797 scanned handwritten digits (8 x 8 real pixels, enlarged)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.images))
    samples = []
    for index in order:
        small = (data.images[index] * 15.9).astype(np.uint8)
        canvas = np.zeros((SIZE, SIZE), np.uint8)
        canvas[12:84, 12:84] = cv2.resize(small, (72, 72), interpolation=cv2.INTER_CUBIC)
        samples.append(Sample((cv2.cvtColor(canvas, cv2.COLOR_GRAY2RGB),), int(data.target[index])))
    return Splits("classification", NUMBERS, samples[:1100], samples[1100:1400], samples[1400:], real=True)


def _readings(seed: int) -> Splits:
    digits = _digits(seed).in_words()
    train, validation, test = (
        [dataclasses.replace(sample, target=f"the number shown is {sample.target}") for sample in part]
        for part in digits.parts.values()
    )
    return Splits("vqa", (), train, validation, test, real=True)


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
COLUMNS = {"train": (0.0, 0.54), "validation": (0.56, 0.74), "test": (0.76, 1.0)}


def _photos(seed: int) -> Splits:
    """Crops of ten photographs (real pixels). Train and test see different regions of the same ten: an easy test."""
    import skimage
    import sklearn

    folders = (Path(skimage.__file__).parent / "data", Path(sklearn.__file__).parent / "datasets" / "images")
    photos = []
    for file in _PHOTOS.values():
        path = next(folder / file for folder in folders if (folder / file).exists())
        picture = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
        assert picture is not None, f"{path} ships with its library but cannot be read"
        photos.append(cv2.cvtColor(picture, cv2.COLOR_GRAY2RGB))
    rng = np.random.default_rng(seed)
    parts: dict[str, list[Sample]] = {}
    for part, count in (("train", 900), ("validation", 640), ("test", 400)):
        left, right = COLUMNS[part]
        parts[part] = []
        for _ in range(count):
            label = int(rng.integers(len(photos)))
            width = photos[label].shape[1]
            region = photos[label][:, int(width * left) : int(width * right)]
            parts[part].append(Sample((_crop(region, rng),), label))
    return Splits("classification", tuple(_PHOTOS), parts["train"], parts["validation"], parts["test"], real=True)


_LEAST_CONTRAST = 6.0  # standard deviation, grey levels


def _crop(region: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A square crop, perhaps mirrored, with other brightness and contrast."""
    while True:
        side = int(rng.integers(44, min(100, *region.shape[:2]) + 1))
        top, left = (int(rng.integers(0, extent - side + 1)) for extent in region.shape[:2])
        crop = cv2.resize(region[top : top + side, left : left + side], (SIZE, SIZE))
        if crop.std() > _LEAST_CONTRAST:  # a crop without contrast, such as sky, cannot be labelled
            break
    crop = crop[:, ::-1] if rng.random() < 0.5 else crop
    return np.clip(crop * rng.uniform(0.7, 1.3) + rng.uniform(-25, 25), 0, 255).astype(np.uint8)


def _signs(seed: int) -> Splits:
    rng = np.random.default_rng(seed + 1)

    def part(count: int) -> list[Sample]:
        labels = [int(rng.integers(len(drawn.SIGNS))) for _ in range(count)]
        return [Sample((drawn.draw_sign(drawn.SIGNS[label], rng),), label) for label in labels]

    return Splits("classification", drawn.SIGNS, part(1000), part(400), part(400), real=False)


def _actions(num_frames: int, salt: int) -> Source:
    """Clips of a drawn street: a vehicle that passes or waits, or a person that crosses (synthetic)."""

    def load(seed: int) -> Splits:
        rng = np.random.default_rng(seed + salt)

        def part(count: int) -> list[Sample]:
            labels = [int(rng.integers(len(drawn.ACTIONS))) for _ in range(count)]
            clips = [drawn.draw_passing(drawn.ACTIONS[label], rng, num_frames).frames for label in labels]
            return [Sample(tuple(frames), label) for frames, label in zip(clips, labels, strict=True)]

        return Splits("action", drawn.ACTIONS, part(900), part(240), part(320), real=False)

    return load


def _faces(seed: int) -> Splits:
    """100 faces and 100 other crops of 25 x 25 grey pixels, from Labeled Faces in the Wild (real pixels)."""
    from skimage.data import lfw_subset

    pictures = lfw_subset()
    samples = []
    for index in np.random.default_rng(seed).permutation(len(pictures)):
        grey = np.clip(pictures[index] * 255, 0, 255).astype(np.uint8)
        large = cv2.resize(grey, (SIZE, SIZE), interpolation=cv2.INTER_CUBIC)
        samples.append(Sample((cv2.cvtColor(large, cv2.COLOR_GRAY2RGB),), 0 if index < 100 else 1))
    return Splits("classification", ("a face", "no face"), samples[:100], samples[100:130], samples[130:], real=True)


def _drawn(task: str, labels: tuple[str, ...], draw: Callable[[np.random.Generator], Sample], salt: int) -> Source:
    """A source that draws every sample independently.

    Its validation part is large enough for promises at a confidence of 0.95 on scores around a half
    (`fusion.plan.summary.samples_needed`).
    """

    def load(seed: int) -> Splits:
        rng = np.random.default_rng(seed + salt)
        train, validation, test = ([draw(rng) for _ in range(count)] for count in (1260, 640, 500))
        return Splits(task, labels, train, validation, test, real=False)

    return load


BUILT_IN: dict[str, Source] = {
    "sklearn-digits": _digits,
    "sklearn-readings": _readings,
    "lfw-faces": _faces,
    "library-photos": _photos,
    "drawn-signs": _signs,
    "drawn-actions": _actions(drawn.CLIP_FRAMES, 2),
    "drawn-traffic-questions": _drawn("vqa", (), drawn.ask_traffic, 3),
    "drawn-traffic-captions": _drawn("captioning", (), drawn.caption_traffic, 4),
    "drawn-traffic-references": _drawn("referring", (), drawn.refer_to_thing, 5),
    "drawn-traffic-detection": _drawn("detection", drawn.KINDS, drawn.find_things, 6),
    "drawn-traffic-counts": _drawn("counting", NUMBERS[:6], drawn.count_vehicles, 7),
    "drawn-short-actions": _actions(2, 9),
    "drawn-traffic-persons": _drawn("binary", ("no", "yes"), drawn.look_for_person, 8),
}

Stream = Callable[[Path, int], list[str] | None]


def _counts_in_video(path: Path, seed: int) -> list[str]:
    return [NUMBERS[street.num_vehicles] for street in drawn.render_traffic(path, seed)]


def _boxes_in_video(path: Path, seed: int) -> None:
    drawn.render_traffic(path, seed + 1)


STREAMS: dict[str, Stream] = {
    "drawn-actions": drawn.render_stream,
    "drawn-short-actions": drawn.render_stream,
    "drawn-traffic-counts": _counts_in_video,
    "drawn-traffic-detection": _boxes_in_video,
}
"""Sources with a video: each function writes an mp4 for a seed and returns one label per second, or None for sources
without a single label."""
