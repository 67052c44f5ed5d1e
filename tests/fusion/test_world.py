"""The rendered world: seeded, fast enough, balanced, and every answer follows from the drawing."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from fusion.embedded import checkpoint_path, object_names, unlearned_words, world
from fusion.embedded.conversations import Conversations
from fusion.embedded.drawing import SIZE
from fusion.embedded.evaluate import as_pixels
from fusion.embedded.model import IMAGE_TOKENS
from fusion.embedded.probes import DIRECTIONS, GIST_FEATURES, PATCH_FEATURES, SCALES, gist, patch_spectra
from fusion.embedded.processor import build_processor, build_tokenizer
from fusion.embedded.unlearned_words import learned_tokens, separate_unlearned
from fusion.embedded.world import texture


def scenes(count: int, seed: int = 0) -> list[world.Scene]:
    rng = np.random.default_rng(seed)
    return [world.still_scene(rng) for _ in range(count)] + [world.clip_scene(rng) for _ in range(count // 4)]


def test_a_seed_gives_the_same_scenes() -> None:
    for one, other in zip(scenes(20), scenes(20), strict=True):
        assert np.array_equal(one.frames, other.frames) and one.questions == other.questions
    assert not np.array_equal(scenes(1)[0].frames, scenes(1, seed=1)[0].frames)


@pytest.mark.slow
def test_yes_and_no_are_balanced() -> None:
    asked = [question for scene in scenes(1200) for question in scene.questions]
    for skill in ("yes or no", "motion yes or no"):
        answers = Counter(question.answer for question in asked if question.skill == skill)
        assert set(answers) == {"yes", "no"}
        assert abs(answers["yes"] / answers.total() - 0.5) < 0.05, skill


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


PATCH = 16


def plain_spectra(frame: np.ndarray) -> np.ndarray:
    """Patch by patch and frequency by frequency, as documented. float64 [36, PATCH_FEATURES]."""
    grey = (frame.astype(np.float64).mean(-1) / 127.5 - 1) / 2
    edges = np.geomspace(0.05, 0.75, SCALES + 1)
    window = np.array([0.5 - 0.5 * math.cos(2 * math.pi * (i + 1) / (PATCH + 1)) for i in range(PATCH)])
    rows = []
    for top in range(0, SIZE, PATCH):
        for left in range(0, SIZE, PATCH):
            patch = grey[top : top + PATCH, left : left + PATCH]
            seen = (patch - patch.mean()) * np.outer(window, window)
            energies = np.zeros((SCALES, DIRECTIONS))
            for v in range(-PATCH // 2, PATCH // 2):
                for u in range(PATCH // 2 + 1):
                    radius, angle = math.hypot(u, v) / PATCH, math.atan2(v, u)
                    scale = np.searchsorted(edges, radius, side="right") - 1
                    if not 0 <= scale < SCALES:
                        continue
                    waves = np.exp(-2j * math.pi * (np.arange(PATCH)[:, None] * v + np.arange(PATCH) * u) / PATCH)
                    energy = abs((seen * waves).sum()) ** 2
                    for direction in range(DIRECTIONS):
                        angle_difference = (angle - math.pi * direction / DIRECTIONS) % math.pi
                        angle_difference = min(angle_difference, math.pi - angle_difference)
                        energies[scale, direction] += energy * max(0.0, 1 - angle_difference * DIRECTIONS / math.pi)
            rows.append([*(np.log(energies.flatten() + 1e-3) / 2), 4 * patch.mean()])
    return np.array(rows)


def test_spectra_are_the_sums_they_claim_to_be() -> None:
    frame = texture(np.random.default_rng(3), 120, 40)
    np.testing.assert_allclose(patch_spectra(as_pixels(frame[None]))[0], plain_spectra(frame), atol=2e-4)


def test_gist_is_the_whole_picture() -> None:
    rng = np.random.default_rng(0)
    spectra = patch_spectra(as_pixels(np.stack([texture(rng, 60, 30), texture(rng, 180, 30)])))
    assert spectra.shape == (2, 36, PATCH_FEATURES)
    whole = gist(spectra).view(2, 4, PATCH_FEATURES)
    assert whole.numel() == 2 * GIST_FEATURES
    assert whole[0, 0, -1] < 0 < whole[1, 0, -1], "brightness"
    assert torch.all(whole[:, 3] <= whole[:, 0]) and torch.all(whole[:, 0] <= whole[:, 2])


UNLEARNED = (
    "yield",
    "drives",
    "waits",
    "crossing",
    "parking",
    "entry",
    "speed",
    "limit",
    "stop",
)  # of adapters' labels
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
