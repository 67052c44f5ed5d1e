"""The engine process and its client: answers, refused requests, process death, and the replacement that follows."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import PATIENCE_S, until
from tests.server.scripted import ENGINE_COMMAND, ByteProcessor, write_adapter
from tests.server.served import children
from vlora.cluster.adapter_state import AdapterState
from vlora.config import EngineConfig, ServedBase, Token
from vlora.engine.ipc import supervisor
from vlora.engine.ipc.client import EngineClient
from vlora.engine.ipc.supervisor import SupervisedEngine
from vlora.engine.operations import ADAPTERS_PER_REPLY, Train
from vlora.errors import BadAdapter, BadConfig, BadPlan, BadRequest, EngineDead, UnknownAdapter
from vlora.operations import ListTrainings, Operation
from vlora.server.adapter_catalog import AdapterCatalog
from vlora.server.metrics import Metrics
from vlora.types import Request, RequestOutput, SamplingParams
from vlora.wire.framing import MessageTransport


def request(name: str, prompt: str, most: int = 400, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=most)
    return Request(request_id=name, prompt_ids=tuple(prompt.encode()), **{"sampling": sampling, **fields})


async def outputs(engine: EngineClient | SupervisedEngine, sent: Request) -> list[RequestOutput]:
    found = [output async for output in engine.generate(sent)]
    assert all(not output.finished for output in found[:-1])
    return found


async def answer(engine: EngineClient | SupervisedEngine, sent: Request) -> tuple[str, RequestOutput]:
    found = await outputs(engine, sent)
    return bytes(token for output in found for token in output.token_ids if token < 256).decode(), found[-1]


async def start(model: str = "scripted", **fields: Any) -> EngineClient:
    return await EngineClient.start(EngineConfig(model=model, **fields), command=ENGINE_COMMAND)


# Freeing 30 MiB raises glibc's mmap threshold unless it is fixed; the probe shows whether 20 MiB are mmapped.
_PROBE = """
import ctypes, os, pathlib, sys
c = ctypes.CDLL(None)
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "free", "fast", "mapped", *"efghij")]
c.mallinfo2.restype, c.malloc.restype = Info, ctypes.c_void_p
c.malloc.argtypes, c.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
c.free(c.malloc(30 << 20))
before = c.mallinfo2().mapped
kept = c.malloc(20 << 20)
pathlib.Path(sys.argv[1]).write_text(f"{c.mallinfo2().mapped - before} {os.environ.get('GOMP_SPINCOUNT')}")
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc 2.33 or later")
@pytest.mark.parametrize(("own", "expected"), [(None, "2000"), ("7", "7")])
def test_an_engine_keeps_no_large_blocks_in_its_heap_and_its_threads_wait_briefly(
    own: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", own)
    found = tmp_path / "found"
    probe = (sys.executable, "-c", _PROBE, str(found))
    subprocess.run(probe, check=True)
    assert found.read_text() == f"0 {own}"  # by default glibc keeps them
    with pytest.raises(EngineDead):
        asyncio.run(EngineClient.start(EngineConfig(model="scripted"), command=probe))
    assert found.read_text() == f"1 {expected}"


async def test_requests_calls_refusals_and_a_clean_stop(tmp_path: Path) -> None:
    engine = await start(max_context=500)
    assert engine.ready.model == "scripted" and engine.ready.max_context == 500
    answers = [answer(engine, request(f"r{i}", f"say:answer {i}")) for i in range(8)]
    for i, (text, last) in enumerate(await asyncio.gather(*answers)):
        assert text == f"answer {i}" and last.finish_reason == "stop" and last.timings is not None
    # Whole answers arrive in one message, other answers token by token.
    whole, parts = await asyncio.gather(
        outputs(engine, request("whole", "say:word", whole=True)), outputs(engine, request("parts", "say:word"))
    )
    assert len(whole) == 1 < len(parts) and whole[0].finish_reason == "stop"
    assert whole[0].token_ids == tuple(token for output in parts for token in output.token_ids)
    # Refused, internal error, single failure: each request has its own final output; the engine stays up.
    for prompt, code in (("x" * 600, "prompt_too_long"), ("trip", "step_failed"), ("fail", "step_failed")):
        _, last = await answer(engine, request("r", prompt))
        assert last.error is not None and last.error.code == code
    with pytest.raises(BadRequest, match="a number in the request is too large"):
        await answer(engine, request("number", "say:x", sampling=SamplingParams(seed=10**30)))
    with pytest.raises(BadRequest, match="unpaired surrogate"):
        await engine.load_adapter("\ud800", str(tmp_path))
    # Closing a stream cancels its request; cancelling a request ends its stream.
    leaving = engine.generate(request("left", "forever"))
    await anext(leaving)
    assert isinstance(leaving, AsyncGenerator)
    await leaving.aclose()
    cancelling = engine.generate(request("cancelled", "forever"))
    await anext(cancelling)
    await engine.cancel("cancelled")
    assert [output async for output in cancelling][-1].finish_reason == "cancelled"
    # So does a passed deadline, with and without outputs from the engine.
    loop = asyncio.get_running_loop()
    for prompt in ("never", "forever"):
        with pytest.raises(TimeoutError):
            async for _ in engine.generate(request(prompt, prompt), loop.time() + 0.05):
                pass
    stats = await engine.stats()
    assert stats.num_running == 0 and stats.num_cancelled == 4
    # A stop ends running requests, and every later call fails with the cause.
    running = asyncio.create_task(answer(engine, request("running", "never")))
    await asyncio.sleep(0.05)
    await engine.close()
    assert (await running)[1].finish_reason == "cancelled"
    with pytest.raises(EngineDead, match="the engine was closed"):
        await engine.stats()
    with pytest.raises(ProcessLookupError):
        os.kill(engine.ready.pid, 0)


async def test_adapters_of_an_engine_process(tmp_path: Path) -> None:
    engine = await start()
    signs = write_adapter(tmp_path / "signs", {"kind": 1})
    status = await engine.load_adapter("signs", signs)
    assert status.name == "signs" and await engine.adapters() == (status,)
    # More than one batch, and exactly one batch.
    for count in (2 * ADAPTERS_PER_REPLY, 2 * ADAPTERS_PER_REPLY + 1):
        await engine.register_adapters({f"cam{number}": signs for number in range(count - 1)})
        names = [each.name for each in await engine.adapters()]
        assert len(names) == count and names == sorted({*names, "signs"})
    pinned = await engine.pin_adapter("signs", True)
    assert pinned.pinned and pinned in await engine.adapters()
    for call, error in (
        (engine.load_adapter("nothing", str(tmp_path)), BadAdapter),
        (engine.pin_adapter("nothing", True), UnknownAdapter),
        (engine.unload_adapter("nothing"), UnknownAdapter),
    ):
        with pytest.raises(error):
            await call
    draining = engine.generate(request("draining", "forever", 9, adapter="signs"))
    await anext(draining)
    await engine.unload_adapter("signs", drain=True)
    assert [output async for output in draining][-1].finish_reason == "length"
    await engine.close()


async def test_an_idle_engine_that_loses_a_rank_is_reported_dead() -> None:
    engine = await start("lonely")
    assert await asyncio.wait_for(engine.wait_dead(), 30) == "rank 1 was killed by SIGKILL"
    await engine.close()


@pytest.mark.parametrize(
    ("deed", "cause"),
    [
        ("kill", "the engine process was killed by SIGKILL"),
        ("exit", "the engine process ended with exit code 3"),
        ("crash", "the engine stopped: RuntimeError: the script says crash"),
    ],
)
async def test_a_dead_engine_fails_all_calls_with_its_cause(deed: str, cause: str) -> None:
    engine = await start()
    waiting = [asyncio.create_task(answer(engine, request(f"r{i}", "never"))) for i in range(3)]
    await asyncio.sleep(0.05)
    if deed == "kill":
        os.kill(engine.ready.pid, signal.SIGKILL)
    else:
        waiting.append(asyncio.create_task(answer(engine, request("killer", deed))))
    for _, last in await asyncio.gather(*waiting):
        assert last.error is not None and (last.error.code, last.error.message) == ("engine_dead", cause)
    assert engine.cause == cause  # all requests fail at the same time
    late = answer(engine, request("z", "z"))
    for call in (engine.stats(), engine.adapters(), engine.load_adapter("a", "b"), late):
        with pytest.raises(EngineDead, match=cause):
            await call
    assert await engine.wait_dead() == cause
    await engine.close()


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("broken", BadConfig, "model 'broken' cannot be loaded: there is no such folder"),
        ("buggy", EngineDead, "the engine stopped: RuntimeError: a mistake in the engine"),
        ("gone", EngineDead, "the engine process ended with exit code 3 while starting"),
    ],
)
async def test_a_failed_start_of_an_engine_is_reported_with_its_cause(
    model: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await start(model)


async def test_the_engine_ends_when_its_parent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[MessageTransport] = []
    open_transport = MessageTransport.open

    async def recording(*arguments: Any) -> MessageTransport:
        opened.append(await open_transport(*arguments))
        return opened[-1]

    monkeypatch.setattr(MessageTransport, "open", recording)
    monkeypatch.setattr("vlora.engine.ipc.client.FINAL_MESSAGE_S", PATIENCE_S)  # for the exit code on a busy machine
    engine = await start()
    opened[0].close()  # as after a kill of the parent
    assert "exit code 0" in await engine.wait_dead()


async def test_cancelling_a_start_leaves_no_process() -> None:
    before = set(children(os.getpid()))  # the fork server of an earlier test, for one
    starting = asyncio.create_task(start("slow"))
    while not set(children(os.getpid())) - before:
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    until(lambda: set(children(os.getpid())) <= before)


async def supervised(logged: list[str], model: str = "scripted") -> SupervisedEngine:
    return await SupervisedEngine.start(EngineConfig(model=model), log=logged.append, command=ENGINE_COMMAND)


async def kill(engine: SupervisedEngine) -> None:
    """Kill the process and wait until its death is detected."""
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    while engine.pid is not None:
        await asyncio.sleep(0.01)


async def alive(engine: SupervisedEngine) -> None:
    while engine.cause is not None:
        await asyncio.sleep(0.01)


async def test_a_hanging_load_blocks_nothing_and_ends_with_its_process(tmp_path: Path) -> None:
    logged: list[str] = []
    engine = await supervised(logged)
    folder = write_adapter(tmp_path / "one")
    hanging = asyncio.create_task(engine.load_adapter("hangs", folder))
    await engine.load_adapter("one", folder)
    assert (await answer(engine, request("r", "say:x")))[0] == "x"
    assert not hanging.done()
    await kill(engine)
    with pytest.raises(EngineDead):
        await hanging
    await alive(engine)
    assert [status.name for status in await engine.adapters()] == ["one"]
    # A server that stops waits for no restart either.
    hanging = asyncio.create_task(engine.load_adapter("hangs", folder))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineDead):
        await hanging


