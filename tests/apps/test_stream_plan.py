"""`vlora stream plan.yaml`: errors with their line, streams by rate, tracks, and questions at events."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from apps.video_analytics import ChunkResult, ClipShape, read_clips
from apps.video_analytics.plan.event_questions import EventResult
from apps.video_analytics.plan.events import EventWatch, Happened, holds
from apps.video_analytics.plan.plan_file import check_server, check_sources, read_plan
from apps.video_analytics.plan.run_plan import PlanCounts, camera_groups, lines, run_plan, summarize
from apps.video_analytics.plan.schema import Condition, EventPlan
from apps.video_analytics.tracking import ObjectTracker
from tests.apps.folders import refuse_to_list
from tests.apps.moving_objects import FPS, HEIGHT, SIDE, WIDTH, Mover, clip_result, head_answer, write_movers
from tests.apps.test_video_analytics import file_source, labels
from tests.server.running import Running, running_server
from tests.video_files import shades, write_video
from vlora.client import Client
from vlora.errors import BadImage, BadPlan, StepFailed

CAMERA = """
cameras:
  - name: gate
    source: gate.mp4
    tasks:
      - head: cam/one
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server({"cam": {"night": 2, "one": 1, "detection": 1, "counting": 1}, "zoo": {}}) as running:
        yield running


def plan(folder: Path, text: str) -> Path:
    path = folder / "plan.yaml"
    path.write_text(text.strip() + "\n")
    return path


