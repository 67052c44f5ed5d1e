"""Replicas in processes of their own, and a cluster in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from tests.cluster.sleeping_engine import COMMAND, expected
from tests.processes import PATIENCE_S, is_alive
from tests.routing.integrity import check_integrity
from vlora.cluster.adapter_sender import ShippingLimits
from vlora.cluster.cluster import Cluster
from vlora.cluster.members import Health
from vlora.cluster.replica import ReplicaSettings
from vlora.config import EngineConfig
from vlora.routing import Router
from vlora.types import Request, RequestOutput, SamplingParams, seed_of
from vlora.types.replicas import SERVING
from vlora.wire.address import Address
from vlora.wire.framing import pack_value

P = ParamSpec("P")
T = TypeVar("T")

SECRET = b"a secret of more than 16 bytes"
ROOT = str(Path(__file__).parents[2])
QUICK = Health(beat_s=0.1, missed=15)
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
        process.stdin.write(pack_value(ReplicaSettings(config=config, **given)))
        await process.stdin.drain()
        line = (await process.stdout.readline()).decode()
        words = line.split()
        assert len(words) == 2, f"the replica did not start: {line}"
        return cls(process, *map(int, words))

    async def wait_ended(self) -> int:
        """Wait for the end of both processes. Returns the exit code."""
        async with asyncio.timeout(PATIENCE_S):
            code = await self.process.wait()
            while is_alive(self.engine_pid):
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


async def joined(cluster: Cluster, name: str, address: Address) -> None:
    """Add a replica, and wait until it serves."""
    cluster.add(name, address)
    await cluster.members[name].wait_joined()


class Running:
    """A cluster with its replicas by name."""

    def __init__(self, cluster: Cluster, router: Router) -> None:
        self.cluster = cluster
        self.router = router
        self.replicas: dict[str, ReplicaProcess] = {}

    async def add(self, name: str, config: EngineConfig = SLEEPING, **settings: Any) -> ReplicaProcess:
        replica = self.replicas[name] = await ReplicaProcess.start(config, **settings)
        await joined(self.cluster, name, replica.address)
        return replica

    @property
    def is_idle(self) -> bool:
        """Whether neither the cluster nor its router has a request left."""
        check_integrity(self.router)
        held = [replica for replica in self.router.replicas.values() if replica.holds]
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
    router: Router | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A cluster with replicas of these names."""
    router = router or Router(rule, over=over)
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


NAMES = ("replica-0", "replica-1")


class InThread:
    """A cluster of two replicas on Ray, with its event loop in a thread."""

    cluster: Any

    def __init__(self, starting: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.cluster = self.run(starting())

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.begin(coroutine).result(PATIENCE_S)

    def pids(self) -> dict[str, tuple[int, int, int]]:
        """Of each replica's actor, process and engine."""
        found = {name: each.at for name, each in self.cluster.located.items()}
        return {name: (at.pid, at.replica_pid, at.engine_pid) for name, at in found.items()}

    def states(self) -> list[str]:
        return [replica.state for replica in self.cluster.status().replicas]

    def serves(self) -> bool:
        return self.states() == [SERVING] * len(NAMES)

    def where(self, request_id: str) -> str:
        name: str | None = self.cluster.where(request_id)
        assert name is not None
        return name

    def answer_all(self, then: Callable[[], object] = lambda: None) -> list[int]:
        """See `answer_mixed`."""
        return self.run(answer_mixed(self.cluster, then))

    def close(self) -> None:
        self.run(self.cluster.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def real(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in an event loop of real time."""

    @functools.wraps(test)
    def run_test(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return run_test


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 240))  # several real engines take a minute on a slow machine


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
