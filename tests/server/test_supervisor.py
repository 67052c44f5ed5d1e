"""When an engine process dies, pending requests fail, and a replacement starts with the same adapters."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.server.scripted import ENGINE_COMMAND, write_adapter
from tests.server.served import served
from tests.server.test_end_to_end import QUESTION, SERVED, picture, write_model
from tests.server.test_serve import children, until_alive
from vlora.client.values import FrameResult
from vlora.config import EngineConfig
from vlora.engine.ipc import supervisor
from vlora.engine.ipc.supervisor import SupervisedEngine
from vlora.errors import BadPlan, EngineDead, UnknownAdapter, VLoraError
from vlora.types import Request

ROOT = Path(__file__).parents[2]


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 240))


async def start(logged: list[str], model: str = "scripted") -> SupervisedEngine:
    """model: of the scripted engine."""
    return await SupervisedEngine.start(EngineConfig(model=model), log=logged.append, command=ENGINE_COMMAND)


class Listener:
    """Calls a function on every change of the engine."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    def engine_changed(self) -> None:
        self._on_change()


async def kill(engine: SupervisedEngine) -> None:
    """Kill the process and wait until its death is detected."""
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    while engine.pid is not None:
        await asyncio.sleep(0.01)


async def alive(engine: SupervisedEngine) -> None:
    while engine.cause is not None:
        await asyncio.sleep(0.01)


def test_a_hanging_load_blocks_nothing_and_ends_with_its_process(tmp_path: Path) -> None:
    async def main() -> None:
        logged: list[str] = []
        engine = await start(logged)
        folder = write_adapter(tmp_path / "one")
        hanging = asyncio.create_task(engine.load_adapter("hangs", folder))
        await engine.load_adapter("one", folder)
        request = Request(request_id="r", prompt_ids=tuple(b"say:x"))
        assert [output async for output in engine.generate(request)][-1].finish_reason is not None
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

    run(main())


def test_a_replacement_process_has_the_adapters_and_pins(tmp_path: Path) -> None:
    async def main() -> None:
        logged: list[str] = []
        restarts: list[str] = []
        engine = await start(logged)
        engine.add_listener(Listener(lambda: restarts.append("restarted")))
        await engine.register_adapters({name: write_adapter(tmp_path / name) for name in ("one", "two", "lost")})
        await engine.load_adapter("three", write_adapter(tmp_path / "three"))
        await engine.load_adapter("gone", write_adapter(tmp_path / "gone"))
        for name in ("one", "three", "lost"):
            await engine.pin_adapter(name, True)
        await engine.pin_adapter("one", False)
        await engine.unload_adapter("gone")
        assert [one.name for one in await engine.train("/plans/signs")] == ["signs"]
        with pytest.raises(BadPlan, match="/plans/bad: cannot be read"):
            await engine.train("/plans/bad")
        shutil.rmtree(tmp_path / "lost")
        assert not engine.starting
        await kill(engine)
        assert engine.starting
        request = Request(request_id="r", prompt_ids=tuple(b"say:x"))
        for call in (engine.stats, engine.adapters, lambda: anext(engine.generate(request))):  # type: ignore[call-overload]
            with pytest.raises(EngineDead, match="killed by SIGKILL; it is being restarted"):
                await call()
        await alive(engine)
        assert [one.name for one in await engine.trainings()] == ["signs"]
        assert not engine.starting
        assert [(each.name, each.pinned) for each in await engine.adapters()] == [
            ("one", False),
            ("three", True),
            ("two", False),
        ]
        first, *_ = [output async for output in engine.generate(request)]
        assert first.token_ids == tuple(b"x")
        assert (await engine.stats()).num_restarts == 1 == len(restarts)
        assert logged[0] == "the engine process was killed by SIGKILL; it is being restarted"
        assert "adapter 'lost' was not restored" in logged[1] and logged[2:] == ["the engine is ready again"]
        # A missing adapter is not looked up a second time.
        await kill(engine)
        await alive(engine)
        assert len(logged) == 5 and len(await engine.adapters()) == 3
        with pytest.raises(UnknownAdapter):
            await engine.unload_adapter("lost")
        await engine.close()
        assert engine.cause == "the engine was closed" and not engine.starting

    run(main())


@pytest.mark.slow
def test_an_engine_that_fails_at_every_start_stays_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start succeeds, every later start fails immediately."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)

    async def main() -> None:
        logged: list[str] = []
        engine = await start(logged, f"gone after {tmp_path / 'started'}")
        changes: list[bool] = []
        engine.add_listener(Listener(lambda: changes.append(engine.starting)))
        await kill(engine)
        while not changes:
            await asyncio.sleep(0.01)
        assert changes == [False]  # no call waits for a restart any more
        assert engine.cause is not None and "exit code 3" in engine.cause and "gave up after" in engine.cause
        assert len(logged) == 1 + 5 + 1 and logged[-1] == engine.cause
        with pytest.raises(EngineDead, match="gave up after"):
            await engine.stats()
        await engine.close()

    run(main())


