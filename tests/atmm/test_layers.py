"""Packing: the layout of a packed copy, its buffer, and rejected input."""

from __future__ import annotations

import pytest
import torch

from atmm import Factors, Lane, SegmentPlan, Site, SiteGroup
from tests.atmm.cases import check_against_reference, make_group, make_input


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_packed_copy_contains_the_factors_in_the_given_order(dtype: torch.dtype) -> None:
    group = make_group({"a": 4, "b": 3, "c": 5}, d_in=13, d_outs=(7, 9), missing=[("a", 1)], dtype=dtype)
    group.pack("cab")
    packed = group.packed
    assert packed is not None
    q, k = (site.factors for site in group.sites)
    assert torch.equal(packed.a, torch.cat([q["c"].a, q["a"].a, q["b"].a, k["c"].a, k["b"].a]))
    assert torch.equal(packed.bts[0], torch.cat([q["c"].bt, q["a"].bt, q["b"].bt]))
    assert torch.equal(packed.bts[1], torch.cat([k["c"].bt, k["b"].bt]))


def test_a_packed_copy_is_aligned_in_the_buffer() -> None:
    group = make_group({"a": 4, "b": 3}, d_in=13, d_outs=(7, 9))
    memory = torch.zeros(1 << 14, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    num_bytes = group.packed_bytes("ab")
    group.pack("ab", memory[start : start + num_bytes])
    assert group.packed is not None
    for tensor in (group.packed.a, *group.packed.bts):
        offset = tensor.data_ptr() - memory[start:].data_ptr()
        last = offset + (tensor.shape[0] - 1) * tensor.stride(0) * 4 + tensor.shape[1] * 4
        assert offset % 256 == 0
        assert tensor.stride(0) * 4 % 16 == 0
        assert 0 <= offset < last <= num_bytes
    assert (memory[start + num_bytes :] == 0).all()
    plan = SegmentPlan(4, [Lane("a", 0, 2), Lane("b", 2, 4)], "stacked")
    assert check_against_reference(group, plan, *make_input(4, group, torch.float32)) > 4


def test_packing_nothing_needs_nothing() -> None:
    group = make_group({"a": 4})
    for keys in ("", "x"):
        assert group.packed_bytes(keys) == 0
        group.pack(keys)
        assert group.packed is None


def test_unpack_removes_the_copy() -> None:
    group = make_group({"a": 4})
    group.pack("a")
    group.unpack()
    assert group.packed is None


def test_groups_packed_alike_share_one_layout() -> None:
    groups = [make_group({"a": 4, "b": 8}, seed=seed) for seed in range(3)]
    for group, keys in zip(groups, ("ab", "ab", "ba"), strict=True):
        group.pack(keys)
    first, second, third = (group.packed.layout for group in groups if group.packed)
    assert first is second
    assert first is not third


@pytest.mark.parametrize(
    ("buffer", "words"),
    (
        (torch.zeros(64, dtype=torch.uint8), "has 64 bytes"),
        (torch.zeros(1 << 14, dtype=torch.float32), "uint8"),
        (torch.zeros(128, 128, dtype=torch.uint8), "one contiguous dimension"),
        (torch.zeros(1 << 14, dtype=torch.uint8)[1:], "align"),
    ),
)
def test_buffers_that_cannot_hold_a_copy_are_refused(buffer: torch.Tensor, words: str) -> None:
    group = make_group({"a": 4})
    with pytest.raises(ValueError, match=words):
        group.pack("a", buffer)
    assert group.packed is None


def test_a_key_given_twice_is_refused() -> None:
    group = make_group({"a": 4})
    with pytest.raises(ValueError, match="duplicates"):
        group.pack("aa")


@pytest.mark.parametrize(
    ("factors", "words"),
    (
        (Factors(torch.zeros(4, 47), torch.zeros(4, 40)), r"a \(4, 47\)"),
        (Factors(torch.zeros(4, 48), torch.zeros(4, 41)), r"bt \(4, 41\)"),
        (Factors(torch.zeros(4, 48), torch.zeros(3, 40)), r"bt \(3, 40\)"),
        (Factors(torch.zeros(4, 48).half(), torch.zeros(4, 40).half()), "float16"),
        (Factors(torch.zeros(4, 48), torch.zeros(4, 40).half()), "float16"),
    ),
)
def test_factors_that_do_not_fit_the_site_are_refused(factors: Factors, words: str) -> None:
    group = make_group({"a": 4, "b": 4})
    group.sites[0].factors["b"] = factors
    with pytest.raises(ValueError, match=words):
        group.pack("ab")


def test_sites_of_a_group_read_one_tensor_and_have_one_group() -> None:
    with pytest.raises(ValueError, match="read the same tensor"):
        SiteGroup([Site("q", 8, 8), Site("k", 9, 8)])
    with pytest.raises(ValueError, match="empty"):
        SiteGroup([])
    site = Site("o", 8, 8)
    SiteGroup([site])
    with pytest.raises(ValueError, match="already belongs"):
        SiteGroup([site])
