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
import math

import cv2
import numpy as np

from fusion.embedded.drawing import (
    ARROWS,
    BOARDS,
    COLORS,
    FONTS,
    MOVES,
    NUMBERS,
    PATTERNS,
    POSITIONS,
    SHAPES,
    SIZE,
    THINGS,
    VEHICLES,
    Box,
    Color,
    add_noise,
    article,
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
from fusion.embedded.questions import Placed, Question, ask_clip, ask_things, make_question

_FY: np.ndarray = np.fft.fftfreq(SIZE)[:, None].astype(np.float32)
_FX: np.ndarray = np.fft.rfftfreq(SIZE)[None].astype(np.float32)


def texture(rng: np.random.Generator, level: float, contrast: float) -> np.ndarray:
    """A canvas of about `level` grey levels on average and `contrast` around it, grey or slightly coloured.

    Two families of textures resemble most local structure of photographs: noise with a random power spectrum (clouds to
    gravel, with or without a direction), and leaves, overlapping shapes of many sizes. A canvas has one, or two side by
    side.
    """
    field = _field(rng)
    if chance(rng, 0.5):
        side = int(rng.integers(2, 5))
        parts = cv2.resize(rng.standard_normal((side, side), np.float32), (SIZE, SIZE), interpolation=cv2.INTER_CUBIC)
        field = np.where(parts > 0, field, _field(rng) + rng.normal(0, 1))
    field = (field - field.mean()) / (field.std() + 1e-6)
    if chance(rng, 0.3):
        field = np.tanh(field * rng.uniform(1, 4))
    canvas = np.repeat((level + contrast * field)[..., None], 3, axis=2)
    if chance(rng, 0.5):
        canvas *= rng.uniform(0.75, 1.25, 3)
    return add_noise(rng, canvas, rng.uniform(0, 8))


def _field(rng: np.random.Generator) -> np.ndarray:
    """One texture, float32 [96, 96], of deviation 1 around 0; sometimes out of focus."""
    field = _noise(rng, rng.uniform(0.3, 2.2)) if chance(rng, 0.5) else _leaves(rng)
    if chance(rng, 0.3):
        field = cv2.GaussianBlur(field, (0, 0), rng.uniform(0.6, 2.5))
    return (field - field.mean()) / (field.std() + 1e-6)


def _noise(rng: np.random.Generator, slope: float) -> np.ndarray:
    """Noise with amplitude proportional to frequency ** -slope, stretched along a random direction."""
    lean, squeeze = rng.uniform(0, math.pi), rng.uniform(1, 4) if chance(rng, 0.6) else 1.0
    along = _FX * math.cos(lean) + _FY * math.sin(lean)
    across = (_FY * math.cos(lean) - _FX * math.sin(lean)) * squeeze
    amplitude = (along**2 + across**2 + 1 / SIZE**2) ** (-slope / 2)
    white = rng.standard_normal((SIZE, SIZE), np.float32)
    field = np.fft.irfft2(np.fft.rfft2(white) * amplitude, (SIZE, SIZE)).astype(np.float32)
    return (field - field.mean()) / (field.std() + 1e-6)


def _leaves(rng: np.random.Generator) -> np.ndarray:
    """Overlapping ellipses or boxes with sizes from a power law."""
    field: np.ndarray = np.zeros((SIZE, SIZE), np.float32)
    count = int(rng.integers(60, 200))
    smallest = rng.uniform(1.5, 6)
    sizes = np.minimum(smallest * rng.uniform(1e-3, 1, count) ** -0.5, 40)
    places = rng.uniform(0, SIZE, (count, 2))
    tones, stretch = rng.normal(0, 1, count), rng.uniform(1, 3)
    lean, spread = rng.uniform(0, 180), rng.uniform(5, 90)
    turns = lean + spread * rng.uniform(-1, 1, count)
    boxes = chance(rng, 0.4)
    for (x, y), size, tone, turn in zip(places, sizes, tones, turns, strict=True):
        if boxes:
            corners = cv2.boxPoints(((x, y), (2 * size * stretch, 2 * size), turn))
            cv2.fillConvexPoly(field, np.round(corners).astype(np.int32), float(tone), cv2.LINE_AA)
        else:
            axes = (max(1, round(size * stretch)), max(1, round(size)))
            cv2.ellipse(field, (round(x), round(y)), axes, turn, 0, 360, float(tone), -1, cv2.LINE_AA)
    return field


GRID = 6
CELL = SIZE // GRID
CLIP_FRAMES = 4

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
# Channels of a scene's cell labels.
KIND, COLOR, CENTER, MOVE = range(4)
UNKNOWN = -100
"""Label of a cell that is excluded from the loss."""


@dataclasses.dataclass(frozen=True)
class Scene:
    """frames: uint8 [T, 96, 96, 3] (T is 1 or CLIP_FRAMES). cells: int64 [T, 4, 6, 6], the channels named above."""

    frames: np.ndarray
    questions: tuple[Question, ...]
    cells: np.ndarray


def _mark(cells: np.ndarray, box: Box, kind: str, color: str, move: str = "none") -> None:
    """Label the cells with a middle that the box (nearly) covers, and the cell that contains the box's centre."""
    middle = np.arange(GRID) * CELL + CELL // 2
    across = (middle >= box[0] - 3) & (middle <= box[2] + 3)
    down = (middle >= box[1] - 3) & (middle <= box[3] + 3)
    covered = down[:, None] & across[None, :]
    cells[KIND][covered] = CELL_KINDS.index(kind)
    cells[COLOR][covered] = CELL_COLORS.index(color)
    cells[MOVE][covered] = CELL_MOVES.index(move)
    row, column = ((box[1] + box[3]) // 2 // CELL, (box[0] + box[2]) // 2 // CELL)
    if 0 <= row < GRID and 0 <= column < GRID:
        cells[CENTER, row, column] = 1


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
        item = Placed(pick(rng, among), pick(rng, tuple(COLORS)), names[index])
        x, y = POSITIONS[item.position]
        center = (x + int(rng.integers(-5, 6)), y + int(rng.integers(-5, 6)))
        color = jitter(rng, COLORS[item.color], 0.75 if night else 1.0)
        radius = int(rng.integers(10 if item.kind in SHAPES else 12, 17))
        box = draw_thing(canvas, item.kind, color, center, radius, rng.uniform(-0.3, 0.3))
        _mark(cells, box, item.kind, item.color)
        placed.append(item)
    return Scene(canvas[None], tuple(ask_things(rng, placed, night)), cells[None])


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
    questions = (
        make_question(rng, "digit", "digit", name),
        make_question(rng, "color", "color", color, "digit"),
        make_question(rng, "describe", "describe", f"{article(color)} digit {name}"),
    )
    return Scene(canvas[None], questions, cells[None])


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
    questions = [
        make_question(rng, "color", "color", color, "sign"),
        make_question(rng, "sign shape", "sign", board),
        make_question(rng, "sign content", "sign", content[1] if content else "nothing"),
    ]
    return Scene(add_noise(rng, canvas, 4)[None], tuple(questions), cells[None])


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
    cells[KIND] = CELL_KINDS.index(kind)
    questions = (make_question(rng, "pattern", "pattern", kind),)
    return Scene(pattern_background(rng, kind)[None], questions, cells[None])


def texture_scene(rng: np.random.Generator) -> Scene:
    bright = chance(rng, 0.5)
    canvas = texture(rng, rng.uniform(150, 220) if bright else rng.uniform(30, 105), rng.uniform(10, 60))
    cells = np.full((4, GRID, GRID), UNKNOWN, np.int64)
    questions = make_question(rng, "brightness", "brightness", "bright" if canvas.mean() > 127.5 else "dark")
    return Scene(canvas[None], (questions,), cells[None])


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
        standing = Placed(
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
    return Scene(np.stack(frames), tuple(ask_clip(rng, kind, color, move, standing)), cells)


def still_scene(rng: np.random.Generator) -> Scene:
    """One picture of any kind, in the training mixture."""
    which = rng.random()
    if which < 0.54:
        return things_scene(rng)
    if which < 0.8:
        return _board_scene(rng) if chance(rng, 0.35) else _printed_scene(rng)
    return pattern_scene(rng) if which < 0.88 else texture_scene(rng)
