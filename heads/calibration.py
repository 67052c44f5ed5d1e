"""Calibration of confidences: a temperature fitted on validation logits, and the expected calibration error.

Guo et al. 2017, "On calibration of modern neural networks". Logits are divided by one temperature. The log loss of both
softmax and sigmoid is convex in the inverse temperature, so that its slope has one zero, which bisection finds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_LEAST, _MOST = 1e-3, 1e3  # search range of inverse temperatures
_HALVINGS = 60


def softmax_temperature(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """The temperature that maximizes the softmax likelihood of the labels `ids` [n] under logits [n, c]."""
    logits = logits.detach().double()
    correct = logits.gather(1, ids[:, None])[:, 0]

    def slope(inverse: float) -> float:
        expected = (torch.softmax(logits * inverse, -1) * logits).sum(-1)
        return float((expected - correct).mean())

    return 1 / _zero(slope, len(logits))


def sigmoid_temperature(logits: torch.Tensor, holds: torch.Tensor) -> float:
    """The temperature that maximizes the sigmoid likelihood of the binary labels `holds` [n, c] under logits [n, c]."""
    logits = logits.detach().double()

    def slope(inverse: float) -> float:
        return float(((torch.sigmoid(logits * inverse) - holds.double()) * logits).sum(-1).mean())

    return 1 / _zero(slope, len(logits))


def _zero(slope: Callable[[float], float], num_samples: int) -> float:
    """The inverse temperature with the smallest log loss, found by bisection.

    If all samples are correct, the log loss has no minimum. A regularization towards 1, with the weight of one sample,
    keeps the result finite and the loss strictly convex.
    """
    low, high = _LEAST, _MOST
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        if slope(middle) + (middle - 1) / num_samples > 0:
            high = middle
        else:
            low = middle
    return (low * high) ** 0.5
