"""The arena's memory: copies within it and to it, for any timing of the GPU, and large buffers in huge pages.

The fake GPU is a queue that runs when waited for.
"""

from __future__ import annotations

import gc
import re
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlora.memory import arena as arena_module
from vlora.memory.arena import PAGE_BYTES, Arena, empty, in_huge_pages
from vlora.memory.host_to_device import HostTransfer, Inline, RingTransfer, make_transfer

CPU = torch.device("cpu")
SMAPS = Path("/proc/self/smaps")


@pytest.mark.parametrize(("first", "target", "size"), [(2, 0, 5), (0, 3, 5), (1, 2, 4), (4, 4, 3), (0, 6, 4)])
def test_the_arena_copies_over_itself(first: int, target: int, size: int) -> None:
    arena = Arena(10, CPU)
    arena.bytes.copy_(torch.arange(10 * PAGE_BYTES, dtype=torch.int64).remainder(251).to(torch.uint8))
    wanted = arena.buffer(first, size).clone()
    outside = arena.bytes.clone()
    arena.copy(first, target, size)
    assert torch.equal(arena.buffer(target, size), wanted)
    outside[target * PAGE_BYTES : (target + size) * PAGE_BYTES] = wanted
    assert torch.equal(arena.bytes, outside), "pages outside the target were modified"
    assert arena.num_copied == (size if first != target else 0)


class LazyStream:
    """A stream that delays all work: every copy reads its source as late as the caller allows."""

    def __init__(self) -> None:
        self.queue: deque[tuple[int, Callable[[], object]]] = deque()
        self.caller: list[str] = []
        self.log: list[str] = []
        self._number = 0

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def mark_caller(self) -> int:
        return len(self.caller)

    def wait(self, mark: int) -> None:
        self.log += self.caller[:mark]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> LazyEvent:
        self._number += 1
        self.queue.append((self._number, lambda: target.copy_(source)))
        self.log.append("copy")
        return LazyEvent(self, self._number)

    def run_until(self, number: int) -> None:
        while self.queue and self.queue[0][0] <= number:
            self.queue.popleft()[1]()

    def synchronize(self) -> None:
        self.run_until(self._number)


class LazyEvent:
    def __init__(self, stream: LazyStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def synchronize(self) -> None:
        self._stream.run_until(self._number)


@pytest.mark.slow
@given(num_bytes=st.integers(1, 700), slot_bytes=st.integers(1, 256), num_slots=st.integers(1, 4))
def test_a_ring_of_any_size_copies_every_byte(num_bytes: int, slot_bytes: int, num_slots: int) -> None:
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    stream = LazyStream()
    stream.caller.append("the step before")
    ring = RingTransfer(Inline(), stream, slot_bytes, num_slots)  # type: ignore[arg-type]
    ring.start(source, target).result()
    assert torch.equal(target, source), "a finished transfer is complete"
    assert stream.log[0] == "the step before", "pages must not be written while earlier kernels may read them"
    assert stream.log.count("copy") == -(-num_bytes // slot_bytes)
    # The slots of the previous adapter are free again, whatever their content.
    other = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    ring.start(other, target).result()
    assert torch.equal(target, other)


def test_a_ring_slot_reused_too_early_is_detected() -> None:
    """Negative control: the lazy stream detects a ring that reuses its slots too early."""

    class Careless(LazyStream):
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> LazyEvent:
            super().copy(target, source)
            return LazyEvent(self, 0)

    source, target = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    RingTransfer(Inline(), Careless(), slot_bytes=2, num_slots=2).start(source, target).result()  # type: ignore[arg-type]
    assert not torch.equal(target, source)


def test_in_host_memory_a_thread_copies() -> None:
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    transfer = make_transfer(torch.device("cpu"))
    assert isinstance(transfer, HostTransfer)
    transfer.start(source, target).result(timeout=10)
    assert torch.equal(target, source)
    transfer.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        transfer.start(source, target)


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.uint8, (7, 3, 2**19)), (torch.bfloat16, (3, 5)), (torch.float32, (7, 3, 2**19))]
)
def test_memory_in_huge_pages_behaves_like_any_other(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = empty(shape, dtype, CPU)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    tensor.fill_(3)
    tensor[0, 0] = 4
    assert tensor.sum(dtype=torch.float64) == 3 * tensor.numel() + tensor[0, 0].numel()


def test_a_tensor_is_copied_only_where_huge_pages_help() -> None:
    large, small = torch.arange(2.0**20), torch.arange(3.0)
    copy = in_huge_pages(large)
    assert torch.equal(copy, large) and copy.data_ptr() != large.data_ptr() and copy.data_ptr() % 2**21 == 0
    assert in_huge_pages(small) is small and empty([2**23 + 5], torch.uint8, CPU).data_ptr() % 2**21 == 0


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
    monkeypatch.setattr(arena_module, "ADVICE", 9999)  # invalid advice: madvise fails
    assert empty([2**22], torch.uint8, CPU).fill_(1).sum() == 2**22
    monkeypatch.setattr(arena_module, "ADVICE", None)
    assert empty([2**22], torch.uint8, CPU).fill_(1).sum() == 2**22


def mapping_of(address: int) -> str | None:
    """The system's description of the mapping that contains an address; None if nothing is mapped there."""
    for entry in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text(), flags=re.MULTILINE):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", entry)
        if bounds and int(bounds.group(1), 16) <= address < int(bounds.group(2), 16):
            return entry
    return None
