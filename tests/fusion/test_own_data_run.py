"""A whole run on data of the user's own: pictures decoded as they are needed, videos, and a teacher's labels."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.console import Console

from fusion.commands import fuse
from fusion.embedded.model import build_model
from fusion.embedded.processor import build_processor
from tests.fusion.made import picture, video, write_plan


def test_from_files_to_adapters(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    build_model(seed=0).save_pretrained(str(tmp_path / "base"))
    build_processor().save_pretrained(str(tmp_path / "base"))
    for number in range(8):
        for place, label in enumerate(("left", "right")):
            video(tmp_path / "videos" / label / f"{number}.avi", 2 * number + place)
        picture(tmp_path / "pictures" / f"{number}.png", number, size=(40, 60))
    plan = write_plan(
        tmp_path,
        "data: {format: video_folder, path: videos, frames: 2}",
        "task: captioning\ndata: {format: unlabelled, path: pictures}\n"
        "teacher: {kind: callable, function: 'tests.fusion.test_own_data_run:half', allow_code: true}",
        more="base: base\ntraining: {steps: 2, batch_size: 4}\n",
    )
    report = fuse(plan, tmp_path / "out", console=Console(quiet=True))
    assert [(domain.task, domain.num_test) for domain in report.domains] == [("action", 2), ("captioning", 1)]
    labels = json.loads((tmp_path / "out" / "test" / "domain0" / "labels.json").read_text())
    assert {entry["label"] for entry in labels} == {"left", "right"} and len(labels[0]["frames"]) == 2
    assert sorted(path.name for path in (tmp_path / "out" / "adapters").iterdir())


def half(frames: list[object]) -> tuple[str, float]:
    """A teacher that knows one answer, and half believes it."""
    return "a red thing", 0.5
