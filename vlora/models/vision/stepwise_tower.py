"""Runs the vision tower in pieces, so that decode steps run between the pieces of a large image.

The tower's published code is one call. It runs here on a separate stack (a greenlet of the same thread, so that the
process keeps one OpenMP pool), which yields after a piece of work and is resumed in a later step. Linear layers are
divided by rows, and attention by heads and query rows. The boundaries are fixed, so an interrupted call and an
uninterrupted one give bit-identical results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import atmm
from atmm.matmul import linear, widened
from atmm.processor import multiplies_bfloat16
from vlora.lora.adapted_linear import AdaptedLinear

try:
    from greenlet import GreenletExit, getcurrent, greenlet
except ImportError:  # without the server's packages, where no request waits for a step
    from vlora.models.vision.whole_call import GreenletExit, getcurrent, greenlet  # type: ignore[assignment]

# Must not contain "flash" or "sdpa": transformers tests attention names for those substrings.
VISION_ATTENTION = "vlora_vision"

CPU_PIECE_FLOPS = 2.5e8  # per thread: about 7 ms on a core with 40 GFLOP/s
FAST_PIECE_FLOPS = 1.5e9  # likewise with bfloat16 instructions: a core with 400 GFLOP/s
GPU_PIECE_FLOPS = 1e12
MIN_ROWS = 128  # of a linear layer's piece: products of fewer rows are slower per row
MIN_QUERIES = 256  # of an attention piece; the CPU kernel is faster with 256 to 512 than with all of a large image

T = TypeVar("T")


class _Stack(greenlet):
    """Stack of an interruptible call. spent: floating-point operations since it was resumed; budget: their limit."""

    spent: float
    budget: float


def spend(flops: float) -> None:
    """Count work of the vision tower. An interruptible call that has used its budget yields until it is resumed."""
    stack = getcurrent()
    if isinstance(stack, _Stack):
        stack.spent += flops
        if stack.spent >= stack.budget - flops / 2:  # another piece of this size would be further off the budget
            assert stack.parent is not None
            stack.parent.switch()


class PacedCall(Generic[T]):
    """A call of the vision tower that advances in pieces. It must be used from one thread only.

    result: the call's return value, after `advance` has returned True. flops: operations so far.
    """

    result: T

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._stack = _Stack(self._run)
        self.flops = 0.0

    def _run(self) -> None:
        self.result = self._call()

    def advance(self, flops: float) -> bool:
        """Run about `flops` more operations, at least one piece. After the call has returned this does nothing.

        Returns:
            Whether the call has returned.

        Raises:
            Exception: Any exception of the call, which is then finished.
        """
        stack = self._stack
        if stack.dead:
            return True
        stack.parent, stack.spent, stack.budget = getcurrent(), 0.0, flops
        try:
            stack.switch()
        finally:
            self.flops += stack.spent
        return stack.dead

    def close(self) -> None:
        """Abandon the call and exit its context managers."""
        if self._stack:
            self._stack.parent = getcurrent()
            self._stack.throw(GreenletExit)


def piece_flops(device: torch.device, dtype: torch.dtype) -> float:
    if device.type != "cpu":
        return GPU_PIECE_FLOPS
    fast = dtype is torch.bfloat16 and multiplies_bfloat16()
    return (FAST_PIECE_FLOPS if fast else CPU_PIECE_FLOPS) * torch.get_num_threads()


class PacedLinear(AdaptedLinear):
    """An adapted linear layer of the vision side, computed in pieces of rows. Created by `pace`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        num_rows = input.numel() // self.in_features
        row_flops = 2 * self.in_features * self.out_features
        rows = max(MIN_ROWS, int(piece_flops(input.device, input.dtype) / row_flops))
        if num_rows <= rows or torch.is_grad_enabled():
            y = super().forward(input)
            spend(num_rows * row_flops)
            return y
        x = input.reshape(num_rows, self.in_features)
        y = x.new_empty(num_rows, self.out_features)
        wide, *_ = widened(self.weight)  # once for all pieces
        bias = None if self.bias is None else self.bias.to(wide.dtype)
        for part, out in zip(x.split(rows), y.split(rows), strict=True):
            out.copy_(linear(part.to(wide.dtype), wide, bias))
            spend(len(part) * row_flops)
        plan = self.scope.plan_for(num_rows)
        if plan is not None:
            self.add_deltas(y, x, plan)
        return y.view(*input.shape[:-1], self.out_features)


def pace(layer: AdaptedLinear) -> AdaptedLinear:
    """Convert an adapted linear layer, in place, into one that is computed in pieces."""
    layer.__class__ = PacedLinear
    return layer


