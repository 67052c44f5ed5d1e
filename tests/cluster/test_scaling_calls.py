"""Calls of `LocalCluster.scale` at once, in virtual time, with replicas in this process and no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.cluster.in_process import LocalReplica, connecting, run_virtually
from tests.cluster.running import SLEEPING, outputs_of
from tests.cluster.sleeping_engine import STEP_VARIABLE
from tests.cluster.test_cluster import asked, check
from vlora.cluster import members
from vlora.cluster.door import Address
from vlora.cluster.on_ray.cluster import LocalCluster
from vlora.cluster.on_ray.settings import Folder
from vlora.routing.scaling import ScalingSettings
from vlora.types.replicas import DRAINING, SERVING


class NoRay:
    """Starts no replica."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def scale(self, number: int) -> None:
        self.numbers.append(number)

    async def close(self) -> None:
        pass


@asynccontextmanager
async def two_of_three(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Two replicas, and a third one that `join` starts."""
    monkeypatch.setenv(STEP_VARIABLE, "0")
    replicas = {place: LocalReplica() for place in range(3)}
    monkeypatch.setattr(members, "connect", connecting(replicas))
    scaling = ScalingSettings(1, 3, 2.0, 60.0)
    cluster: Any = LocalCluster(SLEEPING, "placed", Folder.create(), None, 60.0, 2, scaling, False, None, None)
    cluster.ray = NoRay()
    try:
        for place in range(2):
            await join(cluster, place)
        yield cluster
    finally:
        await cluster.close()
        for replica in replicas.values():
            replica.kill()


async def join(cluster: LocalCluster, place: int) -> None:
    await cluster.add(f"replica-{place}", Address("127.0.0.1", place))


def states(cluster: LocalCluster) -> list[str]:
    return [each.state for each in cluster.status().replicas]


async def busy(cluster: LocalCluster) -> list[asyncio.Task[Any]]:
    """Requests of some seconds, as many as both replicas take."""
    asking = [asyncio.create_task(outputs_of(cluster, asked(f"r{number}", 300))) for number in range(24)]
    await asyncio.sleep(0.1)
    return asking


async def answered(asking: list[asyncio.Task[Any]]) -> None:
    for number, outputs in enumerate(await asyncio.gather(*asking)):
        check(asked(f"r{number}", 300), outputs)


def test_a_later_call_does_not_wait_for_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with two_of_three(monkeypatch) as cluster:
            now = asyncio.get_running_loop().time
            began_s = now()
            adding = asyncio.create_task(cluster.scale(3, 30.0))  # the third one does not join
            await asyncio.sleep(1)
            assert await cluster.scale(2, 5.0) and now() - began_s < 2
            assert not await adding and now() - began_s < 2
            assert cluster.number == 2 and cluster.ray.numbers == [3, 2] and states(cluster) == [SERVING] * 2

    run_virtually(main())


def test_a_drain_is_ended_by_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with two_of_three(monkeypatch) as cluster:
            asking = await busy(cluster)
            removing = asyncio.create_task(cluster.scale(1, 30.0))
            await asyncio.sleep(0.5)
            assert states(cluster) == [SERVING, DRAINING]
            began_s = asyncio.get_running_loop().time()
            assert await cluster.scale(2, 5.0) and not await removing
            assert asyncio.get_running_loop().time() - began_s < 1
            assert states(cluster) == [SERVING] * 2 and set(cluster.ray.numbers) == {2}
            await answered(asking)

    run_virtually(main())


def test_automatic_scaling_stays_on_after_an_earlier_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with two_of_three(monkeypatch) as cluster:
            first, second = (asyncio.create_task(cluster.scale(3, 30.0)) for _ in range(2))
            await asyncio.sleep(1)
            assert await cluster.scale("auto", 0.0)
            assert not await first and not await second
            assert cluster.status().scaling.automatic and not cluster.in_operation

    run_virtually(main())


def test_a_replica_that_is_replaced_while_it_is_kept_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no line in between, and a call finds none."""

    async def main() -> None:
        async with two_of_three(monkeypatch) as cluster:
            asking = await busy(cluster)
            assert not await cluster.scale(1, 0.5)
            replacing = asyncio.create_task(cluster.replace("replica-1", Address("127.0.0.1", 2)))
            await asyncio.sleep(0)
            assert "replica-1" not in cluster.members
            assert await cluster.scale(2, 5.0)
            await replacing
            assert states(cluster) == [SERVING] * 2
            await answered(asking)

    run_virtually(main())


def test_a_replica_that_ends_without_a_line_serves_when_it_is_added_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with two_of_three(monkeypatch) as cluster:
            assert await cluster.drain("replica-1", 1.0)
            with pytest.raises(KeyError):
                await cluster.replace("replica-1", Address("127.0.0.1", 9))
            assert states(cluster) == [SERVING]
            assert await cluster.scale(1, 5.0)
            adding = asyncio.create_task(cluster.scale(2, 5.0))
            await asyncio.sleep(0.1)
            await join(cluster, 1)
            assert await adding and states(cluster) == [SERVING] * 2

    run_virtually(main())
