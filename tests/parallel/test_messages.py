"""Messages to other ranks: each request once, with its first step; requests that never run are not sent."""

from __future__ import annotations

from typing import Any

from vlora.engine.tensor_parallel import messages
from vlora.engine.tensor_parallel.coordinator import LeadRunner
from vlora.types import Batch, BatchItem, Mode, Request, StepResult


class Told:
    """A team that records its messages."""

    def __init__(self) -> None:
        self.orders: list[messages.Order] = []

    def tell(self, order: messages.Order) -> None:
        self.orders.append(order)

    def run(self, batch: Batch) -> None:
        self.orders.append(messages.Run(batch))

    def check(self) -> None: ...


class Runner:
    def add(self, request: Request, vision_key: str | None) -> None: ...

    def release(self, request_id: str) -> None: ...

    def run(self, batch: Batch) -> StepResult:
        return StepResult(tokens={item.request_id: 7 for item in batch.items})


def batch(*request_ids: str) -> Batch:
    items = tuple(BatchItem(request_id, None, 0, 1, (0,), True) for request_id in request_ids)
    return Batch(Mode.MERGED, None, items)


def test_a_request_is_told_of_once_with_its_first_step_and_not_at_all_without_one() -> None:
    team: Any = Told()
    runner = LeadRunner(team, Runner())  # type: ignore[arg-type]
    requests = {name: Request(request_id=name, prompt_ids=(1,)) for name in ("runs", "refused", "later")}
    for request in requests.values():
        runner.add(request, None)
    runner.release("refused")
    assert team.orders == []
    first, second = batch("runs"), batch("later", "runs")
    runner.run(first)
    runner.run(second)
    for request_id in ("runs", "unknown", "runs"):
        runner.release(request_id)
    assert team.orders == [
        messages.Add(requests["runs"], None),
        messages.Run(first),
        messages.Sampled({"runs": 7}),
        messages.Add(requests["later"], None),
        messages.Run(second),
        messages.Sampled({"later": 7, "runs": 7}),
        messages.Release("runs"),
    ]
