"""Adapters that change on replica after replica under answers, and replicas that cannot follow; in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.in_process import V1, V2, V3, Here, LocalReplica, Maker, run_virtually, virtual
from tests.cluster.running import asked, check, outputs_of
from tests.cluster.sleeping_engine import expected, version_of
from vlora.cluster.adapter_state import AdapterState, DesiredAdapter
from vlora.cluster.former_contents import MAX_FORMER
from vlora.cluster.held_requests import CONTENT_S
from vlora.cluster.replica_adapters import FIRST_PAUSE_S, RETRY_S, ReplicaAdapters
from vlora.engine.operations import LoadAdapter
from vlora.errors import Aborted, AdapterChanged, BadAdapter, BadRequest, UnknownAdapter, VLoraError
from vlora.routing import RULES
from vlora.types import Request, RequestOutput, seed_of


def began_with(request: Request, outputs: list[RequestOutput]) -> str:
    """The version of the adapter that gives exactly this answer."""
    tokens = tuple(token for output in outputs for token in output.token_ids)
    seed = seed_of(request.request_id, request.sampling)
    return next(version for version in (V1, V2, V3) if tokens == expected(request, seed, version))


async def served(here: Here, adapter: str = "x", version: str = V1, number: int = 1) -> None:
    """Check that requests of an adapter are answered with a content."""
    for place in range(number):
        request = asked(f"{adapter} {version} {place} {asyncio.get_running_loop().time()}", 5, adapter=adapter)
        check(request, await outputs_of(here.cluster, request), version)


async def refused(here: Here, code: str, adapter: str = "x") -> str:
    """The message with which a request is refused."""
    name = f"refused {asyncio.get_running_loop().time()}"
    error = (await outputs_of(here.cluster, asked(name, adapter=adapter)))[-1].error
    assert error is not None and error.code == code
    return error.message


async def places(here: Here, adapter: str = "x") -> dict[str, tuple[str, str]]:
    """State and cause of an adapter on each replica."""
    found = await here.cluster.adapter_places()
    return {each.replica: (each.state, each.cause) for each in found if each.adapter == adapter}


# -- answers during changes -------------------------------------------------------------------------------------------


Event = Callable[[Here], Awaitable[None]]


async def go_on(here: Here, event: Event, number: int = 6, num_tokens: int = 120) -> tuple[int, int]:
    """Check that answers go on with the first content after a change under them. Returns their moves and deaths."""
    await here.load("1")
    requests = [asked(f"r{place}", num_tokens, adapter="x", seed=place) for place in range(number)]
    answers = await asyncio.gather(
        *(
            outputs_of(here.cluster, each, 5, (lambda: event(here)) if place == 0 else None)
            for place, each in enumerate(requests)
        )
    )
    done = [check(*each, V1).timings for each in zip(requests, answers, strict=True)]
    await here.check_idle()
    timings = [each for each in done if each is not None]
    return sum(each.num_moves for each in timings), sum(each.num_deaths for each in timings)


async def reload_twice(here: Here) -> None:
    for text in "23":
        await here.load(text)
        await here.move_all()


async def kill_its_replica(here: Here) -> None:
    await here.load("2")
    here.replicas[here.where("r0")].kill()


async def drain_the_only_replica_with_it(here: Here) -> None:
    """The other one, which has restarted since, has the new content only."""
    await here.load("2")
    holder = here.where("r0")
    await here.restart("b" if holder == "a" else "a")
    assert not await here.cluster.drain(holder, 0.5) and here.where("r0") == holder


async def move_to_one_that_has_lost_it(here: Here) -> None:
    await here.load("2")
    other = here.replicas["a" if here.where("r0") == "b" else "b"]
    other.engine.keep_adapters({})  # the cluster does not know
    await here.move_all()
    assert other.num_requests == 1  # it has refused once


async def end_another_answer_during_a_slow_change(here: Here) -> None:
    here.replicas["b"].call_s = 1.0
    loading = asyncio.create_task(here.load("2"))
    await asyncio.sleep(0.5)
    await outputs_of(here.cluster, asked("short", 3, adapter="x"))
    assert not loading.done()
    await loading
    here.replicas["b"].call_s = 0.0
    await here.move_all()


async def unload(here: Here) -> None:
    await here.cluster.unload_adapter("x", drain=True)
    assert await here.cluster.adapters() == ()
    await here.move_all()


async def register_another_folder(here: Here) -> None:
    """No replica has read it, and an answer that waited begins with the former content."""
    await here.cluster.register_adapters({"x": here.paths["2"]})


async def load_more_than_are_kept(here: Here) -> None:
    for text in map(str, range(10, 20)):
        here.paths[text] = str(Path(here.paths["1"]).with_name(text))
        Path(here.paths[text]).write_text(text)
        await here.load(text)
    assert {len(replica.engine.kept) for replica in here.replicas.values()} == {MAX_FORMER}


async def cut_the_only_line(here: Here) -> None:
    await here.load("2")
    assert here.replicas["a"].engine.kept
    here.replicas["a"].cut()


def reload_and_cut(dies: str = "") -> Event:
    """Engines keep the former content, whichever joins first; one that has died lacks it."""

    async def event(here: Here) -> None:
        await here.load("2")
        for name in sorted("abc", key=lambda name: name != dies):
            if name == dies:
                here.replicas[name].kill()
                here.replicas[name].start()
            else:
                here.replicas[name].cut()
        await asyncio.sleep(1.0)
        await here.all_joined()
        await asyncio.sleep(0.1)
        assert {name for name, each in here.router.replicas.items() if ("x", V1) in each.lacks} == set(dies)
        await here.move_all()

    return event


# event, replicas, rule; number of answers and of their tokens; least moves, deaths; the content that is served then
MOVED, STAYED, ANY = (1, 0), (0, 0), (0, None)
CHANGES: list[tuple[Event, str, str, tuple[int, int], tuple[int, int | None], str]] = [
    *((reload_twice, "ab", rule, (6, 120), MOVED, V3) for rule in RULES),
    (kill_its_replica, "ab", "placed", (1, 120), (0, 1), V2),
    (drain_the_only_replica_with_it, "ab", "placed", (1, 200), STAYED, V2),
    (move_to_one_that_has_lost_it, "ab", "placed", (1, 120), MOVED, V2),
    (end_another_answer_during_a_slow_change, "ab", "placed", (1, 300), MOVED, V2),
    # More than are computed at a time: some have not begun when the adapter is unloaded, and they move.
    (unload, "ab", "placed", (40, 60), ANY, ""),
    (register_another_folder, "ab", "placed", (20, 60), ANY, V2),
    (load_more_than_are_kept, "ab", "placed", (1, 300), ANY, version_of("19")),  # where it is, it goes on
    (cut_the_only_line, "a", "placed", (1, 120), (0, 1), V2),
    *((reload_and_cut(dies), "abc", "least_loaded", (12, 120), ANY, V2) for dies in ("", "a", "b")),
]


@pytest.mark.parametrize(("event", "names", "rule", "answers", "outcome", "then"), CHANGES)
@virtual
async def test_answers_go_on_with_the_content_with_which_they_began(
    cluster: Maker, event: Event, names: str, rule: str, answers: tuple[int, int], outcome: Any, then: str
) -> None:
    async with cluster(names, rule) as here:
        num_moves, num_deaths = await go_on(here, event, *answers)
        assert num_moves >= outcome[0] and outcome[1] in (None, num_deaths)
        if outcome == STAYED:
            assert num_moves == 0
        if not then:
            await refused(here, "unknown_adapter")
            return
        await served(here, version=then)
        assert here.cluster.desired_adapters["x"].version == then


@virtual
async def test_an_answer_that_begins_on_a_replica_that_has_not_followed_yet_goes_on(cluster: Maker) -> None:
    """The others keep the former content until no replica begins answers with it."""
    async with cluster() as here:
        await here.load("1")
        here.replicas["b"].call_s = 1.0
        loading = asyncio.create_task(here.load("2"))
        await asyncio.sleep(0.5)
        here.router.drain("a")
        request = asked("r", 200, adapter="x")
        answer = asyncio.create_task(outputs_of(here.cluster, request))
        await asyncio.sleep(0.2)
        assert here.where("r") == "b" and here.contents() == {V1, V2}
        here.router.drain("a", False)
        await loading
        await here.move_all()
        timings = check(request, await answer, V1).timings
        assert timings is not None and timings.num_moves
        await here.check_idle()


@virtual
async def test_an_answer_whose_content_no_replica_has_ends_with_one_line(cluster: Maker) -> None:
    async with cluster() as here:
        await here.load("1")

        async def reload() -> None:
            await here.load("2")
            await here.add("c", LocalReplica())  # which has the new content only
            for name in "ab":
                here.replicas[name].kill()

        error = (await outputs_of(here.cluster, asked("r", 120, adapter="x"), 5, reload))[-1].error
        assert (
            error is not None
            and error.code == "adapter_changed"
            and error.message.startswith(
                "no replica has the content of adapter 'x' with which the answer to request 'r' began any more, after "
            )
        )
        await here.check_idle()


@pytest.mark.parametrize("away_s", [2.0, None])
@virtual
async def test_answers_wait_for_the_replica_that_has_their_content(cluster: Maker, away_s: float | None) -> None:
    """It joins last, or does not: then they end after a bounded time. Other requests are served meanwhile."""
    async with cluster() as here:
        await here.load("1")
        loop, cut_s = asyncio.get_running_loop(), 0.0

        async def reload_and_cut() -> None:
            nonlocal cut_s
            await here.load("2")
            here.replicas["a"].kill()
            here.replicas["a"].start()
            here.replicas["b"].cut()
            here.replicas["b"].hung = True
            cut_s = loop.time()
            await asyncio.sleep(1.0)
            assert here.router.replicas.keys() == {"a"}
            await served(here, version=V2)
            if away_s is not None:
                loop.call_later(away_s - 1.0, here.replicas["b"].wake)

        request = asked("r0", 120, adapter="x", seed=0)
        outputs = await outputs_of(here.cluster, request, 5, reload_and_cut)
        if away_s is not None:
            check(request, outputs, V1)
            await here.check_idle()
            return
        error = outputs[-1].error
        assert error is not None and error.code == AdapterChanged.code
        assert CONTENT_S <= loop.time() - cut_s < CONTENT_S + 2.0


_CHANGES_WHILE_OTHERS_SYNCHRONIZE = (194, 547, 562)
_SEEDS = [
    0,
    *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 5)),
    *_CHANGES_WHILE_OTHERS_SYNCHRONIZE,
]


@pytest.mark.parametrize("seed", _SEEDS)
@virtual
async def test_random_reloads_and_moves_change_no_answer(cluster: Maker, seed: int) -> None:
    """Each answer is that of one content; without deaths none fails."""
    draws = random.Random(seed)
    deaths = seed % 2 == 1
    async with cluster("abc", draws.choice(list(RULES))) as here:
        await here.load("1")
        busy = True

        async def trouble() -> None:
            while busy:
                await asyncio.sleep(draws.expovariate(5))
                match draws.choice(["load", "move", "move", "kill"]):
                    case "load":
                        here.replicas[draws.choice("abc")].call_s = draws.choice([0.0, 0.3])
                        await here.load(draws.choice("123"))
                    case "move":
                        await here.move_all()
                    case "kill" if deaths:
                        replica = here.replicas[draws.choice("abc")]
                        replica.kill()
                        await asyncio.sleep(draws.uniform(0, 0.3))
                        replica.start()

        async def ask(number: int) -> str:
            await asyncio.sleep(draws.uniform(0, 4))
            request = asked(f"r{number}", draws.randint(1, 80), adapter="x", seed=number)
            outputs = await outputs_of(here.cluster, request)
            error = outputs[-1].error
            if error is None:
                return began_with(request, outputs)
            assert deaths and error.code in ("adapter_changed", "step_failed"), error
            return error.code

        making = asyncio.create_task(trouble())
        found = await asyncio.gather(*(ask(number) for number in range(40)))
        busy = False
        await making
        assert {V1, V2, V3} & set(found)
        await here.all_joined()
        await here.check_idle()
        assert len(here.contents()) == 1


# -- changes ----------------------------------------------------------------------------------------------------------


@virtual
async def test_a_reload_reaches_replica_after_replica(cluster: Maker) -> None:
    async with cluster("abc") as here:
        await here.load("1")
        for replica in here.replicas.values():
            replica.call_s = 1.0
            replica.calls.clear()
        loading = asyncio.create_task(here.load("2"))
        seen = []
        while not loading.done():
            seen.append(here.contents())
            await asyncio.sleep(0.05)
        assert {V1, V2} in seen and here.contents() == {V2}
        # A replica that joins meanwhile waits for none of it.
        calls = [[type(call) for call in replica.calls] for replica in here.replicas.values()]
        assert all(own.count(LoadAdapter) == 1 for own in calls)


@virtual
async def test_an_unload_without_draining_ends_requests_on_each_replica(cluster: Maker) -> None:
    async with cluster(rule="least_loaded") as here:
        await here.load("1")
        names = [f"r{number}" for number in range(4)]
        answers = [asyncio.create_task(outputs_of(here.cluster, asked(name, 200, adapter="x"))) for name in names]
        await asyncio.sleep(0.5)
        assert {*map(here.where, names)} == {"a", "b"}
        await here.cluster.unload_adapter("x")
        for outputs in await asyncio.gather(*answers):
            error = outputs[-1].error
            assert error is not None and (error.code, error.message) == ("aborted", "adapter 'x' was unloaded")
        await here.load("1")
        await served(here)
        await here.cluster.unload_adapter("x", drain=True)
        assert here.contents() == {""}
        await here.check_idle()


@virtual
async def test_an_unload_counts_although_an_earlier_change_ends_later(cluster: Maker) -> None:
    """Requests are ended also where a load was under way; what was to be read again goes; a later drain ends none."""
    async with cluster() as here:
        await here.load("1")
        slow = here.replicas["b"]
        for verified in (False, True):
            slow.call_s = 1.0
            loading = asyncio.create_task(here.load("2"))
            await asyncio.sleep(0.5)
            here.router.drain("a")
            answer = asyncio.create_task(outputs_of(here.cluster, asked(f"r {verified}", 200, adapter="x")))
            await asyncio.sleep(0.2)
            if verified:
                here.cluster._adapters.homes["b"].verify("x")  # noqa: SLF001
            await here.cluster.unload_adapter("x")
            error = (await answer)[-1].error
            assert error is not None and error.message == "adapter 'x' was unloaded" and here.contents() == {""}
            here.router.drain("a", False)
            slow.call_s = 0.0
            await loading
            await here.load("1")
        asking = asked("last", 100, adapter="x")
        answer = asyncio.create_task(outputs_of(here.cluster, asking))
        await asyncio.sleep(0.5)
        await here.cluster.unload_adapter("x", drain=True)
        check(asking, await answer, V1)
        await here.check_idle()


@virtual
async def test_a_request_that_comes_before_an_adapter_is_on_its_replica_fails_nothing(cluster: Maker) -> None:
    async with cluster(rule="least_loaded") as here:
        slow = here.replicas["b"]
        slow.call_s = 1.0
        before = asyncio.create_task(here.cluster.load_adapter("y", here.paths["2"]))
        await asyncio.sleep(0.5)
        loading = asyncio.create_task(here.cluster.load_adapter("x", here.paths["1"]))
        await asyncio.sleep(0.1)
        answers = [outputs_of(here.cluster, asked(f"r{number}", adapter="x")) for number in range(4)]
        asking = asyncio.gather(*answers)
        await asyncio.sleep(0.1)
        assert here.router.replicas["b"].barred == {"x"} and slow.num_requests
        assert (await before).error is None and (await loading).error is None
        assert not here.router.replicas["b"].barred
        for number, outputs in enumerate(await asking):
            check(asked(f"r{number}", adapter="x"), outputs, V1)


@virtual
async def test_a_replica_does_not_return_to_what_was_desired_before(
    cluster: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins to synchronize while a change is at it, and goes on after the change."""
    homes: dict[str, ReplicaAdapters] = {}
    follow = ReplicaAdapters.follow

    def noted(home: ReplicaAdapters) -> None:
        homes[home.name] = home
        follow(home)

    monkeypatch.setattr(ReplicaAdapters, "follow", noted)
    async with cluster() as here:
        await here.load("1")
        here.replicas["b"].call_s = 1.0
        loading = asyncio.create_task(here.load("2"))
        await asyncio.sleep(0.5)
        homes["b"].wake()
        await loading
        for _ in range(100):
            assert here.contents() == {V2}
            await asyncio.sleep(0.05)


