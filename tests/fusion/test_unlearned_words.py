"""Words that the rendered world never uses have embeddings with directions of their own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from fusion.embedded import checkpoint_path, unlearned_words
from fusion.embedded.processor import build_tokenizer
from fusion.embedded.unlearned_words import learned_tokens, separate_unlearned

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
