"""Replicas that follow the load: decisions with a fake clock, then live clusters in virtual time, which lose nothing.

Also the router's placement on a live cluster, and calls of `RayCluster.scale` at once, without Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from tests.cluster.in_process import STEP_S, Here, LocalReplica, Maker, at, virtual
from tests.cluster.running import SLEEPING, asked, check, joined, outputs_of
from vlora.cluster.autoscaler import Autoscaler
from vlora.cluster.cluster import COSTS, REBALANCE_S, REPLAN_S, LivePlacement
from vlora.cluster.on_ray.cluster import RayCluster
from vlora.cluster.on_ray.reports import Draining, Located, Opened, Restart
from vlora.errors import BadRequest
from vlora.routing import MoveCosts, Need, Room, Router
from vlora.routing.placement import proactive
from vlora.routing.router import Advice
from vlora.routing.scaling import ScalingSettings
from vlora.types.replicas import DOWN, DRAINING, SERVING

CALM, LIGHT, TWO = Advice(0, (), ()), Advice(0, ("idle",), ()), Advice(2, (), ())


# -- decisions --------------------------------------------------------------------------------------------------------


class Fake:
    """Replicas by place, with a fake clock."""

    def __init__(
        self, number: int = 1, found: Advice = CALM, wait_s: float = 0.0, failures: Mapping[int, str] | None = None
    ) -> None:
        self.number, self.found, self.wait_s = number, found, wait_s
        self.failures = dict(failures or {})
        self.ready = set(range(number))
        self.in_operation = False
        self.now = 0.0
        self.busy: set[int] = set()  # of those that drain
        self.orders: list[int] = []
        settings = ScalingSettings(1, 3, up_after_s=2.0, down_after_s=5.0)
        self.scaler = Autoscaler(self, settings, lambda: self.now, automatic=True, start_s=100.0)

    def absent(self) -> Mapping[int, str]:
        return {place: self.failures.get(place, "") for place in range(self.number) if place not in self.ready}

    def serves(self, number: int) -> bool:
        return set(range(number)) <= self.ready

    def advice(self) -> Advice:
        return self.found

    def longest_wait_s(self) -> float:
        return self.wait_s

    async def advance(self, number: int) -> bool:
        if not self.serves(1):
            raise BadRequest("none would remain")
        self.orders.append(number)
        self.number = number
        if any(place >= number for place in self.busy):
            return False
        self.ready = {place for place in self.ready if place < number}
        return True

    def run(self, seconds: int) -> list[int]:
        """Returns the numbers that were ordered so far."""
        for _ in range(seconds):
            self.now += 1
            asyncio.run(self.scaler.tick())
        return self.orders


def test_a_drain_goes_on_after_others_were_down(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake(2, LIGHT)
    fake.busy = {1}
    fake.run(8)
    assert fake.number == 1
    fake.ready = {1}
    fake.run(3)
    fake.ready = {0, 1}
    fake.busy.clear()
    fake.run(3)
    assert fake.number == 1 and fake.ready == {0} and not caplog.records


def test_a_start_that_fails_is_given_up_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake(wait_s=9.0, failures={1: "replica-1 does not start: no memory"})
    assert fake.run(4) == [2, 1]
    status = fake.scaler.status
    assert status.problem == "a replica did not start; see the server log; none is added for 10 s"
    assert "automatic scaling: replica-1 does not start: no memory" in caplog.messages
    assert status.decision == f"1 instead of 2: {status.problem}" and status.decisions["failed"] == 1
    assert fake.run(7) == [2, 1]
    fake.failures.clear()
    assert fake.run(3) == [2, 1, 2] and fake.scaler.status.problem
    fake.ready.add(1)
    fake.run(1)
    assert not fake.scaler.status.problem
    slow = Fake(wait_s=9.0)  # without an end
    assert slow.run(100) == [2] and slow.run(3) == [2, 1]
    assert slow.scaler.status.problem.startswith("no start within 100 s; none is added for 10 s")


@pytest.mark.parametrize(
    ("fails", "ready", "seconds", "orders"),
    [(1, {0, 2}, 30, [3, 3]), (2, {0}, 5, [3, 2]), (1, {0}, 5, [3, 1])],
    ids=["below one that succeeded: ends neither", "above a start: leaves it", "below a start: ends it"],
)
def test_a_failed_start_beside_another_start(fails: int, ready: set[int], seconds: int, orders: list[int]) -> None:
    fake = Fake(found=TWO, wait_s=9.0 if len(ready) == 1 else 0.0, failures={fails: "no memory"})
    fake.ready = ready
    assert fake.run(seconds) == orders and fake.number == orders[-1] and fake.scaler.status.problem
    if orders == [3, 2]:
        fake.ready.add(1)
        fake.run(1)
        assert not fake.scaler.status.problem


def test_a_replica_that_is_started_again() -> None:
    fake = Fake(2, wait_s=9.0, failures={2: "no memory"})
    fake.run(1)
    fake.ready = {0}  # 1 has served, and is started again: the failed start does not end it
    assert fake.run(1) == [3, 2] and fake.number == 2
    again = Fake(2, Advice(1, (), ()), 9.0)
    again.ready = {0}
    assert again.run(20) == [], "it counts as one that starts"
    again.failures = {1: "no memory"}
    assert again.run(1) == [3]


def test_nothing_is_changed_during_an_operators_change() -> None:
    fake = Fake(wait_s=9.0)
    fake.in_operation = True
    assert fake.run(9) == []


@virtual
async def test_a_refused_change_and_an_error_are_survived() -> None:
    fake = Fake(wait_s=9.0)
    fake.ready = set()
    running = asyncio.create_task(fake.scaler.run(0.001))
    for ready in (set(), {0}):
        fake.ready = ready
        for _ in range(4):
            fake.now += 1
            await asyncio.sleep(0.001)
    assert fake.orders == [2]
    del fake.found
    await asyncio.sleep(0.02)
    assert not running.done()
    running.cancel()


# -- live clusters ----------------------------------------------------------------------------------------------------


class FakeRay:
    """In place of the processes that use Ray: replicas of this process, each of which serves `start_s` after its start.

    Attributes:
        numbers: That it was asked for.
        orders: To a driver.
    """

    local = None

    def __init__(self, here: Here, start_s: float) -> None:
        """start_s: infinite: a test starts those that are added."""
        self.numbers: list[int] = []
        self.orders: list[Any] = []
        self.send = self.orders.append
        self._here = here
        self._start_s = start_s

    def scale(self, number: int) -> None:
        self.numbers.append(number)
        for place, name in enumerate("abc") if self._start_s < math.inf else ():
            if place < number and name not in self._here.replicas:
                self._here.ports[ord(name)] = self._here.replicas[name] = LocalReplica()
                asyncio.get_running_loop().call_later(self._start_s, self.locate, place, name)
            elif place >= number and name in self._here.replicas:
                self._here.replicas.pop(name).kill()

    def locate(self, place: int, listens: str, node: str = "node") -> None:
        """A replica listens there."""
        host, port = at(listens)[:2]
        opened = Opened(host=host, port=port, tls=False, pid=1, replica_pid=2 + place, engine_pid=9)
        found: Any = self._here.cluster
        found.hear(Located(f"replica-{place}", opened, node, "actor"))

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def on_ray(
    cluster: Maker, number: int = 2, start_s: float = math.inf, rule: str = "placed", **scaling: Any
) -> AsyncIterator[Any]:
    """A `RayCluster` of `a`, `b` and so on, at most three, without Ray."""
    settings = ScalingSettings(1, 3, 2.0, 60.0)._replace(**scaling)

    def made(router: Router, secret: bytes, **_: Any) -> Any:
        found: Any = RayCluster(SLEEPING, rule, None, 60.0, settings, False, None, None)
        found.number = found.num_replicas = number
        return found

    async with cluster("", kind=made) as here:  # type: ignore[arg-type]
        found: Any = here.cluster
        found.here, found.ray = here, FakeRay(here, start_s)
        for place, name in enumerate("abc" if start_s == math.inf else "abc"[:number]):
            here.ports[ord(name)] = here.replicas[name] = LocalReplica()
            if place < number:
                await join(found, place)
        yield found


class Run:
    """A load on a cluster of one to three replicas."""

    def __init__(self, cluster: Any) -> None:
        self.cluster, self.replicas, self.numbers = cluster, cluster.here.replicas, cluster.ray.numbers
        self.scaler: Autoscaler = cluster._autoscaler  # noqa: SLF001
        self.asked: list[asyncio.Task[Any]] = []

    async def load(self, seconds: float, per_s: float) -> None:
        """Ask at a rate; a request takes 2 s and a replica 8 of them at a time."""
        for _ in range(int(seconds * per_s)):
            request = asked(f"r{len(self.asked)}", 100)
            self.asked.append(asyncio.create_task(outputs_of(self.cluster, request)))
            await asyncio.sleep(1 / per_s)

    async def check(self) -> None:
        for number, found in enumerate(await asyncio.gather(*self.asked)):
            timings = check(asked(f"r{number}", 100), found).timings
            assert timings is not None and timings.num_deaths == 0
        assert self.cluster.status().num_deaths == 0


@contextlib.asynccontextmanager
async def scaled(cluster: Maker, rule: str = "placed") -> AsyncIterator[Run]:
    async with on_ray(cluster, 1, 5.0, rule, down_after_s=10.0) as found:
        found._autoscaler.turn_on()  # noqa: SLF001
        running = asyncio.create_task(found._autoscaler.run())  # noqa: SLF001
        yield Run(found)
        running.cancel()


@pytest.mark.parametrize("rule", ["placed", pytest.param("punica", marks=pytest.mark.exhaustive)])
@virtual
async def test_replicas_follow_the_load_and_lose_nothing(cluster: Maker, rule: str) -> None:
    async with scaled(cluster, rule) as run:
        await run.load(10, 1)
        assert run.cluster.number == 1
        await run.load(40, 9)
        assert run.cluster.number == 3
        assert [replica.state for replica in run.cluster.status().replicas] == [SERVING] * 3
        status = run.scaler.status
        assert status.decisions["waiting"] + status.decisions["busy"] >= 1
        assert status.decision.startswith("3 instead of ")
        await run.load(60, 1)  # while answers go on, replicas are drained
        assert run.cluster.number == 1 and len(run.replicas) == 1
        status = run.scaler.status
        assert status.decision.startswith("1 instead of 2: the others had room for all requests for 1")
        assert status.decisions["light"] == 2
        await run.check()
        assert [*dict.fromkeys(run.numbers[: run.numbers.index(3) + 1])] in ([1, 2, 3], [1, 3], [2, 3], [3])


@virtual
async def test_a_load_that_returns_keeps_a_replica_that_drains(cluster: Maker) -> None:
    async with scaled(cluster) as run:
        run.scaler.set_by_operator(1)
        await run.load(20, 9)
        assert run.cluster.number == 1 and {*run.numbers} <= {1}, "an operator's number holds under load"
        status = run.scaler.status
        assert not status.automatic and status.decision == "1 as before: set by an operator"
        run.scaler.turn_on()
        await run.load(20, 9)
        assert run.cluster.number >= 2
        drained = run.replicas["b"]
        run.cluster._has_requests = lambda name: True  # noqa: SLF001
        await run.load(60, 1)
        assert run.cluster.number == 1 and not run.cluster.serves(2)
        await run.load(20, 9)
        assert run.replicas["b"] is drained and run.cluster.serves(2)
        await run.check()


@virtual
async def test_a_replica_that_dies_is_no_reason_to_release_another(cluster: Maker) -> None:
    async with scaled(cluster) as run:
        await run.load(25, 9)
        number = run.cluster.number
        assert number >= 2
        run.replicas["a"].kill()
        await run.load(30, 1)
        assert run.cluster.number == number
        run.replicas["a"].start()
        await asyncio.gather(*run.asked)
        await run.load(60, 1)
        assert run.cluster.number == 1
        await asyncio.gather(*run.asked)


# -- calls of `scale` at once -----------------------------------------------------------------------------------------


async def join(cluster: Any, place: int) -> None:
    await joined(cluster, f"replica-{place}", at("abc"[place]))


def states(cluster: RayCluster) -> list[str]:
    return [each.state for each in cluster.status().replicas]


@contextlib.asynccontextmanager
async def busy(cluster: RayCluster) -> AsyncIterator[None]:
    """During requests of some seconds, as many as both replicas take, which are answered."""
    asking = [asyncio.create_task(outputs_of(cluster, asked(f"r{number}", 300))) for number in range(24)]
    await asyncio.sleep(0.1)
    yield
    for number, outputs in enumerate(await asyncio.gather(*asking)):
        check(asked(f"r{number}", 300), outputs)


@virtual
async def test_a_later_call_does_not_wait_for_an_earlier_one(cluster: Maker) -> None:
    async with on_ray(cluster) as found:
        now = asyncio.get_running_loop().time
        began_s = now()
        adding = asyncio.create_task(found.scale(3, 30.0))  # the third one does not join
        await asyncio.sleep(1)
        assert await found.scale(2, 5.0) and now() - began_s < 2
        assert not await adding and now() - began_s < 2
        assert found.number == 2 and found.ray.numbers == [3, 2] and states(found) == [SERVING] * 2
        first, second = (asyncio.create_task(found.scale(3, 30.0)) for _ in range(2))
        await asyncio.sleep(1)
        assert await found.scale("auto", 0.0)
        assert not await first and not await second
        assert found.status().scaling.automatic and not found.in_operation


@virtual
async def test_a_drain_is_ended_by_a_later_call(cluster: Maker) -> None:
    async with on_ray(cluster) as found, busy(found):
        removing = asyncio.create_task(found.scale(1, 30.0))
        await asyncio.sleep(0.5)
        assert states(found) == [SERVING, DRAINING]
        began_s = asyncio.get_running_loop().time()
        assert await found.scale(2, 5.0) and not await removing
        assert asyncio.get_running_loop().time() - began_s < 1
        assert states(found) == [SERVING] * 2 and set(found.ray.numbers) == {2}


@virtual
async def test_a_replica_that_is_replaced_while_it_is_kept_serves(cluster: Maker) -> None:
    """It has no line in between, and a call finds none."""
    async with on_ray(cluster) as found, busy(found):
        assert not await found.scale(1, 0.5)
        replacing = asyncio.create_task(found.disconnect("replica-1"))
        await asyncio.sleep(0)
        assert "replica-1" not in found.members
        scaling = asyncio.create_task(found.scale(2, 5.0))
        await replacing
        found.add("replica-1", at("c"))
        assert await scaling
        assert states(found) == [SERVING] * 2


@virtual
async def test_a_replica_that_ends_without_a_line_serves_when_it_is_added_again(cluster: Maker) -> None:
    async with on_ray(cluster) as found:
        assert await found.drain("replica-1", 1.0)
        await found.disconnect("replica-1")
        assert states(found) == [SERVING, DOWN]
        assert await found.scale(1, 5.0)
        adding = asyncio.create_task(found.scale(2, 5.0))
        await asyncio.sleep(0.1)
        await join(found, 1)
        assert await adding and states(found) == [SERVING] * 2


# -- placement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moves", [True, False])
@virtual
async def test_a_replica_that_joins_takes_requests_that_wait_on_another(
    cluster: Maker, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    """Two batches were sent to one replica. The control moves none."""
    if not moves:
        monkeypatch.setattr(Router, "rebalance", lambda self, request_s, costs: [])
    num_tokens, loop = 100, asyncio.get_running_loop()
    async with cluster("a") as here:
        check(asked("first", 5), await outputs_of(here.cluster, asked("first", 5)))
        ended_s: list[float] = []
        began_s = loop.time()

        async def ask(number: int) -> int:
            request = asked(f"r{number}", num_tokens)
            timings = check(request, await outputs_of(here.cluster, request)).timings
            ended_s.append(loop.time() - began_s)
            return 0 if timings is None else timings.num_moves

        asking = [asyncio.create_task(ask(number)) for number in range(2 * SLEEPING.max_batch_size)]
        await asyncio.sleep(10 * STEP_S)
        await here.add("b", LocalReplica())
        num_moves = sum(await asyncio.gather(*asking))
        in_first_batch, most = sum(at_s < 1.5 * num_tokens * STEP_S for at_s in ended_s), SLEEPING.max_batch_size
        if moves:
            assert in_first_batch >= len(asking) - 1 and 0 < num_moves <= most
        else:
            assert in_first_batch == most and num_moves == 0


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


@virtual
async def test_a_replica_leaves_a_node_that_ray_drains(cluster: Maker) -> None:
    """Without lost requests; one that an operator has drained stays drained."""
    for is_drained in (False, True):
        async with on_ray(cluster) as found, busy(found):
            orders = found.ray.orders
            for place in range(2):
                found.ray.locate(place, "ab"[place], "former")
            if is_drained:
                assert await found.drain("replica-0")
            for _ in range(2):  # of two drivers
                found.hear(Draining("replica-0", "former"))
            while not orders:
                await asyncio.sleep(0.1)
            assert orders == [Restart("replica-0", 2, moves=True)] and states(found) == [DOWN, SERVING]
            found.ray.locate(0, "c", "other")
            await asyncio.sleep(1)
            assert states(found) == [DRAINING if is_drained else SERVING, SERVING]
            assert found.status().num_deaths == 0 and len(orders) == 1


@virtual
async def test_the_only_replica_leaves_a_node_that_ray_drains(cluster: Maker) -> None:
    async with on_ray(cluster) as found:
        assert await found.scale(1, 5.0)
        found.ray.locate(0, "a", "former")
        answering = asyncio.create_task(outputs_of(found, asked("r", 300)))
        await asyncio.sleep(1)
        found.hear(Draining("replica-0", "former"))
        await asyncio.sleep(1)
        found.ray.locate(0, "c", "other")
        check(asked("r", 300), await answering)
