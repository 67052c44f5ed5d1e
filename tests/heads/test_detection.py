"""Detection heads: what they are taught, what they answer, and the metric, against what can be said by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heads import Box, detection

GRID = (6, 6)


def logits_of(boxes: list[Box], num_labels: int) -> torch.Tensor:
    """The logits of a head that has learned its targets by heart."""
    classes, edges = detection.targets(boxes, GRID)
    sure = torch.nn.functional.one_hot(classes, 1 + num_labels).double() * 20
    return torch.cat([sure, edges.double()], -1)


@st.composite
def scenes(draw: st.DrawFn) -> list[Box]:
    """Boxes with centres in different cells, at most a cell and a half wide, so that none hides another."""
    cells = draw(st.lists(st.integers(0, 35), unique=True, max_size=6))
    boxes = []
    for cell in cells:
        row, column = divmod(cell, 6)
        x, y = (column + draw(st.floats(0.1, 0.9))) / 6, (row + draw(st.floats(0.1, 0.9))) / 6
        half = draw(st.floats(0.02, 0.05))
        boxes.append(Box(draw(st.integers(0, 2)), x - half, y - half, x + half, y + half))
    return boxes


@given(scenes())
def test_what_is_taught_is_what_is_answered(boxes: list[Box]) -> None:
    found = detection.decode(logits_of(boxes, 3), GRID)
    assert sorted(round(box.left, 4) for box in found) == sorted(round(box.left, 4) for box in boxes) or any(
        detection.iou(a, b) > 0.4 for i, a in enumerate(boxes) for b in boxes[i + 1 :]
    )
    assert detection.f1([found], [boxes]) > 0.99 or not boxes or len(found) < len(boxes)


def test_two_answers_for_one_thing_become_the_surer_one() -> None:
    box = Box(1, 0.30, 0.30, 0.55, 0.55)
    logits = logits_of([box], 2)
    token = int(logits[:, 2].argmax())
    beside = token + 1
    # The neighbour claims the same box, less surely.
    logits[beside] = 0.0
    logits[beside, 2] = 3.0
    middle = torch.tensor([(beside % 6 + 0.5) / 6, (beside // 6 + 0.5) / 6])
    logits[beside, -4:] = torch.tensor(
        [middle[0] - box.left, middle[1] - box.top, box.right - middle[0], box.bottom - middle[1]]
    )
    (found,) = detection.decode(logits, GRID)
    assert found.score > 0.99 and found.label == 1
    # Of another label it is another thing.
    logits[beside, 1], logits[beside, 2] = 3.0, 0.0
    assert len(detection.decode(logits, GRID)) == 2


def test_nothing_is_found_where_nothing_is_sure() -> None:
    assert detection.decode(torch.zeros(36, detection.num_outputs(3)) + torch.tensor([5.0, *[0.0] * 7]), GRID) == []


def test_f1_by_hand() -> None:
    truth = [Box(0, 0.0, 0.0, 0.2, 0.2), Box(1, 0.5, 0.5, 0.7, 0.7)]
    right, shifted = truth[0], Box(1, 0.6, 0.5, 0.8, 0.7)  # half of it overlaps: a third of the union
    assert detection.f1([[right, shifted]], [truth]) == pytest.approx(0.5)
    assert detection.f1([[right, shifted]], [truth], overlap=0.3) == pytest.approx(1.0)
    assert detection.f1([[right, right]], [truth]) == pytest.approx(0.5)  # the second one takes nothing
    assert detection.f1([[right._replace(label=1)]], [truth]) == 0.0
    assert detection.f1([[]], [truth]) == 0.0
    assert detection.iou(truth[0], truth[1]) == 0.0


def test_the_loss_falls_towards_the_truth() -> None:
    boxes = [Box(0, 0.1, 0.1, 0.3, 0.3), Box(2, 0.6, 0.6, 0.8, 0.9)]
    classes, edges = (values[None] for values in detection.targets(boxes, GRID))
    logits = torch.zeros(1, 36, detection.num_outputs(3), requires_grad=True)
    optimizer = torch.optim.Adam([logits], 0.1)
    first = detection.loss(logits, classes, edges).item()
    for _ in range(150):
        optimizer.zero_grad()
        loss = detection.loss(logits, classes, edges)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05 * first
    assert detection.f1([detection.decode(logits[0].detach(), GRID)], [boxes]) == 1.0
