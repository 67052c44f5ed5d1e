"""The demo's own part: what it asks, counts and writes, with fusing and serving scripted."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import cv2
import pytest
from rich.console import Console

import apps.demo
from vlora.errors import VLoraError

COMMAND = (sys.executable, "-m", "tests.cli.scripted_vlora")


def test_the_report_counts_what_was_served(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=140)
    result = apps.demo.run(tmp_path, command=COMMAND, console=console)
    assert json.loads((tmp_path / "report.json").read_text()) == result
    night, day = result["domains"]
    assert (night["served"], night["num_served"]) == (1.0, 12)
    assert (day["served"], day["num_served"]) == (0.75, 12)
    assert (day["before"], day["after"], day["adapter"]) == (0.1, 0.9, "night-day")
    assert (day["stream"]["seconds"], day["stream"]["right"]) == (3, 2)
    # 24 pictures, 2 x 3 x 2 questions in words, 3 seconds of video.
    assert result["served"] == {"merged": 0, "mixed": 0, "unmerged": 39}
    counts = {kind: values["count"] for kind, values in result["latencies"].items()}
    assert counts == {"head": 24, "words": 12, "stream": 3}
    assert all(0 < values["p50_s"] <= values["p95_s"] for values in result["latencies"].values())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 for 2 domains, 0 rolled back" in shown and "0.750 of 12" in shown and "is it night?" in shown


def test_the_annotated_video_shows_every_frame(tmp_path: Path) -> None:
    apps.demo.run(tmp_path, command=COMMAND, console=Console(file=io.StringIO()))
    capture = cv2.VideoCapture(str(tmp_path / "day.webm"))
    frames = []
    while (read := capture.read())[0]:
        frames.append(read[1])
    assert len(frames) == 30
    assert frames[5][:300].mean() < 60 < 200 < frames[25][:300].mean()  # the picture
    assert frames[5][-48:].max() > 200  # the answer below it


def test_a_failed_step_ends_it_with_a_word(tmp_path: Path) -> None:
    with pytest.raises(VLoraError, match="`vlora fuse` failed"):
        apps.demo.run(tmp_path, plan="broken", command=COMMAND, console=Console(file=io.StringIO()))
