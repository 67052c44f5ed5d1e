"""Scenes as rows of token ids, in the chat template's form, for training."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from fusion.embedded import drawing, world
from tools.embedded_model.model import IMAGE_TOKENS

IGNORED = -100
"""Label of tokens that are excluded from the loss."""


class Conversations:
    """Scenes as token ids, in the chat template's form: images, then question and answer turn by turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        named = tokenizer.get_vocab()
        self.pad, self.bos, self.eos = named["<pad>"], named["<bos>"], named["<eos>"]
        self.user, self.assistant, self.image = named["<user>"], named["<assistant>"], named["<image>"]
        self.words = functools.lru_cache(maxsize=None)(self._words)

    def _words(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def batch(self, rng: np.random.Generator, scenes: Sequence[world.Scene], length: int) -> TokenRows:
        """One row of `length` tokens per scene: its images, then its questions in random order while they fit."""
        shape = (len(scenes), length)
        ids, labels = np.full(shape, self.pad), np.full(shape, IGNORED)
        turns, positions, present = np.full(shape, -1), np.zeros(shape, np.int64), np.full(shape, IGNORED)
        meant = np.full((*shape, len(drawing.ATTRIBUTES)), IGNORED)
        for row, scene in enumerate(scenes):
            start = [self.bos, self.user] + [self.image] * (IMAGE_TOKENS * len(scene.frames))
            end = len(start)
            ids[row, :end], turns[row, :end], positions[row, :end] = start, 0, np.arange(end)
            for turn, index in enumerate(rng.permutation(len(scene.questions)), 1):
                asked = scene.questions[index]
                question, answer = [*self.words(asked.text), self.assistant], [*self.words(asked.answer), self.eos]
                here = slice(end, end + len(question) + len(answer))
                if here.stop > length:
                    break
                ids[row, here], turns[row, here] = question + answer, turn
                labels[row, here] = [IGNORED] * len(question) + answer
                positions[row, here] = np.arange(len(start), len(start) + here.stop - here.start)
                if asked.about:
                    name = end + _end_of(self.words(asked.about), question) - 1
                    if asked.holds is not None:
                        present[row, name] = asked.holds
                    if asked.meant is not None:
                        meant[row, name] = [attribute in asked.meant for attribute in drawing.ATTRIBUTES]
                end = here.stop
        return TokenRows(*(torch.from_numpy(values) for values in (ids, labels, turns, positions, present, meant)))


def _end_of(part: Sequence[int], whole: Sequence[int]) -> int:
    """The end index of `part` in `whole`."""
    return next(end for end in range(len(part), len(whole) + 1) if tuple(whole[end - len(part) : end]) == tuple(part))


class TokenRows(NamedTuple):
    """Token rows, int64 [n, length] each.

    turns: 0 is the image, -1 is padding. present: at the last token of a name, whether the named object exists. meant:
    [n, length, attributes], at the last token of a name: the attributes of the named objects.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    turns: torch.Tensor
    positions: torch.Tensor
    present: torch.Tensor
    meant: torch.Tensor

    def to(self, device: torch.device) -> TokenRows:
        return TokenRows(*(values.to(device) for values in self))

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask [n, 1, length, length]: a token attends to the image and, causally, to its own turn."""
        length = self.turns.shape[1]
        own, other = self.turns[:, :, None], self.turns[:, None, :]
        seen = (own == other) | (other == 0)
        seen &= torch.ones(length, length, dtype=torch.bool, device=seen.device).tril()
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)[
            :, None
        ]
