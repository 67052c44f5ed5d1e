"""Losses over the vocabulary in pieces equal torch's cross entropy in float64, and so do their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vlora.training.loss import TokenLosses

HIDDEN, WORDS, ROWS = 24, 100, 64


@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
@pytest.mark.parametrize("words_at_once", [1, 33, 100, 4000])
@pytest.mark.parametrize("num_tokens", [1, ROWS, ROWS + 7])
def test_losses_equal_cross_entropy(num_tokens: int, words_at_once: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
    weight = torch.randn(WORDS, HIDDEN, generator=generator)
    offset = torch.randn(WORDS, generator=generator) if bias else None
    targets = torch.randint(WORDS, (num_tokens,), generator=generator)
    leaf = hidden.double().requires_grad_()
    logits = F.linear(leaf, weight.double(), None if offset is None else offset.double())
    expected = F.cross_entropy(logits, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    found = TokenLosses(hidden, targets, weight, offset, words_at_once * HIDDEN + 5, ROWS * WORDS + 5)
    pieces = sum(1 for _ in found.pieces())
    torch.testing.assert_close(found.values.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.slopes.double(), gradient, rtol=1e-5, atol=1e-5)
    blocks = -(-WORDS // words_at_once)
    assert pieces == 2 * blocks * -(-num_tokens // ROWS)


def test_a_token_with_nan_changes_no_bit_of_another() -> None:
    hidden = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(WORDS, HIDDEN, generator=torch.Generator().manual_seed(2))
    found = []
    for spoilt in (False, True):
        if spoilt:
            hidden[17] = torch.nan
        losses = TokenLosses(hidden, torch.arange(40), weight, None, 50 * HIDDEN)
        assert list(losses.pieces())
        found.append(losses)
    others = torch.arange(40) != 17
    assert found[1].values[17].isnan()
    assert torch.equal(found[0].values[others], found[1].values[others])
    assert torch.equal(found[0].slopes[others], found[1].slopes[others])
