"""The operations of ATMM: add deltas, site by site or a group at once, merge deltas, and logits of task heads.

Each looks up how its shape is computed here, once per plan where it can, and hands over. `atmm.reference` says what
is right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from atmm.batch_stats import Survey
from atmm.checks import check_heads, check_merge, check_tokens
from atmm.cpu import library
from atmm.cpu.lanes import Scattered, serves
from atmm.dispatch import choose
from atmm.head_rows import HeadRows
from atmm.layers import Packed, Site, SiteGroup
from atmm.segments import SegmentPlan, Strategy
from atmm.strategies.hybrid import Divided
from atmm.strategies.loop import Loop, Unpacked
from atmm.strategies.registry import NEED_NO_COPY, STRATEGIES, known, lies_transposed, prepare

# Ranks up to which one compiled pass over the weights beats torch's two, whose arithmetic is faster (docs/decisions.md,
# 2026-11-21).
_COMPILED_RANKS = 32


def add_delta(y: Tensor, x: Tensor, site: Site, plan: SegmentPlan) -> None:
    """Add every lane's `sign * (x a^T) bt` to `y`, in place (V-LoRA section 4.3.1).

    y: [T, d_out], x: [T, d_in], T the plan's tokens; any strides; dtype and device of the site's factors.

    Sites of a packed group share one shrink: between the group's calls for one input, that input must not be written.

    Raises ValueError, before anything is computed, when x or y do not fit the plan, the site or its factors.
    """
    if not plan.lanes and plan.room is None:
        return
    group = site.group
    packed = None if group is None else group.packed
    check_tokens(y, x, site, site.d_out, plan, packed)
    strategy = _strategy(plan, packed, x, y, site)
    if not strategy.adds_transposed and y.stride(1) != 1:
        # The other strategies multiply into rows: some up to ten times slower where these are strided, some not at all.
        rows = y.contiguous()
        strategy(rows, x, site, packed)
        y.copy_(rows)
    else:
        strategy(y, x, site, packed)


def add_deltas(y: Tensor, x: Tensor, group: SiteGroup, plan: SegmentPlan) -> None:
    """`add_delta` for all sites of a group at once; in one or two launches where the strategy can.

    y: [T, sum of d_out], the sites' outputs side by side in the group's order; any strides on a CPU, each row's values
    adjacent elsewhere.

    Raises ValueError as `add_delta` does.
    """
    if not plan.lanes and plan.room is None:
        return
    first, packed = group.sites[0], group.packed
    check_tokens(y, x, first, group.d_out, plan, packed)
    if x.device.type != "cpu" and y.stride(1) != 1:
        raise ValueError(f"y has strides {y.stride()}; on a GPU a row's values have to be adjacent")
    strategy = _strategy(plan, packed, x, y, first)
    if strategy.add_all is not None:
        strategy.add_all(y, x, group)
        return
    column = 0
    for site in group.sites:
        add_delta(y[:, column : column + site.d_out], x, site, plan)
        column += site.d_out


def merge(out: Tensor, base: Tensor, a: Tensor, bt: Tensor, scale: float = 1.0) -> None:
    """Write `base + scale * bt^T a` into `out` for n layers at once; rounds once, from the product's own precision.

    out, base: [n, o, i], the same tensor for a merge in place. a: [n, r, i], bt: [n, r, o]. Any strides; one dtype
    and device.

    Raises ValueError when the shapes, dtypes or devices do not fit, before anything is written.
    """
    check_merge(out, base, a, bt)
    n, rank = a.shape[:2]
    o, i = base.shape[1:]
    kernels = library() if out.device.type == "cpu" and rank <= _COMPILED_RANKS else None
    if kernels is not None and out.dtype in kernels.merge and all(t.stride(2) == 1 for t in (out, base, a, bt)):
        matrices = [part for t in (out, base, a, bt) for part in (t.data_ptr(), t.stride(0), t.stride(1))]
        kernels.merge[out.dtype](*matrices, scale, n, rank, o, i)
        return
    if out.device.type == "cuda" and rank and all(t.stride(2) == 1 for t in (out, base, a, bt)):
        from atmm.triton.lanes import merge as merge_tiles  # Triton takes its time to load

        merge_tiles(out, base, a, bt, scale)
        return
    # A row-major B is worth its copy (r / i of the weights): oneDNN takes twice as long on the transposed view.
    b = bt.transpose(1, 2).contiguous()
    if out.device.type == "cpu":
        # Out of place torch first copies the base, then multiplies into the copy: layer by layer the copy is still in
        # the cache.
        for layer in range(n):
            torch.addmm(base[layer], b[layer], a[layer], alpha=scale, out=out[layer])
    else:
        torch.baddbmm(base, b, a, alpha=scale, out=out)


def head_logits(h: Tensor, rows: Sequence[HeadRows]) -> list[Tensor]:
    """Every head's logits, [rows, c] each, in the dtype of its weight. h: [T, hidden].

    Raises ValueError when a head does not fit h.
    """
    check_heads(h, rows)
    logits = []
    for head in rows:
        logits.append(F.linear(h.index_select(0, head.index).to(head.weight.dtype), head.weight, head.bias))
    return logits


def _strategy(plan: SegmentPlan, packed: Packed | None, x: Tensor, y: Tensor, site: Site) -> Strategy:
    """What was prepared for the plan and sites packed like this one, or is now."""
    sites = (x.device, x.dtype) if packed is None else packed.layout
    strategy = plan.prepared.get(sites)
    if strategy is None:
        strategy = plan.prepared[sites] = _prepare(plan, packed, x, y, site)
    return strategy


def _prepare(plan: SegmentPlan, packed: Packed | None, x: Tensor, y: Tensor, site: Site) -> Strategy:
    if plan.strategy is not None and not known(plan.strategy):
        raise ValueError(f"strategy is {plan.strategy!r}; choose one of {', '.join(STRATEGIES)}")
    missing = sorted(plan.keys if packed is None else plan.keys - packed.layout.keys)
    if plan.room is not None and x.is_cuda and (missing or packed is None):
        raise ValueError(f"{site.name}: a plan with room needs packed copies of what it may hold; pack the group")
    if missing or packed is None:
        serving = serves(x.device, x.dtype)
        if plan.strategy in (None, "divided") and serving:
            return Divided(plan.lanes)
        if plan.strategy == "compiled" and serving:
            return Scattered(plan.lanes)
        if plan.strategy is not None and plan.strategy not in NEED_NO_COPY:
            raise ValueError(
                f"{site.name}: strategy {plan.strategy!r} needs a packed copy of {', '.join(missing)} for {x.dtype} on "
                f"{x.device}; pack the group, or use {' or '.join(map(repr, sorted(NEED_NO_COPY)))}"
            )
        return Unpacked(plan.lanes)
    survey = Survey(plan, packed.layout)
    if not survey.lanes and plan.room is None:
        return Loop(())
    name = plan.strategy or choose(survey, transposed=bool(packed.bs) and lies_transposed(y))
    if plan.room is not None and x.is_cuda and not name.startswith("tiled"):
        name = "tiled"  # nothing else takes other lanes without being launched anew
    return prepare(name, survey)
