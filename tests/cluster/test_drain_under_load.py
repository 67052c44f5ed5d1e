"""A replica is drained while more requests wait than there is room for; in virtual time."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest

from tests.cluster.in_process import LocalReplica, connecting, run_virtually
from tests.cluster.running import SECRET, outputs_of
from tests.cluster.sleeping_engine import STEP_VARIABLE
from tests.cluster.test_cluster import asked, check
from vlora.cluster import members
from vlora.cluster.cluster import Cluster
from vlora.cluster.door import Address
from vlora.routing import Router
from vlora.routing.router import Recalled

LONG, SHORT = 1000, 10  # tokens: 20 and 0.2 s


class Busy:
    """Replicas a and b, full of long and short requests, with further short ones that wait until the end."""

    def __init__(self) -> None:
        self.router = Router("placed", over=1.0)
        self.num_moves = 0

    async def drain(self, monkeypatch: pytest.MonkeyPatch, *, kills: bool = False) -> float:
        """Drain a. Returns the seconds that it took."""
        replicas = {0: LocalReplica(), 1: LocalReplica()}
        monkeypatch.setattr(members, "connect", connecting(replicas))
        cluster = Cluster(self.router, SECRET)
        await cluster.add("a", Address("127.0.0.1", 0))
        long = [asyncio.create_task(self._ask(cluster, f"long{number}", LONG)) for number in range(8)]
        await asyncio.sleep(0.1)
        await cluster.add("b", Address("127.0.0.1", 1))
        waiting = asyncio.create_task(self._keep_busy(cluster))
        await asyncio.sleep(1.0)
        assert len(self.router.replicas["a"].holds) == len(self.router.replicas["b"].holds) == 8
        began_s = asyncio.get_running_loop().time()
        draining = asyncio.create_task(cluster.drain("a"))
        if kills:
            await asyncio.sleep(0.02)
            replicas[0].kill()
        await asyncio.sleep(0)
        assert self.router.num_waiting > 4
        await draining
        took_s = asyncio.get_running_loop().time() - began_s
        waiting.cancel()
        await asyncio.gather(*long)
        await asyncio.gather(*self._short)
        self.router.check_integrity()
        assert not cluster.num_unfinished
        await cluster.close()
        for replica in replicas.values():
            replica.kill()
        return took_s

    async def _keep_busy(self, cluster: Cluster) -> None:
        self._short: list[asyncio.Task[None]] = []
        while True:
            if self.router.num_waiting < 8:
                self._short.append(asyncio.create_task(self._ask(cluster, f"short{len(self._short)}", SHORT)))
            await asyncio.sleep(0.005)

    async def _ask(self, cluster: Cluster, name: str, num_tokens: int) -> None:
        request = asked(name, num_tokens)
        timings = check(request, await outputs_of(cluster, request)).timings
        assert timings is not None
        self.num_moves += timings.num_moves


@pytest.mark.parametrize("kills", [False, True])
def test_a_drain_ends_soon_although_requests_wait(kills: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEP_VARIABLE, "0")
    busy = Busy()

    async def main() -> None:
        assert await busy.drain(monkeypatch, kills=kills) < 1.5
        assert kills or busy.num_moves == 8

    run_virtually(main())


def test_without_recalling_requests_a_drain_lasts_as_long_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEP_VARIABLE, "0")

    async def main() -> None:
        with patch.object(Router, "recall", lambda router: Recalled([], [])):
            assert await Busy().drain(monkeypatch) > 15

    run_virtually(main())
