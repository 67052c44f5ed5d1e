"""Videos of textured squares with known paths, and answers of a detection head about them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from apps.video_analytics import ChunkResult
from vlora.client import HeadResult
from vlora.types import FoundBox, Timings

SIDE = 28  # of an object, in pixels
WIDTH, HEIGHT, FPS = 320, 240, 20


class Mover(NamedTuple):
    """An object that moves in a straight line, in pixels per frame, and exists from frame `first` on."""

    x: float
    y: float
    dx: float
    dy: float
    label: str = "car"
    first: int = 0

    def place(self, frame: int) -> tuple[float, float] | None:
        """Its left upper corner; None if it is not wholly in the picture."""
        x, y = self.x + self.dx * (frame - self.first), self.y + self.dy * (frame - self.first)
        seen = frame >= self.first and 0 <= x <= WIDTH - SIDE and 0 <= y <= HEIGHT - SIDE
        return (x, y) if seen else None


def write_movers(path: Path, movers: Sequence[Mover], num_frames: int) -> Path:
    """Write a video of the objects on a background with a pattern."""
    draws = np.random.default_rng(0)
    coarse = draws.integers(60, 120, (HEIGHT // 8, WIDTH // 8, 3), np.uint8)
    background = cv2.resize(coarse, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
    textures = [
        cv2.resize(draws.integers(0, 255, (7, 7, 3), np.uint8), (SIDE, SIDE), interpolation=cv2.INTER_NEAREST)
        for _ in movers
    ]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), FPS, (WIDTH, HEIGHT))
    for frame in range(num_frames):
        picture = background.copy()
        for mover, texture in zip(movers, textures, strict=True):
            if (place := mover.place(frame)) is not None:
                x, y = round(place[0]), round(place[1])
                picture[y : y + SIDE, x : x + SIDE] = texture
        writer.write(picture)
    writer.release()
    return path


def head_answer(
    movers: Sequence[Mover], frame: int, seen: Callable[[Mover, int], bool] = lambda mover, frame: True
) -> HeadResult:
    """The answer of a detection head about a frame. seen: whether it finds an object there."""
    boxes = [
        FoundBox(
            label=mover.label, label_id=0, score=0.9, left=at[0], top=at[1], right=at[0] + SIDE, bottom=at[1] + SIDE
        )
        for mover in movers
        if (at := mover.place(frame)) is not None and seen(mover, frame)
    ]
    timings = Timings(
        queue_s=0,
        ttft_s=0,
        latency_s=0,
        num_prompt_tokens=1,
        num_completion_tokens=0,
        num_preemptions=0,
        steps_by_mode={},
    )
    return HeadResult(
        task="detection",
        label=f"{len(boxes)} car",
        confidence=0.9,
        labels=("car", "person"),
        boxes=tuple(boxes),
        adapter="cam",
        head="cars",
        timings=timings,
        total_s=0,
    )


def clip_result(answer: HeadResult | None, index: int = 0, start_s: float = 0.0) -> ChunkResult:
    """The result of a clip; without an answer, of one that was dropped."""
    return ChunkResult(
        source="gate",
        head="cars",
        index=index,
        start_s=start_s,
        time=datetime.datetime.now(datetime.UTC),
        latency_s=0.1,
        label="" if answer is None else answer.label,
        confidence=0.0 if answer is None else answer.confidence,
        answer=answer,
        problem="dropped" if answer is None else None,
        adapter="cam",
    )