def paced_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention with transformers' interface, computed in pieces of queries, and of heads by torch.

    Takes query, key and value [batch, heads, tokens, head_dim]; returns [batch, tokens, heads, head_dim].
    """
    batch, num_heads, num_queries, width = query.shape
    query_flops = 4 * batch * key.shape[2] * width  # of one head
    causal = kwargs.get("is_causal", getattr(module, "is_causal", True))
    plain = torch.is_grad_enabled() or attention_mask is not None or causal or key.shape[1] != num_heads
    if not plain and atmm.attends_faster(query.device, query.dtype):
        queries = max(MIN_QUERIES, int(piece_flops(query.device, query.dtype) / query_flops / num_heads))
        out = query.new_empty(batch, num_queries, num_heads, width)
        for done in atmm.attend_all(out, query, key, value, width**-0.5 if scaling is None else scaling, queries):
            spend(4 * key.shape[2] * width * num_heads * done)
        return out, None
    if plain:
        out = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0]
        spend(num_heads * num_queries * query_flops)
        return out, None
    return _attend_by_torch(module, query, key, value, query_flops, scaling=scaling, **kwargs), None


def _attend_by_torch(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_flops: int,
    **kwargs: Any,
) -> torch.Tensor:
    batch, num_heads, num_queries, width = query.shape
    piece = piece_flops(query.device, query.dtype)
    queries = max(MIN_QUERIES, int(piece / query_flops))
    heads = max(1, int(piece / (min(queries, num_queries) * query_flops)))
    joined = query.new_empty(batch, num_queries, num_heads, width)
    for head in range(0, num_heads, heads):
        chosen = slice(head, head + heads)
        for start in range(0, num_queries, queries):
            part = query[:, chosen, start : start + queries]
            out = sdpa_attention_forward(module, part, key[:, chosen], value[:, chosen], None, **kwargs)[0]
            joined[:, start : start + queries, chosen] = out
            spend(part.shape[1] * part.shape[2] * query_flops)
    return joined


# Must contain "flash": transformers then passes the boundaries of packed sequences.
VISION_FLASH = "vlora_vision_flash"


def register_vision_attention(device: torch.device) -> str:
    on_gpu = device.type == "cuda"
    name = VISION_FLASH if on_gpu else VISION_ATTENTION
    AttentionInterface.register(name, flash_attention if on_gpu else paced_attention)
    return name


def flash_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Full attention with transformers' interface, within each sequence.

    Sequences of different lengths count for `spend` as if all had the longest length: their lengths are on the device.

    Args:
        query: [batch, heads, tokens, head_dim].
        key: Like `query`, with tokens of its own if no sequences are packed.
        attention_mask: None; with a mask, the plain attention is used.
        scaling: Factor of the scores; default: head_dim ** -0.5.
        cu_seq_lens_q: int32 [sequences + 1], the boundaries of packed sequences, for a batch of 1; None if each element
            of the batch is a sequence.
        max_length_q: The longest packed sequence.

    Returns:
        [batch, tokens, heads, head_dim].
    """
    batch, heads, num_tokens, width = query.shape
    num_keys = key.shape[2]
    causal = kwargs.get("is_causal", getattr(module, "is_causal", True))
    plain = attention_mask is not None or causal or key.shape[1] != heads
    if plain or not atmm.serves_flash(query.device, query.dtype, width):
        rest = {name: value for name, value in kwargs.items() if name not in ("cu_seq_lens_k", "max_length_k")}
        if cu_seq_lens_q is None:
            return paced_attention(module, query, key, value, attention_mask, scaling=scaling, **rest)
        counts = cu_seq_lens_q.diff().tolist()
        parts = zip(query.split(counts, 2), key.split(counts, 2), value.split(counts, 2), strict=True)
        done = [paced_attention(module, q, k, v, None, scaling=scaling, **rest)[0] for q, k, v in parts]
        return torch.cat(done, 1), None
    q, k, v = (side.transpose(1, 2).reshape(-1, heads, width) for side in (query, key, value))
    bounds, key_bounds, longest, longest_key = cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q
    if bounds is None or key_bounds is None:
        bounds, key_bounds = (
            torch.arange(0, (batch + 1) * count, count, dtype=torch.int32, device=query.device)
            for count in (num_tokens, num_keys)
        )
        longest, longest_key = num_tokens, num_keys
    assert longest is not None and longest_key is not None
    out = atmm.flash(
        q,
        k,
        v,
        bounds,
        key_bounds,
        longest,
        longest_key,
        causal=False,
        scale=width**-0.5 if scaling is None else scaling,
    )
    spend(4.0 * batch * num_tokens * longest_key * heads * width)
    return out.view(batch, num_tokens, heads, width), None
