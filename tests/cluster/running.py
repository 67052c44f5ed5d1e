"""Replicas in processes of their own, and a cluster in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.sleeping_engine import COMMAND
from vlora.cluster.adapter_sender import ShippingLimits
from vlora.cluster.cluster import Cluster
from vlora.cluster.door import Address
from vlora.cluster.framing import pack
from vlora.cluster.members import Health
from vlora.cluster.replica import ReplicaSettings
from vlora.config import EngineConfig
from vlora.routing import Router
from vlora.types import Request, RequestOutput

SECRET = b"a secret of more than 16 bytes"
ROOT = str(Path(__file__).parents[2])
QUICK = Health(beat_s=0.1, missed=4)
SLEEPING = EngineConfig(model="sleeping", max_batch_size=8, block_size=16)


class ReplicaProcess:
    """A replica's process and its engine's. Created by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, engine_pid: int) -> None:
        self.process = process
        self.address = Address("127.0.0.1", port)
        self.engine_pid = engine_pid

    @classmethod
    async def start(
        cls, config: EngineConfig = SLEEPING, *, machine: Path | None = None, **settings: Any
    ) -> ReplicaProcess:
        """machine: the process has this working directory, and its caches below it."""
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))}
        if machine is not None:
            environ["XDG_CACHE_HOME"] = str(machine / "cache")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "vlora.cluster.replica",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=machine,
            env=environ,
        )
        given = {"secret": SECRET, "command": COMMAND, **settings}
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(pack(ReplicaSettings(config=config, **given)))
        await process.stdin.drain()
        line = (await process.stdout.readline()).decode()
        words = line.split()
        assert len(words) == 2, f"the replica did not start: {line}"
        return cls(process, *map(int, words))

    async def wait_ended(self) -> int:
        """Wait for the end of both processes. Returns the exit code."""
        async with asyncio.timeout(10):
            code = await self.process.wait()
            while psutil.pid_exists(self.engine_pid):
                await asyncio.sleep(0.01)
        return code

    def signal(self, number: int, *, engine: bool = True, actor: bool = True) -> None:
        for pid in ([self.engine_pid] if engine else []) + ([self.process.pid] if actor else []):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def stop(self) -> None:
        self.signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            await self.wait_ended()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            raise


class Running:
    """A cluster with its replicas by name."""

    def __init__(self, cluster: Cluster, router: Router) -> None:
        self.cluster = cluster
        self.router = router
        self.replicas: dict[str, ReplicaProcess] = {}

    async def add(self, name: str, config: EngineConfig = SLEEPING, **settings: Any) -> ReplicaProcess:
        replica = self.replicas[name] = await ReplicaProcess.start(config, **settings)
        await self.cluster.add(name, replica.address)
        return replica

    @property
    def is_idle(self) -> bool:
        """Whether neither the cluster nor its router has a request left."""
        self.router.check_integrity()
        held = [standing for standing in self.router.replicas.values() if standing.holds]
        return not (self.cluster.num_unfinished or self.router.num_waiting or held)

    def where(self, request_id: str) -> str:
        name = self.router.where(request_id)
        assert name is not None
        return name


@contextlib.asynccontextmanager
async def running(
    *names: str,
    config: EngineConfig = SLEEPING,
    health: Health = QUICK,
    rule: str = "placed",
    over: float = 1.5,
    shipping: ShippingLimits | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A cluster with replicas of these names."""
    router = Router(rule, over=over)
    found = Running(Cluster(router, SECRET, health=health, absent_s=2.0, shipping=shipping), router)
    try:
        await asyncio.gather(*(found.add(name, config, **settings) for name in names))
        yield found
    finally:
        await found.cluster.close()
        await asyncio.gather(*(replica.stop() for replica in found.replicas.values()))


async def outputs_of(
    cluster: Cluster, request: Request, after: int = -1, then: Callable[[], Awaitable[object] | object] | None = None
) -> list[RequestOutput]:
    """All outputs of a request. `then` is called once it has `after` tokens."""
    found: list[RequestOutput] = []
    num_tokens = 0
    stream = cluster.generate(request)
    async with contextlib.aclosing(stream):  # type: ignore[type-var]
        async for output in stream:
            assert output.request_id == request.request_id
            assert not found or not found[-1].finished
            found.append(output)
            num_tokens += len(output.token_ids)
            if then is not None and num_tokens >= after >= 0:
                made, then = then(), None
                if asyncio.iscoroutine(made):
                    await made
    assert found[-1].finished
    return found


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 240))  # several real engines take a minute on a slow machine
