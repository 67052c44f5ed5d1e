"""Retrieval over a scripted client: contents of the index, updates, candidates, ranking, and the contact sheet."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest

from apps.retrieval import RetrievalIndex, ask_for, clock, make_settings, search, update_index, vqa_score, write_sheet
from apps.retrieval.indexing import statements_of_head
from apps.retrieval.media import Clip, Fingerprint, Media, find_media
from apps.retrieval.ranking import select_candidates
from apps.retrieval.store import FORMAT_VERSION, Statement, StoredClip
from tests.apps.folders import refuse_to_list
from tests.apps.scripted_retrieval import SHADES, TIMINGS, ScriptedClient, answer_of
from tests.server.running import png
from tests.video_files import write_video
from vlora.client import Client, HeadResult
from vlora.errors import BadConfig, BadImage, BadRequest, UnknownAdapter, VLoraError
from vlora.plan_files.run_lock import lock_file
from vlora.types import FoundBox

ORDER = ("dim", "bright", "dark", "grey")


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """Two videos with a second of each shade, and a picture in a folder of its own."""
    folder = tmp_path / "videos"
    (folder / "pictures").mkdir(parents=True)
    write_video(folder / "a.mp4", [SHADES[name] for name in ORDER])
    write_video(folder / "b.mp4", [SHADES["dark"]])
    (folder / "pictures" / "c.png").write_bytes(png(SHADES["bright"], (900, 300)))
    return folder


def client_of(scripted: ScriptedClient) -> Client:
    return cast(Client, scripted)


def open_index(path: Path, scripted: ScriptedClient, **settings: Any) -> RetrievalIndex:
    return RetrievalIndex(path, make_settings(client_of(scripted), **settings))


def texts(index: RetrievalIndex) -> dict[tuple[str, float], list[str]]:
    return {
        (Path(clip.path).name, clip.start_s): [statement.text for statement in index.statements(clip.id)]
        for clip in index.clips()
    }


def size_of(picture: bytes) -> tuple[int, ...]:
    decoded = cv2.imdecode(np.frombuffer(picture, np.uint8), cv2.IMREAD_COLOR)
    assert decoded is not None
    return decoded.shape[:2]


# -- the index ---------------------------------------------------------------------------------------------------------


def test_an_index_has_a_caption_and_frames_of_each_clip(videos: Path, tmp_path: Path) -> None:
    scripted = ScriptedClient()
    with open_index(tmp_path / "x.sqlite", scripted, max_side=48) as index:
        counts = update_index(client_of(scripted), index, [videos])
        assert counts == (6, 3, 0, 0, 0)
        assert texts(index) == {
            **{("a.mp4", float(second)): [f"a {name} picture"] for second, name in enumerate(ORDER)},
            ("b.mp4", 0.0): ["a dark picture"],
            ("c.png", 0.0): ["a bright picture"],
        }
        assert index.statements(index.clips()[0].id)[0].confidence == pytest.approx(0.5)
        sizes = {size_of(index.frames(clip.id)[0]) for clip in index.clips()}
        assert sizes == {(36, 48), (16, 48)}, "the longer side of each frame is at most --max-side"


def test_heads_read_as_many_frames_of_a_clip_as_they_have(videos: Path, tmp_path: Path) -> None:
    scripted = ScriptedClient()
    with open_index(tmp_path / "x.sqlite", scripted, adapters=["cam"]) as index:
        assert (index.settings.num_frames, index.settings.heads) == (3, ("cam/night", "cam/moves"))
        update_index(client_of(scripted), index, [videos / "b.mp4", videos / "pictures"])
        assert set(scripted.asked) == {
            ("night", 1),
            ("moves", 3),
            ("describe the image.", 3),
            ("describe the image.", 1),
        }
        assert texts(index)["b.mp4", 0.0] == ["night", "a dark picture", "stands"]
        assert index.versions == {"cam": "v1"}


def test_a_second_run_reads_new_and_changed_files_only(videos: Path, tmp_path: Path) -> None:
    scripted, path = ScriptedClient(), tmp_path / "x.sqlite"
    with open_index(path, scripted) as index:
        update_index(client_of(scripted), index, [videos])
    scripted.asked.clear()
    write_video(videos / "b.mp4", [SHADES["grey"], SHADES["bright"]])
    write_video(videos / "d.mp4", [SHADES["dim"]])
    os.utime(videos / "a.mp4", (1, 1))  # the same content
    (videos / "pictures" / "c.png").unlink()
    with RetrievalIndex(path) as index:
        assert update_index(client_of(scripted), index, [videos]) == (3, 2, 1, 1, 0)
        assert len(scripted.asked) == 3
        assert [name for name, _ in texts(index)] == ["a.mp4"] * 4 + ["b.mp4"] * 2 + ["d.mp4"]
        assert texts(index)["b.mp4", 1.0] == ["a bright picture"]
        assert index.match("dark").keys() == {index.clips()[2].id}, "words of removed clips are not found"
        assert update_index(client_of(scripted), index, [videos]) == (0, 0, 3, 0, 0)


def test_a_stopped_update_continues_where_it_ended(videos: Path, tmp_path: Path) -> None:
    scripted, stop = ScriptedClient(), threading.Event()
    write_video(videos / "long.mp4", [SHADES["dim"]] * 30)
    with open_index(tmp_path / "x.sqlite", scripted) as index:
        first = update_index(
            client_of(scripted), index, [videos / "long.mp4"], stop=stop, on_clip=lambda clip: stop.set()
        )
        assert 0 < first.clips < 30
        rest = update_index(client_of(scripted), index, [videos / "long.mp4"])
        assert first.clips + rest.clips == 30 == len(index.clips()) == len(scripted.asked)


def test_a_clip_that_fails_is_described_by_the_next_run(videos: Path, tmp_path: Path) -> None:
    scripted = ScriptedClient()
    said: list[str] = []
    scripted.fails_at = 2
    with open_index(tmp_path / "x.sqlite", scripted) as index:
        with pytest.raises(BadImage, match="image 1 cannot be read"):
            update_index(client_of(scripted), index, [videos / "a.mp4", videos / "b.mp4"], say=said.append)
        assert said and len(index.clips()) < 5
        scripted.fails_at = None
        update_index(client_of(scripted), index, [videos / "a.mp4", videos / "b.mp4"])
        assert len(index.clips()) == 5


def test_a_file_without_frames_does_not_end_the_others(videos: Path, tmp_path: Path) -> None:
    (videos / "0.mp4").write_bytes(b"no video")
    write_video(videos / "empty.mp4", [])
    scripted = ScriptedClient()
    said: list[str] = []
    with open_index(tmp_path / "x.sqlite", scripted) as index:
        with pytest.raises(BadImage, match=r"0\.mp4"):
            update_index(client_of(scripted), index, [videos], say=said.append)
        assert len(index.clips()) == 6 and len(said) == 2
        failed: list[VLoraError] = []
        counts = update_index(client_of(scripted), index, [videos], on_failed=failed.append, say=said.append)
        assert counts == (0, 0, 3, 0, 2) and len(failed) == 2 == len(said)
        alone = update_index(client_of(scripted), index, [videos / "0.mp4"], on_failed=failed.append)
        assert alone == (0, 0, 0, 0, 1) and len(failed) == 3


def test_names_and_folders_that_cannot_be_read_do_not_end_the_others(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (videos / "Z\udcfcrich.png").write_bytes(png(SHADES["bright"]))
    (videos / "locked").mkdir()
    refuse_to_list(videos / "locked", monkeypatch)
    scripted = ScriptedClient()
    said: list[str] = []
    with open_index(tmp_path / "x.sqlite", scripted) as index:
        with pytest.raises(BadImage, match=r"cannot read folder '.*locked': Permission denied"):
            update_index(client_of(scripted), index, [videos], say=said.append)
        assert len(index.clips()) == 6 and len(said) == 2
        assert "Z\\udcfcrich.png': its path is not UTF-8; rename it" in said[1]
        with pytest.raises(BadImage, match=r"cannot read folder '.*locked': Permission denied"):
            update_index(client_of(scripted), index, [videos / "locked"], say=said.append)


def test_deleted_files_are_removed_by_any_path_to_their_folder(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted = ScriptedClient()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with open_index(tmp_path / "x.sqlite", scripted) as index:
        update_index(client_of(scripted), index, ["../videos"])
        (videos / "a.mp4").unlink()
        assert update_index(client_of(scripted), index, ["../videos"]).removed == 1
        (videos / "b.mp4").unlink()
        (videos / "pictures" / "c.png").unlink()
        with pytest.raises(BadImage, match="contains no video"):
            update_index(client_of(scripted), index, ["../videos"])
        assert len(index.clips()) > 0, "the folder may be a disk that is not mounted"


def test_paths_that_cannot_be_indexed_are_errors(tmp_path: Path) -> None:
    for path, message in (
        (str(tmp_path), "contains no video and no picture"),
        (str(tmp_path / "nowhere"), "no file or folder"),
        ("rtsp://camera/main", "made of files"),
        ("x" * 256, "cannot read 'x+': File name too long"),
    ):
        with pytest.raises(BadImage, match=message):
            find_media([path], list[BadImage]().append)


def test_files_that_are_no_index_are_errors(tmp_path: Path, videos: Path) -> None:
    scripted = ScriptedClient()
    (tmp_path / "text.sqlite").write_text("no database" * 100)
    sqlite3.connect(tmp_path / "other.sqlite").executescript("CREATE TABLE t (a); PRAGMA user_version = 1;")
    with open_index(tmp_path / "x.sqlite", scripted) as index:
        update_index(client_of(scripted), index, [videos])
    whole = (tmp_path / "x.sqlite").read_bytes()
    (tmp_path / "short.sqlite").write_bytes(whole[:-4096])
    (tmp_path / "stub.sqlite").write_bytes(whole[:50])
    (tmp_path / "old.sqlite").write_bytes(whole)
    with sqlite3.connect(tmp_path / "old.sqlite") as old:
        old.execute(f"PRAGMA user_version = {FORMAT_VERSION + 1}")
    for name, message in (
        ("nowhere", "no index .* create it with vlora index"),
        ("n" * 256, "cannot read index .*: File name too long"),
        ("old.sqlite/x", "cannot read index .*: Not a directory"),
        ("text", "not an SQLite file"),
        ("other", "a database of another program"),
        ("short", "damaged"),
        ("stub", "damaged"),
        ("old", f"has format {FORMAT_VERSION + 1}; this version of vlora uses {FORMAT_VERSION}"),
    ):
        with pytest.raises(BadConfig, match=message):
            RetrievalIndex(tmp_path / f"{name}.sqlite")
        if "cannot read" in message:
            with pytest.raises(BadConfig, match=message):
                open_index(tmp_path / f"{name}.sqlite", scripted)
    garbled = bytearray(whole)
    garbled[4096 : len(whole)] = bytes(len(whole) - 4096)
    (tmp_path / "garbled.sqlite").write_bytes(garbled)
    with pytest.raises(BadConfig, match="damaged"):
        RetrievalIndex(tmp_path / "garbled.sqlite")


_UPDATE = """
import sys
from pathlib import Path
from apps.retrieval import RetrievalIndex
with RetrievalIndex(Path(sys.argv[1])) as index, index.updating():
    print(flush=True)
    sys.stdin.read()
