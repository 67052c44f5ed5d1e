"""Engines whose background tasks run when the test asks for it, for tests of adapters that come and go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests import device
from tests.engine.asking import ask, tokens
from tests.families import Prompt, build_model
from tests.queued_executor import QueuedExecutor
from vlora.config import EngineConfig
from vlora.engine import Engine, LocalEngine
from vlora.types import RequestOutput

FAMILY = "llava"
ANSWER = 5  # tokens


def make_engine(
    executor: QueuedExecutor | None = None, num_bytes: int = 64 * 2**20, clock: Any = None, **settings: Any
) -> LocalEngine:
    fields = {"arena_bytes": num_bytes, "max_context": 256, "block_size": 8, **settings}
    config = EngineConfig(model=FAMILY, device=device.name, **fields)
    local = LocalEngine(config, model=build_model(FAMILY).to(device.name), executor=executor)
    if clock is not None:
        local.engine = Engine(config, model=build_model(FAMILY).to(device.name), executor=executor, clock=clock)
    return local


def ends(outputs: Iterable[RequestOutput]) -> dict[str, str | None]:
    """The end of each request: its finish reason, or its error's code."""
    return {o.request_id: o.error.code if o.error else o.finish_reason for o in outputs if o.finished}


class Story:
    """An engine, its background tasks, its outputs so far, and each adapter's right answer to the prompt."""

    def __init__(
        self, prompt: Prompt, folders: dict[str, str], answers: dict[str | None, list[int]], **settings: Any
    ) -> None:
        self.background = QueuedExecutor()
        self.engine = make_engine(self.background, **settings).engine
        self.outputs: list[RequestOutput] = []
        self.folders, self.answers, self._prompt = folders, answers, prompt

    def ask(self, name: str, adapter: str | None, **fields: Any) -> None:
        self.engine.add(ask(self._prompt, name, adapter, ANSWER, **fields))

    def steps(self, number: int = 1) -> list[RequestOutput]:
        """Step, and return the outputs of these steps."""
        found: list[RequestOutput] = []
        for _ in range(number):
            found += self.engine.step()
            self.engine.check_integrity()
        self.outputs += found
        return found

    def run(self, number: int = 1) -> None:
        """Run background tasks, each with a step after it."""
        for _ in range(number):
            assert self.background.run()
            self.steps()

    def finish(self) -> None:
        """Step until all work is done, running one background task before each step."""
        while self.engine.has_work:
            self.background.run()
            self.steps()

    def said(self, request_id: str, adapter: str | None) -> None:
        """Assert that a request got this adapter's answer."""
        assert tokens(self.outputs, request_id) == self.answers[adapter], request_id

    @property
    def resident(self) -> frozenset[str]:
        return self.engine.parts.device.pool.resident

    def held(self) -> tuple[int, int, int, int]:
        """Bytes for adapters: arena, host memory, vision cache; and KV."""
        stats = self.engine.stats()
        return stats.adapter_bytes, stats.host_adapter_bytes, stats.vision_cache_bytes, stats.kv_bytes
