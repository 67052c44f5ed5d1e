"""Tiles of lanes: small int32 tables that assign work to the programs. Built once per step and class."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from atmm.batch_stats import BatchStats
from atmm.layers import ROW_ALIGNMENT, TENSOR_ALIGNMENT, bt_starts, row_strides
from atmm.segments import MOST_WITH_ROOM


class Tiles(NamedTuple):
    """The tile tables of a plan.

    shrink: [first token, tokens, first row of A, rank, first hidden row] per tile, over all sites of the group.

    expand: per site, [first token, tokens, first column, d_out, start of Bt, row length of Bt, (first row of Bt, rank,
    first hidden row, first row of A, sign) x parts] per tile; tiles of a site cover disjoint tokens. Columns count the
    group's outputs side by side. The start of Bt is relative to A in units of 256 bytes; row lengths are in units of
    16 bytes.

    parts: maximum number of lanes per token. num_rows: number of hidden rows.

    For a plan with room, all sizes are the maximum for any lanes, and tiles of zeros pad the tables.
    """

    shrink: list[tuple[int, ...]]
    expand: dict[int, list[tuple[int, ...]]]
    parts: int
    num_rows: int


class _Part(NamedTuple):
    start: int
    stop: int
    a_row: int
    bt_row: int
    rank: int
    hidden_row: int  # of its first token
    sign: int


def split_lanes(stats: BatchStats, block: int) -> Tiles:
    """Split the lanes into tiles of at most `block` tokens. Tokens are counted from the range's start."""
    shrink: list[tuple[int, ...]] = []
    parts_of: dict[int, list[_Part]] = {}
    num_rows = 0
    for site in stats.live:
        parts_of[site] = []
        for key, start, stop, sign in stats.lanes:
            span = stats.layout.spans[site].get(key)
            if span is None or not span.rank:
                continue
            first, last = start - stats.start, stop - stats.start
            a_row = stats.layout.first_rows[site] + span.start
            parts_of[site].append(_Part(first, last, a_row, span.start, span.rank, num_rows, int(sign)))
            for token in range(first, last, block):
                shrink.append((token, min(block, last - token), a_row, span.rank, num_rows + token - first))
            num_rows += last - first
    pieces = {site: _pieces(parts) for site, parts in parts_of.items()}
    most = max((len(parts) for own in pieces.values() for _, _, parts in own), default=1)
    if stats.room is not None:
        most = MOST_WITH_ROOM
    layout = stats.layout
    starts, (_, lengths) = bt_starts(layout), row_strides(layout)
    expand = {
        site: [
            (
                token,
                min(block, stop - token),
                sum(layout.d_outs[:site]),
                layout.d_outs[site],
                starts[site] // TENSOR_ALIGNMENT,
                lengths[site] * layout.dtype.itemsize // ROW_ALIGNMENT,
                *_parts_at(token, parts, most),
            )
            for start, stop, parts in own
            for token in range(start, stop, block)
        ]
        for site, own in pieces.items()
    }
    if stats.room is not None:
        num_tokens, num_sites = stats.num_tokens, len(stats.live)
        own = MOST_WITH_ROOM * num_tokens
        # The last tile of a lane may be short, and so may the tile before each boundary of a lane.
        _fill(shrink, num_sites * min(own, own // block + stats.room), 5)
        for tiles in expand.values():
            _fill(tiles, min(num_tokens, num_tokens // block + 2 * stats.room), 6 + 5 * MOST_WITH_ROOM)
        num_rows = num_sites * own
    return Tiles(shrink, expand, most, num_rows)


def _fill(tiles: list[tuple[int, ...]], count: int, size: int) -> None:
    tiles += [(0,) * size] * (count - len(tiles))


def _pieces(parts: Sequence[_Part]) -> list[tuple[int, int, list[_Part]]]:
    """The maximal token ranges covered by the same lanes, with these lanes."""
    borders = sorted({border for part in parts for border in (part.start, part.stop)})
    found = []
    for start, stop in itertools.pairwise(borders):
        here = [part for part in parts if part.start <= start and stop <= part.stop]
        if here:
            found.append((start, stop, here))
    return found


def _parts_at(token: int, parts: Sequence[_Part], most: int) -> tuple[int, ...]:
    row: list[int] = []
    for part in parts:
        row += [part.bt_row, part.rank, part.hidden_row + token - part.start, part.a_row, part.sign]
    row += [0] * (5 * (most - len(parts)))  # rank 0: nothing to add
    return tuple(row)
