"""Compares a server's answers with the greedy answers of plain transformers and PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

NEAR_TIE = 1e-3
"""Standard deviations of a step's logits. Two orders of summation in float32 differ by about 1e-5."""


class Agreement(NamedTuple):
    """Comparison of one answer.

    Attributes:
        words: Number of compared, equal words.
        wrong: The difference, or None.
        tie: Whether the difference is at two equally likely words, which is no error; the rest is then not compared.
    """

    words: int
    wrong: str | None
    tie: bool


def compare(expected: Sequence[str], margins: Sequence[float], got: str) -> Agreement:
    """Compare word by word.

    Args:
        expected: The text of each token; empty for tokens that have none.
        margins: Of each token over the second best, in standard deviations of its step's logits.
        got: The server's text, words separated by spaces.
    """
    kept = [(word, margin) for word, margin in zip(expected, margins, strict=True) if word]
    words = got.split()
    for index, (word, margin) in enumerate(kept):
        if index >= len(words) or words[index] != word:
            if margin <= NEAR_TIE:
                return Agreement(index, None, True)
            found = repr(words[index]) if index < len(words) else "the end"
            return Agreement(index, f"word {index} is {found} instead of {word!r} (margin {margin:.2g})", False)
    if len(words) > len(kept):
        return Agreement(len(kept), f"{len(words)} words instead of {len(kept)}", False)
    return Agreement(len(kept), None, False)
