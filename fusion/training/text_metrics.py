"""Answers in words against the right ones; boxes in words."""

from __future__ import annotations

import re
from collections import Counter

from heads.boxes import Box, iou


def token_f1(said: str, wanted: str) -> float:
    """F1 of the words of one answer, each as often as it is there, without regard to case, punctuation and order
    (Rajpurkar et al. 2016, SQuAD; articles count here, since captions have many). 1 where neither has any word."""
    ours, truth = (Counter(re.findall(r"\w+", text.lower())) for text in (said, wanted))
    total = ours.total() + truth.total()
    return 2 * (ours & truth).total() / total if total else 1.0


def box_in_words(edges: tuple[float, float, float, float]) -> str:
    """A box as a language model says it: [left, top, right, bottom] in thousandths of the picture; edges: in shares."""
    return str([round(1000 * edge) for edge in edges])


def box_of_words(said: str) -> Box | None:
    """What four whole numbers of 0 to 1000 stand for, whatever is written between them; None for anything else."""
    numbers = re.findall(r"\d+(?:\.\d+)?", said)
    if len(numbers) != 4 or not all(number.isdecimal() and len(number) <= 4 for number in numbers):
        return None
    left, top, right, bottom = (int(number) / 1000 for number in numbers)
    return Box(0, left, top, right, bottom) if left < right <= 1 and top < bottom <= 1 else None


def overlap(said: str, wanted: str) -> float:
    """1 where the box that is said overlaps the wanted one by at least a half of their union, as RefCOCO counts (Yu et
    al. 2016); else 0. Raises ValueError where what is wanted is no box."""
    ours, truth = box_of_words(said), box_of_words(wanted)
    if truth is None:
        raise ValueError(f"{wanted!r} is no box: four whole numbers, left, top, right and bottom in thousandths")
    return float(ours is not None and iou(ours, truth) >= 0.5)
