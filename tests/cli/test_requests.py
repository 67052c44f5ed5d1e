"""Commands that send requests to a running server: query, stream, batch, status, adapters, train, index, retrieve."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Vlora
from tests.server.running import Running, running_server
from tests.server.scripted import write_adapter
from tests.video_files import write_video

NIGHT = ("--adapter", "cam", "--head", "night")
NO_PICTURE = "'{}' is not a picture that this machine can decode"


def words(line: str, count: int | None = None) -> str:
    return " ".join(line.split()[:count])


def test_query_prints_the_answer_as_text_or_json(
    vlora_command: Vlora, asking: Vlora, address: str, inputs: Path
) -> None:
    assert asking.out("query", "a.png", "say:a grün sign") == "a grün sign\n"
    assert asking.out("query", "a.png", "-q", "say:x", "-a", "cam", "-s", address) == "x\n"
    (answer,) = asking.json("query", "a.png", "say:a.b", "--adapter", "cam", "--stop", ".")
    assert (answer["text"], answer["adapter"], answer["finish_reason"]) == ("a", "cam", "stop")


def test_the_last_argument_is_the_question_unless_it_is_a_picture(asking: Vlora, inputs: Path) -> None:
    pictures = ("a.png", "bright.png")
    found = [asking.json("query", *args)[0] for args in (("a.png", "say:x"), (*pictures, "say:x"))]
    found += asking.json("query", *pictures, "-q", "say:x")
    assert {each["text"] for each in found} == {"x"}
    lengths = [each["num_prompt_tokens"] for each in found]
    assert lengths[0] < lengths[1] == lengths[2], "the second picture is in the prompt"
    (long,) = asking.json("query", "a.png", "say:" + "x" * 5000)
    assert long["text"].startswith("xxx"), "a question may be longer than a file's name"


def test_a_head_answers_with_its_label(asking: Vlora, inputs: Path) -> None:
    cam, bright = ("--adapter", "cam"), "bright  98.0%"
    assert asking.out("query", "bright.png", "--head", "day", *cam) == f"{bright}\n"
    (answer,) = asking.json("query", "dark.png", "bright.png", "--head", "night", *cam)
    assert answer["label"] == "dark"
    # A question of a head in any spelling, or an adapter's own, is answered by the head, with a note.
    by_head = ("is it day?", " Is  it DAY\n", "is it day ?"), ("--max-tokens", "8"), ("--max-ttft-s", "60")
    for asked in (*((each,) for each in by_head[0]), ("is it day?", *by_head[1], *by_head[2]), ()):
        for name in ("cam", "day"):
            assert asking.out("query", "bright.png", *asked, "-a", name) == f"{bright}  (head day)\n", (asked, name)
    (answer,) = asking.json("query", "bright.png", "is it day?", *cam)
    assert (answer["answered_by"], answer["domain"], answer["text"]) == ("head", "day", "bright")
    assert (answer["result"]["head"], answer["adapter"]) == ("day", "cam")
    # Other questions, options of sampling and a choice: the model answers in words.
    for question, *options in (
        *(["is it day?", *option.split()] for option in ("--answer words", "--temperature 0.5", "--stop x")),
        *(["is it night?"], ["is it a sunny day?"]),
    ):
        (answer,) = asking.json("query", "bright.png", question, *options, *cam)
        assert (answer["answered_by"], answer["text"]) == ("words", "yes"), (question, options)
    (answer,) = asking.json("query", "bright.png", "what?", "--answer", "head", "-a", "day")
    assert (answer["answered_by"], answer["text"]) == ("head", "bright")
    assert asking.out("query", "bright.png", "-a", "day", "--answer", "words").endswith("  (in words)\n")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server that the environment names, for a test that changes its adapters."""
    with running_server({"cars": {"detection": 1}}) as running:
        monkeypatch.setenv("VLORA_SERVER", f"127.0.0.1:{running.port}")
        yield running


def test_boxes_of_a_detection_are_listed(own: Running, vlora_command: Vlora, inputs: Path) -> None:
    out = vlora_command.out("query", "bright.png", "--adapter", "cars", "--head", "detection")
    label, box = out.splitlines()
    assert label == "bright  98.0%" and box.startswith("  bright  98.0%  [0, ")


