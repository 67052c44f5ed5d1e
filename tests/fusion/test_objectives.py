"""Loss and score of each task, without a model."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fusion.data.samples import Sample, Splits
from fusion.embedded.object_names import NUMBERS
from fusion.synthetic.streets import KINDS, ask_traffic, count_vehicles, find_things
from fusion.training.objectives import ForwardOutputs, answer_in_words, objective_of
from heads import Box, detection


def read_of(
    last: torch.Tensor, images: list[torch.Tensor] | None = None, exact: list[bool] | None = None
) -> ForwardOutputs:
    count = len(last)
    images = images or [torch.zeros(4, 2)] * count
    return ForwardOutputs(
        last, images, images, [((2, 2),)] * count, torch.ones(count), torch.tensor(exact or [True] * count)
    )


def splits(task: str, labels: tuple[str, ...]) -> Splits:
    return Splits(task, labels, (), (), (), real=True)


def test_a_choice_is_the_likeliest_label() -> None:
    task = objective_of(splits("classification", ("left", "right")))
    head = nn.Linear(2, 2)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
        head.bias.zero_()
    read = read_of(torch.tensor([[3.0, 1.0], [0.0, 2.0], [1.0, 5.0]]))
    answers = task.answers(read, head, [0, 1, 0])
    assert answers == [0, 1, 1] and abs(task.metric(answers, [0, 1, 0]) - 2 / 3) < 1e-9
    assert task.loss(read, head, [0, 1, 1]) < task.loss(read, head, [1, 0, 0])


def test_words_are_right_word_for_word() -> None:
    task = objective_of(splits("vqa", ()))
    assert task.num_outputs == 0
    read = read_of(torch.zeros(4, 2), exact=[True, False, True, True])
    assert task.metric(task.answers(read, None, ["a"] * 4), ["a"] * 4) == 0.75


def test_detection_reads_every_image_token() -> None:
    boxes = (Box(1, 0.1, 0.1, 0.4, 0.4), Box(0, 0.6, 0.5, 0.9, 0.9))
    task = objective_of(splits("detection", ("car", "bus")))
    classes, edges = detection.targets(boxes, (2, 2))
    logits = torch.cat([nn.functional.one_hot(classes, 3) * 20.0, edges], -1)
    head = nn.Linear(task.num_outputs, task.num_outputs)
    with torch.no_grad():
        head.weight.copy_(torch.eye(task.num_outputs))
        head.bias.zero_()
    read = read_of(torch.zeros(1, task.num_outputs), [logits])
    answers = task.answers(read, head, [boxes])
    assert task.metric(answers, [boxes]) == 1.0
    assert task.metric(answers, [boxes[:1]]) < 1.0
    assert task.loss(read, head, [boxes]) < task.loss(read_of(read.last, [logits.flip(0)]), head, [boxes])


def test_the_answer_in_words_of_a_sample() -> None:
    rng = np.random.default_rng(0)
    for own, sample in (
        (splits("counting", NUMBERS[:6]), count_vehicles(rng)),
        (splits("vqa", ()), ask_traffic(rng)),
        (splits("detection", KINDS), find_things(rng)),
    ):
        words = answer_in_words(own, sample)
        assert bool(words) == (own.task != "detection")
        assert words == (own.labels[sample.target] if isinstance(sample.target, int) else words)
    assert answer_in_words(splits("vqa", ()), Sample((), "a car")) == "a car"
