"""Retrieval over a scripted client: contents of the index, updates, candidates, ranking, the sheet, and measures."""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest
import scipy.special
from sklearn.metrics import average_precision_score

from apps.retrieval import RetrievalIndex, clock, make_settings, search, search_like, update_index, write_sheet
from apps.retrieval.indexing import statements_of_head
from apps.retrieval.media import Clip, Fingerprint, Media, find_media
from apps.retrieval.ranking import NO_EVIDENCE, Hit, Match, combine, find_evidence, select_candidates
from apps.retrieval.store import FORMAT_VERSION, Statement, StoredClip
from benchmarks.recall import (
    SIGNALS,
    Collection,
    Query,
    Ranking,
    expected_by_chance,
    goals_of,
    measure_copies,
    measure_recall,
    ranked,
    summary,
)
from tests.apps.scripted import SHADES, ScriptedClient, box_of, head_result, refuse_to_list
from tests.server.running import png
from tests.video_files import write_video
from vlora.client import Client
from vlora.errors import BadConfig, BadImage, BadRequest, UnknownAdapter, VLoraError
from vlora.run_folder import lock_file

ORDER = ("dim", "bright", "dark", "grey")


class Indexed:
    """An index with its scripted client."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.path, self.scripted = path, ScriptedClient()
        self.index = RetrievalIndex(path, make_settings(cast(Client, self.scripted), **settings))

    def update(self, *paths: object, client: ScriptedClient | None = None, **options: Any) -> Any:
        return update_index(cast(Client, client or self.scripted), self.index, list(map(str, paths)), **options)

    def search(self, query: str, client: ScriptedClient | None = None, **options: Any) -> Any:
        return search(cast(Client, client or self.scripted), self.index, query, **options)

    def texts(self) -> dict[tuple[str, float], list[str]]:
        return {
            (Path(clip.path).name, clip.start_s): [each.text for each in self.index.statements(clip.id)]
            for clip in self.index.clips()
        }

    def say(self, *statements: tuple[str, float]) -> list[int]:
        """Add a clip for each statement, with its confidence. Returns the clips' ids."""
        media = self.index.begin(Media(self.path.with_name("a.mp4"), "video"), Fingerprint(1, 1, "x"))
        for number, (text, confidence) in enumerate(statements):
            self.index.add(media, Clip(number, float(number), 1.0, ()), [Statement("q", text, confidence)])
        return [clip.id for clip in self.index.clips()]


@pytest.fixture
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Indexed]:
    """With settings of the index as its parameter."""
    made = Indexed(tmp_path / "x.sqlite", **getattr(request, "param", {}))
    with made.index:
        yield made


with_adapter = pytest.mark.parametrize("here", [{"adapters": ["cam"]}], indirect=True, ids=["adapter"])


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """Two videos with a second of each shade, and a picture in a folder of its own."""
    folder = tmp_path / "videos"
    (folder / "pictures").mkdir(parents=True)
    write_video(folder / "a.mp4", [SHADES[name] for name in ORDER])
    write_video(folder / "b.mp4", [SHADES["dark"]])
    (folder / "pictures" / "c.png").write_bytes(png(SHADES["bright"], (900, 300)))
    return folder


# -- the index ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("here", [{"max_side": 48}], indirect=True, ids=["small"])
def test_an_index_has_a_caption_and_frames_of_each_clip(here: Indexed, videos: Path) -> None:
    assert here.update(videos) == (6, 3, 0, 0, 0)
    assert here.texts() == {
        **{("a.mp4", float(second)): [f"a {name} picture"] for second, name in enumerate(ORDER)},
        ("b.mp4", 0.0): ["a dark picture"],
        ("c.png", 0.0): ["a bright picture"],
    }
    clips = here.index.clips()
    assert here.index.statements(clips[0].id)[0].confidence == pytest.approx(0.5)
    frames = [np.frombuffer(here.index.frames(clip.id)[0], np.uint8) for clip in clips]
    sizes = {cast(Any, cv2.imdecode(frame, cv2.IMREAD_COLOR)).shape[:2] for frame in frames}
    assert sizes == {(36, 48), (16, 48)}, "the longer side of each frame is at most --max-side"