def test_adapters_are_loaded_pinned_and_unloaded(own: Running, vlora_command: Vlora, tmp_path: Path) -> None:
    def adapters(*args: str) -> str:
        return vlora_command.out("adapters", *args).splitlines()[0]

    folder = write_adapter(tmp_path / "signs", {"kind": 1})
    assert adapters("unload", "cars", "--drain") == "cars  unloaded"
    assert adapters("load", "signs", os.path.relpath(folder)) == "signs  rank 8  0.0 MiB  mergeable"
    assert vlora_command.json("adapters", "load", "lights", folder, "--upload")[0]["name"] == "lights"
    assert adapters("pin", "signs").endswith("  pinned")
    assert [each["pinned"] for each in vlora_command.json("adapters", "list")] == [False, True]
    assert not adapters("unpin", "signs").endswith("  pinned")
    for name in ("lights", "signs"):
        assert vlora_command.json("adapters", "unload", name) == [{"name": name, "drain": False, "done": "unloaded"}]
    assert adapters("list") == "no adapters"
    own.on_loop(own.front_end.adapters.register({"later": folder}))
    assert adapters() == "later  rank 8  0.0 MiB  read at first use"


def test_adapters_of_a_server_and_their_heads_are_listed(asking: Vlora) -> None:
    out = asking.out("adapters")
    assert "cam  rank 8" in out and "head night  classification over 2 frames: dark, bright" in out
    assert [each["name"] for each in asking.json("adapters")] == ["cam", "signs"]


def test_trainings_are_submitted_listed_and_cancelled(own: Running, vlora_command: Vlora) -> None:
    assert vlora_command.out("train", "status") == "no trainings\n"
    assert vlora_command.out("train", "submit", "signs") == "signs  running  step 1 of 2  loss 0.5000\n"
    assert vlora_command.json("train", "status")[0]["state"] == "running"
    assert vlora_command.out("train", "cancel", "signs") == "signs  cancelled  step 1 of 2  loss 0.5000\n"
    assert vlora_command.out("train", "submit", "spoiled").splitlines() == [
        "spoiled  running  step 1 of 2  loss 0.5000  3 records set aside",
        "  set aside: a.jsonl, line 2: bad",
        "  set aside: a.jsonl, line 5: bad",
        "  and 1 more",
    ]


def test_status_summarizes_a_server_and_waits_for_it(asking: Vlora) -> None:
    for wait in ((), ("--wait-s", "60")):
        out = asking.out("status", *wait)
        assert "0 running, 0 waiting" in out and out.count("\n") == 11
    assert "threads    1\n" in out and "sized by   arena_bytes\n" in out
    *_, table, kernels = out.splitlines()
    assert table == "ATMM table unknown"
    assert kernels == "kernels    plain torch (slower): no working C++ compiler found"
    assert asking.json("status")[0]["num_running"] == 0


def test_batch_answers_in_order_and_reports_bad_pictures(asking: Vlora, inputs: Path) -> None:
    (folder := inputs / "photos").mkdir()
    for place in range(4):
        (folder / f"{place}.png").write_bytes((inputs / "a.png").read_bytes())
    batch = ("batch", folder, "-q", "say:yes")
    assert [line.split("  ")[1] for line in asking(*batch)[1].splitlines()] == ["yes"] * 4
    (folder / "2.png").write_bytes(b"no picture")
    code, out, err = asking(*batch, "--out", "answers.jsonl")
    assert (code, out) == (1, "") and err.startswith(f"{folder / '2.png'}  image 1")
    assert err.endswith("\n4 pictures: 3 answered, 1 failed\n")
    assert answers(inputs) == ["yes", "yes", "", "yes"]


def test_a_batch_resumes_behind_its_last_whole_line(asking: Vlora, inputs: Path) -> None:
    (folder := inputs / "photos").mkdir()
    for place in range(5):
        (folder / f"{place}.png").write_bytes((inputs / "a.png").read_bytes() if place != 1 else b"no picture")
    batch = ("batch", folder, "-q", "say:yes", "--out", file := inputs / "answers.jsonl")
    assert asking(*batch, "--resume")[2].endswith("\n5 pictures: 4 answered, 0 answered before, 1 failed\n")
    whole = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(whole[:3]) + whole[3][:9])  # killed while it wrote the fourth
    (folder / "1.png").write_bytes((inputs / "a.png").read_bytes())
    assert asking(*batch, "--resume") == (0, "", "5 pictures: 3 answered, 2 answered before, 0 failed\n")
    assert [Path(json.loads(line)["image"]).stem for line in file.read_text().splitlines()] == [*"02134"]
    assert asking(*batch, "--resume")[2] == "5 pictures: 0 answered, 5 answered before, 0 failed\n"
    former = file.read_bytes()
    other = ("batch", folder, "-q", "say:no", "--out", file, "--resume")
    assert "answers.jsonl, line 1: an answer to another question" in asking(*other)[2]
    file.write_bytes(b"former\n" + former)
    assert "answers.jsonl, line 1: no answer of `vlora batch`" in asking(*batch, "--resume")[2]
    assert asking("batch", folder, "-q", "say:yes", "--resume")[0] == 2


