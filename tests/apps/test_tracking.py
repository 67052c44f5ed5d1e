"""Objects with known paths keep their numbers between detections, beside missed detections, gaps and other objects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import msgspec
import numpy as np
import pytest

from apps.video_analytics import ClipShape, read_clips, tracking
from apps.video_analytics.tracking import Edges, ObjectTracker, TrackedBox, TrackedFrame
from tests.apps.scripted import FPS, SIDE, Mover, clip_result, file_source, head_answer, write_movers

EVERY = 5  # the head answers about every fifth frame
CROSSING = (
    Mover(10, 20, 5, 0),  # moves 25 pixels, almost its width, between two detections
    Mover(280, 90, -4, 0),
    Mover(20, 160, 3, 0.5),
    Mover(100, 40, 0, 2),  # crosses the paths of others
    Mover(20, 200, 6, 0, first=20),  # enters later
)
BLIND = CROSSING[2]


def iou(box: TrackedBox, x: float, y: float) -> float:
    width = min(box.right, x + SIDE) - max(box.left, x)
    height = min(box.bottom, y + SIDE) - max(box.top, y)
    shared = max(0.0, width) * max(0.0, height)
    return shared / (SIDE**2 + (box.right - box.left) * (box.bottom - box.top) - shared)


class Scene(NamedTuple):
    """What differs from a video whose clips are all answered.

    seen: whether the head finds an object in a frame. lost, unanswered: clips that never arrive, or without an answer.
    shift_s: by which the clips' times are wrong, in turns. blind: calls of the optical flow that find nothing.
    """

    seen: Callable[[Mover, int], bool] = lambda mover, frame: True
    lost: Container[int] = ()
    unanswered: Container[int] = ()
    shift_s: tuple[float, ...] = (0.0,)
    blind: Container[int] = ()


def followed(
    path: Path, movers: Sequence[Mover], scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> tuple[ObjectTracker, list[TrackedFrame]]:
    flow, num_calls = tracking.move, 0

    def move(before: tracking.Grey, now: tracking.Grey, boxes: Sequence[Edges]) -> list[Edges | None]:
        nonlocal num_calls
        num_calls += 1
        return [None] * len(boxes) if num_calls in scene.blind else flow(before, now, boxes)

    monkeypatch.setattr(tracking, "move", move)
    tracker, frames = ObjectTracker(), list[TrackedFrame]()
    for _, clip in read_clips(file_source(path), [ClipShape(1, FPS / EVERY, every_frame=True)]):
        if clip.index not in scene.lost:
            answer = None if clip.index in scene.unanswered else head_answer(movers, clip.index * EVERY, scene.seen)
            start_s = max(0.0, clip.start_s + scene.shift_s[clip.index % len(scene.shift_s)])
            clip = msgspec.structs.replace(clip, start_s=start_s)
            frames += tracker.follow(clip, clip_result(answer, clip.index, start_s))
    return tracker, frames


def numbers(
    movers: Sequence[Mover], frames: Sequence[TrackedFrame], by_index: bool = False
) -> tuple[dict[Mover, set[int]], float]:
    """The numbers of the boxes at each object, and the share of its frames in which a box is there.

    A box is at an object if their IoU is at least a half. Frames before the first detection of an object do not count.
    """
    ids: dict[Mover, set[int]] = defaultdict(set)
    there = total = 0
    for frame in frames:
        number = frame.index if by_index else round(frame.time_s * FPS)
        for mover in movers:
            at = mover.place(number)
            if at is None or number < -(-mover.first // EVERY) * EVERY:
                continue
            best = max(frame.boxes, key=lambda box: iou(box, *at), default=None)
            total += 1
            if best is not None and iou(best, *at) >= 0.5:
                there += 1
                ids[mover].add(best.id)
    return ids, there / total


@pytest.fixture(scope="module")
def crossing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_movers(tmp_path_factory.mktemp("videos") / "crossing.mp4", CROSSING, 60)


SCENES = {
    "missed detections": (Scene(seen=lambda mover, frame: mover != BLIND or frame not in (20, 25)), 60, 0.95),
    "a gap of clips": (Scene(lost=(5,)), 55, 0.85),
    "clips without an answer": (Scene(unanswered=(3, 4)), 60, 0.92),
    "clips of a camera that were read early or late": (Scene(shift_s=(-0.12, 0.0, 0.12)), 60, 0.95),
    "frames in which the flow finds nothing": (Scene(blind=range(27, 30)), 60, 0.9),
}


@pytest.mark.parametrize(("scene", "num_frames", "least"), SCENES.values(), ids=list(SCENES))
def test_objects_keep_their_numbers(
    crossing: Path, monkeypatch: pytest.MonkeyPatch, scene: Scene, num_frames: int, least: float
) -> None:
    frames = followed(crossing, CROSSING, scene, monkeypatch)[1]
    ids, there = numbers(CROSSING, frames, by_index=num_frames == 60)
    assert len(frames) == num_frames and there > least
    assert all(len(each) == 1 for each in ids.values()), ids


def test_objects_are_at_their_places_on_every_frame(crossing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, frames = followed(crossing, CROSSING, Scene(), monkeypatch)
    assert [frame.index for frame in frames] == list(range(60))
    assert [frame.time_s for frame in frames] == pytest.approx([number / FPS for number in range(60)])
    ids, there = numbers(CROSSING, frames)
    assert all(len(each) == 1 for each in ids.values()) and there > 0.95
    assert len(set.union(*ids.values())) == len(CROSSING)
    detected = [frame.index for frame in frames if any(box.detected for box in frame.boxes)]
    assert detected == list(range(0, 60, EVERY)), "detections are on answered frames only"
    tracker.close()
    late = {track.id: track for track in tracker.ended}
    assert sorted(late) == [1, 2, 3, 4, 5]
    assert (late[5].first_s, late[5].detections) == (20 / FPS, 8) and late[5].frames >= 38
    # Negative control: boxes that stay where they were detected are not at the objects.
    monkeypatch.undo()
    monkeypatch.setattr(tracking, "move", lambda before, now, boxes: list(boxes))
    ids, there = numbers(CROSSING, followed(crossing, CROSSING, Scene(), monkeypatch)[1])
    assert any(len(each) > 1 for each in ids.values()) and there < 0.8


def test_an_object_ends_after_three_answers_without_it(crossing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(seen=lambda mover, frame: mover != BLIND or frame < 20)
    tracker, frames = followed(crossing, CROSSING, scene, monkeypatch)
    (track,) = [track for track in tracker.ended if track.detections == 4 and track.last_s > 1]
    assert track.last_s == pytest.approx(30 / FPS)
    assert all(box.id != track.id for frame in frames[31:] for box in frame.boxes)


PASSING = (Mover(20, 100, 5, 0), Mover(250, 112, -5, 0), Mover(20, 20, 4, 0, "car"), Mover(34, 20, 4, 0, "person"))


def test_objects_that_overlap_keep_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of one label that pass each other, and two labels that travel together."""
    path = write_movers(tmp_path / "passing.mp4", PASSING, 45)
    frames = followed(path, PASSING, Scene(), monkeypatch)[1]
    for pair in (frames[:20], frames[27:]):  # apart before and after
        ids = numbers(PASSING, pair)[0]
        assert ids == {mover: {number} for number, mover in enumerate(PASSING, 1)}
    assert {(box.id, box.label) for frame in frames for box in frame.boxes} == {
        *((number, "car") for number in (1, 2, 3)),
        (4, "person"),
    }


