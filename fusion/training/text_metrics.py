"""Metrics of answers in words; boxes in words."""

from __future__ import annotations

import re
from collections import Counter

from heads.answer import Box, iou


def token_f1(answer: str, wanted: str) -> float:
    """F1 of an answer's words as a multiset, ignoring case, punctuation and order (Rajpurkar et al. 2016, SQuAD;
    articles count here, since captions have many). 1 if neither text has a word."""
    ours, truth = (Counter(re.findall(r"\w+", text.lower())) for text in (answer, wanted))
    total = ours.total() + truth.total()
    return 2 * (ours & truth).total() / total if total else 1.0


def box_in_words(edges: tuple[float, float, float, float]) -> str:
    """A box as text: [left, top, right, bottom] in thousandths of the picture. edges: as shares of it."""
    return str([round(1000 * edge) for edge in edges])


def box_of_words(answer: str) -> Box | None:
    """The box given by exactly four integers from 0 to 1000 in a text; None for any other text."""
    numbers = re.findall(r"\d+(?:\.\d+)?", answer)
    if len(numbers) != 4 or not all(number.isdecimal() and len(number) <= 4 for number in numbers):
        return None
    left, top, right, bottom = (int(number) / 1000 for number in numbers)
    return Box(0, left, top, right, bottom) if left < right <= 1 and top < bottom <= 1 else None


def overlap(answer: str, wanted: str) -> float:
    """1 if the answered box overlaps the target by at least half of their union, as RefCOCO counts (Yu et al. 2016);
    else 0. Raises ValueError if the target is not a box."""
    ours, truth = box_of_words(answer), box_of_words(wanted)
    if truth is None:
        raise ValueError(f"{wanted!r} is not a box: four integers, left, top, right and bottom in thousandths")
    return float(ours is not None and iou(ours, truth) >= 0.5)