@virtual
async def test_a_replica_that_joins_waits_for_no_change(cluster: Maker) -> None:
    async with cluster() as here:
        await here.load("1")
        here.replicas["a"].call_s = 30.0
        loading = asyncio.create_task(here.load("2"))
        await asyncio.sleep(0.1)
        began_s = asyncio.get_running_loop().time()
        await here.restart("b")
        assert asyncio.get_running_loop().time() - began_s < 5.0 and not loading.done()
        await loading
        await asyncio.sleep(1.0)
        assert here.contents() == {V2}


@virtual
async def test_a_replica_that_does_not_answer_holds_a_change_up_for_a_time_only(cluster: Maker) -> None:
    async with cluster() as here:
        await here.load("1")
        here.replicas["b"].call_s = 1e6
        began_s = asyncio.get_running_loop().time()
        status = await here.cluster.load_adapter("x", here.paths["2"])
        assert status.version == V2 and status.error == "replica 'b': it has not answered yet"
        assert asyncio.get_running_loop().time() - began_s < 61.0  # a client waits for 120 s
        # Nor does it hold up a status.
        assert [(status.name, status.version) for status in await here.cluster.adapters()] == [("x", V2)]
        assert await places(here) == {"a": ("device", ""), "b": ("unknown", "it does not answer")}
        here.replicas["a"].call_s = 1e6
        await asyncio.sleep(600.0)
        with pytest.raises(Aborted, match=r"^replica 'a': it did not answer within 300 s"):
            await here.cluster.load_adapter("x", here.paths["3"])


