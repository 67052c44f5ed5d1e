"""Requests that end late, unread, or with their replica, in virtual time: none hangs, none takes a place too long."""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.in_process import run_virtually
from tests.cluster.in_process_cluster import cluster_of
from tests.cluster.running import outputs_of
from tests.cluster.test_cluster import asked, check
from vlora.cluster import members
from vlora.errors import BadRequest, Disconnected


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