def ran(client: Client, path: Path, **options: Any) -> tuple[PlanCounts, list[ChunkResult], list[EventResult]]:
    results: list[ChunkResult] = []
    events: list[EventResult] = []
    counts = run_plan(client, read_plan(path), on_result=results.append, on_event=events.append, **options)
    return counts, results, events


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[]", "line 1: a plan is a mapping with the field `cameras`, found list"),
        ("cameras: []", "line 1, field `cameras`: has 0 items; it must have at least 1"),
        ("cameras:\n  - name: a\n    name: b", "line 3: not YAML: duplicate field `name`"),
        (
            CAMERA + "        fps: 2",
            "line 6, field `cameras[0].tasks[0].fps`: is not a known field; check its spelling",
        ),
        (CAMERA + "        rate: 0", "line 6, field `cameras[0].tasks[0].rate`: is 0; it must be above 0"),
        (CAMERA + "        max_tokens: 5", "field `cameras[0].tasks[0]`: `max_tokens` is for a `question`"),
        (CAMERA + "      - question: what ?\n        track: true", "`track` is for a detection `head`"),
        (CAMERA + "      - track: true", "needs exactly one of `head` (ADAPTER/HEAD) and `question`"),
        (CAMERA + "      - head: one", "line 6, field `cameras[0].tasks[1].head`: is 'one'; it must match the pattern"),
        (CAMERA + "      - head: cam/one", "line 6, field `cameras[0].tasks[1]`: cam/one is given more than once"),
        (
            CAMERA + CAMERA.replace("cameras:\n", "").replace("gate\n", "Gate\n"),
            "line 7, field `cameras[1].name`: two cameras are named 'Gate'; names must be unique",
        ),
        (
            CAMERA + "    events:\n      - name: x\n        when: {head: cam/two, label: a}",
            "line 8, field `cameras[0].events[0].when.head`: no task of camera 'gate' is 'cam/two'; its heads: cam/one",
        ),
        (
            CAMERA + "    events:\n      - name: x\n        when: {head: cam/one, crosses: [[0, 0], [1, 1]]}",
            "`cameras[0].events[0].when.crosses`: needs tracked objects; add `track: true` to task cam/one",
        ),
        (
            CAMERA + "    events:\n      - name: x\n        when: {head: cam/one}",
            "line 8, field `cameras[0].events[0].when`: has no `label`, `confidence`, `over`, `under`, `crosses` or",
        ),
        (
            CAMERA + "    events:\n      - name: x\n        when: {head: cam/one, over: 1, crosses: [[0, 0], [1, 1]]}",
            "has several of `over` or `under`, `crosses` and `enters`; an event needs one of them",
        ),
        (
            CAMERA + "    events:\n      - name: x\n        when: {head: cam/one, enters: [[0, 0], [1, 2], [0, 1]]}",
            "line 8, field `cameras[0].events[0].when.enters[1][1]`: is 2; it must be at most 1",
        ),
    ],
)
def test_errors_name_line_and_field(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(BadPlan) as raised:
        read_plan(plan(tmp_path, text))
    assert error in str(raised.value), str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_folder_is_one_source_or_refused(tmp_path: Path) -> None:
    (tmp_path / "gate.mp4").mkdir()
    with pytest.raises(BadPlan, match=r"line 3, field `cameras\[0\].source`: folder '.*' contains no video and no"):
        read_plan(plan(tmp_path, CAMERA))
    (tmp_path / "gate.mp4" / "a.mp4").touch()
    assert read_plan(plan(tmp_path, CAMERA)).plan.cameras[0].source == str(tmp_path / "gate.mp4")
    (tmp_path / "gate.mp4" / "old").mkdir()
    (tmp_path / "gate.mp4" / "old" / "b.png").touch()
    with pytest.raises(BadPlan, match=r"a camera is one video, .* has 1 video and pictures$"):
        read_plan(plan(tmp_path, CAMERA))


def test_a_folder_that_cannot_be_read_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gate.mp4").mkdir()

    refuse_to_list(tmp_path / "gate.mp4", monkeypatch)
    with pytest.raises(
        BadPlan, match=r"line 3, field `cameras\[0\].source`: cannot read folder '.*': Permission denied$"
    ):
        read_plan(plan(tmp_path, CAMERA))


def test_the_check_finds_missing_files_without_a_server(tmp_path: Path) -> None:
    file = read_plan(plan(tmp_path, CAMERA))
    with pytest.raises(BadPlan, match=r"line 3, field `cameras\[0\].source`: no such file or folder: '.*gate.mp4'"):
        check_sources(file)
    camera_number = read_plan(plan(tmp_path, CAMERA.replace("gate.mp4", "0")))
    check_sources(camera_number)
    assert camera_number.plan.cameras[0].source == "0"


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ("      - head: nowhere/one", "line 6, field `cameras[0].tasks[1].head`: no adapter named 'nowhere'"),
        ("      - head: cam/two", "tasks[1].head`: adapter 'cam' has no head 'two'; its heads: "),
        ('      - {question: "what ?", adapter: zo}', "tasks[1].adapter`: no adapter named 'zo'; registered: cam, zoo"),
        ("        track: true", "tasks[0].track`: only objects of a detection can be tracked; head cam/one is for"),
        (
            "    events:\n      - {name: x, when: {head: cam/one, label: dark}, ask: {question: why, adapter: zo}}",
            "line 7, field `cameras[0].events[0].ask.adapter`: no adapter named 'zo'",
        ),
        (
            "    events:\n      - {name: x, when: {head: cam/one, label: grey}}",
            "events[0].when.label`: head cam/one has no label 'grey'; its labels: dark, bright",
        ),
        (
            "    events:\n      - {name: x, when: {head: cam/one, over: 1}}",
            "events[0].when`: head cam/one does not count; `over` and `under` are for counting and detection",
        ),
    ],
)
def test_what_a_server_does_not_have_is_named_with_its_line(
    client: Client, tmp_path: Path, more: str, error: str
) -> None:
    file = read_plan(plan(tmp_path, CAMERA + more))
    with pytest.raises(BadPlan) as raised:
        run_plan(client, file, out=tmp_path / "out")
    assert error in str(raised.value), str(raised.value)
    assert not list((tmp_path / "out").iterdir()), "no camera was started"


# -- what is asked ----------------------------------------------------------------------------------------------------

