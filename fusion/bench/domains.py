"""Families of domains: drawn for each seed, in any number; only digits are real, 1,797 of them.

The five domains of a family share one kind of task and differ in the question.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fusion.data.samples import Sample, Splits
from fusion.embedded.drawing import COLORS, SIZE, add_noise, chance, draw_thing, jitter, street_background
from fusion.embedded.object_names import NUMBERS
from fusion.synthetic.road_signs import ACTIONS, CLIP_FRAMES, SIGNS, draw_action, draw_sign
from fusion.synthetic.sources import load_source
from fusion.synthetic.streets import (
    KINDS,
    LANES,
    SIDES,
    ask_traffic,
    caption_traffic,
    draw_street,
    find_things,
    refer_to_thing,
)

Draw = Callable[[np.random.Generator], Sample]


class Sizes(NamedTuple):
    """Number of samples in each part of a domain."""

    train: int
    validation: int
    test: int


@dataclasses.dataclass(frozen=True)
class BenchDomain:
    """A domain. draw: None for the digits. labels: empty if the language model answers in words."""

    name: str
    task: str
    question: str
    draw: Draw | None
    labels: tuple[str, ...] = ()

    def splits(self, seed: int, sizes: Sizes) -> Splits:
        if self.draw is None:
            return _cut(load_source("sklearn-digits", seed), sizes)
        # Seeded by name as well, so that domains of one seed share no picture.
        rng = np.random.default_rng([seed, *self.name.encode()])
        train, validation, test = ([self.draw(rng) for _ in range(count)] for count in sizes)
        return Splits(self.task, self.labels, train, validation, test, real=False)


def _cut(splits: Splits, sizes: Sizes) -> Splits:
    """Split the same samples again: training gets those that validation and test leave."""
    every = [*splits.train, *splits.validation, *splits.test]
    held = sizes.validation + sizes.test
    validation, test = every[: sizes.validation], every[sizes.validation : held]
    train = every[held : held + sizes.train]
    return dataclasses.replace(splits, train=train, validation=validation, test=test)


def _sign(rng: np.random.Generator) -> Sample:
    label = int(rng.integers(len(SIGNS)))
    return Sample((draw_sign(SIGNS[label], rng),), label)


def _action(rng: np.random.Generator) -> Sample:
    label = int(rng.integers(len(ACTIONS)))
    return Sample(tuple(draw_action(ACTIONS[label], rng, CLIP_FRAMES)), label)


def _single(fact: str) -> Draw:
    """A street with one object; its `fact` is the label."""

    def draw(rng: np.random.Generator) -> Sample:
        street = draw_street(rng, 1)
        thing = street.things[0]
        label = {
            "kind": KINDS.index(thing.kind),
            "color": tuple(COLORS).index(thing.color),
            "place": 3 * thing.lane + thing.side,
        }[fact]
        return Sample((street.frame,), label)

    return draw


_WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
_MOVING = ("car", "truck", "bus", "person")
_LENGTHS = {"a short way": (12, 22), "a long way": (34, 48)}  # pixels


def _clip(fact: str) -> Draw:
    """Four frames of a street in which one object moves; its `fact` is the label."""

    def draw(rng: np.random.Generator) -> Sample:
        street = street_background(rng).canvas
        chosen = {
            "kind": int(rng.integers(len(_MOVING))),
            "color": int(rng.integers(len(COLORS))),
            "way": int(rng.integers(len(_WAYS))),
            "length": int(rng.integers(len(_LENGTHS))),
            "half": int(rng.integers(2)),
        }
        dx, dy = tuple(_WAYS.values())[chosen["way"]]
        distance = float(rng.uniform(*tuple(_LENGTHS.values())[chosen["length"]]))
        paint = jitter(rng, COLORS[tuple(COLORS)[chosen["color"]]])
        # Horizontal moves stay in one half of the picture; vertical moves are halved to fit within a half.
        distance = distance if dx else distance / 2
        x = SIZE / 2 - dx * distance / 2 + rng.integers(-10, 11)
        y = (0.3 if chosen["half"] == 0 else 0.72) * SIZE - dy * distance / 2
        frames = []
        for step in range(CLIP_FRAMES):
            done = step / (CLIP_FRAMES - 1)
            frame = street.copy()
            place = (int(x + dx * distance * done), int(y + dy * distance * done))
            draw_thing(frame, _MOVING[chosen["kind"]], paint, place, 10, 0.0)
            frames.append(add_noise(rng, frame.astype(np.int16), 3))
        return Sample(tuple(frames), chosen[fact])

    return draw


def _asked(beginning: str) -> Draw:
    """Only questions with this beginning."""

    def draw(rng: np.random.Generator) -> Sample:
        while True:
            sample = ask_traffic(rng)
            if sample.question.startswith(beginning):
                return sample

    return draw


def _only(kind: str) -> Draw:
    """Boxes of one kind, in streets that often contain it."""

    def draw(rng: np.random.Generator) -> Sample:
        while True:
            sample: Any = find_things(rng)
            boxes = tuple(box._replace(label=0) for box in sample.target if KINDS[box.label] == kind)
            if boxes or chance(rng, 0.3):
                return Sample(sample.frames, boxes)

    return draw


DIGITS = BenchDomain("digits", "classification", "what digit is shown?", None, NUMBERS)
_SIGNS = BenchDomain("signs", "classification", "what sign is shown?", _sign, SIGNS)
_PLACES = tuple(f"{lane} {side}" for lane in LANES for side in SIDES)

FAMILIES: dict[str, tuple[BenchDomain, ...]] = {
    "classification": (
        DIGITS,
        _SIGNS,
        BenchDomain("kind", "classification", "what is on the road?", _single("kind"), KINDS),
        BenchDomain("color", "classification", "what color is it?", _single("color"), tuple(COLORS)),
        BenchDomain("place", "classification", "where is it?", _single("place"), _PLACES),
    ),
    "action": (
        BenchDomain("way", "action", "which way does it move?", _clip("way"), tuple(_WAYS)),
        BenchDomain("moving", "action", "what moves?", _clip("kind"), _MOVING),
        BenchDomain("moving-color", "action", "what color is what moves?", _clip("color"), tuple(COLORS)),
        BenchDomain("length", "action", "how far does it move?", _clip("length"), tuple(_LENGTHS)),
        BenchDomain("half", "action", "where does it move?", _clip("half"), ("top", "bottom")),
    ),
    "questions": (
        BenchDomain("count", "vqa", "how many vehicles are on the road?", _asked("how many")),
        BenchDomain("busy", "vqa", "is the road busy?", _asked("is the road")),
        BenchDomain("far", "vqa", "what is on the far left?", _asked("what is on")),
        BenchDomain("reference", "referring", "where is it?", refer_to_thing),
        BenchDomain("caption", "captioning", "describe the traffic.", caption_traffic),
    ),
    "detection": tuple(
        BenchDomain(f"find-{kind}", "detection", f"find every {kind}.", _only(kind), (kind,)) for kind in KINDS
    ),
}
"""Domains for accuracy against the number of fused domains, per kind of task; one-class detectors, as in figure 10."""
