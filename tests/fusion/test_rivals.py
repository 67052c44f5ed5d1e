"""Small models that adapters replace: targets and loss of the detector, training by seed, and answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.rivals import RIVALS, AnchorFreeDetector, answers, detector_loss, pixels, targets_of_cells
from fusion.data.samples import Sample, Splits
from fusion.synthetic.drawn import ACTIONS, KINDS, draw_passing, find_things
from fusion.training.objectives import objective_of
from heads import Box
from tests.fusion.test_teachers import dots


def middles() -> torch.Tensor:
    return AnchorFreeDetector(1).middles


def test_cells_predict_the_nearest_box_around_them() -> None:
    """Against a loop over cells and boxes."""
    rng = np.random.default_rng(0)
    boxes = []
    for label in range(6):
        across, down = rng.uniform(0.2, 0.8, 2).tolist()
        width, height = rng.uniform(0.1, 0.35, 2).tolist()
        boxes.append(Box(label, across - width / 2, down - height / 2, across + width / 2, down + height / 2))
    labels, edges = targets_of_cells(boxes, middles())
    for cell, (x, y) in enumerate(middles().tolist()):
        best, nearest = -1, 12.0
        for number, box in enumerate(boxes):
            left, top, right, bottom = (96 * edge for edge in box[1:5])
            distance = max(abs(x - (left + right) / 2), abs(y - (top + bottom) / 2))
            if left < x < right and top < y < bottom and distance <= nearest:
                best, nearest = number, distance
        assert int(labels[cell]) == best
        if best >= 0:
            assert edges[cell].tolist() == pytest.approx([96 * edge for edge in boxes[best][1:5]], abs=1e-3)
    assert (labels >= 0).sum() > 6
    assert (targets_of_cells([], middles())[0] == -1).all()


def test_the_loss_is_least_at_the_targets() -> None:
    labels, edges = targets_of_cells([Box(1, 0.2, 0.2, 0.5, 0.45)], middles())
    wanted = torch.full((1, 144, 2), -20.0)
    wanted[0, labels >= 0, 1] = 20.0
    batch = (labels[None], edges[None])
    right = detector_loss(edges[None].clamp(min=1e-3), wanted, *batch)
    assert right < 1e-4
    assert detector_loss(edges[None] + 4, wanted, *batch) > right + 0.1  # shifted boxes
    assert detector_loss(edges[None].clamp(min=1e-3), wanted.flip(2), *batch) > right + 1  # the other label
    empty = torch.full((1, 144), -1)
    assert torch.isfinite(detector_loss(edges[None], wanted, empty, edges[None]))


def drawn_clip(rng: np.random.Generator) -> Sample:
    label = int(rng.integers(len(ACTIONS)))
    return Sample(tuple(draw_passing(ACTIONS[label], rng, 2).frames), label)


DRAWN: dict[str, tuple[str, tuple[str, ...], Callable[[np.random.Generator], Sample]]] = {
    "drawn-traffic-detection": ("detection", KINDS, find_things),
    "drawn-actions": ("action", ACTIONS, drawn_clip),
}


def small(source: str) -> Splits:
    task, labels, draw = DRAWN[source]
    rng = np.random.default_rng(0)
    return Splits(task, labels, [draw(rng) for _ in range(40)], (), [draw(rng) for _ in range(6)], real=False)


@pytest.mark.parametrize("source", DRAWN)
def test_a_seed_determines_a_training(source: str) -> None:
    splits = small(source)
    torch.set_num_threads(1)
    first, again, other = (RIVALS[source].train(splits, seed, steps=3).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not all(torch.equal(value, other[name]) for name, value in first.items())


def test_answers_are_the_best_label_or_the_boxes_without_duplicates() -> None:
    class Detector(AnchorFreeDetector):
        def forward(self, pixels: torch.Tensor) -> Any:
            edges, logits = torch.zeros(len(pixels), 144, 4), torch.full((len(pixels), 144, 2), -9.0)
            edges[0, 3], edges[0, 4] = torch.tensor([-9.0, 24.0, 48.0, 72.0]), torch.tensor([0.0, 24.0, 48.0, 72.0])
            logits[0, 3, 1], logits[0, 4, 1], logits[1, 0, 0] = 2.0, 1.0, -0.1
            return edges, logits

    samples = small("drawn-traffic-detection").test[:2]
    (box,), none = answers(Detector(2), samples)
    assert box[:5] == (1, 0.0, 0.25, 0.5, 0.75) and none == ()
    clips = small("drawn-actions").test[:2]
    assert answers(torch.nn.Flatten(), clips) == pixels(clips).flatten(1).argmax(1).tolist()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_small_model_learns_from_the_training_part() -> None:
    torch.set_num_threads(1)
    splits = Splits("detection", ("left", "right"), dots(320, 0, "detection"), (), dots(60, 1, "detection"), real=False)
    found = answers(RIVALS["drawn-traffic-detection"].train(splits, 0, steps=40), splits.test)
    wanted = [sample.target for sample in splits.test]
    assert objective_of(splits).metric(found, wanted) > 0.9
    shuffled = [found[-1], *found[:-1]]  # negative control: answers to other pictures
    assert objective_of(splits).metric(shuffled, wanted) < 0.7
