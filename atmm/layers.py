"""Sites, site groups, and task heads as the operator reads them.

A site is one adapted linear layer; a group is a set of sites that read the same input.

Memory of a packed group (k: keys in packing order, r: the rank of that adapter at that site)::

    a     [sum over sites and k of r, d_in]     site 0: key 0, key 1, ...   site 1: key 0, key 1, ...   ...
    bt    per site [sum over k of r, d_out]     key 0, key 1, ...

One shrink `x a^T` therefore serves every site of the group. The share of a site is a range of its columns, and adjacent
keys of equal rank form a `[keys, r, d]` view. Tensors start at multiples of 256 bytes; rows are padded to 16 bytes.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

TENSOR_ALIGNMENT = 256
ROW_ALIGNMENT = 16


class FactorRows(NamedTuple):
    """Addresses and strides of an adapter's two factors, in the format of `struct Factors` in `cpu/lanes.cpp`.

    kind: (d_in, d_out, dtype, device). rank: 0 means an empty delta. address: of the struct, which `kept` owns.
    """

    kind: tuple[int, int, torch.dtype, torch.device]
    rank: int
    address: int
    kept: array.array[int]


class _Pair(NamedTuple):
    a: Tensor
    bt: Tensor


class Factors(_Pair):
    """One adapter's two factors at one site: `delta = (x a^T) bt`. `bt` includes the adapter's scaling.

    a: [r, d_in], bt: [r, d_out]; any strides. The values may be overwritten in place, but the addresses must not
    change; moved factors need a new object. All values must be finite: some strategies multiply the factors of other
    adapters by zero, and zero times infinity is NaN.
    """

    @functools.cached_property
    def rows(self) -> FactorRows | None:
        """Computed once per adapter and shared by all plans.

        None for factors that do not have contiguous rows or that do not match each other.
        """
        a, bt = self
        alike = a.dtype is bt.dtype and a.device == bt.device
        if not (a.dim() == bt.dim() == 2 and len(a) == len(bt) and alike):
            return None
        if any(factor.stride(1) != 1 and len(factor) and factor.shape[1] > 1 for factor in self):
            return None
        numbers = a.data_ptr(), a.stride(0), bt.data_ptr(), bt.stride(0), len(a)
        kept = array.array("q", numbers)
        return FactorRows((a.shape[1], bt.shape[1], a.dtype, a.device), len(a), kept.buffer_info()[0], kept)


class Site:
    """One linear layer that adapters may target.

    The caller sets and removes `factors` by adapter key as adapters are loaded and evicted. An absent key means that
    the adapter does not target this site. After changing the factors of a packed key, pack the group again. placed: the
    class of the site if its factors are in a `FactorTable`, for kernels that read them in place: the table, d_in, and
    the d_out of all sites of its group. None without such kernels.
    """

    __slots__ = ("d_in", "d_out", "factors", "group", "index", "name", "placed")

    def __init__(self, name: str, d_in: int, d_out: int) -> None:
        self.name = name
        self.d_in = d_in
        self.d_out = d_out
        self.factors: dict[str, Factors] = {}
        self.group: SiteGroup | None = None
        self.index = 0  # index in the group
        self.placed: tuple[Any, int, tuple[int, ...]] | None = None

    def __repr__(self) -> str:
        return f"Site({self.name!r}, d_in={self.d_in}, d_out={self.d_out}, adapters={len(self.factors)})"


@dataclasses.dataclass(frozen=True, slots=True)
class HeadRows:
    """A task head: rows of a matrix, and the hidden states that they read.

    weight: [c, hidden]. bias: [c] or None. index: int64 [rows], the rows of the hidden states this head reads.
    """

    weight: Tensor
    bias: Tensor | None
    index: Tensor


class PackedSpan(NamedTuple):
    """Rows `[start, start + rank)` of a packed site belong to adapter `key`."""

    key: str
    start: int
    rank: int


class Layout:
    """The shape of a packed group without its data. Groups with equal packing share one object, so it is a cheap key.

    keys: every packed adapter. targeting: the packed adapters that target a site of the group. spans: per site, by key
    in packing order. widths: per site, the number of rows (sum of the ranks). first_rows: per site, its first row in
    the packed A.
    """

    __slots__ = (
        "__weakref__", "d_in", "d_outs", "device", "dtype", "first_rows", "keys", "num_rows", "spans", "targeting",
        "widths",
    )  # fmt: skip

    def __init__(
        self,
        keys: frozenset[str],
        spans: tuple[tuple[PackedSpan, ...], ...],
        d_in: int,
        d_outs: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.keys = keys
        self.spans = tuple({span.key: span for span in site} for site in spans)
        self.widths = tuple(sum(span.rank for span in site) for site in spans)
        self.targeting = frozenset(span.key for site in spans for span in site if span.rank)
        self.first_rows = tuple(sum(self.widths[:index]) for index in range(len(spans)))
        self.num_rows = sum(self.widths)
        self.d_in = d_in
        self.d_outs = d_outs
        self.dtype = dtype
        self.device = device


_layouts: weakref.WeakValueDictionary[tuple, Layout] = weakref.WeakValueDictionary()


class Packed(NamedTuple):
    """The packed copy of a group's factors, in the layout shown in the module docstring. `bts` are by site."""

    layout: Layout
    a: Tensor
    bts: tuple[Tensor, ...]


