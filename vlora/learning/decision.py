"""When a candidate replaces the present version, and when the previous one returns."""

from __future__ import annotations

from collections.abc import Sequence

from vlora.confidence import lower_bound
from vlora.learning.live_store import ServedCount
from vlora.learning.selection import without_each
from vlora.types.learning import Comparison


def compare(present: Sequence[bool], candidate: Sequence[bool], confidence: float) -> Comparison:
    """Compare two versions by which of the same questions they answer right."""
    right = sum(candidate)
    lower = lower_bound(right, len(candidate), confidence)
    return Comparison(count=len(candidate), present=sum(present), candidate=right, lower=lower)


def why_not(live: Comparison, trusted: Comparison | None, max_trusted_loss: float) -> str | None:
    """Why a candidate is not promoted; None if it is.

    Its lower bound must be above the accuracy of the present version: on live records, or on the operator's if there
    are none. And its accuracy on the operator's records must not be lower by more than a given share.

    Args:
        live: On held-out live records.
        trusted: On the operator's records, which no caller can change.
        max_trusted_loss: That share.
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
    wrong ones rather than right ones. It must be larger also without the corrections of any one token.

    Args:
        before: Counts of the version before.
        after: Counts of the present version.
        evaluated: The comparison by which it was promoted, for a version before without any answer.
        max_share: With 1, one token suffices.
        confidence: Of the bound.
    """
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
        share = sum(one.wrong for one in before) / answered_before
    elif evaluated is not None and evaluated.count:
        share = 1 - evaluated.present_share
    else:
        return None
    if (lower := lower_bound(wrong, answered, confidence)) <= share:
        return None
    return (
        f"{wrong} of its {answered} answers were corrected, a share with a lower bound of {lower:.3f}, above the "
        f"{share:.3f} of the version before"
    )
