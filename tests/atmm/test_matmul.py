"""Products of linear layers: every method against float64, for all widths, numbers of rows, and several layers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from atmm import matmul, processor
from atmm.cpu import library
from atmm.cpu.products import Weights, multiplies, product
from tests.example_counts import scaled

TYPES = (torch.bfloat16, torch.float32)
needs_kernels = pytest.mark.skipif(library() is None, reason="no C++ compiler here")


def layers_of(
    d_in: int, widths: list[int], dtype: torch.dtype, *, bias: bool, pitch: int = 0, seed: int = 0
) -> list[Weights]:
    """Random weights [d_out, d_in], with `pitch` elements between the rows."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for width in widths:
        weight = torch.randn(width, d_in + pitch, generator=generator).to(dtype)[:, :d_in]
        found.append(Weights(weight, torch.randn(width, generator=generator).to(dtype) if bias else None))
    return found


def expected(x: Tensor, layers: list[Weights]) -> Tensor:
    parts = [nn.functional.linear(x.double(), w.double(), None if b is None else b.double()) for w, b in layers]
    return torch.cat(parts, 1)


def assert_near(found: Tensor, right: Tensor) -> None:
    """Assert an error within the rounding of the result and of float32 sums."""
    error = 1e-5 + 2**-8 * right.abs() if found.dtype is torch.bfloat16 else 1e-5 + 1e-5 * right.abs()
    worst = ((found.double() - right).abs() - error * (1 + right.shape[1] ** 0.5)).max()
    assert found.shape == right.shape and worst <= 0, f"error exceeds rounding by {worst}"


@needs_kernels
@settings(max_examples=scaled(60))
@given(
    num_rows=st.integers(1, 37),
    d_in=st.integers(1, 200),
    widths=st.lists(st.integers(1, 130), min_size=1, max_size=3),
    dtype=st.sampled_from(TYPES),
    bias=st.booleans(),
    pitch=st.sampled_from((0, 3, 64)),
    transposed=st.booleans(),
)
def test_kernels_multiply_any_shape(
    num_rows: int, d_in: int, widths: list[int], dtype: torch.dtype, bias: bool, pitch: int, transposed: bool
) -> None:
    layers = layers_of(d_in, widths, dtype, bias=bias, pitch=pitch)
    x = torch.randn(num_rows, d_in, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = x.t().contiguous().t() if transposed else x
    assert all(multiplies(weight) for weight, _ in layers)
    assert_near(product(x, layers), expected(x, layers))


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    layers = layers_of(77, [50, 3], dtype, bias=True)
    x = torch.randn(19, 77).to(dtype)
    together = product(x, layers)
    for start, stop in ((0, 1), (3, 5), (4, 7), (2, 10), (0, 18)):
        assert torch.equal(product(x[start:stop], layers), together[start:stop])


@needs_kernels
def test_values_that_are_not_finite_stay_in_their_row() -> None:
    layers = layers_of(40, [24], torch.bfloat16, bias=False)
    x = torch.randn(6, 40).bfloat16()
    x[2, 39] = float("nan")
    x[4, 0] = float("inf")
    found = product(x, layers)
    assert found[2].isnan().all() and not found[4].isfinite().any()
    assert found[[0, 1, 3, 5]].isfinite().all()


@pytest.mark.parametrize("kernels", (True, False), ids=("compiled", "plain"))
@pytest.mark.parametrize("emulated", (True, False), ids=("no bfloat16", "bfloat16"))
@pytest.mark.parametrize("tiles", (True, False), ids=("tiles", "no tiles"))
@pytest.mark.parametrize("dtype", (*TYPES, torch.float16), ids=str)
def test_every_choice_gives_the_product(
    dtype: torch.dtype, tiles: bool, emulated: bool, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "flags", lambda: frozenset(["amx_bf16"] if tiles else []))
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: not emulated)
    monkeypatch.setattr(matmul, "BLOCK", 100)  # several blocks per weight
    if not kernels:
        monkeypatch.setattr(matmul, "multiplies", lambda weight: False)
    chosen = set()
    for bias in (False, True):
        layers = [nn.Linear(30, d_out, bias=bias, dtype=dtype) for d_out in (11, 4)]
        weights = [Weights(layer.weight, layer.bias) for layer in layers]
        for num_rows in (1, 2, 7, 50, 140):
            x = torch.randn(num_rows, 30).to(dtype)
            with torch.inference_mode():
                chosen.add(matmul.choose(num_rows, layers[0].weight))
                found = matmul.linears(x, layers)
                alone = matmul.linear(x[:, None], *weights[1])[:, 0]
            if dtype is torch.float16:
                torch.testing.assert_close(found.double(), expected(x, weights), rtol=1e-2, atol=1e-2)
            else:
                assert_near(found, expected(x, weights))
                assert_near(alone, expected(x, weights[1:]))
    if dtype is torch.float16:
        assert chosen == {"library"}
    if dtype is torch.bfloat16 and emulated:
        assert "float32" in chosen and ("left" in chosen) == tiles


def test_an_empty_batch_has_an_empty_product() -> None:
    with torch.inference_mode():
        layer = nn.Linear(5, 3)
        assert matmul.linear(torch.empty(0, 5), layer.weight, layer.bias).shape == (0, 3)


@pytest.mark.parametrize("fast", (True, False))
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_gradient_of_an_input_is_added(dtype: torch.dtype, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: fast)
    monkeypatch.setattr(matmul, "BLOCK", 100)  # several blocks per weight
    for num_rows in (0, 1, 60):
        dx, g, weight = (torch.randn(shape).to(dtype) for shape in ((num_rows, 30), (num_rows, 17), (17, 30)))
        wanted = dx.double() + g.double() @ weight.double()
        unset = torch.full_like(dx, torch.nan)
        matmul.add_input_gradient(unset, g, weight, beta=0)
        matmul.add_input_gradient(dx, g, weight)
        for found, expected_sum in ((dx, wanted), (unset, g.double() @ weight.double())):
            torch.testing.assert_close(found.double(), expected_sum, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_autograd_follows_the_product() -> None:
    layer = nn.Linear(5, 3)
    x = torch.randn(2, 5, requires_grad=True)
    matmul.linear(x, layer.weight, layer.bias).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(2, 5))


@pytest.mark.parametrize(
    ("flags", "vendor", "supported", "fast"),
    (
        ({"avx512_bf16"}, "AuthenticAMD", True, True),
        ({"avx512_bf16"}, "GenuineIntel", True, False),
        ({"avx512_bf16", "amx_bf16"}, "GenuineIntel", True, True),
        ({"avx2"}, "AuthenticAMD", False, False),
        (set(), "", True, True),
    ),
)
def test_bfloat16_products_count_as_fast_by_processor(
    flags: set[str], vendor: str, supported: bool, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "flags", lambda: frozenset(flags))
    monkeypatch.setattr(processor, "vendor", lambda: vendor)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported, raising=False)
    processor.multiplies_bfloat16.cache_clear()
    try:
        assert processor.multiplies_bfloat16() is fast
    finally:
        processor.multiplies_bfloat16.cache_clear()