def answers(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "answers.jsonl").read_text().splitlines()]


def test_a_batch_that_cannot_ask_leaves_the_former_answers(asking: Vlora, inputs: Path) -> None:
    (file := inputs / "answers.jsonl").write_text("former\n")
    (inputs / "0.png").write_bytes(b"")
    ask, to = ("-q", "say:x"), ("--out", str(file))
    for arguments in (
        ("a.png", *to),
        ("a.png", *ask, *to, "--server", "127.0.0.1:1"),
        ("0.png", "a.png", *ask, "--adapter", "zzz", *to),
    ):
        assert asking("batch", *arguments)[0] == 2 and file.read_text() == "former\n"
    assert asking("batch", "0.png", "a.png", *ask, *to)[0] == 1 and answers(inputs) == ["", "x"]
    assert asking("batch", "0.png", *ask, *to)[0] == 1
    assert "image 1" in json.loads(file.read_text())["problem"], "a run in which every picture fails has its file too"


def test_stream_prints_a_line_per_second_of_video(asking: Vlora, inputs: Path) -> None:
    stream = ("stream", "video.mp4", *NIGHT)
    labels = ["dark", "dark", "bright", "bright"]
    shown = [words(line, 3) for line in asking.out(*stream).splitlines()]
    assert shown == [f"{second}.0 s {label}" for second, label in enumerate(labels)]
    results = asking.json(*stream)
    assert [result["label"] for result in results] == labels
    assert all(result["latency_s"] > 0 and 0.5 < result["confidence"] <= 1 for result in results)
    code, out, err = asking(*stream, "--max-latency-s", "0.0000001", "--out", inputs / "out")
    assert (code, err) == (1, "") and out.count("the frame was not answered within the stream's 1e-07 s") == 4
    (rows,) = (inputs / "out").glob("*.jsonl")
    assert all(json.loads(line)["problem"] for line in rows.read_text().splitlines())


def test_several_heads_and_questions_answer_at_a_chosen_rate(asking: Vlora, inputs: Path) -> None:
    lines = sorted(
        words(line, 4) for line in asking.out("stream", "video.mp4", *NIGHT, "--head", "day", "--fps", "2").splitlines()
    )
    assert [line[:9] for line in lines if line.startswith("night")] == [f"night {start}.0" for start in range(4)]
    assert [line.split()[3] for line in lines if line.startswith("day")] == ["dark"] * 4 + ["bright"] * 3
    asked = ("--head", "cam/day", "--question", "say:hello", "--adapter", "signs", "--max-tokens", "3")
    lines = sorted(words(line, 5) for line in asking.out("stream", "video.mp4", *asked).splitlines())
    assert lines[0].startswith("cam-day 0.0 s dark ") and lines[4].startswith("signs-say-hello 0.0 s hel")
    assert lines[3].startswith("cam-day 3.0 s bright ") and len(lines) == 8  # the rest of the video, too


PLAN = """
cameras:
  - name: gate
    source: videos/street.mp4
    tasks:
      - {head: cam/day, rate: 2}
    events:
      - {name: sun, when: {head: cam/day, label: bright}, ask: {question: "say:sunny", max_tokens: 8}}
"""


