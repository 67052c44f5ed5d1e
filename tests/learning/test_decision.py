"""When a candidate is promoted, and when a version is rolled back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, betabinom

from tests.example_counts import scaled
from vlora.confidence import lower_bound, lower_bound_at_all_times
from vlora.learning.decision import (
    agreed,
    bounded,
    compare,
    confidence_of_look,
    latest_of_each,
    most_of_tenant,
    why_not,
    why_roll_back,
    without_each,
)
from vlora.learning.sample_store import Labelled, ServedCount
from vlora.types.learning import Comparison


def answers(right: int, count: int) -> list[bool]:
    return [True] * right + [False] * (count - right)


@pytest.mark.parametrize(("right", "count"), [(0, 5), (1, 1), (3, 5), (5, 5), (30, 100), (90, 100)])
def test_bounds_are_the_quantile_of_a_beta_distribution_and_of_a_mixture(right: int, count: int) -> None:
    expected = beta.ppf(0.05, right, count - right + 1) if right else 0.0
    assert lower_bound(right, count, 0.95) == pytest.approx(expected) and lower_bound(0, 0, 0.95) == 0.0
    share = lower_bound_at_all_times(right, count, 0.95)
    if right:  # at all times
        binomial = beta.pdf(share, right + 1, count - right + 1) / (count + 1)
        assert betabinom.pmf(right, count, 1, 1) / binomial == pytest.approx(20)
    assert share < lower_bound(right, count, 0.95) or right == share == 0


@pytest.mark.parametrize(
    ("live", "trusted", "may_lose", "reason"),
    [
        ((10, 30, 40), None, 0, None),
        ((10, 14, 40), None, 0, "on 40 held-out live records its accuracy is 0.350 with a lower bound of 0.2"),
        ((0, 0, 2), None, 0, "on 2 held-out live records"),
        # The operator's records have a veto, and decide without live records.
        ((10, 40, 40), (9, 9, 10), 0, None),
        (
            (10, 40, 40),
            (9, 8, 10),
            0.05,
            "on the operator's 10 records it has 8 right, and the present version 9; at most a share of 0.05 may be",
        ),
        ((10, 40, 40), (9, 8, 10), 0.1, None),
        ((0, 0, 0), (10, 40, 40), 0, None),
        ((0, 0, 0), (10, 11, 40), 0, "on 40 held-out trusted records its accuracy is 0.275"),
        ((0, 0, 0), None, 0, "no held-out record counts; see `max_share`, or give `trusted` records"),
    ],
)
def test_a_candidate_must_be_better_for_certain(
    live: tuple[int, int, int], trusted: tuple[int, int, int] | None, may_lose: float, reason: str | None
) -> None:
    """live, trusted: right answers of the present version and of the candidate, and all."""

    def compared(present: int, candidate: int, count: int) -> Comparison:
        found = compare(answers(present, count), answers(candidate, count), 0.95)
        assert count < 40 or found.candidate_share - 0.2 < found.lower <= found.candidate_share == candidate / count
        return found

    found = why_not(compared(*live), None if trusted is None else compared(*trusted), may_lose)
    assert found is None if reason is None else str(found).startswith(reason)


BEFORE = [ServedCount("a", 100, 5, 0), ServedCount("b", 100, 5, 0)]
WORSE = [ServedCount("a", 20, 9, 0), ServedCount("b", 20, 9, 0)]
FEW = [ServedCount("a", 20, 1, 0), ServedCount("b", 20, 2, 0)]
BY_ONE = [ServedCount("a", 20, 20, 0), ServedCount("b", 20, 0, 0)]
NEW, BAD = ServedCount("new", 50, 50, 0), ServedCount("bad", 1000, 900, 0)


@pytest.mark.parametrize(
    ("before", "after", "max_share", "rolls_back"),
    [
        pytest.param(BEFORE, WORSE, 0.5, True, id="worse"),
        pytest.param(BEFORE, FEW, 0.5, False, id="few corrections"),
        pytest.param([ServedCount("a", 40, 0, 0)], [ServedCount("a", 30, 1, 1)], 0.5, False, id="one correction"),
        pytest.param(BEFORE, BY_ONE, 0.5, False, id="of one tenant alone"),
        pytest.param(BEFORE, BY_ONE, 1.0, True, id="of one tenant, which suffices"),
        pytest.param(BEFORE, [*FEW, ServedCount("bad", 200, 200, 0)], 0.5, False, id="an attacker beside honest ones"),
        pytest.param([*BEFORE, BAD], WORSE, 0.5, True, id="an attacker without answers of this version"),
        pytest.param(BEFORE, [*FEW, NEW], 1.0, False, id="a new tenant"),
        pytest.param(BEFORE[:1], [FEW[0], NEW], 1.0, False, id="a new tenant beside one"),
        pytest.param([*BEFORE, BAD], [*WORSE, ServedCount("bad", 9, 9, 0)], 0.5, False, id="hidden by an attacker"),
    ],
)
def test_a_version_with_more_corrections_is_rolled_back(
    before: list[ServedCount], after: list[ServedCount], max_share: float, rolls_back: bool
) -> None:
    reason = why_roll_back(before, after, None, max_share=max_share, confidence=0.95)
    assert (reason is not None) == rolls_back
    if after is WORSE:
        assert str(reason).startswith("18 of its 40 answers were corrected, a share with a lower bound")


def test_without_earlier_answers_the_evaluation_is_the_measure() -> None:
    worse = [ServedCount("a", 10, 10, 10)]
    evaluated = compare(answers(30, 40), answers(40, 40), 0.95)
    assert why_roll_back([], worse, evaluated, max_share=0.5, confidence=0.95) is not None
    assert why_roll_back([], worse, None, max_share=0.5, confidence=0.95) is None


def test_an_equal_version_is_rarely_promoted_in_many_looks() -> None:
    """Two versions that err independently: one look by the accuracy alone promotes one in nine."""
    draw = random.Random(0)
    once = ever = by_share = 0
    for _ in range(300):
        held_out: list[tuple[bool, bool]] = []
        promoted = []
        for look in range(1, 7):
            held_out += [(draw.random() < 0.7, draw.random() < 0.7) for _ in range(25)]
            confidence = confidence_of_look(0.95, look)
            compared = compare([old for old, _ in held_out], [new for _, new in held_out], confidence)
            promoted.append(why_not(compared, None, 0, confidence) is None)
        by_share += lower_bound(compared.candidate, compared.count, 0.95) > compared.present_share
        once += why_not(compared, None, 0, 0.95) is None
        ever += any(promoted)
    assert by_share > 24 and once <= 24 and ever <= 24, (by_share, once, ever)  # 15 expected at most


def test_a_few_changed_answers_may_be_chance() -> None:
    same, new = [True] * 96, compare([True] * 96 + [False] * 4, [True] * 100, 0.95)
    assert new.lower > new.present_share and (new.gained, new.lost) == (4, 0)
    assert why_not(new, None, 0) == (
        "on 100 held-out records it has 4 right that the present version has wrong, and 0 wrong that the present "
        "version has right, which may be chance"
    )
    five = compare([*same[:95], *[False] * 5], [True] * 100, 0.95)
    assert why_not(five, None, 0) is None


def test_an_equal_version_that_is_watched_is_rarely_rolled_back() -> None:
    """A look after every answer. The bound of one look rolls two in five back."""
    draw = random.Random(0)
    ever = by_one_look = 0
    for _ in range(60):
        before = sum(draw.random() < 0.1 for _ in range(300))
        wrong = 0
        rolled_back = one_look = False
        for answered in range(1, 401):
            wrong += draw.random() < 0.1
            if answered % 10 == 0:
                counts = [ServedCount("a", 300, before, before)], [ServedCount("a", answered, wrong, wrong)]
                rolled_back |= why_roll_back(*counts, None, max_share=1.0, confidence=0.95) is not None
                one_look |= beta.ppf(0.05, wrong, answered - wrong + 1) > before / 300
        ever += rolled_back
        by_one_look += one_look
    assert by_one_look > 6 and ever <= 3, (by_one_look, ever)


def record(
    number: int, tenant: str | None = "a", label: str = "x", content: int | None = None, trusted: bool = False
) -> Labelled:
    own = number if content is None else content
    return Labelled(number, number, tenant, trusted, False, own.to_bytes(4), f"q{own}", label)


def test_different_labels_of_one_content_are_decided_by_tenants() -> None:
    three = [record(1, "a", "x", 0), record(2, "b", "y", 0), record(3, "c", "y", 0)]
    assert [one.label for one in agreed(three)] == ["y"]
    assert agreed([record(1, "a", "x", 0), record(2, "b", "y", 0)]) == [], "no majority"
    many_of_one = [
        *(record(number, "a", "x", 0) for number in range(1, 9)),
        record(9, "b", "y", 0),
        record(10, "c", "y", 0),
    ]
    assert [one.label for one in agreed(many_of_one)] == ["y"], "a tenant has one vote"
    assert [one.label for one in agreed([record(1, "a", "x", 0), record(2, "a", "y", 0)])] == ["y"], "the later one"
    by_admin = [record(9, "root", "z", 0, trusted=True), *three]
    assert [one.label for one in agreed(by_admin)] == ["z"]
    assert [one.number for one in agreed([record(1), record(2)])] == [1, 2]


def test_a_tenant_has_a_bounded_share() -> None:
    flood = [record(number, "bad") for number in range(100)]
    honest = [record(number, "good") for number in range(100, 110)]
    kept = bounded([*flood, *honest], 0.5)
    assert len([one for one in kept if one.tenant == "bad"]) == 10
    assert [one.number for one in kept if one.tenant == "bad"] == list(range(90, 100)), "the latest"
    assert bounded(flood, 0.5) == [], "one tenant alone decides nothing"
    assert bounded(flood, 1.0) == flood
    trusted = [record(number, "bad", trusted=True) for number in range(5)]
    assert len(bounded([*trusted, *flood[5:]], 0.5)) == 10


@given(st.lists(st.integers(0, 12), max_size=4), st.integers(0, 12), st.sampled_from((0.2, 1 / 3, 0.5, 0.75, 1.0)))
@settings(max_examples=scaled(200), deadline=None)
def test_the_bound_is_the_largest_that_keeps_the_share(counts: list[int], trusted: int, share: float) -> None:
    def holds(most: int) -> bool:
        kept = [min(count, most) for count in counts]
        return all(own <= share * (trusted + sum(kept)) + 1e-9 for own in kept)

    limit = most_of_tenant(counts, trusted, share)
    best = max(most for most in range(max(counts, default=0) + 1) if holds(most))
    assert [min(count, limit) for count in counts] == [min(count, best) for count in counts]


def test_counts_without_the_corrections_of_a_token() -> None:
    bad, good, root = ServedCount("bad", 50, 40, 0), ServedCount("good", 50, 3, 1), ServedCount("root", 9, 0, 0)
    left = without_each([bad, good, root])
    assert left == {"bad": [good, root], "good": [bad, root, ServedCount("good", 50, 1, 1)]}


@settings(deadline=None, max_examples=scaled(100))
@given(st.lists(st.sampled_from("abc"), max_size=40), st.integers(0, 50))
def test_tenants_share_an_evaluation(tenants: list[str], most: int) -> None:
    """Oracle: one record after the other, in turn of each tenant that still has some, its latest first."""
    records = [record(number, tenant) for number, tenant in enumerate(tenants)]
    left = {name: [one for one in records if one.tenant == name] for name in "abc"}
    numbers = {name: 0 for name in "abc"}
    for _ in range(min(most, len(records))):
        name = min((name for name in "abc" if left[name]), key=lambda name: numbers[name])
        left[name].pop()
        numbers[name] += 1
    kept = latest_of_each(records, most)
    assert sorted(sum(one.tenant == name for one in kept) for name in "abc") == sorted(numbers.values())
    assert [one.number for one in kept] == sorted(one.number for one in kept)
    for name in "abc":
        own, all_ = ([one.number for one in part if one.tenant == name] for part in (kept, records))
        assert own == all_[len(all_) - len(own) :]
