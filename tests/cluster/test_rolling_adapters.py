"""Adapters that change on replica after replica under answers, and replicas that cannot follow; in virtual time."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.cluster.in_process import LocalReplica, connecting
from tests.cluster.in_process_cluster import V1, V2, V3, WithAdapter, on
from tests.cluster.running import outputs_of
from tests.cluster.sleeping_engine import expected
from tests.cluster.test_cluster import asked, check
from vlora.cluster import members
from vlora.cluster.adapter_failure import FIRST_PAUSE_S
from vlora.cluster.adapter_home import AdapterHome
from vlora.cluster.adapter_state import AdapterState, DesiredAdapter
from vlora.cluster.former_contents import MAX_FORMER
from vlora.engine.ipc import messages
from vlora.errors import Aborted, BadAdapter, BadRequest, UnknownAdapter, VLoraError
from vlora.routing import RULES
from vlora.types import Request, RequestOutput, seed_of

pytestmark = pytest.mark.slow


def began_with(request: Request, outputs: list[RequestOutput]) -> str:
    """The version of the adapter that gives exactly this answer."""
    tokens = tuple(token for output in outputs for token in output.token_ids)
    seed = seed_of(request.request_id, request.sampling)
    return next(version for version in (V1, V2, V3) if tokens == expected(request, seed, version))


# -- answers during changes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", list(RULES))
def test_an_answer_goes_on_with_its_content_after_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    async def main(here: WithAdapter) -> None:
        await here.load("1")

        async def reload() -> None:
            await here.load("2")
            await here.move_all()
            await here.load("3")
            await here.move_all()

        requests = [asked(f"r{number}", 120, adapter="x", seed=number) for number in range(6)]
        answers = await asyncio.gather(
            *(outputs_of(here.cluster, each, 5, reload if each is requests[0] else None) for each in requests)
        )
        for request, outputs in zip(requests, answers, strict=True):
            check(request, outputs, V1)
        moves = [outputs[-1].timings.num_moves for outputs in answers if outputs[-1].timings is not None]
        assert sum(moves) > 0
        after = asked("after", 5, adapter="x")
        check(after, await outputs_of(here.cluster, after), V3)
        await here.check_idle()

    on(main, tmp_path, monkeypatch, rule=rule)


def test_an_answer_goes_on_when_its_replica_dies_after_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(here: WithAdapter) -> None:
        await here.load("1")
        request = asked("r", 120, adapter="x")

        async def reload() -> None:
            await here.load("2")
            here.replicas[here.where("r")].kill()

        last = check(request, await outputs_of(here.cluster, request, 5, reload), V1)
        assert last.timings is not None and last.timings.num_deaths == 1
        await here.check_idle()

    on(main, tmp_path, monkeypatch)


def test_an_answer_whose_content_no_replica_has_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(here: WithAdapter) -> None:
        await here.load("1")
        request = asked("r", 120, adapter="x")

        async def reload() -> None:
            await here.load("2")
            await here.add("c")  # which has the new content only
            for name in "ab":
                here.replicas[name].kill()

        here.replicas["c"] = LocalReplica()
        monkeypatch.setattr(members, "connect", connecting({ord(n): r for n, r in here.replicas.items()}))
        error = (await outputs_of(here.cluster, request, 5, reload))[-1].error
        assert error is not None and error.code == "adapter_changed"
        assert error.message.startswith(
            "no replica has the content of adapter 'x' with which the answer to request 'r' began any more, after "
        )
        await here.check_idle()

    on(main, tmp_path, monkeypatch)


def test_the_only_replica_with_a_content_keeps_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drained, and the other one, which has restarted since, has the new content only."""

    async def main(here: WithAdapter) -> None:
        await here.load("1")
        request = asked("r", 200, adapter="x")

        async def reload() -> None:
            await here.load("2")
            holder = here.where("r")
            other = "b" if holder == "a" else "a"
            here.replicas[other].kill()
            await asyncio.sleep(0.1)
            here.replicas[other].start()
            await here.cluster.members[other].wait_joined()
            assert not await here.cluster.drain(holder, 0.5)
            assert here.where("r") == holder

        last = check(request, await outputs_of(here.cluster, request, 5, reload), V1)
        assert last.timings is not None and last.timings.num_moves == 0
        await here.check_idle()

    on(main, tmp_path, monkeypatch)


