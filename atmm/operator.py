"""The operations of ATMM: add deltas per site or per group, merge deltas, and compute logits of task heads.

Each operation selects a strategy for its shape, once per plan where possible, and calls it. `atmm.reference` specifies
the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from atmm.cpu import library
from atmm.cpu.lanes import Scattered, serves
from atmm.dispatch import choose, measured
from atmm.formats import RowScaled
from atmm.grouped import Grouped
from atmm.layers import HeadRows, Layout, Packed, Site, SiteGroup
from atmm.matmul import linear, widened
from atmm.places import FactorTable
from atmm.processor import prefers_float32
from atmm.quantized import QuantizedWeight
from atmm.segments import BatchStats, SegmentPlan, Strategy, check_not_capturing
from atmm.strategies.hybrid import Loop, divided
from atmm.strategies.registry import NEED_NO_COPY, STRATEGIES, known, prepare, prepare_tiled
from atmm.tuning.tables import DTYPES

# The highest rank at which one compiled pass over the weights is faster than torch's two with instructions for bfloat16
# (docs/decisions/0008). On processors without such instructions the compiled pass serves every rank.
_COMPILED_RANKS = 32


def add_delta(y: Tensor, x: Tensor, site: Site, plan: SegmentPlan) -> None:
    """Add every lane's `sign * (x a^T) bt` to `y`, in place (V-LoRA section 4.3.1).

    Sites of a packed group share one shrink: the input must not be written between the group's calls for it.

    Args:
        y: [T, d_out], T the plan's tokens; any strides; dtype and device of the site's factors.
        x: [T, d_in]; any strides; same dtype and device.

    Raises:
        ValueError: if x or y do not fit the plan, the site or its factors; raised before anything is computed.
        RuntimeError: if a CUDA graph is captured and the plan was not used before.
    """
    if not plan.lanes and plan.room is None:
        return
    group = site.group
    packed = None if group is None else group.packed
    check_tokens(y, x, site, site.d_out, plan, packed)
    x = _readable(x)
    strategy = _strategy(plan, packed, x, y, site)
    rows = y if y.stride(1) == 1 else y.contiguous()  # products with other outputs are slow, or fail
    strategy(rows, x, site, packed)
    if rows is not y:
        y.copy_(rows)


def add_deltas(y: Tensor, x: Tensor, group: SiteGroup, plan: SegmentPlan) -> None:
    """`add_delta` for all sites of a group at once, in one or two launches where the strategy supports it.

    Args:
        y: [T, sum of d_out], the sites' outputs side by side in the group's order; any strides on a CPU, contiguous
            rows elsewhere.
        x: [T, d_in], as for `add_delta`.

    Raises:
        ValueError, RuntimeError: as `add_delta`.
    """
    if not plan.lanes and plan.room is None:
        return
    first, packed = group.sites[0], group.packed
    check_tokens(y, x, first, group.d_out, plan, packed)
    if x.device.type != "cpu" and y.stride(1) != 1:
        raise ValueError(f"y has strides {y.stride()}; on a GPU its rows must be contiguous (last stride 1)")
    x = _readable(x)
    strategy = _strategy(plan, packed, x, y, first)
    rows = y if y.stride(1) == 1 else y.contiguous()
    if strategy.add_all is not None:
        strategy.add_all(rows, x, group)
    else:
        column = 0
        for site in group.sites:
            add_delta(rows[:, column : column + site.d_out], x, site, plan)
            column += site.d_out
    if rows is not y:
        y.copy_(rows)


def begin_deltas(x: Tensor, site: Site, plan: SegmentPlan | None) -> None:
    """Start the shrink of the deltas that the next call for this input adds, beside the product with W0 (V-LoRA section
    4.3.1 computes them one after the other).

    The call is optional, and has an effect for plans with room only: in a captured graph a second stream costs the host
    nothing. x must not be written before the deltas are added.

    Args:
        x: [T, d_in], as for `add_delta`.
        plan: the lanes; None: nothing is added.
    """
    if plan is None or plan.room is None or x.shape != (plan.num_tokens, site.d_in):
        return
    packed = None if site.group is None else site.group.packed
    strategy = plan.prepared.get(_class_of(packed, x, site))
    if strategy is not None and strategy.begin is not None:
        strategy.begin(x, site, packed)


def merge(out: Tensor, base: Tensor, a: Tensor, bt: Tensor, scale: float = 1.0) -> None:
    """Write `base + scale * bt^T a` into `out` for n layers at once. The sum is rounded once, from the accumulator.

    Any strides; one dtype and device.

    Args:
        out: [n, o, i]; the same tensor as `base` for a merge in place.
        base: [n, o, i].
        a: [n, r, i].
        bt: [n, r, o].

    Raises:
        ValueError: if shapes, dtypes or devices do not match; raised before anything is written.
    """
    check_merge(out, base, a, bt)
    n, rank = a.shape[:2]
    o, i = base.shape[1:]
    compiled = rank <= _COMPILED_RANKS or prefers_float32(out.dtype, out.device)
    kernels = library() if out.device.type == "cpu" and compiled else None
    if kernels is not None and out.dtype in kernels.merge and all(t.stride(2) == 1 for t in (out, base, a, bt)):
        matrices = [part for t in (out, base, a, bt) for part in (t.data_ptr(), t.stride(0), t.stride(1))]
        kernels.merge[out.dtype](*matrices, scale, n, rank, o, i)
        return
    if out.device.type == "cuda" and rank and all(t.stride(2) == 1 for t in (out, base, a, bt)):
        from atmm.triton.merging import merge as merge_tiles  # importing Triton is slow

        merge_tiles(out, base, a, bt, scale)
        return
    # Copying B to row-major (r / i of the weights) pays off: oneDNN takes twice as long on the transposed view.
    b = bt.transpose(1, 2).contiguous()
    if out.device.type == "cpu":
        # Out of place, torch first copies the base and then multiplies into the copy. Layer by layer, the copy is still
        # in the cache.
        for layer in range(n):
            parts = widened(base[layer], b[layer], a[layer])
            if parts[0].dtype is out.dtype:
                torch.addmm(*parts, alpha=scale, out=out[layer])
            else:
                out[layer] = torch.addmm(*parts, alpha=scale)
    else:
        torch.baddbmm(base, b, a, alpha=scale, out=out)


def head_logits(h: Tensor, rows: Sequence[HeadRows]) -> list[Tensor]:
    """The logits of every head, [rows, c] each, in the dtype of its weight.

    Args:
        h: hidden states [T, hidden].

    Raises:
        ValueError: if a head does not fit h.
    """
    check_heads(h, rows)
    logits = []
    for head in rows:
        bias = None if head.bias is None else head.bias.contiguous()
        logits.append(linear(h.index_select(0, head.index).to(head.weight.dtype), head.weight, bias))
    return logits


def _readable(x: Tensor) -> Tensor:
    """x, or a copy without gaps: with tiles, oneDNN's bfloat16 products of an odd width read a value of a gap."""
    return x.contiguous() if x.shape[1] % 2 and x.dtype is torch.bfloat16 and x.is_cpu else x


