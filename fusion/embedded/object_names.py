"""The words of the rendered world: numbers, kinds of objects, positions and directions of motion."""

from __future__ import annotations

from fusion.embedded.drawing import COLORS, SHAPES, VEHICLES

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


def plural(thing: str) -> str:
    return {"bus": "buses", "cross": "crosses"}.get(thing, thing + "s")


def article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"
