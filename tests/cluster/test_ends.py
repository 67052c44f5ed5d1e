"""Requests that end late, unread, or with their replica, in virtual time: none hangs, none takes a place too long."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from tests.cluster.in_process import run_virtually
from tests.cluster.in_process_cluster import cluster_of
from tests.cluster.running import outputs_of
from tests.cluster.sleeping_engine import SleepingEngine
from tests.cluster.test_cluster import asked, check
from vlora.cluster import members
from vlora.errors import BadRequest, DeadlineUnreachable, Disconnected
from vlora.types import Request


def test_a_suspect_continues_when_its_replica_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with cluster_of(monkeypatch, 2) as here:
            request = asked("s", 400)
            answer = asyncio.create_task(outputs_of(here.cluster, request))
            for _ in range(2):
                await asyncio.sleep(0.2)
                await here.restart(here.where("s"))
                await asyncio.sleep(0.5)
            await here.cluster.remove(here.where("s"))
            timings = check(request, await asyncio.wait_for(answer, 60)).timings
            assert timings is not None and timings.num_deaths == 2

    run_virtually(main())


def test_finished_answers_take_no_place_until_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with cluster_of(monkeypatch, 1, over=1.0) as here:
            unread = [here.cluster.generate(asked(f"r{number}", 3)) for number in range(8)]
            firsts = [await anext(stream) for stream in unread]
            await asyncio.sleep(5.0)
            assert here.cluster.num_unfinished == 0
            check(asked("late", 3), await asyncio.wait_for(outputs_of(here.cluster, asked("late", 3)), 10))
            await here.restart("a")
            for number, (first, stream) in enumerate(zip(firsts, unread, strict=True)):
                outputs = [first, *[output async for output in stream]]
                timings = check(asked(f"r{number}", 3), outputs).timings
                assert timings is not None and timings.num_deaths == 0

    run_virtually(main())


def test_a_replica_that_is_removed_while_it_joins_gets_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with cluster_of(monkeypatch, 1) as here:
            await here.cluster.remove("a")
            connect = members.connect

            async def slowly(*args: object, **named: object) -> object:
                await asyncio.sleep(1.0)
                return await connect(*args, **named)  # type: ignore[arg-type]

            monkeypatch.setattr(members, "connect", slowly)
            joining = asyncio.create_task(here.add("a"))
            await asyncio.sleep(0.5)
            await here.cluster.remove("a")
            with pytest.raises(Disconnected, match="replica 'a' was removed before it had joined"):
                await joining
            assert not here.cluster.members and not here.router.replicas
            await here.add("a")
            check(asked("r"), await asyncio.wait_for(outputs_of(here.cluster, asked("r")), 10))

    run_virtually(main())


def test_the_latency_bound_also_ends_an_answer_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with cluster_of(monkeypatch, 1) as here:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            answer = asyncio.create_task(outputs_of(here.cluster, asked("r", 400, max_latency_s=3.0)))
            await asyncio.sleep(1.0)
            here.replicas["a"].kill()
            error = (await answer)[-1].error
            assert error is not None and error.code == "deadline_missed"
            assert 3.0 < loop.time() - began_s < 3.3

    run_virtually(main())


@pytest.mark.parametrize("at_s", [1.0, 5.0])
@pytest.mark.parametrize("how", ["drained", "died", "all died"])
def test_a_request_that_moves_is_not_refused_for_its_first_token_again(
    monkeypatch: pytest.MonkeyPatch, how: str, at_s: float
) -> None:
    """The replicas refuse whatever they would have to answer first within 3 s, and compute no token for 2 s."""
    bounds: list[float | None] = []
    add, step = SleepingEngine.add, SleepingEngine.step

    def refusing(self: SleepingEngine, request: Request) -> None:
        bounds.append(request.max_ttft_s)
        if request.max_ttft_s is not None and request.max_ttft_s < 3.0:
            raise DeadlineUnreachable("the deadline cannot be met")
        add(self, request)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        monkeypatch.setattr(SleepingEngine, "add", refusing)
        monkeypatch.setattr(
            SleepingEngine, "step", lambda engine: step(engine) if loop.time() > began_s + at_s + 2.0 else ()
        )
        async with cluster_of(monkeypatch, 2) as here:
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

    run_virtually(main())


def test_a_drained_replica_is_drained_after_its_line_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with cluster_of(monkeypatch, 2) as here:
            assert await here.cluster.drain("a", 1.0)
            await here.restart("a")
            outputs = [outputs_of(here.cluster, asked(f"r{number}", 50)) for number in range(10)]
            answers = asyncio.gather(*outputs)
            await asyncio.sleep(0.1)
            assert not here.router.replicas["a"].holds and here.router.replicas["b"].holds
            await answers
            here.cluster.resume("a")
            assert not here.router.replicas["a"].draining
            with pytest.raises(BadRequest, match="there is no replica 'c'; the replicas are a, b"):
                await here.cluster.drain("c")

    run_virtually(main())
