"""Measurements at start follow the speed of the ranks' network and processor."""

from __future__ import annotations

import time

import pytest
import torch

from vlora.models.way_costs import measure
from vlora.parallel.process_group import Cause, Ledger

WAIT_S = 0.02


class SlowGroup:
    """Represents two ranks with equal data, on a network with a latency of `wait_s`."""

    rank = 0
    size = 2

    def __init__(self, wait_s: float) -> None:
        self.ledger = Ledger()
        self._wait_s = wait_s

    def all_reduce(self, tensor: torch.Tensor, cause: Cause) -> torch.Tensor:
        time.sleep(self._wait_s)
        self.ledger.note("all_reduce", cause, tensor.nbytes)
        return tensor.contiguous()

    def all_gather(self, tensor: torch.Tensor, cause: Cause) -> torch.Tensor:
        time.sleep(self._wait_s)
        self.ledger.note("all_gather", cause, tensor.nbytes)
        return torch.stack([tensor, tensor])


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_a_slow_network_is_seen_and_factors_are_not_free(num_tokens: int) -> None:
    group = SlowGroup(WAIT_S)
    costs = measure(group, num_tokens, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
    assert costs.num_tokens == num_tokens
    for collective_s in (costs.gather_s, costs.reduce_s):
        assert 0.9 * WAIT_S <= collective_s < 3 * WAIT_S
    assert costs.factor_byte_s > 0


def test_every_rank_says_the_same_in_the_same_order() -> None:
    """For any measurements: a rank with one more call would wait forever."""
    ledgers = []
    for wait_s in (0.0, 0.002):
        group = SlowGroup(wait_s)
        measure(group, 4, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
        ledgers.append(group.ledger.take())
    assert ledgers[0] == ledgers[1]
    calls = {kind: entry.calls for (kind, cause), entry in ledgers[0].items() if cause == "slora"}
    assert calls["all_gather"] == calls["all_reduce"], "two layers that read one input share a gather"
    assert {cause for _, cause in ledgers[0]} == {"slora", "start"}
