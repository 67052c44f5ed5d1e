"""Drawn pictures: the rendered world, sources, and videos to search; every answer follows from the drawing."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from benchmarks.retrieve import (
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
    write_pictures,
)
from fusion.data.samples import Sample, Splits
from fusion.embedded import checkpoint_path, drawing, world
from fusion.embedded.drawing import NUMBERS, SIZE
from fusion.embedded.questions import Question
from fusion.synthetic.drawn import ACTIONS, draw_street, look_for_person
from fusion.synthetic.sources import BUILT_IN, COLUMNS, STREAMS, load_source
from tools.embedded_model import unlearned_words
from tools.embedded_model.conversations import Conversations
from tools.embedded_model.model import IMAGE_TOKENS
from tools.embedded_model.processor import build_processor, build_tokenizer
from tools.embedded_model.unlearned_words import learned_tokens, separate_unlearned


@functools.cache
def some_questions() -> list[Question]:
    return [question for scene in scenes(800) for question in scene.questions]


def scenes(count: int, seed: int = 0) -> list[world.Scene]:
    rng = np.random.default_rng(seed)
    return [world.still_scene(rng) for _ in range(count)] + [world.clip_scene(rng) for _ in range(count // 4)]


def test_a_seed_gives_the_same_scenes() -> None:
    for one, other in zip(scenes(20), scenes(20), strict=True):
        assert np.array_equal(one.frames, other.frames) and one.questions == other.questions
    assert not np.array_equal(scenes(1)[0].frames, scenes(1, seed=1)[0].frames)


@pytest.mark.slow
def test_yes_and_no_are_balanced() -> None:
    for skill in ("yes or no", "motion yes or no"):
        answers = Counter(question.answer for question in some_questions() if question.skill == skill)
        assert set(answers) == {"yes", "no"}
        assert abs(answers["yes"] / answers.total() - 0.5) < 0.05, skill


def test_every_skill_has_all_its_answers() -> None:
    answers: dict[str, set[str]] = {}
    for question in some_questions():
        answers.setdefault(question.skill, set()).add(question.answer)
    assert answers["color"] == set(world.COLORS)
    assert set(drawing.POSITIONS) < answers["position"] and "nowhere" in answers["position"]
    assert {"one", "two", "three", "four", "five"} <= answers["count"]
    assert answers["motion"] == set(drawing.MOVES) and len(drawing.MOVES) == 5
    assert len(answers["shape"]) >= 4 and len(answers["digit"]) == 10


def test_questions_that_name_an_object_know_whether_it_exists_and_its_attributes() -> None:
    checked = 0
    for question in (question for scene in scenes(150) for question in scene.questions):
        assert question.about in question.text
        if question.holds is not None:
            assert question.holds != (question.answer in ("no", "nowhere", "zero"))
        if question.meant is not None:
            assert question.meant <= set(drawing.ATTRIBUTES)
            assert bool(question.meant) == (question.holds is not False)
        answer = question.answer.split()[-1] if question.skill in ("shape", "kind") else question.answer
        if question.meant and answer in drawing.ATTRIBUTES and question.skill != "scene":
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


# Words of adapters' labels.
UNLEARNED = ("yield", "drives", "waits", "crossing", "parking", "entry", "speed", "limit", "stop")
LEARNED = ("red", "yes", "car", "left", "two")


def mean_cosine(rows: torch.Tensor) -> float:
    unit = F.normalize(rows.float(), dim=1)
    count = len(unit)
    return float(((unit @ unit.T).sum() - count) / (count * (count - 1)))


def test_only_unlearned_words_get_a_direction_of_their_own() -> None:
    generator = torch.Generator().manual_seed(3)
    embedding = torch.randn(40, 64, generator=generator)
    embedding[10:] = 2.0 * torch.ones(64) + 0.01 * torch.randn(30, 64, generator=generator)  # as training leaves them
    before = embedding.clone()
    assert mean_cosine(embedding[10:]) > 0.95
    separate_unlearned(embedding, frozenset(range(10)))
    assert torch.equal(embedding[:10], before[:10])
    assert mean_cosine(F.normalize(embedding[10:] - embedding[10:].mean(0), dim=1)) < 0.05
    common = before[10:].mean(0)
    torch.testing.assert_close(embedding[10:] @ common, 0.5 * common.dot(common).expand(30), rtol=1e-3, atol=1e-3)
    again = before.clone()
    separate_unlearned(again, frozenset(range(10)))
    assert torch.equal(again, embedding), "a second run gives the same directions"


def test_labels_of_domains_are_apart_in_the_packaged_model() -> None:
    rows = load_file(f"{checkpoint_path()}/model.safetensors")["language_model.model.embed_tokens.weight"]
    ids = build_tokenizer().get_vocab()
    labels = rows[[ids[word] for word in UNLEARNED]].float()
    distances = torch.cdist(labels, labels)
    assert float(distances[~torch.eye(len(UNLEARNED), dtype=torch.bool)].min()) > 1.0  # 0.4 on average as trained


def test_words_of_questions_and_answers_count_as_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unlearned_words, "NUM_SCENES", 200)
    tokenizer = build_tokenizer()
    ids, learned = tokenizer.get_vocab(), learned_tokens(tokenizer)
    assert {ids[word] for word in LEARNED} <= learned and tokenizer.eos_token_id in learned
    assert not {ids[word] for word in UNLEARNED} & learned


_BREADTH = {f"drawn-traffic-{kind}" for kind in ("captions", "counts", "persons", "questions", "references")} | {
    "drawn-traffic-detection",
    "drawn-actions",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[] if name == "drawn-signs" else [pytest.mark.slow, *[pytest.mark.exhaustive] * (name in _BREADTH)],
        )
        for name in sorted(BUILT_IN)
    ],
)
def test_parts_share_no_picture_and_a_seed_gives_the_same_pictures(name: str) -> None:
    splits = load_source(name, 0)
    pictures = [
        {sample.frames[0].tobytes() + sample.frames[-1].tobytes() for sample in part} for part in splits.parts.values()
    ]
    for one, other in itertools.combinations(pictures, 2):
        # Two handwritten digits may be pixel-identical; other pictures must differ.
        assert len(one & other) <= (1 if name.startswith("sklearn-") else 0)
    if splits.task in ("classification", "action", "binary", "counting"):
        assert {sample.target for sample in splits.train} == set(range(len(splits.labels)))
    assert splits.real == (not name.startswith("drawn"))
    spans = sorted(COLUMNS.values())  # crops of photographs in different parts come from different regions
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))
    for a, b in zip(splits.test, load_source(name, 0).test, strict=True):
        assert a.target == b.target and np.array_equal(a.frames[0], b.frames[0])


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


_STREET = np.zeros((96, 96, 3), np.uint8)


def asked_about(question: str) -> str:
    before, after = QUESTION.split("{}")
    return question.removeprefix(before).removesuffix(after)


@pytest.mark.parametrize(("kind", "count", "least"), [("street", 150, 0.4), ("clip", 40, 0.25)])
def test_answers_are_true_of_what_is_drawn(kind: str, count: int, least: float) -> None:
    answers = []
    for seed in range(count):
        draws = [np.random.default_rng(seed) for _ in range(3)]  # the same draws: what is shown is drawn first
        if kind == "street":
            things, caption = describe_street(draw_street(draws[0], 5))
            sample = ask_street(draws[1])
            holds = all(part in things for part in asked_about(sample.question).split(" and "))
            assert caption_street(draws[2]).target == caption
        else:
            sample = ask_passing(draws[1])
            holds = asked_about(sample.question) == caption_passing(draws[0]).target and len(sample.frames) == 4
        assert sample.target == ("yes" if holds else "no")
        answers.append(holds)
    assert least < np.mean(answers) < 1 - least


@pytest.mark.parametrize(("render", "group"), [(render_streets, "streets"), (render_passing, "passing")])
def test_each_query_is_of_one_second_of_a_video_on_disk(render: object, group: str, tmp_path: Path) -> None:
    found = render(tmp_path, 5, 3)  # type: ignore[operator]
    queries = found[group]
    assert len(queries) > 5
    assert len({query.text for query in queries}) == len(queries) == len({query.clips for query in queries})
    assert all(len(query.clips) == 1 for query in queries)
    clips = {clip for own in found.values() for query in own for clip in query.clips}
    assert {second for _, second in clips} <= set(range(SECONDS))
    for name in {name for name, _ in clips}:
        capture = cv2.VideoCapture(str(tmp_path / name))
        assert capture.get(cv2.CAP_PROP_FPS) == FPS and capture.get(cv2.CAP_PROP_FRAME_COUNT) == SECONDS * FPS
        capture.release()
    other = render(tmp_path, 6, 3)[group]  # type: ignore[operator]
    assert [query.text for query in other] != [query.text for query in queries]


def test_simple_queries_name_everything_that_they_describe(tmp_path: Path) -> None:
    objects = {query.text: query.clips for query in render_streets(tmp_path, 5, 3)["streets, one object"]}
    assert sum(map(len, objects.values())) > 3 * SECONDS, "a street has several objects"
    black = np.zeros((SIZE, SIZE, 3), np.uint8)
    digits, signs = [
        Splits("classification", labels, [], [], [Sample((black,), target) for target in (0, 2, 2)], real=True)
        for labels in (NUMBERS, ("stop", "no entry", "yield"))
    ]
    found = write_pictures(tmp_path, digits, signs, 3)["pictures"]
    assert {query.text: len(query.clips) for query in found} == {
        **{"a digit zero": 1, "the digit 0": 1, "a digit two": 2, "the digit 2": 2},
        **{"a stop sign": 1, "a yield sign": 2},
    }
    assert all((tmp_path / name).exists() for query in found for name, _ in query.clips)
