"""Baselines of `vlora bench atmm` in plain torch and PEFT: methods to add many adapters' deltas without kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import atmm


def gather_bmm(a: Tensor, bt: Tensor, plan: atmm.SegmentPlan, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Punica's Gather-BMM baseline: gathers the factors of every token, then two batched products."""
    owner = torch.tensor([place for place, lane in enumerate(plan.lanes) for _ in range(lane.start, lane.stop)])

    def call() -> Tensor:
        hidden = torch.bmm(a[owner], x[:, :, None])
        return y.add_(torch.bmm(hidden.transpose(1, 2), bt[owner])[:, 0])

    return call


def padded_einsum(a: Tensor, bt: Tensor, plan: atmm.SegmentPlan, x: Tensor, y: Tensor) -> Callable[[], object]:
    """dLoRA's method: segments padded to the longest, one einsum per factor."""
    longest = max(lane.stop - lane.start for lane in plan.lanes)
    rows = torch.cat(
        [torch.arange(lane.stop - lane.start) + place * longest for place, lane in enumerate(plan.lanes)]
    ).to(x.device)

    def call() -> Tensor:
        padded = x.new_zeros(len(plan.lanes) * longest, x.shape[1])
        padded[rows] = x
        hidden = torch.einsum("stk,srk->str", padded.view(len(plan.lanes), longest, -1), a)
        return y.add_(torch.einsum("str,srn->stn", hidden, bt).flatten(0, 1)[rows])

    return call


def lane_factors(site: atmm.Site, plan: atmm.SegmentPlan) -> tuple[Tensor, Tensor]:
    """The lanes' factors, [lanes, rank, d_in] and [lanes, rank, d_out]."""
    factors = [site.factors[lane.key] for lane in plan.lanes]
    return torch.stack([pair.a for pair in factors]), torch.stack([pair.bt for pair in factors])


def plain_loop(site: atmm.Site, plan: atmm.SegmentPlan, x: Tensor, y: Tensor) -> None:
    """Adapter by adapter, the straightforward implementation."""
    for key, start, stop, _ in plan.lanes:
        a, bt = site.factors[key]
        y[start:stop] += F.linear(x[start:stop], a) @ bt


def peft_layer(site: atmm.Site, plan: atmm.SegmentPlan, rank: int, x: Tensor) -> nn.Module:
    """PEFT's mixed-batch layer, called with one name per row, without its base product."""
    model = nn.Sequential(nn.Linear(site.d_in, site.d_out, bias=False)).to(x.dtype)
    peft: Any = None
    for lane in plan.lanes:
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=["0"], init_lora_weights=False)
        if peft is None:
            peft = get_peft_model(model, config, adapter_name=f"a{lane.key}")  # type: ignore[arg-type]
        else:
            peft.add_adapter(f"a{lane.key}", config)
    layer = peft.to(x.dtype).eval().base_model.model[0]
    # Deltas only: the base layer returns zeros.
    zeros = x.new_zeros(len(x), site.d_out)
    layer.base_layer.forward = lambda x, *_, **__: zeros
    return layer
