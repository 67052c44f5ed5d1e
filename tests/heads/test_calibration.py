"""Temperatures against scipy's optimizer, and calibrated confidences against accuracy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from heads import Box, Value
from heads.task import sigmoid_temperature, softmax_temperature
from heads.tasks import make_task
from tests.example_counts import scaled


def expected_calibration_error(confidences: Sequence[float], right: Sequence[bool], num_bins: int = 10) -> float:
    """Mean distance of confidence and accuracy over bins of equal width, weighted by their number of answers."""
    bins: dict[int, list[tuple[float, bool]]] = {}
    for confidence, hit in zip(confidences, right, strict=True):
        bins.setdefault(min(num_bins - 1, int(confidence * num_bins)), []).append((confidence, hit))
    gaps = [abs(sum(confidence - hit for confidence, hit in members)) for members in bins.values()]
    return sum(gaps) / max(1, len(confidences))


def drawn(seed: int, num: int, classes: int, sure: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, `sure` times too large, and labels drawn from the softmax of the correct logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num, classes, generator=generator, dtype=torch.float64) * 2
    ids = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)[:, 0]
    return logits * sure, ids


@settings(max_examples=scaled(25))
@given(st.integers(0, 10_000), st.integers(5, 80), st.integers(2, 6), st.floats(0.1, 10))
def test_the_temperature_is_where_the_penalised_log_loss_is_smallest(
    seed: int, num: int, classes: int, sure: float
) -> None:
    logits, ids = drawn(seed, num, classes, sure)
    holds = F.one_hot(ids, classes).bool()

    def softmax_loss(inverse: float) -> float:
        return F.cross_entropy(logits * inverse, ids).item() + (inverse - 1) ** 2 / (2 * num)

    def sigmoid_loss(inverse: float) -> float:
        each = F.binary_cross_entropy_with_logits(logits * inverse, holds.double(), reduction="none")
        return each.sum(-1).mean().item() + (inverse - 1) ** 2 / (2 * num)

    for loss, found in (
        (softmax_loss, softmax_temperature(logits, ids)),
        (sigmoid_loss, sigmoid_temperature(logits, holds)),
    ):
        best = minimize_scalar(loss, bounds=(1e-3, 1e3), method="bounded", options={"xatol": 1e-9})
        assert loss(1 / found) <= best.fun + 1e-9


def test_all_correct_samples_keep_the_temperature_bounded() -> None:
    logits = torch.tensor([[4.0, 0.0], [0.0, 3.0]])
    found = softmax_temperature(logits, torch.tensor([0, 1]))
    assert 0.3 < found < 1.0


@pytest.mark.parametrize("sure", [0.3, 4.0])
@pytest.mark.parametrize("kind", ["classification", "counting", "multi_label", "binary"])
def test_calibrated_confidences_mean_what_they_say(kind: str, sure: float) -> None:
    """Over- or underconfident before calibration; far better calibrated afterwards, on other samples."""
    generator = torch.Generator().manual_seed(1)
    labels = ("a", "b") if kind == "binary" else ("a", "b", "c")
    task = make_task(kind, labels, {})
    logits = torch.randn(4000, task.num_outputs, generator=generator, dtype=torch.float64) * 2
    values: list[Value]
    if kind in ("classification", "counting"):
        values = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)[:, 0].tolist()
    else:
        holds = torch.rand(logits.shape, generator=generator, dtype=torch.float64) < torch.sigmoid(logits)
        values = [int(row[0]) if kind == "binary" else tuple(row.nonzero().flatten().tolist()) for row in holds]
    rows = list(logits * sure)

    def error(of: object) -> float:
        answers = [of.decode(row) for row in rows[2000:]]  # type: ignore[attr-defined]
        right = [task.right(a.value, v) for a, v in zip(answers, values[2000:], strict=True)]
        return expected_calibration_error([answer.confidence for answer in answers], right)

    calibrated = task.calibrated(rows[:2000], values[:2000], [])
    assert calibrated.parameters["temperature"] == pytest.approx(sure, rel=0.15)
    assert error(calibrated) < 0.05 < error(task)
    # Calibration changes only the confidences, not the answers.
    assert [task.decode(row).value for row in rows[:50]] == [calibrated.decode(row).value for row in rows[:50]]


def test_deviations_of_a_regression_are_those_of_its_errors() -> None:
    generator = torch.Generator().manual_seed(2)
    parameters = {"offset": (5.0,), "scale": (2.0,), "tolerance": (0.6,), "deviations": (9.0,)}
    task = make_task("regression", ("x",), parameters)
    logits = torch.randn(3000, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(3000, generator=generator, dtype=torch.float64) * 0.5
    values: list[Value] = (logits[:, 0] * 2 + 5 + noise).tolist()
    fitted = task.calibrated(list(logits), values, [])
    assert fitted.parameters["deviations"][0] == pytest.approx(0.5, rel=0.05)
    answers = [fitted.decode(row) for row in logits]
    share = fitted.metrics([answer.value for answer in answers], values)["within"]
    assert answers[0].confidence == pytest.approx(share, abs=0.03)
    exact = task.calibrated([torch.zeros(1)], [5.0], [])
    assert exact.parameters["deviations"] == (0.003,) and exact.decode(torch.zeros(1)).confidence <= 1.0


def test_detection_is_calibrated_token_by_token() -> None:
    generator = torch.Generator().manual_seed(3)
    task = make_task("detection", ("car",), {})
    logits, values, grids = [], [], []
    for _ in range(300):
        own = torch.randn(6, 6, generator=generator, dtype=torch.float64)
        own[:, -4:] = 0.1
        there = torch.rand(6, generator=generator, dtype=torch.float64) < torch.softmax(own[:, :2], -1)[:, 1]
        cells = [divmod(int(token), 3) for token in there.nonzero()]
        own[:, :2] *= 3
        logits.append(own)
        values.append(tuple(Box(0, x / 3, y / 2, (x + 1) / 3, (y + 1) / 2) for y, x in cells))
        grids.append(((2, 3),))
    assert task.calibrated(logits, values, grids).parameters["temperature"] == pytest.approx(3, rel=0.1)
