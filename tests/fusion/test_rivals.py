"""Small models that adapters replace: targets and loss of the detector, training by seed, and their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.rivals import RIVALS, AnchorFreeDetector, SmallModel, detector_loss, export, pixels, targets_of_cells
from fusion.data.samples import Sample, Splits
from fusion.embedded.drawing import NUMBERS
from fusion.synthetic.drawn import ACTIONS, KINDS, SIGNS, count_vehicles, draw_passing, draw_sign, find_things
from fusion.training.objectives import objective_of
from heads import Box
from tests.fusion.test_teachers import dots

pytest.importorskip("onnxruntime")


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


def drawn_sign(rng: np.random.Generator) -> Sample:
    label = int(rng.integers(len(SIGNS)))
    return Sample((draw_sign(SIGNS[label], rng),), label)


def drawn_clip(rng: np.random.Generator) -> Sample:
    label = int(rng.integers(len(ACTIONS)))
    return Sample(tuple(draw_passing(ACTIONS[label], rng, 2).frames), label)


DRAWN: dict[str, tuple[str, tuple[str, ...], Callable[[np.random.Generator], Sample]]] = {
    "drawn-traffic-detection": ("detection", KINDS, find_things),
    "drawn-signs": ("classification", SIGNS, drawn_sign),
    "drawn-traffic-counts": ("counting", NUMBERS[:6], count_vehicles),
    "drawn-short-actions": ("action", ACTIONS, drawn_clip),
}


def small(source: str) -> Splits:
    task, labels, draw = DRAWN[source]
    rng = np.random.default_rng(0)
    return Splits(task, labels, [draw(rng) for _ in range(40)], (), [draw(rng) for _ in range(6)], real=False)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] * (task not in ("detection", "action")))
        for name, (task, _, _) in DRAWN.items()
    ],
)
def test_a_seed_determines_a_training_and_its_file_answers_alike(tmp_path: Path, source: str) -> None:
    splits = small(source)
    torch.set_num_threads(1)
    first, again, other = (RIVALS[source].train(splits, seed, steps=3).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not all(torch.equal(value, other[name]) for name, value in first.items())
    model: Any = RIVALS[source].train(splits, 0, steps=3)
    export(model, splits, tmp_path / "net.onnx")
    served = SmallModel(tmp_path / "net.onnx", splits, threads=1)
    if splits.task == "detection":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
        inputs = pixels(splits.test[:1])
        (rows,) = session.run(None, {"images": inputs.numpy()})
        assert rows.shape == (1, 4 + len(splits.labels), 144)
        np.testing.assert_allclose(rows, model(inputs).detach().numpy(), rtol=1e-3, atol=1e-3)
    else:
        assert served.answers(splits.test) == model(pixels(splits.test)).argmax(1).tolist()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "source"),
    [
        ("classification", "drawn-signs"),
        ("detection", "drawn-traffic-detection"),
    ],
)
def test_small_models_learn_from_the_training_part(tmp_path: Path, task: str, source: str) -> None:
    torch.set_num_threads(1)
    splits = Splits(task, ("left", "right"), dots(320, 0, task), (), dots(60, 1, task), real=False)
    model = RIVALS[source].train(splits, 0, steps=40)
    export(model, splits, tmp_path / "net.onnx")
    answers = SmallModel(tmp_path / "net.onnx", splits).answers(splits.test)
    wanted = [sample.target for sample in splits.test]
    assert objective_of(splits).metric(answers, wanted) > 0.9
    shuffled = [answers[-1], *answers[:-1]]  # negative control: answers to other pictures
    assert objective_of(splits).metric(shuffled, wanted) < 0.7
