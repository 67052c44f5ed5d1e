"""Lines that are cut while answers have begun with a former content of an adapter, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.in_process_cluster import V1, V2, WithAdapter, on
from tests.cluster.running import outputs_of
from tests.cluster.test_cluster import asked, check
from vlora.cluster.held_requests import CONTENT_S
from vlora.errors import AdapterChanged
from vlora.types import Request

pytestmark = pytest.mark.slow

REQUESTS = [asked(f"r{number}", 120, adapter="x", seed=number) for number in range(12)]


async def lacking(here: WithAdapter, then: list[str]) -> set[str]:
    """Answer requests that begin with a content; then it is reloaded, and the replicas are cut, or die.

    Args:
        then: The names of the replicas, those that die in capitals.

    Returns:
        The replicas that get none of the requests, since they lack the content, once all have joined again.
    """
    await here.load("1")
    found: set[str] = set()

    async def reload_and_cut() -> None:
        await here.load("2")
        for name in then:
            if name.isupper():
                here.replicas[name.lower()].kill()
                here.replicas[name.lower()].start()
            else:
                here.replicas[name].cut()
        await asyncio.sleep(1.0)
        await asyncio.gather(*(member.wait_joined() for member in here.cluster.members.values()))
        await asyncio.sleep(0.1)
        found.update(name for name, standing in here.router.replicas.items() if ("x", V1) in standing.lacks)
        await here.move_all()

    async def answer(request: Request) -> None:
        first = request is REQUESTS[0]
        outputs = await outputs_of(here.cluster, request, 5 if first else -1, reload_and_cut if first else None)
        check(request, outputs, V1)

    await asyncio.gather(*map(answer, REQUESTS))
    await here.check_idle()
    return found


def test_all_replicas_continue_answers_after_their_lines_were_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their engines have kept the content, whichever joins first."""

    async def main(here: WithAdapter) -> None:
        assert await lacking(here, ["a", "b", "c"]) == set()

    on(main, tmp_path, monkeypatch, names="abc", rule="least_loaded")


@pytest.mark.parametrize("first", ["A", "B"])
def test_a_replica_that_died_lacks_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    async def main(here: WithAdapter) -> None:
        assert await lacking(here, [first, *sorted({"a", "b", "c"} - {first.lower()})]) == {first.lower()}

    on(main, tmp_path, monkeypatch, names="abc", rule="least_loaded")


@pytest.mark.parametrize("away_s", [2.0, None])
def test_answers_wait_for_the_replica_that_has_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away_s: float | None
) -> None:
    """It joins last, or does not: then they end after a bounded time. Other requests are served meanwhile."""

    async def main(here: WithAdapter) -> None:
        await here.load("1")
        loop = asyncio.get_running_loop()
        cut_s = 0.0

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
            check(asked("other", 20, adapter="x"), await outputs_of(here.cluster, asked("other", 20, adapter="x")), V2)
            if away_s is not None:
                loop.call_later(away_s - 1.0, here.replicas["b"].wake)

        outputs = await outputs_of(here.cluster, REQUESTS[0], 5, reload_and_cut)
        if away_s is not None:
            check(REQUESTS[0], outputs, V1)
            await here.check_idle()
            return
        error = outputs[-1].error
        assert error is not None and error.code == AdapterChanged.code
        assert CONTENT_S <= loop.time() - cut_s < CONTENT_S + 2.0

    on(main, tmp_path, monkeypatch)
