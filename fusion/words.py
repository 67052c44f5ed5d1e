"""Answers in words against the right ones."""

from __future__ import annotations

import re
from collections import Counter


def token_f1(said: str, wanted: str) -> float:
    """F1 of the words of one answer, each as often as it is there, without regard to case, punctuation and order
    (Rajpurkar et al. 2016, SQuAD; articles count here, since captions have many). 1 where neither has any word."""
    ours, truth = (Counter(re.findall(r"\w+", text.lower())) for text in (said, wanted))
    total = ours.total() + truth.total()
    return 2 * (ours & truth).total() / total if total else 1.0