async def test_a_replacement_process_has_the_adapters_and_pins(tmp_path: Path) -> None:
    logged: list[str] = []
    restarts: list[str] = []
    engine = await supervised(logged)
    engine.on_change.append(lambda: restarts.append("restarted"))
    await engine.register_adapters({name: write_adapter(tmp_path / name) for name in ("one", "two", "lost")})
    await engine.load_adapter("three", write_adapter(tmp_path / "three"))
    await engine.load_adapter("gone", write_adapter(tmp_path / "gone"))
    for name in ("one", "three", "lost"):
        await engine.pin_adapter(name, True)
    await engine.pin_adapter("one", False)
    await engine.unload_adapter("gone")
    await engine.call(Train(write_adapter(tmp_path / "finished")))
    await engine.unload_adapter("finished")
    await engine.call(Train(write_adapter(tmp_path / "taught")))
    await engine.pin_adapter("taught", True)
    assert [one.name for one in await engine.call(Train("/plans/signs"))] == ["signs"]
    with pytest.raises(BadPlan, match="/plans/bad: cannot be read"):
        await engine.call(Train("/plans/bad"))
    shutil.rmtree(tmp_path / "lost")
    assert not engine.starting
    await kill(engine)
    assert engine.starting
    for call in (engine.stats(), engine.adapters(), answer(engine, request("r", "say:x"))):
        with pytest.raises(EngineDead, match="killed by SIGKILL; it is being restarted"):
            await call
    await alive(engine)
    assert [one.name for one in await engine.call(ListTrainings())] == ["finished", "taught", "signs"]
    assert not engine.starting
    pins = {"one": False, "taught": True, "three": True, "two": False}
    assert {each.name: each.pinned for each in await engine.adapters()} == pins
    assert (await answer(engine, request("r", "say:x")))[0] == "x"
    assert (await engine.stats()).num_restarts == 1 == len(restarts)
    assert logged[0] == "the engine process was killed by SIGKILL; it is being restarted"
    assert "adapter 'lost' was not restored" in logged[1] and logged[2:] == ["the engine is ready again"]
    # A missing adapter is not looked up a second time.
    await kill(engine)
    await alive(engine)
    assert len(logged) == 5 and len(await engine.adapters()) == 4
    with pytest.raises(UnknownAdapter):
        await engine.unload_adapter("lost")
    await engine.close()
    assert engine.cause == "the engine was closed" and not engine.starting


