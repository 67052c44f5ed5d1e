"""All tasks: training towards the labels, metrics computed by hand, and invalid labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from fusion.plan.schema import METRICS
from heads import TASKS, Box, Grid, Task, Value
from heads.task import LESS_IS_BETTER
from heads.tasks import Regression, make_task

pytestmark = pytest.mark.slow

GRIDS: tuple[Grid, ...] = ((2, 3), (1, 4))

SAMPLES: dict[str, tuple[tuple[str, ...], list[Value]]] = {
    "classification": (("cat", "dog", "bird"), [0, 2, 1, 2]),
    "action": (("enters", "leaves"), [1, 0, 1, 1]),
    "binary": (("no", "yes"), [1, 0, 0, 1]),
    "counting": (("0", "1", "2", "3"), [3, 0, 1, 2]),
    "multi_label": (("car", "bus", "person"), [(0, 2), (), (1,), (0, 1, 2)]),
    "regression": (("speed", "distance"), [(3.0, -100.0), (5.0, 250.0), (4.0, 40.0), (9.0, 0.0)]),
    "detection": (
        ("car", "bus"),
        [
            (Box(1, 0.1, 0.1, 0.5, 0.4), Box(0, 0.3, 0.2, 0.45, 0.9, image=1)),
            (),
            (Box(0, 0.6, 0.6, 0.9, 0.9),),
            (Box(0, 0.0, 0.1, 0.2, 0.8, image=1),),
        ],
    ),
}


def taught(kind: str) -> tuple[Task, list[torch.Tensor], list[Value]]:
    """A task, and logits optimized for its loss."""
    labels, values = SAMPLES[kind]
    task = TASKS[kind].for_training(labels, values)
    rows = (sum(r * c for r, c in GRIDS),) if task.reads_images else ()
    logits = [torch.zeros(*rows, task.num_outputs, requires_grad=True) for _ in values]
    optimizer = torch.optim.Adam(logits, 0.1)
    first = None
    for _ in range(300):
        optimizer.zero_grad()
        loss = task.loss(logits, values, [GRIDS] * len(values))
        loss.backward()
        optimizer.step()
        first = first or loss.item()
    assert first is not None and loss.item() < 0.1 * first
    return task, [each.detach() for each in logits], values


@pytest.mark.parametrize("kind", TASKS)
def test_targets_are_decoded_as_answers_and_parameters_recreate_the_task(kind: str) -> None:
    task, logits, values = taught(kind)
    answers = [task.decode(each, GRIDS) for each in logits]
    found = [answer.value for answer in answers]
    measured = task.metrics(found, values)
    main = next(iter(measured))
    assert tuple(name for name in measured if name not in LESS_IS_BETTER) == METRICS[kind]
    assert main not in LESS_IS_BETTER and measured[main] == 1.0
    assert all(task.right(one, other) for one, other in zip(found, values, strict=True))
    assert all(answer.label and 0 <= answer.confidence <= 1 for answer in answers)
    # Permuted values are wrong for most samples.
    assert task.metrics(found, [*values[1:], values[0]])[main] < 1.0
    for each in (task, task.calibrated(logits, values, [GRIDS] * len(values))):
        again = make_task(kind, each.labels, each.parameters)
        assert again == each
        assert again.decode(logits[0], GRIDS) == each.decode(logits[0], GRIDS)
    assert task.calibrated([], [], []) == task


def test_answers_have_the_fields_of_their_task() -> None:
    def answer(kind: str, logits: Sequence[float], **parameters: Any) -> Any:
        return make_task(kind, SAMPLES[kind][0], parameters).decode(torch.tensor(logits))

    chosen = answer("classification", [0.0, 2.0, 1.0])
    assert (chosen.label, chosen.label_id, chosen.count) == ("dog", 1, None)
    assert chosen.scores == pytest.approx(torch.softmax(torch.tensor([0.0, 2.0, 1.0]), 0).tolist())
    assert answer("classification", [0.0, 2.0, 1.0], temperature=2.0).confidence == pytest.approx(
        torch.softmax(torch.tensor([0.0, 1.0, 0.5]), 0)[1].item()
    )
    counted = answer("counting", [0.0, 0.0, 0.0, 9.0])
    assert (counted.label, counted.count, counted.label_id, counted.value) == ("3", 3, None, 3)
    several = answer("multi_label", [5.0, -5.0, 5.0])
    assert (several.label, several.chosen) == ("car, person", (0, 2))
    assert several.confidence == pytest.approx(torch.sigmoid(torch.tensor(5.0)).item() ** 3)
    assert answer("multi_label", [-5.0, -5.0, -5.0]).label == "none"
    measures = {"offset": (10, 20), "scale": (2, 4), "tolerance": (1, 1), "deviations": (1, 1)}
    number = answer("regression", [1.0, -0.5], **{k: tuple(map(float, v)) for k, v in measures.items()})
    assert number.values == (12.0, 18.0) and number.label == "speed 12, distance 18"
    assert number.confidence == pytest.approx(0.6827**2, abs=1e-3)  # one standard deviation, twice
    assert answer("regression", [math.pi, 0.0], **measures).label == "speed 16.28, distance 20"


def test_a_binary_query_is_answered_at_its_threshold() -> None:
    logit = torch.logit(torch.tensor([0.3]))
    for threshold, label, confidence in ((0.25, "yes", 0.3), (0.35, "no", 0.7)):
        found = make_task("binary", ("no", "yes"), {"threshold": threshold}).decode(logit)
        assert found.label == label and found.confidence == pytest.approx(confidence, abs=1e-6)
        assert found.scores == pytest.approx((0.7, 0.3), abs=1e-6)


def test_metrics_by_hand() -> None:
    def metrics(kind: str, found: list[Value], wanted: list[Value]) -> dict[str, float]:
        return TASKS[kind].for_training(SAMPLES[kind][0], SAMPLES[kind][1]).metrics(found, wanted)

    assert metrics("counting", [0, 2, 3, 3], [0, 1, 3, 0]) == {"accuracy": 0.5, "within_one": 0.75, "mae": 1.0}
    assert metrics("binary", [1, 1, 0, 0], [1, 0, 1, 0]) == {"accuracy": 0.5, "f1": 0.5}
    assert metrics("binary", [0, 0], [0, 0]) == {"accuracy": 1.0, "f1": 1.0}
    assert metrics("multi_label", [(0, 1), (2,)], [(1,), (2, 0)]) == {"f1": pytest.approx(2 / 3), "accuracy": 0.0}
    truth, answers = [0, 0, 1, 2, 2, 2], [0, 1, 1, 2, 2, 0]
    macro = float(f1_score(truth, answers, average="macro"))
    assert metrics("classification", [*answers], [*truth]) == {
        "accuracy": pytest.approx(4 / 6),
        "f1": pytest.approx(macro),
    }
    task = Regression(("x",), (0.0,), (1.0,), (0.5,), (1.0,))
    assert task.metrics([1.0, 2.0], [1.4, 4.0]) == {"within": 0.5, "mae": pytest.approx(1.2)}
    boxes = (Box(0, 0, 0, 0.5, 0.5), Box(0, 0.5, 0.5, 1, 1, image=1))
    unsure = boxes[1]._replace(score=0.2)
    # The box of the second image is below the threshold: F1 ignores it, mean average precision does not.
    assert metrics("detection", [(boxes[0], unsure)], [boxes]) == {"f1": pytest.approx(2 / 3), "map": 1.0}
    assert metrics("detection", [(boxes[0]._replace(image=1),)], [boxes[:1]]) == {"f1": 0.0, "map": 0.0}


def test_far_counts_cost_more_than_near_ones() -> None:
    task = make_task("counting", tuple(map(str, range(6))), {})
    losses = []
    for answered in range(6):
        logits = torch.zeros(6)
        logits[answered] = 4.0
        losses.append(task.loss([logits], [2], []).item())
    assert losses[2] < losses[1] < losses[0] and losses[2] < losses[3] < losses[4] < losses[5]


@given(st.lists(st.floats(0.02, 1.0), min_size=3, max_size=5))
def test_the_true_distribution_of_counts_has_the_smallest_loss(weights: list[float]) -> None:
    """Both parts of the loss are proper: no other logits have a smaller expected loss under the true distribution."""
    true = torch.tensor(weights) / sum(weights)
    task = make_task("counting", tuple(map(str, range(len(weights)))), {})

    def expected(logits: torch.Tensor) -> float:
        return sum(float(p) * task.loss([logits], [count], []).item() for count, p in enumerate(true))

    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        other = true.log() + torch.randn(len(weights), generator=generator)
        assert expected(true.log()) <= expected(other) + 1e-5


def test_labels_and_parameters_follow_from_the_training_values() -> None:
    for given_, values, labels in (((), [0, 4, 2], "01234"), (("none", "one"), [0, 1], None), ((), [], "01")):
        assert TASKS["counting"].for_training(given_, values).labels == (given_ if labels is None else tuple(labels))
    task = TASKS["regression"].for_training(("x",), [7.0, 7.0])  # a constant number can be learned
    answer = task.decode(torch.zeros(1))
    assert answer.value == (7.0,) and task.metrics([answer.value], [7.0])["within"] == 1.0


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("classification", 3, "3 is not a label id; label ids are 0 to 2"),
        ("counting", "three", "'three' is not a label id"),
        ("binary", True, "True is not a label id"),
        ("multi_label", (7,), "7 is not a label id"),
        ("multi_label", 1, "1 is not a tuple of label ids"),
        ("regression", (1.0,), "is not 2 finite numbers"),
        ("regression", (1.0, float("inf")), "is not 2 finite numbers"),
        ("detection", (1, 2), "is not a tuple of boxes"),
    ],
)
def test_values_of_another_task_are_refused(kind: str, value: Value, text: str) -> None:
    labels, values = SAMPLES[kind]
    task = TASKS[kind].for_training(labels, values)
    rows = (sum(r * c for r, c in GRIDS),) if task.reads_images else ()
    with pytest.raises(ValueError, match=text):
        task.loss([torch.zeros(*rows, task.num_outputs)], [value], [GRIDS])


@given(
    st.sampled_from(sorted(TASKS)),
    st.floats(0.1, 10),
    st.floats(0.2, 0.8),
    st.integers(0, 10_000),
)
def test_calibration_keeps_answers_of_tasks_that_do_not_depend_on_it(
    kind: str, temperature: float, threshold: float, seed: int
) -> None:
    labels, values = SAMPLES[kind]
    plain = TASKS[kind].for_training(labels, values)
    parameters = dict(plain.parameters)
    if seed % 2 and "threshold" in parameters:
        parameters["threshold"] = threshold
    changed = (
        {"temperature": temperature} if "temperature" in parameters else {"deviations": (temperature,) * len(labels)}
    )
    first, second = (make_task(kind, labels, {**parameters, **own}) for own in ({}, changed))
    if not first.calibration_decides:
        rows = (sum(r * c for r, c in GRIDS),) if plain.reads_images else ()
        logits = torch.randn(*rows, plain.num_outputs, generator=torch.Generator().manual_seed(seed))
        assert first.decode(logits, GRIDS).value == second.decode(logits, GRIDS).value


def test_calibration_changes_answers_of_tasks_that_depend_on_it() -> None:
    # "nothing" is more probable than each label, but less than both together.
    unsure = torch.tensor([[0.5, 0.0, 0.0, *[0.1] * 4]] * 10)
    for kind, parameters, logits in (
        ("binary", {"threshold": 0.7}, torch.tensor([0.8])),
        ("multi_label", {"threshold": 0.7}, torch.tensor([0.8, -1.0, -1.0])),
        ("detection", {}, unsure),
    ):
        labels, _ = SAMPLES[kind]
        tasks = [make_task(kind, labels, {**parameters, "temperature": each}) for each in (0.5, 5.0)]
        assert all(task.calibration_decides for task in tasks)
        one, other = (task.decode(logits, GRIDS) for task in tasks)
        assert one.value != other.value and (one.label != other.label)
