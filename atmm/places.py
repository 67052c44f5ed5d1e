"""Places of adapters' factors in device memory, as the GPU kernels read them.

A table int64 [slots, sites, 8] has one slot per adapter and in it one row per site:

    start of A, row length of A, start of Bt, row length of Bt, rank, d_out, column, 0

Starts are relative to the address of an origin tensor. Starts and row lengths are in units of 16 bytes. Rank 0 means
that the adapter does not target the site. column: the site's first column in the outputs of its group side by side;
this and d_out are the same in all slots, used or not.

Tiles of lanes name slots, not addresses. One tile table therefore serves all layers, factors are read where they lie
without packed copies, and an adapter that moves in memory needs new rows in the table and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atmm.layers import (
    ROW_ALIGNMENT,
    Layout,
    Packed,
    PackedSpan,
    Site,
    bt_starts,
    check_factors,
    row_strides,
)

FIELDS = 8
_STARTS, _LENGTHS, _RANK = [0, 2], [1, 3], 4


class Places(NamedTuple):
    """A table of places from a group's first site on, and the tensor that starts are relative to."""

    origin: Tensor
    rows: Tensor

    def of_site(self, index: int) -> Places:
        return self if index == 0 else Places(self.origin, self.rows[:, index:])


class PackedPlaces:
    """Places in packed copies of one layout, relative to their A. Slots are in the order of the keys.

    The attributes are those of `FactorTable`, and never change.
    """

    version = generation = 0

    def __init__(self, layout: Layout) -> None:
        self.slots = {key: slot for slot, key in enumerate(sorted(layout.keys))}
        self.ranks = dict.fromkeys(self.slots, 0)
        a_row, bt_rows = row_strides(layout)
        itemsize = layout.dtype.itemsize
        starts = bt_starts(layout)
        table = _table(len(self.slots), [layout.d_outs])
        for site, spans in enumerate(layout.spans):
            lengths = a_row * itemsize, bt_rows[site] * itemsize
            for key, first, rank in spans.values():
                self.ranks[key] = max(self.ranks[key], rank)
                a, bt = (layout.first_rows[site] + first) * lengths[0], starts[site] + first * lengths[1]
                table[self.slots[key], site, : _RANK + 1] = (*_units(a, lengths[0], bt, lengths[1]), rank)
        self._rows = torch.from_numpy(table).to(layout.device, non_blocking=True)

    def at(self, site: Site, packed: Packed | None) -> Places:
        assert packed is not None
        return Places(packed.a, self._rows)


