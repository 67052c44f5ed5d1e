"""The results of Triton kernels in plain torch: the interpreter needs up to a second for a layer of a small batch.

The kernels are launched without computing anything, so that their launches and operands count; then torch computes the
results on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.simulated_cuda.install import uncomputed_kernels
from tests.simulated_cuda.tensor import SimulatedTensor


def decode_in_torch(decode: Callable[..., Any]) -> Callable[..., Any]:
    """`atmm.triton.attention.decode` with its launches counted and its operands checked, computed by torch."""

    def decoded(q: Any, kv_rows: Any, block_table: Any, lengths: Any, **options: Any) -> Any:
        with uncomputed_kernels():
            result = decode(q, kv_rows, block_table, lengths, **options)
        size, stride, scale = options["block_size"], options["block_rows"], options["scale"]
        places, out = options["places"].backing.tolist(), options["out"].backing
        with torch._C._DisableTorchDispatch():
            for place, length, blocks in zip(places, lengths.backing.tolist(), block_table.backing, strict=True):
                token = torch.arange(length)
                rows = blocks[token // size].long() * stride + token % size
                query = q.backing[place][:, None]
                sides = (kv_rows.backing[rows + offset].view(length, -1, query.shape[2]) for offset in (0, size))
                keys, values = (
                    side.transpose(0, 1).repeat_interleave(len(query) // side.shape[1], 0) for side in sides
                )
                out[place] = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=scale)[:, 0]
        return result

    return decoded


def pointwise_in_torch(module: Any) -> dict[str, Callable[..., Any]]:
    """The functions of `atmm.triton.pointwise`."""
    return {
        "rms_norm": _launched(module.rms_norm, _norm),
        "gate_product": _launched(module.gate_product, lambda gate, up: F.silu(gate) * up),
        "rotate": _launched(module.rotate, _rotate),
        "write_kv": _launched(module.write_kv, _write_kv),
        "quantize_rows": _launched(module.quantize_rows, _quantize_rows),
    }


def _launched(launch: Callable[..., Any], compute: Callable[..., Any]) -> Callable[..., Any]:
    def computed(*given: Any) -> Any:
        with uncomputed_kernels():
            result = launch(*given)
        with torch._C._DisableTorchDispatch():
            value = compute(*(each.backing if isinstance(each, SimulatedTensor) else each for each in given))
            if result is not None:
                result.backing.copy_(value)
        return result

    return computed


def _norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def _rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    for x in (q, k):
        first, second = x.chunk(2, -1)
        x.copy_(x * cos + torch.cat([-second, first], -1) * sin)


def _quantize_rows(values: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, largest: float) -> None:
    scales.copy_(x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / largest)
    values.copy_(x.float() / scales)


def _write_kv(k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Any) -> None:
    k_cache[rows] = k
    v_cache[rows] = v


def lanes_in_torch(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """`atmm.operator._in_place`, with strategies that torch computes."""

    def prepared(plan: Any, site: Any) -> Any:
        strategy = prepare(plan, site)
        return None if strategy is None else _LanesInTorch(strategy, plan)

    return prepared


class _LanesInTorch:
    """A strategy that launches the kernels of another one and computes its lanes in torch."""

    refill = None

    def __init__(self, strategy: Any, plan: Any) -> None:
        self._strategy, self._plan = strategy, plan
        self.adds_transposed = strategy.adds_transposed

    def __call__(self, y: Any, x: Any, site: Any, packed: Any) -> None:
        with uncomputed_kernels():
            self._strategy(y, x, site, packed)
        self._compute(y.backing, x.backing, site)

    def add_all(self, y: Any, x: Any, group: Any) -> None:
        with uncomputed_kernels():
            self._strategy.add_all(y, x, group)
        for site, part in zip(group.sites, y.backing.split([site.d_out for site in group.sites], 1), strict=True):
            self._compute(part, x.backing, site)

    def _compute(self, y: torch.Tensor, x: torch.Tensor, site: Any) -> None:
        with torch._C._DisableTorchDispatch():
            for key, start, stop, sign in self._plan.lanes:
                if key in site.factors:
                    a, bt = (factor.backing for factor in site.factors[key])
                    y[start:stop] += sign * (x[start:stop] @ a.t() @ bt)
