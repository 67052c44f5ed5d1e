"""Answers of real engines that are moved, killed, hung and woken in the middle are those of one engine, in float32."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests import embedded_cases
from tests.cluster.paced_engine import COMMAND
from tests.cluster.running import Running, outputs_of, run, running
from tests.embedded_cases import config, scores_of, tokens_of, write_adapters
from vlora.client.values import Answer
from vlora.cluster.adapter_sender import ShippingLimits
from vlora.cluster.members import Health
from vlora.config import ServerConfig
from vlora.engine import LocalEngine
from vlora.engine.interface import EngineInterface
from vlora.models.processing import InputProcessor
from vlora.server.frontend import FrontEnd
from vlora.server.prompts import TextRequest
from vlora.types import Request, RequestOutput, SamplingParams, seed_of

pytestmark = pytest.mark.slow

Trouble = Callable[[Running], Awaitable[None]]


def check(request: Request, found: list[RequestOutput], want: list[RequestOutput]) -> None:
    last = found[-1]
    assert last.error is None, last.error
    if request.head is not None:
        assert last.head is not None and want[-1].head is not None
        assert last.head.label == want[-1].head.label
        assert last.head.scores == pytest.approx(want[-1].head.scores, abs=1e-5)
        return
    assert tokens_of(found) == tokens_of(want), request.request_id
    logprobs = [[score.logprob for score in scores_of(each)] for each in (found, want)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    assert last.finish_reason == want[-1].finish_reason
    assert last.timings is not None and last.timings.num_completion_tokens == len(tokens_of(want))


async def moved(here: Running) -> None:
    for _ in range(3):
        for name in ("a", "b"):
            await here.cluster.drain(name, 1.0)
            here.cluster.resume(name)
            await asyncio.sleep(0.02)


async def killed(here: Running) -> None:
    here.replicas["a"].signal(signal.SIGKILL, actor=False)


async def hung(here: Running) -> None:
    here.replicas["b"].signal(signal.SIGSTOP)
    await asyncio.sleep(1.2)
    here.replicas["b"].signal(signal.SIGCONT)
    await here.cluster.members["b"].wait_joined()


async def reloaded(here: Running, folders: dict[str, str], requests: list[Request]) -> list[list[RequestOutput]]:
    """The outputs of all requests. Once each has begun, the adapters get these folders while the requests are moved."""
    begun = {request.request_id: asyncio.Event() for request in requests}

    async def reload() -> None:
        await asyncio.gather(*(event.wait() for event in begun.values()))
        # At once: on a busy machine the requests may end before the adapters have been loaded.
        await asyncio.gather(moved(here), *(here.cluster.load_adapter(name, path) for name, path in folders.items()))

    reloading = asyncio.create_task(reload())
    found = await asyncio.gather(
        *(outputs_of(here.cluster, request, 1, begun[request.request_id].set) for request in requests)
    )
    await reloading
    return found


_CUT = 10  # tokens of the first choice, after which it is moved


async def choices(
    engine: EngineInterface, stop: tuple[str, ...], cut: Callable[[], None] = lambda: None
) -> list[tuple[str, list[str]]]:
    """The text and tokens of three choices, by the front end. cut: called after a part of the first one."""
    front = FrontEnd(engine, InputProcessor.from_pretrained(config().model), ServerConfig())
    sampling = SamplingParams(max_tokens=60, temperature=1.2, seed=11, stop=stop, logprobs=1, ignore_eos=True)
    made: dict[int, Answer] = {}
    asked = TextRequest("what shape is shown ?", num_choices=3, adapter="south", sampling=sampling)
    async for choice, part in front.generate(asked):
        if isinstance(part, Answer):
            made[choice] = part
        elif choice == 0 and part.num_completion_tokens >= _CUT:
            cut()
    await front.close()
    return [(made[number].text, [token.token for token in made[number].logprobs]) for number in range(3)]


async def in_trouble(here: Running, trouble: Trouble, requests: list[Request]) -> list[list[RequestOutput]]:
    """The outputs of all requests. There is trouble as soon as one has a token."""
    begun = asyncio.Event()

    async def make() -> None:
        await begun.wait()
        await trouble(here)

    making = asyncio.create_task(make())
    found = await asyncio.gather(*(outputs_of(here.cluster, request, 1, begun.set) for request in requests))
    await making
    return found


@pytest.mark.exhaustive
def test_answers_through_moves_deaths_and_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for machine in ("front", "b"):
        (tmp_path / machine).mkdir()
    monkeypatch.chdir(tmp_path / "front")
    # A path that leads to other files on each machine: `b` has none, and gets them from the front end.
    own = Path("/proc/self/cwd")
    folders = {name: str(own / name) for name in write_adapters(tmp_path / "front")}
    cases = {**embedded_cases.cases(), "head": embedded_cases.head()}
    local = LocalEngine(config())
    local.engine.register_adapters(folders)
    want = local.run(cases.values())
    # Long enough to be reloaded and moved in the middle.
    named = ("adapted", "composed", "drawn by id", "pictured")
    long = [
        renamed(replace(cases[name], sampling=replace(cases[name].sampling, max_tokens=250)), "long") for name in named
    ]
    want_long = local.run(long)

    async def main() -> None:
        plain = await choices(local, ())
        # Of the first choice: a text that begins before the cut and ends after it.
        tokens = plain[0][1]
        before, after = (
            [token for token in part if not token.startswith("<")] for part in (tokens[:_CUT], tokens[_CUT:])
        )
        stop = (f"{before[-1]} {after[0]}",)
        stopped = await choices(local, stop)
        assert 0 < len(stopped[0][0]) < len(plain[0][0])
        health = Health(beat_s=0.15, missed=4)
        settings: dict[str, Any] = {"config": config(), "command": COMMAND}
        async with running("a", health=health, over=4.0, shipping=ShippingLimits(), **settings) as here:
            await here.add("b", machine=tmp_path / "b", **settings)
            await here.cluster.register_adapters(folders)
            assert len(list(tmp_path.glob("b/cache/vlora/adapters/*/adapter_model.safetensors"))) == len(folders)

            def cut() -> None:
                for name in ("a", "b"):
                    here.router.drain(name)
                    here.cluster.consolidate()
                    here.router.drain(name, False)

            assert await choices(here.cluster, stop, cut) == stopped
            swapped = {"north": folders["east"], "south": folders["north"], "east": folders["south"]}
            found = await reloaded(here, swapped, long)
            for request, outputs in zip(long, found, strict=True):
                check(request, outputs, want_long[request.request_id])
            assert sum(outputs[-1].timings.num_moves for outputs in found if outputs[-1].timings is not None) > 0
            [later] = local.run([replace(cases["adapted"], request_id="later", adapter="east")]).values()
            now = replace(cases["adapted"], request_id="later")
            check(now, await outputs_of(here.cluster, now), later)
            assert tokens_of(later) != tokens_of(want["adapted"])  # otherwise the comparisons would show nothing
            for name, path in folders.items():
                await here.cluster.load_adapter(name, path)
            for trouble in (moved, hung, killed):
                sent = [renamed(case, trouble.__name__) for case in cases.values()]
                found = await in_trouble(here, trouble, sent)
                for request, case, outputs in zip(sent, cases, found, strict=True):
                    check(request, outputs, want[case])
                timings = [outputs[-1].timings for outputs in found if outputs[-1].timings is not None]
                assert sum(each.num_moves if trouble is moved else each.num_deaths for each in timings) > 0
            assert (await here.cluster.stats()).num_adapters == len(folders)
            assert (await here.cluster.snapshot()).stats.num_adapters == len(folders)

    run(main())


def renamed(case: Request, name: str) -> Request:
    """With the seed of its own id: without one, draws depend on the id."""
    sampling = replace(case.sampling, seed=seed_of(case.request_id, case.sampling))
    return replace(case, request_id=f"{name} {case.request_id}", sampling=sampling)
