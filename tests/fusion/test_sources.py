"""Sources: parts that share no picture, labels that mean something, folders of the user's own."""

from __future__ import annotations

import itertools
from pathlib import Path

import cv2
import numpy as np
import pytest

from fusion.drawn import ACTIONS, render_stream
from fusion.sources import _COLUMNS, BUILT_IN, load_source


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_parts_share_no_picture(name: str) -> None:
    splits = load_source(name, 0)
    pictures = [
        {sample.frames[0].tobytes() + sample.frames[-1].tobytes() for sample in part}
        for part in (splits.train, splits.validation, splits.test)
    ]
    for i, part in enumerate(pictures):
        for other in pictures[i + 1 :]:
            # Two people may have written pixel-identical digits; nothing else may coincide.
            assert len(part & other) <= (1 if name == "sklearn-digits" else 0)
    if splits.task in ("classification", "action"):
        assert {sample.target for sample in splits.train} == set(range(len(splits.labels)))
    assert splits.real == (not name.startswith("drawn"))


def test_photo_crops_of_different_parts_come_from_different_regions() -> None:
    spans = sorted(_COLUMNS.values())
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_seed_gives_the_same_pictures(name: str) -> None:
    first, second = load_source(name, 5), load_source(name, 5)
    assert all(
        a.target == b.target and np.array_equal(a.frames[0], b.frames[0])
        for a, b in zip(first.test, second.test, strict=True)
    )


def test_a_rendered_stream_can_be_read_back(tmp_path: Path) -> None:
    labels = render_stream(tmp_path / "s.mp4", seed=0, seconds=3)
    assert len(labels) == 3 and set(labels) <= set(ACTIONS)
    video = cv2.VideoCapture(str(tmp_path / "s.mp4"))
    count = 0
    while video.read()[0]:
        count += 1
    assert count == 90
