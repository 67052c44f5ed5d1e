"""The demo's own code: its queries, counts and output files, with fusing and serving scripted."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import cv2
import pytest
from rich.console import Console

import apps.demo

pytestmark = pytest.mark.slow
COMMAND = (sys.executable, "-m", "tests.cli.scripted_vlora")


def test_the_demo_reports_what_was_served_and_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps.demo, "TURNS", 2)
    monkeypatch.setattr(apps.demo, "TURN_S", 0.1)
    console = Console(file=io.StringIO(), width=80)
    result = apps.demo.run(tmp_path, command=COMMAND, console=console)
    assert json.loads((tmp_path / "report.json").read_text()) == result
    night, day, words = result["domains"]
    assert (night["served"], night["num_served"]) == (1.0, 12)
    assert (day["served"], day["num_served"]) == (0.75, 12)
    assert (words["served"], words["num_served"], words["answered_by"]) == (0.5, 12, "words")
    assert (day["before"], day["after"], day["adapter"]) == (0.1, 0.9, "fused-1")
    assert (day["stream"]["seconds"], day["stream"]["right"]) == (3, 2)
    counts = {kind: values["count"] for kind, values in result["latencies"].items()}
    # Two questions per domain, to the base model and to the adapter.
    beside = counts.pop("words beside streams")
    assert counts == {"head": 24, "words": 12, "stream": 3, "words beside heads": 12} and beside > 0
    gained = result["gained"]
    assert result["served"] == {"merged": 0, "mixed": 0, "unmerged": 51 + beside + gained["requests"]["unmerged"]}
    assert gained["requests"]["unmerged"] > 0 < gained["unmerged_only_per_s"] and gained["answers_per_s"] > 0
    for values in result["latencies"].values():
        assert values["p50_s"] is None or 0 < values["p50_s"] <= values["p95_s"]
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 for 3 domains, 0 rolled back" in shown and "0.750" in shown and max(map(len, shown.splitlines())) <= 80
    # The page has fusing and serving in one.
    page = (tmp_path / "report.html").read_text()
    assert page.count("<main>") == page.count("</main>") == 1
    assert 'href="fused/adapters/fused-1/"' in page and "0.750" in page and "http" not in page
    assert 'src="day.webm" poster="data:image/jpeg;base64,' in page and "3 seconds, 2 right" in page
    # The annotated video shows every frame, with the answer below the picture.
    capture = cv2.VideoCapture(str(tmp_path / "day.webm"))
    frames = []
    while (read := capture.read())[0]:
        frames.append(read[1])
    assert len(frames) == 30 and frames[5][:300].mean() < 60 < 200 < frames[25][:300].mean()
    assert frames[5][-48:].max() > 200


def test_the_demo_ends_with_the_exit_code_of_a_failed_fuse(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^7$"):
        apps.demo.run(tmp_path, plan="broken", command=COMMAND, console=Console(file=io.StringIO()))
