"""The forward and backward pass of one packed batch as a sequence of pieces, one decoder layer at most each.

The loss is cross entropy over the vocabulary: logits exist for a few tokens at a time, and the output head of a large
vocabulary is multiplied block by block.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from atmm.matmul import add_input_gradient, linear
from vlora.models.hf_model import HFModel
from vlora.training.adapter import TrainableLora
from vlora.training.batch import PackedBatch
from vlora.training.decoder import TrainedDecoderLayer

MAX_LOGITS = 2**24
"""Logits in memory at a time: 64 MiB. Products of fewer tokens are less efficient: 64 take a tenth longer than 128."""


def token_losses(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    max_weights: int,
    max_logits: int = MAX_LOGITS,
) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
    """The loss of every token, and the gradient of their sum, in the caller's modes, which must be without gradients.

    Args:
        hidden: Hidden states after the final norm [n, hidden].
        targets: Tokens to predict [n].
        weight: Of the output head [vocabulary, hidden].
        bias: Of the output head [vocabulary], or None.
        max_weights: Elements of `weight` per piece, at most, but whole rows.
        max_logits: Logits in memory at a time, at most, but those of whole tokens.

    Yields:
        None between two pieces.

    Returns:
        The losses, float32 [n], and the gradient for the hidden states [n, hidden].
    """
    losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    slopes = torch.zeros_like(hidden)
    num_words, width = weight.shape
    block = max(1, max_weights // width)
    blocks = [slice(first, first + block) for first in range(0, num_words, block)]
    num_rows = max(1, max_logits // num_words)
    for start in range(0, len(hidden), num_rows):
        rows = slice(start, start + num_rows)
        own, wanted = hidden[rows], targets[rows, None]
        logits = torch.empty(len(own), num_words, dtype=torch.float32, device=hidden.device)
        for words in blocks:
            logits[:, words] = linear(own, weight[words], None if bias is None else bias[words])
            yield
        scores = torch.log_softmax(logits, -1)
        torch.neg(scores.gather(1, wanted)[:, 0], out=losses[rows])
        slope = scores.exp_().scatter_add_(1, wanted, scores.new_full(wanted.shape, -1.0))
        del logits
        for words in blocks:
            add_input_gradient(slopes[rows], slope[:, words].to(hidden.dtype), weight[words])
            yield
    return losses, slopes


class Loss(NamedTuple):
    """total: sum over the tokens of an adapter that have a label. num_tokens: their number."""

    total: float
    num_tokens: int

    @property
    def mean(self) -> float:
        return self.total / self.num_tokens


class MicroStep:
    """Adds the gradients of one packed batch to its adapters, piece by piece.

    Between two pieces no module of the model is changed, and the state of torch is the caller's, so anything may be
    computed with the model there. The batch's adapters must not be updated before the last piece.

    Attributes:
        losses: By adapter, complete after the last piece.
    """

    def __init__(
        self,
        hf_model: HFModel,
        layers: Sequence[TrainedDecoderLayer],
        adapters: Mapping[str, TrainableLora],
        batch: PackedBatch,
        *,
        recompute: bool,
        learns: bool = True,
    ) -> None:
        """Begin. `PackedTrainer.micro_step` describes the arguments."""
        self.batch = batch
        self.losses: dict[str, Loss] = {}
        self._hf_model = hf_model
        self._layers = layers
        self._recompute = recompute
        self._learns = learns
        self._adapters = [adapters[name] for name in batch.adapters]
        busy = [adapter.name for adapter in self._adapters if adapter.busy]
        assert not busy, f"a micro-step with {', '.join(busy)} is under way"
        for adapter in self._adapters:
            adapter.busy = True
        self._pieces: Iterator[None] | None = self._run()

    def advance(self) -> bool:
        """Compute one piece. Returns whether it was the last one.

        If it fails, the micro-step is abandoned.
        """
        assert self._pieces is not None, "the micro-step is complete or abandoned"
        try:
            for _ in self._pieces:
                return False
        except BaseException:
            self.abandon()
            raise
        self._end()
        if self._learns:
            for adapter in self._adapters:
                adapter.record(*self.losses[adapter.name])
        return True

    def run(self) -> dict[str, Loss]:
        """Compute all remaining pieces. Returns the losses."""
        while not self.advance():
            pass
        return self.losses

    def abandon(self) -> None:
        """Stop here. If it learns, the batch's adapters lose their gradients since their last updates."""
        if self._pieces is not None:
            self._end()
            for adapter in self._adapters if self._learns else ():
                adapter.drop()

    def _end(self) -> None:
        self._pieces = None
        for adapter in self._adapters:
            adapter.busy = False

    def _run(self) -> Iterator[None]:
        """Yields between two pieces."""
        batch, layers = self.batch, self._layers
        with _mode(grad=False):
            hidden = batch.embed(self._hf_model)
            rotations = batch.rotations(self._hf_model)
        # No gradient is needed below the first layer that an adapter targets.
        first = len(layers)
        if self._learns:
            first = next(index for index, layer in enumerate(layers) if layer.trains(batch))
        kept: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # input and, unless it is computed again, output
        for index, layer in enumerate(layers):
            keeps_graph = index >= first and not self._recompute
            with _mode(grad=keeps_graph):
                given = hidden.detach().requires_grad_(keeps_graph and index > first)
                out = layer(given, batch, rotations)
                hidden = out.detach()
            if index >= first:
                kept.append((given, out if keeps_graph else None))
            del out
            yield
        gradient = yield from self._loss(hidden)
        del hidden
        for layer in reversed(layers[first:]):
            given, again = kept.pop()
            if again is None:
                with _mode(grad=True):
                    given = given.detach().requires_grad_(bool(kept))
                    again = layer(given, batch, rotations)
                yield
            with _mode(grad=True):
                torch.autograd.backward(again, gradient)
            del again
            if kept:
                assert given.grad is not None
                gradient = given.grad
                yield

    def _loss(self, hidden: torch.Tensor) -> Generator[None, None, torch.Tensor]:
        """Compute the losses. Returns the gradient of their sum for the last layer's output [T, hidden]."""
        batch, head = self.batch, self._hf_model.lm_head
        with _mode(grad=True):
            rows = hidden.index_select(0, batch.predicting).requires_grad_()
            normed = self._hf_model.text_model.norm(rows)
        with _mode(grad=False):
            largest = max(layer.num_weights for layer in self._layers)
            pieces = token_losses(normed.detach(), batch.targets, head.weight.detach(), head.bias, largest)
        while True:
            with _mode(grad=False):
                try:
                    next(pieces)
                except StopIteration as end:
                    losses, slopes = end.value
                    break
            yield
        with _mode(grad=True):
            torch.autograd.backward(normed, slopes)
        with _mode(grad=False):
            for adapter, own in batch.parts.items():
                self.losses[adapter] = Loss(float(losses[own].sum(dtype=torch.float64)), own.stop - own.start)
            assert rows.grad is not None
            gradient: torch.Tensor = torch.zeros_like(hidden).index_copy_(0, batch.predicting, rows.grad)
        return gradient


@contextmanager
def _mode(*, grad: bool) -> Iterator[None]:
    """Context of a piece, independent of the caller's modes."""
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield
