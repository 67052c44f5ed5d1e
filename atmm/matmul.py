"""The product of linear layers, `x W^T + b`, by the fastest method for the batch, the weights and the processor.

rows      the compiled kernels: they read every row of weights once, in place, at memory bandwidth. For decoding, and
          in bfloat16 on processors with matrix tiles (AMX) for all batches.
float32   a bfloat16 product in float32, one block of weights at a time. For prompts on processors with bfloat16
          instructions slower than float32 (Intel without matrix tiles) or without bfloat16 instructions: there torch's
          own product reaches a tenth of the processor's speed.
onednn    oneDNN's product with the bias in its registers, which torch calls for bfloat16 without it. In float32 torch
          calls MKL, which uses half of the width of an AMD processor's registers with AVX-512 (docs/decisions/0107).
library   torch's own product. For everything else; the only method that autograd supports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atmm.cpu.products import Weights, has_tiles, multiplies, product, row_product
from atmm.processor import prefers_float32, prefers_onednn
from atmm.quantized import BLOCK, QuantizedWeight, StoredWeight

Method = Literal["rows", "float32", "onednn", "library"]
Key = tuple[int, int, int, torch.dtype]
"""The key of a measured choice: rows rounded up to a power of two, d_out, d_in, dtype."""

MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Batch sizes for which `atmm.tuning.matmul_choice` measures the methods: powers of two, ascending."""

measured: dict[Key, Method] = {}
"""Choices of `atmm.tuning.matmul_choice.measure`; they take precedence over the rule."""

# Choices made before, by rows, shape, type and stride of the weight: a decode step of a small model asks for the same
# few dozens of times, and the rule takes as long as the product.
_chosen: dict[tuple[int, torch.Size, torch.dtype, int], Method] = {}

# Numbers of tokens up to which "rows" is fastest. The alternatives are, in this order, torch's float32 product, torch's
# bfloat16 product on a processor with bfloat16 instructions, and the product in float32 (docs/decisions/0040).
_THIN_FLOAT32 = 24
_THIN_BFLOAT16 = 32
_THIN_WITHOUT_BFLOAT16 = 48
_HIDDEN_BY_TILES = 32
_HIDDEN = 8  # tokens up to which "rows" takes little longer than for one (docs/decisions/0015, for Emerald Rapids)
_FEW = 4  # rows up to which a product without instructions for its type may be memory-bound
_MOST_ROWS = MEASURED_ROWS[-1]  # larger batches use the choice for this many rows


