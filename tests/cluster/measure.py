"""How much of the ideal a cluster reaches, of sleeping engines and of real ones, and what it adds to the first token.

    python -m tests.cluster.measure

Engines of 16 requests a batch sleep 50 ms a step, so the cores are free for the front end; requests of 20 to 79 tokens
always wait. The ideal is a batch of tokens a step on each replica. The first token is that of 32 requests at once, of
a cluster with one replica after the same engine as a child process, by turns; steps of 4 ms.

Real engines have one thread each and random weights: the first six layers of the 0.5 B model, and one of 10 million
parameters, in float32. Two of them, the front end and the source of the requests share the cores of this machine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from transformers import Qwen2VLConfig

from tests.cluster.running import Health, running
from tests.cluster.sleeping_engine import COMMAND, STEP_VARIABLE
from tests.cluster.test_cluster import asked
from vlora.bench.dummy import served_config, small_served_config
from vlora.config import EngineConfig
from vlora.engine.interface import EngineInterface
from vlora.engine.ipc.client import ENGINE_COMMAND
from vlora.engine.ipc.supervisor import SupervisedEngine
from vlora.types import Request

BATCH, STEP_S, WINDOW_S = 16, 0.05, 8.0
HEALTH = Health(missed=20)


class Throughput(NamedTuple):
    """Tokens per second, and the front end's processor seconds per token."""

    rate: float
    cpu_s: float


async def throughput(number: int, config: EngineConfig, command: Sequence[str]) -> Throughput:
    """The throughput of `number` replicas while requests always wait."""
    num_tokens = 0

    async def keep_asking(place: int) -> None:
        nonlocal num_tokens
        turn = 0
        while True:
            turn += 1
            request = asked(f"{place}-{turn}", 20 + (7 * place + 13 * turn) % 60, ignore_eos=True)
            async for output in here.cluster.generate(request):
                num_tokens += len(output.token_ids)

    names = [f"r{place}" for place in range(number)]
    async with running(*names, config=config, health=HEALTH, command=command) as here:
        tasks = [asyncio.create_task(keep_asking(place)) for place in range(28 * number)]
        await asyncio.sleep(4.0)
        before, began_s, cpu_s = num_tokens, time.monotonic(), time.process_time()
        await asyncio.sleep(WINDOW_S)
        took_s, cpu_s, found = time.monotonic() - began_s, time.process_time() - cpu_s, num_tokens - before
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Throughput(found / took_s, cpu_s / found)


async def measure_share(number: int) -> None:
    """Print the share of `number` replicas that sleep."""
    os.environ[STEP_VARIABLE] = str(STEP_S)
    config = EngineConfig(model="sleeping", max_batch_size=BATCH, block_size=16)
    found = await throughput(number, config, COMMAND)
    share, load = found.rate / (number * BATCH / STEP_S), os.getloadavg()[0]
    print(f"{number} replicas: {share:.3f} of ideal, {1e6 * found.cpu_s:.1f} us of CPU a token, load {load:.1f}")


async def measure_two(name: str, model: Qwen2VLConfig, num_pairs: int = 3) -> None:
    """Print the throughput of two real replicas over that of one, by turns."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            dtype="float32",
            threads=1,
            arena_bytes=256 * 2**20,
            max_batch_size=BATCH,
            block_size=16,
        )
        for _ in range(num_pairs):
            for number in rates:
                rates[number].append((await throughput(number, config, ENGINE_COMMAND)).rate)
    pairs = ", ".join(f"{two:.0f} / {one:.0f}" for one, two in zip(rates[1], rates[2], strict=True))
    ratio = statistics.mean(rates[2]) / statistics.mean(rates[1])
    print(f"two replicas over one, {name}: {ratio:.2f} ({pairs} tokens/s), load {os.getloadavg()[0]:.1f}")


async def first_token_s(engine: EngineInterface, request: Request) -> float:
    began_s, first_s = time.monotonic(), 0.0
    async for output in engine.generate(request):
        if output.token_ids and not first_s:
            first_s = time.monotonic() - began_s
    return first_s


async def measure_first_token(num_pairs: int = 40) -> None:
    """Print quartiles of the difference."""
    os.environ[STEP_VARIABLE] = "0.004"
    config = EngineConfig(model="sleeping", max_batch_size=32, block_size=16)
    alone = await SupervisedEngine.start(config, log=logging.warning, command=COMMAND)
    differences = []
    async with running("a", config=config, health=HEALTH) as here:
        for pair in range(num_pairs):
            found: dict[bool, float] = {}
            for clustered in (pair % 2 == 0, pair % 2 == 1):
                engine: EngineInterface = here.cluster if clustered else alone
                requests = [asked(f"{clustered}-{pair}-{place}", 10, seed=place) for place in range(32)]
                times = await asyncio.gather(*(first_token_s(engine, request) for request in requests))
                found[clustered] = statistics.mean(times)
                await asyncio.sleep(0.05)
            differences.append(1e3 * (found[True] - found[False]))
    await alone.close()
    quartiles = ", ".join(f"{value:.2f}" for value in statistics.quantiles(differences, n=4))
    print(f"first token of 32 at once: {quartiles} ms later (quartiles), load {os.getloadavg()[0]:.1f}")


async def main() -> None:
    for number in (1, 2, 4, 8):
        await measure_share(number)
    await measure_first_token()
    await measure_two("10 million parameters", small_served_config())
    await measure_two("6 layers of the 0.5 B model", served_config(6))


if __name__ == "__main__":
    asyncio.run(main())