def _strategy(plan: SegmentPlan, packed: Packed | None, x: Tensor, y: Tensor, site: Site) -> Strategy:
    """The strategy for this plan and class of sites; prepared at the first call."""
    sites = _class_of(packed, x, site)
    strategy = plan.prepared.get(sites)
    if strategy is None:
        check_not_capturing(x.device)
        in_place = strategy_in_place(plan, site) if packed is None and site.placed is not None else None
        strategy = plan.prepared[sites] = in_place or _prepare(plan, packed, x, y, site)
    return strategy


def _class_of(packed: Packed | None, x: Tensor, site: Site) -> Layout | tuple[Any, ...]:
    """The key of a plan's prepared strategies."""
    return packed.layout if packed is not None else site.placed or (x.device, x.dtype)


def strategy_in_place(plan: SegmentPlan, site: Site) -> Strategy | None:
    """The Triton kernels, which read factors in place; None if they cannot, or another strategy is forced."""
    assert site.placed is not None
    table: FactorTable = site.placed[0]
    name = plan.strategy
    if not table.serves(plan.keys) or not (name is None or name.startswith("tiled")):
        return None
    # A plan with room serves the lanes of adapters that are not in it yet.
    stats = BatchStats(plan, table.layout(site, plan.keys if plan.room is None else table.slots))
    if not stats.lanes and plan.room is None:
        return Loop(())
    if name is None:
        name = measured(stats)
    return prepare_tiled(plan, stats, table, name if name is not None and name.startswith("tiled") else "tiled")


