"""The supervisor's engines serve their base at one address: kill -9, tokens, and the metrics."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.engine.served_base import config, plain_model, write_checkpoint
from tests.processes import until
from tests.split.test_equality import WITHIN, apart, losses
from vlora.config import EngineConfig, ServedBase, Token
from vlora.engine.ipc.supervisor import SupervisedEngine
from vlora.errors import Unauthorized
from vlora.split import connect

OLD, NEW = (Token(name=name, secret=name * 16) for name in "on")


def supervised(config: EngineConfig, test: Any) -> list[str]:
    """Run a function in a thread beside an engine. Returns the log."""
    logged: list[str] = []

    async def main() -> None:
        engine = await SupervisedEngine.start(config, log=logged.append)
        loop = asyncio.get_running_loop()

        def stats() -> Any:
            return asyncio.run_coroutine_threadsafe(engine.stats(), loop).result(30)

        try:
            await asyncio.to_thread(test, engine, loop, stats)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 120))
    return logged


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_client_goes_on_after_kill_9_of_the_engine(tmp_path: Path) -> None:
    """And tokens that were replaced before are those of the next engine."""
    folder = write_checkpoint(tmp_path / "model", "qwen2_vl")
    model, address = plain_model(folder), f"unix:{tmp_path}/base.sock"
    plain = losses("lora", "qwen2_vl", copy.deepcopy(model))
    base = ServedBase(addresses=(address,), tokens=(OLD,))
    found: list[float] = []

    def train() -> None:
        with connect(address, token=OLD.secret) as opened:
            found.extend(losses("lora", "qwen2_vl", opened.wrap(copy.deepcopy(model))))
            assert opened.num_repeated

    def test(engine: SupervisedEngine, loop: asyncio.AbstractEventLoop, stats: Any) -> None:
        client = threading.Thread(target=train)
        client.start()
        until(lambda: stats().num_base_calls > 20)
        with pytest.raises(Unauthorized):
            connect(address, token=NEW.secret)
        loop.call_soon_threadsafe(engine.replace_base_tokens, (OLD, NEW))
        until(lambda: _admits(address, NEW))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        client.join()
        assert _admits(address, NEW)

    logged = supervised(dataclasses.replace(config(folder), serve_base=base), test)
    assert apart(found, plain) < WITHIN and logged[-1] == "the engine is ready again"
    assert not (tmp_path / "base.sock").exists()


def _admits(address: str, token: Token) -> bool:
    try:
        connect(address, token=token.secret).close()
    except Unauthorized:
        return False
    return True
