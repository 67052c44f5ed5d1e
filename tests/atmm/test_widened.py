"""Products in float32 that are added to bfloat16 values block by block."""

from __future__ import annotations

import pytest
import torch

from atmm import widened


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (3, 70), (40, 90), (129, 33)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_in_blocks_is_added_to_every_value_once(
    rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widened, "BLOCK_ROWS", 16)
    monkeypatch.setattr(widened, "BLOCK_SUMS", 200)
    generator = torch.Generator().manual_seed(rows)
    u, v = torch.randn(rows, 6, generator=generator), torch.randn(6, columns, generator=generator)
    around = torch.randn(rows, columns + 4, generator=generator).to(dtype)
    before = around.clone()
    widened.add_product(around[:, 2:-2], u, v, alpha=-0.5)
    wanted = before.double()
    wanted[:, 2:-2] -= 0.5 * (u.double() @ v.double())
    torch.testing.assert_close(around.double(), wanted, rtol=2**-8 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
    assert torch.equal(around[:, :2], before[:, :2])
    assert torch.equal(around[:, -2:], before[:, -2:])
