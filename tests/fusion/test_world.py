"""The rendered world: seeded, fast enough, balanced, and every answer follows from the drawing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from fusion.embedded import object_names, world
from fusion.embedded.conversations import Conversations
from fusion.embedded.model import IMAGE_TOKENS
from fusion.embedded.processor import build_processor


def scenes(count: int, seed: int = 0) -> list[world.Scene]:
    rng = np.random.default_rng(seed)
    return [world.still_scene(rng) for _ in range(count)] + [world.clip_scene(rng) for _ in range(count // 4)]


def test_a_seed_gives_the_same_scenes() -> None:
    for one, other in zip(scenes(20), scenes(20), strict=True):
        assert np.array_equal(one.frames, other.frames) and one.questions == other.questions
    assert not np.array_equal(scenes(1)[0].frames, scenes(1, seed=1)[0].frames)


@pytest.mark.slow
@pytest.mark.parametrize("skill", ("yes or no", "motion yes or no"))
def test_yes_and_no_are_balanced(skill: str) -> None:
    answers = Counter(q.answer for scene in scenes(1200) for q in scene.questions if q.skill == skill)
    assert set(answers) == {"yes", "no"}
    assert abs(answers["yes"] / answers.total() - 0.5) < 0.05


def test_every_skill_has_all_its_answers() -> None:
    answers: dict[str, set[str]] = {}
    for scene in scenes(800):
        for question in scene.questions:
            answers.setdefault(question.skill, set()).add(question.answer)
    assert answers["color"] == set(world.COLORS)
    assert set(object_names.POSITIONS) < answers["position"] and "nowhere" in answers["position"]
    assert {"one", "two", "three", "four", "five"} <= answers["count"]
    assert answers["motion"] == set(object_names.MOVES) and len(object_names.MOVES) == 5
    assert len(answers["shape"]) >= 4 and len(answers["digit"]) == 10


def test_questions_that_name_an_object_know_whether_it_exists() -> None:
    for scene in scenes(150):
        for question in scene.questions:
            assert question.about in question.text
            if question.holds is not None:
                assert question.holds != (question.answer in ("no", "nowhere", "zero"))
            if question.meant is not None:
                assert question.meant <= set(object_names.ATTRIBUTES)
                assert bool(question.meant) == (question.holds is not False)


def test_the_attributes_of_a_named_object_contain_the_answer() -> None:
    checked = 0
    for scene in scenes(150):
        for question in scene.questions:
            answer = question.answer.split()[-1] if question.skill in ("shape", "kind") else question.answer
            if question.meant and answer in object_names.ATTRIBUTES and question.skill != "scene":
                assert answer in question.meant
                assert question.about in question.meant or question.skill == "count" or " " in question.about
                checked += 1
    assert checked > 300


def test_every_word_is_one_token() -> None:
    tokenizer = build_processor().tokenizer
    for scene in scenes(300):
        for question in scene.questions:
            pieces = tokenizer.tokenize(f"{question.text} {question.answer}")
            assert not [piece for piece in pieces if piece.startswith("##") or piece == "<unk>"], question


def test_questions_of_a_row_do_not_attend_to_each_other() -> None:
    conversations = Conversations(build_processor().tokenizer)
    batch = scenes(8)[:8]
    rows = conversations.batch(np.random.default_rng(0), batch, 160)
    seen = rows.mask(torch.float32)[:, 0] == 0
    start = 2 + IMAGE_TOKENS
    for row in range(len(batch)):
        turns = rows.turns[row]
        for place in range(160):
            if turns[place] < 1:
                continue
            mine = turns[place]
            visible = turns[seen[row, place]]
            assert set(visible.tolist()) == {0, int(mine)}
            assert seen[row, place, :start].all() and not seen[row, place, place + 1 :].any()
        for turn in range(1, int(turns.max()) + 1):
            # Every question has the positions right after the image, as when it is asked alone.
            own = rows.positions[row][turns == turn]
            assert own.tolist() == list(range(start, start + len(own)))
    # The place of a name is its last token.
    named = rows.meant[..., 0] >= 0
    assert int((rows.present >= 0).sum()) > 0 and int(named.sum()) > 0
    assert bool((rows.meant[named] >= 0).all()) and bool((rows.turns[named] > 0).all())