@pytest.mark.slow
async def test_a_trained_adapter_outlives_its_plan_and_the_engine(tmp_path: Path) -> None:
    logged: list[str] = []
    engine, plan = await supervised(logged), tmp_path / "signs"
    plan.symlink_to(write_adapter(tmp_path / "trained"))
    catalog = AdapterCatalog(engine, Metrics(), "model", ByteProcessor())  # type: ignore[arg-type]
    await catalog.keep_in(AdapterState.open(tmp_path / "state"), {})
    await catalog.train(str(plan))
    await catalog.pin("signs", True)
    plan.unlink()
    await kill(engine)
    await alive(engine)
    assert [(each.name, each.pinned) for each in await engine.adapters()] == [("signs", True)]
    await engine.close()


@pytest.mark.slow
async def test_an_engine_that_fails_at_every_start_stays_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start succeeds, every later start fails immediately."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    logged: list[str] = []
    engine = await supervised(logged, f"gone after {tmp_path / 'started'}")
    changes: list[bool] = []
    engine.on_change.append(lambda: changes.append(engine.starting))
    await kill(engine)
    while not changes:
        await asyncio.sleep(0.01)
    assert changes == [False]  # no call waits for a restart any more
    assert engine.cause is not None and "exit code 3" in engine.cause and "gave up after" in engine.cause
    assert len(logged) == 1 + 5 + 1 and logged[-1] == engine.cause
    with pytest.raises(EngineDead, match="gave up after"):
        await engine.stats()
    await engine.close()


