"""Draw samples of the rendered world on one page: `python -m tools.embedded_model.contact_sheet FILE.jpg`."""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np

from fusion.embedded import world
from fusion.embedded.drawing import SIZE

_COLUMNS, _STILLS, _CLIPS = 6, 24, 4
_WIDTH, _CAPTION = 224, 34


def contact_sheet(seed: int) -> np.ndarray:
    """Pictures of every kind with one of their questions, then clips frame by frame. RGB uint8."""
    rng = np.random.default_rng(seed)
    stills = [_cell(scene.frames[0], *_asked(scene, rng)) for scene in (world.still_scene(rng) for _ in range(_STILLS))]
    rows = [np.hstack(stills[start : start + _COLUMNS]) for start in range(0, _STILLS, _COLUMNS)]
    for _ in range(_CLIPS):
        scene = world.clip_scene(rng)
        question, answer = _asked(scene, rng)
        cells = [_cell(frame, f"frame {place + 1}", "") for place, frame in enumerate(scene.frames)]
        caption = np.full((_WIDTH + _CAPTION, _WIDTH * (_COLUMNS - len(cells)), 3), 255, np.uint8)
        _write(caption, question, (8, _WIDTH // 2))
        _write(caption, answer, (8, _WIDTH // 2 + 16), (0, 90, 160))
        rows.append(np.hstack([*cells, caption]))
    return np.vstack(rows)


def _asked(scene: world.Scene, rng: np.random.Generator) -> tuple[str, str]:
    question = scene.questions[int(rng.integers(len(scene.questions)))]
    return question.text, question.answer


def _cell(frame: np.ndarray, question: str, answer: str) -> np.ndarray:
    side = 2 * SIZE
    cell = np.full((_WIDTH + _CAPTION, _WIDTH, 3), 255, np.uint8)
    left = (_WIDTH - side) // 2
    cell[8 : 8 + side, left : left + side] = cv2.resize(frame, (side, side), interpolation=cv2.INTER_NEAREST)
    _write(cell, question, (4, 8 + side + 16))
    _write(cell, answer, (4, 8 + side + 32), (0, 90, 160))
    return cell


def _write(canvas: np.ndarray, text: str, place: tuple[int, int], color: tuple[int, int, int] = (20, 20, 20)) -> None:
    cv2.putText(canvas, text, place, cv2.FONT_HERSHEY_SIMPLEX, 0.36, color, 1, cv2.LINE_AA)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.embedded_model.contact_sheet", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    sheet = cv2.cvtColor(contact_sheet(arguments.seed), cv2.COLOR_RGB2BGR)
    try:
        written = cv2.imwrite(str(arguments.file), sheet, (cv2.IMWRITE_JPEG_QUALITY, 80))
    except cv2.error:
        parser.error(f"{arguments.file} has no supported picture suffix; use .jpg or .png")
    if not written:
        parser.error(f"cannot write {arguments.file}; check that its folder exists")


if __name__ == "__main__":
    main()
