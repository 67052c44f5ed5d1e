"""Replicas that refuse compositions, cancelled requests or contents, and lines that are lost; in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.in_process import LocalReplica, connecting
from tests.cluster.in_process_cluster import V1, V2, WithAdapter, on
from tests.cluster.running import outputs_of
from tests.cluster.sleeping_engine import version_of
from tests.cluster.test_cluster import asked, check
from vlora.cluster import members
from vlora.cluster.adapters import RETRY_S
from vlora.errors import Disconnected

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("loaded", [True, False])
def test_a_composition_is_served_again_after_its_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    """At once if a part is loaded again, otherwise after a time. Until then requests end with the reason."""

    async def main(here: WithAdapter) -> None:
        await here.load("1")
        await here.cluster.load_adapter("y", here.paths["2"])
        for replica in here.replicas.values():
            replica.faults["x+y"] = "the file of 'y' is broken"
        for number in range(3):
            error = (await outputs_of(here.cluster, asked(f"r{number}", adapter="x+y")))[-1].error
            assert error is not None and error.code == "bad_adapter" and "the file of 'y' is broken" in error.message
        assert all("x+y" in standing.barred for standing in here.router.replicas.values())
        for replica in here.replicas.values():
            del replica.faults["x+y"]
        if loaded:
            await here.cluster.load_adapter("y", here.paths["3"])
        else:
            await asyncio.sleep(RETRY_S)
        request = asked("after", 5, adapter="x+y")
        check(request, await outputs_of(here.cluster, request), version_of("x+y"))

    on(main, tmp_path, monkeypatch)


def test_a_cancelled_request_that_was_refused_goes_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(here: WithAdapter) -> None:
        await here.load("1")
        here.replicas["a"].engine.unload_adapter("x")
        here.router.drain("b")
        request = asked("r", 50, adapter="x")
        answering = asyncio.create_task(outputs_of(here.cluster, request))
        await asyncio.sleep(0.0002)
        assert here.where("r") == "a"
        here.router.drain("b", False)
        await here.cluster.cancel("r")  # the refusal is on its way
        [output] = await answering
        assert output.finish_reason == "cancelled" and here.replicas["b"].num_requests == 0
        await here.check_idle()

    on(main, tmp_path, monkeypatch)


def test_an_answer_goes_on_where_a_lost_line_leads_to_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine still has the former content."""

    async def main(here: WithAdapter) -> None:
        await here.load("1")

        async def reload() -> None:
            await here.load("2")
            assert here.replicas["a"].engine.kept
            here.replicas["a"].cut()

        request = asked("r", 120, adapter="x")
        check(request, await outputs_of(here.cluster, request, 5, reload), V1)
        await here.check_idle()

    on(main, tmp_path, monkeypatch, names="a")


def test_a_replica_that_joins_drops_what_another_front_end_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(here: WithAdapter) -> None:
        replica = here.replicas["c"] = LocalReplica()
        monkeypatch.setattr(members, "connect", connecting({ord("c"): replica}))
        replica.engine.load_adapter("x", here.paths["1"])
        replica.engine.keep_adapters({"x": (V1,)})
        replica.engine.load_adapter("x", here.paths["2"])
        assert replica.engine.kept.keys() == {("x", V1)}
        await here.add("c")
        assert not replica.engine.kept

    on(main, tmp_path, monkeypatch, names="")


def test_a_replica_removed_before_it_has_joined_gets_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has its name by then does."""

    async def main(here: WithAdapter) -> None:
        await here.load("1")
        slow, other = LocalReplica(), LocalReplica()
        slow.call_s = 0.5
        ports = {ord(name): replica for name, replica in here.replicas.items()} | {ord("c"): slow}
        monkeypatch.setattr(members, "connect", connecting(ports))
        adding = asyncio.create_task(here.add("c"))
        await asyncio.sleep(0.7)
        await here.cluster.remove("c")
        ports[ord("c")] = here.replicas["c"] = other
        await here.add("c")
        with pytest.raises(Disconnected, match="was removed before it had joined"):
            await adding
        await here.load("2")
        assert here.contents() == {V2}
        slow.kill()

    on(main, tmp_path, monkeypatch)


def test_a_change_waits_for_one_retry_of_a_slow_replica_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(here: WithAdapter) -> None:
        await here.load("1")
        names = [f"y{number}" for number in range(5)]
        for name in names:
            await here.cluster.load_adapter(name, here.paths["2"])
        slow = here.replicas["b"]
        slow.faults = dict.fromkeys(names, "")
        slow.kill()
        slow.start()
        await here.cluster.members["b"].wait_joined()
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

    on(main, tmp_path, monkeypatch)
