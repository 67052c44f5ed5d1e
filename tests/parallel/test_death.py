"""The end of one rank ends its replica: all requests fail at once with the cause, and the replica restarts by
itself."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.engine.asking import ask, tokens
from tests.families import Prompt, build_model
from tests.oracle import Oracle
from tests.processes import until
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.engine.ipc.supervisor import SupervisedEngine
from vlora.engine.tensor_parallel import messages
from vlora.engine.tensor_parallel.coordinator import TensorParallelCoordinator, fork_server
from vlora.errors import BadConfig, EngineDead
from vlora.parallel.process_group import CollectiveFailed
from vlora.types import Request, RequestOutput

pytestmark = pytest.mark.slow  # test_orders.py is fast

PROMPT = (5, 6, 7, 8, 9)


def request(name: str, max_tokens: int, adapter: str | None = None) -> Request:
    return ask(Prompt({}, PROMPT, ()), name, adapter, max_tokens)


async def answer(engine: SupervisedEngine, sent: Request) -> list[RequestOutput]:
    return [output async for output in engine.generate(sent)]


def pid_of(engine: SupervisedEngine) -> int:
    assert engine.pid is not None
    return engine.pid


def ranks_of(engine_pid: int) -> list[int]:
    """The processes of all ranks: the engine's own, and then those that its fork server has created."""
    made = [
        child
        for child in psutil.Process(engine_pid).children(recursive=True)
        if "forkserver" in " ".join((child.parent() or child).cmdline())
    ]
    return [engine_pid, *(child.pid for child in sorted(made, key=lambda child: (child.create_time(), child.pid)))]


def own_rank(rank: int) -> int:
    """The process of a rank of an engine in this process."""
    (pid,) = (child.pid for child in multiprocessing.active_children() if child.name == f"vlora-rank-{rank}")
    assert pid is not None
    return pid


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


@pytest.mark.exhaustive
def test_one_of_four_ranks_is_killed_under_load_and_then_rank_0(folder: Path) -> None:
    log: list[str] = []
    others = set(children())  # other tests' fork server stays for later tests

    async def main() -> None:
        engine = await SupervisedEngine.start(config(folder, tensor_parallel=4), log=log.append)
        await engine.register_adapters({"wide8": str(folder / "adapters" / "wide8")})
        before = tokens(await answer(engine, request("before", 8, "wide8")))
        assert len(before) == 8

        async def kill_under_load(rank: int, cause: str) -> None:
            """All requests fail with the cause, regardless of the rank that was killed."""
            running = [
                asyncio.create_task(answer(engine, request(f"r{i}", 900, ("wide8", None)[i % 2]))) for i in range(4)
            ]
            await asyncio.sleep(0.3)
            os.kill(ranks_of(pid_of(engine))[rank], signal.SIGKILL)
            for outputs in await asyncio.gather(*running):
                error = outputs[-1].error
                assert error is not None and (error.code, error.message) == ("engine_dead", cause)
            with pytest.raises(EngineDead, match=cause):
                await answer(engine, request("meanwhile", 1))

        first_pid = pid_of(engine)
        await kill_under_load(2, "rank 2 was killed by SIGKILL")
        while engine.cause is not None:
            await asyncio.sleep(0.05)
        assert pid_of(engine) != first_pid
        assert tokens(await answer(engine, request("after", 8, "wide8"))) == before  # restored, with its adapters
        assert log == ["rank 2 was killed by SIGKILL; it is being restarted", "the engine is ready again"]
        pids = set(children()) - others
        assert len(set(ranks_of(pid_of(engine))) & pids) == 4
        await kill_under_load(0, "the engine process was killed by SIGKILL")
        pids |= set(children()) - others
        await engine.close()
        await asyncio.to_thread(until, lambda: not any(is_left(pid) for pid in pids))

    asyncio.run(asyncio.wait_for(main(), 280))


def test_a_rank_that_dies_between_loading_and_joining(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for it at that time, without a timeout."""
    decode = messages.decode_report

    def stop_once_loaded(data: bytes) -> messages.Report:
        report = decode(data)
        if isinstance(report, messages.ModelLoaded):
            os.kill(own_rank(1), signal.SIGSTOP)
            threading.Timer(1.0, os.kill, (own_rank(1), signal.SIGKILL)).start()
        return report

    monkeypatch.setattr("vlora.engine.tensor_parallel.messages.decode_report", stop_once_loaded)
    with pytest.raises(EngineDead, match="rank 1 was killed by SIGKILL"):
        LocalEngine(config(folder))
    assert not multiprocessing.active_children()


def test_ranks_out_of_sync_end_the_replica_with_the_cause(folder: Path) -> None:
    local = LocalEngine(config(folder))
    try:
        assert len(tokens(local.run([request("fine", 2)])["fine"])) == 2
        coordinator = local.engine.parts.coordinator
        assert coordinator is not None and coordinator.group is not None
        group = coordinator.group
        with pytest.raises(CollectiveFailed):
            group.all_reduce(torch.zeros(1), "base")  # while the other rank waits for a message
        with pytest.raises(EngineDead, match=r"ranks out of sync: rank . sent message"):
            local.run([request("apart", 2)])
    finally:
        local.engine.close()


@pytest.mark.parametrize("fails", ["Process", "Thread"])
def test_a_failed_start_of_a_rank_leaves_no_process(folder: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    context = fork_server()
    made = []

    def second_fails(start: Callable[[Any], None]) -> Callable[[Any], None]:
        def starting(self: Any) -> None:
            if self.name.startswith("vlora-rank-"):
                made.append(self)
                if len(made) == 2:
                    raise OSError("no more of these")
            start(self)

        return starting

    context.Process(target=print).start()  # the fork server itself exists, and stays
    for child in multiprocessing.active_children():
        child.join()
    before = sorted(os.listdir("/proc/self/fd"))
    owner = BaseProcess if fails == "Process" else threading.Thread
    monkeypatch.setattr(owner, "start", second_fails(owner.start))
    with pytest.raises(OSError, match="no more of these"):
        TensorParallelCoordinator(config(folder, tensor_parallel=4))
    assert len(made) == 2 and not multiprocessing.active_children()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_invalid_settings_are_refused_at_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is left."""
    for settings, model, message in (
        ({"tensor_parallel": 3}, None, r"tensor_parallel is 3, which does not divide the model's 4 attention heads"),
        ({}, build_model("llava"), "tensor_parallel needs a folder or a hub name"),
        ({"arena_bytes": 2**16}, None, r"the arena would have 1 pages"),
    ):
        with pytest.raises(BadConfig, match=message):
            LocalEngine(config(folder, **settings), model=model)
    monkeypatch.setattr("vlora.engine.build.facts_of", lambda config, model: {"transformers": "4.0"})
    with pytest.raises(BadConfig, match=r"rank 1 has transformers 5\.\d+\.\d+ and rank 0 has 4\.0"):
        LocalEngine(config(folder))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("how", ["cut short", "missing", "the only one cut short"])
def test_a_bad_model_file_is_reported(tmp_path: Path, how: str) -> None:
    size = "5GB" if how.startswith("the only") else "150KB"
    build_model("llava").save_pretrained(tmp_path / "model", max_shard_size=size)
    files = sorted((tmp_path / "model").glob("model*.safetensors"))
    assert (len(files) == 1) == (size == "5GB")
    if how == "missing":
        files[-1].unlink()
    else:
        files[-1].write_bytes(files[-1].read_bytes()[:-100])
    with pytest.raises(BadConfig, match="cannot load the weights"):
        LocalEngine(config(tmp_path))
    assert not multiprocessing.active_children()
