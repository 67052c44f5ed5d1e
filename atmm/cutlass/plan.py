"""Lanes as problems of grouped products, built once per step and class. The device fills in the addresses of a layer's
tensors (`problems.h`)."""

from __future__ import annotations

from typing import NamedTuple

from atmm.batch_stats import BatchStats
from atmm.layers import bt_starts
from atmm.segments import Lane

ALIGNMENT = 8  # elements of a 128-bit access: sizes, strides and starts are multiples of it


class Problem(NamedTuple):
    """One lane at one site, in elements; same fields in the same order as `Problem` in `problems.h`.

    token: first token, counted from the start of the plan's range. a, bt: offsets of its rows from the start of the
    packed A. column: first column in the group's outputs side by side. hidden: offset of its hidden values [num_tokens,
    rank].
    """

    token: int
    num_tokens: int
    rank: int
    d_out: int
    a: int
    bt: int
    column: int
    hidden: int


class Round(NamedTuple):
    """Problems that one launch may add to y: they have the same sign, and no token occurs twice at a site.

    by_site: index of the first problem and number of problems of each site; sites without problems are omitted.
    """

    sign: float
    by_site: dict[int, tuple[int, int]]


class Problems(NamedTuple):
    """problems: ordered by round, then site. num_hidden: total number of hidden values."""

    problems: list[Problem]
    rounds: list[Round]
    num_hidden: int


def legal(stats: BatchStats) -> bool:
    """Whether the products support the plan: 16-bit values, and sizes and offsets that are multiples of 128 bits."""
    layout = stats.layout
    if layout.dtype.itemsize != 2:
        return False
    ranks = {run.rank for site in stats.runs for run in site}
    return all(size % ALIGNMENT == 0 for size in (layout.d_in, *layout.d_outs, *ranks))


def problems_of(stats: BatchStats) -> Problems:
    """The problems of a legal plan."""
    layout = stats.layout
    starts = bt_starts(layout)
    problems: list[Problem] = []
    rounds = []
    num_hidden = 0
    for sign, lanes in _apart(stats.lanes):
        by_site = {}
        for site in stats.live:
            first = len(problems)
            for key, start, stop, _ in lanes:
                span = layout.spans[site].get(key)
                if span is None or not span.rank:
                    continue
                problems.append(
                    Problem(
                        token=start - stats.start,
                        num_tokens=stop - start,
                        rank=span.rank,
                        d_out=layout.d_outs[site],
                        a=(layout.first_rows[site] + span.start) * layout.d_in,
                        bt=starts[site] // layout.dtype.itemsize + span.start * layout.d_outs[site],
                        column=sum(layout.d_outs[:site]),
                        hidden=num_hidden,
                    )
                )
                num_hidden += (stop - start) * span.rank
            if len(problems) > first:
                by_site[site] = first, len(problems) - first
        if by_site:
            rounds.append(Round(sign, by_site))
    return Problems(problems, rounds, num_hidden)


def _apart(lanes: tuple[Lane, ...]) -> list[tuple[float, list[Lane]]]:
    """Lanes, sorted by start, in as few groups as possible, each with one sign and without overlaps."""
    groups: list[tuple[float, list[Lane]]] = []
    for lane in lanes:
        for sign, group in groups:
            if sign == lane.sign and group[-1].stop <= lane.start:
                group.append(lane)
                break
        else:
            groups.append((lane.sign, [lane]))
    return groups