@with_adapter
def test_heads_read_as_many_frames_of_a_clip_as_they_have(here: Indexed, videos: Path) -> None:
    assert (here.index.settings.num_frames, here.index.settings.heads) == (3, ("cam/night", "cam/moves"))
    here.update(videos / "b.mp4", videos / "pictures")
    both = {("describe the image.", 3), ("describe the image.", 1)}
    assert set(here.scripted.asked) == {("night", 1), ("moves", 3), *both}
    assert here.texts()["b.mp4", 0.0] == ["night", "a dark picture", "stands"]
    assert here.index.versions == {"cam": "v1"}
    here.update(videos / "a.mp4")
    for options, number in (({"adapter": "cam"}, 3), ({}, 1), ({"adapter": "cam", "num_frames": 2}, 2)):
        here.scripted.asked.clear()
        here.search("dim", inside=[videos / "a.mp4"], **cast(Any, options))
        assert {count for _, count in here.scripted.asked} == {number}, "frames follow the ranking adapter's heads"


def test_a_second_run_reads_new_and_changed_files_only(here: Indexed, videos: Path, tmp_path: Path) -> None:
    here.update(videos)
    here.scripted.asked.clear()
    write_video(videos / "b.mp4", [SHADES["grey"], SHADES["bright"]])
    write_video(videos / "d.mp4", [SHADES["dim"]])
    os.utime(videos / "a.mp4", (1, 1))  # the same content
    (videos / "pictures" / "c.png").unlink()
    assert here.update(videos) == (3, 2, 1, 1, 0) and len(here.scripted.asked) == 3
    assert [name for name, _ in here.texts()] == ["a.mp4"] * 4 + ["b.mp4"] * 2 + ["d.mp4"]
    assert here.texts()["b.mp4", 1.0] == ["a bright picture"]
    clips = here.index.clips()
    assert [clip for clip, _ in here.index.match(["dark"])] == [clips[2].id], "words of removed clips are not found"
    assert here.update(videos) == (0, 0, 3, 0, 0)
    before = here.path.read_bytes()
    with RetrievalIndex(here.path) as index:
        assert search(cast(Client, here.scripted), index, "grey")
    assert here.path.read_bytes() == before, "a search does not write to the index"


def test_a_stopped_or_failed_update_continues_where_it_ended(here: Indexed, videos: Path) -> None:
    stop, said = threading.Event(), list[str]()
    long = write_video(videos / "long.mp4", [SHADES["dim"]] * 30)
    first = here.update(long, stop=stop, on_clip=lambda clip: stop.set())
    assert 0 < first.clips < 30
    rest = here.update(long)
    assert first.clips + rest.clips == 30 == len(here.index.clips()) == len(here.scripted.asked)
    here.scripted.fails_at = 32
    with pytest.raises(BadImage, match="image 1 cannot be read"):
        here.update(videos / "a.mp4", videos / "b.mp4", say=said.append)
    assert said and len(here.index.clips()) < 35
    here.scripted.fails_at = None
    here.update(videos / "a.mp4", videos / "b.mp4")
    assert len(here.index.clips()) == 35


