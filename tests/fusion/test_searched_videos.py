"""Rendered videos for retrieval: answers are true of what is drawn, and a query describes one second."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from fusion.synthetic.searched_videos import (
    FPS,
    QUESTION,
    SECONDS,
    ask_passing,
    ask_street,
    caption_passing,
    caption_street,
    describe_street,
    render_passing,
    render_streets,
)
from fusion.synthetic.streets import SIDES, Street, Thing, draw_street

_STREET = np.zeros((96, 96, 3), np.uint8)


def asked_about(question: str) -> str:
    before, after = QUESTION.split("{}")
    return question.removeprefix(before).removesuffix(after)


def test_descriptions_name_color_kind_and_side() -> None:
    things = (
        Thing("car", "orange", 1, SIDES.index("left"), (0, 0, 1, 1)),
        Thing("bus", "red", 0, SIDES.index("middle"), (0, 0, 1, 1)),
    )
    words = ["an orange car on the left", "a red bus in the middle"]
    assert describe_street(Street(_STREET, things, night=False)) == (words, " and ".join(words))


def test_answers_about_streets_are_true_of_the_picture() -> None:
    answers = []
    for seed in range(150):
        # The same draws as the sample: the street is drawn first.
        things, caption = describe_street(draw_street(np.random.default_rng(seed), 5))
        sample = ask_street(np.random.default_rng(seed))
        holds = all(part in things for part in asked_about(sample.question).split(" and "))
        assert sample.target == ("yes" if holds else "no")
        assert caption_street(np.random.default_rng(seed)).target == caption
        answers.append(holds)
    assert 0.4 < np.mean(answers) < 0.6


def test_answers_about_clips_are_true_of_the_action() -> None:
    answers = []
    for seed in range(40):
        true = caption_passing(np.random.default_rng(seed)).target
        sample = ask_passing(np.random.default_rng(seed))
        holds = asked_about(sample.question) == true
        assert sample.target == ("yes" if holds else "no") and len(sample.frames) == 4
        answers.append(holds)
    assert 0.25 < np.mean(answers) < 0.75


@pytest.mark.parametrize("render", [render_streets, render_passing])
def test_each_query_is_of_one_second_of_a_video_on_disk(render: object, tmp_path: Path) -> None:
    queries = render(tmp_path, 5, 3)  # type: ignore[operator]
    assert len(queries) > 5
    assert len({query.text for query in queries}) == len(queries) == len({query[1:] for query in queries})
    assert {query.second for query in queries} <= set(range(SECONDS))
    for name in {query.video for query in queries}:
        capture = cv2.VideoCapture(str(tmp_path / name))
        assert capture.get(cv2.CAP_PROP_FPS) == FPS and capture.get(cv2.CAP_PROP_FRAME_COUNT) == SECONDS * FPS
        capture.release()
    assert [query.text for query in render(tmp_path, 6, 3)] != [query.text for query in queries]  # type: ignore[operator]
