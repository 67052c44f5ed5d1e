"""Sources: parts that share no picture, correct labels, user folders."""

from __future__ import annotations

import itertools
from pathlib import Path

import cv2
import numpy as np
import pytest

from fusion.data.samples import Splits
from fusion.embedded.object_names import NUMBERS
from fusion.synthetic.road_signs import ACTIONS, render_stream
from fusion.synthetic.sources import BUILT_IN, COLUMNS, STREAMS, load_source
from fusion.synthetic.streets import draw_street, look_for_person

_FAST_SOURCE = "drawn-signs"


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == _FAST_SOURCE else pytest.mark.slow) for name in sorted(BUILT_IN)],
)
def source(request: pytest.FixtureRequest) -> tuple[str, Splits]:
    """Each source is drawn once for all tests; one is in memory at a time."""
    return request.param, load_source(request.param, 0)


def test_parts_share_no_picture(source: tuple[str, Splits]) -> None:
    name, splits = source
    pictures = [
        {sample.frames[0].tobytes() + sample.frames[-1].tobytes() for sample in part}
        for part in (splits.train, splits.validation, splits.test)
    ]
    for i, part in enumerate(pictures):
        for other in pictures[i + 1 :]:
            # Two handwritten digits may be pixel-identical; other pictures must differ.
            assert len(part & other) <= (1 if name.startswith("sklearn-") else 0)
    if splits.task in ("classification", "action", "binary", "counting"):
        assert {sample.target for sample in splits.train} == set(range(len(splits.labels)))
    assert splits.real == (not name.startswith("drawn"))


def test_photo_crops_of_different_parts_come_from_different_regions() -> None:
    spans = sorted(COLUMNS.values())
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))


def test_a_seed_gives_the_same_pictures(source: tuple[str, Splits]) -> None:
    name, first = source
    second = load_source(name, 0)
    assert all(
        a.target == b.target and np.array_equal(a.frames[0], b.frames[0])
        for a, b in zip(first.test, second.test, strict=True)
    )


@pytest.mark.parametrize("name", sorted(STREAMS))
def test_a_camera_sees_a_second_of_each_label(name: str, tmp_path: Path) -> None:
    labels = STREAMS[name](tmp_path / "s.mp4", 0)
    again = STREAMS[name](tmp_path / "again.mp4", 0)
    assert labels == again and (tmp_path / "s.mp4").read_bytes() == (tmp_path / "again.mp4").read_bytes()
    video = cv2.VideoCapture(str(tmp_path / "s.mp4"))
    seconds = video.get(cv2.CAP_PROP_FRAME_COUNT) / video.get(cv2.CAP_PROP_FPS)
    assert seconds == (8 if labels is None else len(labels))
    assert labels is None or set(labels) <= {*ACTIONS, *NUMBERS[:6]}


def test_labels_of_persons_and_vehicles_match_the_drawing() -> None:
    rng = np.random.default_rng(0)
    streets = [draw_street(rng, 5) for _ in range(200)]
    for street in streets:
        assert street.num_vehicles + sum(thing.kind == "person" for thing in street.things) == len(street.things)
        assert street.has_person == (street.num_vehicles < len(street.things))
    persons = [float(look_for_person(rng).target) for _ in range(200)]  # type: ignore[arg-type]
    assert 0.35 < np.mean(persons) < 0.65


def test_a_rendered_stream_can_be_read_back(tmp_path: Path) -> None:
    labels = render_stream(tmp_path / "s.mp4", seed=0, seconds=3)
    assert len(labels) == 3 and set(labels) <= set(ACTIONS)
    video = cv2.VideoCapture(str(tmp_path / "s.mp4"))
    count = 0
    while video.read()[0]:
        count += 1
    assert count == 90
