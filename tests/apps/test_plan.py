"""`vlora stream plan.yaml`: errors with their line, streams by rate, tracks, and questions at events."""

from __future__ import annotations

import csv
import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from apps.video_analytics import Chunk, ChunkResult, ClipShape, read_clips
from apps.video_analytics.annotate import EventClips
from apps.video_analytics.plan.events import EventWatch, Happened, holds
from apps.video_analytics.plan.plan_file import check_server, check_sources, read_plan
from apps.video_analytics.plan.run_plan import PlanCounts, camera_groups, lines, run_plan, summarize
from apps.video_analytics.plan.schema import ClipPlan, Condition, EventPlan
from apps.video_analytics.sink_plan import EventResult
from apps.video_analytics.tracking import ObjectTracker
from tests.apps.scripted import (
    FPS,
    HEIGHT,
    SIDE,
    WIDTH,
    Mover,
    clip_result,
    file_source,
    head_answer,
    labels,
    refuse_to_list,
    write_movers,
)
from tests.server.running import Running, running_server
from tests.video_files import shades, write_video
from vlora.client import Client
from vlora.errors import BadImage, BadPlan, StepFailed

CAMERA = "cameras:\n  - name: gate\n    source: gate.mp4\n    tasks:\n      - head: cam/one\n"
SECOND = CAMERA.replace("cameras:\n", "")
TASK = CAMERA + "      - "
EVENT = CAMERA + "    events:\n      - name: x\n        when: "
ASKED = EVENT + '{head: cam/one, label: bright}\n        ask: {question: "say:sun", '
LINE_AT = "crosses: [[0, 0], [1, 1]]"
FIELD = "field `cameras[0]."
EVENTS = FIELD + "events[0]."


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
    counts = run_plan(client, read_plan(path), **{"on_result": results.append, "on_event": events.append, **options})
    return counts, results, events


# -- errors -----------------------------------------------------------------------------------------------------------

UNKNOWN = "is not a known field; check its spelling"
WRONG = [
    ("[]", "line 1: a plan is a mapping with the field `cameras`, found list"),
    ("cameras: []", "line 1, field `cameras`: has 0 items; it must have at least 1"),
    ("cameras:\n  - name: a\n    name: b", "line 3: not YAML: duplicate field `name`"),
    (CAMERA + "        fps: 2", f"line 6, {FIELD}tasks[0].fps`: {UNKNOWN}"),
    (CAMERA + "output: x", f"line 6, field `output`: {UNKNOWN}"),
    (CAMERA + "    zone: x", f"line 6, {FIELD}zone`: {UNKNOWN}"),
    (EVENT + "{head: cam/one, label: a, confidense: 0.9}", f"line 8, {EVENTS}when.confidense`: {UNKNOWN}"),
    (EVENT + "{head: cam/one, label: a}\n        pause: 2", f"line 9, {EVENTS}pause`: {UNKNOWN}"),
    (ASKED + "max: 3}", f"line 9, {EVENTS}ask.max`: {UNKNOWN}"),
    (CAMERA + "        rate: 0", f"line 6, {FIELD}tasks[0].rate`: is 0; it must be above 0"),
    (CAMERA + "        max_tokens: 5", f"{FIELD}tasks[0]`: `max_tokens` is for a `question`"),
    (TASK + "question: what ?\n        track: true", "`track` is for a detection `head`"),
    (TASK + "track: true", "needs exactly one of `head` (ADAPTER/HEAD) and `question`"),
    (TASK + "head: one", f"line 6, {FIELD}tasks[1].head`: is 'one'; it must match the pattern"),
    (TASK + "head: cam/one", f"line 6, {FIELD}tasks[1]`: cam/one is given more than once"),
    (CAMERA + SECOND.replace("gate\n", "Gate\n"), "line 6, field `cameras[1].name`: two cameras are named 'Gate'"),
    (EVENT + "{head: cam/two, label: a}", f"line 8, {EVENTS}when.head`: no task of camera 'gate' is 'cam/two'"),
    (EVENT + "{head: cam/one, " + LINE_AT + "}", "when.crosses`: needs tracked objects; add `track: true` to task cam"),
    (EVENT + "{head: cam/one}", f"line 8, {EVENTS}when`: has no `label`, `confidence`, `over`, `under`, `crosses` or"),
    (EVENT + "{head: cam/one, over: 1, " + LINE_AT + "}", "has several of `over` or `under`, `crosses` and `enters`"),
    (EVENT + "{head: cam/one, enters: [[0, 0], [1, 2], [0, 1]]}", f"{EVENTS}when.enters[1][1]`: is 2; it must be"),
]