class SiteGroup:
    """Sites that read the same input tensor (q, k, v of a layer; gate and up), each called once per forward.

    A single site is a group of one. `packed` is None until `pack`. d_out: sum over the sites.

    Raises:
        ValueError: if the sites differ in d_in, or a site already belongs to a group.
    """

    __slots__ = ("d_out", "packed", "sites")

    def __init__(self, sites: Sequence[Site]) -> None:
        if not sites:
            raise ValueError("a site group is empty; give at least one site")
        for index, site in enumerate(sites):
            if site.d_in != sites[0].d_in:
                raise ValueError(
                    f"{site.name} reads {site.d_in} features and {sites[0].name} {sites[0].d_in}; "
                    "sites of a group read the same tensor"
                )
            if site.group is not None:
                raise ValueError(f"{site.name} already belongs to a group; give each site to one group")
            site.group = self
            site.index = index
        self.sites = tuple(sites)
        self.d_out = sum(site.d_out for site in self.sites)
        self.packed: Packed | None = None

    def packed_bytes(self, keys: Iterable[str]) -> int:
        """Bytes that `pack(keys)` needs; 0 if none of the keys targets the group."""
        layout = self._layout(tuple(keys))
        return 0 if layout is None else sum(_tensor_bytes(rows, d, layout.dtype) for rows, d in _tensors(layout))

    def pack(self, keys: Iterable[str], buffer: Tensor | None = None) -> None:
        """Copy the factors of `keys` side by side, in this order, and use the copy from now on.

        Call this when the set of adapters in use changes, never per step. For best performance, keep adapters of equal
        rank adjacent and sort batches in the same order.

        Args:
            buffer: one-dimensional uint8 tensor of at least `packed_bytes(keys)` bytes, aligned to 16; None allocates.

        Raises:
            ValueError: for duplicate keys, for factors that differ in shape, dtype or device, or for a buffer that
                cannot hold them. The group is then unpacked.
        """
        self.packed = None  # the old copy's buffer is overwritten: strategies must not take the new bytes for it
        keys = tuple(keys)
        if len(set(keys)) != len(keys):
            raise ValueError(f"keys {keys} contain duplicates; give each adapter once")
        layout = self._layout(keys)
        if layout is None:
            return
        num_bytes = sum(_tensor_bytes(rows, d, layout.dtype) for rows, d in _tensors(layout))
        if buffer is None:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=layout.device)
        _check_buffer(buffer, num_bytes, layout.device)
        tensors, offset = [], 0
        for rows, d in _tensors(layout):
            tensors.append(_carve(buffer, offset, rows, d, layout.dtype))
            offset += _tensor_bytes(rows, d, layout.dtype)
        a, *bts = tensors
        present = [[site.factors[key] for key in keys if key in site.factors] for site in self.sites]
        torch.cat([factors.a for site in present for factors in site], out=a)
        for bt, site in zip(bts, present, strict=True):
            if site:
                torch.cat([factors.bt for factors in site], out=bt)
        self.packed = Packed(layout, a, tuple(bts))

    def unpack(self) -> None:
        """Drop the packed copy. Its buffer may then be reused."""
        self.packed = None

    def _layout(self, keys: tuple[str, ...]) -> Layout | None:
        """The layout of a group packed with `keys`; None if no key targets the group."""
        spans, first = [], None
        for site in self.sites:
            start, row = 0, []
            for key in keys:
                factors = site.factors.get(key)
                if factors is None:
                    continue
                first = factors.a if first is None else first
                check_factors(site, key, factors)
                if (factors.a.dtype, factors.a.device) != (first.dtype, first.device):
                    raise ValueError(
                        f"adapter {key!r} at {site.name} is {factors.a.dtype} on {factors.a.device}, other adapters "
                        f"are {first.dtype} on {first.device}; a group packs one dtype on one device"
                    )
                row.append(PackedSpan(key, start, factors.a.shape[0]))
                start += factors.a.shape[0]
            spans.append(tuple(row))
        if first is None:
            return None
        d_outs = tuple(site.d_out for site in self.sites)
        facts = (frozenset(keys), tuple(spans), self.sites[0].d_in, d_outs, first.dtype, first.device)
        known = _layouts.get(facts)
        if known is None:
            known = _layouts[facts] = Layout(*facts)
        return known


