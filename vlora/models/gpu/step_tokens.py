"""The tokens that a step draws on a GPU: on the device for the next step, and on the host when they are needed."""

from __future__ import annotations

import torch

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