def test_errors_name_line_and_field(tmp_path: Path) -> None:
    for text, error in WRONG:
        with pytest.raises(BadPlan) as raised:
            read_plan(plan(tmp_path, text))
        assert error in str(raised.value) and "\n" not in str(raised.value), (error, str(raised.value))


def test_sources_are_one_video_or_folder_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is one source or refused; missing files are found without a server; a number is a camera."""
    at = r"line 3, field `cameras\[0\].source`: "
    file = read_plan(plan(tmp_path, CAMERA))
    with pytest.raises(BadPlan, match=at + "no such file or folder: '.*gate.mp4'"):
        check_sources(file)
    camera_number = read_plan(plan(tmp_path, CAMERA.replace("gate.mp4", "0")))
    check_sources(camera_number)
    assert camera_number.plan.cameras[0].source == "0"
    (folder := tmp_path / "gate.mp4").mkdir()
    with pytest.raises(BadPlan, match=at + r"folder '.*' contains no video and no"):
        read_plan(plan(tmp_path, CAMERA))
    (folder / "a.mp4").touch()
    assert read_plan(plan(tmp_path, CAMERA)).plan.cameras[0].source == str(folder)
    (folder / "old").mkdir()
    (folder / "old" / "b.png").touch()
    with pytest.raises(BadPlan, match=r"a camera is one video, .* has 1 video and pictures$"):
        read_plan(plan(tmp_path, CAMERA))
    refuse_to_list(folder, monkeypatch)
    with pytest.raises(BadPlan, match=at + r"cannot read folder '.*': Permission denied$"):
        read_plan(plan(tmp_path, CAMERA))


LACKING = [
    (TASK + "head: nowhere/one", f"line 6, {FIELD}tasks[1].head`: no adapter named 'nowhere'"),
    (TASK + "head: cam/two", "tasks[1].head`: adapter 'cam' has no head 'two'; its heads: "),
    (TASK + '{question: "what ?", adapter: zo}', "tasks[1].adapter`: no adapter named 'zo'; registered: cam, zoo"),
    (CAMERA + "        track: true", "tasks[0].track`: only objects of a detection can be tracked; head cam/one is"),
    (ASKED + "adapter: zo}", f"line 9, {EVENTS}ask.adapter`: no adapter named 'zo'"),
    (EVENT + "{head: cam/one, label: grey}", "when.label`: head cam/one has no label 'grey'; its labels: dark, bright"),
    (EVENT + "{head: cam/one, over: 1}", "when`: head cam/one does not count; `over` and `under` are for counting"),
]


def test_what_a_server_does_not_have_is_named_with_its_line(client: Client, tmp_path: Path) -> None:
    for text, error in LACKING:
        with pytest.raises(BadPlan) as raised:
            run_plan(client, read_plan(plan(tmp_path, text)), out=tmp_path / "out")
        assert error in str(raised.value), str(raised.value)
        assert not list((tmp_path / "out").iterdir()), "no camera was started"


# -- what is asked ----------------------------------------------------------------------------------------------------

FULL = """
out: results
sinks: [{name: all, jsonl: {file: all.jsonl}}]
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


