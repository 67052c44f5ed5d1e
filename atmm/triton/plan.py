"""Tiles of lanes: one small int32 table per plan and block size that assigns work to the programs of every layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from atmm.places import PlaceSource
from atmm.segments import MOST_WITH_ROOM, Lane, SegmentPlan, check_not_capturing

SHRINK_FIELDS = 4
_WHOLE = 16  # hidden rows of a site are a multiple of this, so that strides are multiples of 16


class Sizes(NamedTuple):
    """Sizes of a tile table.

    shrink, expand: number of tiles. parts: maximum number of lanes per token. hidden_rows: hidden values of one site.
    """

    shrink: int
    expand: int
    parts: int
    hidden_rows: int


class TileTable:
    """The tiles of a plan's lanes, on the device.

    shrink: [first token, tokens, slot, first hidden row] per tile.

    expand: [first token, tokens, (slot, first hidden row, sign) x parts] per tile; tiles cover disjoint tokens. A part
    that is not used has sign 0.

    For a plan with room, all sizes are the maximum for any lanes, and tiles of zeros pad the tables.
    """

    __slots__ = (
        "_block", "_lanes", "_num_tokens", "_room", "_source", "_table", "_version", "expand", "shrink", "sizes",
    )  # fmt: skip

    def __init__(self, plan: SegmentPlan, source: PlaceSource, block: int, device: torch.device) -> None:
        self._block, self._source = block, source
        self._num_tokens, self._room = plan.num_tokens, plan.room
        self._lanes, self._version = plan.lanes, source.version
        shrink, expand, self.sizes = self._split()
        self._table = _staged(shrink, expand, device).to(device, non_blocking=True)
        self.shrink, self.expand = self._table[: shrink.size], self._table[shrink.size :]

    def replace(self, lanes: tuple[Lane, ...]) -> None:
        """Use other lanes, at the same addresses. Only for a plan with room."""
        if lanes != self._lanes:
            self._lanes, self._version = lanes, -1
        self.update()

    def update(self) -> None:
        """Write the tiles again if adapters have other slots now."""
        if self._version == self._source.version:
            return
        check_not_capturing(self._table.device)
        shrink, expand, _ = self._split()
        self._table.copy_(_staged(shrink, expand, self._table.device), non_blocking=True)
        self._version = self._source.version

    def _split(self) -> tuple[np.ndarray, np.ndarray, Sizes]:
        """The tiles, int32 [tiles, fields] each."""
        lanes, slots, block = self._lanes, self._source.slots, self._block
        shrink: list[tuple[int, ...]] = []
        starts: list[int] = []  # by lane, the hidden row of its first token
        num_rows = 0
        for key, start, stop, _ in lanes:
            slot = slots[key]
            for token in range(start, stop, block):
                shrink.append((token, min(block, stop - token), slot, num_rows + token - start))
            starts.append(num_rows)
            num_rows += stop - start
        pieces = _pieces(lanes)
        parts = max((len(own) for _, _, own in pieces), default=1)
        if self._room is not None:
            parts, num_rows = MOST_WITH_ROOM, MOST_WITH_ROOM * self._num_tokens
        expand: list[tuple[int, ...]] = []
        for first, last, own in pieces:
            for token in range(first, last, block):
                row = [token, min(block, last - token)]
                for index in own:
                    key, start, _, sign = lanes[index]
                    row += [slots[key], starts[index] + token - start, int(sign)]
                expand.append((*row, *(row[2], 0, 0) * (parts - len(own))))
        num_shrink, num_expand = len(shrink), len(expand)
        if self._room is not None:
            # The last tile of a lane may be short, and so may the tile before each boundary of a lane.
            num_shrink = min(num_rows, num_rows // block + self._room)
            num_expand = min(self._num_tokens, self._num_tokens // block + 2 * self._room)
        sizes = Sizes(num_shrink, num_expand, parts, -(-num_rows // _WHOLE) * _WHOLE)
        return _padded(shrink, num_shrink, SHRINK_FIELDS), _padded(expand, num_expand, 2 + 3 * parts), sizes


def tiles_of(plan: SegmentPlan, source: PlaceSource, block: int, device: torch.device) -> TileTable:
    """The plan's tiles of at most `block` tokens; all classes of sites with the same source share them."""
    key = source, block
    tiles = plan.shared.get(key)
    if tiles is None:
        tiles = plan.shared[key] = TileTable(plan, source, block, device)
    assert isinstance(tiles, TileTable)
    return tiles


def _pieces(lanes: Sequence[Lane]) -> list[tuple[int, int, list[int]]]:
    """The maximal token ranges covered by the same lanes, with the indices of these lanes. lanes: sorted by start."""
    borders = sorted({border for lane in lanes for border in (lane.start, lane.stop)})
    found: list[tuple[int, int, list[int]]] = []
    here: list[int] = []
    following = 0
    for start, stop in itertools.pairwise(borders):
        here = [index for index in here if lanes[index].stop > start]
        while following < len(lanes) and lanes[following].start == start:
            here.append(following)
            following += 1
        if here:
            found.append((start, stop, here))
    return found


def _padded(tiles: Sequence[tuple[int, ...]], count: int, fields: int) -> np.ndarray:
    table = np.zeros((count, fields), dtype=np.int32)
    if tiles:
        table[: len(tiles)] = tiles
    return table


def _staged(shrink: np.ndarray, expand: np.ndarray, device: torch.device) -> torch.Tensor:
    """Both tables in one host array, so that one copy moves them to the device."""
    values = torch.from_numpy(np.concatenate([shrink.reshape(-1), expand.reshape(-1)]))
    return values.pin_memory() if device.type == "cuda" else values  # torch keeps it until the copy is done
