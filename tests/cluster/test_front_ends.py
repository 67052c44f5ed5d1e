"""Several front ends of the same replicas: in virtual time, and the connections between front ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.cluster.in_process import V1, V2, V3, Here, Maker, at, virtual
from tests.cluster.running import QUICK, SECRET, asked, check, joined, outputs_of, real
from tests.cluster.test_scaling import busy, on_ray, states
from tests.processes import PATIENCE_S
from vlora.cluster.adapter_state import AdapterFailure, DesiredAdapter
from vlora.cluster.cluster import Cluster
from vlora.cluster.on_ray.front_ends import Change, FrontEnds, ServiceState, WatchService
from vlora.cluster.on_ray.reports import Listens, Located, Opened, Service
from vlora.cluster.replica_adapters import FIRST_PAUSE_S
from vlora.errors import Aborted, BadRequest, EngineDead, UnknownReplica
from vlora.operations import DrainReplica, Operation, ResumeReplica, Scale
from vlora.routing import Router
from vlora.types import ErrorValue
from vlora.types.replicas import ScalingStatus

# -- the same replicas ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def beside(here: Here, over: float = 4.0) -> AsyncIterator[Cluster]:
    """Another front end of the same replicas. It follows the first one's adapters with `follow`."""
    found = Cluster(Router("placed", over=over), SECRET, absent_s=60.0)
    follow(here, found)
    try:
        for name in here.replicas:
            await joined(found, name, at(name))
        yield found
    finally:
        await found.close()


def follow(here: Here, found: Cluster) -> None:
    failures = {name: home.mirrored() for name, home in here.cluster._adapters.homes.items()}  # noqa: SLF001
    found._adapters.follow(here.cluster.desired_adapters, failures)  # noqa: SLF001


@virtual
async def test_both_answer_requests_with_the_same_ids_and_neither_overloads_a_replica(cluster: Maker) -> None:
    async with cluster("ab", over=1.5) as here, beside(here, 1.5) as other:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                await asyncio.sleep(0.01)
                most = max(
                    most, *(each.engine.load().num_running + each.engine.load().num_waiting for each in replicas)
                )

        replicas = [*here.replicas.values()]
        watching = asyncio.create_task(watch())
        mine = [outputs_of(here.cluster, asked(f"r{number}", 40)) for number in range(150)]
        began_s = asyncio.get_running_loop().time()
        waiting = asyncio.create_task(asyncio.wait_for(asyncio.gather(*mine), 3600))
        await asyncio.sleep(1.0)
        assert here.router.num_waiting
        yours = [asked(f"r{number}", 40, seed=number) for number in range(24)]
        answers = await asyncio.gather(*(outputs_of(other, request) for request in yours))
        took_s = asyncio.get_running_loop().time() - began_s
        assert not waiting.done()  # those of the second one did not wait for all of the first one's
        for request, outputs in zip(yours, answers, strict=True):
            check(request, outputs)
        for number, outputs in enumerate(await waiting):
            check(asked(f"r{number}", 40), outputs)
        watching.cancel()
        assert took_s < 0.6 * (asyncio.get_running_loop().time() - began_s)
        assert most <= 12 + 4  # the places of a replica, and for a moment the second one's share
        await asyncio.sleep(0.5)
        assert {each.size for each in here.router.replicas.values()} == {0}


@virtual
async def test_an_end_of_one_ends_only_its_own_requests(cluster: Maker) -> None:
    async with cluster("ab") as here:
        async with beside(here) as other:
            ended = [asyncio.create_task(outputs_of(other, asked(f"o{number}", 200))) for number in range(4)]
            going = [asyncio.create_task(outputs_of(here.cluster, asked(f"m{number}", 200))) for number in range(4)]
            await asyncio.sleep(0.5)
        for task in ended:
            assert (await task)[-1].finish_reason == "cancelled"
        for number, task in enumerate(going):
            assert check(asked(f"m{number}", 200), await task).timings.num_deaths == 0  # type: ignore[union-attr]
        await here.check_idle()


@pytest.mark.parametrize("dies", ["", "a"])
@virtual
async def test_answers_of_the_other_one_go_on_with_the_content_with_which_they_began(cluster: Maker, dies: str) -> None:
    """Also where a replica dies after the first one has changed an adapter, and after the first one is gone."""
    async with cluster("ab") as here:
        await here.load("1")
        here.cluster._adapters.former.linger_s = 5.0  # noqa: SLF001
        async with beside(here) as other:
            requests = [asked(f"r{number}", 300, adapter="x") for number in range(4)]
            answers = [asyncio.create_task(outputs_of(other, request)) for request in requests]
            await asyncio.sleep(1.0)
            await here.load("2")
            follow(here, other)
            await asyncio.sleep(1.0)
            new = asked("new", adapter="x")
            check(new, await outputs_of(other, new), V2)
            await here.cluster.close()
            if dies:
                here.replicas[dies].kill()
            else:
                await other.drain("a", 30.0)
            for request, answer in zip(requests, answers, strict=True):
                check(request, await answer, V1)


