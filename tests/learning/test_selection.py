"""Which corrections count: agreement, and the bounded share of a tenant."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import scaled
from vlora.learning.live_store import Labelled, ServedCount
from vlora.learning.selection import agreed, bounded, latest_of_each, most_of_tenant, without_each


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
