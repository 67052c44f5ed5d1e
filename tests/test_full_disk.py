"""A disk that is full: each writer names its file, keeps what was finished, leaves no part, and works again later.

A limit on the size of files stands for the disk: it acts on Python, sqlite and safetensors alike, and on any user.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import io
import shutil
from collections.abc import Callable
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest
import torch

from apps.image_query import PictureAnswer
from apps.retrieval.contact_sheet import write_sheet
from apps.retrieval.ranking import Hit
from apps.retrieval.store import IndexSettings, RetrievalIndex
from apps.video_analytics import Chunk, ChunkResult
from apps.video_analytics.annotate import AnnotatedVideo
from apps.video_analytics.result_files import COLUMNS, Rows
from atmm.tuning import tables
from atmm.tuning.tables import Bucket, Evenness
from fusion.folder import replace_results
from fusion.training.checkpoint import Checkpoint, Key
from fusion.training.features import FeatureCache
from tests.learning.test_store import files_of_at_most
from tests.server.running import png
from vlora.bench.gpu import runner
from vlora.bench.harness import Bench, Measured, Store, finish
from vlora.bench.report import Report
from vlora.cli.batch import AnswerFile
from vlora.cluster.adapter_state import AdapterState, DesiredAdapter
from vlora.run_folder import NotWritten, lock_folder, writing

LONG = "x" * 9000
KEY = Key("a", {}, "a")
RESULT = ChunkResult(
    source="s", head="h", index=0, start_s=0.0, time=datetime.datetime.now(datetime.UTC), latency_s=0.1, label=LONG
)
HIT = Hit(
    rank=1, source="s", start_s=0, seconds=1, score=1, words=1, heads=0, yes=None, matches=(), statements=(), clip=1
)
SETTINGS = IndexSettings(
    model="m", num_frames=1, fps=None, adapters=(), heads=(), questions=(LONG,), max_tokens=1, max_side=64
)


def score(folder: Path) -> None:
    checkpoint = Checkpoint(folder, resume=True)
    checkpoint.keep(KEY, 1.0, (), {"lora": torch.zeros(4)})
    checkpoint.keep_measured(KEY, "score", LONG)


def results(folder: Path) -> None:
    with replace_results(folder) as staged:
        (staged / "adapters").mkdir()
        (staged / "test").mkdir()
        (staged / "report.html").write_text(LONG)
        (staged / "report.json").write_text('{"adapters": [], "domains": []}')


def answers(folder: Path) -> None:
    file = AnswerFile(folder / "answers.jsonl")
    file.keep(None, None, None)
    for text in ("short", LONG):
        file.add(PictureAnswer(image=text[:5], text=text))


def state(folder: Path) -> None:
    own = AdapterState.open(folder)
    try:
        asyncio.run(own.commit({"a": DesiredAdapter(LONG)}))
    finally:
        own.close()


def measured(folder: Path) -> None:
    with writing(folder / "rows.json"):
        Store(folder, {}).write("rows", {"rows": LONG})


def report(folder: Path) -> None:
    bench = Bench(name="step", measure=lambda _: Measured([]))
    with writing(folder / "step.json"), contextlib.redirect_stdout(io.StringIO()):
        finish(bench, Report("step", [{"case": LONG}], []), folder, only_json=True)


def stage(folder: Path) -> None:
    with writing(folder / "stage.json"):
        runner.write(folder / "stage.json", {"summary": LONG})


def table(folder: Path) -> None:
    bucket = Bucket(16, 1, 8, 64, 64, 1, Evenness.SINGLE, torch.float32, "cpu")
    with writing(folder / "table.json"):
        tables.write(folder / "table.json", "cpu", "2026-01-01", [(bucket, "loop")] * 100)


def sheet(folder: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (90, 120, 3), np.uint8)
    write_sheet(folder / "found.png", "a sign", [HIT], [[cv2.imencode(".jpg", noise)[1].tobytes()]])


WRITERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "features": (
        lambda folder: FeatureCache(folder, "tower").get([["picture"]], lambda _: [torch.zeros(4000)]),
        r"tower-picture\.safetensors",
    ),
    "training": (
        lambda folder: Checkpoint(folder, resume=True).keep(KEY, 1.0, (), {"lora": torch.zeros(4000)}),
        "[0-9a-f]{24}",
    ),
    "score": (score, r"[0-9a-f]{24}/[0-9a-f]{24}\.json"),
    "packing": (lambda folder: Checkpoint(folder, resume=True).keep_packing(LONG), r"packing\.json"),
    "results": (results, r"results\.unfinished"),
    "rows": (lambda folder: Rows(f"{folder}/rows", COLUMNS).add_lines([RESULT]), r"rows\.jsonl"),
    "answers": (answers, r"answers\.jsonl"),
    "index": (lambda folder: RetrievalIndex(folder / "clips.sqlite", SETTINGS).close(), r"clips\.sqlite"),
    "state": (state, r"adapters\.json"),
    "measured": (measured, r"rows\.json"),
    "report": (report, r"step\.json"),
    "stage": (stage, r"stage\.json"),
    "table": (table, r"table\.json"),
    "sheet": (sheet, r"found\.png"),
}
REPLACES = ("measured", "report", "stage", "table", "sheet")  # a result of an earlier run
GROWS = ("rows", "answers", "index")  # files in which a cut line, or an empty database, is left


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_names_its_file_and_leaves_no_part(name: str, tmp_path: Path) -> None:
    writer, file = WRITERS[name]
    with files_of_at_most(4000), pytest.raises(NotWritten, match=rf"{tmp_path}/{file}.*: File too|full|I/O|No space"):
        writer(tmp_path)
    left = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert name in GROWS or left < 2000
    writer(tmp_path)
    if name in REPLACES:
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        with files_of_at_most(4000), pytest.raises(NotWritten):
            writer(tmp_path)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    if name == "answers":
        lines = (tmp_path / "answers.jsonl").read_bytes().splitlines()
        assert [msgspec.json.decode(line, type=PictureAnswer).text for line in lines] == ["short", "short", LONG]


def test_a_video_on_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenCV reports none."""
    video = AnnotatedVideo(tmp_path / "street")
    chunk = Chunk(0, 0.0, (), shown=(png(),), shown_s=(0.0,))
    video.add(chunk, RESULT)
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=0))
    with pytest.raises(NotWritten, match=r"street\.webm': No space left"):
        video.add(chunk, RESULT)
    video.close()


def test_a_failed_read_is_not_named_as_a_write() -> None:
    with pytest.raises(ValueError, match=r"/data/cat\.jpg cannot be read"), writing("/out", only_disks=True):
        try:
            raise OSError(errno.EIO, "Input/output error")
        except OSError as error:
            raise ValueError("/data/cat.jpg cannot be read: Input/output error") from error


def test_a_folder_is_locked_on_a_full_disk_too(tmp_path: Path) -> None:
    with files_of_at_most(0), lock_folder(tmp_path):
        pass
