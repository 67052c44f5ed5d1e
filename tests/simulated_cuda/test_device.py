"""The simulated device fails where a GPU fails, and counts what a GPU would do."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

from tests.simulated_cuda import CUDA, Counts, DeviceMismatch, Kind, SimulatedTensor, counting, simulated_cuda
from tests.simulated_cuda.counts import HOST_WAITS


@pytest.fixture(autouse=True)
def simulation() -> Iterator[None]:
    with simulated_cuda():
        yield


def on_device(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda")


def counts_of(call: Callable[[], object]) -> Counts:
    with counting() as counts:
        call()
    return counts


def test_tensors_report_the_device_and_keep_their_values() -> None:
    made = torch.arange(6.0).to("cuda").view(2, 3)
    assert made.device == CUDA and made.is_cuda and (made + 1).device == CUDA
    made[1] *= 2  # a view shares memory
    assert made.cpu().tolist() == [[0, 1, 2], [6, 8, 10]]
    for other in (torch.zeros(2, device="cuda"), torch.tensor([1], device="cuda"), made.new_zeros(2), made.float()):
        assert isinstance(other, SimulatedTensor)
    with torch.device("cuda"):
        assert torch.tensor([1.0]).device == torch.empty(3).device == CUDA


@pytest.mark.parametrize(
    "call",
    [
        lambda x, host: x + host,
        lambda x, host: x @ host,
        lambda x, host: torch.cat([x, host]),
        lambda x, host: torch.mm(x, x, out=host),
        lambda x, host: x.index_select(0, torch.tensor([0])),
        lambda x, host: x.index_copy_(0, torch.tensor([0]), x[:1]),
        lambda x, host: x.gather(0, torch.tensor([[0, 0]])),
        lambda x, host: F.embedding(torch.tensor([0]), x),
        lambda x, host: host[torch.tensor([0], device="cuda")],
        lambda x, host: x.__setitem__(torch.tensor([0, 1]), host),
        lambda x, host: F.scaled_dot_product_attention(x[None, None], x[None, None], host[None, None]),
        lambda x, host: x.mul_(host.sum(0)),
        lambda x, host: setattr(x, "data", host),
    ],
)
def test_operands_on_two_devices_fail(call: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    with pytest.raises(DeviceMismatch):
        call(on_device(2, 2), torch.ones(2, 2))


def test_scalars_of_the_host_may_join_pointwise_operators_only() -> None:
    x = on_device(2, 2)
    assert (x * torch.tensor(2.0)).cpu().tolist() == [[2, 2], [2, 2]]
    mask = x > 0
    assert counts_of(lambda: x.__setitem__(mask, 2.0)).total(*HOST_WAITS) == 0
    with pytest.raises(DeviceMismatch):
        torch.stack([x.sum(), torch.tensor(1.0)])


def test_values_cannot_be_read_without_a_copy() -> None:
    with pytest.raises(TypeError, match="convert cuda:0"):
        on_device(2).numpy()
    with pytest.raises(TypeError, match="convert cuda:0"):
        import numpy as np

        np.asarray(on_device(2))


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda x: x.sum().item(), Kind.ITEM),
        (lambda x: float(x.sum()), Kind.ITEM),
        (lambda x: bool((x > 0).all()), Kind.ITEM),
        (lambda x: x if x[0, 0] > 0 else None, Kind.ITEM),
        (lambda x: range(x.sum().int()), Kind.ITEM),
        (lambda x: torch.equal(x, x), Kind.ITEM),
        (lambda x: x.tolist(), Kind.D2H),
        (lambda x: x.cpu(), Kind.D2H),
        (lambda x: torch.zeros(2, 2).copy_(x), Kind.D2H),
        (lambda x: torch.zeros(2, 2).copy_(x, non_blocking=True), Kind.D2H),  # to pageable memory
        (lambda x: torch.empty(2, 2, pin_memory=True).copy_(x, non_blocking=True), Kind.D2H_ASYNC),
        (lambda x: x.nonzero(), Kind.NONZERO),
        (lambda x: x.unique(), Kind.NONZERO),
        (lambda x: x[x > 0], Kind.BOOLEAN_INDEX),
        (lambda x: x.__setitem__(x > 0, x[0, 0]), Kind.BOOLEAN_INDEX),
        (lambda x: torch.zeros(2).to("cuda"), Kind.H2D_BLOCKING),
        (lambda x: torch.zeros(2).to(x.device, non_blocking=True), Kind.H2D_BLOCKING),  # pageable memory
        (lambda x: torch.tensor([1, 2], device=x.device), Kind.H2D_BLOCKING),
        (lambda x: x.copy_(torch.zeros(2, 2)), Kind.H2D_BLOCKING),
        (lambda x: x[[0, 1]], Kind.H2D_BLOCKING),
        (lambda x: torch.zeros(2).pin_memory().to("cuda", non_blocking=True), Kind.H2D_ASYNC),
        (lambda x: x.copy_(torch.empty(2, 2, pin_memory=True).zero_(), non_blocking=True), Kind.H2D_ASYNC),
        (lambda x: torch.cuda.synchronize(), Kind.SYNCHRONIZE),
        (lambda x: torch.cuda.current_stream().record_event().synchronize(), Kind.SYNCHRONIZE),
    ],
)
def test_copies_and_host_waits_are_counted_with_their_call_site(
    call: Callable[[torch.Tensor], object], kind: Kind
) -> None:
    x = on_device(2, 2)
    counts = counts_of(lambda: call(x))
    assert {operation.kind for operation in counts.operations} - {Kind.LAUNCH} == {kind}
    assert counts.total(kind) == 1
    assert "tests/simulated_cuda/test_device.py:" in counts.report(kind)


@pytest.mark.parametrize("inference", [False, True])
def test_launches_are_counted_and_views_are_free(inference: bool) -> None:
    x, weight = on_device(4, 4), on_device(4, 4)

    def call() -> None:
        with torch.inference_mode(inference):
            y = F.linear(x.view(2, 2, 4), weight)  # a matrix product
            y = F.silu(y.transpose(0, 1)[0])  # one pointwise operator
            y.reshape(-1).expand(3, 8).contiguous()  # one copy
            x[x.new_zeros(2, dtype=torch.int64)] = 1.0  # zeros, then the assignment
            x.masked_fill_(x > 0, 0.0)  # the comparison, then the assignment

    counts = counts_of(call)
    names = ["_to_copy" if name == "clone" else name for name in counts.names(Kind.LAUNCH).elements()]
    assert len(names) == 7, names
    assert counts.total(*HOST_WAITS) == 0


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_attend_within_themselves(causal: bool) -> None:
    """torch's kernel for packed sequences is one launch, with operands on the device."""
    starts_q, starts_k = torch.tensor([0, 3, 4]), torch.tensor([0, 5, 8])
    q, k, v = torch.randn(4, 4, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 8)
    attend: Any = varlen.varlen_attn  # its positional arguments differ between versions of torch
    options: dict[str, Any] = {"window_size": (-1, 0) if causal else (-1, -1), "scale": 0.5}
    if "enable_gqa" in inspect.signature(attend).parameters:
        options["enable_gqa"] = True
    packed: Any = [tensor.to("cuda") for tensor in (q, k, v, starts_q.int(), starts_k.int())]
    with counting() as counts:
        out: Any = attend(*packed, 3, 5, **options)
    assert counts.total(Kind.LAUNCH) == 1 and counts.total(*HOST_WAITS) == 0 and out.device == CUDA
    scores = 0.5 * q[3, 1] @ k[5:, 0].T  # the last query attends all keys of its sequence
    torch.testing.assert_close(out.cpu()[3, 1], scores.softmax(-1) @ v[5:, 0])
    with pytest.raises(DeviceMismatch):
        attend(*packed[:3], starts_q.int(), packed[4], 3, 5, **options)


