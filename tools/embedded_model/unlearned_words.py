"""Embeddings of the words that the rendered world never uses.

Input and output embeddings are tied. A word that is neither asked nor answered in training only gets the gradient of
the softmax's denominator, which is nearly the same for all of them: after training, the embeddings of these words point
in one direction (mean cosine 0.97), and an adapter, which leaves embeddings as they are, cannot answer with one of them
rather than with another. Adapters answer with such words ("yield", "drives"), so each gets a direction of its own, and
half of the common one, which keeps the model from answering with them before an adapter does (docs/decisions/0070).
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from fusion.embedded import world

NUM_SCENES = 2000  # more add no word
_COMMON = 0.5
_OWN_NORM = 1.2  # mean norm of the words that the model answers with
_SEED = 0


def learned_tokens(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Token ids of questions, answers and the chat template in scenes as in training."""
    rng = np.random.default_rng(_SEED)
    learned = set(tokenizer.all_special_ids)
    texts = set()
    for number in range(NUM_SCENES):
        scene = world.still_scene(rng) if number % 4 else world.clip_scene(rng)
        texts |= {text for question in scene.questions for text in (question.text, question.answer)}
    for ids in tokenizer(sorted(texts), add_special_tokens=False)["input_ids"]:
        learned |= set(ids)
    return frozenset(learned)


@torch.no_grad()
def separate_unlearned(embedding: torch.Tensor, learned: Set[int]) -> None:
    """Give every row of `embedding` [vocabulary, hidden] that is not in `learned` a random direction, in place.

    The directions are orthogonal to the mean of these rows, and the same in every run.
    """
    rows = [row for row in range(len(embedding)) if row not in learned]
    common = embedding[rows].float().mean(0)
    own = torch.randn(len(rows), embedding.shape[1], generator=torch.Generator().manual_seed(_SEED)).to(common)
    own -= (own @ common / common.dot(common))[:, None] * common
    own *= _OWN_NORM / own.norm(dim=1, keepdim=True)
    embedding[rows] = (_COMMON * common + own).to(embedding.dtype)
