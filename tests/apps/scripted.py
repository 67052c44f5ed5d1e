"""What the apps read and get without a camera and a model: videos with known paths, answers, and a client."""

from __future__ import annotations

import datetime
import errno
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import cv2
import numpy as np
import pytest

from apps.video_analytics import ChunkResult, Source, find_sources
from vlora.client import Answer, HeadResult
from vlora.client.values import HeadOutcome, TokenLogprob
from vlora.errors import BadImage
from vlora.types import AdapterStatus, FoundBox, HeadSummary, Timings

TIMINGS = Timings(
    queue_s=0, ttft_s=0, latency_s=0, num_prompt_tokens=1, num_completion_tokens=0, num_preemptions=0, steps_by_mode={}
)
SIDE = 28  # of an object, in pixels
WIDTH, HEIGHT, FPS = 320, 240, 20


def file_source(path: Path) -> Source:
    (source,) = find_sources([str(path)])
    return source


def labels(count: int) -> list[str]:
    """The answers of a scripted head about the seconds of `tests.video_files.shades`."""
    return ["dark" if place % 3 else "bright" for place in range(count)]


def refuse_to_list(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be read, also where the tests run as root."""
    listed = os.scandir

    def scandir(path: Any = ".") -> Any:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)


# -- objects with known paths -----------------------------------------------------------------------------------------


class Mover(NamedTuple):
    """An object that moves in a straight line, in pixels per frame, from frame `first` on, and back after `turns`."""

    x: float
    y: float
    dx: float
    dy: float
    label: str = "car"
    first: int = 0
    turns: int = 1000

    def place(self, frame: int) -> tuple[float, float] | None:
        """Its left upper corner; None if it is not wholly in the picture."""
        way = min(frame, 2 * self.turns - frame) - self.first
        x, y = self.x + self.dx * way, self.y + self.dy * way
        seen = frame >= self.first and 0 <= x <= WIDTH - SIDE and 0 <= y <= HEIGHT - SIDE
        return (x, y) if seen else None


def write_movers(path: Path, movers: Sequence[Mover], num_frames: int) -> Path:
    """Write a video of the objects, each with its texture, on a background with a pattern."""
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


def head_result(task: str = "classification", label: str = "", **fields: Any) -> HeadResult:
    plain: dict[str, Any] = {"confidence": 0.9, "labels": ("car", "person"), "adapter": "cam", "head": "cars"}
    return HeadResult(task=task, label=label, timings=TIMINGS, total_s=0, **{**plain, **fields})


def box_of(label: str, score: float = 0.9, x: float = 0.0, y: float = 0.0) -> FoundBox:
    return FoundBox(label=label, label_id=0, score=score, left=x, top=y, right=x + SIDE, bottom=y + SIDE)


def head_answer(
    movers: Sequence[Mover], frame: int, seen: Callable[[Mover, int], bool] = lambda mover, frame: True
) -> HeadResult:
    """The answer of a detection head about a frame, in another order each time. seen: whether it finds an object."""
    places = [(mover, mover.place(frame)) for mover in movers if seen(mover, frame)][:: -1 if frame % 2 else 1]
    boxes = tuple(box_of(mover.label, 0.9, *at) for mover, at in places if at is not None)
    return head_result("detection", f"{len(boxes)} car", boxes=boxes)


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


# -- a client that answers by a picture's brightness ------------------------------------------------------------------

SHADES = {"dark": 20, "dim": 90, "grey": 140, "bright": 230}


def brightness(picture: bytes) -> float:
    decoded = cv2.imdecode(np.frombuffer(picture, np.uint8), cv2.IMREAD_COLOR)
    assert decoded is not None
    return float(decoded.mean())


def answer_of(text: str, *top: tuple[str, float]) -> Answer:
    """An answer of one token, with the most likely tokens and their probabilities."""
    scored = tuple((token, math.log(probability)) for token, probability in top)
    logprobs = (TokenLogprob(token=text, logprob=scored[0][1], top=scored),) if scored else ()
    plain: dict[str, Any] = {"finish_reason": "stop", "adapter": None, "timings": TIMINGS, "total_s": 0.0}
    return Answer(text=text, logprobs=logprobs, num_prompt_tokens=1, num_completion_tokens=1, **plain)


def adapter_status(name: str, version: str, *heads: tuple[str, str, tuple[str, ...], int]) -> AdapterStatus:
    """heads: name, task, labels and number of frames of each."""
    made = [
        HeadSummary(name=head, task=task, labels=its, prompt="?", num_frames=frames)
        for head, task, its, frames in heads
    ]
    plain: dict[str, Any] = {"rank": 1, "num_bytes": 1, "resident": True, "mergeable": True, "merge_fidelity": 1.0}
    return AdapterStatus(name=name, version=version, touches_vision=False, heads=tuple(made), **plain)


class ScriptedClient:
    """The calls of `Client` that retrieval uses.

    Captions name a picture's shade. A question "Is there SHADE?" is answered yes with a probability that falls with the
    distance to the shade. asked: questions with the number of frames, in the order they arrive. fails_at: the number of
    the caption, from 0, that fails as a picture would. version_once_loaded: of the adapter after the first answer. The
    embedding of a picture is an angle that grows with its brightness.
    """

    def __init__(self, model: str = "scripted", version: str = "v1") -> None:
        self.model, self.version = model, version
        self.asked: list[tuple[str, int]] = []
        self.fails_at: int | None = None
        self.num_embedded = 0
        self.version_once_loaded: str | None = None

    def stats(self) -> Any:
        return SimpleNamespace(model=self.model)

    def adapters(self) -> tuple[AdapterStatus, ...]:
        night, moves = ("night", "classification", ("day", "night"), 1), ("moves", "action", ("moves", "stands"), 3)
        return (adapter_status("cam", self.version, night, moves),)

    def ask_heads(self, frames: Sequence[bytes], heads: Sequence[tuple[str, str]]) -> tuple[HeadOutcome, ...]:
        self.asked += [(head, len(frames)) for _, head in heads]
        self.version = self.version_once_loaded or self.version
        found = {"night": "night" if brightness(frames[0]) < 100 else "day", "moves": "stands"}
        answers = [head_result(label=found[head], confidence=0.75, adapter=name, head=head) for name, head in heads]
        return tuple(HeadOutcome(answer=answer) for answer in answers)

    def generate(self, question: str, frames: Sequence[bytes], adapter: str | None = None, **sampling: Any) -> Answer:
        self.asked.append((question, len(frames)))
        light = brightness(frames[0])
        if self.fails_at is not None and len(self.asked) > self.fails_at:
            raise BadImage("image 1 cannot be read")
        shade = min(SHADES, key=lambda name: abs(SHADES[name] - light))
        return answer_of(f"a {shade} picture", ("a", 0.5))

    def score(self, question: str, documents: Sequence[Sequence[bytes]], adapter: str | None = None) -> tuple[float]:
        (frames,) = documents
        self.asked.append((question, len(frames)))
        wanted = SHADES[question.removeprefix("Is there ").rstrip("?")]
        return (0.9 - abs(brightness(frames[0]) - wanted) / 300,)

    def embed(self, documents: Sequence[Sequence[bytes]], *, pooling: str) -> tuple[tuple[float, float], ...]:
        self.num_embedded += len(documents)
        angles = [brightness(frames[0]) / 85 for frames in documents]
        return tuple((math.cos(angle), math.sin(angle)) for angle in angles)