def test_an_answer_returns_from_a_replica_that_has_lost_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(here: WithAdapter) -> None:
        await here.load("1")
        request = asked("r", 120, adapter="x")

        async def reload() -> None:
            await here.load("2")
            other = here.replicas["a" if here.where("r") == "b" else "b"]
            other.engine.keep_adapters({})  # the cluster does not know
            await here.move_all()
            assert other.num_requests == 1  # it has refused once

        last = check(request, await outputs_of(here.cluster, request, 5, reload), V1)
        assert last.timings is not None and last.timings.num_moves > 0
        await here.check_idle()

    on(main, tmp_path, monkeypatch)


def test_answers_end_with_their_content_after_an_unload_that_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(here: WithAdapter) -> None:
        await here.load("1")

        async def unload() -> None:
            await here.cluster.unload_adapter("x", drain=True)
            assert await here.cluster.adapters() == ()
            await here.move_all()

        # More than are computed at a time: some have not begun when the adapter is unloaded, and they move.
        requests = [asked(f"r{number}", 60, adapter="x", seed=number) for number in range(40)]
        answers = await asyncio.gather(
            *(outputs_of(here.cluster, each, 5, unload if each is requests[0] else None) for each in requests)
        )
        for request, outputs in zip(requests, answers, strict=True):
            check(request, outputs, V1)
        unknown = (await outputs_of(here.cluster, asked("u", adapter="x")))[-1].error
        assert unknown is not None and unknown.code == "unknown_adapter"
        await here.check_idle()

    on(main, tmp_path, monkeypatch)


@pytest.mark.parametrize("seed", [*range(5), 194, 547, 562])  # the last ones: changes while others synchronize
def test_random_reloads_and_moves_change_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Each answer is that of one content; without deaths none fails."""
    draws = random.Random(seed)
    deaths = seed % 2 == 1

    async def main(here: WithAdapter) -> None:
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
        await asyncio.gather(*(member.wait_joined() for member in here.cluster.members.values()))
        await here.check_idle()
        assert len(here.contents()) == 1

    on(main, tmp_path, monkeypatch, names="abc", rule=draws.choice(list(RULES)))


# -- changes ----------------------------------------------------------------------------------------------------------


def test_a_reload_reaches_replica_after_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(here: WithAdapter) -> None:
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
        assert all(
            len([c for c in r.calls if isinstance(c, messages.LoadAdapter)]) == 1 for r in here.replicas.values()
        )

    on(main, tmp_path, monkeypatch, names="abc")


def test_a_replica_does_not_return_to_what_was_desired_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins to synchronize while a change is at it, and goes on after the change."""
    homes: dict[str, AdapterHome] = {}
    follow = AdapterHome.follow

    def noted(home: AdapterHome) -> None:
        homes[home.name] = home
        follow(home)

    monkeypatch.setattr(AdapterHome, "follow", noted)

    async def main(here: WithAdapter) -> None:
        await here.load("1")
        here.replicas["b"].call_s = 1.0
        loading = asyncio.create_task(here.load("2"))
        await asyncio.sleep(0.5)
        homes["b"].wake()
        await loading
        for _ in range(100):
            assert here.contents() == {V2}
            await asyncio.sleep(0.05)

    on(main, tmp_path, monkeypatch)