def linear(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """x [..., d_in] times weight [d_out, d_in] transposed, plus bias: [..., d_out], contiguous."""
    if isinstance(weight, QuantizedWeight):
        return weight.product(x, bias)
    num_rows = x.numel() // x.shape[-1]
    method = choose(num_rows, weight)
    if method == "rows":
        return row_product(x, weight, bias)
    if method == "library":
        return F.linear(x, weight, bias)
    if method == "onednn":
        return _onednn(x, weight, bias)
    y = METHODS[method](x.reshape(num_rows, -1), (Weights(weight, bias),))
    return y.view(*x.shape[:-1], weight.shape[0])


def linears(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """Outputs of layers that read one input x [T, d_in], side by side: [T, sum of d_out]."""
    weights = [Weights(layer.weight, layer.bias) for layer in layers]
    return METHODS[choose(len(x), weights[0].weight)](x, weights)


def add_input_gradient(dx: Tensor, g: Tensor, weight: Tensor, *, beta: int = 1) -> None:
    """`dx = beta * dx + g W`, in place: the gradient of a layer's input.

    Args:
        dx: [T, d_in].
        g: [T, d_out], the gradient of the layer's output.
        weight: [d_out, d_in].
        beta: 1 adds to dx; 0 replaces its values, which are not read.
    """
    if not prefers_float32(weight.dtype, weight.device):
        dx.addmm_(g, weight, beta=beta)
        return
    sums = dx.float() if beta else torch.zeros(dx.shape, dtype=torch.float32)
    num_rows = max(1, BLOCK // weight.shape[1])
    for part, block in zip(g.float().split(num_rows, 1), weight.split(num_rows), strict=True):
        sums.addmm_(part, block.float())
    dx.copy_(sums)


def patch_products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution with stride = kernel, without padding: a product with each patch, which no other patch overlaps.

    Args:
        x: [n, channels, *sizes]; a remainder of less than a patch at the end of a dimension is not read.
        weight: [d_out, channels, *kernel], contiguous.
        bias: [d_out], or None.

    Returns:
        [n, d_out, *(sizes // kernel)], not always contiguous.
    """
    kernel = weight.shape[2:]
    counts = [size // width for size, width in zip(x.shape[2:], kernel, strict=True)]
    for dim in reversed(range(len(kernel))):
        x = x.narrow(2 + dim, 0, counts[dim] * kernel[dim]).unflatten(2 + dim, (counts[dim], kernel[dim]))
    places = range(2, x.dim(), 2)
    patches = x.permute(0, *places, 1, *(place + 1 for place in places)).reshape(-1, weight[0].numel())
    return linear(patches, weight.flatten(1), bias).view(len(x), *counts, len(weight)).movedim(-1, 1)


def joins(num_rows: int, weight: Tensor) -> bool:
    """Whether layers that read one input, with weights apart, should be computed together (`linears`).

    True where placing their outputs side by side is free.
    """
    return choose(num_rows, weight) == "rows"


def choose(num_rows: int, weight: Tensor) -> Method:
    """The method to multiply this many rows with a weight: as measured at start, else by the rule."""
    if not weight.is_cpu or num_rows == 0 or torch.is_grad_enabled():
        return "library"
    key = (min(num_rows, _MOST_ROWS), weight.shape, weight.dtype, weight.stride(1))
    method = _chosen.get(key)
    if method is None:
        method = _chosen[key] = measured.get(key_of(num_rows, weight)) or rule(num_rows, weight)
    return method


def forget_choices() -> None:
    """Let `choose` choose again: after a change of `measured`, and where a test emulates another processor."""
    _chosen.clear()


def key_of(num_rows: int, weight: Tensor) -> Key:
    """The key under which a choice for this many rows is stored."""
    return (1 << (min(num_rows, _MOST_ROWS) - 1).bit_length(), *weight.shape, weight.dtype)


def methods(num_rows: int, weight: Tensor) -> list[Method]:
    """The methods that can multiply this many rows with this weight on the CPU, except those known to be far slower."""
    slow = prefers_float32(weight.dtype, weight.device)
    found: list[Method] = []
    if multiplies(weight):
        found.append("rows")
    if not slow or num_rows <= _FEW or not found:
        found.append("library")
    if slow:
        found.append("float32")
    if prefers_onednn(weight.dtype, weight.device):
        found.append("onednn")
    return found


def rule(num_rows: int, weight: Tensor) -> Method:
    """The method for a weight on the CPU without measurements."""
    if num_rows <= _most_thin(weight) and multiplies(weight):
        return "rows"
    if num_rows > 1 and prefers_float32(weight.dtype, weight.device):
        return "float32"
    return "onednn" if prefers_onednn(weight.dtype, weight.device) else "library"


class ThinBatches(NamedTuple):
    """Batches for which "rows" is the rule, in tokens; 0 where none is.

    Attributes:
        hidden_tokens: the widest batch that takes little longer than one token, the time of reading the weights.
    """

    hidden_tokens: int = 0
    max_tokens: int = 0


def thin_batches(weight: Tensor) -> ThinBatches:
    """The batches for which the rule computes products with this weight by "rows"."""
    if weight.device.type != "cpu" or not multiplies(weight):
        return ThinBatches()
    return ThinBatches(_HIDDEN_BY_TILES if has_tiles(weight.dtype) else _HIDDEN, _most_thin(weight))


def _most_thin(weight: Tensor) -> int:
    if has_tiles(weight.dtype):
        return sys.maxsize
    if prefers_float32(weight.dtype, weight.device):
        return _THIN_WITHOUT_BFLOAT16
    return _THIN_BFLOAT16 if weight.dtype is torch.bfloat16 else _THIN_FLOAT32


def _float32(x: Tensor, layers: Sequence[Weights]) -> Tensor:
    y = x.new_empty(len(x), sum(layer.weight.shape[0] for layer in layers))
    wide = x.float()
    first = 0
    for weight, bias in layers:
        done = 0
        for block in weight.split(max(1, BLOCK // weight.shape[1])):
            sums = torch.mm(wide, block.float().t())
            if bias is not None:
                sums += bias[done : done + len(block)]
            y[:, first : first + len(block)] = sums
            first += len(block)
            done += len(block)
    return y


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):  # which converts the inputs of torch's own product only
        return F.linear(x, weight, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001
    return y


def _apart(multiply: Callable[..., Tensor]) -> Callable[[Tensor, Sequence[Weights]], Tensor]:
    """One product for each layer."""

    def products(x: Tensor, layers: Sequence[Weights]) -> Tensor:
        outputs = [multiply(x, *layer) for layer in layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    return products


METHODS: dict[Method, Callable[[Tensor, Sequence[Weights]], Tensor]] = {
    "rows": product,
    "float32": _float32,
    "onednn": _apart(_onednn),
    "library": _apart(F.linear),
}


BLOCK_ROWS, BLOCK_SUMS = 128, 2**17  # at most, of a block: half a MiB of sums, as large as a core's cache


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as they are, or in float32 if torch's products of their type are slower (docs/decisions/0092).

    Args:
        tensors: of one dtype, on one device.
    """
    return tuple(each.float() for each in tensors) if prefers_float32(tensors[0].dtype, tensors[0].device) else tensors


def add_product(y: Tensor, u: Tensor, v: Tensor, *, alpha: float = 1.0) -> None:
    """Add `alpha * u v` to y, in place; u and v may be widened. Their product is then added in blocks, because as a
    whole it would leave the cache between product and addition, and might occupy new pages in every call.
    """
    if u.dtype is y.dtype:
        y.addmm_(u, v, alpha=alpha)
        return
    if y.numel() <= BLOCK_SUMS:
        y.add_(torch.mm(u, v), alpha=alpha)
        return
    columns = BLOCK_SUMS // min(len(y), BLOCK_ROWS)
    for rows, left in zip(y.split(BLOCK_ROWS), u.split(BLOCK_ROWS), strict=True):
        for block, right in zip(rows.split(columns, 1), v.split(columns, 1), strict=True):
            block.add_(torch.mm(left, right), alpha=alpha)
