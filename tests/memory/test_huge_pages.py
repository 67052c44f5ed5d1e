"""Large buffers: ordinary tensors, in huge pages where the system provides them."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import pytest
import torch

from vlora.memory import huge_pages
from vlora.memory.huge_pages import empty, in_huge_pages

CPU = torch.device("cpu")
SMAPS = Path("/proc/self/smaps")


@pytest.mark.parametrize("dtype", (torch.uint8, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("shape", ((3, 5), (7, 3, 2**19)))
def test_memory_in_huge_pages_behaves_like_any_other(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = empty(shape, dtype, CPU)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    tensor.fill_(3)
    tensor[0, 0] = 4
    assert tensor.sum(dtype=torch.float64) == 3 * tensor.numel() + tensor[0, 0].numel()


def test_a_large_buffer_starts_at_a_huge_page() -> None:
    assert empty([2**23 + 5], torch.uint8, CPU).data_ptr() % 2**21 == 0


def test_a_tensor_is_copied_only_where_huge_pages_help() -> None:
    large, small = torch.arange(2.0**20), torch.arange(3.0)
    copy = in_huge_pages(large)
    assert torch.equal(copy, large) and copy.data_ptr() != large.data_ptr() and copy.data_ptr() % 2**21 == 0
    assert in_huge_pages(small) is small


@pytest.mark.slow
def test_memory_is_freed_with_the_last_view() -> None:
    tensor = empty([2**24], torch.uint8, CPU)
    address = tensor.data_ptr()
    view = tensor[-3:].fill_(7)
    del tensor
    gc.collect()
    assert view.tolist() == [7, 7, 7]
    if SMAPS.exists():
        assert mapping_of(address) is not None
        del view
        gc.collect()
        assert mapping_of(address) is None


@pytest.mark.skipif(sys.platform != "linux", reason="Linux reports the requested advice")
def test_huge_pages_are_requested() -> None:
    tensor = empty([2**24], torch.uint8, CPU)
    mapping = mapping_of(tensor.data_ptr())
    assert mapping is not None
    flags = re.search(r"VmFlags: (.*)", mapping)
    assert flags is not None and "hg" in flags.group(1).split()


def test_allocation_works_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "ADVICE", 9999)  # invalid advice: madvise fails
    assert empty([2**22], torch.uint8, CPU).fill_(1).sum() == 2**22
    monkeypatch.setattr(huge_pages, "ADVICE", None)
    assert empty([2**22], torch.uint8, CPU).fill_(1).sum() == 2**22


def mapping_of(address: int) -> str | None:
    """The system's description of the mapping that contains an address; None if nothing is mapped there."""
    for entry in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text(), flags=re.MULTILINE):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", entry)
        if bounds and int(bounds.group(1), 16) <= address < int(bounds.group(2), 16):
            return entry
    return None