def _prepare(plan: SegmentPlan, packed: Packed | None, x: Tensor, y: Tensor, site: Site) -> Strategy:
    if plan.strategy is not None and not known(plan.strategy):
        raise ValueError(f"strategy is {plan.strategy!r}; choose one of {', '.join(STRATEGIES)}")
    missing = sorted(plan.keys if packed is None else plan.keys - packed.layout.keys)
    if plan.room is not None and x.is_cuda and (missing or packed is None):
        raise ValueError(
            f"{site.name}: a plan with room needs its adapters in a factor table or packed; put or pack them first"
        )
    if missing or packed is None:
        serving = serves(x.device, x.dtype)
        if plan.strategy in (None, "divided") and serving:
            return divided(plan.lanes, x.dtype)
        if plan.strategy == "compiled" and serving:
            return Scattered(plan.lanes)
        if plan.strategy is not None and plan.strategy not in NEED_NO_COPY:
            raise ValueError(
                f"{site.name}: strategy {plan.strategy!r} needs a packed copy of {', '.join(missing)} for {x.dtype} on "
                f"{x.device}; pack the group, or use {' or '.join(map(repr, sorted(NEED_NO_COPY)))}"
            )
        return Loop(plan.lanes, checks=True)
    stats = BatchStats(plan, packed.layout)
    if not stats.lanes and plan.room is None:
        return Loop(())
    name = plan.strategy or choose(stats)
    if plan.room is not None and x.is_cuda and not name.startswith("tiled"):
        name = "tiled"  # the only strategies that can be refilled without a new launch
    return prepare(name, plan, stats)


# Argument checks of the operations. They run before anything is computed and name the invalid argument.
#
# All checks raise ValueError. `atmm.layers` checks the factors.


def check_tokens(y: Tensor, x: Tensor, site: Site, d_out: int, plan: SegmentPlan, packed: Packed | None) -> None:
    """Check the inputs and outputs of add-delta. d_out: outputs of the site, or of its whole group."""
    if x.shape != (plan.num_tokens, site.d_in):
        raise ValueError(
            f"x is {tuple(x.shape)}; {site.name} with a plan of {plan.num_tokens} tokens expects "
            f"[{plan.num_tokens}, {site.d_in}]"
        )
    if y.shape != (plan.num_tokens, d_out):
        raise ValueError(
            f"y is {tuple(y.shape)}; {site.name} with a plan of {plan.num_tokens} tokens expects "
            f"[{plan.num_tokens}, {d_out}]"
        )
    _check_places("y", y)
    dtype, device = x.dtype, x.device
    if y.dtype is not dtype or y.device != device:
        raise ValueError(f"y is {y.dtype} on {y.device} and x {dtype} on {device}; give one dtype on one device")
    _check_dtype("x", dtype)
    if packed is not None and (packed.layout.dtype is not dtype or packed.layout.device != device):
        raise ValueError(
            f"{site.name}: x is {dtype} on {device}, its packed adapters {packed.layout.dtype} on "
            f"{packed.layout.device}; load adapters in the model's dtype, on its device"
        )


def _check_places(name: str, written: Tensor) -> None:
    strides = written.stride()
    if 0 in strides and any(size > 1 and not step for size, step in zip(written.shape, strides, strict=True)):
        raise ValueError(f"{name} has strides {strides}, so elements overlap in memory; give a tensor without overlap")


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"{name} is {dtype}; deltas are computed in {', '.join(map(str, DTYPES))}")


