"""Replicas that are lost, or no longer wanted, in the moment in which they join or leave; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cluster.in_process import LocalReplica, connecting, run_virtually
from tests.cluster.running import QUICK, SECRET, outputs_of
from tests.cluster.sleeping_engine import STEP_VARIABLE
from tests.cluster.test_cluster import asked, check
from vlora.cluster import members
from vlora.cluster.adapters import ReplicatedAdapters
from vlora.cluster.cluster import Cluster
from vlora.cluster.door import Address
from vlora.cluster.placement import LivePlacement
from vlora.routing import Router


def at(port: int) -> Address:
    return Address("127.0.0.1", port)


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> dict[int, LocalReplica]:
    """By port."""
    found: dict[int, LocalReplica] = {}
    monkeypatch.setenv(STEP_VARIABLE, "0")
    monkeypatch.setattr(members, "connect", connecting(found))
    return found


async def close(cluster: Cluster, replicas: dict[int, LocalReplica]) -> None:
    await cluster.close()
    for replica in replicas.values():
        replica.kill()


def test_a_replica_that_dies_while_it_joins_stays_a_member(
    replicas: dict[int, LocalReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    joins = ReplicatedAdapters.join

    async def dies(self: ReplicatedAdapters, name: str, engine: Any, present: Callable[[], bool]) -> None:
        await joins(self, name, engine, present)
        if replicas[0].alive:
            replicas[0].kill()
            await engine.wait_dead()

    monkeypatch.setattr(ReplicatedAdapters, "join", dies)

    async def main() -> None:
        replicas[0] = LocalReplica()
        cluster = Cluster(Router(), SECRET, health=QUICK)
        await cluster.add("a", at(0))
        assert list(cluster.members) == ["a"] and not cluster.status().num_waiting
        monkeypatch.undo()
        monkeypatch.setenv(STEP_VARIABLE, "0")
        monkeypatch.setattr(members, "connect", connecting(replicas))
        replicas[0].start()
        check(asked("r", 5), await outputs_of(cluster, asked("r", 5)))
        await close(cluster, replicas)

    run_virtually(main())


def test_adding_that_is_cancelled_leaves_no_replica(replicas: dict[int, LocalReplica]) -> None:
    class Cancelled(Cluster):
        def _joined(self, member: Any) -> None:
            super()._joined(member)
            adding.cancel()

    adding: asyncio.Task[None]

    async def main() -> None:
        nonlocal adding
        replicas[0] = LocalReplica()
        router = Router()
        cluster = Cancelled(router, SECRET, health=QUICK)
        adding = asyncio.create_task(cluster.add("a", at(0)))
        await asyncio.wait({adding})
        assert adding.cancelled()
        await asyncio.sleep(5)
        assert not cluster.members and not router.replicas
        await close(cluster, replicas)

    run_virtually(main())


def test_replacing_that_is_cancelled_loses_no_request(replicas: dict[int, LocalReplica]) -> None:
    async def main() -> None:
        replicas.update({port: LocalReplica() for port in range(3)})
        router = Router("round_robin")
        cluster = Cluster(router, SECRET, health=QUICK)
        for port, name in enumerate("ab"):
            await cluster.add(name, at(port))
        requests = [asked(f"r{number}", 50) for number in range(4)]
        asking = [asyncio.create_task(outputs_of(cluster, request)) for request in requests]
        await asyncio.sleep(0.1)
        replacing = asyncio.create_task(cluster.replace("a", at(2)))
        await asyncio.sleep(0)
        assert list(cluster.members) == ["b"] and not replacing.done()
        replacing.cancel()
        for request, outputs in zip(requests, await asyncio.wait_for(asyncio.gather(*asking), 60), strict=True):
            check(request, outputs)
        assert list(router.replicas) == ["b"]
        await cluster.add("a", at(2))
        assert sorted(router.replicas) == ["a", "b"]
        await close(cluster, replicas)

    run_virtually(main())


def test_a_failed_round_ends_neither_deadlines_nor_later_rounds(
    replicas: dict[int, LocalReplica], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: LivePlacement) -> None:
        monkeypatch.setattr(LivePlacement, "tick", lambda _: None)
        raise RuntimeError("no plan")

    async def main() -> None:
        replicas[0] = LocalReplica()
        cluster = Cluster(Router(), SECRET, health=QUICK)
        await cluster.add("a", at(0))
        monkeypatch.setattr(LivePlacement, "tick", fails)
        await asyncio.sleep(1)
        await cluster.remove("a")
        late = replace(asked("late", 5), max_ttft_s=0.5)  # it waits for a replica
        outputs = await asyncio.wait_for(outputs_of(cluster, late), 5)
        assert outputs[-1].error is not None and outputs[-1].error.code == "deadline_unreachable"
        await close(cluster, replicas)

    run_virtually(main())
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        "a round of the cluster failed; the next one follows"
    ]
