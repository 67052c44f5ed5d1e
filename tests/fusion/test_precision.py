"""The dtype of training computations."""

from __future__ import annotations

import pytest
import torch

from fusion.training import precision

CPU = torch.device("cpu")


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_bfloat16_only_where_it_is_allowed_and_faster(
    wanted: bool, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: faster)
    with precision.mixed_precision(CPU, wanted):
        product = torch.ones(2, 3) @ torch.ones(3, 2)
    assert product.dtype == (torch.bfloat16 if wanted and faster else torch.float32)