async def test_an_unexpected_error_of_a_restart_is_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    logged: list[str] = []
    engine, call = await supervised(logged), EngineClient.call
    await engine.call(Train("/plans/signs"))
    unreadable = [RuntimeError("a reply cannot be read")]

    async def failing_once(self: EngineClient, operation: Operation) -> Any:
        if unreadable:
            raise unreadable.pop()
        return await call(self, operation)

    monkeypatch.setattr(EngineClient, "call", failing_once)
    await kill(engine)
    await alive(engine)
    assert logged[1:] == ["RuntimeError: a reply cannot be read; retrying", "the engine is ready again"]
    await engine.close()


async def test_closing_during_a_restart_leaves_no_process(tmp_path: Path) -> None:
    before = set(children(os.getpid()))  # the fork server of an earlier test, for one
    engine = await supervised([], f"slow after {tmp_path / 'started'}")
    await kill(engine)
    await asyncio.sleep(0.3)
    assert before < set(children(os.getpid()))
    await engine.close()
    assert before == set(children(os.getpid()))


async def test_an_engine_starts_without_an_address_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted engines; the second one finds another process at its address, and the third has the present tokens."""
    starts: list[bool] = []
    replaced: list[tuple[Token, ...]] = []
    start, replace = EngineClient.start, EngineClient.replace_base_tokens

    def replacing(self: EngineClient, tokens: tuple[Token, ...]) -> None:
        replaced.append(tokens)
        replace(self, tokens)

    async def listening_once(config: EngineConfig, *, command: Any) -> EngineClient:
        starts.append(config.serve_base is not None)
        if starts == [True, True]:
            raise BadConfig("cannot listen on unix:base.sock: another process listens there; choose another path")
        return await start(config, command=command)

    monkeypatch.setattr(EngineClient, "start", listening_once)
    monkeypatch.setattr(EngineClient, "replace_base_tokens", replacing)
    config = EngineConfig(model="scripted", serve_base=ServedBase(addresses=("unix:base.sock",)))
    logged: list[str] = []
    engine = await SupervisedEngine.start(config, log=logged.append, command=ENGINE_COMMAND)
    tokens = (Token(name="new", secret="n" * 16),)
    engine.replace_base_tokens(tokens)
    await kill(engine)
    while len(logged) < 3:
        await asyncio.sleep(0.01)
    assert logged[1].startswith("starting without --serve-base: cannot listen on unix:base.sock")
    assert logged[2] == "the engine is ready again" and starts == [True, True, False]
    assert replaced == [tokens] * 2
    await engine.close()
