"""Drawn road signs and street clips: synthetic pictures with labels chosen by the renderer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from fusion.embedded.drawing import (
    BLACK,
    COLORS,
    SIZE,
    Color,
    add_noise,
    draw_arrow,
    draw_text,
    draw_thing,
    fill,
    jitter,
    pick,
    plain_background,
    polygon,
    street_background,
)

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
    """A clip of one action, and what the renderer chose for it."""

    frames: list[np.ndarray]
    action: str
    kind: str
    color: str


def draw_action(name: str, rng: np.random.Generator, num_frames: int) -> list[np.ndarray]:
    """`num_frames` pictures of one action in a street, evenly spaced over about a second."""
    return draw_passing(name, rng, num_frames).frames


def draw_passing(name: str, rng: np.random.Generator, num_frames: int) -> Passing:
    """As `draw_action`, with the kind and the colour of what passes."""
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


def render_stream(path: Path, seed: int, seconds: int = 8, fps: int = 30) -> list[str]:
    """Write a drawn street video (mp4) in which one action happens each second; returns the labels in order."""
    rng = np.random.default_rng(seed)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (SIZE, SIZE))
    if not writer.isOpened():
        raise OSError(f"OpenCV cannot write {path}")
    labels = [pick(rng, ACTIONS) for _ in range(seconds)]
    for label in labels:
        for frame in draw_action(label, rng, fps):
            writer.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
    writer.release()
    return labels
