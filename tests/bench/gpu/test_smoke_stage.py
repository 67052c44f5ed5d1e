"""The comparison of the smoke stage: values that are not finite and answers that part count."""

from __future__ import annotations

import math

import pytest

from vlora.bench.gpu.stages.smoke import checked, difference
from vlora.types import TokenScore


def score(*top: tuple[int, float]) -> TokenScore:
    return TokenScore(top[0][1], top)


def test_differences_are_of_the_most_likely_tokens() -> None:
    one = [score((5, -0.1), (7, -2.0)), score((1, -0.5), (2, -1.0))]
    other = [score((5, -0.1), (7, -2.25)), score((1, -0.5), (3, -1.0))]
    assert difference(one, one) == 0.0
    assert difference(one, other) == 0.25


def test_answers_that_part_are_compared_up_to_there() -> None:
    one = [score((5, -0.5), (7, -0.625)), score((1, -0.5))]
    other = [score((7, -0.5), (5, -0.625)), score((9, -8.0))]
    assert difference(one, other) == 0.125


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_values_that_are_not_finite_are_infinitely_different(value: float) -> None:
    assert difference([score((5, value))], [score((5, -0.5))]) == math.inf
    assert difference([score((5, -0.5))], [score((5, value))]) == math.inf


def test_an_error_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="merge in bfloat16: relative error nan"):
        checked("merge", "bfloat16", math.nan)
    assert checked("merge", "bfloat16", 1e-3) == 1e-3