class FactorTable:
    """Places of the factors that adapters have at the sites of a model, in memory of any layout.

    A key is put after its factors were set at all sites, again after they moved, and dropped when they are removed.
    Changes are copied on the current stream, so steps that were launched before still read the old places.

    Args:
        groups: the sites of each group, in the group's order. They belong to this table from now on.
        dtype, device: of the factors. Adapters with another dtype have no slot.
        num_slots: adapters that fit without a move of the table, which a captured CUDA graph does not survive.

    Attributes:
        slots, ranks: each adapter's slot and highest rank, by key.
        version: changes when an adapter's slot changes; 0 or more.
        generation: changes when the table moves.
    """

    def __init__(
        self, groups: Sequence[Sequence[Site]], dtype: torch.dtype, device: torch.device, num_slots: int = 64
    ) -> None:
        self.slots: dict[str, int] = {}
        self.ranks: dict[str, int] = {}
        self.version, self.generation = 0, -1
        self.dtype, self.device = dtype, device
        self._sites = [site for sites in groups for site in sites]
        self._template = _table(1, [[site.d_out for site in sites] for sites in groups])[0]
        self._firsts: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        first = 0
        for sites in groups:
            kind = _kind(sites)
            for site in sites:
                site.placed = (self, *kind)
            self._firsts.setdefault(kind, []).append(first)
            first += len(sites)
        self._first_of = {site: index - site.index for index, site in enumerate(self._sites)}
        self._origin = torch.zeros(ROW_ALIGNMENT // dtype.itemsize, dtype=dtype, device=device)
        self._free: list[int] = []
        self._rows: Tensor
        self._ranks_of_slots: np.ndarray  # int64 [slots, sites], on the host
        self._resize(num_slots)

    def put(self, key: str) -> None:
        """Write the places of an adapter's factors. Its slot stays the same while the key is in the table.

        An adapter gets no slot if the kernels cannot read a factor in place: another dtype or device, rows that are
        not contiguous, or addresses or row lengths that are not multiples of 16 bytes.

        Raises:
            ValueError: factors do not match their site or each other.
        """
        sites: list[int] = []
        numbers: list[tuple[int, ...]] = []  # of A and Bt, in bytes, and the rank
        for index, site in enumerate(self._sites):
            factors = site.factors.get(key)
            if factors is None:
                continue
            check_factors(site, key, factors)
            a, bt = factors
            if a.dtype is not self.dtype or a.device != self.device or factors.rows is None:
                self.drop(key)
                return
            sites.append(index)
            numbers.append((a.data_ptr(), a.stride(0), bt.data_ptr(), bt.stride(0), a.shape[0]))
        places = np.array(numbers, dtype=np.int64).reshape(len(sites), _RANK + 1)
        places[:, _STARTS] -= self._origin.data_ptr()
        places[:, _LENGTHS] *= self.dtype.itemsize
        if (places[:, :_RANK] % ROW_ALIGNMENT).any():
            self.drop(key)
            return
        places[:, :_RANK] //= ROW_ALIGNMENT
        rows = self._template.copy()
        rows[sites, : _RANK + 1] = places
        slot = self.slots.get(key)
        if slot is None:
            if not self._free:
                self._resize(2 * len(self._rows))
            slot = self.slots[key] = self._free.pop()
            self.version += 1
        self._ranks_of_slots[slot] = rows[:, _RANK]
        self.ranks[key] = int(rows[:, _RANK].max())
        staged = torch.from_numpy(rows)
        if self.device.type == "cuda":
            staged = staged.pin_memory()  # torch keeps pinned memory until the copy is done
        self._rows[slot].copy_(staged, non_blocking=True)

    def drop(self, key: str) -> None:
        """Remove an adapter. Unknown keys are ignored."""
        slot = self.slots.pop(key, None)
        if slot is not None:
            del self.ranks[key]
            self._free.append(slot)
            self.version += 1

    def serves(self, keys: Iterable[str]) -> bool:
        return self.slots.keys() >= set(keys)

    def layout(self, site: Site, keys: Iterable[str]) -> Layout:
        """The shape of a packed group with these adapters, for choices that depend on ranks; nothing is packed.

        The rank of an adapter at a site is its highest at the corresponding sites of all groups of this shape.
        """
        assert site.placed is not None and site.placed[0] is self, "the site belongs to another table"
        kind, ordered = site.placed[1:], sorted(keys)
        ranks = self._ranks_of_slots[[self.slots[key] for key in ordered]]  # [keys, sites]
        spans = []
        for index in range(len(kind[1])):
            highest = ranks[:, np.array(self._firsts[kind]) + index].max(1)
            starts = np.cumsum(highest) - highest
            spans.append(tuple(map(PackedSpan, ordered, starts.tolist(), highest.tolist())))
        return Layout(frozenset(ordered), tuple(spans), *kind, self.dtype, self.device)

    def at(self, site: Site, packed: Packed | None) -> Places:
        """The places at the site's group. packed: for `PackedPlaces`."""
        return self._places[self._first_of[site]]

    def _resize(self, num_slots: int) -> None:
        self.generation += 1
        assert num_slots * self._template.size < 2**31, "kernels compute the places of a slot in 32 bits"
        rows = torch.from_numpy(self._template).to(self.device).repeat(num_slots, 1, 1)
        ranks = np.zeros((num_slots, len(self._template)), dtype=np.int64)
        num_used = len(self.slots)  # no slot is free
        if num_used:
            rows[:num_used].copy_(self._rows)
            ranks[:num_used] = self._ranks_of_slots
        self._rows, self._ranks_of_slots = rows, ranks
        self._free += range(num_slots - 1, num_used - 1, -1)
        firsts = {first for group in self._firsts.values() for first in group}
        self._places = {first: Places(self._origin, self._rows[:, first:]) for first in firsts}


PlaceSource = PackedPlaces | FactorTable
"""Adapters with their slots, and the places of their factors at the sites of a group."""


def _table(slots: int, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """A table without adapters for groups of sites, by their d_out. An even number of sites per slot keeps strides
    multiples of 16."""
    rows = [(0, 0, 0, 0, 0, d_out, sum(d_outs[:index]), 0) for d_outs in groups for index, d_out in enumerate(d_outs)]
    table = np.zeros((slots, len(rows) + len(rows) % 2, FIELDS), dtype=np.int64)
    table[:, : len(rows)] = rows
    return table


def _units(*num_bytes: int) -> tuple[int, ...]:
    return tuple(number // ROW_ALIGNMENT for number in num_bytes)


def _kind(sites: Sequence[Site]) -> tuple[int, tuple[int, ...]]:
    return sites[0].d_in, tuple(site.d_out for site in sites)