def check_merge(out: Tensor, base: Tensor, a: Tensor, bt: Tensor) -> None:
    n, o, i = base.shape if base.dim() == 3 else (None, None, None)
    rank = a.shape[1] if a.dim() == 3 else None
    if n is None or out.shape != base.shape or a.shape != (n, rank, i) or bt.shape != (n, rank, o):
        raise ValueError(
            f"merge of a {tuple(a.shape)} and bt {tuple(bt.shape)} into base {tuple(base.shape)}, out "
            f"{tuple(out.shape)}; give a [n, r, i], bt [n, r, o], base and out [n, o, i]"
        )
    if not out.dtype == base.dtype == a.dtype == bt.dtype:
        raise ValueError(
            f"merge of a {a.dtype} and bt {bt.dtype} into base {base.dtype}, out {out.dtype}; give one dtype"
        )
    if not out.device == base.device == a.device == bt.device:
        raise ValueError(
            f"merge of a on {a.device} and bt on {bt.device} into base on {base.device}, out on {out.device}; give "
            "one device"
        )
    _check_dtype("base", base.dtype)
    _check_places("out", out)


def check_heads(h: Tensor, rows: Sequence[HeadRows]) -> None:
    if h.dim() != 2:
        raise ValueError(f"h is {tuple(h.shape)}; give hidden states [T, hidden]")
    for place, (weight, bias, index) in enumerate((head.weight, head.bias, head.index) for head in rows):
        if weight.dim() != 2 or weight.shape[1] != h.shape[1] or weight.device != h.device:
            raise ValueError(
                f"rows[{place}].weight is {tuple(weight.shape)} on {weight.device}; h has {h.shape[1]} features on "
                f"{h.device}, give [c, {h.shape[1]}] on that device"
            )
        if bias is not None and (bias.shape, bias.dtype, bias.device) != (weight.shape[:1], weight.dtype, h.device):
            raise ValueError(
                f"rows[{place}].bias is {tuple(bias.shape)} in {bias.dtype} on {bias.device}; give [{len(weight)}] in "
                f"{weight.dtype} on {h.device}"
            )
        if index.dim() != 1 or index.dtype != torch.int64 or index.device != h.device:
            raise ValueError(
                f"rows[{place}].index is {tuple(index.shape)} in {index.dtype} on {index.device}; give one dimension "
                f"of int64 on {h.device}"
            )
        # On a GPU this check would synchronize with the stream.
        if index.device.type == "cpu" and len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(h):
            raise ValueError(
                f"rows[{place}].index ranges from {int(index.min())} to {int(index.max())}; h has rows 0 to "
                f"{len(h) - 1}"
            )


def merge_quantized(
    out: QuantizedWeight, base: QuantizedWeight, parts: Iterable[tuple[slice, slice, Tensor, Tensor]]
) -> None:
    """Write `base + delta` into `out` for n layers, both [n, o, i]. The sums are computed in float32.

    On a GPU one launch merges a delta of one block, except into integers with one scale and offset for a row; other
    merges restore one layer at a time.

    Args:
        out: The result, with scales of its own. May be `base`.
        parts: The delta as blocks: the outputs and inputs of a block, its a [n, r, inputs] and bt [n, r, outputs].
    """
    blocks = list(parts)
    if len(blocks) == 1 and out.device.type == "cuda":
        *_, a, bt = blocks[0]
        kind, weights = out.format, (out.values, out.scales, base.values, base.scales)
        # Tiles of float32 factors would spill registers.
        if (a.shape[2], bt.shape[2]) == (out.shape[2], out.shape[1]) and a.dtype.itemsize == 2:
            from atmm.triton import merging  # importing Triton is slow

            if isinstance(kind, RowScaled):
                merging.merge_rows(*weights, a, bt, kind.largest)
                return
            if isinstance(kind, Grouped) and kind.group:
                merging.merge_groups(*weights, a, bt, kind.integers)
                return
    for layer in range(len(base)):  # one at a time: a layer in float32 takes four times the bytes of all its values
        sums = base[layer : layer + 1].float()
        for outputs, inputs, a, bt in blocks:
            place = sums[:, outputs, inputs]
            merge(place, place, a[layer : layer + 1].float(), bt[layer : layer + 1].float())
        out[layer].copy_(sums[0])
