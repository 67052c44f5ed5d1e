"""Cross entropy over the vocabulary and its gradient, in pieces that are no longer than those of a decoder layer.

Logits exist for a few tokens at a time. The output head of a large vocabulary is multiplied block by block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from atmm.matmul import add_input_gradient, linear

MAX_LOGITS = 2**24
"""Logits in memory at a time: 64 MiB. Products of fewer tokens are less efficient: 64 take a tenth longer than 128."""


class TokenLosses:
    """The loss of every token, and the gradient of their sum.

    values: float32 [n]. slopes: gradient for the hidden states [n, hidden]. Both are complete after the last piece.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        max_weights: int,
        max_logits: int = MAX_LOGITS,
    ) -> None:
        """Prepare the computation.

        Args:
            hidden: Hidden states after the final norm [n, hidden].
            targets: Tokens to predict [n].
            weight: Of the output head [vocabulary, hidden].
            bias: Of the output head [vocabulary], or None.
            max_weights: Elements of `weight` per piece, at most, but whole rows.
            max_logits: Logits in memory at a time, at most, but those of whole tokens.
        """
        self.values = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        self.slopes = torch.zeros_like(hidden)
        self._hidden = hidden
        self._targets = targets
        self._weight = weight
        self._bias = bias
        self._block = max(1, max_weights // weight.shape[1])
        self._num_rows = max(1, max_logits // len(weight))

    def pieces(self) -> Iterator[None]:
        """Compute one piece per item, in the caller's modes, which must be without gradients."""
        num_words = len(self._weight)
        for start in range(0, len(self._hidden), self._num_rows):
            rows = slice(start, start + self._num_rows)
            hidden, targets = self._hidden[rows], self._targets[rows, None]
            logits = torch.empty(len(hidden), num_words, dtype=torch.float32, device=hidden.device)
            for first in range(0, num_words, self._block):
                words = slice(first, first + self._block)
                bias = None if self._bias is None else self._bias[words]
                logits[:, words] = linear(hidden, self._weight[words], bias)
                yield
            scores = torch.log_softmax(logits, -1)
            torch.neg(scores.gather(1, targets)[:, 0], out=self.values[rows])
            slope = scores.exp_().scatter_add_(1, targets, scores.new_full(targets.shape, -1.0))
            del logits
            for first in range(0, num_words, self._block):
                words = slice(first, first + self._block)
                add_input_gradient(self.slopes[rows], slope[:, words].to(hidden.dtype), self._weight[words])
                yield
