"""The router's placement on a live cluster, in virtual time: waiting requests reach a replica that joins."""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.in_process import STEP_S, run_virtually
from tests.cluster.in_process_cluster import cluster_of
from tests.cluster.running import SLEEPING, outputs_of
from tests.cluster.test_cluster import asked, check
from vlora.cluster.placement import COSTS, REBALANCE_S, REPLAN_S, LivePlacement
from vlora.routing import MoveCosts, Need, Room, Router
from vlora.routing.placement import proactive
from vlora.types import Request, RequestOutput

pytestmark = pytest.mark.slow

NUM_TOKENS = 100


@pytest.mark.parametrize("moves", [True, False])
def test_a_replica_that_joins_takes_requests_that_wait_on_another(monkeypatch: pytest.MonkeyPatch, moves: bool) -> None:
    """Two batches were sent to one replica. The control moves none."""
    if not moves:
        monkeypatch.setattr(Router, "rebalance", lambda self, request_s, costs: [])

    async def main() -> None:
        async with cluster_of(monkeypatch, 2, over=4.0) as here:
            await here.cluster.remove("b")
            first = asked("first", 5)
            check(first, await outputs_of(here.cluster, first))
            requests = [asked(f"r{number}", NUM_TOKENS) for number in range(2 * SLEEPING.max_batch_size)]
            ended_s: dict[str, float] = {}
            began_s = asyncio.get_running_loop().time()

            async def ask(request: Request) -> list[RequestOutput]:
                outputs = await outputs_of(here.cluster, request)
                ended_s[request.request_id] = asyncio.get_running_loop().time() - began_s
                return outputs

            asking = [asyncio.create_task(ask(request)) for request in requests]
            await asyncio.sleep(10 * STEP_S)
            await here.add("b")
            answers = await asyncio.gather(*asking)
            done = [check(request, outputs).timings for request, outputs in zip(requests, answers, strict=True)]
            num_moves = sum(timings.num_moves for timings in done if timings is not None)
            in_first_batch = sum(at_s < 1.5 * NUM_TOKENS * STEP_S for at_s in ended_s.values())
            if moves:
                assert in_first_batch >= len(requests) - 1 and 0 < num_moves <= SLEEPING.max_batch_size
            else:
                assert in_first_batch == SLEEPING.max_batch_size and num_moves == 0

    run_virtually(main())


class Recorded(Router):
    """Notes when it plans, and what is rebalanced."""

    def __init__(self) -> None:
        super().__init__("placed", over=4.0)
        self.plans: list[float] = []
        self.costs: list[tuple[float, MoveCosts]] = []
        self.now = 0.0

    def replan(self) -> None:
        self.plans.append(self.now)
        super().replan()

    def rebalance(self, request_s: float, costs: MoveCosts, most: int = 64) -> list:  # type: ignore[type-arg]
        self.costs.append((request_s, costs))
        return super().rebalance(request_s, costs, most)


def test_homes_are_planned_at_intervals_and_after_a_change() -> None:
    router = Recorded()
    placement = LivePlacement(router, lambda: router.now, lambda request_id: None)

    def pass_time(seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            router.now = round(router.now + 0.1, 1)
            placement.tick()

    pass_time(2 * REPLAN_S + 1)
    assert router.plans == [0.1, REPLAN_S + 0.1, 2 * REPLAN_S + 0.1]
    for name in "ab":
        router.join(name, Room(2, 100))
    for number in range(40):
        router.submit(Need(f"{number}", f"x{number % 4}", 1, number))
        router.ended(f"{number}")
    placement.replicas_changed()
    pass_time(0.1)
    assert len(router.plans) == 4
    homes = {f"x{number}": set(router.rule.homes(f"x{number}")) for number in range(4)}
    planned = proactive(
        dict.fromkeys(homes, 10.0), {"a": 4, "b": 4}, {n: s.resident.keys() for n, s in router.replicas.items()}
    )
    assert homes == {adapter: {name for name, own in planned.items() if adapter in own} for adapter in homes}


def test_requests_are_moved_only_where_some_wait_needlessly() -> None:
    router = Recorded()
    moved: list[str] = []
    placement = LivePlacement(router, lambda: router.now, moved.append)
    router.join("a", Room(2, 100))
    for number in range(5):
        router.submit(Need(f"{number}", None, 1, number))
    router.now = 8.0
    placement.tick()
    for number in range(2):  # 8 s of work: 4 s for each
        router.ended(f"{number}")
        placement.ended()
    router.now += 0.1
    placement.tick()
    assert router.costs == []  # there is no other replica
    router.join("b", Room(2, 100))
    placement.replicas_changed()
    placement.tick()
    [(request_s, costs)] = router.costs
    assert request_s == pytest.approx(4.05) and costs == COSTS
    assert moved == ["4"] and router.where("4") == "b"
    router.now += REBALANCE_S
    placement.tick()
    assert len(router.costs) == 1  # each request is in a batch
