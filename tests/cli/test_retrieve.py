"""`vlora index` and `vlora retrieve` over a scripted server, and once over the embedded model."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from apps.retrieval import RetrievalIndex
from tests.cli.conftest import Vlora
from tests.server.served import served
from tests.video_files import write_video


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    folder = tmp_path / "videos"
    folder.mkdir()
    write_video(folder / "street.mp4", [20, 230])
    return folder


def test_retrieving_creates_the_index_and_updates_it(
    vlora_command: Vlora, address: str, videos: Path, tmp_path: Path
) -> None:
    at = ("--server", address, "--index", str(tmp_path / "x.sqlite"))
    code, out, err = vlora_command("retrieve", "a white car", str(videos), "--adapter", "signs", *at)
    assert code == 0 and "2 clips added from 1 files; 0 files unchanged, 0 removed" in err
    assert [line.split()[2:4] for line in out.splitlines()] == [["street.mp4", "0:00.0"], ["street.mp4", "0:01.0"]]
    write_video(videos / "next.mp4", [90])
    sheet = tmp_path / "sheet.png"
    code, out, err = vlora_command(
        "retrieve", "a car", str(videos), "--adapter", "signs", *at, "--json", "--sheet", str(sheet), "--top", "2"
    )
    hits = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and "1 clips added from 1 files; 1 files unchanged" in err
    assert [hit["rank"] for hit in hits] == [1, 2] and sheet.read_bytes().startswith(b"\x89PNG")
    assert hits[0]["statements"] == [["signs: describe the image.", "yes", 0.0]]
    code, out, err = vlora_command("retrieve", "a car", *at)
    assert (code, len(out.splitlines()), err) == (0, 3, ""), "without videos, the whole index is searched as it is"


def test_a_file_that_fails_does_not_end_the_search(
    vlora_command: Vlora, address: str, videos: Path, tmp_path: Path
) -> None:
    (videos / "0.png").write_bytes(b"no picture")
    at = ("--server", address, "--index", str(tmp_path / "x.sqlite"))
    for added in (2, 0):
        code, out, err = vlora_command("retrieve", "a car", str(videos), *at)
        problem, counts = err.splitlines()
        assert code == 1 and len(out.splitlines()) == 2
        assert problem == f"'{videos / '0.png'}' is not a picture that this machine can decode"
        assert f": {added} clips added" in counts and counts.endswith(" 0 removed, 1 failed")
    code, out, err = vlora_command("index", str(videos), "--server", address, "--out", str(tmp_path / "x.sqlite"))
    assert (code, out) == (1, "") and err.splitlines() == [problem, counts]


def test_a_folder_with_one_file_is_treated_as_other_folders(vlora_command: Vlora, address: str, tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "0.png").write_bytes(b"no picture")
    at, index = ("--server", address), str(tmp_path / "x.sqlite")
    code, _, err = vlora_command("index", str(tmp_path / "videos"), "--out", index, *at)
    assert code == 1 and err.splitlines()[-1].endswith(" 0 removed, 1 failed")
    code, _, err = vlora_command("index", str(tmp_path / "videos" / "0.png"), "--out", index, *at)
    assert code == 2 and len(err.splitlines()) == 1 and err.startswith("error: ")


def test_an_index_whose_creation_was_killed_is_created_again(
    vlora_command: Vlora, address: str, videos: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.sqlite").touch()
    at = ("--server", address, "--index", str(tmp_path / "x.sqlite"))
    code, out, _ = vlora_command("retrieve", "a car", str(videos), *at)
    assert code == 0 and len(out.splitlines()) == 2


def test_an_adapter_that_does_not_describe_the_index_is_noted(
    vlora_command: Vlora, address: str, videos: Path, tmp_path: Path
) -> None:
    at = ("--server", address, "--index", str(tmp_path / "x.sqlite"))
    assert "note:" not in vlora_command("retrieve", "a car", str(videos), *at)[2]
    code, _, err = vlora_command("retrieve", "a car", str(videos), "--adapter", "signs", *at)
    note = err.splitlines()[0]
    assert code == 0 and note.startswith("note: new clips are described by the base model, as the others in index ")
    assert note.endswith("give another --index for descriptions by signs")


def test_an_adapter_describes_an_index_by_its_heads(
    vlora_command: Vlora, address: str, videos: Path, tmp_path: Path
) -> None:
    index = str(tmp_path / "x.sqlite")
    assert vlora_command("index", str(videos), "--head", "cam/day", "--out", index, "--server", address)[0] == 0
    at = ("--server", address, "--index", index)
    code, _, err = vlora_command("retrieve", "a car", str(videos), "--adapter", "cam", *at)
    assert code == 0 and "note:" not in err
    note = vlora_command("retrieve", "a car", str(videos), "--adapter", "signs", *at)[2].splitlines()[0]
    assert note.startswith("note: new clips are described by cam, ")


def test_results_are_printed_before_the_sheet_is_written(
    vlora_command: Vlora, address: str, videos: Path, tmp_path: Path
) -> None:
    at = ("--server", address, "--index", str(tmp_path / "x.sqlite"))
    sheet = tmp_path / ("x" * 252 + ".png")
    code, out, err = vlora_command("retrieve", "a car", str(videos), "--sheet", str(sheet), *at)
    assert code == 2 and len(out.splitlines()) == 2 and "File name too long" in err.splitlines()[-1]


def test_indexing_prints_each_clip_as_json(vlora_command: Vlora, address: str, videos: Path, tmp_path: Path) -> None:
    flags = ("--out", str(tmp_path / "x.sqlite"), "--server", address, "--json")
    code, out, _ = vlora_command("index", str(videos), "--adapter", "cam", "--head", "day", *flags)
    clips = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [clip["statements"][0][:2] for clip in clips] == [["cam/day", "dark"], ["cam/day", "bright"]]


def test_wrong_input_is_one_clear_line(vlora_command: Vlora, address: str, videos: Path, tmp_path: Path) -> None:
    at, index = ("--server", address), str(tmp_path / "x.sqlite")
    assert vlora_command("index", str(videos), "--out", index, *at)[0] == 0
    (tmp_path / "empty").mkdir()
    (tmp_path / "no.mp4").write_bytes(b"no video")
    write_video(tmp_path / "none.mp4", [])
    (tmp_path / "text.sqlite").write_text("text")
    for arguments, message in (
        (("retrieve", " ", "--index", index), "the query is empty"),
        (("retrieve", "a car", "--index", str(tmp_path / "y.sqlite")), "no index"),
        (("retrieve", "a car", "--index", str(tmp_path / "text.sqlite")), "not an index"),
        (("retrieve", "a car", "--index", index, "--adapter", "zzz"), "'zzz'"),
        (("retrieve", "a car", "--index", index, "--question", "is it?"), "write {} once"),
        (("retrieve", "a car", "--index", index, "--sheet", "a.jpg"), "ends in .png"),
        (("retrieve", "a car", str(videos), "--index", index, "--sheet", "no/a.png"), "its folder does not exist"),
        (("retrieve", "a car", str(videos), "--index", "x" * 256), "cannot read index 'xxx"),
        (("retrieve", "a car", "x" * 256, "--index", index), "cannot read 'xxx"),
        (("index", str(videos), "--out", "x" * 256), "cannot read index 'xxx"),
        (("batch", "x" * 256), "cannot read 'xxx"),
        (("retrieve", "a car", str(tmp_path / "empty"), "--index", index), "contains no video and no picture"),
        (("index", str(tmp_path / "no.mp4"), "--out", index), "cannot read video"),
        (("index", str(tmp_path / "none.mp4"), "--out", index), "cannot read video"),
        (("index", str(videos), "--out", index, "--frames", "2"), "was made with --frames 1, not 2"),
        (("index", str(videos), "--out", index, "--question", "what?"), "--question describe the image., not what?"),
        (("index", str(videos), "--out", str(tmp_path / "z.sqlite"), "--adapter", "zzz"), "'zzz'"),
        (("index", str(videos), "--out", str(tmp_path / "no" / "z.sqlite")), "-lock cannot be created: No such file"),
        (("index", str(videos), "--out", str(tmp_path / "z.sqlite"), "--fps", "inf"), "--fps is inf"),
        (("index", str(videos), "-a", "cam", "-a", "cam"), "--adapter 'cam' is given more than once; give it once"),
    ):
        code, out, err = vlora_command(*arguments, *at)
        # The tests have imported OpenCV before vlora.opencv could disable FFmpeg's own output.
        (line,) = (line for line in err.splitlines() if "moov atom not found" not in line)
        assert code == 2 and out == "" and line.startswith("error: ") and message in line, (arguments, err)


@pytest.mark.slow
def test_the_embedded_model_finds_what_a_query_names(vlora_command: Vlora, tmp_path: Path) -> None:
    """The base model without an adapter ranks the pictures with a red bus before all others."""
    import cv2

    from fusion.synthetic.streets import draw_street

    rng = np.random.default_rng(3)
    red_buses = set()
    for number in range(40):
        street = draw_street(rng, 3)
        file = tmp_path / "streets" / f"{number:02}.png"
        file.parent.mkdir(exist_ok=True)
        cv2.imwrite(str(file), cv2.cvtColor(street.frame, cv2.COLOR_RGB2BGR))
        if any((thing.color, thing.kind) == ("red", "bus") for thing in street.things):
            red_buses.add(str(file))
    assert 1 < len(red_buses) < 10
    with served() as on:
        at = ("--server", on.address, "--index", str(tmp_path / "x.sqlite"), "--json")
        code, out, err = vlora_command("retrieve", "a red bus", str(tmp_path / "streets"), *at)
    assert code == 0, err
    hits = [json.loads(line) for line in out.splitlines()]
    assert {hit["source"] for hit in hits[: len(red_buses)]} == red_buses
    assert hits[0]["score"] > 0.5 > hits[len(red_buses)]["score"]


def test_the_server_must_have_the_model_of_the_index(
    vlora_command: Vlora, address: str, videos: Path, tmp_path: Path
) -> None:
    index, at = str(tmp_path / "x.sqlite"), ("--server", address)
    assert vlora_command("index", str(videos), "--out", index, *at)[0] == 0
    with sqlite3.connect(index) as database:
        settings = database.execute("SELECT value FROM facts WHERE name = 'settings'").fetchone()[0]
        assert b'"model":"scripted"' in settings
        made_by_another = settings.replace(b"scripted", b"another")
        database.execute("UPDATE facts SET value = ? WHERE name = 'settings'", (made_by_another,))
    write_video(videos / "next.mp4", [90])
    for command in (
        ("retrieve", "a car", "--index", index),
        ("retrieve", "a car", str(videos), "--index", index),
        ("index", str(videos), "--out", index),
    ):
        code, _, err = vlora_command(*command, *at)
        assert code == 2 and "was made with the model 'another'; the server has 'scripted'" in err
    with RetrievalIndex(Path(index)) as made_with_another:
        assert len(made_with_another.clips()) == 2, "no answer of this model was added"
