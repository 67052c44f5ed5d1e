"""The dtype of training computations."""

from __future__ import annotations

import pytest
import torch

from fusion.training.precision import mixed_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_bfloat16_only_where_it_is_allowed_and_the_processor_has_it(
    wanted: bool, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported, raising=False)
    with mixed_precision(CPU, wanted):
        product = torch.ones(2, 3) @ torch.ones(3, 2)
    assert product.dtype == (torch.bfloat16 if wanted and supported else torch.float32)