def test_a_plan_prints_answers_and_events(asking: Vlora, inputs: Path) -> None:
    (inputs / "plan.yaml").write_text(PLAN)
    lines = [words(line) for line in asking.out("stream", "plan.yaml", "--out", "out").splitlines()]
    labels = [line.partition("s ")[2].split()[0] for line in lines if "event" not in line]
    assert labels == ["dark"] * 2 + ["bright"] * 2
    assert [line for line in lines if "event" in line] == ["gate event sun 1.0 s bright: sunny"]
    assert len((inputs / "out" / "gate.day.jsonl").read_text().splitlines()) == 4
    rows = asking.json("stream", "plan.yaml")
    assert sorted(row["start_s"] for row in rows) == [0.0, 0.5, 1.0, 1.0, 1.5]
    check = ("stream", "plan.yaml", "--check", "--server", "127.0.0.1:1")  # needs no server
    assert asking.out(*check).splitlines()[-1] == "1 camera: 2 answers per second, 2 of heads; 1 event in addition"
    assert asking.json(*check)[0]["heads_per_s"] == 2.0
    (inputs / "plan.yaml").write_text(PLAN.replace("say:sunny", "fail"))
    code, out, err = asking("stream", "plan.yaml")
    assert (code, err) == (1, "") and "the script says fail" in out, "a failed event is a failure of the command"


RETRIEVE = ("retrieve", "a car", "--index", "x.sqlite")


def test_retrieving_creates_the_index_and_updates_it(asking: Vlora, inputs: Path) -> None:
    (inputs / "x.sqlite").touch()  # as of a process that was killed while it created the index
    code, out, err = asking("retrieve", "a white car", "videos", "--adapter", "signs", "--index", "x.sqlite")
    assert code == 0 and "2 clips added from 1 files; 0 files unchanged, 0 removed" in err
    assert [words(line).split()[2:4] for line in out.splitlines()] == [["street.mp4", f"0:0{n}.0"] for n in range(2)]
    assert out.splitlines()[0].endswith("(yes)"), "the description of a clip without a word of the query"
    write_video(inputs / "videos" / "next.mp4", [90])
    sheet = ("--json", "--sheet", "sheet.png", "--top", "2")
    code, out, err = asking(*RETRIEVE, "videos", "--adapter", "signs", *sheet)
    hits = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and "1 clips added from 1 files; 1 files unchanged" in err
    assert [hit["rank"] for hit in hits] == [1, 2] and (inputs / "sheet.png").read_bytes().startswith(b"\x89PNG")
    assert hits[0]["statements"] == [["signs: describe the image.", "yes", 0.0]]
    assert len(asking.out(*RETRIEVE).splitlines()) == 3, "without videos, the whole index is searched as it is"
    # Results are printed before the sheet is written.
    code, out, err = asking(*RETRIEVE, "videos", "--sheet", "x" * 252 + ".png")
    assert code == 2 and len(out.splitlines()) == 3 and "File name too long" in err.splitlines()[-1]


def test_a_file_that_fails_does_not_end_an_index_or_a_search(asking: Vlora, inputs: Path) -> None:
    bad = inputs / "videos" / "0.png"
    bad.write_bytes(b"no picture")
    for added in (2, 0):
        code, out, err = asking(*RETRIEVE, "videos")
        problem, counts = err.splitlines()
        assert code == 1 and len(out.splitlines()) == 2 and problem == NO_PICTURE.format(bad)
        assert f": {added} clips added" in counts and counts.endswith(" 0 removed, 1 failed")
    assert asking("index", "videos", "--out", "x.sqlite") == (1, "", err)
    # A folder with one file is treated as other folders; a file alone is an error.
    (inputs / "videos" / "street.mp4").unlink()
    code, _, err = asking("index", "videos", "--out", "y.sqlite")
    assert code == 1 and err.splitlines()[-1].endswith(" 0 removed, 1 failed")
    assert "0.png" in asking.refusal("index", bad, "--out", "y.sqlite")


def test_what_describes_the_clips_of_an_index_is_noted(asking: Vlora, inputs: Path) -> None:
    assert "note:" not in asking(*RETRIEVE, "videos")[2]
    code, _, err = asking(*RETRIEVE, "videos", "--adapter", "signs")
    note = err.splitlines()[0]
    assert code == 0 and note.startswith("note: new clips are described by the base model, as the others in index ")
    assert note.endswith("give another --index for descriptions by signs")
    # An adapter describes an index by its heads.
    code, out, _ = asking("index", "videos", "--adapter", "cam", "--head", "day", "--out", "y.sqlite", "--json")
    clips = [json.loads(line)["statements"][0][:2] for line in out.splitlines()]
    assert code == 0 and clips == [["cam/day", "dark"], ["cam/day", "bright"]]
    by = ("retrieve", "a car", "videos", "--index", "y.sqlite", "--adapter")
    code, _, err = asking(*by, "cam")
    assert code == 0 and "note:" not in err
    assert asking(*by, "signs")[2].startswith("note: new clips are described by cam, ")


