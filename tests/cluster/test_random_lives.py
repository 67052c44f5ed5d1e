"""Random schedules of moves, deaths, pauses and cancellations: each answer is whole, once, and that of one engine."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.cluster.in_process import LocalReplica, connecting, run_virtually
from tests.cluster.running import SECRET, outputs_of
from tests.cluster.sleeping_engine import STEP_VARIABLE, expected
from tests.cluster.test_cluster import asked, check
from vlora.cluster import members
from vlora.cluster.cluster import Cluster
from vlora.cluster.door import Address
from vlora.cluster.members import Health
from vlora.errors import Disconnected
from vlora.routing import RULES, Router
from vlora.types import Request, seed_of

NUM_SCHEDULES = 200
NUM_CROWDED = 30


class Life:
    """One schedule. crowded: requests wait for replicas most of the time."""

    def __init__(self, seed: int, *, crowded: bool = False) -> None:
        self.draws = random.Random(seed)
        self.router = Router(self.draws.choice(list(RULES)), over=self.draws.choice([1.0, 1.5, 4.0]))
        if crowded:
            self.router = Router(self.draws.choice([name for name, rule in RULES.items() if rule.queues]), over=1.0)
            self.replicas = {port: LocalReplica(max_batch_size=1) for port in range(3)}
        else:
            self.replicas = {port: LocalReplica() for port in range(self.draws.randint(1, 4))}
        self.num_failed = self.num_moves = self.num_deaths = self.num_recalled = 0
        self.busy = True

    async def run(self) -> None:
        self.cluster = Cluster(self.router, SECRET, health=Health(beat_s=0.1, missed=3), absent_s=1e9)
        for port in self.replicas:
            await self.cluster.add(str(port), Address("127.0.0.1", port))
        making = asyncio.create_task(self._make_trouble())
        await asyncio.gather(*(self._ask(number) for number in range(self.draws.randint(4, 30))))
        self.busy = False
        await making
        for replica in self.replicas.values():
            replica.wake()
            replica.start()
        last = asked("last", 5)
        check(last, await outputs_of(self.cluster, last))
        self.router.check_integrity()
        assert not (self.cluster.num_unfinished or self.router.num_waiting)
        assert not any(standing.holds for standing in self.router.replicas.values())
        await asyncio.sleep(0.3)  # until each has reported
        # None is lost; the estimate exceeds the truth where a report came before the end that it includes.
        assert all(standing.free_blocks >= 1000 for standing in self.router.replicas.values())
        await self.cluster.close()
        for replica in self.replicas.values():
            replica.kill()

    async def _ask(self, number: int) -> None:
        draws = self.draws
        await asyncio.sleep(draws.uniform(0, 3))
        request = asked(
            f"r{number}",
            draws.randint(1, 60),
            whole=draws.random() < 0.2,
            logprobs=1 if draws.random() < 0.3 else None,
            seed=draws.choice([None, number]),
        )
        if draws.random() < 0.3:
            await self._leave_early(request)
            return
        found = await outputs_of(self.cluster, request)
        error, timings = found[-1].error, found[-1].timings
        if error is None:
            assert timings is not None
            self.num_moves += timings.num_moves
            self.num_deaths += timings.num_deaths
            check(request, found)
        else:  # by chance three replicas died under it
            assert error.code == "step_failed" and timings is not None and timings.num_deaths == 3
            self.num_failed += 1

    async def _leave_early(self, request: Request) -> None:
        """Cancel it, or close its stream, at any time: what came until then is the answer's beginning."""
        closes, after_s = self.draws.random() < 0.5, self.draws.uniform(0, 0.6)
        tokens: list[int] = []

        async def read() -> None:
            async for output in self.cluster.generate(request):
                tokens.extend(output.token_ids)
                assert output.error is None or output.error.code in ("aborted", "step_failed")

        reading = asyncio.create_task(read())
        await asyncio.sleep(after_s)
        if closes:
            reading.cancel()
        else:
            await self.cluster.cancel(request.request_id)
        await asyncio.wait({reading})
        assert reading.cancelled() or reading.exception() is None
        whole = expected(request, seed_of(request.request_id, request.sampling))
        assert tuple(tokens) == whole[: len(tokens)]

    async def _make_trouble(self) -> None:
        while self.busy:
            await asyncio.sleep(self.draws.expovariate(8))
            port = self.draws.choice(list(self.replicas))
            replica, name = self.replicas[port], str(port)
            match self.draws.choice(["move"] * 8 + ["kill", "hang"]):
                case "move" if name in self.router.replicas:
                    self.router.drain(name)
                    waits = self.router.num_waiting > 0
                    self.num_recalled += waits * self.cluster.consolidate()
                    if self.draws.random() < 0.5:
                        await asyncio.sleep(self.draws.uniform(0, 0.05))
                    if name in self.router.replicas:
                        self.cluster.resume(name)
                case "kill":
                    replica.kill()
                    await asyncio.sleep(self.draws.uniform(0, 0.3))
                    replica.start()
                case "hang" if replica.alive:
                    replica.hung = True
                    await asyncio.sleep(self.draws.choice([0.05, 0.2, 0.6]))
                    replica.wake()


async def live(seed: int, monkeypatch: pytest.MonkeyPatch, lives: list[Life], **kind: bool) -> None:
    life = Life(seed, **kind)
    monkeypatch.setattr(members, "connect", connecting(life.replicas))
    await life.run()
    lives.append(life)


def test_random_schedules_lose_double_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEP_VARIABLE, "0")
    lives: list[Life] = []
    for seed in range(NUM_SCHEDULES):
        run_virtually(live(seed, monkeypatch, lives))
    num_moves, num_deaths = sum(life.num_moves for life in lives), sum(life.num_deaths for life in lives)
    num_failed = sum(life.num_failed for life in lives)
    num_reports = sum(replica.num_reports for life in lives for replica in life.replicas.values())
    # The schedules contain what they are to test.
    assert num_moves > NUM_SCHEDULES and num_deaths > NUM_SCHEDULES and num_failed < num_deaths / 5
    assert num_reports > 10 * NUM_SCHEDULES


def test_random_schedules_with_drains_while_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEP_VARIABLE, "0")
    lives: list[Life] = []
    for seed in range(NUM_CROWDED):
        run_virtually(live(seed, monkeypatch, lives, crowded=True))
    assert sum(life.num_recalled for life in lives) > NUM_CROWDED
    assert sum(life.num_deaths for life in lives) > NUM_CROWDED


def test_a_replica_that_has_ended_refuses_connections() -> None:
    async def main() -> None:
        replica = LocalReplica()
        replica.kill()
        with pytest.raises(Disconnected):
            await replica.connect()

    run_virtually(main())