def test_a_replica_that_joins_waits_for_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(here: WithAdapter) -> None:
        await here.load("1")
        here.replicas["a"].call_s = 30.0
        loading = asyncio.create_task(here.load("2"))
        await asyncio.sleep(0.1)
        here.replicas["b"].kill()
        await asyncio.sleep(0.2)
        here.replicas["b"].start()
        began_s = asyncio.get_running_loop().time()
        await here.cluster.members["b"].wait_joined()
        assert asyncio.get_running_loop().time() - began_s < 5.0 and not loading.done()
        await loading
        await asyncio.sleep(1.0)
        assert here.contents() == {V2}

    on(main, tmp_path, monkeypatch)


def test_a_replica_that_does_not_answer_holds_a_change_up_for_a_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(here: WithAdapter) -> None:
        await here.load("1")
        here.replicas["b"].call_s = 1e6
        with pytest.raises(Aborted, match=r"^replica 'b': it did not answer within 300 s"):
            await here.cluster.load_adapter("x", here.paths["2"])
        # Nor does it hold up a status.
        assert [(status.name, status.version) for status in await here.cluster.adapters()] == [("x", V1)]
        places = [(each.replica, each.state, each.cause) for each in await here.cluster.adapter_places()]
        assert places == [("a", "device", ""), ("b", "unknown", "it does not answer")]
        request = asked("r", 20, adapter="x")
        check(request, await outputs_of(here.cluster, request), V1)

    on(main, tmp_path, monkeypatch)


def test_the_number_of_former_contents_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(here: WithAdapter) -> None:
        here.paths |= {str(number): str(tmp_path / str(number)) for number in range(10, 20)}
        for text, path in here.paths.items():
            Path(path).write_text(text)
        await here.load("1")

        async def reload() -> None:
            for number in range(10, 20):
                await here.load(str(number))
            assert {len(replica.engine.kept) for replica in here.replicas.values()} == {MAX_FORMER}

        request = asked("r", 300, adapter="x")
        check(request, await outputs_of(here.cluster, request, 5, reload), V1)  # where it is, it goes on
        await here.check_idle()

    on(main, tmp_path, monkeypatch)


def test_two_changes_at_once_end_alike_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(here: WithAdapter) -> None:
        await here.load("1")
        for number, replica in enumerate(here.replicas.values()):
            replica.call_s = 0.1 * number
        changes = [here.load("2"), here.load("3"), here.cluster.pin_adapter("x", True), here.load("2")]
        *done, refused = await asyncio.gather(*changes, return_exceptions=True)
        assert not isinstance(done[0], BaseException) and isinstance(refused, BadRequest)
        assert "is pinned" in str(refused)
        assert here.contents() == {V3}
        [status] = await here.cluster.adapters()
        assert status.version == V3 and status.pinned

    on(main, tmp_path, monkeypatch, names="abc")


@pytest.mark.parametrize("text", ["", "3"])  # no file; other content
def test_a_change_that_one_replica_cannot_make_is_made_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    async def main(here: WithAdapter) -> None:
        await here.load("1")
        here.replicas["b"].faults["x"] = text
        with pytest.raises(BadAdapter, match=r"^replica 'b': .*(no such file|its content is)"):
            await here.cluster.load_adapter("x", here.paths["2"])
        if text == "":
            with pytest.raises(BadAdapter, match=r"^replica 'b': "):
                await here.cluster.register_adapters({"x": here.paths["2"]})
        assert here.contents() == {V1}
        request = asked("r", 20, adapter="x")
        check(request, await outputs_of(here.cluster, request), V1)
        with pytest.raises(UnknownAdapter, match="no adapter named 'z'; registered: x"):
            await here.cluster.unload_adapter("z")
        with pytest.raises(UnknownAdapter, match="no adapter named 'z'"):
            await here.cluster.pin_adapter("z", True)
        await here.check_idle()

    on(main, tmp_path, monkeypatch, names="abc")


