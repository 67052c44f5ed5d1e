"""Parts of training loops: the learning rate of each step, early stopping, and batches larger than memory."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch

from atmm.processor import multiplies_bfloat16
from fusion.training.objectives import ForwardOutputs
from vlora.errors import BadPlan

Item = TypeVar("Item")
Result = TypeVar("Result")
_WARM_UP_STEPS = 10


class Schedule:
    """The numbers of the steps of a training, each with its learning rate: a short warm-up, then half a cosine to zero.

    done: share of the training before the current step, 0 to 1.

    Args:
        rate: the largest learning rate.
        seconds: processor time of this process after which the training ends; None for no limit.
        warm_up: steps until the largest rate.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rate: float,
        steps: int,
        seconds: float | None = None,
        *,
        warm_up: int = _WARM_UP_STEPS,
    ) -> None:
        self.done = 0.0
        self._optimizer, self._rate, self._steps, self._seconds = optimizer, rate, steps, seconds
        self._warm_up = warm_up
        self._started = time.process_time()

    def __iter__(self) -> Iterator[int]:
        for step in range(self._steps):
            self.done = step / self._steps
            if self._seconds is not None:
                self.done = max(self.done, (time.process_time() - self._started) / self._seconds)
                if self.done >= 1:
                    return
            share = min(1.0, (step + 1) / self._warm_up) * 0.5 * (1 + math.cos(math.pi * self.done))
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate * share
            yield step

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The block's processor time does not count."""
        before = time.process_time()
        yield
        self._started += time.process_time() - before


class EarlyStopping(Generic[Result]):
    """The state with the smallest held-back loss, None before the first evaluation. patience: evaluations since the
    smallest loss after which a training stops; None for any number."""

    def __init__(self, patience: int | None = None) -> None:
        self.best: Result | None = None
        self.smallest = math.inf
        self._patience = patience
        self._since = 0

    def stops(self, loss: float, snapshot: Callable[[], Result]) -> bool:
        """Record a loss. Returns whether the patience has ended."""
        if loss < self.smallest:
            self.best, self.smallest, self._since = snapshot(), loss, 0
            return False
        self._since += 1
        return self._patience is not None and self._since >= self._patience


def halving(size: int, attempt: Callable[[int], Result], undo: Callable[[int], None]) -> tuple[Result, int]:
    """Run `attempt(size)`, halving the size each time memory runs out. Returns the result and the size that succeeded.
    Raises BadPlan if not even a single sample fits into memory."""
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


def in_parts(
    items: Sequence[Item], size: int, compute: Callable[[Sequence[Item]], Result]
) -> Iterator[tuple[Sequence[Item], Result, int]]:
    """Parts of at most `size` items, or fewer if memory runs out, each with what `compute` returns, and their size."""
    first = 0

    def attempt(at_once: int) -> Result:
        return compute(items[first : first + at_once])

    while first < len(items):
        found, size = halving(size, attempt, lambda at_once: None)
        yield items[first : first + size], found, size
        first += size


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


def mixed_precision(device: torch.device, wanted: bool = True) -> torch.autocast:
    """A context in which torch computes in bfloat16 where that is faster than float32.

    It has no effect on a processor without bfloat16 instructions, nor on Intel cores without matrix tiles, where
    products take ten times and twice as long as in float32.

    Args:
        wanted: whether bfloat16 is allowed.
    """
    fast = device.type != "cpu" or multiplies_bfloat16()
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted and fast)