def test_ranks_exchange_tensors_of_the_device_only(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from tests.simulated_cuda.ranks import SimulatedNCCL

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    group = SimulatedNCCL(store, 0, 1, SimulatedNCCL.Options(_timeout=timedelta(seconds=60)))
    x, out = on_device(3), torch.zeros(1, 3, device="cuda")
    with counting() as counts:
        group.allreduce([x]).wait()
        group.allgather([list(out.unbind(0))], [x]).wait()
    assert counts.total(Kind.LAUNCH) == 2 and out.cpu().tolist() == [[1, 1, 1]]
    for call in (lambda: group.allreduce([torch.ones(3)]), lambda: group.allgather([[x]], [torch.ones(3)])):
        with pytest.raises(DeviceMismatch):
            call()


def test_operations_are_counted_by_stream() -> None:
    x, side = on_device(2), torch.cuda.Stream()

    def work() -> None:
        with torch.cuda.stream(side):
            x.sum().item()

    thread = threading.Thread(target=work)
    with counting() as counts:
        thread.start()
        thread.join()
        x.sum()
    assert counts.total(Kind.LAUNCH, stream="side") == counts.total(Kind.ITEM, stream="side") == 1
    assert counts.total(Kind.LAUNCH, stream="default") == 1
    assert counts.total(*HOST_WAITS, stream="default") == 0


def test_pinned_memory_must_not_change_during_a_copy() -> None:
    buffer, target = torch.zeros(4, pin_memory=True), on_device(4)
    target.copy_(buffer, non_blocking=True)
    torch.cuda.current_stream().record_event().synchronize()
    buffer.fill_(1)  # the copy is complete
    target.copy_(buffer, non_blocking=True)
    buffer.numpy()[:] = 2
    with pytest.raises(RuntimeError, match="asynchronous copy from it was pending"):
        torch.cuda.synchronize()


def test_values_are_on_the_host_after_a_wait_for_their_copy() -> None:
    x, on_host = on_device(2), torch.zeros(2, pin_memory=True)
    on_host.copy_(x.fill_(3), non_blocking=True)
    copied = torch.cuda.current_stream().record_event()
    on_host_later = torch.zeros(2, pin_memory=True).copy_(x + 1, non_blocking=True)
    assert on_host.tolist() != [3, 3]
    copied.synchronize()
    assert on_host.tolist() == [3, 3] and on_host_later.tolist() != [4, 4]
    torch.cuda.synchronize()
    assert on_host_later.tolist() == [4, 4]