def test_a_change_without_room_on_the_disk_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    async def main(here: WithAdapter) -> None:
        await here.load("1")
        request = asked("r", 120, adapter="x")

        async def changes() -> None:
            with monkeypatch.context() as patched:
                patched.setattr("vlora.cluster.adapter_state.replace_file", full)
                for change in (
                    here.cluster.load_adapter("x", here.paths["2"]),
                    here.cluster.load_adapter("y", here.paths["2"]),
                    here.cluster.pin_adapter("x", True),
                    here.cluster.unload_adapter("x"),
                ):
                    with pytest.raises(VLoraError, match="No space left on device"):
                        await change

        check(request, await outputs_of(here.cluster, request, 5, changes), V1)
        assert here.contents() == {V1}
        [status] = await here.cluster.adapters()
        assert status.name == "x" and not status.pinned
        await here.check_idle()

    on(main, tmp_path, monkeypatch, state=lambda: AdapterState.open(tmp_path / "state"))
    assert AdapterState.open(tmp_path / "state").adapters == {"x": DesiredAdapter(str(tmp_path / "1"), V1)}


def test_a_refused_pin_is_undone_although_a_replica_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(here: WithAdapter) -> None:
        await here.load("1")
        here.replicas["d"].faults["pin x"] = "no slot"
        here.replicas["b"].call_s = 1.0
        pinning = asyncio.create_task(here.cluster.pin_adapter("x", True))
        await asyncio.sleep(0.5)
        assert here.replicas["a"].engine.adapters()[0].pinned
        here.replicas["a"].kill()
        with pytest.raises(BadRequest, match=r"^replica 'd': no slot$"):
            await pinning
        assert not any(here.replicas[name].engine.adapters()[0].pinned for name in "bcd")
        assert not (await here.cluster.adapters())[0].pinned
        # A pin that a replica cannot make when it joins is shown, and the adapter is used there.
        del here.replicas["d"].faults["pin x"]
        await here.cluster.pin_adapter("x", True)
        here.replicas["a"].faults["pin x"] = "no slot"
        here.replicas["a"].start()
        await here.cluster.members["a"].wait_joined()
        places = {each.replica: each for each in await here.cluster.adapter_places()}
        assert (places["a"].state, places["a"].pinned, places["a"].cause) == ("device", False, "no slot")
        assert places["b"].pinned and not places["b"].cause
        del here.replicas["a"].faults["pin x"]
        await asyncio.sleep(2 * FIRST_PAUSE_S)
        assert all(each.pinned and not each.cause for each in await here.cluster.adapter_places())

    on(main, tmp_path, monkeypatch, names="abcd")


