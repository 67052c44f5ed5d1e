"""A front end with an engine in this process, one learning adapter, and callers that ask and correct."""

from __future__ import annotations

import asyncio
import io
import json
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from tests.processors import write_checkpoint
from vlora.client.values import Answer
from vlora.config import EngineConfig, ServerConfig
from vlora.engine import LocalEngine
from vlora.learning.learner import Learner
from vlora.learning.plan import read_learning_plan
from vlora.learning.sample_store import Corrector
from vlora.memory.arena import PAGE_BYTES
from vlora.models.hf_model import HFModel
from vlora.models.loading import load_model
from vlora.models.processing import InputProcessor
from vlora.server.frontend import FrontEnd
from vlora.server.prompts import Level, TextRequest
from vlora.training.adapter import LoraSettings
from vlora.training.trainer import PackedTrainer
from vlora.types import SamplingParams

NAME = "signs"
WORDS = ("what", "is", "shown", "in", "the", "picture")
TRAINING: dict[str, Any] = {"steps": 40, "batch": 8, "rank": 4, "learning_rate": 0.02, "micro_batch_tokens": 2000}
ADMIN = Corrector(None, True)


def config(model: str) -> EngineConfig:
    return EngineConfig(
        model=model,
        dtype="float32",
        threads=1,
        block_size=8,
        max_batch_size=4,
        arena_bytes=1024 * PAGE_BYTES,
        switching="shadow",
        train_slowdown=math.inf,
    )


def write_adapter(folder: Path, model: str, seed: int = 0) -> Path:
    """An adapter that changes nothing, with the settings of `TRAINING`."""
    trainer = PackedTrainer(HFModel(load_model(config(model))))
    trainer.add(NAME, LoraSettings(rank=TRAINING["rank"], seed=seed)).save(folder)
    return folder


def question(number: int) -> str:
    """One of many different questions."""
    return " ".join(random.Random(number).choices(WORDS, k=6)) + " ?"


def picture(number: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (16, 16), ((number * 37) % 256, (number * 91) % 256, 50)).save(stream, "PNG")
    return stream.getvalue()


class World:
    """Files for a server: a model, an adapter and a plan."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.model = write_checkpoint(folder / "model", "qwen2_vl")
        self.initial = write_adapter(folder / "initial", self.model)
        self.plan_with(**settings)

    def copy(self, folder: Path, **settings: Any) -> World:
        """The same model and adapter with another folder."""
        copy = object.__new__(World)
        copy.__dict__ |= self.__dict__ | {"folder": folder}
        copy.plan_with(**settings)
        return copy

    def plan_with(self, **settings: Any) -> None:
        entry = {"name": NAME, "training": TRAINING, "train_after": None, "held_out": 0.4} | settings
        (self.folder / "learn.yaml").write_text(yaml.safe_dump({"folder": "learning", "adapters": [entry]}))

    @property
    def own(self) -> Path:
        """The adapter's folder."""
        return self.folder / "learning" / NAME

    def audit_log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.own / "trail.jsonl").read_text().splitlines()]

    def events(self) -> list[str]:
        return [entry["event"] for entry in self.audit_log()]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Serving]:
        engine = LocalEngine(config(self.model))
        front = FrontEnd(engine, InputProcessor.from_pretrained(self.model), ServerConfig(), "base")
        folders = front.learn(*read_learning_plan(self.folder / "learn.yaml"), {NAME: str(self.initial)})
        try:
            await front.adapters.register(folders)
            yield Serving(front)
        finally:
            await front.close()
            await engine.close()


class Serving:
    """A running front end. Learning advances by `settle` only."""

    def __init__(self, front: FrontEnd) -> None:
        assert front.learning is not None
        self.front = front
        self.learning = front.learning

    @property
    def learner(self) -> Learner:
        return self.learning.learners[NAME]

    async def ask(
        self, text: str, image: bytes | None = None, tenant: str | None = None, adapter: str | None = NAME
    ) -> Answer:
        images = () if image is None else [image]
        sampling = SamplingParams(max_tokens=3)
        asked = TextRequest(text, images, adapter, sampling, Level(tenant=tenant), whole=True)
        *_, (_, answer) = [part async for part in self.front.generate(asked)]
        assert isinstance(answer, Answer)
        return answer

    async def teach(self, numbers: Sequence[int], label: str, tenant: str | None = None, by: Corrector = ADMIN) -> None:
        """Ask questions, and correct each answer to the label."""
        for number in numbers:
            answer = await self.ask(question(number), tenant=tenant)
            await self.learning.correct(answer.request_id, label, by)

    async def settle(self, most_s: float = 60) -> None:
        """Advance until nothing is under way."""
        async with asyncio.timeout(most_s):
            while True:
                await self.learner.advance()
                if (await self.learner.status()).training is None:
                    return
                await asyncio.sleep(0.005)