SUMMARIZE = ("summarize", "day.mp4", "--frames", "2", "--part-s")


def test_a_video_is_summarized_by_its_parts(
    asking: Vlora, inputs: Path, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_video(inputs / "day.mp4", [20, 230, 20, 230, 20], rest=3)
    parts = [("0:00.0", "0:02.0"), ("0:02.0", "0:04.0"), ("0:04.0", "0:05.2")]
    asked = ("--question", "say:seen", "--summary-question", "say:all")
    lines = asking.out(*SUMMARIZE, "2", *asked).splitlines()
    assert lines[:3] == [f"{start} to {end}  seen" for start, end in parts]
    assert lines[3:] == ["summary  0:00.0 to 0:05.2  all", *(f"{start} to {end}: seen" for start, end in parts)]
    notes = asking.json(*SUMMARIZE, "2", *asked, "--adapter", "signs")
    assert [(note["kind"], note["start_s"], note["end_s"]) for note in notes] == [
        *(("part", start, end) for start, end in ((0.0, 2.0), (2.0, 4.0), (4.0, 5.2))),
        ("summary", 0.0, 5.2),
    ]
    # Notes beyond the context: each half has a summary first, and these have one.
    monkeypatch.setattr(server.engine.engine.limits, "max_context", 1600)
    long = ("--question", f"say:{'seen ' * 80}", "--max-tokens", "500", "--summary-question", "say:all")
    text = asking.json(*SUMMARIZE, "2", *long)[-1]["text"].splitlines()
    halves = [line.partition(": all")[0] for line in text if line.endswith(": all")]
    assert text[0] == "all" and halves == ["0:00.0 to 0:02.0", "0:02.0 to 0:05.2"]
    assert "over this model's context of 1600" in asking.refusal(*SUMMARIZE, "2", *long, "--max-tokens", "1500")
    (inputs / "bad\udcff.mp4").touch()
    for name, why in (
        ("none.mp4", "no such file"),
        ("a.png", "it is a picture; ask about it with `vlora query`"),
        ("videos", "it is not a video that this machine can decode"),
        ("bad\udcff.mp4", "its name is not UTF-8; rename it"),
    ):
        assert asking.refusal("summarize", name) == f"cannot read video {name!r}: {why}"


@pytest.mark.slow
def test_the_embedded_model_finds_what_a_query_names(vlora_command: Vlora, tmp_path: Path) -> None:
    """The base model without an adapter: first are pictures with a red bus, found by its words and its answers."""
    import cv2

    from fusion.embedded import checkpoint_path
    from fusion.synthetic.drawn import draw_street
    from vlora.config import EngineConfig
    from vlora.engine import LocalEngine
    from vlora.models.processing import InputProcessor

    rng = np.random.default_rng(6)
    red_buses = set()
    (tmp_path / "streets").mkdir()
    for number in range(16):
        street = draw_street(rng, 3)
        file = str(tmp_path / "streets" / f"{number:02}.png")
        cv2.imwrite(file, cv2.cvtColor(street.frame, cv2.COLOR_RGB2BGR))
        if any((thing.color, thing.kind) == ("red", "bus") for thing in street.things):
            red_buses.add(file)
    assert 1 < len(red_buses) < 10
    engine = LocalEngine(EngineConfig(model=str(checkpoint_path()), arena_bytes=2**27, threads=1))
    with running_server(engine=engine, processor=InputProcessor.from_pretrained(str(checkpoint_path()))) as on:
        at = ("--server", f"127.0.0.1:{on.port}", "--index", tmp_path / "x.sqlite", "--json")
        code, out, err = vlora_command("retrieve", "a red bus", tmp_path / "streets", *at)
        on.on_loop(engine.close())
    assert code == 0, err
    hits = [json.loads(line) for line in out.splitlines()]
    assert {hit["source"] for hit in hits[:2]} <= red_buses
    assert all(hit["yes"] > 0.9 and hit["matches"][0]["words"] == ["red", "bus"] for hit in hits[:2])
    assert hits[1]["score"] > 0.9 and hits[len(red_buses)]["score"] < 0.5