def test_former_content_is_not_taken_for_that_of_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name has a folder that no replica has read, and an answer that waited begins with the former content."""

    async def main(here: WithAdapter) -> None:
        await here.load("1")
        requests = [asked(f"r{number}", 60, adapter="x", seed=number) for number in range(20)]

        async def register() -> None:
            await here.cluster.register_adapters({"x": here.paths["2"]})

        answers = await asyncio.gather(
            *(outputs_of(here.cluster, each, 5, register if each is requests[0] else None) for each in requests)
        )
        for request, outputs in zip(requests, answers, strict=True):
            check(request, outputs, V1)
        after = asked("after", 5, adapter="x")
        check(after, await outputs_of(here.cluster, after), V2)
        assert here.cluster.desired_adapters["x"] == DesiredAdapter(here.paths["2"], V2)
        await here.check_idle()

    on(main, tmp_path, monkeypatch)


# -- replicas that cannot follow --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "why"), [("", "there is no such file"), ("3", f"its content is {V3}, but {V1} was")])
def test_a_replica_that_fails_one_adapter_serves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(here: WithAdapter) -> None:
        await here.load("1")
        await here.cluster.load_adapter("y", here.paths["2"])
        replica = here.replicas["b"]
        replica.faults["x"] = text
        replica.kill()
        await asyncio.sleep(0.1)
        replica.start()
        await here.cluster.members["b"].wait_joined()
        assert here.router.replicas["b"].barred == {"x"}
        here.router.drain("a")  # so that all would go to the other one
        for number in range(3):
            request = asked(f"y{number}", 5, adapter="y")
            check(request, await outputs_of(here.cluster, request), V2)
        here.router.drain("a", False)
        for number in range(8):
            request = asked(f"x{number}", 5, adapter="x")
            check(request, await outputs_of(here.cluster, request), V1)
        [found] = [each for each in await here.cluster.adapter_places() if (each.replica, each.adapter) == ("b", "x")]
        assert found.state == "failed" and why in found.cause
        assert caplog.text.count("replica 'b' is no home for adapter 'x'") == 1
        # It is tried again with growing pauses, and used again once it is as desired.
        tries = [call for call in replica.calls if isinstance(call, messages.LoadAdapter) and call.name == "x"]
        await asyncio.sleep(100 * FIRST_PAUSE_S)
        more = [call for call in replica.calls if isinstance(call, messages.LoadAdapter) and call.name == "x"]
        assert 3 <= len(more) - len(tries) <= 8
        del replica.faults["x"]
        await asyncio.sleep(61.0)
        here.router.drain("a")
        last = asked("last", 5, adapter="x")
        check(last, await outputs_of(here.cluster, last), V1)
        assert {each.state for each in await here.cluster.adapter_places()} == {"device"}

    on(main, tmp_path, monkeypatch)


def test_an_adapter_that_no_replica_can_serve_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(here: WithAdapter) -> None:
        for replica in here.replicas.values():
            replica.faults["x"] = ""
        await here.cluster.load_adapter("y", here.paths["2"])
        here.cluster.desired_adapters["x"] = DesiredAdapter(here.paths["1"], V1)  # as after a start with a state
        for replica in here.replicas.values():
            replica.kill()
            await asyncio.sleep(0.1)
            replica.start()
        await asyncio.sleep(3.0)
        error = (await outputs_of(here.cluster, asked("r", adapter="x")))[-1].error
        assert error is not None and error.code == "bad_adapter" and "'a': " in error.message
        assert "there is no such file" in error.message
        listed = {status.name: status for status in await here.cluster.adapters()}
        assert listed["y"].error is None and "no such file" in (listed["x"].error or "")
        with pytest.raises(BadAdapter, match="no such file"):
            await here.cluster.pin_adapter("x", True)

    on(main, tmp_path, monkeypatch)


def test_replicas_that_served_another_front_end_are_reconciled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one was killed after a change and before it was written."""

    def state() -> AdapterState:
        made = AdapterState()
        made.adapters = {
            "x": DesiredAdapter(str(tmp_path / "1"), V1),
            "pinned": DesiredAdapter(str(tmp_path / "2"), V2, True),
        }
        return made

    async def main(here: WithAdapter) -> None:
        replica = here.replicas["c"] = LocalReplica()
        monkeypatch.setattr(members, "connect", connecting({ord("c"): replica}))
        for name, text in (("x", "2"), ("pinned", "1"), ("new", "3")):
            replica.engine.load_adapter(name, here.paths[text])
            replica.engine.pin_adapter(name, True)
        await here.add("c")
        found = {status.name: (status.version, status.pinned) for status in replica.engine.adapters()}
        assert found == {"x": (V1, False), "pinned": (V2, True)}

    on(main, tmp_path, monkeypatch, names="", state=state)


def test_the_first_content_that_is_read_is_the_desired_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters that are registered by their headers are read at first use, on each replica."""

    async def main(here: WithAdapter) -> None:
        here.replicas["b"].faults["x"] = "3"
        await here.cluster.register_adapters({"x": here.paths["1"]})
        here.router.drain("b")
        request = asked("r", 5, adapter="x")
        check(request, await outputs_of(here.cluster, request), V1)
        here.router.drain("b", False)
        await asyncio.sleep(2.0)
        for number in range(8):
            request = asked(f"x{number}", 5, adapter="x")
            check(request, await outputs_of(here.cluster, request), V1)
        states = {each.replica: each.state for each in await here.cluster.adapter_places()}
        assert states == {"a": "device", "b": "failed"}
        assert here.cluster.desired_adapters["x"].version == V1

    on(main, tmp_path, monkeypatch)
