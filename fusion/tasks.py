"""The kinds of task a domain may have: how each can be scored, and what answers it."""

from __future__ import annotations

from typing import Literal, get_args

Task = Literal[
    "classification",
    "binary",
    "counting",
    "action",
    "multilabel",
    "regression",
    "detection",
    "vqa",
    "captioning",
    "referring",
]
Metric = Literal["accuracy", "f1", "map", "mae", "exact_match", "token_f1"]
WORDS = "words"
Head = Literal["classification", "binary", "counting", "action", "multilabel", "regression", "detection", "words"]

TASKS: tuple[str, ...] = get_args(Task)

# The first is the default. Words know accuracy by the name it has for them, and by the plain one.
METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "f1"),
    "binary": ("accuracy", "f1"),
    "counting": ("accuracy", "mae"),
    "action": ("accuracy", "f1"),
    "multilabel": ("f1", "map", "accuracy"),
    "regression": ("mae",),
    "detection": ("f1", "map"),
    "vqa": ("exact_match", "token_f1", "accuracy"),
    "captioning": ("token_f1", "exact_match", "accuracy"),
    "referring": ("exact_match", "token_f1", "accuracy"),
}
# The first is the default; a task without a head of its own is answered in words, by the language model.
HEADS: dict[str, tuple[str, ...]] = {
    "classification": ("classification", WORDS),
    "binary": ("binary", WORDS),
    "counting": ("counting", WORDS),
    "action": ("action", WORDS),
    "multilabel": ("multilabel",),
    "regression": ("regression",),
    "detection": ("detection",),
    "vqa": (WORDS,),
    "captioning": (WORDS,),
    "referring": (WORDS,),
}
