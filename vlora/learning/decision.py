"""When a candidate replaces the present version, and when the previous one returns, by which corrected records.

There is one label for each content, and a bounded share for each tenant: a tenant's token can correct its own answers
to anything. So the records of one tenant are at most a share of all that are trained on, and of all that a promotion is
decided by; a rollback must have its reason in the records of others too. Those of admin tokens are not bounded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from vlora.confidence import lower_bound, lower_bound_at_all_times, upper_bound
from vlora.learning.sample_store import Labelled, ServedCount
from vlora.types.learning import Comparison


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


def compare(present: Sequence[bool], candidate: Sequence[bool], confidence: float) -> Comparison:
    """Compare two versions by which of the same questions they answer right."""
    right = sum(candidate)
    lower = lower_bound(right, len(candidate), confidence)
    gained = sum(new and not old for old, new in zip(present, candidate, strict=True))
    return Comparison(count=len(candidate), present=sum(present), candidate=right, lower=lower, gained=gained)


def confidence_of_look(confidence: float, number: int) -> float:
    """The confidence of an evaluation, by which all evaluations against one present version err as seldom as one.

    number: from 1. The errors 1/2, 1/6, 1/12 ... of the permitted one add up to it.
    """
    return 1 - (1 - confidence) / (number * (number + 1))


def why_not(
    live: Comparison, trusted: Comparison | None, max_trusted_loss: float, confidence: float = 0.95
) -> str | None:
    """Why a candidate is not promoted; None if it is.

    Its lower bound must be above the accuracy of the present version: on live records, or on the operator's if there
    are none. Of the records that one of the two has wrong it must have more than half right, by a bound too, because
    the present version's accuracy is measured on the same few records. And its accuracy on the operator's records
    must not be lower by more than a given share.

    Args:
        trusted: On the operator's records, which no caller can change.
        confidence: Of the bounds.
    """
    if trusted is not None and trusted.present - trusted.candidate > max_trusted_loss * trusted.count + 1e-9:
        return (
            f"on the operator's {trusted.count} records it has {trusted.candidate} right, and the present version "
            f"{trusted.present}; at most a share of {max_trusted_loss:g} may be lost"
        )
    decisive = live if live.count or trusted is None else trusted
    if not decisive.count:
        return "no held-out record counts; see `max_share`, or give `trusted` records"
    if decisive.lower <= decisive.present_share:
        what = "live" if decisive is live else "trusted"
        return (
            f"on {decisive.count} held-out {what} records its accuracy is {decisive.candidate_share:.3f} with a lower "
            f"bound of {decisive.lower:.3f}, not above the present version's {decisive.present_share:.3f}"
        )
    if lower_bound(decisive.gained, decisive.gained + decisive.lost, confidence) <= 0.5:
        return (
            f"on {decisive.count} held-out records it has {decisive.gained} right that the present version has wrong, "
            f"and {decisive.lost} wrong that the present version has right, which may be chance"
        )
    return None


def why_roll_back(
    before: Sequence[ServedCount],
    after: Sequence[ServedCount],
    evaluated: Comparison | None,
    *,
    max_share: float,
    confidence: float,
) -> str | None:
    """Why a version has turned out to be worse than the one before; None if it has not.

    The share of answers that are corrected to others is compared, since only a part of the answers is corrected, and
    wrong ones rather than right ones. It must be larger also without the corrections of any one token. The bound holds
    however often it is looked at. If some tokens asked both versions, only these count: a token that corrected many
    answers of one version and did not ask the other one would hide a difference, or feign one.

    Args:
        evaluated: The comparison by which it was promoted, for a version before without any answer.
        max_share: With 1, one token suffices.
    """
    both = {one.tenant for one in before if one.answered} & {one.tenant for one in after if one.answered}
    if both:
        before, after = ([one for one in counts if one.tenant in both] for counts in (before, after))
    reason = _worse(before, after, evaluated, confidence)
    if reason is None or max_share == 1:
        return reason
    before_without = without_each(before)
    for tenant, left in without_each(after).items():
        if _worse(before_without.get(tenant, before), left, evaluated, confidence) is None:
            return None
    return reason


def _worse(
    before: Sequence[ServedCount], after: Sequence[ServedCount], evaluated: Comparison | None, confidence: float
) -> str | None:
    wrong, answered = sum(one.wrong for one in after), sum(one.answered for one in after)
    if answered_before := sum(one.answered for one in before):
        wrong_before = sum(one.wrong for one in before)
    elif evaluated is not None and evaluated.count:
        wrong_before, answered_before = evaluated.count - evaluated.present, evaluated.count
    else:
        return None
    upper = upper_bound(wrong_before, answered_before, confidence)
    if (lower := lower_bound_at_all_times(wrong, answered, confidence)) <= upper:
        return None
    return (
        f"{wrong} of its {answered} answers were corrected, a share with a lower bound of {lower:.3f}, above the "
        f"upper bound of {upper:.3f} of the version before ({wrong_before} of {answered_before})"
    )
