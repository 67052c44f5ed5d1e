"""Objects with known paths keep their numbers between detections, beside missed detections and gaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest

from apps.video_analytics import ClipShape, read_clips, tracking
from apps.video_analytics.optical_flow import Edges
from apps.video_analytics.tracking import ObjectTracker, TrackedBox, TrackedFrame
from tests.apps.moving_objects import FPS, SIDE, Mover, clip_result, head_answer, write_movers
from tests.apps.test_video_analytics import file_source

EVERY = 5  # the head answers about every fifth frame
CROSSING = (
    Mover(10, 20, 5, 0),  # moves 25 pixels, almost its width, between two detections
    Mover(280, 90, -4, 0),
    Mover(20, 160, 3, 0.5),
    Mover(100, 40, 0, 2),  # crosses the paths of others
    Mover(20, 200, 6, 0, first=20),  # enters later
)


def iou(box: TrackedBox, x: float, y: float) -> float:
    width = min(box.right, x + SIDE) - max(box.left, x)
    height = min(box.bottom, y + SIDE) - max(box.top, y)
    shared = max(0.0, width) * max(0.0, height)
    return shared / (SIDE**2 + (box.right - box.left) * (box.bottom - box.top) - shared)


def followed(
    path: Path,
    movers: Sequence[Mover],
    *,
    seen: Callable[[Mover, int], bool] = lambda mover, frame: True,
    lost: Sequence[int] = (),
) -> tuple[ObjectTracker, list[TrackedFrame]]:
    """Follow the objects of a video.

    Args:
        seen: whether the head finds an object in a frame.
        lost: clips that never arrive.
    """
    tracker = ObjectTracker()
    frames: list[TrackedFrame] = []
    shape = ClipShape(1, FPS / EVERY, every_frame=True)
    for _, clip in read_clips(file_source(path), [shape]):
        if clip.index not in lost:
            answer = head_answer(movers, clip.index * EVERY, seen)
            frames += tracker.follow(clip, clip_result(answer, clip.index, clip.start_s))
    return tracker, frames


def numbers(movers: Sequence[Mover], frames: Sequence[TrackedFrame]) -> tuple[dict[Mover, set[int]], float]:
    """The numbers of the boxes at each object, and the share of its frames in which a box is there.

    A box is at an object if their IoU is at least a half. Frames before the first detection of an object do not count.
    """
    ids: dict[Mover, set[int]] = defaultdict(set)
    there = total = 0
    for frame in frames:
        number = round(frame.time_s * FPS)
        for mover in movers:
            at = mover.place(number)
            first_answer = -(-mover.first // EVERY) * EVERY
            if at is None or number < first_answer:
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


def test_objects_keep_their_numbers_on_every_frame(crossing: Path) -> None:
    tracker, frames = followed(crossing, CROSSING)
    assert [frame.index for frame in frames] == list(range(60))
    assert [frame.time_s for frame in frames] == pytest.approx([number / FPS for number in range(60)])
    ids, there = numbers(CROSSING, frames)
    assert all(len(each) == 1 for each in ids.values()), ids
    assert len(set.union(*ids.values())) == len(CROSSING) and there > 0.95
    detected = [frame.index for frame in frames if any(box.detected for box in frame.boxes)]
    assert detected == list(range(0, 60, EVERY)), "detections are on answered frames only"
    tracker.close()
    assert sorted(track.id for track in tracker.ended) == [1, 2, 3, 4, 5]
    late = tracker.ended[[track.id for track in tracker.ended].index(5)]
    assert (late.first_s, late.detections) == (20 / FPS, 8) and late.frames >= 38


def test_without_flow_fast_objects_lose_their_numbers(crossing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: boxes that stay where they were detected are not at the objects."""
    monkeypatch.setattr(tracking, "move", lambda before, now, boxes: list(boxes))
    ids, there = numbers(CROSSING, followed(crossing, CROSSING)[1])
    assert any(len(each) > 1 for each in ids.values()) and there < 0.8