@virtual
async def test_the_other_one_makes_the_changes_after_the_first_one(cluster: Maker) -> None:
    async with cluster("ab") as here:
        here.replicas["b"].faults["y"] = ""
        await here.load("1")
        async with beside(here) as other:
            homes = other._adapters.homes  # noqa: SLF001
            error = ErrorValue("over_capacity", "its files are being sent there; try again later")
            failures = {"b": {"x": AdapterFailure(error, True, True)}}
            other._adapters.follow(here.cluster.desired_adapters, failures)  # noqa: SLF001
            places = {each.replica: each.state for each in await other.adapter_places()}
            assert places == {"a": "host", "b": "pending"} or places == {"a": "device", "b": "pending"}
            for _ in range(3):
                answer = asyncio.create_task(outputs_of(other, asked("r", adapter="x")))
                await asyncio.sleep(0.05)
                assert other.where("r") == "a"
                check(asked("r", adapter="x"), await answer, V1)
            # A replica that has not followed yet gets requests again soon, also after a failure that is over.
            for found in (failures, {}):
                other._adapters.follow(here.cluster.desired_adapters, found)  # noqa: SLF001
                other._adapters.refused("b", "x", error)  # noqa: SLF001
                assert other._router.replicas["b"].barred == {"x"}  # noqa: SLF001
                await asyncio.sleep(1.5 * FIRST_PAUSE_S)
                assert not other._router.replicas["b"].barred  # noqa: SLF001
            await here.cluster.close()
            other._adapters.lead(1)  # noqa: SLF001
            await asyncio.sleep(0.5)
            assert not any(home.failures for home in homes.values())
            assert (await other.load_adapter("x", here.paths["2"])).version == V2
            assert here.contents() == {V2}
            here.replicas["a"].kill()
            await asyncio.sleep(0.1)
            here.replicas["a"].start()
            await other.members["a"].wait_joined()
            assert here.contents() == {V2}


@virtual
async def test_a_former_owner_that_does_not_know_it_yet_changes_nothing(cluster: Maker) -> None:
    """As one that was paused, or cut off from Ray: the replicas refuse it, until it makes the changes again."""
    async with cluster("ab") as here:
        await here.load("1")
        async with beside(here) as other:
            other._adapters.lead(7)  # noqa: SLF001
            await other.load_adapter("x", here.paths["2"])
            for change in (
                here.cluster.load_adapter("x", here.paths["3"]),
                here.cluster.register_adapters({"y": here.paths["3"]}),
                here.cluster.pin_adapter("x", True),
            ):
                with pytest.raises(Aborted, match=r"^replica 'a': another front end makes the changes of this service"):
                    await change
            await here.restart("a")  # it takes what it gets from the first that connects, and then from the other one
            await other.members["a"].wait_joined()
            await asyncio.sleep(2.0)
            assert here.contents() == {V2} and (await other.load_adapter("x", here.paths["3"])).version == V3
            here.cluster._adapters.lead(8)  # noqa: SLF001
            await here.load("1")
            assert here.contents() == {V1}


@virtual
async def test_former_contents_are_kept_for_the_other_one_after_each_change(cluster: Maker) -> None:
    async with cluster("a") as here:
        await here.load("1")
        adapters = here.cluster._adapters  # noqa: SLF001
        adapters.former.linger_s = 5.0
        await here.load("2")
        await asyncio.sleep(4.0)
        await here.load("3")
        await asyncio.sleep(2.0)
        assert [*adapters.former] == [("x", V2)]
        await asyncio.sleep(4.0)
        assert not [*adapters.former]


# -- starts, changes and ends beside another one, without Ray ---------------------------------------------------------


async def ends() -> None: ...


def where(*places: int) -> dict[str, Located]:
    at = {"host": "127.0.0.1", "tls": False, "pid": 1, "replica_pid": 1, "engine_pid": 1}
    opened = {place: Opened(port=ord("abc"[place]), **at) for place in places}  # type: ignore[arg-type]
    return {f"replica-{place}": Located(f"replica-{place}", found, "n", "") for place, found in opened.items()}


@virtual
async def test_one_that_starts_does_not_wait_for_ever_for_replicas_that_are_down(cluster: Maker) -> None:
    async with on_ray(cluster) as found:
        found.front_ends.owner, found.ray.local, found.located = SimpleNamespace(close=ends), None, where(0, 1, 2)
        lines: list[str] = []
        began_s = asyncio.get_running_loop().time()
        await found._wait_joined(1, lines.append, 30.0)  # noqa: SLF001
        assert 29 < asyncio.get_running_loop().time() - began_s < 31
        assert lines[1:] == ["replica-1 serves (2 of 3) on 127.0.0.1", "2 of 3 replicas serve; the others are down"]


