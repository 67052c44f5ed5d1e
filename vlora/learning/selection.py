"""Which corrected records count: one label for each content, and a bounded share for each tenant.

A tenant's token can correct its own answers to anything. So the records of one tenant are at most a share of all that
are trained on, and of all that a promotion is decided by; a rollback must have its reason in the records of others too.
Those of admin tokens are not bounded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from vlora.learning.sample_store import Labelled, ServedCount


def agreed(records: Sequence[Labelled]) -> list[Labelled]:
    """One record for each question with its picture, in the order given.

    Of different labels, that of the last admin counts, else the one of the most tenants. Without one, there is none.
    """
    by_content: defaultdict[bytes, list[Labelled]] = defaultdict(list)
    for record in records:
        by_content[record.content].append(record)
    chosen = {one.number for own in by_content.values() if (one := _chosen(own)) is not None}
    return [record for record in records if record.number in chosen]


def _chosen(records: Sequence[Labelled]) -> Labelled | None:
    if trusted := [one for one in records if one.trusted]:
        return max(trusted, key=lambda one: one.correction)
    last_of = {one.tenant: one for one in sorted(records, key=lambda one: one.correction)}
    votes = Counter(" ".join(one.label.split()) for one in last_of.values()).most_common(2)
    if len(votes) > 1 and votes[0][1] == votes[1][1]:
        return None
    return next(one for one in last_of.values() if " ".join(one.label.split()) == votes[0][0])


def as_right(uncorrected: Sequence[Labelled], corrected: Sequence[Labelled]) -> list[Labelled]:
    """One record for each content that was not corrected in any request, the latest."""
    known = {one.content for one in corrected}
    latest = {one.content: one for one in uncorrected if one.content not in known}
    return list(latest.values())


def bounded(records: Sequence[Labelled], max_share: float, at_most: int | None = None) -> list[Labelled]:
    """The records without the oldest ones of tenants that have more than their share of the rest.

    at_most: The shares hold for this number of the latest records, too.
    """
    counts = Counter(one.tenant for one in records if not one.trusted)
    most = most_of_tenant(counts.values(), len(records) - counts.total(), max_share)
    if at_most is not None:
        most = min(most, int(max_share * at_most))
    kept: list[Labelled] = []
    used: Counter[str | None] = Counter()
    for one in sorted(records, key=lambda one: -one.correction):
        if not one.trusted:
            used[one.tenant] += 1
            if used[one.tenant] > most:
                continue
        kept.append(one)
    return kept[::-1]


def latest_of_each(records: Sequence[Labelled], most: int) -> list[Labelled]:
    """At most so many of the latest records, the same number for each tenant as far as it has so many.

    Returned in the order of their numbers.
    """
    counts: Counter[str | None] = Counter()
    places: dict[int, int] = {}  # of each record among those of its tenant, the latest first
    latest = sorted(records, key=lambda one: -one.number)
    for one in latest:
        places[one.number] = counts[one.tenant]
        counts[one.tenant] += 1
    kept = sorted(latest, key=lambda one: places[one.number])[:most]
    return sorted(kept, key=lambda one: one.number)


def most_of_tenant(counts: Iterable[int], num_trusted: int, max_share: float) -> int:
    """The largest number of records that one tenant may have.

    Args:
        num_trusted: Records beside them that are not bounded.
        max_share: Of all that remain.
    """
    known = list(counts)
    low, high = 0, max(known, default=0)
    # A number n is allowed if n <= max_share * (num_trusted + sum(min(count, n))): those numbers begin at 0, without a
    # gap, because the right side is concave.
    while low < high:
        n = (low + high + 1) // 2
        if n <= max_share * (num_trusted + sum(min(count, n) for count in known)) + 1e-9:
            low = n
        else:
            high = n - 1
    return low


def without_each(served: Sequence[ServedCount]) -> dict[str, list[ServedCount]]:
    """By tenant: the counts without the corrections that its own token has sent."""
    left = {}
    for tenant in [one.tenant for one in served if one.wrong > one.trusted_wrong]:
        others = [one for one in served if one.tenant != tenant]
        trusted = [
            one._replace(wrong=one.trusted_wrong) for one in served if one.tenant == tenant and one.trusted_wrong
        ]
        left[tenant] = [*others, *trusted]
    return left