FULL = """
out: results
cameras:
  - name: gate
    source: gate.mp4
    rate: 2
    tasks:
      - head: cam/detection
        track: true
      - head: cam/one
      - head: cam/night
        rate: 1
      - {question: "say:hello", adapter: zoo, rate: 0.5, max_tokens: 3}
    events:
      - name: bright
        when: {head: cam/one, label: bright, confidence: 0.6}
        ask: {question: "say:sun", adapter: cam, max_tokens: 8}
"""


def test_the_summary_counts_what_is_asked_per_second(tmp_path: Path) -> None:
    summary = summarize(read_plan(plan(tmp_path, FULL)).plan)
    assert (summary.heads_per_s, summary.texts_per_s, summary.max_tokens_per_s) == (5.0, 0.5, 1.5)
    assert [" ".join(line.split()) for line in lines(summary)] == [
        f"camera gate: {tmp_path}/gate.mp4",
        "cam/detection 2 answers per second, objects followed on every frame",
        "cam/one 2 answers per second",
        "cam/night 1 answer per second",
        '"say:hello" of zoo 0.5 answers per second, each of up to 3 tokens',
        'event bright: cam/one is bright at 60%; asks "say:sun" of cam',
        "1 camera: 5.5 answers per second, 5 of heads, 0.5 in words of up to 1.5 tokens; 1 event in addition",
    ]


def test_the_summary_has_no_password(tmp_path: Path) -> None:
    text = CAMERA.replace("gate.mp4", "rtsp://admin:secret@cam/main?channel=1&password=secret")
    summary = summarize(read_plan(plan(tmp_path, text)).plan)
    assert summary.cameras[0].source == "rtsp://cam/main?channel=1"
    assert next(lines(summary)) == "camera gate: rtsp://cam/main?channel=1"


def test_tasks_of_one_rate_and_size_share_a_stream(client: Client, tmp_path: Path) -> None:
    (camera,) = read_plan(plan(tmp_path, FULL)).plan.cameras
    groups = camera_groups(camera, client.adapters())
    assert [(group.shape, [asked.name for asked in group.asked]) for group in groups] == [
        (ClipShape(1, 2, every_frame=True), ["cam-detection", "cam-one"]),
        (ClipShape(2, 2), ["cam-night"]),
        (ClipShape(1, 0.5), ["zoo-say-hello"]),
    ]


def test_a_plan_writes_answers_tracks_and_events(client: Client, tmp_path: Path) -> None:
    write_video(tmp_path / "gate.mp4", shades(6))  # bright in seconds 0 and 3
    counts, results, events = ran(client, plan(tmp_path, FULL))
    assert counts.answers == {
        "gate.cam-detection": 12,
        "gate.cam-one": 12,
        "gate.cam-night": 6,
        "gate.zoo-say-hello": 3,
    }
    assert counts.events == {"gate": 2} and [result.problem for result in results if result.problem] == []
    out = tmp_path / "results"
    names = [f"gate.{name}" for name in ("cam-detection", "cam-night", "cam-one", "zoo-say-hello")]
    files = {f"{name}.{kind}" for name in names for kind in ("csv", "jsonl", "webm")}
    files |= {"gate.cam-detection.tracks.jsonl", "gate.cam-detection.tracks.csv", "gate.events.jsonl", "gate.events"}
    assert {file.name for file in out.iterdir()} == files
    night = [json.loads(line)["label"] for line in (out / "gate.cam-night.jsonl").read_text().splitlines()]
    assert night == labels(6)

    rows = [json.loads(line) for line in (out / "gate.events.jsonl").read_text().splitlines()]
    assert [(row["event"], row["start_s"], row["label"], row["text"]["text"]) for row in rows] == [
        ("bright", 0.0, "bright", "sun"),
        ("bright", 3.0, "bright", "sun"),
    ]
    assert [event.picture for event in events] == ["gate.events/0001-bright.jpg", "gate.events/0002-bright.jpg"]
    picture = cv2.imread(str(out / "gate.events" / "0002-bright.jpg"))
    assert picture is not None and picture.mean() > 200

    tracked = [json.loads(line) for line in (out / "gate.cam-detection.tracks.jsonl").read_text().splitlines()]
    assert [frame["index"] for frame in tracked] == list(range(60)), "a line for every frame of the video"
    answered = [json.loads(line) for line in (out / "gate.cam-detection.jsonl").read_text().splitlines()]
    for row in answered:
        first = tracked[5 * row["index"]]["boxes"]
        assert [(box["id"], box["detected"]) for box in first if box["detected"]] == [(row["tracks"][0], True)]
    with (out / "gate.cam-detection.tracks.csv").open(newline="") as file:
        lives = list(csv.DictReader(file))
    assert {int(life["id"]) for life in lives} == {box["id"] for frame in tracked for box in frame["boxes"]}
    assert sum(counts.objects["gate.cam-detection"].values()) == len({life["id"] for life in lives})
    capture = cv2.VideoCapture(str(out / "gate.cam-detection.webm"))
    assert (capture.get(cv2.CAP_PROP_FPS), capture.get(cv2.CAP_PROP_FRAME_COUNT)) == (10, 60)


