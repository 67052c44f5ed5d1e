"""Built-in teachers learn their task from the training part alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusion.data.samples import Sample, Splits
from fusion.synthetic.sources import load_source
from fusion.teachers import TEACHERS, SmallNetwork
from fusion.training.objectives import objective_of
from heads import Box


@pytest.mark.slow
@pytest.mark.parametrize("source", ("sklearn-digits", "lfw-faces", "drawn-actions"))
def test_a_built_in_teacher_answers_test_samples_correctly(source: str) -> None:
    splits = load_source(source, 0)
    teacher = TEACHERS[source]()
    teacher.fit(splits)
    test = splits.test[:120]
    assert objective_of(splits).metric(teacher.answers(test), [sample.target for sample in test]) > 0.95


def dots(count: int, seed: int, task: str) -> list[Sample]:
    """One bright square, left or right."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        frame = rng.integers(0, 40, (96, 96, 3)).astype(np.uint8)
        label, top = int(rng.integers(2)), int(rng.integers(8, 60))
        left = 8 + 48 * label + int(rng.integers(8))
        frame[top : top + 24, left : left + 24, label] = 220
        box = Box(label, left / 96, top / 96, (left + 24) / 96, (top + 24) / 96)
        samples.append(Sample((frame,), (box,) if task == "detection" else label))
    return samples


@pytest.mark.slow
@pytest.mark.parametrize("task", ("classification", "detection"))
def test_the_small_network_learns_in_seconds(task: str) -> None:
    torch.set_num_threads(1)
    splits = Splits(task, ("left", "right"), dots(320, 0, task), (), dots(60, 1, task), real=False)
    teacher = SmallNetwork()
    teacher.fit(splits)
    score = objective_of(splits).metric(teacher.answers(splits.test), [sample.target for sample in splits.test])
    assert score > (0.95 if task == "classification" else 0.6)
    blind = [() if task == "detection" else 0 for _ in splits.test]
    assert objective_of(splits).metric(blind, [sample.target for sample in splits.test]) < 0.7