def test_files_and_folders_that_cannot_be_read_do_not_end_the_others(
    here: Indexed, videos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    (videos / "0.mp4").write_bytes(b"no video")
    write_video(videos / "empty.mp4", [])
    with pytest.raises(BadImage, match=r"0\.mp4"):
        here.update(videos, say=said.append)
    assert len(here.index.clips()) == 6 and len(said) == 2
    failed: list[VLoraError] = []
    assert here.update(videos, on_failed=failed.append, say=said.append) == (0, 0, 3, 0, 2)
    assert len(failed) == 2 and len(said) == 2
    assert here.update(videos / "0.mp4", on_failed=failed.append) == (0, 0, 0, 0, 1) and len(failed) == 3
    for name in ("0.mp4", "empty.mp4"):
        (videos / name).unlink()
    (videos / "Z\udcfcrich.png").write_bytes(png(SHADES["bright"]))
    (videos / "locked").mkdir()
    refuse_to_list(videos / "locked", monkeypatch)
    said.clear()
    with pytest.raises(BadImage, match=r"cannot read folder '.*locked': Permission denied"):
        here.update(videos, say=said.append)
    assert len(here.index.clips()) == 6 and len(said) == 2
    assert "Z\\udcfcrich.png': its path is not UTF-8; rename it" in said[1]
    with pytest.raises(BadImage, match=r"cannot read folder '.*locked': Permission denied"):
        here.update(videos / "locked", say=said.append)


def test_deleted_files_are_removed_by_any_path_to_their_folder(
    here: Indexed, videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    here.update("../videos")
    (videos / "a.mp4").unlink()
    assert here.update("../videos").removed == 1
    (videos / "b.mp4").unlink()
    (videos / "pictures" / "c.png").unlink()
    with pytest.raises(BadImage, match="contains no video"):
        here.update("../videos")
    assert len(here.index.clips()) > 0, "the folder may be a disk that is not mounted"


def test_paths_and_files_that_cannot_be_used_are_errors(here: Indexed, videos: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    for path, message in (
        (str(tmp_path / "none"), "contains no video and no picture"),
        (str(tmp_path / "nowhere"), "no file or folder"),
        ("rtsp://camera/main", "made of files"),
        ("x" * 256, "cannot read 'x+': File name too long"),
    ):
        with pytest.raises(BadImage, match=message):
            find_media([path], list[BadImage]().append, print)
    here.update(videos)
    whole = here.path.read_bytes()
    with contextlib.closing(sqlite3.connect(tmp_path / "other.sqlite")) as other:
        other.executescript("CREATE TABLE t (a); PRAGMA user_version = 1;")
    damaged = {"short": whole[:-4096], "stub": whole[:50], "garbled": whole[:4096] + bytes(len(whole) - 4096)}
    for name, data in {**damaged, "text": b"no database" * 100, "old": whole}.items():
        (tmp_path / f"{name}.sqlite").write_bytes(data)
    with contextlib.closing(sqlite3.connect(tmp_path / "old.sqlite")) as old:
        old.execute(f"PRAGMA user_version = {FORMAT_VERSION + 1}")
    for name, message in (
        ("nowhere", "no index .* create it with vlora index"),
        ("n" * 256, "cannot read index .*: File name too long"),
        ("old.sqlite/x", "cannot read index .*: Not a directory"),
        ("text", "not an SQLite file"),
        ("other", "a database of another program"),
        ("old", f"has format {FORMAT_VERSION + 1}; this version of vlora uses {FORMAT_VERSION}"),
        *((name, "damaged") for name in damaged),
    ):
        with pytest.raises(BadConfig, match=message):
            RetrievalIndex(tmp_path / f"{name}.sqlite")
        if "cannot read" in message:
            with pytest.raises(BadConfig, match=message):
                Indexed(tmp_path / f"{name}.sqlite")


def test_one_process_updates_an_index_at_a_time(here: Indexed, videos: Path, tmp_path: Path) -> None:
    here.update(videos / "a.mp4")
    with RetrievalIndex(here.path) as other, other.updating():
        with pytest.raises(BadConfig, match=r"x\.sqlite' is in use by process \d+ .*wait for it, stop it"):
            here.update(videos)
        assert len(here.search("grey")) == 4, "it can be searched meanwhile"
    assert here.update(videos).clips == 2
    # Two processes create one index.
    path, settings = tmp_path / "new.sqlite", make_settings(cast(Client, here.scripted))
    path.touch()
    with lock_file(tmp_path / "new.sqlite-lock", "x", "index"), pytest.raises(BadConfig, match="in use by process"):
        RetrievalIndex(path, settings)
    with RetrievalIndex(path, settings) as first, RetrievalIndex(path, settings) as second:
        assert first.settings == second.settings == settings
        media = first.begin(Media(tmp_path / "a.mp4", "video"), Fingerprint(1, 1, "x"))
        first.add(media, Clip(0, 0.0, 1.0, ()), [])
        with pytest.raises(BadConfig, match=r"changed by another process during the update .*; index again$"):
            first.add(media, Clip(0, 0.0, 1.0, ()), [])  # that is no damage


@with_adapter
def test_answers_of_another_model_or_version_are_not_added(here: Indexed, videos: Path) -> None:
    here.update(videos / "b.mp4")
    (videos / "b.mp4").unlink()
    other, reloaded = ScriptedClient(model="other"), ScriptedClient()
    with pytest.raises(BadConfig, match=r"with the model 'scripted'; the server has 'other' .*--served-model-name"):
        here.update(videos, client=other)
    assert len(here.index.clips()) == 1 and not other.asked
    reloaded.version_once_loaded = "v2"
    with pytest.raises(BadConfig, match="version v1 of adapter 'cam'; the server has v2"):
        here.update(videos / "a.mp4", client=reloaded)
    assert reloaded.asked and len(here.index.clips()) == 1


def test_clips_that_an_update_removes_during_a_search_are_left_out(here: Indexed, videos: Path, tmp_path: Path) -> None:
    with RetrievalIndex(here.path) as other:
        here.update(videos / "a.mp4", videos / "b.mp4")
        before = here.search("dark")
        clips = here.index.clips()
        here.index.clips = lambda: clips  # type: ignore[method-assign]  # read before the update
        write_video(videos / "b.mp4", [SHADES["bright"]])
        update_index(cast(Client, here.scripted), other, [videos / "b.mp4"])
        assert {hit.source for hit in here.search("dark")} == {str(videos / "a.mp4")}
        frames = [here.index.frames(hit.clip) for hit in before]
        assert () in frames, "the new clip does not have the id of the removed one"
        write_sheet(tmp_path / "sheet.png", "dark", before, frames)
    assert (tmp_path / "sheet.png").exists()


# -- ranking -----------------------------------------------------------------------------------------------------------


def test_clips_are_ranked_by_the_probability_of_yes_and_shown_in_that_order(
    here: Indexed, videos: Path, tmp_path: Path
) -> None:
    here.update(videos)

    def places(hits: Any) -> list[tuple[str, float]]:
        return [(Path(hit.source).name, hit.start_s) for hit in hits]

    hits = here.search("grey")
    assert places(hits)[:3] == [("a.mp4", 3.0), ("a.mp4", 0.0), ("a.mp4", 1.0)]
    assert [hit.rank for hit in hits] == [1, 2, 3, 4, 5, 6]
    assert hits[0].yes == pytest.approx(0.9, abs=0.02), "spellings of yes are added"
    assert hits[0].words > 0 == hits[1].words and hits[0].why() == f"yes {hits[0].yes:.2f}; a grey picture 0.50"
    assert hits[1].why() == f"yes {hits[1].yes:.2f}; (a dim picture)", "without a word of the query"
    few = here.search("grey", inside=[videos / "b.mp4", videos / "pictures"])
    assert sorted(Path(hit.source).name for hit in few) == ["b.mp4", "c.png"] and few[0].score >= few[1].score
    here.scripted.asked.clear()
    assert places(here.search("dark", num_candidates=2)) == [("a.mp4", 2.0), ("b.mp4", 0.0)]
    assert len(here.scripted.asked) == 2, "the model reads only the candidates of the words"
    for most, read in ((1, 1), (3, 3)):
        found = here.search("dark", num_candidates=most)
        assert [hit.yes is not None for hit in found].count(True) == read and len(found) == max(most, 2)
    assert len(here.search("dark", top=1)) == 1

    path, hits = tmp_path / "sheet.png", here.search("bright", inside=[videos / "a.mp4"])
    write_sheet(path, "bright caf\u00e9", hits, [here.index.frames(hit.clip) for hit in hits])
    assert path.read_bytes().startswith(b"\x89PNG")
    sheet = cv2.imread(str(path))
    assert sheet is not None
    centers = [sheet[140, 10 + 330 * place + 160].mean() for place in range(4)]
    assert np.allclose(centers, [SHADES[name] for name in ("bright", "grey", "dim", "dark")], atol=12)
    for name, message in (("sheet.jpg", r"ends in \.png"), ("no/sheet.png", "cannot write")):
        with pytest.raises(BadConfig, match=message):
            write_sheet(tmp_path / name, "x", hits, [()] * len(hits))
    # Times are written as a player does.
    assert [clock(seconds) for seconds in (0, 59.96, 123.5, 3723.25)] == ["0:00.0", "1:00.0", "2:03.5", "1:02:03.2"]


def test_candidates_are_matches_and_then_clips_spread_evenly() -> None:
    clips = [StoredClip(number, "a.mp4", "video", float(number), 1.0) for number in range(100)]
    matched = {70: 0.1, 5: 0.3, 40: 0.2}
    assert [clip.id for clip in select_candidates(clips, matched, 2)] == [5, 40]
    chosen = [clip.id for clip in select_candidates(clips, matched, 8)]
    assert chosen[:4] == [5, 40, 70, 0] and chosen[-1] == 99 and len(chosen) == 8
    assert np.diff(chosen[3:]).min() >= 20
    assert len(select_candidates(clips, matched, 1000)) == 100
    assert len(select_candidates(clips, {}, 1)) == 1


@pytest.mark.parametrize(
    ("query", "text", "share"),
    [
        ("a digit 3", "a white digit three", 1.0),
        ("digit three", "digits: 3", 1.0),
        ("two red cars", "a red car", 3 / 4),  # two, red, cars, "red cars"
        ("two red cars", "2 red car", 1.0),
        ("stop sign", "a stop", 1 / 2),
        ('"red" car* NOT-', "red or car", 2 / 3),
        ("the", "the end", 1.0),
        ("?!", "what ?!", 0.0),
        ("trees", "a digit", 0.0),
    ],
)
def test_words_match_in_all_their_forms_and_spellings(here: Indexed, query: str, text: str, share: float) -> None:
    """Of a clip among two, so that all terms weigh the same. share: the terms found by all terms."""
    first, _ = here.say((text, 0.8), ("nothing", 1.0))
    assert find_evidence(here.index, query).get(first, NO_EVIDENCE).words == pytest.approx((0.8 * share) ** 2)


@pytest.mark.parametrize("here", [{"adapters": ["cam"], "heads": ["cam/night"]}], indirect=True, ids=["heads"])
def test_an_answer_of_a_head_counts_with_its_confidence_and_the_name_of_the_head(here: Indexed) -> None:
    here.say(("a night", 0.5), *[("a day", 0.5)] * 6)
    media = here.index.begin(Media(here.path.with_name("b.png"), "picture"), Fingerprint(1, 1, "y"))
    for number, (label, confidence) in enumerate((("stop", 0.9), ("stop", 0.3), ("yield", 0.9))):
        here.index.add(media, Clip(number, 0.0, 0.0, ()), [Statement("cam/night", label, confidence)])
    found = find_evidence(here.index, "a stop at nights")
    stop, doubtful, other = (found.get(clip.id) for clip in here.index.clips()[-3:])
    assert stop is not None and doubtful is not None and other is None
    assert (stop.heads, doubtful.heads, stop.words) == (pytest.approx(0.81), pytest.approx(0.09), 0.0)
    assert stop.matches == (
        Match(by="heads", asked="cam/night", text="stop", confidence=0.9, words=("stop", "nights")),
    )


def test_rare_words_and_words_in_a_row_weigh_more(here: Indexed) -> None:
    others = ("a tree", "a dog", "a cat", "a house", "a sign")
    captions = ("a red bus and a blue car", "a blue bus and a red car", *others)
    first, second, *_ = here.say(*((caption, 1.0) for caption in captions))
    for query, best, other in (("a red car", second, first), ("a blue car", first, second)):
        found = find_evidence(here.index, query)
        assert found[best].words > 1.2 * found[other].words > 0
        assert found.keys() == {first, second}, "an article is no evidence"
    rare, common = (find_evidence(here.index, query)[first].words for query in ("bus tree", "house car"))
    assert rare == common < 0.5, "a word of two clips weighs less than a word of one"


NOISE: dict[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "surely wrong": lambda draws, signal: draws.permutation(signal),
    "about equal": lambda draws, signal: 0.5 + draws.normal(0, 0.02, len(signal)),
    "weak": lambda draws, signal: 0.15 * draws.permutation(signal),
}


@pytest.mark.parametrize(
    ("missing", "spoiled", "noise"),
    [
        *(("", name, noise) for name in ("words", "heads", "yes") for noise in NOISE),
        # Without heads nothing tells which of two is right: clear words are believed.
        *(("heads", "yes", noise) for noise in NOISE),
        *(("heads", "words", noise) for noise in ("about equal", "weak")),
        *((missing, "", "") for missing in ("heads", "")),
    ],
)
def test_signals_together_rank_no_worse_than_the_best_if_one_is_noise(missing: str, spoiled: str, noise: str) -> None:
    """Mean average precision of queries for 8 of 96 clips."""
    draws, found = np.random.default_rng(0), []
    for _ in range(40):
        fits = draws.permutation(96) < 8
        signals = {name: np.where(fits, draws.beta(3, 1.5, 96), draws.beta(0.3, 3, 96)) for name in SIGNALS}
        if spoiled:
            signals[spoiled] = NOISE[noise](draws, signals[spoiled])
        if missing:
            signals[missing] = np.zeros(96)
        together = combine(*(signal.tolist() for signal in signals.values()))
        found.append([average_precision_score(fits, each) for each in (together, *signals.values())])
    combined, *single = np.mean(found, 0)
    assert combined > max(single) - 0.04


NO = [0.0] * 4


@pytest.mark.parametrize(
    ("words", "heads", "yes", "order"),
    [
        ([0.9, 0.3, 0.0, 0.0], NO, [1e-4, 1e-3, 4e-3, 2e-3], [0, 1, 2, 3]),  # a model that says no to all
        ([0.9, 0.3, 0.0, 0.0], NO, [0.97, 0.98, 0.99, 0.99], [0, 1, 2, 3]),  # or yes
        ([0.2, 0.2, 0.2, 0.1], [0.0, 0.95, 0.3, 0.0], [0.5, 0.5, 0.5, 0.5], [1, 2, 0, 3]),
        ([0.5, 0.4, 0.4, 0.1], NO, [0.99, 0.02, 0.97, 0.02], [0, 2, 1, 3]),  # one that tells the same clips apart
        ([0.9, 0.0, 0.8, 0.1], NO, [0.99, 0.1, None, 0.01], [0, 2, 1, 3]),  # that has not read one
        (NO, NO, [0.001, 0.003, 0.002, 0.0], [1, 2, 0, 3]),  # only the model says something
    ],
)
def test_the_signal_that_tells_clips_apart_decides(
    words: list[float], heads: list[float], yes: list[float | None], order: list[int]
) -> None:
    for copies in (1, 3):  # correlations count from ten clips on
        scores = combine(words * copies, heads * copies, yes * copies)
        assert sorted(range(4), key=lambda place: -scores[place]) == order


def test_scores_are_probabilities() -> None:
    for words, score in (([1.0, 0.0], [1.05 / 1.1, 0.05 / 1.1]), ([0.0], [0.05 / 1.1])):  # of one signal, alone
        assert combine(words, [0.0] * len(words), [None] * len(words)) == pytest.approx(score)
    doubtful, sure = (combine([0.0] * 2, [0.0] * 2, [1e-4, yes]) for yes in (0.02, 0.98))
    assert max(doubtful) < 0.2 and sure[1] > 0.95 and sure[0] < 0.2, "a model that says no to all has found nothing"


@pytest.mark.parametrize("least", [1.0, 0.9, 0.7])
@pytest.mark.parametrize("signal", ["words", "heads"])
@pytest.mark.parametrize("count", [100, 10, 2])
def test_what_selected_the_candidates_does_not_contradict_the_model(least: float, signal: str, count: int) -> None:
    """Of 1,000 clips, the model reads those that words or heads prefer, which hardly differ by these: it decides."""
    draws, found = np.random.default_rng(0), []
    for _ in range(20):
        fits = draws.permutation(count) < count // 2
        given = np.concatenate([draws.uniform(least, 1.0, count), np.zeros(1000 - count)]).tolist()
        yes = [*np.where(fits, draws.beta(6, 1.5, count), draws.beta(0.3, 3, count)), *[None] * (1000 - count)]
        none = [0.0] * 1000
        scores = combine(given, none, yes) if signal == "words" else combine(none, given, yes)
        found.append(average_precision_score(fits, scores[:count]))
    assert np.mean(found) > 0.95


def test_two_candidates_or_one_are_no_sample_to_measure_a_correlation_on() -> None:
    for words in ([0.9, 1.0], [1.0, 0.9], [1.0, 1.0]):
        first, second, *_ = combine([*words, *[0.0] * 8], [0.0] * 10, [0.99, 0.001, *[None] * 8])
        assert first > second
    scores = [combine([1.0, *[0.0] * 9], [0.0] * 10, [yes, *[None] * 9]) for yes in (None, 0.001, 0.99)]
    without, no, yes = (np.diff(scipy.special.logit(each)).tolist() for each in scores)
    assert no == pytest.approx(without) and yes == pytest.approx(without), "one is compared with itself"


@with_adapter
def test_queries_that_cannot_be_ranked_are_errors(here: Indexed, videos: Path) -> None:
    with pytest.raises(BadConfig, match="contains no clip"):
        here.search("dim")
    here.update(videos)
    with pytest.raises(BadRequest, match=r"write \{\} once"):
        here.search("x", question="is there?")
    wrong: tuple[tuple[dict[str, Any], type[VLoraError], str], ...] = (
        ({"query": " \n"}, BadRequest, "the query is empty"),
        ({"adapter": "zzz"}, UnknownAdapter, "'zzz'"),
        ({"client": ScriptedClient(model="other")}, BadConfig, "model 'scripted'; the server has 'other'"),
        ({"client": ScriptedClient(version="v2")}, BadConfig, "version v1 of adapter 'cam'; the server has v2"),
    )
    for options, kind, message in wrong:
        with pytest.raises(kind, match=message):
            here.search(**{"query": "dim", **options})


def test_answers_of_heads_become_words() -> None:
    boxes = (box_of("car", 0.9), box_of("bus", 0.4), box_of("car", 0.3))
    said: tuple[tuple[str, dict[str, Any], list[tuple[str, float]]], ...] = (
        ("detection", {"boxes": boxes}, [("car", 0.9), ("bus", 0.4)]),
        ("multi_label", {"chosen": (1,), "scores": (0.1, 0.8)}, [("bus", 0.8)]),
        ("binary", {"label": "yes"}, [("jam", 0.5)]),
        ("binary", {"label": "no"}, []),
        ("binary", {"label": "defect"}, [("defect", 0.5)]),
        ("counting", {"label": "three"}, [("three jam", 0.5)]),
        ("classification", {"label": "bus"}, [("bus", 0.5)]),
    )
    for task, fields, words in said:
        result = head_result(task, **{"confidence": 0.5, "labels": ("car", "bus"), "head": "jam", **fields})
        found = [(statement.text, statement.confidence) for statement in statements_of_head("a/jam", result)]
        assert found == words, (task, fields)


# -- measures ----------------------------------------------------------------------------------------------------------


def hits_of(values: list[float]) -> list[Hit]:
    """A hit for each second of a video, best first in the order of the values."""
    plain: dict[str, Any] = {"seconds": 1.0, "words": 0.0, "heads": 0.0, "yes": None, "matches": (), "statements": ()}
    made = [
        Hit(rank=0, source="a.mp4", start_s=float(second), score=value, clip=second, **plain)
        for second, value in enumerate(values)
    ]
    return sorted(made, key=lambda hit: -hit.score)


def test_recall_and_precision_are_those_of_scikit_learn_and_of_all_orders() -> None:
    draws = np.random.default_rng(0)
    values, wanted = draws.random(30).tolist(), draws.permutation(30)[:4].tolist()
    ranking = ranked(hits_of(values), Query("x", tuple(("a.mp4", second) for second in wanted)))
    found = summary([ranking])
    relevant = np.isin(np.arange(30), wanted)
    assert found["mAP"] == pytest.approx(average_precision_score(relevant, values))
    best = np.argsort(values)[::-1]
    assert found["recall at 5"] == pytest.approx(relevant[best[:5]].sum() / 4)
    # Clips that were not found, and equal values.
    assert ranked(hits_of([0.5, 0.0]), Query("x", (("a.mp4", 0), ("a.mp4", 1)))) == Ranking((1.0,), 2)
    assert ranked(hits_of([0.5] * 3), Query("x", (("a.mp4", 1),))) == Ranking((2.0,), 1)
    # By chance: the mean over all orders.
    orders = [hits_of(list(order)) for order in itertools.permutations((0.1, 0.2, 0.3, 0.4, 0.5, 0.6))]
    query = Query("x", (("a.mp4", 0), ("a.mp4", 3)))
    every = summary([ranked(hits, query) for hits in orders])
    assert {name: pytest.approx(value) for name, value in expected_by_chance(6, [2]).items()} == every


def test_a_picture_finds_its_copies_and_what_looks_like_it(here: Indexed, videos: Path, tmp_path: Path) -> None:
    here.update(videos)
    client, picture = cast(Client, here.scripted), png(SHADES["bright"] + 3, (90, 30))
    hits = search_like(client, here.index, picture)
    assert {(Path(hit.source).name, hit.start_s) for hit in hits[:2]} == {("a.mp4", 1.0), ("c.png", 0.0)}
    assert len(hits) == 6 and hits[0].score > 0.99 and hits[-1].score < 0
    assert hits[0].why() == "(a bright picture)" and hits[0].yes is None
    embedded = here.scripted.num_embedded
    assert embedded == 6 + 3, "each frame once, and the picture with three margins"
    inside = search_like(client, here.index, picture, inside=[videos / "b.mp4"], top=3)
    assert [Path(hit.source).name for hit in inside] == ["b.mp4"] and here.scripted.num_embedded == embedded + 3
    (videos / "b.mp4").unlink()
    here.update(videos)
    assert len(search_like(client, here.index, picture)) == 5, "embeddings are removed with their clips"
    for row in measure_copies(client, here.path, "shades"):
        assert row["queries"] == 5 and row["recall at 5"] == 1.0
    stop = threading.Event()
    stop.set()
    here.update(videos / "pictures")
    with RetrievalIndex(here.path) as index:
        assert len(search_like(client, index, picture, stop=stop)) == 5


def test_every_method_is_measured_on_the_same_queries(tmp_path: Path) -> None:
    (tmp_path / "shades").mkdir()
    write_video(tmp_path / "shades" / "a.mp4", [SHADES[name] for name in ORDER])

    def rows_of(shift: int) -> dict[str, dict[str, Any]]:
        queries = [Query(name, (("a.mp4", (second + shift) % 4),)) for second, name in enumerate(ORDER)]
        caption = "describe the image."
        own = Collection(str(tmp_path / "shades"), 1, caption, caption, ["night"], {"shades": queries})
        rows = measure_recall(cast(Client, ScriptedClient()), own, tmp_path, "cam", "Is there {}?")
        assert all(row["queries"] == 4 and row["videos"] == "shades" for row in rows)
        return {row["method"]: row for row in rows}

    rows = rows_of(0)
    assert rows["random"]["recall at 1"] == 0.25 and len(rows) == 10
    heads = rows.pop("adapter, heads")
    assert heads["recall at 10"] == 0.0, "no query names night or day"
    assert all(row["recall at 1"] == row["mAP"] == 1.0 for name, row in rows.items() if name != "random")
    assert (tmp_path / "shades.png").exists()
    rows = rows_of(1)
    assert all(row["recall at 1"] == 0.0 for name, row in rows.items() if name != "random")
    words, yes = (rows[f"base model, {name}"]["recall at 10"] for name in ("words", "yes"))
    assert (words, yes) == (0.0, 1.0), "words find no other second"


def test_goals_compare_signals_models_and_numbers_of_candidates() -> None:
    def row(method: str, precision: float, at_5: float, at_10: float) -> dict[str, Any]:
        return {"videos": "a", "method": method, "mAP": precision, "recall at 5": at_5, "recall at 10": at_10}

    rows = [row("random", 0.0, 0.0, 0.0)]
    for owner, more in (("base model", 0.0), ("adapter", 0.25)):
        rows += [row(f"{owner}, words", 0.25 + more, 0.5, 0.5), row(f"{owner}, yes", 0.5, 0.5, 0.5)]
        rows += [row(f"{owner}, together", 0.5, 0.5 + more, 0.75), row(f"{owner}, together, 20 read", 0.5, 0.5, 0.5)]
    rows.append(row("adapter, heads", 0.75, 0.0, 0.0))
    assert [goal.value for goal in goals_of(rows)] == [0.0, -0.25, -0.25, -0.25, 0.25]