@virtual
async def test_replicas_that_drain_to_end_do_so_after_the_one_that_makes_the_changes_is_gone(cluster: Maker) -> None:
    async with on_ray(cluster) as found, busy(found):
        found.front_ends.owner, found.located = SimpleNamespace(close=ends), where(0, 1)
        gone = frozenset({"replica-1"})
        state = msgspec.structs.replace(found._make_state(), number=1, drained=gone, leaving=gone)  # noqa: SLF001
        found.front_ends.state = state
        found._follow_owner(state)  # noqa: SLF001
        assert states(found) == ["serving", "draining"]
        found._own(SECRET, 1)  # noqa: SLF001
        await asyncio.sleep(1.0)
        assert states(found) == ["serving"] and not {*found.located, *found.members} & gone


@virtual
async def test_the_others_have_a_change_before_its_caller(cluster: Maker) -> None:
    async with on_ray(cluster) as found:
        front_ends, sent = found.front_ends, list[bool]()
        watching: asyncio.Task[Any]
        line: Any = SimpleNamespace(
            closed=asyncio.get_running_loop().create_future(),
            close_after_sending=lambda: sent.append(watching.done() and "replica-1" in watching.result().drained),
        )
        front_ends._lines = [line]  # noqa: SLF001
        await found.call(DrainReplica("replica-1"))
        for drained in (False, True):
            watch = front_ends._result(line, WatchService(front_ends.state.version))  # noqa: SLF001
            watching = asyncio.create_task(watch)
            await asyncio.sleep(0.3)
            assert not watching.done()
            if not drained:
                await found.call(ResumeReplica("replica-1"))
                assert watching.done() and not watching.result().drained
        found._mark_drained("replica-1", True)  # noqa: SLF001
        await found.close()
        assert sent[0]


# -- connections between front ends -----------------------------------------------------------------------------------


class One:
    """A front end without replicas. changes: that it was asked to make."""

    def __init__(self, key: str) -> None:
        self.number = 1
        self.changes: list[Operation] = []
        self.states: list[ServiceState] = []
        self.front_ends = FrontEnds(
            key, QUICK, make_state=self.state, on_state=self.states.append, perform=self._perform
        )

    def state(self) -> ServiceState:
        return ServiceState(
            number=self.number,
            located={},
            drained=frozenset({"replica-0"}),
            leaving=frozenset(),
            causes={"replica-1": "no room"},
            adapters={"x": DesiredAdapter("/x", "1")},
            failures={"replica-0": {"x": AdapterFailure(ErrorValue("bad_adapter", "no"), True, False)}},
            scaling=ScalingStatus(
                automatic=False, number=1, least=1, most=2, decision="", decided_s=1.0, problem="", decisions={}
            ),
        )

    async def _perform(self, operation: Operation) -> Any:
        self.changes.append(operation)
        match operation:
            case Scale(number):
                assert isinstance(number, int)
                self.number = number
                return True
            case DrainReplica("broken"):
                raise ZeroDivisionError
        raise UnknownReplica("there is no such replica")

    async def service(self) -> Service:
        listens: Listens = await self.front_ends.listen("127.0.0.1", SECRET)
        own = {"settings": "s", "model": "m", "host": "h", "pid": 1}
        return Service(key="k", address="127.0.0.1", port=listens.port, tls=listens.tls, **own)  # type: ignore[arg-type]

    async def heard(self, number: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self.states or self.states[-1].number != number:
                await asyncio.sleep(0.01)


async def fails(one: One, change: Change, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        await one.front_ends.call(change)


@real
async def test_changes_go_to_the_owner_and_its_state_to_the_others() -> None:
    first, second, third = One("1"), One("2"), One("3")
    service = await first.service()
    for each in (second, third):
        each.front_ends.follow(service, b"of replicas that run no more")
        each.front_ends.follow(service, SECRET)
    await fails(second, Scale(2), EngineDead, r"^a server of model 'm' \(process 1 on h\), which makes changes of this")
    for each in (second, third):
        await each.heard(1)
    assert first.front_ends.num_followers == 2
    assert await second.front_ends.call(Scale(2)) is True
    assert second.states[-1].number == 2  # with the reply
    await third.heard(2)
    assert third.states[-1].without_times == first.state().without_times
    first.front_ends.own(SECRET)  # with another driver
    first.number = 3
    first.front_ends.publish()
    await third.heard(3)
    await fails(third, DrainReplica("r"), UnknownReplica, "^there is no such replica$")
    await fails(third, DrainReplica("broken"), BadRequest.__base__ or Exception, "ZeroDivisionError; see the log")
    assert [type(each).__name__ for each in first.changes] == ["Scale", "DrainReplica", "DrainReplica"]
    # The second one owns the service once the first one is gone.
    await first.front_ends.close()
    third.front_ends.follow(await second.service(), SECRET)
    await asyncio.sleep(0.1)  # the second one is not told yet that it owns the service
    second.front_ends.own(SECRET)
    second.number = 7
    await third.heard(7)
    assert await third.front_ends.call(Scale(8)) is True and second.changes == [Scale(8)]
    assert second.front_ends._tasks  # noqa: SLF001
    await third.front_ends.close()
    async with asyncio.timeout(PATIENCE_S):
        while second.front_ends._tasks:  # noqa: SLF001
            await asyncio.sleep(0.01)
    await second.front_ends.close()
