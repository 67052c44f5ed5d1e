"""The rendered world that trains the embedded model: scenes and short clips with questions, answers and cell labels.

Everything is synthetic. A scene depends only on its random generator. There are four kinds of scene:

* things: one to five shapes, vehicles or persons on a plain background, a pattern or a street;
* glyphs: one printed, distorted digit, or a sign board with content;
* patterns: the whole picture is one named pattern, or an unnamed texture;
* clips: four frames in which one object moves, sometimes next to another that does not.

Cell labels give the content of each cell of the 6x6 grid of image tokens, UNKNOWN in textures. They are used only in
training (see `train.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np

from fusion.embedded.drawing import (
    COLORS,
    FONTS,
    PATTERNS,
    SHAPES,
    SIZE,
    VEHICLES,
    Box,
    Color,
    add_noise,
    chance,
    draw_arrow,
    draw_text,
    draw_thing,
    fill,
    jitter,
    pattern_background,
    pick,
    plain_background,
    polygon,
    street_background,
)
from fusion.embedded.textures import texture

GRID = 6
CELL = SIZE // GRID
CLIP_FRAMES = 4

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

# Cell classes in the order of their labels; 0 is background.
CELL_KINDS = (
    "none",
    *THINGS,
    *(f"digit {number}" for number in NUMBERS),
    *BOARDS,
    *(f"arrow {arrow}" for arrow in ARROWS),
    "bar",
    *PATTERNS,
)
CELL_COLORS = ("none", *COLORS)
CELL_MOVES = ("none", *MOVES)
ATTRIBUTES = (*POSITIONS, *THINGS, *COLORS)
"""Attributes of an object in a picture."""
_KIND_ID = {kind: index for index, kind in enumerate(CELL_KINDS)}
_COLOR_ID = {color: index for index, color in enumerate(CELL_COLORS)}
_MOVE_ID = {move: index for index, move in enumerate(CELL_MOVES)}

# Channels of a scene's cell labels.
KIND, COLOR, CENTER, MOVE = range(4)
UNKNOWN = -100
"""Label of a cell that is excluded from the loss."""


class Question(NamedTuple):
    """skill: the skill that the question tests; accuracy is reported per skill.

    The other fields are used only in training. about: the words of the text that name an object. holds: whether it
    exists, None if the question presupposes it. meant: attributes (see ATTRIBUTES) of all objects that the words name;
    None in clips, where objects have no fixed position.
    """

    skill: str
    text: str
    answer: str
    about: str = ""
    holds: bool | None = None
    meant: frozenset[str] | None = None


# Forms of each question; the first form is used half of the time.
_FORMS: dict[str, tuple[str, ...]] = {
    "count all": ("how many objects are there?", "how many things do you see?", "count the objects."),
    "count": ("how many {} are there?", "how many {} do you see?", "count the {}."),
    "at": ("what is at the {}?", "what do you see at the {}?"),
    "color at": ("what color is the object at the {}?", "what is the color of the object at the {}?"),
    "kind at": ("what kind of object is at the {}?", "what type of object is at the {}?"),
    "color": ("what color is the {}?", "what is the color of the {}?"),
    "where": ("where is the {}?", "where do you see the {}?", "at what position is the {}?"),
    "kind": ("what is the {} object?", "what kind of object is the {} one?"),
    "present": ("is there {}?", "do you see {}?", "is {} in the image?"),
    "describe": ("describe the image.", "what is in the image?", "what does the image show?"),
    "light": ("is it day or night?", "day or night?"),
    "digit": ("what digit is shown?", "what number is this?", "what digit do you see?"),
    "pattern": ("what pattern is shown?", "what pattern is this?"),
    "brightness": ("is the image bright or dark?", "is this picture bright or dark?"),
    "sign shape": ("what shape is the sign?", "what is the shape of the sign?"),
    "sign content": ("what is on the sign?", "what does the sign show?"),
    "move of": ("which way does the {} move?", "where does the {} go?", "which way is the {} moving?"),
    "move": ("which way does it move?", "what is the direction of motion?"),
    "describe clip": ("describe the video.", "what happens in the video?"),
    "moving": ("what is moving?", "what moves?"),
}


def _question(rng: np.random.Generator, form: str, skill: str, answer: str, name: str = "") -> Question:
    """Draw a form of a question. name: the object in it."""
    forms = _FORMS[form]
    text = forms[0] if chance(rng, 0.5) else pick(rng, forms)
    return Question(skill, text.format(name), answer)


@dataclasses.dataclass(frozen=True)
class Scene:
    """frames: uint8 [T, 96, 96, 3] (T is 1 or CLIP_FRAMES). cells: int64 [T, 4, 6, 6], the channels named above."""

    frames: np.ndarray
    questions: tuple[Question, ...]
    cells: np.ndarray


def plural(thing: str) -> str:
    return {"bus": "buses", "cross": "crosses"}.get(thing, thing + "s")


def article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _yes_no(holds: bool) -> str:
    return "yes" if holds else "no"


def _mark(cells: np.ndarray, box: Box, kind: str, color: str, move: str = "none") -> None:
    """Label the cells with a middle that the box (nearly) covers, and the cell that contains the box's centre."""
    middle = np.arange(GRID) * CELL + CELL // 2
    across = (middle >= box[0] - 3) & (middle <= box[2] + 3)
    down = (middle >= box[1] - 3) & (middle <= box[3] + 3)
    covered = down[:, None] & across[None, :]
    cells[KIND][covered] = _KIND_ID[kind]
    cells[COLOR][covered] = _COLOR_ID[color]
    cells[MOVE][covered] = _MOVE_ID[move]
    row, column = ((box[1] + box[3]) // 2 // CELL, (box[0] + box[2]) // 2 // CELL)
    if 0 <= row < GRID and 0 <= column < GRID:
        cells[CENTER, row, column] = 1


class _Placed(NamedTuple):
    kind: str
    color: str
    position: str

    @property
    def words(self) -> str:
        return f"{self.color} {self.kind}"


def things_scene(rng: np.random.Generator) -> Scene:
    ground = rng.random()
    night: bool | None = None
    if ground < 0.35:
        canvas = plain_background(rng)
    elif ground < 0.7:
        street = street_background(rng)
        canvas, night = street.canvas, street.night
    elif ground < 0.85:
        canvas = pattern_background(rng, pick(rng, PATTERNS), 0.35)
    else:
        canvas = texture(rng, rng.uniform(20, 110), rng.uniform(5, 25))
    among: tuple[str, ...] = THINGS
    if night is not None and chance(rng, 0.7):
        among = (*VEHICLES, "person")
    if chance(rng, 0.4):
        among = tuple(among[i] for i in rng.permutation(len(among))[:2])
    cells = np.zeros((4, GRID, GRID), np.int64)
    placed = []
    names = list(POSITIONS)
    for index in sorted(rng.permutation(len(names))[: int(rng.integers(1, 6))]):
        item = _Placed(pick(rng, among), pick(rng, tuple(COLORS)), names[index])
        x, y = POSITIONS[item.position]
        center = (x + int(rng.integers(-5, 6)), y + int(rng.integers(-5, 6)))
        color = jitter(rng, COLORS[item.color], 0.75 if night else 1.0)
        radius = int(rng.integers(10 if item.kind in SHAPES else 12, 17))
        box = draw_thing(canvas, item.kind, color, center, radius, rng.uniform(-0.3, 0.3))
        _mark(cells, box, item.kind, item.color)
        placed.append(item)
    return Scene(canvas[None], tuple(_ask_things(rng, placed, night)), cells[None])


def _ask_things(rng: np.random.Generator, placed: list[_Placed], night: bool | None) -> list[Question]:
    one = placed[int(rng.integers(len(placed)))]
    kinds = [item.kind for item in placed]
    colors = [item.color for item in placed]
    asked = [_question(rng, "count all", "count", NUMBERS[len(placed)])]
    for form, skill, answer in (
        ("at", "scene", article(one.words)),
        ("color at", "color", one.color),
        ("kind at", _kind_skill(one.kind), article(one.kind)),
    ):
        asked.append(_naming(_question(rng, form, skill, answer, one.position), one.position, placed))
    for kind in (one.kind, pick(rng, THINGS)):
        question = _question(rng, "count", "count", NUMBERS[kinds.count(kind)], plural(kind))
        asked.append(_naming(question, kind, placed, open_=True)._replace(about=plural(kind)))
    if kinds.count(one.kind) == 1:
        asked.append(_naming(_question(rng, "color", "color", one.color, one.kind), one.kind, placed))
    if colors.count(one.color) == 1:
        question = _question(rng, "kind", _kind_skill(one.kind), article(one.kind), one.color)
        asked.append(_naming(question, one.color, placed))
    asked += _ask_presence(rng, placed)
    asked += _ask_where(rng, placed)
    if len(placed) <= 2:
        asked.append(_question(rng, "describe", "describe", " and ".join(article(item.words) for item in placed)))
    if night is not None:
        asked.append(_question(rng, "light", "scene", "night" if night else "day"))
    return asked


def _kind_skill(kind: str) -> str:
    return "shape" if kind in SHAPES else "kind"


def _names(item: _Placed) -> tuple[str, str, str]:
    """The names of an object: its kind, its colour, and both."""
    return item.kind, item.color, item.words


def _naming(question: Question, name: str, placed: Sequence[_Placed], *, open_: bool = False) -> Question:
    """The question with the meaning of its name. open_: the question does not presuppose that the object exists."""
    meant = [item for item in placed if name in (*_names(item), item.position)]
    attributes = frozenset(attribute for item in meant for attribute in item)
    return question._replace(about=name, holds=bool(meant) if open_ else None, meant=attributes)


def _spoken(name: str) -> str:
    return f"{name} object" if name in COLORS else name


def _absent(rng: np.random.Generator, placed: list[_Placed], way: int) -> str:
    """A name that matches no object: a kind (0), a colour (1), or both (2), one of which is present."""
    there = {_names(item)[way] for item in placed}
    while True:
        one, kind, color = placed[int(rng.integers(len(placed)))], pick(rng, THINGS), pick(rng, tuple(COLORS))
        both = f"{one.color} {kind}" if chance(rng, 0.5) else f"{color} {one.kind}"
        name = (kind, color, both)[way]
        if name not in there:
            return name


def _ask_presence(rng: np.random.Generator, placed: list[_Placed]) -> list[Question]:
    """Questions whether a kind, a colour or both exist: two of each, and the answer is yes in half of the cases."""
    asked = []
    for way in range(3):
        for _ in range(2):
            holds = chance(rng, 0.5)
            name = pick(rng, [_names(item)[way] for item in placed]) if holds else _absent(rng, placed, way)
            question = _question(rng, "present", "yes or no", _yes_no(holds), article(_spoken(name)))
            asked.append(_naming(question, name, placed, open_=True))
    return asked


def _ask_where(rng: np.random.Generator, placed: list[_Placed]) -> list[Question]:
    """Questions for the position of a named object; sometimes no object matches."""
    asked = []
    for way in range(3):
        names = [_names(item)[way] for item in placed]
        single = [item for item in placed if names.count(_names(item)[way]) == 1]
        if chance(rng, 0.25):
            name, answer = _absent(rng, placed, way), "nowhere"
        elif single:
            item = single[int(rng.integers(len(single)))]
            name, answer = _names(item)[way], item.position
        else:
            continue
        question = _question(rng, "where", "position", answer, _spoken(name))
        asked.append(_naming(question, name, placed, open_=True))
    return asked


def glyph_scene(rng: np.random.Generator) -> Scene:
    return _board_scene(rng) if chance(rng, 0.35) else _printed_scene(rng)


def _printed_scene(rng: np.random.Generator) -> Scene:
    """One digit with random font, thickness, slant, rotation and stretch, sometimes as coarse as 9 pixels."""
    glyph = int(rng.integers(10))
    color = pick(rng, tuple(COLORS))
    mask: np.ndarray = np.zeros((SIZE, SIZE), np.uint8)
    font = FONTS[int(rng.integers(len(FONTS)))]
    scale, thickness = rng.uniform(1.3, 3.4), int(rng.integers(2, 10))
    (wide, high), _ = cv2.getTextSize(str(glyph), font, scale, thickness)
    middle = (48 + rng.uniform(-14, 14), 48 + rng.uniform(-14, 14))
    cv2.putText(mask, str(glyph), (48 - wide // 2, 48 + high // 2), font, scale, 255, thickness, cv2.LINE_AA)
    turn = cv2.getRotationMatrix2D((48, 48), rng.uniform(-15, 15), 1.0)
    lean = np.array([[rng.uniform(0.75, 1.25), rng.uniform(-0.3, 0.3)], [0, rng.uniform(0.8, 1.2)]])
    turn[:, :2] = lean @ turn[:, :2]
    turn[:, 2] = np.array(middle) - turn[:, :2] @ (48, 48)
    mask = cv2.warpAffine(mask, turn, (SIZE, SIZE))
    if chance(rng, 0.4):
        coarse = int(rng.integers(9, 24))
        mask = cv2.resize(mask, (coarse, coarse), interpolation=cv2.INTER_AREA)
        mask = cv2.resize(mask, (SIZE, SIZE), interpolation=cv2.INTER_CUBIC)
    rows, columns = np.nonzero(mask > 90)
    if len(rows) < 20:
        return _printed_scene(rng)
    ground = rng.random()
    if ground < 0.35:
        canvas = np.full((SIZE, SIZE, 3), int(rng.integers(0, 40)), np.uint8)
    elif ground < 0.8:
        canvas = plain_background(rng)
    else:
        canvas = pattern_background(rng, pick(rng, PATTERNS), 0.3)
    share = (mask.astype(np.float32) / 255)[..., None]
    ink = np.array(jitter(rng, COLORS[color]), np.float32)
    canvas = (canvas * (1 - share) + ink * share).astype(np.uint8)
    cells = np.zeros((4, GRID, GRID), np.int64)
    box = (int(columns.min()), int(rows.min()), int(columns.max()), int(rows.max()))
    name = NUMBERS[glyph]
    _mark(cells, box, f"digit {name}", color)
    asked = (
        _question(rng, "digit", "digit", name),
        _question(rng, "color", "color", color, "digit"),
        _question(rng, "describe", "describe", f"{article(color)} digit {name}"),
    )
    return Scene(canvas[None], asked, cells[None])


def _board_scene(rng: np.random.Generator) -> Scene:
    """A coloured sign board at a street (or elsewhere) with a digit, an arrow or a bar on it."""
    street = chance(rng, 0.6)
    canvas = street_background(rng).canvas if street else plain_background(rng)
    radius = int(rng.integers(17, 30))
    x, y = (int(v) for v in rng.integers(radius + 3, SIZE - radius - 3, 2))
    color, ink = (pick(rng, tuple(COLORS)) for _ in range(2))
    if color == ink:
        ink = "white" if color != "white" else "red"
    board = pick(rng, BOARDS)
    if street:
        cv2.line(canvas, (x, y), (x, SIZE), (120, 120, 120), 3)
    face, mark_color = jitter(rng, COLORS[color]), jitter(rng, COLORS[ink])
    if board == "disc":
        cv2.circle(canvas, (x, y), radius, face, -1, cv2.LINE_AA)
    elif board == "board":
        cv2.rectangle(canvas, (x - radius, y - radius), (x + radius, y + radius), face, -1)
    elif board == "octagon":
        fill(canvas, polygon((x, y), (radius,), 8, np.pi / 8), face)
    else:
        up = chance(rng, 0.5)
        fill(canvas, polygon((x, y), (radius * 1.1,), 3, -np.pi / 2 if up else np.pi / 2), face)
    cells = np.zeros((4, GRID, GRID), np.int64)
    _mark(cells, (x - radius, y - radius, x + radius, y + radius), board, color)
    content, inner = _draw_on_board(rng, canvas, (x, y), radius * (0.75 if board == "wedge" else 1.0), mark_color)
    if content is not None and inner is not None:
        _mark(cells, inner, content[0], ink)
    asked = [
        _question(rng, "color", "color", color, "sign"),
        _question(rng, "sign shape", "sign", board),
        _question(rng, "sign content", "sign", content[1] if content else "nothing"),
    ]
    return Scene(add_noise(rng, canvas, 4)[None], tuple(asked), cells[None])


def _draw_on_board(
    rng: np.random.Generator, canvas: np.ndarray, center: tuple[int, int], radius: float, ink: Color
) -> tuple[tuple[str, str] | None, Box | None]:
    """Draw the sign's content; returns (cell kind, words) and its box."""
    x, y = center
    what = rng.random()
    reach = int(radius * 0.6)
    box = (x - reach, y - reach, x + reach, y + reach)
    if what < 0.45:
        glyph = int(rng.integers(10))
        draw_text(canvas, str(glyph), center, radius / 18, ink, 2 + int(radius > 20))
        return (f"digit {NUMBERS[glyph]}", NUMBERS[glyph]), (x - reach // 2, box[1], x + reach // 2, box[3])
    if what < 0.75:
        arrow = pick(rng, ARROWS)
        draw_arrow(canvas, arrow, center, round(radius), ink)
        return (f"arrow {arrow}", f"an arrow {arrow}"), box
    if what < 0.88:
        thick = max(2, int(radius / 5))
        cv2.rectangle(canvas, (box[0], y - thick), (box[2], y + thick), ink, -1)
        return ("bar", "a bar"), (box[0], y - thick, box[2], y + thick)
    return None, None


def pattern_scene(rng: np.random.Generator) -> Scene:
    kind = pick(rng, PATTERNS)
    cells = np.zeros((4, GRID, GRID), np.int64)
    cells[KIND] = _KIND_ID[kind]
    asked = (_question(rng, "pattern", "pattern", kind),)
    return Scene(pattern_background(rng, kind)[None], asked, cells[None])


def texture_scene(rng: np.random.Generator) -> Scene:
    bright = chance(rng, 0.5)
    canvas = texture(rng, rng.uniform(150, 220) if bright else rng.uniform(30, 105), rng.uniform(10, 60))
    cells = np.full((4, GRID, GRID), UNKNOWN, np.int64)
    asked = _question(rng, "brightness", "brightness", "bright" if canvas.mean() > 127.5 else "dark")
    return Scene(canvas[None], (asked,), cells[None])


def clip_scene(rng: np.random.Generator) -> Scene:
    """Four frames: one object moves left, right, up or down, or none moves; a second one may stand still."""
    ground = rng.random()
    if ground < 0.5:
        base = plain_background(rng)
    elif ground < 0.9:
        base = street_background(rng).canvas
    else:
        base = pattern_background(rng, pick(rng, PATTERNS), 0.3)
    move = pick(rng, tuple(MOVES))
    dx, dy = MOVES[move]
    kind, color = pick(rng, THINGS), pick(rng, tuple(COLORS))
    radius, speed = int(rng.integers(10, 16)), rng.uniform(6, 16)
    start = [48 - step * speed * 1.5 + rng.uniform(-15, 15) for step in (dx, dy)]
    ink, angle = jitter(rng, COLORS[color]), rng.uniform(-0.3, 0.3)
    cells = np.zeros((CLIP_FRAMES, 4, GRID, GRID), np.int64)
    standing = None
    if chance(rng, 0.35):
        standing = _Placed(
            pick(rng, THINGS), pick(rng, tuple(COLORS)), pick(rng, ("top left", "bottom right", "bottom left"))
        )
        box = draw_thing(
            base, standing.kind, jitter(rng, COLORS[standing.color]), POSITIONS[standing.position], radius, angle
        )
        for frame in cells:
            _mark(frame, box, standing.kind, standing.color, "still")
    frames = []
    for index in range(CLIP_FRAMES):
        canvas = base.copy()
        center = (round(start[0] + dx * speed * index), round(start[1] + dy * speed * index))
        _mark(cells[index], draw_thing(canvas, kind, ink, center, radius, angle), kind, color, move)
        frames.append(add_noise(rng, canvas, 3))
    return Scene(np.stack(frames), tuple(_ask_clip(rng, kind, color, move, standing)), cells)


def _ask_clip(rng: np.random.Generator, kind: str, color: str, move: str, standing: _Placed | None) -> list[Question]:
    words = f"{color} {kind}"
    asked = []
    if standing is None or standing.kind != kind:
        asked.append(_question(rng, "move of", "motion", move, kind))
        for _ in range(2):
            holds = chance(rng, 0.5)
            guess = move if holds else pick(rng, [other for other in MOVES if other != move])
            does = f"does the {kind} stand still?" if guess == "still" else f"does the {kind} move {guess}?"
            asked.append(Question("motion yes or no", does, _yes_no(holds), guess, holds))
    if standing is None:
        asked.append(_question(rng, "move", "motion", move))
        told = "stands still" if move == "still" else f"moves {move}"
        asked.append(_question(rng, "describe clip", "describe", f"{article(words)} {told}"))
    asked.append(_question(rng, "moving", "moving", "nothing" if move == "still" else article(words)))
    return asked


def still_scene(rng: np.random.Generator) -> Scene:
    """One picture of any kind, in the training mixture."""
    which = rng.random()
    if which < 0.54:
        return things_scene(rng)
    if which < 0.8:
        return glyph_scene(rng)
    return pattern_scene(rng) if which < 0.88 else texture_scene(rng)
