"""When a candidate is promoted, and when a version is rolled back."""

from __future__ import annotations

import pytest
from scipy.stats import beta

from vlora.confidence import lower_bound
from vlora.learning.decision import compare, why_not, why_roll_back
from vlora.learning.live_store import ServedCount


def answers(right: int, count: int) -> list[bool]:
    return [True] * right + [False] * (count - right)


@pytest.mark.parametrize(("right", "count"), [(0, 5), (3, 5), (5, 5), (90, 100)])
def test_the_bound_is_the_quantile_of_a_beta_distribution(right: int, count: int) -> None:
    expected = beta.ppf(0.05, right, count - right + 1) if right else 0.0
    assert lower_bound(right, count, 0.95) == pytest.approx(expected)
    assert lower_bound(0, 0, 0.95) == 0.0


def test_a_candidate_must_be_better_for_certain() -> None:
    better = compare(answers(10, 40), answers(30, 40), 0.95)
    assert (better.present_share, better.candidate_share) == (0.25, 0.75) and 0.6 < better.lower < 0.75
    assert why_not(better, None, 0) is None
    reason = why_not(compare(answers(10, 40), answers(14, 40), 0.95), None, 0)
    assert (
        reason is not None and "on 40 held-out live records its accuracy is 0.350 with a lower bound of 0.2" in reason
    )
    assert why_not(compare(answers(0, 2), answers(0, 2), 0.95), None, 0) is not None


def test_the_operators_records_have_a_veto() -> None:
    better = compare(answers(10, 40), answers(40, 40), 0.95)
    assert why_not(better, compare(answers(9, 10), answers(9, 10), 0.95), 0) is None
    reason = why_not(better, compare(answers(9, 10), answers(8, 10), 0.95), 0.05)
    assert (
        reason
        == "on the operator's 10 records it has 8 right, and the present version 9; at most a share of 0.05 may be lost"
    )
    assert why_not(better, compare(answers(9, 10), answers(8, 10), 0.95), 0.1) is None


def test_without_live_records_the_operators_decide() -> None:
    nothing = compare([], [], 0.95)
    assert why_not(nothing, compare(answers(10, 40), answers(40, 40), 0.95), 0) is None
    assert why_not(nothing, compare(answers(10, 40), answers(11, 40), 0.95), 0) is not None
    assert why_not(nothing, None, 0) == "no held-out record counts; see `max_share`, or give `trusted` records"


def test_a_version_with_more_corrections_is_rolled_back() -> None:
    before = [ServedCount("a", 100, 5, 0), ServedCount("b", 100, 5, 0)]
    worse = [ServedCount("a", 20, 6, 0), ServedCount("b", 20, 6, 0)]
    reason = why_roll_back(before, worse, None, max_share=0.5, confidence=0.95)
    assert reason is not None and reason.startswith("12 of its 40 answers were corrected, a share with a lower bound")
    few = [ServedCount("a", 20, 1, 0), ServedCount("b", 20, 2, 0)]
    assert why_roll_back(before, few, None, max_share=0.5, confidence=0.95) is None
    by_one = [ServedCount("a", 20, 20, 0), ServedCount("b", 20, 0, 0)]
    assert why_roll_back(before, by_one, None, max_share=0.5, confidence=0.95) is None, "one tenant alone"
    assert why_roll_back(before, by_one, None, max_share=1.0, confidence=0.95) is not None
    attacked = [*few, ServedCount("bad", 200, 200, 0)]
    assert why_roll_back(before, attacked, None, max_share=0.5, confidence=0.95) is None, "beside honest ones"
    hidden = [*before, ServedCount("bad", 1000, 900, 0)]
    assert why_roll_back(hidden, [*worse, ServedCount("bad", 9, 9, 0)], None, max_share=0.5, confidence=0.95) is None


def test_without_earlier_answers_the_evaluation_is_the_measure() -> None:
    worse = [ServedCount("a", 10, 8, 8)]
    evaluated = compare(answers(30, 40), answers(40, 40), 0.95)
    assert why_roll_back([], worse, evaluated, max_share=0.5, confidence=0.95) is not None
    assert why_roll_back([], worse, None, max_share=0.5, confidence=0.95) is None
