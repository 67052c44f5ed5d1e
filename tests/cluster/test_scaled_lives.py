"""Replicas are added and released under load, in virtual time: nothing lost, doubled or changed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from tests.cluster.in_process import LocalReplica, connecting, run_virtually
from tests.cluster.running import QUICK, SECRET, outputs_of
from tests.cluster.sleeping_engine import STEP_VARIABLE
from tests.cluster.test_cluster import asked, check
from vlora.cluster import members
from vlora.cluster.autoscaler import Autoscaler
from vlora.cluster.cluster import Cluster
from vlora.cluster.door import Address
from vlora.cluster.members import clients
from vlora.routing import Advice, Router
from vlora.routing.scaling import ScalingSettings
from vlora.types.replicas import SERVING

START_S = 5.0
SETTINGS = ScalingSettings(1, 3, up_after_s=2.0, down_after_s=10.0)


class ScaledCluster(Cluster):
    """Of in-process replicas, each of which serves `START_S` after its start."""

    def __init__(self, replicas: dict[int, LocalReplica], rule: str) -> None:
        super().__init__(Router(rule), SECRET, health=QUICK)
        self.number = 1
        self.in_operation = False
        self.stuck = False  # a draining replica has a request that stays
        self.history: list[int] = []
        self.replicas = replicas
        self._starts: dict[int, asyncio.Task[None]] = {}

    def absent(self) -> Mapping[int, str]:
        return {place: "" for place in range(self.number) if str(place) not in clients(self.members)}

    def serves(self, number: int) -> bool:
        states = {each.name: each.state for each in self.status().replicas}
        return all(states.get(str(place)) == SERVING for place in range(number))

    def advice(self) -> Advice:
        return self._router.advice()

    def longest_wait_s(self) -> float:
        return self._flights.longest_wait_s

    async def advance(self, number: int) -> bool:
        self.number = number
        self.history.append(number)
        for place in range(3):
            name = str(place)
            if place < number and place not in self.replicas:
                self.replicas[place] = LocalReplica()
                self._starts[place] = asyncio.create_task(self._start(place))
            elif place < number and name in self._drained:
                self.resume(name)
            elif place >= number and name in self.members:
                if not await self.drain(name, 0) or self.stuck:
                    return False
                await self.remove(name)
                self.replicas.pop(place).kill()
        return True

    async def _start(self, place: int) -> None:
        await asyncio.sleep(START_S)
        await self.add(str(place), Address("127.0.0.1", place))


class Run:
    """A cluster of one to three replicas."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
        replicas = {0: LocalReplica()}
        monkeypatch.setattr(members, "connect", connecting(replicas))
        self.cluster = ScaledCluster(replicas, rule)
        self.scaler = Autoscaler(self.cluster, SETTINGS, asyncio.get_running_loop().time, automatic=True)
        self.asked: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Run:
        await self.cluster.add("0", Address("127.0.0.1", 0))
        self.running = asyncio.create_task(self.scaler.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        await self.cluster.close()
        for replica in self.cluster.replicas.values():
            replica.kill()

    async def load(self, seconds: float, per_s: float, num_tokens: int = 100) -> None:
        """Ask at a rate; a request takes 2 s and a replica 8 of them at a time."""
        for _ in range(int(seconds * per_s)):
            request = asked(f"r{len(self.asked)}", num_tokens)
            self.asked.append(asyncio.create_task(outputs_of(self.cluster, request)))
            await asyncio.sleep(1 / per_s)

    async def check(self) -> None:
        for number, found in enumerate(await asyncio.gather(*self.asked)):
            timings = check(asked(f"r{number}", 100), found).timings
            assert timings is not None and timings.num_deaths == 0
        assert self.cluster.status().num_deaths == 0


def changes(numbers: list[int]) -> list[int]:
    return [number for place, number in enumerate(numbers) if not place or numbers[place - 1] != number]


@pytest.mark.parametrize("rule", ["placed", "punica"])
def test_replicas_follow_the_load_and_lose_nothing(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEP_VARIABLE, "0")

    async def main() -> None:
        async with Run(monkeypatch, rule) as run:
            await run.load(10, 1)
            assert run.cluster.number == 1
            await run.load(40, 9)
            assert run.cluster.number == 3
            joined = [replica.state for replica in run.cluster.status().replicas]
            assert joined == [SERVING] * 3
            status = run.scaler.status
            assert status.decisions["waiting"] + status.decisions["busy"] >= 1
            assert status.decision.startswith("3 instead of ")
            await run.load(60, 1)  # while answers go on, replicas are drained
            assert run.cluster.number == 1 and len(run.cluster.replicas) == 1
            status = run.scaler.status
            assert status.decision.startswith("1 instead of 2: the others had room for all requests for 1")
            assert status.decisions["light"] == 2
            await run.check()
            numbers = changes(run.cluster.history)
            assert numbers in ([2, 3, 2, 1], [3, 2, 1]), numbers

    run_virtually(main())


def test_a_load_that_returns_keeps_a_replica_that_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEP_VARIABLE, "0")

    async def main() -> None:
        async with Run(monkeypatch, "placed") as run:
            await run.load(20, 9)
            assert run.cluster.number >= 2
            drained, run.cluster.stuck = run.cluster.replicas[1], True
            await run.load(40, 1)
            assert run.cluster.number == 1 and not run.cluster.serves(2)
            await run.load(20, 9)
            assert run.cluster.replicas[1] is drained and run.cluster.serves(2)
            await run.check()

    run_virtually(main())


def test_an_operators_number_holds_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEP_VARIABLE, "0")

    async def main() -> None:
        async with Run(monkeypatch, "placed") as run:
            run.scaler.set_by_operator(1)
            await run.load(20, 9)
            assert run.cluster.number == 1 and run.cluster.history == []
            run.scaler.turn_on()
            await run.load(10, 9)
            assert run.cluster.number > 1
            await run.check()

    run_virtually(main())


def test_a_replica_that_dies_is_no_reason_to_release_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEP_VARIABLE, "0")

    async def main() -> None:
        async with Run(monkeypatch, "placed") as run:
            await run.load(25, 9)
            assert run.cluster.number >= 2
            run.cluster.replicas[0].kill()
            number = run.cluster.number
            await run.load(30, 1)
            assert run.cluster.number == number
            run.cluster.replicas[0].start()
            await asyncio.gather(*run.asked)
            await run.load(60, 1)
            assert run.cluster.number == 1
            await asyncio.gather(*run.asked)

    run_virtually(main())
