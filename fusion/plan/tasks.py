"""The task kinds of a domain, with the metrics and the heads of each."""

from __future__ import annotations

from typing import Literal, get_args

HeadKind = Literal["classification", "binary", "counting", "action", "multi_label", "regression", "detection"]
"""Of `heads.TASKS`, which would load torch. Each is the task of a domain too."""
Task = Literal[HeadKind, "vqa", "captioning", "referring"]
Metric = Literal["accuracy", "f1", "map", "within_one", "within", "mae", "exact_match", "token_f1", "overlap"]
WORDS = "words"
Head = Literal[HeadKind, "words"]

TASKS: tuple[str, ...] = get_args(Task)

# The first is the default. All range from 0 to 1, higher is better, so a threshold can be set on each.
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
# Tasks that are answered by one of several labels, by a head or in words.
ONE_LABEL = frozenset({"classification", "binary", "counting", "action"})
# Minimum number of labels of a task's head; tasks that are answered in words have none.
MIN_LABELS = {kind: 2 if kind in ONE_LABEL else 1 for kind in get_args(HeadKind)}
# Metrics that are means over samples of a value from 0 to 1. The others are computed over all samples together.
MEANS = frozenset({"accuracy", "within_one", "within", "exact_match", "token_f1", "overlap"})
METRIC_DESCRIPTIONS = {
    "accuracy": "share of samples answered correctly",
    "f1": "F1",
    "map": "mean average precision",
    "within_one": "share of counts that are exact or off by one",
    "within": "share of numbers within a quarter of their spread in the training data",
    "exact_match": "share of answers that match word for word",
    "token_f1": "F1 of the answers' words",
    "overlap": "share of answered boxes that overlap the correct one by at least a half",
}
# The first is the default. A task without a head is answered in words by the language model.
HEADS: dict[str, tuple[str, ...]] = {
    **{kind: (kind, WORDS) if kind in ONE_LABEL else (kind,) for kind in get_args(HeadKind)},
    **{task: (WORDS,) for task in ("vqa", "captioning", "referring")},
}
READ_IMAGES = frozenset({"detection"})  # tasks with a head that reads every image token
# Such a head is small and trains by itself, since a LoRA of the language model does not change what it reads: with more
# steps and samples per step than the plan's, at a fraction of their cost.
HEAD_STEPS, HEAD_SAMPLES = 5, 4


def trains_by_itself(task: str, *, vision: bool) -> bool:
    """Whether domains of this task take no part in the training of the LoRA.

    Args:
        vision: whether the LoRA adapts the vision side, which computes the features.
    """
    return task in READ_IMAGES and not vision


def head_training(steps: int, batch_size: int) -> str:
    """Steps and samples of such a head's training, by those of the plan."""
    return f"{HEAD_STEPS * steps} steps of {HEAD_SAMPLES * batch_size} samples"
