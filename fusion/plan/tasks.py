"""The kinds of task a domain may have: how each can be scored, and what answers it."""

from __future__ import annotations

from typing import Literal, get_args

Task = Literal[
    "classification",
    "binary",
    "counting",
    "action",
    "multi_label",
    "regression",
    "detection",
    "vqa",
    "captioning",
    "referring",
]
Metric = Literal["accuracy", "f1", "map", "within_one", "within", "mae", "exact_match", "token_f1", "overlap"]
WORDS = "words"
Head = Literal["classification", "binary", "counting", "action", "multi_label", "regression", "detection", "words"]

TASKS: tuple[str, ...] = get_args(Task)

# The first is the default. All are shares of 1, where more is better: what a threshold can be set on.
METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "f1"),
    "binary": ("accuracy", "f1"),
    "counting": ("accuracy", "within_one"),
    "action": ("accuracy", "f1"),
    "multi_label": ("f1", "accuracy"),
    "regression": ("within",),
    "detection": ("f1", "map"),
    "vqa": ("exact_match", "token_f1", "accuracy"),
    "captioning": ("exact_match", "token_f1", "accuracy"),
    "referring": ("exact_match", "token_f1", "accuracy", "overlap"),
}
# How many labels a task's head chooses from at least; tasks that are answered in words have none.
LEAST_LABELS = {
    "classification": 2,
    "binary": 2,
    "counting": 2,
    "action": 2,
    "multi_label": 1,
    "regression": 1,
    "detection": 1,
}
# Means over samples of what each is worth on its own, 0 to 1. The others weigh all samples' mistakes together.
MEANS = frozenset({"accuracy", "within_one", "within", "exact_match", "token_f1", "overlap"})
SAID = {
    "accuracy": "share of samples answered right",
    "f1": "F1",
    "map": "mean average precision",
    "within_one": "share of counts right or one off",
    "within": "share of numbers within a quarter of their spread in training",
    "exact_match": "share of answers right word for word",
    "token_f1": "F1 of the answers' words",
    "overlap": "share of boxes said that overlap the right one by a half",
}
# The first is the default; a task without a head of its own is answered in words, by the language model.
HEADS: dict[str, tuple[str, ...]] = {
    "classification": ("classification", WORDS),
    "binary": ("binary", WORDS),
    "counting": ("counting", WORDS),
    "action": ("action", WORDS),
    "multi_label": ("multi_label",),
    "regression": ("regression",),
    "detection": ("detection",),
    "vqa": (WORDS,),
    "captioning": (WORDS,),
    "referring": (WORDS,),
}
