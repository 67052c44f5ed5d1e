"""The cluster with the router of `vlora.routing`, under each of its rules."""

from __future__ import annotations

import asyncio
import signal

from tests.cluster.running import QUICK, SECRET, ReplicaProcess, outputs_of, run
from tests.cluster.test_cluster import MIXED, asked, check
from vlora.cluster.cluster import Cluster
from vlora.routing import RULES, Router


def test_a_killed_and_a_drained_replica_lose_nothing_under_any_rule() -> None:
    async def under(rule: str, replicas: dict[str, ReplicaProcess]) -> None:
        router = Router(rule)
        cluster = Cluster(router, SECRET, health=QUICK)
        try:
            for name in ("a", "b", "c"):
                if name not in replicas:
                    replicas[name] = await ReplicaProcess.start()
                await cluster.add(name, replicas[name].address)

            async def kill() -> None:
                name = where("r0")
                replicas[name].signal(signal.SIGKILL)
                await replicas.pop(name).process.wait()
                await cluster.remove(name)

            def where(request_id: str) -> str:
                name = router.where(request_id)
                assert name is not None
                return name

            requests = [*MIXED, *(asked(f"x{number}") for number in range(20))]
            answers = (outputs_of(cluster, each, 20 if each.request_id == "r0" else -1, kill) for each in requests)
            for request, outputs in zip(requests, await asyncio.gather(*answers), strict=True):
                check(request, outputs)
            moved = asyncio.create_task(outputs_of(cluster, asked("moved", 150)))
            await asyncio.sleep(0.1)
            assert await cluster.drain(where("moved"), 5.0)
            timings = check(asked("moved", 150), await moved).timings
            assert timings is not None and timings.num_moves == 1
            router.check_integrity()
            await asyncio.sleep(0.25)  # the last reports
            assert all(standing.free_blocks == 1000 and not standing.size for standing in router.replicas.values())
        finally:
            await cluster.close()

    async def main() -> None:
        replicas: dict[str, ReplicaProcess] = {}
        try:
            for rule in RULES:
                await under(rule, replicas)
        finally:
            await asyncio.gather(*(replica.stop() for replica in replicas.values()))

    run(main())
