"""The call of torch's flash kernel, replaced by its CPU implementation in float64."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import atmm
from atmm import flash_attention
from tests.atmm.flash_oracle import VERSIONS

CPU = torch.device("cpu")


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(flash_attention, "kernel", lambda: VERSIONS[request.param])
    return request.param


def starts_of(counts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize(("heads", "kv_heads"), ((4, 4), (14, 2), (3, 1)))
def test_sequences_attend_as_scaled_dot_product_attention(heads: int, kv_heads: int, causal: bool) -> None:
    num_q, num_k, dim = (1, 7, 5), (9, 7, 12), 16
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(heads, sum(num_q), dim, generator=generator).transpose(0, 1)  # as transformers has it
    k, v = (torch.randn(sum(num_k), kv_heads, dim, generator=generator) for _ in range(2))
    found = atmm.flash(q, k, v, starts_of(num_q), starts_of(num_k), 7, 12, causal=causal, scale=0.3)
    parts = zip(found.split(num_q), q.split(num_q), k.split(num_k), v.split(num_k), strict=True)
    for own, queries, keys, values in parts:
        mask = torch.ones(len(queries), len(keys), dtype=torch.bool)
        if causal:
            mask = mask.tril(len(keys) - len(queries))  # the last query attends all keys
        one, two, three = (side.transpose(0, 1)[None] for side in (queries, keys, values))
        wanted = F.scaled_dot_product_attention(one, two, three, attn_mask=mask, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(own, wanted[0].transpose(0, 1))


def test_the_installed_torch_accepts_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = inspect.signature(flash_attention.kernel())
    called: list[inspect.BoundArguments] = []

    def bind(*given: Any, **named: Any) -> torch.Tensor:
        called.append(signature.bind(*given, **named))
        return given[0]

    bind.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr(flash_attention, "kernel", lambda: bind)
    q, k, starts = torch.zeros(3, 4, 16), torch.zeros(3, 2, 16), starts_of((3,))
    atmm.flash(q, k, k + 1, starts, starts + 1, 3, 4, causal=True, scale=0.3)
    (bound,) = called
    found = {name: value for name, value in bound.arguments.items() if not isinstance(value, torch.Tensor)}
    grouped = {"enable_gqa": True} if "enable_gqa" in signature.parameters else {}
    assert found == {"max_q": 3, "max_k": 4, "scale": 0.3, "window_size": (-1, 0), **grouped}
    tensors = [name for name in bound.arguments if name not in found]
    assert tensors == ["query", "key", "value", "cu_seq_q", "cu_seq_k"]
    assert bound.arguments["cu_seq_k"][0] == 1 and bound.arguments["value"].all()


def test_the_oracle_has_the_signature_of_the_installed_torch() -> None:
    installed = inspect.signature(flash_attention.kernel()).parameters
    same = [v for v, oracle in VERSIONS.items() if list(inspect.signature(oracle).parameters) == list(installed)]
    release = ".".join(torch.__version__.split(".")[:2])
    assert same == [release] or release not in VERSIONS


def test_types_sizes_and_devices_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda:0")
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for dim in (64, 72, 80, 128, 256):
        assert atmm.serves_flash(cuda, torch.bfloat16, dim) and atmm.serves_flash(cuda, torch.float16, dim)
    assert not atmm.serves_flash(CPU, torch.bfloat16, 64)
    assert not atmm.serves_flash(cuda, torch.float32, 64)
    assert not atmm.serves_flash(cuda, torch.bfloat16, 20) and not atmm.serves_flash(cuda, torch.bfloat16, 264)
    capability = (7, 5)
    assert not atmm.serves_flash(cuda, torch.bfloat16, 64)