@virtual
async def test_a_change_waits_for_one_retry_of_a_slow_replica_only(cluster: Maker) -> None:
    async with cluster() as here:
        await here.load("1")
        names = [f"y{number}" for number in range(5)]
        for name in names:
            await here.cluster.load_adapter(name, here.paths["2"])
        slow = here.replicas["b"]
        slow.faults = dict.fromkeys(names, "")
        await here.restart("b")
        await asyncio.sleep(1.0)
        assert here.router.replicas["b"].barred == {*names}
        slow.call_s = 100.0
        await asyncio.sleep(150.0)  # one was tried, and now all others are due
        began_s = asyncio.get_running_loop().time()
        await here.load("2")
        assert asyncio.get_running_loop().time() - began_s < 350.0
        slow.call_s = 0.0
        slow.faults.clear()
        await asyncio.sleep(600.0)
        assert not here.router.replicas["b"].barred


@virtual
async def test_two_changes_at_once_end_alike_everywhere(cluster: Maker) -> None:
    async with cluster("abc") as here:
        await here.load("1")
        for number, replica in enumerate(here.replicas.values()):
            replica.call_s = 0.1 * number
        changes = [here.load("2"), here.load("3"), here.cluster.pin_adapter("x", True), here.load("2")]
        *done, refusal = await asyncio.gather(*changes, return_exceptions=True)
        assert not isinstance(done[0], BaseException)
        assert isinstance(refusal, BadRequest) and "is pinned" in str(refusal)
        assert here.contents() == {V3}
        [status] = await here.cluster.adapters()
        assert status.version == V3 and status.pinned