def _tensors(layout: Layout) -> list[tuple[int, int]]:
    """(rows, columns) of the packed A and of each site's packed Bt."""
    return [(layout.num_rows, layout.d_in), *zip(layout.widths, layout.d_outs, strict=True)]


def _check_buffer(buffer: Tensor, num_bytes: int, device: torch.device) -> None:
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(f"buffer is {buffer.dtype} {tuple(buffer.shape)}; give one contiguous dimension of uint8")
    if buffer.numel() < num_bytes:
        raise ValueError(f"buffer has {buffer.numel()} bytes; these adapters need {num_bytes} (see packed_bytes)")
    if buffer.device != device:
        raise ValueError(f"buffer is on {buffer.device} and the factors on {device}; use one device")
    if buffer.data_ptr() % ROW_ALIGNMENT:
        raise ValueError(f"buffer starts at address {buffer.data_ptr()}; align it to {ROW_ALIGNMENT} bytes")


def check_factors(site: Site, key: str, factors: Factors) -> None:
    """Raises ValueError for factors that do not match the site or each other."""
    a, bt = factors
    rank = len(a.shape) and a.shape[0]
    if a.shape != (rank, site.d_in) or bt.shape != (rank, site.d_out):
        raise ValueError(
            f"adapter {key!r} at {site.name} has a {tuple(a.shape)} and bt {tuple(bt.shape)}; "
            f"the site needs [r, {site.d_in}] and [r, {site.d_out}]"
        )
    if a.dtype is not bt.dtype or a.device != bt.device:
        raise ValueError(
            f"adapter {key!r} at {site.name} has a in {a.dtype} on {a.device} and bt in {bt.dtype} on {bt.device}; "
            "give both in one dtype on one device"
        )


def check_reads(site: Site, key: str, factors: Factors, x: Tensor) -> None:
    """`check_factors`, and ValueError for factors that differ from the input in dtype or device."""
    check_factors(site, key, factors)
    if factors.a.dtype is not x.dtype or factors.a.device != x.device:
        raise ValueError(
            f"{site.name}: x is {x.dtype} on {x.device}, adapter {key!r} {factors.a.dtype} on {factors.a.device}; load "
            "adapters in the model's dtype, on its device"
        )


def row_strides(layout: Layout) -> tuple[int, tuple[int, ...]]:
    """Row strides in elements of the packed A, and of each site's packed Bt."""
    return _row_elements(layout.d_in, layout.dtype), tuple(_row_elements(d, layout.dtype) for d in layout.d_outs)


def bt_starts(layout: Layout) -> tuple[int, ...]:
    """Bytes from the start of the packed A to each site's packed Bt; multiples of 256."""
    sizes = [_tensor_bytes(rows, d, layout.dtype) for rows, d in _tensors(layout)]
    return tuple(sum(sizes[: 1 + index]) for index in range(len(layout.d_outs)))


def _row_elements(d: int, dtype: torch.dtype) -> int:
    return -(-d * dtype.itemsize // ROW_ALIGNMENT) * ROW_ALIGNMENT // dtype.itemsize


def _tensor_bytes(rows: int, d: int, dtype: torch.dtype) -> int:
    return -(-rows * _row_elements(d, dtype) * dtype.itemsize // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT


def _carve(buffer: Tensor, offset: int, rows: int, d: int, dtype: torch.dtype) -> Tensor:
    stride = _row_elements(d, dtype)
    padded = buffer[offset : offset + rows * stride * dtype.itemsize].view(dtype).view(rows, stride)
    # oneDNN's bfloat16 products read one value past a row of odd length and multiply it by zero: it must not be NaN.
    padded[:, d:].zero_()
    return padded[:, :d]