def test_closing_during_a_restart_leaves_no_process(tmp_path: Path) -> None:
    async def main() -> None:
        before = set(children(os.getpid()))  # the fork server of an earlier test, for one
        engine = await start([], f"slow after {tmp_path / 'started'}")
        await kill(engine)
        await asyncio.sleep(0.3)
        assert before < set(children(os.getpid()))
        await engine.close()
        assert before == set(children(os.getpid()))

    run(main())


# -- with a real process ----------------------------------------------------------------------------------------------


class Caller(threading.Thread):
    """A client that waits and records its result with the time."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._ask = ask
        self.result: Any = None
        self.at = 0.0
        self.start()

    def run(self) -> None:
        try:
            self.result = self._ask()
        except VLoraError as error:
            self.result = error.code
        self.at = time.monotonic()


def call(port: int, method: str, path: str, body: Any = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def chat(port: int, **fields: Any) -> tuple[int, str]:
    body = {"messages": [{"role": "user", "content": QUESTION}], **fields}
    return call(port, "POST", "/v1/chat/completions", body)


def last_code(answer: tuple[int, str]) -> str:
    """The code of a complete answer's error, or of the error that ends a stream."""
    text = answer[1] if answer[0] != 200 else answer[1].split("\n\n")[-3].removeprefix("data: ")
    code: str = json.loads(text)["error"]["code"]
    return code


def code_of(frame: FrameResult) -> str | None:
    return frame.error.code if frame.error else None


@pytest.mark.slow
@pytest.mark.parametrize("family", SERVED)
def test_adapters_and_streams_survive_a_kill_of_the_engine(tmp_path: Path, family: str) -> None:
    write_model(tmp_path, family)
    extra = shutil.copytree(tmp_path / "adapters" / "small", tmp_path / "extra")
    arguments = ["--model", str(tmp_path / "model"), "--adapters", str(tmp_path / "adapters")]
    with served(*arguments) as on:
        client, port = on.client, on.http_port
        (engine,) = children(on.process.pid)
        frames = client.open_stream(adapter="small", head="letter", drop="none")
        status, _ = call(port, "POST", "/v1/adapters", {"name": "more", "path": str(extra)})
        assert status == 201 and call(port, "PUT", "/v1/adapters/more/pin")[0] == 200
        status, before = chat(port, model="more", max_tokens=5)
        assert status == 200
        assert frames.send(picture(0)) == 0
        answered = next(frames).answer
        assert answered is not None
        # A random model may draw the end token at any place, and which place depends on the processor's rounding.
        long = {"model": "more", "max_tokens": 900, "temperature": 1.0, "seed": 1, "ignore_eos": True}
        callers = [
            Caller(lambda: last_code(chat(port, **long, stream=True))),
            Caller(lambda: last_code(chat(port, **long))),
            Caller(lambda: last_code(chat(port, **long, n=3))),
            Caller(lambda: client.generate(QUESTION, max_tokens=900, ignore_eos=True)),
            Caller(lambda: list(client.stream(QUESTION, max_tokens=900, ignore_eos=True))),
        ]
        while client.stats().num_running < 7:
            assert all(caller.is_alive() for caller in callers), "an answer ended before all seven were running"
            time.sleep(0.01)
        os.kill(engine, signal.SIGSTOP)  # so that the frames wait on any machine
        assert [frames.send(picture(number)) for number in (1, 2, 3)] == [1, 2, 3]
        callers.append(Caller(lambda: code_of(next(frames))))
        time.sleep(0.3)
        killed = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        for caller in callers:
            caller.join(30)
        assert [caller.result for caller in callers] == ["engine_dead"] * 6
        assert max(caller.at for caller in callers) - killed < 30  # far below every request limit
        assert call(port, "GET", "/ready")[0] == 503
        assert "vlora_engine_up 0.0" in call(port, "GET", "/metrics")[1]
        assert frames.send(picture(0)) == 4  # accepted without an engine: waits for the replacement
        until_alive(client)
        assert [(each.name, each.pinned) for each in client.adapters()] == [
            ("large", False),
            ("more", True),
            ("small", False),
        ]
        after = chat(port, model="more", max_tokens=5)
        assert [json.loads(text)["choices"] for text in (before, after[1])] == [json.loads(before)["choices"]] * 2
        assert [code_of(next(frames)), code_of(next(frames))] == ["engine_dead"] * 2
        resumed = next(frames)
        assert resumed.number == 4 and resumed.answer is not None
        assert resumed.answer.scores == pytest.approx(answered.scores, rel=1e-3)
        frames.close()
    assert on.log.count(" warning ") == 2
