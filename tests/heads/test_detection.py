"""Detection heads: targets, decoding and metrics, against values computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heads import Box, detection
from heads.answer import f1_counts, f1_of, iou, mean_average_precision

GRID = (6, 6)


def f1(found: Sequence[Sequence[Box]], wanted: Sequence[Sequence[Box]], overlap: float = 0.5) -> float:
    return f1_of(f1_counts(found, wanted, overlap))


def decoded(logits: torch.Tensor) -> list[Box]:
    return detection.candidates(logits, [GRID], 1.0, 0.5, 0.5)


_random_boxes = st.lists(
    st.builds(
        lambda label, x, y, score, image: Box(label, x, y, x + 0.4, y + 0.4, score, image),
        st.integers(0, 1),
        st.floats(0, 0.6),
        st.floats(0, 0.6),
        st.floats(0.01, 1),
        st.integers(0, 1),
    ),
    max_size=5,
)


def logits_of(boxes: list[Box], num_labels: int, grid: tuple[int, int] = GRID) -> torch.Tensor:
    """The logits of a head that predicts its targets exactly."""
    classes, edges = detection.targets(boxes, grid)
    sure = torch.nn.functional.one_hot(classes, 1 + num_labels).double() * 20
    return torch.cat([sure, edges.double()], -1)


@st.composite
def scenes(draw: st.DrawFn) -> list[Box]:
    """Boxes with centres in different cells, at most a cell and a half wide, so that none suppresses another."""
    cells = draw(st.lists(st.integers(0, 35), unique=True, max_size=6))
    boxes = []
    for cell in cells:
        row, column = divmod(cell, 6)
        x, y = (column + draw(st.floats(0.1, 0.9))) / 6, (row + draw(st.floats(0.1, 0.9))) / 6
        half = draw(st.floats(0.02, 0.05))
        boxes.append(Box(draw(st.integers(0, 2)), x - half, y - half, x + half, y + half))
    return boxes


@given(scenes())
def test_targets_are_decoded_as_answers(boxes: list[Box]) -> None:
    found = decoded(logits_of(boxes, 3))
    assert sorted(round(box.left, 4) for box in found) == sorted(round(box.left, 4) for box in boxes) or any(
        iou(a, b) > 0.4 for i, a in enumerate(boxes) for b in boxes[i + 1 :]
    )
    assert f1([found], [boxes]) > 0.99 or not boxes or len(found) < len(boxes)


def test_duplicate_boxes_are_suppressed() -> None:
    box = Box(1, 0.30, 0.30, 0.55, 0.55)
    logits = logits_of([box], 2)
    token = int(logits[:, 2].argmax())
    beside = token + 1
    # The neighbour predicts the same box with a lower score.
    logits[beside] = 0.0
    logits[beside, 2] = 3.0
    middle = torch.tensor([(beside % 6 + 0.5) / 6, (beside // 6 + 0.5) / 6])
    logits[beside, -4:] = torch.tensor(
        [middle[0] - box.left, middle[1] - box.top, box.right - middle[0], box.bottom - middle[1]]
    )
    (found,) = decoded(logits)
    assert found.score > 0.99 and found.label == 1
    # With another label, it is another object.
    logits[beside, 1], logits[beside, 2] = 3.0, 0.0
    assert len(decoded(logits)) == 2


def test_f1_by_hand() -> None:
    truth = [Box(0, 0.0, 0.0, 0.2, 0.2), Box(1, 0.5, 0.5, 0.7, 0.7)]
    right, shifted = truth[0], Box(1, 0.6, 0.5, 0.8, 0.7)  # overlaps by half, which is a third of the union
    assert f1([[right, shifted]], [truth]) == pytest.approx(0.5)
    assert f1([[right, shifted]], [truth], overlap=0.3) == pytest.approx(1.0)
    assert f1([[right, right]], [truth]) == pytest.approx(0.5)  # the second one matches no box
    assert f1([[right._replace(label=1)]], [truth]) == 0.0
    assert f1([[]], [truth]) == 0.0
    assert iou(truth[0], truth[1]) == 0.0


def test_average_precision_by_hand() -> None:
    truth = [Box(0, 0.0, 0.0, 0.2, 0.2), Box(0, 0.5, 0.5, 0.7, 0.7)]
    wrong = Box(0, 0.8, 0.0, 0.9, 0.1)
    found = [truth[0]._replace(score=0.9), wrong._replace(score=0.8), truth[1]._replace(score=0.7)]
    # Precision is 1 up to half of the labelled boxes, and two thirds at full recall.
    assert mean_average_precision([found], [truth]) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert mean_average_precision([found[:1]], [truth]) == pytest.approx(0.5)
    # A label without predicted boxes counts as 0; a label without labelled boxes does not count.
    assert mean_average_precision([found[:1]], [[truth[0], truth[1]._replace(label=1)]]) == pytest.approx(0.5)
    assert mean_average_precision([[wrong._replace(label=5), *truth]], [truth]) == 1.0
    assert mean_average_precision([[]], [[]]) == 1.0 and mean_average_precision([[wrong]], [[]]) == 0.0


@pytest.mark.slow
@given(st.lists(st.tuples(_random_boxes, _random_boxes), min_size=1, max_size=4))
def test_average_precision_is_the_area_under_the_precision_envelope(
    samples: list[tuple[list[Box], list[Box]]],
) -> None:
    """PASCAL VOC's definition: at every recall, the best precision at this or a higher recall."""
    found, wanted = [s[0] for s in samples], [s[1] for s in samples]
    labels = {box.label for boxes in wanted for box in boxes}
    areas = []
    for label in labels:
        total = sum(box.label == label for boxes in wanted for box in boxes)
        scores = sorted({box.score for boxes in found for box in boxes if box.label == label}, reverse=True)
        points = []  # recall and precision of the boxes with at least a given score
        for least in scores:
            confident = [[b for b in boxes if b.label == label and b.score >= least] for boxes in found]
            true = [[b for b in boxes if b.label == label] for boxes in wanted]
            right = f1(confident, true) * (sum(map(len, confident)) + total) / 2
            points.append((right / total, right / sum(map(len, confident))))
        levels = sorted({recall for recall, _ in points})
        widths = [level - below for below, level in zip([0.0, *levels], levels, strict=False)]
        areas.append(sum(w * max(p for r, p in points if r >= level) for w, level in zip(widths, levels, strict=True)))
    # The definition does not specify the order of boxes with equal scores.
    ties = len({b.score for boxes in found for b in boxes}) < sum(map(len, found))
    if labels and not ties:
        assert mean_average_precision(found, wanted) == pytest.approx(sum(areas) / len(areas))


def test_pictures_of_different_grids_are_separated() -> None:
    task = detection.Detection(("car", "bus"))
    boxes = (Box(0, 0.1, 0.2, 0.3, 0.6), Box(1, 0.7, 0.1, 0.9, 0.3, image=1), Box(0, 0.1, 0.2, 0.3, 0.6, image=1))
    grids = ((2, 5), (7, 3))
    parts = [logits_of([box for box in boxes if box.image == image], 2, grid) for image, grid in enumerate(grids)]
    answer = task.decode(torch.cat(parts), grids)
    assert answer.label == "1 bus, 2 car" and answer.confidence > 0.99
    assert {(box.label, box.image) for box in answer.boxes} == {(0, 0), (1, 1), (0, 1)}
    assert f1([answer.boxes], [boxes]) == 1.0
    nothing = task.decode(torch.cat([torch.tensor([[9.0, 0, 0, 0, 0, 0, 0]])] * 31), grids)
    assert nothing.label == "nothing" and nothing.boxes == () and nothing.confidence > 0.9
