"""The end of one rank is the end of its replica: everyone is told at once, and the service comes back by itself."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.families import build_model
from tests.oracle import Oracle
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.engine.client import EngineClient
from vlora.engine.supervised import SupervisedEngine
from vlora.errors import BadConfig, EngineDead
from vlora.memory.transfer import Inline
from vlora.types import Request, RequestOutput, SamplingParams

PROMPT = (5, 6, 7, 8, 9)
SOON_S = 30.0  # on a busy machine; without being told, ranks would notice after the group's 120 s


def request(name: str, max_tokens: int, adapter: str | None = None) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=name, prompt_ids=PROMPT, adapter=adapter, sampling=sampling)


async def answer(engine: SupervisedEngine, asked: Request) -> list[RequestOutput]:
    return [output async for output in engine.generate(asked)]


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def serving(engine: SupervisedEngine) -> EngineClient:
    assert engine._engine is not None
    return engine._engine


def other_rank(engine_pid: int) -> int:
    """The process of rank 1: what the engine's fork server has made."""
    (rank,) = (
        child.pid
        for child in psutil.Process(engine_pid).children(recursive=True)
        if "forkserver" in " ".join((child.parent() or child).cmdline())
    )
    return rank


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


def is_left(pid: int) -> bool:
    try:
        return "vlora" in " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llava")
    model = build_model("llava")
    model.save_pretrained(made / "model")
    Oracle("llava", model).save(made / "adapters")
    return made


def config(folder: Path, **settings: object) -> EngineConfig:
    settings = {"tensor_parallel": 2, "threads": 1, "arena_bytes": 2**26, **settings}
    return EngineConfig(model=str(folder / "model"), **settings)  # type: ignore[arg-type]


def test_a_killed_rank_under_load_and_an_idle_one(folder: Path) -> None:
    told: list[str] = []
    others = set(children())  # other tests' fork server stays for those that come after

    async def main() -> None:
        engine = await SupervisedEngine.start(config(folder), tell=told.append)
        await engine.register_adapters({"wide8": str(folder / "adapters" / "wide8")})
        before = tokens(await answer(engine, request("before", 8, "wide8")))
        assert len(before) == 8
        # Under load.
        running = [asyncio.create_task(answer(engine, request(f"r{i}", 900, ("wide8", None)[i % 2]))) for i in range(4)]
        await asyncio.sleep(0.3)
        first_pid = serving(engine).ready.pid
        os.kill(other_rank(first_pid), signal.SIGKILL)
        killed = time.monotonic()
        for outputs in await asyncio.gather(*running):
            error = outputs[-1].error
            assert error is not None and error.code == "engine_dead"
            assert error.message == "rank 1 was killed by SIGKILL"
        assert time.monotonic() - killed < SOON_S
        with pytest.raises(EngineDead, match="rank 1 was killed by SIGKILL"):
            await answer(engine, request("meanwhile", 1))
        # Back, with what it had.
        while engine.cause is not None:
            await asyncio.sleep(0.05)
        assert serving(engine).ready.pid != first_pid
        assert tokens(await answer(engine, request("after", 8, "wide8"))) == before
        assert told == ["rank 1 was killed by SIGKILL; it is being started again", "the engine serves again"]
        # While nothing runs: nobody has to ask for it to be noticed.
        os.kill(other_rank(serving(engine).ready.pid), signal.SIGKILL)
        killed = time.monotonic()
        while engine.cause is None:
            await asyncio.sleep(0.01)
        assert time.monotonic() - killed < SOON_S
        pids = set(children()) - others
        await engine.close()
        deadline = time.monotonic() + SOON_S
        while any(is_left(pid) for pid in pids):
            assert time.monotonic() < deadline, "a process is left over"
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(main(), 400))


def test_what_cannot_serve_is_said_before_anything_is_served(folder: Path) -> None:
    with pytest.raises(BadConfig, match=r"tensor_parallel is 3, which does not divide the model's 4 attention heads"):
        LocalEngine(config(folder, tensor_parallel=3))
    with pytest.raises(BadConfig, match="tensor_parallel needs a folder or a hub name"):
        LocalEngine(config(folder), model=build_model("llava"))
    with pytest.raises(BadConfig, match=r"the arena would have 1 pages"):
        LocalEngine(config(folder, arena_bytes=2**16))


def test_ranks_that_do_not_fit_together_do_not_serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlora.engine.engine.facts_of", lambda config, model: {"transformers": "4.0"})
    with pytest.raises(BadConfig, match=r"rank 1 has transformers 5\.\d+\.\d+ and rank 0 has 4\.0"):
        LocalEngine(config(folder))


def test_a_model_file_that_is_cut_short_is_said_to_be(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(BadConfig, match="cannot load the weights"):
        LocalEngine(config(tmp_path))


def test_an_adapter_that_another_rank_cannot_read_fails_alone(folder: Path, tmp_path: Path) -> None:
    """Its requests are told why, and the replica serves on."""
    path = shutil.copytree(folder / "adapters" / "wide8", tmp_path / "wide8")
    local = LocalEngine(config(folder), executor=Inline())
    try:
        local.engine.register_adapters({"gone": str(path), "kept": str(folder / "adapters" / "narrow4")})
        read = local.engine._registry.read(local.engine._registry.get("gone").key)
        assert read.version
        shutil.rmtree(path)  # after rank 0 has read it, and before the other one does
        outputs = local.run([request("g", 2, "gone"), request("k", 2, "kept"), request("b", 2)])
        error = outputs["g"][-1].error
        assert error is not None and error.code == "step_failed" and "rank 1: " in error.message
        assert len(tokens(outputs["k"])) == len(tokens(outputs["b"])) == 2
        local.engine.check_integrity()
    finally:
        local.engine.close()
