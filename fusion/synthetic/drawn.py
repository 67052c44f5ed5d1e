"""Drawn road signs, and streets from a fixed camera by day and night with their clips and videos.

All synthetic: the renderer chooses the labels. Objects of a street are placed in three lanes and three columns, so that
words can describe their position.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from fusion.data.samples import Sample
from fusion.embedded.drawing import (
    BLACK,
    COLORS,
    NUMBERS,
    SIZE,
    VEHICLES,
    Color,
    add_noise,
    article,
    chance,
    draw_arrow,
    draw_text,
    draw_thing,
    fill,
    jitter,
    pick,
    plain_background,
    plural,
    polygon,
    street_background,
)
from heads import Box

SIGNS = ("stop", "yield", "no entry", "parking", "speed limit", "turn left", "turn right", "crossing")
ACTIONS = ("drives left", "drives right", "waits", "crossing")
CLIP_FRAMES = 4

_RED: Color = (200, 30, 40)
_BLUE: Color = (30, 80, 190)
_WHITE: Color = (235, 235, 235)
_YELLOW: Color = (235, 200, 40)


def draw_sign(name: str, rng: np.random.Generator) -> np.ndarray:
    """One picture [96, 96, 3] of a road sign at a random place, size, rotation and brightness."""
    image = plain_background(rng)
    radius = int(rng.integers(17, 30))
    x, y = (int(rng.integers(radius + 4, SIZE - radius - 4)) for _ in range(2))
    cv2.rectangle(image, (x - 2, y), (x + 2, SIZE), (90, 90, 90), -1)
    if name == "yield":
        fill(image, polygon((x, y), (radius * 1.2,), 3, math.pi / 2), _RED)
        fill(image, polygon((x, y), (radius * 0.7,), 3, math.pi / 2), _WHITE)
    elif name in ("parking", "crossing"):
        turned = math.pi / 4 if name == "parking" else 0.0
        fill(image, polygon((x, y), (radius * 1.2,), 4, turned), _BLUE if name == "parking" else _YELLOW)
    elif name == "stop":
        fill(image, polygon((x, y), (radius * 1.05,), 8, math.pi / 8), _RED)
    else:
        draw_thing(image, "circle", _BLUE if name.startswith("turn") else _RED, (x, y), radius, 0.0)
    if name == "stop":
        draw_text(image, "STOP", (x, y), radius / 48, _WHITE, 2)
    elif name == "no entry":
        cv2.rectangle(image, (x - radius * 2 // 3, y - radius // 5), (x + radius * 2 // 3, y + radius // 5), _WHITE, -1)
    elif name == "parking":
        draw_text(image, "P", (x, y), radius / 22, _WHITE, 3)
    elif name == "speed limit":
        draw_thing(image, "circle", _WHITE, (x, y), radius * 3 // 4, 0.0)
        draw_text(image, str(rng.choice([30, 50, 70, 80])), (x, y), radius / 38, BLACK, 2)
    elif name == "crossing":
        draw_thing(image, "person", BLACK, (x, y), radius * 2 // 3, 0.0)
    elif name.startswith("turn"):
        draw_arrow(image, name.removeprefix("turn "), (x, y), radius * 2 // 3, _WHITE)
    turn = cv2.getRotationMatrix2D((x, y), rng.uniform(-10, 10), 1.0)
    image = cv2.warpAffine(image, turn, (SIZE, SIZE), borderMode=cv2.BORDER_REFLECT)
    return add_noise(rng, np.clip(image * rng.uniform(0.6, 1.2), 0, 255).astype(np.int16), 4)


class Passing(NamedTuple):
    frames: list[np.ndarray]
    action: str
    kind: str
    color: str


def draw_passing(name: str, rng: np.random.Generator, num_frames: int) -> Passing:
    """`num_frames` pictures of one action in a street, evenly spaced over about a second."""
    street = street_background(rng).canvas
    kind = "person" if name == "crossing" else pick(rng, ("car", "truck", "bus"))
    color = pick(rng, tuple(COLORS))
    paint = jitter(rng, COLORS[color])
    radius = int(rng.integers(9, 14))
    distance = float(rng.uniform(28, 56))  # pixels in the whole clip
    dx, dy = {"drives left": (-1.0, 0.0), "drives right": (1.0, 0.0), "waits": (0.0, 0.0), "crossing": (0.0, 0.7)}[name]
    x = SIZE / 2 - dx * distance / 2 + rng.integers(-10, 11)
    y = (58 if name == "crossing" else int(rng.integers(36, 76))) - dy * distance / 2
    frames = []
    for step in range(num_frames):
        done = step / max(1, num_frames - 1)
        frame = street.copy()
        draw_thing(frame, kind, paint, (int(x + dx * distance * done), int(y + dy * distance * done)), radius, 0.0)
        frames.append(add_noise(rng, frame.astype(np.int16), 3))
    return Passing(frames, name, kind, color)


def write_video(path: Path, fps: int, frames: Iterable[np.ndarray]) -> None:
    """Write RGB frames of SIZE x SIZE as mp4. Raises OSError."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (SIZE, SIZE))
    if not writer.isOpened():
        raise OSError(f"OpenCV cannot write {path}")
    for frame in frames:
        writer.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
    writer.release()


def render_stream(path: Path, seed: int, seconds: int = 8, fps: int = 30) -> list[str]:
    """Write a drawn street video (mp4) in which one action happens each second; returns the labels in order."""
    rng = np.random.default_rng(seed)
    labels = [pick(rng, ACTIONS) for _ in range(seconds)]
    write_video(path, fps, (frame for label in labels for frame in draw_passing(label, rng, fps).frames))
    return labels


# -- streets -----------------------------------------------------------------------------------------------------------

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
    shown = (street.frame.astype(np.int16) for street in streets for _ in range(_FPS))
    write_video(path, _FPS, (add_noise(rng, frame, 3) for frame in shown))
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