"""


def test_one_process_updates_an_index_at_a_time(videos: Path, tmp_path: Path) -> None:
    scripted, path = ScriptedClient(), tmp_path / "x.sqlite"
    with open_index(path, scripted) as index:
        update_index(client_of(scripted), index, [videos / "a.mp4"])
        command = [sys.executable, "-c", _UPDATE, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None and other.stdout.readline()
            with pytest.raises(BadConfig, match=rf"x\.sqlite' is in use by process {other.pid} .*wait for it, stop it"):
                update_index(client_of(scripted), index, [videos])
            assert len(search(client_of(scripted), index, "grey")) == 4, "it can be searched meanwhile"
            other.kill()
        assert update_index(client_of(scripted), index, [videos]).clips == 2


def test_answers_of_another_model_or_version_are_not_added(videos: Path, tmp_path: Path) -> None:
    scripted, other = ScriptedClient(), ScriptedClient(model="other")
    with open_index(tmp_path / "x.sqlite", scripted, adapters=["cam"]) as index:
        update_index(client_of(scripted), index, [videos / "b.mp4"])
        (videos / "b.mp4").unlink()
        with pytest.raises(BadConfig, match="was made with the model 'scripted'; the server has 'other'"):
            update_index(client_of(other), index, [videos])
        assert len(index.clips()) == 1 and not other.asked
        reloaded = ScriptedClient()
        reloaded.version_once_loaded = "v2"
        with pytest.raises(BadConfig, match="version v1 of adapter 'cam'; the server has v2"):
            update_index(client_of(reloaded), index, [videos / "a.mp4"])
        assert reloaded.asked and len(index.clips()) == 1


def test_two_processes_create_one_index(tmp_path: Path) -> None:
    scripted, path = ScriptedClient(), tmp_path / "x.sqlite"
    settings = make_settings(client_of(scripted))
    path.touch()
    with lock_file(tmp_path / "x.sqlite-lock", "x", "index"), pytest.raises(BadConfig, match="is in use by process"):
        RetrievalIndex(path, settings)
    with RetrievalIndex(path, settings) as first, RetrievalIndex(path, settings) as second:
        assert first.settings == second.settings == settings


def test_changes_of_another_process_are_no_damage(tmp_path: Path) -> None:
    with open_index(tmp_path / "x.sqlite", ScriptedClient()) as index:
        media = index.begin(Media(tmp_path / "a.mp4", "video"), Fingerprint(1, 1, "x"))
        index.add(media, Clip(0, 0.0, 1.0, ()), [])
        with pytest.raises(BadConfig, match=r"changed by another process during the update .*; index again$"):
            index.add(media, Clip(0, 0.0, 1.0, ()), [])


def test_clips_that_an_update_removes_during_a_search_are_left_out(videos: Path, tmp_path: Path) -> None:
    scripted, path = ScriptedClient(), tmp_path / "x.sqlite"
    with open_index(path, scripted) as index, RetrievalIndex(path) as other:
        update_index(client_of(scripted), index, [videos / "a.mp4", videos / "b.mp4"])
        before = search(client_of(scripted), index, "dark")
        clips = index.clips()
        index.clips = lambda: clips  # type: ignore[method-assign]  # read before the update
        write_video(videos / "b.mp4", [SHADES["bright"]])
        update_index(client_of(scripted), other, [videos / "b.mp4"])
        assert {hit.source for hit in search(client_of(scripted), index, "dark")} == {str(videos / "a.mp4")}
        frames = [index.frames(hit.clip) for hit in before]
        assert () in frames, "the new clip does not have the id of the removed one"
        write_sheet(tmp_path / "sheet.png", "dark", before, frames)
    assert (tmp_path / "sheet.png").exists()


# -- ranking -----------------------------------------------------------------------------------------------------------


def test_clips_are_ranked_by_the_probability_of_yes(videos: Path, tmp_path: Path) -> None:
    scripted = ScriptedClient()
    with open_index(tmp_path / "x.sqlite", scripted) as index:
        update_index(client_of(scripted), index, [videos])
        hits = search(client_of(scripted), index, "grey")
        assert [(Path(hit.source).name, hit.start_s) for hit in hits[:3]] == [
            ("a.mp4", 3.0),
            ("a.mp4", 0.0),
            ("a.mp4", 1.0),
        ]
        assert [hit.rank for hit in hits] == [1, 2, 3, 4, 5, 6]
        assert hits[0].score == pytest.approx(0.9, abs=0.02), "spellings of yes are added"
        assert hits[0].matched > 0 == hits[1].matched
        few = search(client_of(scripted), index, "grey", inside=[videos / "b.mp4", videos / "pictures"])
        assert [Path(hit.source).name for hit in few] == ["b.mp4", "c.png"] or few[0].score > few[1].score
        assert len(few) == 2


def test_a_search_does_not_write_to_the_index(videos: Path, tmp_path: Path) -> None:
    scripted, path = ScriptedClient(), tmp_path / "x.sqlite"
    with open_index(path, scripted, adapters=["cam"]) as index:
        update_index(client_of(scripted), index, [videos])
    before = path.read_bytes()
    with RetrievalIndex(path) as index:
        assert search(client_of(scripted), index, "grey")
    assert path.read_bytes() == before


def test_the_model_reads_only_the_candidates_of_the_words(videos: Path, tmp_path: Path) -> None:
    scripted = ScriptedClient()
    with open_index(tmp_path / "x.sqlite", scripted) as index:
        update_index(client_of(scripted), index, [videos])
        scripted.asked.clear()
        hits = search(client_of(scripted), index, "dark", num_candidates=2)
        assert len(scripted.asked) == 2
        assert [(Path(hit.source).name, hit.start_s) for hit in hits] == [("a.mp4", 2.0), ("b.mp4", 0.0)]


def test_candidates_are_matches_and_then_clips_spread_evenly() -> None:
    clips = [StoredClip(number, "a.mp4", "video", float(number), 1.0) for number in range(100)]
    matched = {70: 1.0, 5: 3.0, 40: 2.0}
    assert [clip.id for clip in select_candidates(clips, matched, 2)] == [5, 40]
    chosen = [clip.id for clip in select_candidates(clips, matched, 8)]
    assert chosen[:3] == [5, 40, 70] and len(chosen) == 8
    gaps = np.diff(chosen[3:])
    assert chosen[3] == 0 and chosen[-1] == 99 and gaps.min() >= 20
    assert len(select_candidates(clips, matched, 1000)) == 100
    assert len(select_candidates(clips, {}, 1)) == 1


def test_a_statement_counts_by_its_confidence(tmp_path: Path) -> None:
    with open_index(tmp_path / "x.sqlite", ScriptedClient()) as index:
        media = index.begin(Media(tmp_path / "a.mp4", "video"), Fingerprint(1, 1, "x"))
        for number, confidence in enumerate((0.3, 0.9)):
            index.add(media, Clip(number, 0.0, 1.0, ()), [Statement("q", "two red cars", confidence)])
        for number in range(2, 8):
            index.add(media, Clip(number, 0.0, 1.0, ()), [Statement("q", "a tree", 1.0)])
        low, high, *others = (clip.id for clip in index.clips())
        matched = index.match('a "red" car* OR NOT-')
        assert matched.keys() == {low, high}, "the article is in most statements"
        assert matched[high] == pytest.approx(3 * matched[low]) and matched[low] > 0, "plurals match too"
        assert index.match("?!") == {} == index.match("trees") and len(others) == 6


def test_words_in_a_row_count_more_than_the_same_words_apart(tmp_path: Path) -> None:
    captions = ("a red bus and a blue car", "a blue bus and a red car", "a tree", "a dog", "a cat", "a house", "a sign")
    with open_index(tmp_path / "x.sqlite", ScriptedClient()) as index:
        media = index.begin(Media(tmp_path / "a.mp4", "video"), Fingerprint(1, 1, "x"))
        for number, caption in enumerate(captions):
            index.add(media, Clip(number, float(number), 1.0, ()), [Statement("q", caption, 1.0)])
        first, second = (clip.id for clip in index.clips()[:2])
        for query, best, other in (("a red car", second, first), ("a blue car", first, second)):
            matched = index.match(query)
            assert matched[best] > 1.2 * matched[other] > 0


def test_frames_follow_the_heads_of_the_ranking_adapter(videos: Path, tmp_path: Path) -> None:
    scripted = ScriptedClient()
    with open_index(tmp_path / "x.sqlite", scripted, adapters=["cam"]) as index:
        update_index(client_of(scripted), index, [videos / "a.mp4"])
        for options, number in (({"adapter": "cam"}, 3), ({}, 1), ({"adapter": "cam", "num_frames": 2}, 2)):
            scripted.asked.clear()
            search(client_of(scripted), index, "dim", **cast(Any, options))
            assert {count for _, count in scripted.asked} == {number}


def test_queries_that_cannot_be_ranked_are_errors(videos: Path, tmp_path: Path) -> None:
    scripted = ScriptedClient()
    with open_index(tmp_path / "x.sqlite", scripted, adapters=["cam"]) as index:
        with pytest.raises(BadConfig, match="contains no clip"):
            search(client_of(scripted), index, "dim")
        update_index(client_of(scripted), index, [videos])
        with pytest.raises(BadRequest, match="the query is empty"):
            search(client_of(scripted), index, " \n")
        with pytest.raises(BadRequest, match=r"write \{\} once"):
            ask_for("x", "is there?")
        with pytest.raises(UnknownAdapter, match="'zzz'"):
            search(client_of(scripted), index, "dim", adapter="zzz")
        with pytest.raises(BadConfig, match="was made with the model 'scripted'; the server has 'other'"):
            search(client_of(ScriptedClient(model="other")), index, "dim")
        with pytest.raises(BadConfig, match="version v1 of adapter 'cam'; the server has v2"):
            search(client_of(ScriptedClient(version="v2")), index, "dim")


def test_the_score_is_the_probability_of_yes() -> None:
    assert vqa_score(answer_of("Yes", ("Yes", 0.5), ("yes", 0.25), ("No", 0.125))) == pytest.approx(0.75)
    assert vqa_score(answer_of("no", ("no", 0.9), ("yesterday", 0.05))) == 0.0
    assert vqa_score(answer_of("no")) == 0.0


def test_head_answers_become_words_that_can_be_searched() -> None:
    def said(**fields: Any) -> list[tuple[str, float]]:
        common = {"label": "", "confidence": 0.5, "labels": ("car", "bus"), "adapter": "a", "head": "jam"}
        result = HeadResult(**{**common, **fields}, timings=TIMINGS, total_s=0.0)
        return [(statement.text, statement.confidence) for statement in statements_of_head("a/jam", result)]

    def box(label: str, score: float) -> FoundBox:
        return FoundBox(label=label, label_id=0, score=score, left=0, top=0, right=1, bottom=1)

    boxes = (box("car", 0.9), box("bus", 0.4), box("car", 0.3))
    assert said(task="detection", boxes=boxes) == [("car", 0.9), ("bus", 0.4)]
    assert said(task="multi_label", chosen=(1,), scores=(0.1, 0.8)) == [("bus", 0.8)]
    assert said(task="binary", label="yes") == [("jam", 0.5)] and said(task="binary", label="no") == []
    assert said(task="binary", label="defect") == [("defect", 0.5)]
    assert said(task="counting", label="three") == [("three jam", 0.5)]
    assert said(task="classification", label="bus") == [("bus", 0.5)]


# -- the contact sheet -------------------------------------------------------------------------------------------------


def test_the_sheet_shows_the_clips_in_their_order(videos: Path, tmp_path: Path) -> None:
    scripted, path = ScriptedClient(), tmp_path / "sheet.png"
    with open_index(tmp_path / "x.sqlite", scripted) as index:
        update_index(client_of(scripted), index, [videos / "a.mp4"])
        hits = search(client_of(scripted), index, "bright")
        write_sheet(path, "bright caf\u00e9", hits, [index.frames(hit.clip) for hit in hits])
    assert path.read_bytes().startswith(b"\x89PNG")
    sheet = cv2.imread(str(path))
    assert sheet is not None
    centers = [sheet[140, 10 + 330 * place + 160].mean() for place in range(4)]
    assert np.allclose(centers, [SHADES[name] for name in ("bright", "grey", "dim", "dark")], atol=12)
    with pytest.raises(BadConfig, match=r"ends in \.png"):
        write_sheet(tmp_path / "sheet.jpg", "x", hits, [()] * len(hits))
    with pytest.raises(BadConfig, match="cannot write"):
        write_sheet(tmp_path / "no" / "sheet.png", "x", [], [])


def test_times_are_written_as_a_player_does() -> None:
    assert [clock(seconds) for seconds in (0, 59.96, 123.5, 3723.25)] == ["0:00.0", "1:00.0", "2:03.5", "1:02:03.2"]