def test_boxes_without_flow_move_as_predicted(crossing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = tracking.move

    def lost(before: tracking.Grey, now: tracking.Grey, boxes: Sequence[Edges]) -> list[Edges | None]:
        calls.append(None)
        return [None] * len(boxes) if 26 <= len(calls) <= 28 else flow(before, now, boxes)

    calls: list[None] = []
    monkeypatch.setattr(tracking, "move", lost)
    ids, there = numbers(CROSSING, followed(crossing, CROSSING)[1])
    assert all(len(each) == 1 for each in ids.values()) and there > 0.9


def test_missed_detections_do_not_end_an_object(crossing: Path) -> None:
    blind = CROSSING[2]
    _, frames = followed(crossing, CROSSING, seen=lambda mover, frame: mover != blind or frame not in (20, 25))
    ids, there = numbers(CROSSING, frames)
    assert len(ids[blind]) == 1 and there > 0.95


def test_an_object_ends_after_three_answers_without_it(crossing: Path) -> None:
    gone = CROSSING[2]
    tracker, frames = followed(crossing, CROSSING, seen=lambda mover, frame: mover != gone or frame < 20)
    (track,) = [track for track in tracker.ended if track.detections == 4 and track.last_s > 1]
    assert track.last_s == pytest.approx(30 / FPS)
    assert all(box.id != track.id for frame in frames[31:] for box in frame.boxes)


def test_a_gap_of_clips_keeps_the_numbers(crossing: Path) -> None:
    _, frames = followed(crossing, CROSSING, lost=(5,))
    assert len(frames) == 55
    ids, _ = numbers(CROSSING, frames)
    assert all(len(each) == 1 for each in ids.values()), ids


def test_a_replaced_clip_is_a_gap(crossing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flow does not join the frames around it, also where the times of a camera's clips vary."""
    flow = tracking.move
    calls: list[None] = []

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
    tracker = ObjectTracker()
    frames: list[TrackedFrame] = []
    for _, clip in read_clips(file_source(tmp_path), [ClipShape(1, 2, every_frame=True)]):
        frames += tracker.follow(clip, clip_result(head_answer((Mover(20, 20, 0, 0),), 0), clip.index, clip.start_s))
    assert [(frame.width, frame.height) for frame in frames] == sizes
    assert all(frame.boxes for frame in frames)


def test_labels_are_followed_apart(tmp_path: Path) -> None:
    together = (Mover(20, 100, 4, 0, "car"), Mover(20 + SIDE / 2, 100, 4, 0, "person"))
    path = write_movers(tmp_path / "pair.mp4", together, 30)
    _, frames = followed(path, together)
    assert {(box.id, box.label) for frame in frames for box in frame.boxes} == {(1, "car"), (2, "person")}


def test_a_clip_without_an_answer_is_followed_by_flow(crossing: Path) -> None:
    tracker = ObjectTracker()
    frames: list[TrackedFrame] = []
    for _, clip in read_clips(file_source(crossing), [ClipShape(1, FPS / EVERY, every_frame=True)]):
        answer = None if clip.index in (3, 4) else head_answer(CROSSING, clip.index * EVERY)
        frames += tracker.follow(clip, clip_result(answer, clip.index, clip.start_s))
    ids, there = numbers(CROSSING[:4], frames)
    assert all(len(each) == 1 for each in ids.values()) and there > 0.95


def test_clips_of_a_camera_that_overlap_are_no_gap(crossing: Path) -> None:
    """The time at which a camera's clip was read varies by a few frames."""
    tracker = ObjectTracker()
    frames: list[TrackedFrame] = []
    for _, clip in read_clips(file_source(crossing), [ClipShape(1, FPS / EVERY, every_frame=True)]):
        late = msgspec.structs.replace(clip, start_s=max(0.0, clip.start_s + (-0.12, 0.0, 0.12)[clip.index % 3]))
        frames += tracker.follow(late, clip_result(head_answer(CROSSING, clip.index * EVERY), clip.index))
    frames = [msgspec.structs.replace(frame, time_s=frame.index / FPS) for frame in frames]
    ids, there = numbers(CROSSING, frames)
    assert all(len(each) == 1 for each in ids.values()) and there > 0.95
