"""Drawing for the rendered world and the synthetic domains: its words, and small seeded RGB canvases of OpenCV.

Canvases are uint8 [96, 96, 3], positions are (x, y) in pixels, boxes are (left, top, right, bottom), colours are RGB.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cv2
import numpy as np

SIZE = 96

Color = tuple[int, int, int]
Box = tuple[int, int, int, int]

COLORS: dict[str, Color] = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 215, 50),
    "purple": (150, 60, 180),
    "orange": (240, 140, 30),
    "cyan": (60, 210, 215),
    "white": (240, 240, 240),
}
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
VEHICLES = ("car", "truck", "bus", "bike")
FONTS = (
    cv2.FONT_HERSHEY_SIMPLEX,
    cv2.FONT_HERSHEY_DUPLEX,
    cv2.FONT_HERSHEY_COMPLEX,
    cv2.FONT_HERSHEY_SCRIPT_SIMPLEX,
)
BLACK: Color = (20, 20, 20)

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
THINGS = (*SHAPES, *VEHICLES, "person")
BOARDS = ("disc", "board", "octagon", "wedge")
ARROWS = ("left", "right", "up")
POSITIONS = {
    "top left": (25, 25),
    "top right": (71, 25),
    "center": (48, 48),
    "bottom left": (25, 71),
    "bottom right": (71, 71),
}
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}
ATTRIBUTES = (*POSITIONS, *THINGS, *COLORS)
"""Attributes of an object in a picture."""

# Sampling Gaussian noise would cost more than all other drawing, so windows of one fixed block are used.
_NOISE = np.random.default_rng(20240).normal(0, 1, 1 << 20).astype(np.float32)


def plural(thing: str) -> str:
    return {"bus": "buses", "cross": "crosses"}.get(thing, thing + "s")


def article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def chance(rng: np.random.Generator, probability: float) -> bool:
    return bool(rng.random() < probability)


def pick(rng: np.random.Generator, options: tuple[str, ...] | list[str]) -> str:
    return options[int(rng.integers(len(options)))]


def jitter(rng: np.random.Generator, color: Color, dim: float = 1.0) -> Color:
    red, green, blue = (int(np.clip(part * dim + rng.integers(-18, 19), 0, 255)) for part in color)
    return red, green, blue


def add_noise(rng: np.random.Generator, canvas: np.ndarray, sigma: float) -> np.ndarray:
    """The canvas with added grey noise of `sigma` grey levels."""
    start = int(rng.integers(len(_NOISE) - SIZE * SIZE))
    grain = (_NOISE[start : start + SIZE * SIZE] * sigma).astype(np.int16).reshape(SIZE, SIZE, 1)
    return np.clip(canvas + grain, 0, 255).astype(np.uint8)


def polygon(center: tuple[float, float], radii: tuple[float, ...], corners: int, angle: float) -> np.ndarray:
    """Corners of a regular polygon, int32 [corners, 2]; several radii alternate, which makes stars."""
    x, y = center
    points = []
    for corner in range(corners):
        turn = angle + 2 * math.pi * corner / corners
        radius = radii[corner % len(radii)]
        points.append((round(x + radius * math.cos(turn)), round(y + radius * math.sin(turn))))
    return np.array(points, np.int32)


def fill(canvas: np.ndarray, points: np.ndarray, color: Color) -> None:
    cv2.fillPoly(canvas, [points], color, cv2.LINE_AA)


# -- backgrounds -------------------------------------------------------------------------------------------------------


def plain_background(rng: np.random.Generator) -> np.ndarray:
    slope = np.linspace(-25, 25, SIZE) * rng.uniform(-1, 1)
    canvas = np.empty((SIZE, SIZE, 3), np.int16)
    canvas[:] = rng.integers(10, 110, 3)
    canvas += (slope[:, None, None] if chance(rng, 0.5) else slope[None, :, None]).astype(np.int16)
    return add_noise(rng, canvas, rng.uniform(1, 8))


class StreetBackground(NamedTuple):
    canvas: np.ndarray
    night: bool


def street_background(rng: np.random.Generator) -> StreetBackground:
    """Sky, grass, a road with two dashed lines; by day or by night."""
    night = chance(rng, 0.35)
    road = int(rng.integers(40, 60)) if night else int(rng.integers(85, 115))
    horizon = int(rng.integers(12, 22))
    canvas = np.empty((SIZE, SIZE, 3), np.uint8)
    canvas[:] = (22, 28, 52) if night else (150, 190, 225)
    canvas[horizon:] = (28, 46, 30) if night else (80, 130, 70)
    canvas[horizon + 6 : SIZE - 4] = road
    lane = (SIZE - horizon - 10) // 3
    for y in (horizon + 6 + lane, horizon + 6 + 2 * lane):
        for x in range(int(rng.integers(0, 12)), SIZE, 16):
            cv2.line(canvas, (x, y), (x + 8, y), (140, 140, 140) if night else (210, 210, 210), 1)
    return StreetBackground(add_noise(rng, canvas, 5), night)


def pattern_background(rng: np.random.Generator, kind: str, contrast: float = 1.0) -> np.ndarray:
    mask = _PATTERN_MASKS[kind](rng)
    low = rng.integers(0, 200, 3).astype(np.float32)
    difference = rng.integers(60, 160, 3) * (1 if chance(rng, 0.5) else -1)
    high = np.clip(low + contrast * difference, 0, 255).astype(np.float32)
    canvas = low + mask[..., None] * (high - low)
    return add_noise(rng, canvas.astype(np.int16), rng.uniform(1, 8))


_Y, _X = np.mgrid[0:SIZE, 0:SIZE].astype(np.float32)


def _bands(rng: np.random.Generator, angle: float) -> np.ndarray:
    period = rng.uniform(7, 22)
    phase = rng.uniform(0, 6.28)
    along = _X * math.cos(angle) + _Y * math.sin(angle)
    return (np.sin(2 * math.pi * along / period + phase) > rng.uniform(-0.4, 0.4)).astype(np.float32)


def _checks(rng: np.random.Generator) -> np.ndarray:
    side = rng.uniform(5, 15)
    x, y = rng.uniform(0, 30, 2)
    return (((_X + x) // side + (_Y + y) // side) % 2).astype(np.float32)


def _dots(rng: np.random.Generator) -> np.ndarray:
    step = rng.uniform(10, 24)
    x, y = rng.uniform(0, 30, 2)
    dx, dy = (_X + x) % step - step / 2, (_Y + y) % step - step / 2
    return (dx * dx + dy * dy < (step * rng.uniform(0.25, 0.4)) ** 2).astype(np.float32)


def _bricks(rng: np.random.Generator) -> np.ndarray:
    high = rng.uniform(7, 15)
    wide = high * rng.uniform(1.8, 2.6)
    row = (_Y + rng.uniform(0, 20)) // high
    joint = np.minimum((_Y + rng.uniform(0, 20)) % high, (_X + row * wide / 2) % wide)
    return (joint > 1.5).astype(np.float32)


def _waves(rng: np.random.Generator) -> np.ndarray:
    period = rng.uniform(8, 20)
    bend = rng.uniform(3, 8) * np.sin(_X * 2 * math.pi / rng.uniform(24, 60) + rng.uniform(0, 6))
    return (np.sin((_Y + bend) * 2 * math.pi / period) * 0.5 + 0.5).astype(np.float32)


def _enlarged(rng: np.random.Generator, low: int, high: int, interpolation: int) -> np.ndarray:
    side = int(rng.integers(low, high))
    start = int(rng.integers(len(_NOISE) - side * side))
    small = _NOISE[start : start + side * side].reshape(side, side)
    return np.clip(cv2.resize(small, (SIZE, SIZE), interpolation=interpolation) * 0.35 + 0.5, 0, 1)


def _specks(rng: np.random.Generator) -> np.ndarray:
    mask = np.zeros((SIZE, SIZE), np.float32)
    for x, y, size in rng.integers((0, 0, 0), (SIZE, SIZE, 3), (int(rng.integers(10, 45)), 3)):
        cv2.circle(mask, (int(x), int(y)), int(size), float(rng.uniform(0.4, 1)), -1, cv2.LINE_AA)
    return mask


def _strokes(rng: np.random.Generator) -> np.ndarray:
    mask = np.zeros((SIZE, SIZE), np.float32)
    lean = rng.uniform(0, math.pi)
    for x, y, length in rng.integers((0, 0, 5), (SIZE, SIZE, 16), (90, 3)):
        turn = lean + rng.normal(0, 0.35)
        end = (int(x + length * math.cos(turn)), int(y + length * math.sin(turn)))
        cv2.line(mask, (int(x), int(y)), end, float(rng.uniform(0.3, 1)), 1, cv2.LINE_AA)
    return mask


def _lines(rng: np.random.Generator) -> np.ndarray:
    """Rows of small marks, like a printed page seen from afar."""
    mask = np.zeros((SIZE, SIZE), np.float32)
    step = int(rng.integers(6, 14))
    for y in range(int(rng.integers(0, step)), SIZE, step):
        x = int(rng.integers(0, 6))
        while x < SIZE:
            length = int(rng.integers(2, 9))
            mask[y : y + step // 2, x : x + length] = rng.uniform(0.5, 1)
            x += length + int(rng.integers(1, 5))
    return mask


def _rings(rng: np.random.Generator) -> np.ndarray:
    x, y = rng.uniform(0, SIZE, 2)
    far = np.sqrt((_X - x) ** 2 + (_Y - y) ** 2)
    return (np.sin(far * 2 * math.pi / rng.uniform(8, 20)) > 0).astype(np.float32)


_PATTERN_MASKS = {
    "stripes": lambda rng: _bands(rng, math.pi / 2 + rng.normal(0, 0.08)),
    "bars": lambda rng: _bands(rng, rng.normal(0, 0.08)),
    "diagonals": lambda rng: _bands(rng, math.pi / 4 * (1 if chance(rng, 0.5) else 3) + rng.normal(0, 0.12)),
    "checks": _checks,
    "dots": _dots,
    "bricks": _bricks,
    "waves": _waves,
    "grain": lambda rng: _enlarged(rng, 32, 97, cv2.INTER_LINEAR),
    "clouds": lambda rng: _enlarged(rng, 4, 12, cv2.INTER_CUBIC),
    "specks": _specks,
    "strokes": _strokes,
    "lines": _lines,
    "rings": _rings,
}
PATTERNS = tuple(_PATTERN_MASKS)


# -- things ------------------------------------------------------------------------------------------------------------


def draw_thing(canvas: np.ndarray, kind: str, color: Color, center: tuple[int, int], radius: int, angle: float) -> Box:
    """Draw a shape, a vehicle or a person; returns its bounding box. Only shapes rotate by `angle`."""
    if kind in SHAPES:
        return _draw_shape(canvas, kind, color, center, radius, angle)
    return _THINGS[kind](canvas, color, *center, radius)


def _draw_shape(canvas: np.ndarray, kind: str, color: Color, center: tuple[int, int], radius: int, angle: float) -> Box:
    x, y = center
    if kind == "circle":
        cv2.circle(canvas, center, radius, color, -1, cv2.LINE_AA)
    elif kind == "ring":
        cv2.circle(canvas, center, radius - 1, color, max(2, radius // 3), cv2.LINE_AA)
    elif kind == "square":
        fill(canvas, polygon(center, (radius * 1.2,), 4, angle + math.pi / 4), color)
    elif kind == "triangle":
        fill(canvas, polygon(center, (radius * 1.25,), 3, angle - math.pi / 2), color)
    elif kind == "star":
        fill(canvas, polygon(center, (radius * 1.3, radius * 0.55), 10, angle - math.pi / 2), color)
    else:
        half = max(2, radius // 3)
        for turn in (angle, angle + math.pi / 2):
            along = np.array([math.cos(turn), math.sin(turn)]) * radius * 1.1
            across = np.array([-math.sin(turn), math.cos(turn)]) * half
            corners = np.array([along + across, along - across, -along - across, -along + across])
            fill(canvas, np.round(corners + center).astype(np.int32), color)
    return (x - radius, y - radius, x + radius, y + radius)


def _wheels(canvas: np.ndarray, xs: tuple[int, ...], y: int, radius: int) -> None:
    for x in xs:
        cv2.circle(canvas, (x, y), max(2, radius), BLACK, -1, cv2.LINE_AA)


def _darker(color: Color) -> Color:
    red, green, blue = (int(part * 0.45) for part in color)
    return red, green, blue


def _draw_car(canvas: np.ndarray, color: Color, x: int, y: int, r: int) -> Box:
    cv2.rectangle(canvas, (x - r, y - r // 3), (x + r, y + r // 3), color, -1)
    cabin = [
        (x - r // 2, y - r // 3),
        (x - r // 4, y - r * 3 // 4),
        (x + r // 3, y - r * 3 // 4),
        (x + r * 2 // 3, y - r // 3),
    ]
    fill(canvas, np.array(cabin, np.int32), _darker(color))
    _wheels(canvas, (x - r // 2, x + r // 2), y + r // 3, r // 4)
    return (x - r, y - r * 3 // 4, x + r, y + r // 2)


def _draw_truck(canvas: np.ndarray, color: Color, x: int, y: int, r: int) -> Box:
    cv2.rectangle(canvas, (x - r, y - r * 3 // 4), (x + r // 3, y + r // 3), color, -1)
    cv2.rectangle(canvas, (x + r // 3 + 1, y - r // 3), (x + r, y + r // 3), _darker(color), -1)
    _wheels(canvas, (x - r * 2 // 3, x - r // 4, x + r * 2 // 3), y + r // 3, r // 5)
    return (x - r, y - r * 3 // 4, x + r, y + r // 2)


def _draw_bus(canvas: np.ndarray, color: Color, x: int, y: int, r: int) -> Box:
    cv2.rectangle(canvas, (x - r, y - r * 2 // 3), (x + r, y + r // 3), color, -1)
    for window in range(4):
        left = x - r + 2 + window * r // 2
        cv2.rectangle(canvas, (left, y - r // 2), (left - 2 + max(3, r // 3), y - r // 6), (190, 220, 240), -1)
    _wheels(canvas, (x - r * 2 // 3, x + r * 2 // 3), y + r // 3, r // 5)
    return (x - r, y - r * 2 // 3, x + r, y + r // 2)


def _draw_bike(canvas: np.ndarray, color: Color, x: int, y: int, r: int) -> Box:
    half = max(3, r // 2)
    for wheel in (x - half, x + half):
        cv2.circle(canvas, (wheel, y + r // 4), max(2, half * 3 // 4), BLACK, 2, cv2.LINE_AA)
    for start, end in (
        ((x - half, y + r // 4), (x, y - r // 4)),
        ((x, y - r // 4), (x + half, y + r // 4)),
        ((x + half // 2, y - r // 2), (x + half, y + r // 4)),
    ):
        cv2.line(canvas, start, end, color, 3, cv2.LINE_AA)
    return (x - r, y - r // 2, x + r, y + r * 2 // 3)


def _draw_person(canvas: np.ndarray, color: Color, x: int, y: int, r: int) -> Box:
    cv2.circle(canvas, (x, y - r * 3 // 4), max(2, r // 4), (225, 180, 150), -1, cv2.LINE_AA)
    cv2.rectangle(canvas, (x - r // 3, y - r // 2), (x + r // 3, y + r // 6), color, -1)
    for side in (-1, 1):
        cv2.line(canvas, (x + side * r // 6, y + r // 6), (x + side * r // 4, y + r * 3 // 4), (30, 30, 60), 2)
    return (x - r // 2, y - r, x + r // 2, y + r * 3 // 4)


_THINGS = {"car": _draw_car, "truck": _draw_truck, "bus": _draw_bus, "bike": _draw_bike, "person": _draw_person}


def draw_text(
    canvas: np.ndarray, text: str, center: tuple[int, int], scale: float, color: Color, thickness: int
) -> Box:
    (wide, high), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_DUPLEX, scale, thickness)
    left, bottom = center[0] - wide // 2, center[1] + high // 2
    cv2.putText(canvas, text, (left, bottom), cv2.FONT_HERSHEY_DUPLEX, scale, color, thickness, cv2.LINE_AA)
    return (left, bottom - high, left + wide, bottom)


def draw_arrow(canvas: np.ndarray, direction: str, center: tuple[int, int], radius: int, color: Color) -> None:
    x, y = center
    dx, dy = {"left": (-1, 0), "right": (1, 0), "up": (0, -1)}[direction]
    tail = (round(x - dx * radius * 0.65), round(y - dy * radius * 0.65))
    tip = (round(x + dx * radius * 0.7), round(y + dy * radius * 0.7))
    cv2.arrowedLine(canvas, tail, tip, color, 3, cv2.LINE_AA, tipLength=0.5)