# -- events -----------------------------------------------------------------------------------------------------------


def event(**when: Any) -> EventPlan:
    pause_s = when.pop("pause_s", 0.0)
    return EventPlan(name="x", when=Condition(head="cam/cars", **when), pause_s=pause_s)


def happened(watch: EventPlan, movers: Sequence[Mover], path: Path) -> list[Happened]:
    """The events in a video; the head finds its objects in every fifth frame."""
    tracker, found, seen = ObjectTracker(), EventWatch(watch), []
    for _, clip in read_clips(file_source(path), [ClipShape(1, FPS / 5, every_frame=True)]):
        result = clip_result(head_answer(movers, 5 * clip.index), clip.index, clip.start_s)
        seen += found.see(clip, result, tracker.follow(clip, result))
    return seen


PASSING = (
    Mover(20, 40, 5, 0, "car"),
    Mover(250, 150, -4, 0, "car"),
    Mover(20, 200, 4, 0, "person"),
    Mover(20, 100, 1, 0, "car"),  # does not reach the middle
)


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_movers(tmp_path_factory.mktemp("videos") / "passing.mp4", PASSING, 50)


def test_each_object_that_crosses_a_line_is_an_event_of_its_frame(passing: Path) -> None:
    line = ((0.5, 0.0), (0.5, 1.0))
    found = happened(event(crosses=line, label="car"), PASSING, passing)
    assert [each.track for each in found] == [1, 2], "the person and the slow car are no events"
    for each, mover in zip(found, PASSING[:2], strict=True):
        crossing = (WIDTH / 2 - SIDE / 2 - mover.x) / mover.dx / FPS
        assert each.time_s == pytest.approx(crossing, abs=1.5 / FPS)
        picture = cv2.imdecode(np.frombuffer(each.picture, np.uint8), cv2.IMREAD_COLOR)
        assert picture is not None and picture.shape == (HEIGHT, WIDTH, 3)
    assert len(happened(event(crosses=line), PASSING, passing)) == 3
    assert happened(event(crosses=((0.5, 0.0), (0.5, 0.1))), PASSING, passing) == [], "a line above all paths"


def test_each_object_that_enters_an_area_is_an_event_once(passing: Path) -> None:
    area = ((0.4, 0.0), (0.6, 0.0), (0.6, 0.5), (0.4, 0.5))
    (found,) = happened(event(enters=area), PASSING, passing)
    assert found.track == 1 and found.time_s == pytest.approx((0.4 * WIDTH - SIDE / 2 - 20) / 5 / FPS, abs=1.5 / FPS)


