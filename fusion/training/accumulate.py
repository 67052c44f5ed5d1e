"""Gradients of a batch that does not fit into memory as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from fusion.training.objectives import Read
from vlora.errors import BadPlan

Item = TypeVar("Item")
Result = TypeVar("Result")


def halving(size: int, attempt: Callable[[int], Result], undo: Callable[[int], None]) -> tuple[Result, int]:
    """Run `attempt(size)`, halving the size each time memory runs out.

    Args:
        undo: called with the next size before it is tried.

    Returns:
        The result, and the size that succeeded.

    Raises:
        BadPlan: not even a single sample fits into memory.
    """
    while True:
        try:
            return attempt(size), size
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
            if size == 1:
                raise BadPlan(
                    "out of memory with a single sample; set training.gradient_checkpointing, or use a smaller base"
                ) from error
            size = (size + 1) // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        undo(size)


def backward_in_parts(
    batch: Sequence[Item],
    size: int,
    read: Callable[[Sequence[Item]], Read],
    loss_of: Callable[[Read], torch.Tensor],
) -> float:
    """Add the gradient of `loss_of(read(batch))` to the parameters, keeping activations of at most `size` samples.

    The gradient is exact for any loss, also one that is not a mean over samples: a forward of the whole batch without
    activations gives the loss and its gradient with respect to each sample's outputs; each part is then read again to
    propagate that gradient. This costs one forward more than summing over parts.
    """
    parts = [batch[first : first + size] for first in range(0, len(batch), size)]
    if len(parts) == 1:
        loss = loss_of(read(batch))
        loss.backward()
        return float(loss.detach())
    with torch.no_grad():
        seen = [read(part) for part in parts]
    outputs = [_leaves(one) for one in seen]
    loss = loss_of(Read.joined(outputs))
    loss.backward()
    for part, wanted in zip(parts, outputs, strict=True):
        again = read(part)
        pairs = [
            (made, leaf.grad)
            for made, leaf in zip(_differentiable(again), _differentiable(wanted), strict=True)
            if leaf.grad is not None and made.requires_grad
        ]
        torch.autograd.backward([made for made, _ in pairs], [gradient for _, gradient in pairs])
    return float(loss.detach())


def _out_of_memory(error: RuntimeError) -> bool:
    """CUDA raises a type of its own; on the CPU only the message identifies the error."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def _leaves(read: Read) -> Read:
    last, words = (tensor.detach().requires_grad_() for tensor in (read.last, read.words))
    return Read(last, [image.detach().requires_grad_() for image in read.images], read.grids, words, read.exact)


def _differentiable(read: Read) -> list[torch.Tensor]:
    return [read.last, read.words, *read.images]
