"""The host arrays of a step, copied to a GPU together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vlora.models.forward_batch import ForwardBatch
from vlora.models.gpu.draw import draw_table
from vlora.models.request_state import RequestState
from vlora.models.sampling import uniform

_FIRST_TOKENS = 256


class StepTokens:
    """The tokens of the last step on the device, one per row that it sampled, and copies of them on the host.

    A step that is launched before the tokens of the last one are known has ids below 0 in their places: -1 - row. The
    copies to the host are asynchronous, from one buffer into two pinned ones by turns: the host reads one of them while
    the next step is running.

    Attributes:
        drawn: int64, at the same address in all steps unless a step samples more rows than any before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocate(_FIRST_TOKENS)

    def reserve(self, number: int) -> None:
        """Make room for this many tokens, which then do not move. The tokens of the last step may be lost."""
        if number > len(self.drawn):
            self._allocate(2 * number)

    def keep(self, tokens: torch.Tensor) -> torch.Tensor:
        """Keep the tokens of a step, int64 [n] on the device. Returns a copy on the host, complete after the step."""
        number = len(tokens)
        self.reserve(number)
        self._turn ^= 1
        on_host = self._pinned[self._turn][:number]
        self.drawn[:number].copy_(tokens)
        return on_host.copy_(self.drawn[:number], non_blocking=True)

    def fill(self, token_ids: torch.Tensor) -> None:
        """Replace ids below 0 by the tokens of the last step, in place. token_ids: int64 [T] on the device."""
        rows = (-1 - token_ids).clamp_(min=0)
        token_ids.copy_(torch.where(token_ids < 0, self.drawn[rows], token_ids))

    def _allocate(self, number: int) -> None:
        """Create buffers. torch keeps the memory of earlier ones until the work on them is done."""
        self.drawn = torch.zeros(number, dtype=torch.int64, device=self._device)
        self._pinned = [torch.empty(number, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self._turn = 0


_ALIGNMENT = 64  # bytes
_FIRST_BYTES = 2**16


class StepInputs:
    """Collects arrays in pinned memory and copies them in one asynchronous copy.

    There are two pinned buffers, used by turns, so that the host prepares a step while the copy of the one before it is
    pending. The tensors of a step are views of one buffer on the device, at the same addresses in steps with arrays of
    the same sizes. Kernels that read them are queued between two copies, all on one stream.

    Attributes:
        tokens: The tokens of the last step, for a step that is prepared before they are known on the host.
    """

    def __init__(self, device: torch.device, tokens: StepTokens, num_bytes: int = _FIRST_BYTES) -> None:
        """num_bytes: of the first buffers. Steps with more data get larger ones, at other addresses."""
        self._device, self.tokens = device, tokens
        self._used = 0
        self._allocate(num_bytes)

    def first(self, num_bytes: int) -> torch.Tensor:
        """The bytes on the device of the first array of a step."""
        return self._target[:num_bytes]

    def put(self, array: np.ndarray) -> torch.Tensor:
        """Add a contiguous array. Its tensor on the device has the values after the next `copy`."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + array.nbytes > len(self._target):
            self.copy()
            self._allocate(max(2 * len(self._target), array.nbytes))
            start = 0
        if start == 0:
            self._turn ^= 1
            copied = self._copied[self._turn]
            if not copied.query():
                copied.synchronize()
        self._used = start + array.nbytes
        values = torch.from_numpy(array)
        self._pinned[self._turn][start : self._used].view(values.dtype).view(values.shape).copy_(values)
        return self._target[start : self._used].view(values.dtype).view(values.shape)

    def put_draws(self, states: Sequence[RequestState]) -> torch.Tensor | None:
        """Add the `draw_table` of requests that sample their next token; None if all are greedy."""
        params = [state.request.sampling for state in states]
        if not any(own.temperature > 0 for own in params):
            return None
        return self.put(draw_table(params, [uniform(state.seed, state.num_answered) for state in states]))

    def finish(self, packed: ForwardBatch, token_ids: torch.Tensor) -> None:
        """Copy the step with the draws of its rows, and read the tokens that the host does not know yet.

        Args:
            token_ids: Its tokens on the device, int64 [T], from `put`.
        """
        packed.draws = self.put_draws([row.state for row in packed.text])
        self.copy()
        if (packed.token_ids < 0).any():
            self.tokens.fill(token_ids)

    def copy(self) -> None:
        """Copy what was added since the last copy, on the current stream."""
        if self._used:
            source = self._pinned[self._turn][: self._used]
            self._target[: self._used].copy_(source, non_blocking=True)
            self._copied[self._turn].record(torch.cuda.current_stream(self._device))
            self._used = 0

    def _allocate(self, num_bytes: int) -> None:
        """Create buffers. torch keeps the memory of earlier ones until their copies are done."""
        self._pinned = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._target = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._turn = 0
