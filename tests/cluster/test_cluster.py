"""Nothing lost, doubled or changed when replicas die, hang, wake up, are drained or come later; on sleeping engines."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cluster.running import SLEEPING, ReplicaProcess, outputs_of, run, running
from tests.cluster.sleeping_engine import KILLER, expected
from vlora.cluster.cluster import Cluster
from vlora.cluster.members import Health
from vlora.errors import BadAdapter, BadRequest, EngineDead, UnknownAdapter
from vlora.types import Request, RequestOutput, SamplingParams, seed_of

pytestmark = pytest.mark.slow


def asked(name: str, num_tokens: int = 60, **fields: Any) -> Request:
    own = {key: fields.pop(key) for key in tuple(fields) if key in Request.__struct_fields__}
    sampling = SamplingParams(max_tokens=num_tokens, **fields)
    ids = tuple(1 + (7 * place + sum(name.encode())) % 480 for place in range(20))
    return Request(request_id=name, **{"prompt_ids": ids, "sampling": sampling, **own})


def check(request: Request, outputs: list[RequestOutput], version: str | None = None) -> RequestOutput:
    last = outputs[-1]
    assert last.error is None, last.error
    tokens = tuple(token for output in outputs for token in output.token_ids)
    assert tokens == expected(request, seed_of(request.request_id, request.sampling), version)
    assert last.timings is not None and last.timings.num_completion_tokens == len(tokens)
    if request.sampling.logprobs is not None:
        scores = [score.logprob for output in outputs for score in output.scores]
        assert scores == [-float(place) for place in range(len(tokens))]
    assert max(last.timings.queue_s, last.timings.ttft_s or 0.0) <= last.timings.latency_s
    return last


async def answer_mixed(cluster: Cluster, then: Callable[[], object]) -> list[int]:
    """Answer mixed requests; `then` is called in the middle of them. Returns the deaths under each."""
    answers = (
        outputs_of(cluster, each, 20 if each.request_id == "r0" else -1, then)  # type: ignore[arg-type]
        for each in MIXED
    )
    lasts = [check(request, found) for request, found in zip(MIXED, await asyncio.gather(*answers), strict=True)]
    return [last.timings.num_deaths for last in lasts if last.timings is not None]


MIXED = [asked(f"r{number}", seed=None if number % 2 else number) for number in range(6)]
MIXED += [asked("scored", logprobs=1), asked("whole", whole=True), asked("long", 150), asked("short", 3)]


def test_answers_statistics_and_reports() -> None:
    async def main() -> None:
        async with running("a", "b") as here:
            answers = await asyncio.gather(*(outputs_of(here.cluster, request) for request in MIXED))
            for request, outputs in zip(MIXED, answers, strict=True):
                last = check(request, outputs)
                assert last.timings is not None and last.timings.num_moves == last.timings.num_deaths == 0
            stats = await here.cluster.stats()
            assert stats.num_finished == len(MIXED) and stats.total_blocks == 2000
            while any(standing.free_blocks != 1000 for standing in here.router.replicas.values()):
                await asyncio.sleep(0.01)  # until each has reported
            same = (outputs_of(here.cluster, asked("same")) for _ in range(2))
            answer, refused = await asyncio.gather(*same, return_exceptions=True)
            assert isinstance(answer, list) and isinstance(refused, BadRequest)
            assert here.is_idle

    run(main())


@pytest.mark.parametrize("victim", ["engine", "replica", "both"])
def test_a_killed_replica_loses_nothing(victim: str) -> None:
    async def main() -> None:
        async with running("a", "b") as here:

            def kill() -> None:
                replica = here.replicas[here.where("r0")]
                replica.signal(signal.SIGKILL, engine=victim != "replica", actor=victim != "engine")

            answers = await asyncio.gather(
                *(outputs_of(here.cluster, each, 20 if each.request_id == "r0" else -1, kill) for each in MIXED)
            )
            lasts = [check(request, outputs) for request, outputs in zip(MIXED, answers, strict=True)]
            deaths = [last.timings.num_deaths for last in lasts if last.timings is not None]
            assert set(deaths) == {0, 1}
            assert len([name for name, member in here.cluster.members.items() if member.client]) == 1
            check(asked("after"), await outputs_of(here.cluster, asked("after")))

    run(main())


@pytest.mark.parametrize("engine_only", [True, False])
def test_a_hung_replica_is_given_up_and_heard_no_more_when_it_wakes(engine_only: bool) -> None:
    async def main() -> None:
        async with running("a", "b") as here:
            hung: list[ReplicaProcess] = []

            def hang() -> None:
                hung.append(here.replicas[here.where("r0")])
                hung[0].signal(signal.SIGSTOP, actor=not engine_only)

            answers = await asyncio.gather(
                *(outputs_of(here.cluster, each, 20 if each.request_id == "r0" else -1, hang) for each in MIXED)
            )
            for request, outputs in zip(MIXED, answers, strict=True):
                check(request, outputs)
            waking = [asked(f"w{number}", 150) for number in range(6)]
            tasks = [asyncio.create_task(outputs_of(here.cluster, each)) for each in waking]
            await asyncio.sleep(0.1)
            hung[0].signal(signal.SIGCONT)
            for request, outputs in zip(waking, await asyncio.gather(*tasks), strict=True):
                check(request, outputs)
            await asyncio.gather(*(member.wait_joined() for member in here.cluster.members.values()))
            # The replica has cancelled what the former line had asked for.
            await asyncio.sleep(0.3)
            assert (await here.cluster.stats()).num_running == 0

    run(main())


def test_a_pause_of_the_front_end_gives_no_replica_up() -> None:
    """Of twice the time in which a replica would be given up."""

    async def main() -> None:
        async with running("a", "b") as here:
            request = asked("r", 400)
            last = check(request, await outputs_of(here.cluster, request, 5, lambda: time.sleep(0.8)))
            assert last.timings is not None and last.timings.num_deaths == 0

    run(main())


def test_moved_to_and_fro_until_the_end() -> None:
    async def main() -> None:
        async with running("a", "b", over=8.0) as here:
            moving = True

            async def move() -> None:
                while moving:
                    for name in ("a", "b"):
                        assert await here.cluster.drain(name, 5.0)
                        here.cluster.resume(name)
                        await asyncio.sleep(0.02)

            requests = [*MIXED, asked("longest", 300), asked("whole and long", 200, whole=True)]
            mover = asyncio.create_task(move())
            answers = await asyncio.gather(*(outputs_of(here.cluster, request) for request in requests))
            moving = False
            await mover
            moves = []
            for request, outputs in zip(requests, answers, strict=True):
                timings = check(request, outputs).timings
                assert timings is not None and timings.num_deaths == 0
                moves.append(timings.num_moves)
            assert max(moves) > 5

    run(main())


def test_cancelled_during_a_move_and_while_it_waits() -> None:
    async def main() -> None:
        async with running("a", "b", over=1.0) as here:
            cluster = here.cluster
            began = asyncio.Event()
            task = asyncio.create_task(outputs_of(cluster, asked("r0", 400), 5, began.set))
            await began.wait()
            here.router.drain(here.where("r0"))
            assert cluster.consolidate() == 1
            await cluster.cancel("r0")
            found = await task
            assert found[-1].finish_reason == "cancelled" and found[-1].error is not None
            assert found[-1].error.message == "request 'r0' was cancelled"
            tokens = tuple(token for output in found for token in output.token_ids)
            whole = expected(asked("r0", 400), seed_of("r0", SamplingParams()))
            assert tokens == whole[: len(tokens)]
            # Closed by its caller in the middle of a move.
            for name in ("a", "b"):
                cluster.resume(name)
            stream = cluster.generate(asked("left", 400))
            await anext(stream)
            here.router.drain(here.where("left"))
            cluster.consolidate()
            await stream.aclose()  # type: ignore[attr-defined]
            # Waiting for a replica.
            for name in ("a", "b"):
                here.router.drain(name)
            waiting = asyncio.create_task(outputs_of(cluster, asked("waiting")))
            await asyncio.sleep(0.02)
            await cluster.cancel("waiting")
            assert (await waiting)[-1].finish_reason == "cancelled"
            await asyncio.sleep(0.2)
            assert here.is_idle and (await cluster.stats()).num_running == 0

    run(main())


def test_requests_wait_while_all_replicas_are_gone() -> None:
    async def main() -> None:
        async with running("a") as here:

            async def kill_and_replace() -> None:
                here.replicas["a"].signal(signal.SIGKILL)
                await asyncio.sleep(0.1)
                await here.add("b")

            request = asked("r", 100)
            last = check(request, await outputs_of(here.cluster, request, 10, kill_and_replace))
            assert last.timings is not None and last.timings.num_deaths == 1 and last.timings.queue_s > 0.05
            here.replicas["b"].signal(signal.SIGKILL)
            last = (await outputs_of(here.cluster, asked("late")))[-1]
            assert last.error is not None and last.error.code == "engine_dead"
            assert "no replica can be used: a: " in last.error.message
            with pytest.raises(EngineDead, match="no replica can be used"):
                await outputs_of(here.cluster, asked("later"))
            await here.add("c")
            check(request, await outputs_of(here.cluster, request))

    run(main())


def test_a_replica_gets_no_request_while_its_engine_hangs() -> None:
    """Its own process opens lines meanwhile."""

    async def main() -> None:
        async with running("a", "b", rule="round_robin") as here:
            here.replicas["a"].signal(signal.SIGSTOP, actor=False)
            while here.cluster.members["a"].client is not None:
                await asyncio.sleep(0.01)
            for number in range(30):
                await asyncio.sleep(0.05)
                last = check(request := asked(f"q{number}", 3), await outputs_of(here.cluster, request))
                assert last.timings is not None and last.timings.num_deaths == 0
            assert here.cluster.status().num_deaths == 1
            here.replicas["a"].signal(signal.SIGCONT)
            await here.cluster.members["a"].wait_joined()

    run(main())


def test_a_bound_that_passes_while_a_replica_hangs() -> None:
    async def main() -> None:
        async with running("a", "b", health=Health(beat_s=0.2, missed=4)) as here:
            request = asked("late", 10_000, max_latency_s=0.6)
            kept = asked("kept", 100, max_latency_s=20.0, max_ttft_s=0.5)
            hang = asyncio.get_running_loop().call_later(
                0.2, lambda: here.replicas[here.where("late")].signal(signal.SIGSTOP)
            )
            found, other = await asyncio.gather(outputs_of(here.cluster, request), outputs_of(here.cluster, kept))
            hang.cancel()
            error = found[-1].error
            assert error is not None and error.code == "deadline_missed"
            assert error.message.startswith("request 'late' exceeded its max_latency_s of 0.6 s: ")
            assert len([output for output in found if output.token_ids]) > 1
            check(kept, other)

    run(main())


def test_a_request_that_kills_replicas_ends_and_takes_no_other_along() -> None:
    async def main() -> None:
        async with running("a", "b", over=8.0) as here:

            async def restart() -> None:
                """As Ray starts an actor again."""
                while True:
                    for name, replica in here.replicas.items():
                        if replica.process.returncode is not None:
                            here.replicas[name] = await ReplicaProcess.start(port=replica.address.port)
                    await asyncio.sleep(0.02)

            restarting = asyncio.create_task(restart())
            killer = asked("killer", prompt_ids=(KILLER, 1, 2))
            others = [asked(f"o{number}", 80) for number in range(12)]
            answers = await asyncio.gather(*(outputs_of(here.cluster, each) for each in (*others, killer)))
            restarting.cancel()
            for request, outputs in zip(others, answers, strict=False):
                check(request, outputs)
            error = answers[-1][-1].error
            assert error is not None and error.code == "step_failed"
            assert error.message.startswith("3 replicas died while they computed this request, the last one: ")
            check(asked("after"), await outputs_of(here.cluster, asked("after")))

    run(main())


def test_adapters_are_changed_on_all_replicas_or_on_none(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("1")
    second.write_text("2")

    async def main() -> None:
        async with running("a", "b") as here:
            cluster = here.cluster
            version = (await cluster.load_adapter("x", str(first))).version
            request = asked("r", 60, adapter="x")
            check(request, await outputs_of(cluster, request), version)
            with pytest.raises(BadAdapter, match="there is no such file"):
                await cluster.load_adapter("x", str(tmp_path / "nothing"))
            with pytest.raises(UnknownAdapter):
                await cluster.unload_adapter("y")
            # A replica that joins later has it, too; what one replica does not have is found elsewhere.
            await here.add("c")
            await cluster.members["a"].client.unload_adapter("x")  # type: ignore[union-attr]
            answers = await asyncio.gather(
                *(outputs_of(cluster, replace(request, request_id=f"r{n}")) for n in range(9))
            )
            for number, outputs in enumerate(answers):
                check(replace(request, request_id=f"r{number}"), outputs, version)
            unknown = await outputs_of(cluster, asked("u", adapter="y"))
            assert unknown[-1].error is not None and unknown[-1].error.code == "unknown_adapter"

            # An answer goes on with the content with which it began, although its replica dies after a reload.
            async def reload_and_kill() -> None:
                await cluster.load_adapter("x", str(second))
                here.replicas[here.where("moved")].signal(signal.SIGKILL)

            moved = await outputs_of(cluster, asked("moved", 200, adapter="x"), 5, reload_and_kill)
            check(asked("moved", 200, adapter="x"), moved, version)
            assert [status.name for status in await cluster.adapters()] == ["x"]
            await cluster.unload_adapter("x")
            assert await cluster.adapters() == ()

    run(main())


def test_random_moves_deaths_and_pauses_of_processes() -> None:
    async def main() -> None:
        draws = random.Random(0)
        async with running("a", "b", "c", over=4.0) as here:
            busy = True

            async def trouble() -> None:
                while busy:
                    await asyncio.sleep(draws.uniform(0.02, 0.1))
                    name = draws.choice(sorted(here.replicas))
                    replica, what = here.replicas[name], draws.random()
                    if what < 0.6:
                        if name in here.router.replicas:
                            await here.cluster.drain(name, 0.1)
                        if name in here.router.replicas:
                            here.cluster.resume(name)
                    elif what < 0.8:
                        replica.signal(signal.SIGKILL, engine=draws.random() < 0.5)
                        await replica.process.wait()
                        here.replicas[name] = await ReplicaProcess.start(SLEEPING, port=replica.address.port)
                    else:
                        replica.signal(signal.SIGSTOP)
                        await asyncio.sleep(draws.choice([0.1, 0.8]))
                        replica.signal(signal.SIGCONT)

            async def life(number: int) -> None:
                await asyncio.sleep(draws.uniform(0, 2.0))
                request = asked(f"r{number}", draws.randint(1, 120), whole=draws.random() < 0.2)
                if draws.random() < 0.2:
                    stream = here.cluster.generate(request)
                    await anext(stream)
                    await stream.aclose()  # type: ignore[attr-defined]
                    return
                found = await outputs_of(here.cluster, request)
                if (error := found[-1].error) is None:
                    check(request, found)
                else:
                    # Chance may let three replicas die under one request, which then counts as their cause.
                    assert error.code == "step_failed" and "3 replicas died" in error.message
                    failed.append(number)

            failed: list[int] = []
            making = asyncio.create_task(trouble())
            await asyncio.gather(*(life(number) for number in range(60)))
            busy = False
            await making
            assert len(failed) <= 6
            assert here.is_idle

    run(main())