@pytest.mark.parametrize("text", ["", "3"], ids=["no file", "other content"])
@virtual
async def test_a_change_is_refused_by_the_first_replica_or_fails_on_others_alone(cluster: Maker, text: str) -> None:
    async with cluster("abc") as here:
        await here.load("1")
        if text == "":
            here.replicas["a"].faults["x"] = text
            with pytest.raises(BadAdapter, match=r"^replica 'a': .*no such file"):
                await here.cluster.load_adapter("x", here.paths["2"])
            with pytest.raises(BadAdapter, match=r"^replica 'a': "):
                await here.cluster.register_adapters({"x": here.paths["2"]})
            assert here.contents() == {V1}
            await served(here)
            del here.replicas["a"].faults["x"]
        here.replicas["b"].faults["x"] = text
        status = await here.cluster.load_adapter("x", here.paths["2"])
        why = "there is no such file" if text == "" else f"its content is {V3}, but {V2} was registered"
        assert status.version == V2 and (status.error or "").startswith("replica 'b': ") and why in (status.error or "")
        found = await places(here)
        assert found["a"] == found["c"] == ("device", "") and found["b"][0] == "failed" and why in found["b"][1]
        assert here.router.replicas["b"].barred == {"x"}
        await served(here, version=V2, number=6)
        del here.replicas["b"].faults["x"]
        assert (await here.cluster.load_adapter("x", here.paths["2"])).error is None
        assert not here.router.replicas["b"].barred and here.contents() == {V2}
        with pytest.raises(UnknownAdapter, match="no adapter named 'z'; registered: x"):
            await here.cluster.unload_adapter("z")
        with pytest.raises(UnknownAdapter, match="no adapter named 'z'"):
            await here.cluster.pin_adapter("z", True)
        await here.check_idle()