def test_the_summary_counts_what_is_asked_per_second_and_has_no_password(client: Client, tmp_path: Path) -> None:
    full = read_plan(plan(tmp_path, FULL)).plan
    summary = summarize(full)
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
    # Tasks of one rate and size share a stream.
    groups = camera_groups(full.cameras[0], client.adapters())
    assert [(group.shape, [asked.name for asked in group.asked]) for group in groups] == [
        (ClipShape(1, 2, every_frame=True), ["cam-detection", "cam-one"]),
        (ClipShape(2, 2), ["cam-night"]),
        (ClipShape(1, 0.5), ["zoo-say-hello"]),
    ]
    text = CAMERA.replace("gate.mp4", "rtsp://admin:secret@cam/main?channel=1&password=secret")
    assert next(lines(summarize(read_plan(plan(tmp_path, text)).plan))) == "camera gate: rtsp://cam/main?channel=1"


def test_a_plan_writes_answers_tracks_and_events(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_video(tmp_path / "gate.mp4", shades(6))  # bright in seconds 0 and 3
    counts, results, events = ran(client, plan(tmp_path, FULL))
    names = ("cam-detection", "cam-night", "cam-one", "zoo-say-hello")
    assert counts.answers == {f"gate.{name}": number for name, number in zip(names, (12, 6, 12, 3), strict=True)}
    assert counts.events == {"gate": 2} and [result.problem for result in results if result.problem] == []
    out = tmp_path / "results"
    files = {f"gate.{name}.{kind}" for name in names for kind in ("csv", "jsonl", "webm")}
    files |= {"gate.cam-detection.tracks.jsonl", "gate.cam-detection.tracks.csv", "gate.events.jsonl", "gate.events"}
    files |= {"sinks"}
    assert (out / "sinks" / "all.jsonl").read_bytes() == (out / "gate.events.jsonl").read_bytes()
    assert {file.name for file in out.iterdir()} == files

    def rows(name: str) -> list[Any]:
        return [json.loads(line) for line in (out / f"gate.{name}.jsonl").read_text().splitlines()]

    assert [row["label"] for row in rows("cam-night")] == labels(6)
    assert [(row["event"], row["start_s"], row["label"], row["text"]["text"]) for row in rows("events")] == [
        ("bright", 0.0, "bright", "sun"),
        ("bright", 3.0, "bright", "sun"),
    ]
    assert [event.picture for event in events] == [f"gate.events/bright-{event.id}.jpg" for event in events]
    picture = cv2.imread(str(out / str(events[1].picture)))
    assert picture is not None and picture.mean() > 200
    tracked = rows("cam-detection.tracks")
    assert [frame["index"] for frame in tracked] == list(range(60)), "a line for every frame of the video"
    for row in rows("cam-detection"):
        first = [box for box in tracked[5 * row["index"]]["boxes"] if box["detected"]]
        assert [box["id"] for box in first] == [row["tracks"][0]]
    with (out / "gate.cam-detection.tracks.csv").open(newline="") as file:
        lives = {int(life["id"]) for life in csv.DictReader(file)}
    assert lives == {box["id"] for frame in tracked for box in frame["boxes"]}
    assert sum(counts.objects["gate.cam-detection"].values()) == len(lives)
    capture = cv2.VideoCapture(str(out / "gate.cam-detection.webm"))
    assert (capture.get(cv2.CAP_PROP_FPS), capture.get(cv2.CAP_PROP_FRAME_COUNT)) == (10, 60)

    # A question that fails is recorded, and the streams go on.
    def refuse(*_: object, **__: object) -> None:
        raise StepFailed("the step failed")

    monkeypatch.setattr(client, "generate", refuse)
    counts, _, events = ran(client, plan(tmp_path, FULL))
    assert [each.problem for each in events] == ["the step failed"] * 2 and counts.answers["gate.cam-one"] == 12


def test_events_are_sent_unless_an_answer_denies_them(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_video(tmp_path / "gate.mp4", shades(2))
    base = EVENT + "{head: cam/one, label: bright}\n        verify: {question: 'say:Sun,', expect: EXPECT}\n"
    base += "        ask: {question: 'say:moon'}\nout: results\nsinks: [{name: all, jsonl: {file: a.jsonl}}]"
    sent = tmp_path / "results" / "sinks" / "a.jsonl"
    for expect, verified, text, num_sent in (
        ("sun", True, "moon", 1),
        ("SUN.", True, "moon", 2),
        ("su", False, None, 2),
    ):
        _, _, (event,) = ran(client, plan(tmp_path, base.replace("EXPECT", expect)))
        assert (event.verified, event.text and event.text.text, event.problem) == (verified, text, None), expect
        assert len(sent.read_text().splitlines()) == num_sent

    def refuse(*_: object, **bounds: object) -> None:
        raise StepFailed(f"no answer within {bounds['max_latency_s']:g} s")

    monkeypatch.setattr(client, "generate", refuse)
    _, _, (event,) = ran(client, plan(tmp_path, base.replace("EXPECT", "sun")))
    assert (event.verified, event.problem) == (None, "no answer within 10 s")
    assert json.loads(sent.read_text().splitlines()[-1])["id"] == event.id


def test_clips_contain_the_time_of_their_events(client: Client, tmp_path: Path) -> None:
    """By the number of each frame, which is written into its picture; beside a snapshot with boxes."""
    writer = cv2.VideoWriter(str(tmp_path / "gate.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10, (64, 48))
    for number in range(90):
        picture = np.full((48, 64, 3), 20 if number // 10 % 3 else 230, np.uint8)
        for bit in range(8):
            picture[:8, 8 * bit : 8 * bit + 8] = 255 * (number >> bit & 1)
        writer.write(picture)
    writer.release()
    text = EVENT + "{head: cam/one, label: bright}\n    clips: {before_s: 1, after_s: 1.5}\nout: results"
    _, _, events = ran(client, plan(tmp_path, text))
    assert [event.start_s for event in events] == [0, 3, 6]
    for event in events:
        numbers = []
        capture = cv2.VideoCapture(str(tmp_path / "results" / str(event.clip)))
        while (read := capture.read())[0]:
            numbers.append(sum((read[1][4, 8 * bit + 4].mean() > 127) << bit for bit in range(8)))
        at = 10 * int(event.start_s)
        assert at in numbers and numbers == sorted(numbers)
        assert numbers[0] == max(0, at - 10) and numbers[-1] == at + 15
        drawn = cv2.imread(str(tmp_path / "results" / str(event.snapshot)))
        assert drawn is not None and drawn.shape[1] >= 480 and drawn[-48:].max() > 200, "the label is below"


def test_clips_are_bounded_in_memory_and_on_disk(tmp_path: Path) -> None:
    jpeg = cv2.imencode(".jpg", np.zeros((48, 64, 3), np.uint8))[1].tobytes()
    said: list[str] = []
    bounds = ClipPlan(before_s=1, after_s=9, buffer_mib=30 * len(jpeg) / 2**20, max_mib=0.01, days=1)
    (tmp_path / "old.jpg").write_bytes(jpeg)
    os.utime(tmp_path / "old.jpg", (1, 1))
    clips = EventClips(bounds, tmp_path, said.append)
    seconds = [Chunk(place, place, (), (jpeg,) * 10, 64, 1.0, tuple(np.arange(10) / 10)) for place in range(30)]
    for chunk in seconds[:5]:
        clips.add(chunk)
        clips.add(chunk)  # of another task
    assert clips.begin("first.webm", 3.0) and not clips.begin("gone.webm", 1.5), "its picture is not kept any more"
    for chunk in seconds[5:]:
        clips.add(chunk)
    assert [clips.begin(f"{number}.webm", 28.0) for number in range(9)] == [True] * 8 + [False]
    clips.close()
    capture = cv2.VideoCapture(str(tmp_path / "0.webm"))
    assert capture.get(cv2.CAP_PROP_FRAME_COUNT) == 30 and not (tmp_path / "old.jpg").exists()
    held = [path.stat().st_size for path in tmp_path.iterdir()]
    assert 0 < sum(held) <= 0.01 * 2**20 and len(held) < 9 and said == []


def test_a_flood_of_events_is_recorded_without_questions(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_video(tmp_path / "gate.mp4", [20, 230] * 12, fps=2)
    opened = threading.Event()
    generate = client.generate
    monkeypatch.setattr(client, "generate", lambda *args, **kind: opened.wait(20) and generate(*args, **kind))
    on_result = lambda result: opened.set() if result.index == 23 else None  # noqa: E731
    _, _, events = ran(client, plan(tmp_path, ASKED + "max_tokens: 8}"), on_result=on_result)
    refused = [each for each in events if each.problem]
    assert len(events) == 12 and 3 <= len(refused) <= 4
    assert refused[0].problem == "not asked: 8 questions of earlier events wait for their answers"


def test_a_camera_that_fails_is_one_line_and_the_others_go_on(client: Client, tmp_path: Path) -> None:
    """A video without frames, and a file that does not exist, beside a good one."""
    write_video(tmp_path / "gate.mp4", shades(3))
    write_video(tmp_path / "empty.mp4", [])
    path = plan(tmp_path, CAMERA + SECOND.replace("gate", "empty") + SECOND.replace("gate", "gone"))
    said: list[str] = []
    results: list[ChunkResult] = []
    with pytest.raises(BadImage, match=r"empty\.mp4"):
        ran(client, path, on_result=results.append, say=said.append)
    empty, gone = sorted(said)
    assert empty.startswith("empty ended: cannot read video")
    assert gone.startswith("gone ended: cannot read video") and "no such file" in gone
    assert [result.label for result in results] == labels(3)
    check_server(read_plan(path), client.adapters())


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
LINE = ((0.5, 0.0), (0.5, 1.0))


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_movers(tmp_path_factory.mktemp("videos") / "passing.mp4", PASSING, 50)


def test_each_object_that_crosses_a_line_or_enters_an_area_is_one_event_of_its_frame(
    passing: Path, tmp_path: Path
) -> None:
    found = happened(event(crosses=LINE, label="car"), PASSING, passing)
    assert [each.track for each in found] == [1, 2], "the person and the slow car are no events"
    for each, mover in zip(found, PASSING[:2], strict=True):
        crossing = (WIDTH / 2 - SIDE / 2 - mover.x) / mover.dx / FPS
        assert each.time_s == pytest.approx(crossing, abs=1.5 / FPS)
        picture = cv2.imdecode(np.frombuffer(each.picture, np.uint8), cv2.IMREAD_COLOR)
        assert picture is not None and picture.shape == (HEIGHT, WIDTH, 3)
    assert len(happened(event(crosses=LINE), PASSING, passing)) == 3
    assert happened(event(crosses=((0.5, 0.0), (0.5, 0.1))), PASSING, passing) == [], "a line above all paths"
    area = ((0.4, 0.0), (0.6, 0.0), (0.6, 0.5), (0.4, 0.5))
    (entered,) = happened(event(enters=area), PASSING, passing)
    assert entered.track == 1
    assert entered.time_s == pytest.approx((0.4 * WIDTH - SIDE / 2 - 20) / 5 / FPS, abs=1.5 / FPS)
    # One that turns, and crosses the line and leaves the area again, is no further event.
    turning = (Mover(70, 40, 5, 0, turns=24),)
    path = write_movers(tmp_path / "turning.mp4", turning, 48)
    for watch in (event(crosses=LINE), event(enters=area)):
        assert [each.track for each in happened(watch, turning, path)] == [1]


def test_a_condition_on_an_answer_happens_when_it_begins_to_hold(passing: Path) -> None:
    """Three, eight, three objects and so on; an answer that is missing changes nothing."""
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


def test_conditions_on_detected_objects() -> None:
    holding: list[dict[str, Any]] = [{"label": "car"}, {"confidence": 0.9}, {"over": 3}, {"over": 2, "label": "car"}]
    holding += [{"under": 1, "label": "bus"}]
    others: list[dict[str, Any]] = [{"label": "bus"}, {"label": "car", "confidence": 0.95}, {"over": 1, "under": 4}]
    others += [{"over": 3, "confidence": 0.95}, {"over": 3, "label": "car"}]
    for expected, conditions in ((True, holding), (False, others)):
        for when in conditions:
            assert holds(Condition(head="cam/cars", **when), head_answer(PASSING, 0)) is expected, when
