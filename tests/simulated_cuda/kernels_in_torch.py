"""The results of Triton kernels in plain torch: the interpreter needs up to a second for a layer of a small batch.

The kernels are launched without computing anything, so that their launches and operands count; then torch computes the
results on the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from atmm.formats import Int8
from atmm.grouped import Grouped
from atmm.quantized import Integers
from atmm.strategies.hybrid import Loop
from tests.simulated_cuda import capture
from tests.simulated_cuda.install import uncomputed_kernels
from tests.simulated_cuda.tensor import SimulatedTensor


def decode_in_torch(decode: Callable[..., Any]) -> Callable[..., Any]:
    """`atmm.triton.attention.decode` with its launches counted and its operands checked, computed by torch."""

    def decoded(q: Any, kv_rows: Any, block_table: Any, lengths: Any, **options: Any) -> Any:
        with uncomputed_kernels():
            result = decode(q, kv_rows, block_table, lengths, **options)
        size, stride, scale = options["block_size"], options["block_rows"], options["scale"]
        places, out = options["places"].backing, options["out"].backing

        def compute() -> None:
            batch = zip(places.tolist(), lengths.backing.tolist(), block_table.backing, strict=True)
            for place, length, blocks in batch:
                token = torch.arange(length)
                rows = blocks[token // size].long() * stride + token % size
                query = q.backing[place][:, None]
                sides = (kv_rows.backing[rows + offset].view(length, -1, query.shape[2]) for offset in (0, size))
                keys, values = (
                    side.transpose(0, 1).repeat_interleave(len(query) // side.shape[1], 0) for side in sides
                )
                out[place] = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=scale)[:, 0]

        _computed(compute)
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


def merging_in_torch(module: Any) -> dict[str, Callable[..., Any]]:
    """The functions of `atmm.triton.merging`."""
    return {
        "merge": _launched(module.merge, _merge),
        "merge_rows": _launched(module.merge_rows, _merge_rows),
        "merge_groups": _launched(module.merge_groups, _merge_groups),
    }


def products_in_torch(module: Any) -> dict[str, Callable[..., Any]]:
    """The functions of `atmm.triton.products`."""
    return {"multiply": _launched(module.multiply, _multiply)}


def _launched(launch: Callable[..., Any], compute: Callable[..., Any]) -> Callable[..., Any]:
    def computed(*given: Any) -> Any:
        with uncomputed_kernels():
            result = launch(*given)
        host = [each.backing if isinstance(each, SimulatedTensor) else each for each in given]
        if result is None:
            _computed(lambda: compute(*host))
        else:
            _computed(lambda: result.backing.copy_(compute(*host)))
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


def _merge(out: torch.Tensor, base: torch.Tensor, a: torch.Tensor, bt: torch.Tensor, scale: float) -> None:
    out.copy_((base.double() + scale * bt.double().transpose(1, 2) @ a.double()).float())


def _merge_rows(
    values: torch.Tensor,
    scales: torch.Tensor,
    base: torch.Tensor,
    base_scales: torch.Tensor,
    a: torch.Tensor,
    bt: torch.Tensor,
    largest: float,
) -> None:
    sums = base.float() * base_scales + bt.float().transpose(1, 2) @ a.float()
    scales.copy_(sums.abs().amax(2, keepdim=True).clamp(min=1e-12) / largest)
    quotients = sums / scales
    values.copy_(quotients if values.dtype.is_floating_point else quotients.round())


def _format_of(kind: Integers) -> Any:
    return Int8() if kind.signed else Grouped(kind.bits, kind.group or None, symmetric=not kind.offsets)


def _merge_groups(
    values: torch.Tensor, scales: torch.Tensor, base: torch.Tensor, base_scales: torch.Tensor, *factors: Any
) -> None:
    a, bt, kind = factors
    sums = _format_of(kind).decode(base, base_scales) + bt.float().transpose(1, 2) @ a.float()
    for target, own in zip((values, scales), _format_of(kind).encode(sums), strict=True):
        target.copy_(own)


def _multiply(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Any, kind: Integers) -> torch.Tensor:
    return F.linear(x.float(), _format_of(kind).decode(values, scales), None if bias is None else bias.float())


def _write_kv(k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Any) -> None:
    k_cache[rows] = k
    v_cache[rows] = v


def lanes_in_torch(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """`atmm.operator.strategy_in_place`, with strategies that torch computes."""

    def prepared(plan: Any, site: Any) -> Any:
        strategy = prepare(plan, site)
        return strategy if strategy is None or isinstance(strategy, Loop) else _LanesInTorch(strategy)

    return prepared


class _LanesInTorch:
    """A strategy that launches the kernels of another one, and computes in torch what they read from its tables."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.refill = strategy.refill
        self.begin = None if strategy.begin is None else self._begin

    def _begin(self, x: Any, site: Any, packed: Any) -> None:
        with uncomputed_kernels():
            self._strategy.begin(x, site, packed)

    def __call__(self, y: Any, x: Any, site: Any, packed: Any) -> None:
        with uncomputed_kernels():
            self._strategy(y, x, site, packed)
        self._add([(site.index, y.backing)], x.backing, self._strategy._source.at(site, packed))

    def add_all(self, y: Any, x: Any, group: Any) -> None:
        with uncomputed_kernels():
            self._strategy.add_all(y, x, group)
        parts = y.backing.split([site.d_out for site in group.sites], 1)
        self._add(list(enumerate(parts)), x.backing, self._strategy._source.at(group.sites[0], group.packed))

    def _add(self, outputs: list[tuple[int, torch.Tensor]], x: torch.Tensor, places: Any) -> None:
        """Add to the outputs of sites, given by their index in the group. x: the group's input."""
        table, parts = self._strategy._tiles.expand.backing, self._strategy._tiles.sizes.parts
        origin, rows = places.origin.data_ptr(), places.rows.backing

        def compute() -> None:
            for first, count, *lanes in table.view(-1, 2 + 3 * parts).tolist():
                for slot, sign in zip(lanes[::3], lanes[2::3], strict=True):
                    for index, y in outputs if count and sign else ():
                        a_start, a_row, bt_start, bt_row, rank, d_out, *_ = rows[slot, index].tolist()
                        if rank:
                            a = _matrix(origin + 16 * a_start, 16 * a_row, (rank, x.shape[1]), x.dtype)
                            bt = _matrix(origin + 16 * bt_start, 16 * bt_row, (rank, d_out), x.dtype)
                            y[first : first + count] += sign * (x[first : first + count] @ a.t() @ bt)

        _computed(compute)


def _matrix(address: int, row_bytes: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The matrix at an address of the simulated device, which is in host memory."""
    row, (num_rows, width) = row_bytes // dtype.itemsize, shape
    number = (num_rows - 1) * row + width
    memory = (ctypes.c_char * (number * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, (row, 1))


def _computed(compute: Callable[[], object]) -> None:
    """Compute what the kernels launched last have to write, now and at each replay of a graph that is captured."""
    with torch._C._DisableTorchDispatch():
        compute()
    if (captured := capture.current()) is not None:
        captured.record("in torch", (), compute)