def test_a_change_without_room_on_the_disk_is_undone(cluster: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cluster.folder / "state"

    def full(path: Path, data: bytes, mode: int) -> None:
        raise OSError(28, "No space left on device")

    async def main() -> None:
        async with cluster(adapters=AdapterState.open(folder)) as here:

            async def changes(here: Here) -> None:
                with monkeypatch.context() as patched:
                    patched.setattr("vlora.cluster.adapter_state.write_whole", full)
                    for change in (
                        here.cluster.load_adapter("x", here.paths["2"]),
                        here.cluster.load_adapter("y", here.paths["2"]),
                        here.cluster.pin_adapter("x", True),
                        here.cluster.unload_adapter("x"),
                    ):
                        with pytest.raises(VLoraError, match="No space left on device"):
                            await change
                await asyncio.sleep(0.1)

            await go_on(here, changes, 1)
            assert here.contents() == {V1}
            [status] = await here.cluster.adapters()
            assert status.name == "x" and not status.pinned

    run_virtually(main())
    assert AdapterState.open(folder).adapters == {"x": DesiredAdapter(str(cluster.folder / "1"), V1)}


@virtual
async def test_a_pin_is_refused_by_the_first_replica_or_fails_on_others_alone(cluster: Maker) -> None:
    async with cluster("abcd") as here:
        await here.load("1")
        here.replicas["a"].faults["pin x"] = "no slot"
        with pytest.raises(BadRequest, match=r"^replica 'a': no slot$"):
            await here.cluster.pin_adapter("x", True)
        assert not any(replica.engine.adapters()[0].pinned for replica in here.replicas.values())
        del here.replicas["a"].faults["pin x"]
        here.replicas["d"].faults["pin x"] = "no slot"
        here.replicas["a"].call_s = 1.0
        pinning = asyncio.create_task(here.cluster.pin_adapter("x", True))
        await asyncio.sleep(0.5)
        assert here.replicas["a"].engine.adapters()[0].pinned
        here.replicas["a"].kill()  # the next one is the first
        status = await pinning
        assert status.pinned and status.error == "replica 'd': no slot"
        # The adapter is used where it is not pinned.
        found = {each.replica: (each.state, each.pinned, each.cause) for each in await here.cluster.adapter_places()}
        assert found["d"] == ("device", False, "no slot") and found["b"] == ("device", True, "")
        here.replicas["a"].call_s = 0.0
        here.replicas["a"].start()
        await here.cluster.members["a"].wait_joined()
        del here.replicas["d"].faults["pin x"]
        await asyncio.sleep(2 * FIRST_PAUSE_S)
        assert all(each.pinned and not each.cause for each in await here.cluster.adapter_places())


# -- replicas that cannot follow --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "why"), [("", "there is no such file"), ("3", f"its content is {V3}, but {V1} was")])
@virtual
async def test_a_replica_that_fails_one_adapter_serves_the_others(
    cluster: Maker, text: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster() as here:
        await here.load("1")
        await here.cluster.load_adapter("y", here.paths["2"])
        replica = here.replicas["b"]
        replica.faults["x"] = text
        await here.restart("b")
        assert here.router.replicas["b"].barred == {"x"}
        here.router.drain("a")  # so that all would go to the other one
        await served(here, "y", V2, 3)
        here.router.drain("a", False)
        await served(here, number=8)
        state, cause = (await places(here))["b"]
        assert state == "failed" and why in cause
        assert caplog.text.count("replica 'b' cannot serve adapter 'x'") == 1

        def num_tries() -> int:
            return sum(isinstance(call, LoadAdapter) and call.name == "x" for call in replica.calls)

        # It is tried again with growing pauses, and used again once it is as desired.
        before = num_tries()
        await asyncio.sleep(100 * FIRST_PAUSE_S)
        assert 3 <= num_tries() - before <= 8
        del replica.faults["x"]
        await asyncio.sleep(61.0)
        here.router.drain("a")
        await served(here)
        assert {each.state for each in await here.cluster.adapter_places()} == {"device"}


@virtual
async def test_an_adapter_that_no_replica_can_serve_says_why(cluster: Maker) -> None:
    async with cluster() as here:
        for replica in here.replicas.values():
            replica.faults["x"] = ""
        await here.cluster.load_adapter("y", here.paths["2"])
        here.cluster.desired_adapters["x"] = DesiredAdapter(here.paths["1"], V1)  # as after a start with a state
        for name in "ab":
            await here.restart(name)
        await asyncio.sleep(3.0)
        message = await refused(here, "bad_adapter")
        assert "'a': " in message and "there is no such file" in message
        listed = {status.name: status for status in await here.cluster.adapters()}
        assert listed["y"].error is None and "no such file" in (listed["x"].error or "")
        with pytest.raises(BadAdapter, match="no such file"):
            await here.cluster.pin_adapter("x", True)


@virtual
async def test_a_replica_that_served_another_front_end_is_reconciled(cluster: Maker) -> None:
    """That one was killed after a change and before it was written, and it kept a former content."""
    state = AdapterState()
    state.adapters = {
        "x": DesiredAdapter(str(cluster.folder / "1"), V1),
        "pinned": DesiredAdapter(str(cluster.folder / "2"), V2, True),
    }
    async with cluster("", adapters=state) as here:
        replica = LocalReplica()
        replica.engine.load_adapter("x", here.paths["3"])
        replica.engine.keep_adapters({"x": (V3,)})
        for name, text in (("x", "2"), ("pinned", "1"), ("new", "3")):
            replica.engine.load_adapter(name, here.paths[text])
            replica.engine.pin_adapter(name, True)
        assert replica.engine.kept.keys() == {("x", V3)}
        await here.add("c", replica)
        found = {status.name: (status.version, status.pinned) for status in replica.engine.adapters()}
        assert found == {"x": (V1, False), "pinned": (V2, True)} and not replica.engine.kept


@virtual
async def test_the_first_content_that_is_read_is_the_desired_one(cluster: Maker) -> None:
    """Adapters that are registered by their headers are read at first use, on each replica."""
    async with cluster() as here:
        here.replicas["b"].faults["x"] = "3"
        await here.cluster.register_adapters({"x": here.paths["1"]})
        here.router.drain("b")
        await served(here)
        here.router.drain("b", False)
        await asyncio.sleep(2.0)
        await served(here, number=8)
        assert {name: state for name, (state, _) in (await places(here)).items()} == {"a": "device", "b": "failed"}
        assert here.cluster.desired_adapters["x"].version == V1


@pytest.mark.parametrize("loaded", [True, False])
@virtual
async def test_a_composition_is_served_again_after_its_repair(cluster: Maker, loaded: bool) -> None:
    """At once if a part is loaded again, otherwise after a time. Until then requests end with the reason."""
    async with cluster() as here:
        await here.load("1")
        await here.cluster.load_adapter("y", here.paths["2"])
        for replica in here.replicas.values():
            replica.faults["x+y"] = "the file of 'y' is broken"
        for _ in range(3):
            assert "the file of 'y' is broken" in await refused(here, "bad_adapter", "x+y")
        assert all("x+y" in replica.barred for replica in here.router.replicas.values())
        for replica in here.replicas.values():
            del replica.faults["x+y"]
        if loaded:
            await here.cluster.load_adapter("y", here.paths["3"])
        else:
            await asyncio.sleep(RETRY_S)
        await served(here, "x+y", version_of("x+y"))


@virtual
async def test_a_cancelled_request_that_was_refused_goes_nowhere_else(cluster: Maker) -> None:
    async with cluster() as here:
        await here.load("1")
        here.replicas["a"].engine.unload_adapter("x")
        here.router.drain("b")
        answering = asyncio.create_task(outputs_of(here.cluster, asked("r", 50, adapter="x")))
        await asyncio.sleep(0.0002)
        assert here.where("r") == "a"
        here.router.drain("b", False)
        await here.cluster.cancel("r")  # the refusal is on its way
        [output] = await answering
        assert output.finish_reason == "cancelled" and here.replicas["b"].num_requests == 0
        await here.check_idle()


@virtual
async def test_a_replica_removed_before_it_has_joined_gets_no_change(cluster: Maker) -> None:
    """One that has its name by then does."""
    async with cluster() as here:
        await here.load("1")
        slow = LocalReplica()
        slow.call_s = 0.5
        adding = asyncio.create_task(here.add("c", slow))
        await asyncio.sleep(0.7)
        await here.cluster.remove("c")
        adding.cancel()
        await here.add("c", LocalReplica())
        await here.load("2")
        assert here.contents() == {V2}
        slow.kill()
