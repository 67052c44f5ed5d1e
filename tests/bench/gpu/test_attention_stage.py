"""The attention stage's batches: their exact results, and that the stage detects wrong ones."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from vlora.bench.gpu import paged_batch
from vlora.bench.gpu.context import Context
from vlora.bench.gpu.paged_batch import Chunk, Heads, PagedBatch
from vlora.bench.gpu.stages import attention

HEADS = Heads(4, 2, 16)
CPU = torch.device("cpu")


def test_exact_results_are_those_of_torch_over_contiguous_kv() -> None:
    batch = PagedBatch([Chunk(20, 7), Chunk(0, 5), Chunk(40, 1)], HEADS, 2, torch.float32, CPU)
    found = batch.attend(1)
    first = 0
    for index, chunk in enumerate(batch.chunks):
        stop = first + chunk.num_tokens
        k, v = (each.transpose(0, 1)[None].double() for each in batch.context_of(index, 1))
        # The newest tokens of the context are the batch's own.
        assert torch.equal(k[0, :, chunk.start :].float(), batch.k[0, :, first:stop])
        mask = torch.ones(chunk.num_tokens, chunk.start + chunk.num_tokens).tril(chunk.start).bool()
        q = batch.q[:, :, first:stop].double()
        right = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(batch.exact(index, 1), right, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[first:stop].double(), right, rtol=1e-5, atol=1e-5)
        first = stop


def test_requests_share_no_row_and_layers_share_no_kv() -> None:
    batch = PagedBatch([Chunk(33, 1), Chunk(16, 1), Chunk(0, 3)], HEADS, 2, torch.float32, CPU)
    rows = torch.cat(batch.contexts)
    assert len(rows.unique()) == len(rows) == 48 + 32 + 16  # whole blocks
    before = batch.matrix.clone()
    batch.attend(0)
    changed = (batch.matrix != before).any(1).nonzero().flatten()
    assert len(changed) == 2 * 5  # K and V of one layer


def test_a_wrong_result_fails_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = paged_batch.paged_attention

    def shifted(*args: object, **kwargs: object) -> tuple[torch.Tensor, None]:
        out, _ = plain(*args, **kwargs)  # type: ignore[arg-type]
        return out * 1.001, None

    monkeypatch.setattr(paged_batch, "paged_attention", shifted)
    with pytest.raises(ValueError, match=r"attention, decode in torch.float32: relative error 1.0e-03 against float64"):
        attention.run(Context(CPU, tmp_path, time.monotonic() + 60, lambda result: None))