def test_a_condition_on_an_answer_happens_when_it_begins_to_hold(passing: Path) -> None:
    """Seven, three, seven objects and so on; an answer that is missing changes nothing."""
    clips = [clip for _, clip in read_clips(file_source(passing), [ClipShape(1, 4)])][:7]
    many, few = tuple(PASSING) * 2, PASSING[:3]
    answers = [few, many, None, many, few, many, many]
    for pause_s, times in ((0.0, [0.25, 1.25]), (2.0, [0.25])):
        watch = EventWatch(event(over=3, pause_s=pause_s))
        found = []
        for clip, movers in zip(clips, answers, strict=True):
            result = clip_result(None if movers is None else head_answer(movers, 0), clip.index, clip.start_s)
            found += watch.see(clip, result, [])
        assert [(each.time_s, each.count) for each in found] == [(time, len(many)) for time in times]
        assert found[0].picture == clips[1].frames[-1]


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ({"label": "car"}, True),
        ({"label": "bus"}, False),
        ({"label": "car", "confidence": 0.95}, False),
        ({"confidence": 0.9}, True),
        ({"over": 3}, True),
        ({"over": 3, "confidence": 0.95}, False),
        ({"over": 2, "label": "car"}, True),
        ({"over": 3, "label": "car"}, False),
        ({"under": 1, "label": "bus"}, True),
        ({"over": 1, "under": 4}, False),
    ],
)
def test_conditions_on_detected_objects(when: dict[str, Any], expected: bool) -> None:
    assert holds(Condition(head="cam/cars", **when), head_answer(PASSING, 0)) is expected


def test_a_question_that_fails_is_recorded_and_the_streams_go_on(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_video(tmp_path / "gate.mp4", shades(4))

    def refuse(*_: object, **__: object) -> None:
        raise StepFailed("the step failed")

    monkeypatch.setattr(client, "generate", refuse)
    counts, _, events = ran(client, plan(tmp_path, FULL))
    assert [each.problem for each in events] == ["the step failed"] * 2 and counts.answers["gate.cam-one"] == 8


def test_a_flood_of_events_is_recorded_without_questions(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_video(tmp_path / "gate.mp4", [20, 230] * 12, fps=2)
    text = CAMERA + "    events:\n      - name: x\n        when: {head: cam/one, label: bright}\n"
    text += '        ask: {question: "say:sun"}'
    opened = threading.Event()
    generate = client.generate
    monkeypatch.setattr(client, "generate", lambda *args, **kind: opened.wait(20) and generate(*args, **kind))

    def on_result(result: ChunkResult) -> None:
        if result.index == 23:
            opened.set()

    events: list[EventResult] = []
    run_plan(client, read_plan(plan(tmp_path, text)), on_result=on_result, on_event=events.append)
    refused = [each for each in events if each.problem]
    assert len(events) == 12 and 3 <= len(refused) <= 4
    assert refused[0].problem == "not asked: 8 questions of earlier events wait for their answers"


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_camera_that_fails_is_one_line_and_the_others_go_on(client: Client, tmp_path: Path) -> None:
    """A video without frames, and a file that does not exist, beside a good one."""
    write_video(tmp_path / "gate.mp4", shades(3))
    write_video(tmp_path / "empty.mp4", [])
    each = CAMERA.replace("cameras:\n", "")
    text = CAMERA + each.replace("gate", "empty") + each.replace("gate", "gone")
    said: list[str] = []
    results: list[ChunkResult] = []
    with pytest.raises(BadImage, match=r"empty\.mp4"):
        run_plan(client, read_plan(plan(tmp_path, text)), on_result=results.append, say=said.append)
    assert len(said) == 2
    assert any(line.startswith("empty ended: cannot read video") for line in said)
    assert any("gone ended: cannot read video" in line and "no such file" in line for line in said)
    assert [result.label for result in results] == labels(3)
    check_server(read_plan(plan(tmp_path, text)), client.adapters())