def test_a_replaced_clip_is_a_gap(crossing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flow does not join the frames around it, also where the times of a camera's clips vary."""
    flow, calls = tracking.move, list[None]()

    def counted(before: tracking.Grey, now: tracking.Grey, boxes: Sequence[Edges]) -> list[Edges | None]:
        calls.append(None)
        return flow(before, now, boxes)

    monkeypatch.setattr(tracking, "move", counted)
    tracker = ObjectTracker()
    for _, clip in read_clips(file_source(crossing), [ClipShape(1, FPS / EVERY, every_frame=True)]):
        if clip.index == 5:
            clip = msgspec.structs.replace(clip, shown=(), frames=(), problem="replaced")
            assert tracker.follow(clip, clip_result(None, clip.index, clip.start_s)) == []
        elif clip.index < 7:
            early = msgspec.structs.replace(clip, start_s=max(0.0, clip.start_s - 0.05 * (clip.index == 6)))
            tracker.follow(early, clip_result(head_answer(CROSSING, clip.index * EVERY), clip.index))
    assert len(calls) == 6 * EVERY - 2, "all frames but the first, and the first after the gap"


def test_pictures_of_several_sizes_are_followed_without_flow(tmp_path: Path) -> None:
    sizes = [(320, 240), (320, 240), (640, 480), (160, 120)]
    for number, (width, height) in enumerate(sizes):
        picture = np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)
        cv2.imwrite(str(tmp_path / f"{number}.png"), picture)
    tracker, frames = ObjectTracker(), list[TrackedFrame]()
    for _, clip in read_clips(file_source(tmp_path), [ClipShape(1, 2, every_frame=True)]):
        frames += tracker.follow(clip, clip_result(head_answer((Mover(20, 20, 0, 0),), 0), clip.index, clip.start_s))
    assert [(frame.width, frame.height) for frame in frames] == sizes and all(frame.boxes for frame in frames)
