"""The domains of `vlora bench fusion`: drawn for each seed, in any number; only digits are real, 1,797 of them.

They do not all fit into one adapter. Two groups contradict each other: their prompts are equal word for
word, and so are the distributions of their pictures, but each expects other words, as two customers with different
names for things do. For any adapter, the shares of correct answers of two domains with no answer in common add up to
one at most. Signs with other numerals and objects of a few pixels need fine features.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import cv2
import numpy as np

from fusion.data.samples import Sample, Splits
from fusion.embedded.drawing import (
    BLACK,
    COLORS,
    NUMBERS,
    SIZE,
    add_noise,
    article,
    draw_text,
    draw_thing,
    jitter,
    pick,
    plain_background,
    street_background,
)
from fusion.synthetic.road_signs import ACTIONS, draw_action
from fusion.synthetic.sources import load_source
from fusion.synthetic.streets import (
    KINDS,
    LANES,
    SIDES,
    Street,
    Thing,
    count_vehicles,
    draw_street,
)
from heads import Box

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


def _street(answer: Callable[[Street], Any], most: int = 1) -> Draw:
    """A street with up to `most` objects, and the answer about it."""

    def draw(rng: np.random.Generator) -> Sample:
        street = draw_street(rng, most)
        return Sample((street.frame,), answer(street))

    return draw


def _first(answer: Callable[[Thing], Any]) -> Draw:
    """A street with one object, and the answer about it."""
    return _street(lambda street: answer(street.things[0]))


DIGITS = BenchDomain("digits", "classification", "what digit is shown?", None, NUMBERS)

_SPEEDS = ("20", "30", "50", "60", "70", "80")
_SMALL = (4, 7)  # radius of small objects, pixels; elsewhere 11 to 14


def _speed(rng: np.random.Generator) -> Sample:
    """A speed limit: the numerals alone distinguish the classes."""
    label = int(rng.integers(len(_SPEEDS)))
    image = plain_background(rng)
    radius = int(rng.integers(17, 30))  # as other signs
    x, y = (int(rng.integers(radius + 4, SIZE - radius - 4)) for _ in range(2))
    draw_thing(image, "circle", (200, 30, 40), (x, y), radius, 0.0)
    draw_thing(image, "circle", (235, 235, 235), (x, y), radius * 3 // 4, 0.0)
    draw_text(image, _SPEEDS[label], (x, y), radius / 38, BLACK, 2)
    turn = cv2.getRotationMatrix2D((x, y), rng.uniform(-10, 10), 1.0)
    image = cv2.warpAffine(image, turn, (SIZE, SIZE), borderMode=cv2.BORDER_REFLECT)
    return Sample((add_noise(rng, np.clip(image * rng.uniform(0.6, 1.2), 0, 255).astype(np.int16), 4),), label)


def _short_action(rng: np.random.Generator) -> Sample:
    label = int(rng.integers(len(ACTIONS)))
    return Sample(tuple(draw_action(ACTIONS[label], rng, 2)), label)


def _small_objects(rng: np.random.Generator) -> Sample:
    """Boxes of up to four objects of a few pixels."""
    canvas = street_background(rng).canvas
    boxes = []
    for column in rng.permutation(4)[: int(rng.integers(1, 5))]:
        kind = pick(rng, KINDS)
        center = (12 + 24 * int(column) + int(rng.integers(-3, 4)), int(rng.integers(30, 84)))
        left, top, right, bottom = draw_thing(
            canvas, kind, jitter(rng, COLORS[pick(rng, tuple(COLORS))]), center, int(rng.integers(*_SMALL)), 0.0
        )
        boxes.append(Box(KINDS.index(kind), left / SIZE, top / SIZE, right / SIZE, bottom / SIZE))
    return Sample((add_noise(rng, canvas.astype(np.int16), 3),), tuple(boxes))


def _kinds(street: Street) -> tuple[int, ...]:
    return tuple(sorted({KINDS.index(thing.kind) for thing in street.things}))


def _spread(street: Street) -> tuple[float]:
    """The distance between the outermost objects of a street, in shares of its width."""
    centers = [(thing.box[0] + thing.box[2]) / 2 / SIZE for thing in street.things]
    return (max(centers) - min(centers),)


def _caption(street: Street) -> str:
    return f"one {street.things[0].kind} {'at night' if street.night else 'by day'}"


def _place(thing: Thing, *, mirrored: bool = False) -> str:
    """mirrored: as a camera on the other side of the road would call it."""
    lane, side = ((2 - at if mirrored else at) for at in (thing.lane, thing.side))
    return f"{LANES[lane]} lane {SIDES[side]}"


_SEEN = "what is on the road?"
_WHERE = "where is it?"

SUITE = (
    DIGITS,
    BenchDomain("speeds", "classification", "what is the speed limit?", _speed, _SPEEDS),
    BenchDomain("actions", "action", "what happens in the video?", _short_action, ACTIONS),
    BenchDomain("things", "vqa", _SEEN, _first(lambda thing: article(thing.kind))),
    BenchDomain("paints", "vqa", _SEEN, _first(lambda thing: thing.color)),
    BenchDomain("captions", "captioning", _SEEN, _street(_caption)),
    BenchDomain("places", "referring", _WHERE, _first(_place)),
    BenchDomain("mirrored", "referring", _WHERE, _first(functools.partial(_place, mirrored=True))),
    BenchDomain("counts", "counting", "how many vehicles are on the road?", count_vehicles, NUMBERS[:6]),
    BenchDomain("kinds", "multi_label", "which kinds are on the road?", _street(_kinds, 4), KINDS),
    BenchDomain("spread", "regression", "how far apart are they?", _street(_spread, 4), ("distance",)),
    BenchDomain("small", "detection", "find all vehicles and persons.", _small_objects, KINDS),
)
"""The table's domains: twelve over nine tasks."""

QUICK = tuple(made for made in SUITE if made.name in ("speeds", "things", "paints", "kinds"))
"""Domains of a smoke test."""


def suspected(domains: tuple[BenchDomain, ...]) -> tuple[tuple[str, str], ...]:
    """Pairs that contradict each other: answered in words to the same question."""
    words = [made for made in domains if not made.labels]
    return tuple(
        (one.name, other.name)
        for place, one in enumerate(words)
        for other in words[place + 1 :]
        if one.question == other.question
    )
