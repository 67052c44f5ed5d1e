"""Gradients of a batch that does not fit into memory as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from fusion.training.objectives import ForwardOutputs
from vlora.errors import BadPlan

Item = TypeVar("Item")
Result = TypeVar("Result")


def halving(size: int, attempt: Callable[[int], Result], undo: Callable[[int], None]) -> tuple[Result, int]:
    """Run `attempt(size)`, halving the size each time memory runs out.

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
    forward: Callable[[Sequence[Item]], ForwardOutputs],
    loss_of: Callable[[ForwardOutputs], torch.Tensor],
) -> float:
    """Add the gradient of `loss_of(forward(batch))` to the parameters; keep activations of at most `size` samples.

    The gradient is exact for any loss, also one that is not a mean over samples: a forward of the whole batch without
    activations gives the loss and its gradient with respect to each sample's outputs, which a second forward of each
    part propagates. This costs one forward more than summing over parts.
    """
    parts = [batch[first : first + size] for first in range(0, len(batch), size)]
    if len(parts) == 1:
        loss = loss_of(forward(batch))
        loss.backward()
        return float(loss.detach())
    with torch.no_grad():
        detached = [forward(part) for part in parts]
    leaves = [_leaves(outputs) for outputs in detached]
    loss = loss_of(ForwardOutputs.concatenated(leaves))
    loss.backward()
    for part, wanted in zip(parts, leaves, strict=True):
        again = forward(part)
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


def _leaves(outputs: ForwardOutputs) -> ForwardOutputs:
    last, words = (tensor.detach().requires_grad_() for tensor in (outputs.last, outputs.words))
    return ForwardOutputs(
        last,
        [image.detach().requires_grad_() for image in outputs.images],
        [image.detach().requires_grad_() for image in outputs.inputs],
        outputs.grids,
        words,
        outputs.exact,
    )


def _differentiable(outputs: ForwardOutputs) -> list[torch.Tensor]:
    return [outputs.last, outputs.words, *outputs.images, *outputs.inputs]
