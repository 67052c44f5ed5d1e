"""Messages to other ranks: each request once, with its first step; requests that never run are not sent."""

from __future__ import annotations

from typing import Any

from vlora.engine.tensor_parallel import messages
from vlora.engine.tensor_parallel.coordinator import TensorParallelRunner
from vlora.engine.tensor_parallel.rank_reports import RankReports
from vlora.types import Batch, BatchItem, Mode, Request, StepResult


class RecordingCoordinator:
    """Records its orders. Its ranks live."""

    def __init__(self) -> None:
        self.orders: list[messages.Order] = []
        self.reports = RankReports()

    def send_later(self, order: messages.Order) -> None:
        self.orders.append(order)

    def run(self, batch: Batch) -> None:
        self.orders.append(messages.RunBatch(batch))


class Runner:
    def add(self, request: Request, vision_key: str | None) -> None: ...

    def release(self, request_id: str) -> None: ...

    def run(self, batch: Batch) -> StepResult:
        return StepResult(tokens={item.request_id: 7 for item in batch.items})


def batch(*request_ids: str) -> Batch:
    items = tuple(BatchItem(request_id, None, 0, 1, (0,), True) for request_id in request_ids)
    return Batch(Mode.MERGED, None, items)


def test_a_request_is_sent_once_with_its_first_step() -> None:
    coordinator: Any = RecordingCoordinator()
    runner = TensorParallelRunner(coordinator, Runner())  # type: ignore[arg-type]
    requests = {name: Request(request_id=name, prompt_ids=(1,)) for name in ("runs", "refused", "later")}
    for request in requests.values():
        runner.add(request, None)
    runner.release("refused")
    assert coordinator.orders == []
    first, second = batch("runs"), batch("later", "runs")
    runner.run(first)
    runner.run(second)
    for request_id in ("runs", "unknown", "runs"):
        runner.release(request_id)
    assert coordinator.orders == [
        messages.AddRequest(requests["runs"], None),
        messages.RunBatch(first),
        messages.SampledTokens({"runs": 7}),
        messages.AddRequest(requests["later"], None),
        messages.RunBatch(second),
        messages.SampledTokens({"later": 7, "runs": 7}),
        messages.ReleaseRequest("runs"),
    ]
    coordinator.reports.close()
