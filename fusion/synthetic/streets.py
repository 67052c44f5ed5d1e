"""Drawn streets from a fixed camera, by day and night: domains for questions, captions, references and detection.

All synthetic. Objects are placed in three lanes and three columns, so that words can describe their position.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from fusion.data.samples import Sample
from fusion.embedded.drawing import (
    COLORS,
    NUMBERS,
    VEHICLES,
    add_noise,
    article,
    chance,
    draw_thing,
    jitter,
    pick,
    plural,
    street_background,
)
from heads import Box

KINDS = (*VEHICLES, "person")
LANES = ("top", "middle", "bottom")
SIDES = ("left", "middle", "right")
_Y = (36, 57, 77)
_X = (18, 48, 78)


class Thing(NamedTuple):
    kind: str
    color: str
    lane: int
    side: int
    box: tuple[int, int, int, int]


class Street(NamedTuple):
    frame: np.ndarray
    things: tuple[Thing, ...]  # from left to right, then from top to bottom
    night: bool

    @property
    def num_vehicles(self) -> int:
        return sum(thing.kind in VEHICLES for thing in self.things)

    @property
    def has_person(self) -> bool:
        return any(thing.kind == "person" for thing in self.things)


def draw_street(rng: np.random.Generator, most: int) -> Street:
    """A street with one to `most` vehicles and persons, at places that do not overlap."""
    street = street_background(rng)
    canvas = street.canvas
    things = []
    for place in sorted(rng.permutation(9)[: int(rng.integers(1, most + 1))]):
        side, lane = int(place) // 3, int(place) % 3
        kind, color = pick(rng, KINDS), pick(rng, tuple(COLORS))
        center = (_X[side] + int(rng.integers(-4, 5)), _Y[lane] + int(rng.integers(-2, 3)))
        ink = jitter(rng, COLORS[color], 0.75 if street.night else 1.0)
        box = draw_thing(canvas, kind, ink, center, int(rng.integers(11, 15)), 0.0)
        things.append(Thing(kind, color, lane, side, box))
    return Street(add_noise(rng, canvas, 3), tuple(things), street.night)


def ask_traffic(rng: np.random.Generator) -> Sample:
    """A question that needs counting or comparing: number of vehicles, busy or not, the outermost object on a side."""
    street = draw_street(rng, 5)
    vehicles = [thing for thing in street.things if thing.kind in VEHICLES]
    form = int(rng.integers(4))
    if form == 0:
        question, answer = "how many vehicles are on the road?", NUMBERS[len(vehicles)]
    elif form == 1:
        question, answer = "is the road busy?", "yes" if len(vehicles) >= 3 else "no"
    elif form == 2:
        question, answer = "can a person cross here?", "no" if any(t.lane == 1 for t in vehicles) else "yes"
    else:
        left = chance(rng, 0.5)
        question = f"what is on the far {'left' if left else 'right'}?"
        columns = [thing.side for thing in street.things]
        edge = min(columns) if left else max(columns)
        there = [thing for thing in street.things if thing.side == edge]
        if len(there) > 1:
            return ask_traffic(rng)
        answer = article(there[0].kind)
    return Sample((street.frame,), answer, question)


def caption_traffic(rng: np.random.Generator) -> Sample:
    """A caption with counts and time of day: "one bus and two cars at night"."""
    street = draw_street(rng, 3)
    counted = []
    for kind in KINDS:
        count = sum(thing.kind == kind for thing in street.things)
        if count:
            counted.append(f"{NUMBERS[count]} {kind if count == 1 else plural(kind)}")
    return Sample((street.frame,), f"{' and '.join(counted)} {'at night' if street.night else 'by day'}")


def refer_to_thing(rng: np.random.Generator) -> Sample:
    """A question for the lane and side of the one object that matches a description."""
    street = draw_street(rng, 4)
    for index in rng.permutation(len(street.things)):
        thing = street.things[index]
        if sum((t.kind, t.color) == (thing.kind, thing.color) for t in street.things) == 1:
            where = f"{LANES[thing.lane]} lane {SIDES[thing.side]}"
            return Sample((street.frame,), where, f"in which lane and on which side is the {thing.color} {thing.kind}?")
    return refer_to_thing(rng)


def count_vehicles(rng: np.random.Generator) -> Sample:
    """The number of vehicles, zero included; persons do not count."""
    street = draw_street(rng, 5)
    return Sample((street.frame,), street.num_vehicles)


def look_for_person(rng: np.random.Generator) -> Sample:
    """Whether a person is on the road (1) or not (0), each in half of the samples."""
    wanted = chance(rng, 0.5)
    while True:
        street = draw_street(rng, 5)
        if street.has_person == wanted:
            return Sample((street.frame,), int(wanted))


_FPS = 15


def render_traffic(path: Path, seed: int, seconds: int = 8) -> list[Street]:
    """Write a video (mp4) that shows one street per second, and return the streets in order. Raises OSError."""
    rng = np.random.default_rng(seed)
    streets = [draw_street(rng, 5) for _ in range(seconds)]
    height, width = streets[0].frame.shape[:2]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), _FPS, (width, height))
    if not writer.isOpened():
        raise OSError(f"OpenCV cannot write {path}")
    for street in streets:
        for _ in range(_FPS):
            writer.write(cv2.cvtColor(add_noise(rng, street.frame.astype(np.int16), 3), cv2.COLOR_RGB2BGR))
    writer.release()
    return streets


def find_things(rng: np.random.Generator) -> Sample:
    street = draw_street(rng, 5)
    height, width = street.frame.shape[:2]
    boxes = tuple(
        Box(
            KINDS.index(thing.kind),
            thing.box[0] / width,
            thing.box[1] / height,
            thing.box[2] / width,
            thing.box[3] / height,
        )
        for thing in street.things
    )
    return Sample((street.frame,), boxes)
