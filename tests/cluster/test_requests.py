"""Requests whose replicas die, hang, drain, join or leave, in virtual time: nothing is lost, doubled or late."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from tests.cluster.in_process import HEALTH, STEP_S, Here, LocalReplica, Maker, at, virtual
from tests.cluster.running import MIXED, answer_mixed, asked, check, outputs_of
from tests.cluster.sleeping_engine import KILLER, SleepingEngine, expected
from tests.virtual_clock import VirtualClockLoop
from vlora.cluster import members
from vlora.cluster.adapters import ReplicatedAdapters
from vlora.cluster.cluster import LivePlacement
from vlora.cluster.in_flight_request import MAX_BLOCKS, prefix_keys
from vlora.cluster.members import Health
from vlora.engine.operations import Train
from vlora.errors import BadRequest, DeadlineUnreachable, EngineDead
from vlora.operations import CancelTraining, ListTrainings
from vlora.routing import Router
from vlora.routing.router import Recalled
from vlora.types import Request, SamplingParams, VisionInput, seed_of


async def answered(here: Here, requests: list[Request], within_s: float = 60.0) -> int:
    """Check the answers of requests. Returns the number of their moves and deaths."""
    asking = asyncio.gather(*(outputs_of(here.cluster, each) for each in requests))
    found = [check(*each).timings for each in zip(requests, await asyncio.wait_for(asking, within_s), strict=True)]
    return sum(each.num_moves + each.num_deaths for each in found if each is not None)


# -- deaths and hangs -------------------------------------------------------------------------------------------------


@virtual
async def test_answers_statistics_and_an_id_in_use(cluster: Maker) -> None:
    async with cluster() as here:
        assert await answered(here, MIXED) == 0
        stats = await here.cluster.stats()
        assert stats.num_finished == len(MIXED) and stats.total_blocks == 2000
        await asyncio.sleep(1.0)  # until each has reported
        assert all(replica.free_blocks == 1000 for replica in here.router.replicas.values())
        same = (outputs_of(here.cluster, asked("same")) for _ in range(2))
        answer, refused = await asyncio.gather(*same, return_exceptions=True)
        assert isinstance(answer, list) and isinstance(refused, BadRequest)
        # Replicas would train the same adapters in the same folder.
        assert await here.cluster.call(ListTrainings()) == ()
        for call in (here.cluster.call(Train("plan.yaml")), here.cluster.call(CancelTraining("signs"))):
            with pytest.raises(BadRequest, match="a cluster does not train"):
                await call
        assert not any(isinstance(call, Train) for replica in here.replicas.values() for call in replica.calls)
        await here.check_idle()


@pytest.mark.parametrize("how", ["dies", "hangs", "engine hangs", "cut"])
@virtual
async def test_a_lost_replica_loses_nothing_and_comes_back(cluster: Maker, how: str) -> None:
    """Also where the process opens lines while its engine hangs. What a replica that wakes still sends is not heard."""
    async with cluster(over=1.5) as here:
        lost: list[LocalReplica] = []

        def lose() -> None:
            replica = here.replicas[here.where("r0")]
            lost.append(replica)
            if how == "dies":
                replica.kill()
            elif how == "cut":
                replica.cut()
            else:
                replica.hung, replica.opens_lines = True, how == "engine hangs"

        assert set(await answer_mixed(here.cluster, lose)) == {0, 1}
        if how != "cut":
            # Nothing is sent there meanwhile.
            await asyncio.sleep(3.0)
            num_requests = lost[0].num_requests
            assert await answered(here, [asked(f"q{number}", 3) for number in range(10)]) == 0
            assert lost[0].num_requests == num_requests
        waking = asyncio.create_task(answered(here, [asked(f"w{number}", 150) for number in range(6)]))
        await asyncio.sleep(0.1)
        lost[0].start() if how == "dies" else lost[0].wake()
        assert await waking == 0
        await here.all_joined()
        await here.check_idle()
        assert here.cluster.status().num_deaths == 1


@pytest.mark.parametrize("who", ["front end", "replica"])
@virtual
async def test_a_pause_gives_no_replica_up(cluster: Maker, who: str) -> None:
    """One of the front end, of twice the time after which a replica counts as dead; or many short ones of a replica."""
    async with cluster("a", health=HEALTH) as here:
        loop = cast(VirtualClockLoop, asyncio.get_running_loop())

        async def pause() -> None:
            if who == "front end":
                loop.pause(2 * HEALTH.beat_s * HEALTH.missed)
            else:
                for _ in range(2 * HEALTH.missed):
                    here.replicas["a"].hung = True
                    await asyncio.sleep(1.5 * HEALTH.beat_s)
                    here.replicas["a"].wake()
                    await asyncio.sleep(2 * HEALTH.beat_s)

        request = asked("r", 400)
        last = check(request, await outputs_of(here.cluster, request, 5, pause))
        assert last.timings is not None and last.timings.num_deaths == 0


@virtual
async def test_requests_wait_while_all_replicas_are_gone(cluster: Maker) -> None:
    async with cluster("a") as here:
        await here.cluster.remove("a")
        await here.add("a")

        async def kill_and_replace() -> None:
            here.replicas["a"].kill()
            await asyncio.sleep(0.1)
            await here.add("b", LocalReplica())

        request = asked("r", 100)
        last = check(request, await outputs_of(here.cluster, request, 10, kill_and_replace))
        assert last.timings is not None and last.timings.num_deaths == 1 and last.timings.queue_s > 0.05
        here.replicas["b"].kill()
        error = (await outputs_of(here.cluster, asked("late")))[-1].error
        assert error is not None and error.code == "engine_dead" and "no replica can be used: a: " in error.message
        with pytest.raises(EngineDead, match="no replica can be used"):
            await outputs_of(here.cluster, asked("later"))
        await here.add("c", LocalReplica())
        assert await answered(here, [asked("after")]) == 0


@virtual
async def test_a_request_that_kills_replicas_ends_and_takes_no_other_along(cluster: Maker) -> None:
    async with cluster(over=8.0) as here:

        async def restart() -> None:
            """As Ray starts an actor again."""
            while True:
                for replica in here.replicas.values():
                    replica.start()
                await asyncio.sleep(0.5)

        restarting = asyncio.create_task(restart())
        killer = asyncio.create_task(outputs_of(here.cluster, asked("killer", prompt_ids=(KILLER, 1, 2))))
        await answered(here, [asked(f"o{number}", 80) for number in range(12)])
        error = (await killer)[-1].error
        restarting.cancel()
        assert error is not None and error.code == "step_failed"
        assert error.message.startswith("3 replicas died while they computed this request, the last one: ")
        assert await answered(here, [asked("after")]) == 0


@virtual
async def test_a_suspect_continues_when_its_replica_is_removed(cluster: Maker) -> None:
    async with cluster() as here:
        answer = asyncio.create_task(answered(here, [asked("s", 400)]))
        for _ in range(2):
            await asyncio.sleep(0.2)
            await here.restart(here.where("s"))
            await asyncio.sleep(0.5)
        await here.cluster.remove(here.where("s"))
        assert await answer == 2


@virtual
async def test_finished_answers_take_no_place_until_they_are_read(cluster: Maker) -> None:
    async with cluster("a", over=1.0) as here:
        unread = [here.cluster.generate(asked(f"r{number}", 3)) for number in range(8)]
        firsts = [await anext(stream) for stream in unread]
        await asyncio.sleep(5.0)
        assert here.cluster.num_unfinished == 0
        assert await answered(here, [asked("late", 3)]) == 0
        await here.restart("a")
        for number, (first, stream) in enumerate(zip(firsts, unread, strict=True)):
            timings = check(asked(f"r{number}", 3), [first, *[output async for output in stream]]).timings
            assert timings is not None and timings.num_deaths == 0


@pytest.mark.parametrize("dies", [False, True])
@virtual
async def test_a_request_that_leaves_a_replica_that_hangs(cluster: Maker, dies: bool) -> None:
    """Tokens that come after it went on elsewhere are not delivered; a death meanwhile counts once."""
    async with cluster(over=1.5, health=Health(beat_s=0.1, missed=20)) as here:

        async def leave() -> None:
            name = here.where("r")
            replica = here.replicas[name]
            replica.hung = True
            if dies:
                here.router.drain(name)
                assert here.cluster.consolidate() == 1
                replica.kill()
            else:
                assert await here.cluster.drain(name, 1.0)
                replica.hung = False
                await asyncio.sleep(2 * STEP_S)  # it computes on, and then reads the cancellation
                replica.wake()

        request = asked("r", 200)
        timings = check(request, await outputs_of(here.cluster, request, 5, leave)).timings
        assert timings is not None and (timings.num_moves, timings.num_deaths) == (1, int(dies))
        await here.check_idle()


# -- bounds and cancellations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("comes_back", [False, True])
@virtual
async def test_the_latency_bound_is_that_of_the_whole_answer(cluster: Maker, comes_back: bool) -> None:
    """It counts while the answer waits for a replica, and goes on at the next one."""
    async with cluster("a") as here:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        answer = asyncio.create_task(outputs_of(here.cluster, asked("r", 4000, max_latency_s=3.0)))
        await asyncio.sleep(1.0)
        await here.restart("a") if comes_back else here.replicas["a"].kill()
        found = await answer
        error = found[-1].error
        assert error is not None and error.code == "deadline_missed"
        assert error.message.startswith("request 'r' exceeded its max_latency_s of 3 s: ")
        assert 3.0 <= loop.time() - began_s < 3.3 and len([output for output in found if output.token_ids]) > 1


@pytest.mark.parametrize("at_s", [1.0, 5.0])
@pytest.mark.parametrize("how", ["drained", "died", "all died"])
@virtual
async def test_a_request_that_moves_is_not_refused_for_its_first_token_again(
    cluster: Maker, monkeypatch: pytest.MonkeyPatch, how: str, at_s: float
) -> None:
    """The replicas refuse whatever they would have to answer first within 3 s, and compute no token for 2 s."""
    bounds: list[float | None] = []
    add, step = SleepingEngine.add, SleepingEngine.step
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    def refusing(self: SleepingEngine, request: Request) -> None:
        bounds.append(request.max_ttft_s)
        if request.max_ttft_s is not None and request.max_ttft_s < 3.0:
            raise DeadlineUnreachable("the deadline cannot be met")
        add(self, request)

    monkeypatch.setattr(SleepingEngine, "add", refusing)
    monkeypatch.setattr(
        SleepingEngine, "step", lambda engine: step(engine) if loop.time() > began_s + at_s + 2.0 else ()
    )
    async with cluster(over=1.5) as here:
        request = replace(asked("r", 5), max_ttft_s=3.5)
        answer = asyncio.create_task(outputs_of(here.cluster, request))
        await asyncio.sleep(at_s)
        first = here.where("r")
        if how == "drained":
            await here.cluster.drain(first, 0.4)
        else:
            for name in [first] if how == "died" else "ab":
                here.replicas[name].kill()
            await asyncio.sleep(0.5)
            for replica in here.replicas.values():
                replica.start()
        timings = check(request, await asyncio.wait_for(answer, 60)).timings
        assert timings is not None and timings.num_moves + timings.num_deaths == 1
        assert bounds[0] is not None and 3.0 < bounds[0] <= 3.5 and len(bounds) == 2
        late = await outputs_of(here.cluster, replace(asked("late", 5), max_ttft_s=1.0))
        assert late[-1].error is not None and late[-1].error.code == "deadline_unreachable", "the first time it is"


@virtual
async def test_cancelled_during_a_move_and_while_it_waits(cluster: Maker) -> None:
    async with cluster(over=1.0) as here:
        began = asyncio.Event()
        task = asyncio.create_task(outputs_of(here.cluster, asked("r0", 400), 5, began.set))
        await began.wait()
        here.router.drain(here.where("r0"))
        assert here.cluster.consolidate() == 1
        await here.cluster.cancel("r0")
        found = await task
        assert found[-1].finish_reason == "cancelled" and found[-1].error is not None
        assert found[-1].error.message == "request 'r0' was cancelled"
        tokens = tuple(token for output in found for token in output.token_ids)
        assert tokens == expected(asked("r0", 400), seed_of("r0", SamplingParams()))[: len(tokens)]
        for name in "ab":
            here.cluster.resume(name)
        stream = here.cluster.generate(asked("left", 400))  # closed by its caller in the middle of a move
        await anext(stream)
        here.router.drain(here.where("left"))
        here.cluster.consolidate()
        await stream.aclose()  # type: ignore[attr-defined]
        for name in "ab":
            here.router.drain(name)
        waiting = asyncio.create_task(outputs_of(here.cluster, asked("waiting")))
        await asyncio.sleep(0.02)
        await here.cluster.cancel("waiting")
        assert (await waiting)[-1].finish_reason == "cancelled"
        await here.check_idle()


# -- drains -----------------------------------------------------------------------------------------------------------


async def drained_s(cluster: Maker, *, kills: bool = False) -> tuple[float, int]:
    """Drain one of two full replicas, with more requests waiting all the time. Returns seconds, and moves."""
    async with cluster("a", over=1.0) as here:
        loop, asking = asyncio.get_running_loop(), list[asyncio.Task[int]]()

        def ask(name: str, num_tokens: int) -> None:
            asking.append(asyncio.create_task(answered(here, [asked(name, num_tokens)])))

        async def keep_busy() -> None:
            while True:
                if here.router.num_waiting < 8:
                    ask(f"short{len(asking)}", 10)  # 0.2 s
                await asyncio.sleep(0.005)

        for number in range(8):
            ask(f"long{number}", 1000)  # 20 s
        await asyncio.sleep(0.1)
        await here.add("b", LocalReplica())
        busy = asyncio.create_task(keep_busy())
        await asyncio.sleep(1.0)
        assert [len(replica.holds) for replica in here.router.replicas.values()] == [8, 8]
        began_s = loop.time()
        draining = asyncio.create_task(here.cluster.drain("a"))
        if kills:
            await asyncio.sleep(0.02)
            here.replicas["a"].kill()
        await asyncio.sleep(0)
        assert here.router.num_waiting > 4
        await draining
        took_s = loop.time() - began_s
        busy.cancel()
        return took_s, sum(await asyncio.gather(*asking))


@pytest.mark.parametrize("kills", [False, True])
@virtual
async def test_a_drain_ends_soon_although_requests_wait(cluster: Maker, kills: bool) -> None:
    took_s, num_moves = await drained_s(cluster, kills=kills)
    assert took_s < 1.5 and (kills or num_moves == 8)


@pytest.mark.exhaustive
@virtual
async def test_without_recalling_requests_a_drain_lasts_as_long_as_they_do(cluster: Maker) -> None:
    with patch.object(Router, "recall", lambda router: Recalled([], [])):
        assert (await drained_s(cluster))[0] > 15


@virtual
async def test_a_drained_replica_is_drained_after_its_line_was_lost(cluster: Maker) -> None:
    async with cluster(over=1.5) as here:
        assert await here.cluster.drain("a", 1.0)
        await here.restart("a")
        asking = asyncio.create_task(answered(here, [asked(f"r{number}", 50) for number in range(10)]))
        await asyncio.sleep(0.1)
        assert not here.router.replicas["a"].holds and here.router.replicas["b"].holds
        await asking
        here.cluster.resume("a")
        assert not here.router.replicas["a"].draining
        with pytest.raises(BadRequest, match="there is no replica 'c'; the replicas are a, b"):
            await here.cluster.drain("c")


# -- joining and leaving ----------------------------------------------------------------------------------------------


@virtual
async def test_a_replica_that_is_removed_while_it_joins_gets_no_requests(
    cluster: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster("a") as here:
        await here.cluster.remove("a")
        connect = members.connect

        async def slowly(*args: Any, **named: Any) -> object:
            await asyncio.sleep(1.0)
            return await connect(*args, **named)

        monkeypatch.setattr(members, "connect", slowly)
        here.cluster.add("a", at("a"))
        await asyncio.sleep(0.5)
        await here.cluster.remove("a")
        await asyncio.sleep(1.0)
        assert not here.cluster.members and not here.router.replicas
        await here.add("a")
        assert await answered(here, [asked("r")], 10) == 0


@virtual
async def test_a_replica_that_dies_while_it_joins_stays_a_member(
    cluster: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    joins = ReplicatedAdapters.join
    async with cluster("") as here:

        async def dies(self: ReplicatedAdapters, name: str, engine: Any) -> None:
            await joins(self, name, engine)
            here.replicas["a"].kill()
            await engine.wait_dead()

        with monkeypatch.context() as patched:
            patched.setattr(ReplicatedAdapters, "join", dies)
            here.ports[ord("a")] = here.replicas["a"] = LocalReplica()
            here.cluster.add("a", at("a"))
            await asyncio.sleep(0.1)
        assert list(here.cluster.members) == ["a"] and not here.cluster.status().num_waiting
        here.replicas["a"].start()
        assert await answered(here, [asked("r", 5)]) == 0


@virtual
async def test_a_failed_round_ends_neither_deadlines_nor_later_rounds(
    cluster: Maker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: LivePlacement) -> None:
        monkeypatch.setattr(LivePlacement, "tick", lambda _: None)
        raise RuntimeError("no plan")

    async with cluster("a") as here:
        monkeypatch.setattr(LivePlacement, "tick", fails)
        await asyncio.sleep(1)
        await here.cluster.remove("a")
        late = replace(asked("late", 5), max_ttft_s=0.5)  # it waits for a replica
        outputs = await asyncio.wait_for(outputs_of(here.cluster, late), 5)
        assert outputs[-1].error is not None and outputs[-1].error.code == "deadline_unreachable"
    failures = [record.getMessage() for record in caplog.records if record.exc_info]
    assert failures == ["a round of the cluster failed; the next one follows"]


# -- keys of first KV blocks ------------------------------------------------------------------------------------------


def prompt(*tokens: int, images: tuple[str, ...] = ()) -> Request:
    vision = tuple(VisionInput(kind="image", content_hash=each, num_tokens=1, fields={}) for each in images)
    return Request(request_id="r", prompt_ids=tokens, vision=vision)


def test_keys_are_equal_if_and_only_if_all_that_determines_the_kv_is() -> None:
    first, second = (prefix_keys(prompt(1, 2, 3, 4, *rest), "a@1", 2) for rest in ((5, 6, 7), (5, 9)))
    assert len(first) == len(second) == 3, "full blocks only"
    assert first[:2] == second[:2] and first[2] != second[2]
    made = [
        prefix_keys(prompt(*tokens, images=images), adapter, 2)
        for tokens, images, adapter in (
            ((1, 2, 3, 4), (), "a@1"),
            ((1, 2, 3, 4), (), "a@2"),
            ((1, 2, 3, 4), (), ""),
            ((1, 2, 3, 4), ("x",), "a@1"),
            ((1, 2, 3, 4), ("x", "y"), "a@1"),
            ((7, 2, 3, 4), (), "a@1"),
        )
    ]
    keys = [key for each in made for key in each]
    assert len(set(keys)) == len(keys) == 12
    assert len(prefix_keys(prompt(*range(10_000)), "", 16)) == MAX_BLOCKS and prefix_keys(prompt(1), "", 16) == ()


@virtual
async def test_token_ids_beyond_all_bounds_have_no_keys_and_are_refused(cluster: Maker) -> None:
    for token in (1 << 63, 1 << 64, -(1 << 63) - 1):
        assert prefix_keys(prompt(1, 2, 3, token), "", 2) == ()
    async with cluster("a") as here:
        error = (await outputs_of(here.cluster, prompt(*range(15), 1 << 64)))[-1].error
        assert error is not None and error.code == BadRequest.code
