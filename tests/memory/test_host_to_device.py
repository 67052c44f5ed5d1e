"""Transfers are complete and ordered for any timing of the GPU; the fake GPU is a queue that runs when waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlora.memory.host_to_device import HostTransfer, Inline, make_transfer
from vlora.memory.ring_transfer import RingTransfer


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
    ring = RingTransfer(Inline(), stream, slot_bytes, num_slots)
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
    RingTransfer(Inline(), Careless(), slot_bytes=2, num_slots=2).start(source, target).result()
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
