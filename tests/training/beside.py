"""Engines that train a plan beside requests, and the same training with `PackedTrainer` alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from tests.processors import write_checkpoint
from vlora.config import EngineConfig
from vlora.engine import Engine
from vlora.engine.trainings import Trainings
from vlora.memory.arena import PAGE_BYTES
from vlora.models.hf_model import HFModel
from vlora.models.loading import load_model
from vlora.models.processing import InputProcessor
from vlora.models.vision.encoder import VisionEncoder
from vlora.training.adapter import LoraSettings
from vlora.training.records import Record
from vlora.training.samples import finish, prepare
from vlora.training.trainer import PackedTrainer
from vlora.types import Request, SamplingParams, TrainingStatus

STEPS, BATCH, NUM_RECORDS = 3, 4, 6
PLANS: dict[str, dict[str, Any]] = {
    "first": {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "v_proj"], "learning_rate": 5e-3},
    "second": {"rank": 4, "alpha": 8.0, "targets": ["o_proj", "down_proj"], "learning_rate": 2e-3, "seed": 1},
}


def write_data(folder: Path) -> None:
    """Questions with answers of different lengths; every third one has a picture. One record is held out."""
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0)
    rows = []
    for number in range(NUM_RECORDS + 1):
        row: dict[str, Any] = {
            "question": "what is shown in the picture ?"[: 12 + 3 * number],
            "answer": " ".join(f"w{3 * number + place}" for place in range(1 + number % 3)),
            "split": "validation" if number == NUM_RECORDS else "train",
        }
        if number % 3 == 1:
            row["image"] = f"{number}.png"
            Image.fromarray(noise.integers(0, 255, (16, 16, 3), np.uint8)).save(folder / row["image"])
        rows.append(row)
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclasses.dataclass
class Case:
    """A checkpoint, data, and a folder for plans."""

    folder: Path
    model: str

    @classmethod
    def make(cls, folder: Path, family: str = "qwen2_vl") -> Case:
        write_data(folder / "data")
        return cls(folder, write_checkpoint(folder / "model", family))

    def plan(self, results: str, trainings: Sequence[str] = tuple(PLANS), **changes: Any) -> Path:
        """Write a plan. results: its folder."""
        entries = [
            {"name": one, "data": "data", "steps": STEPS, "batch": BATCH, "micro_batch_tokens": 1000, **PLANS[one]}
            | changes
            for one in trainings
        ]
        file = self.folder / f"{results}.yaml"
        file.write_text(yaml.safe_dump({"folder": results, "trainings": entries}))
        return file

    def config(self, **settings: Any) -> EngineConfig:
        fields = {"model": self.model, "dtype": "float32", "threads": 1, "block_size": 8, "max_batch_size": 4}
        fields |= {
            "arena_bytes": 1024 * PAGE_BYTES,
            "switching": "shadow",
            "train_slowdown": math.inf,
            "prefix_cache": False,
        }
        return EngineConfig(**{**fields, **settings})

    def engine(self, train: Path | None = None, **settings: Any) -> Engine:
        return Engine(self.config(train=None if train is None else str(train), **settings))

    @contextlib.contextmanager
    def running(self, train: Path | None = None, **settings: Any) -> Iterator[Running]:
        engine = self.engine(train, **settings)
        yield Running(engine)
        engine.close()

    def run(self, train: Path, **settings: Any) -> tuple[TrainingStatus, ...]:
        """Train a plan to its end. Returns the state of its trainings."""
        with self.running(train, **settings) as on:
            on.settle()
            return on.trainings.statuses()


class Running:
    """An engine with trainings."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.trainings = engine.parts.trainings

    def settle(
        self, until: Callable[[], bool] | None = None, most: float = math.inf, until_step: float = math.inf
    ) -> int:
        """As `settle`. until_step: Steps of the first training."""
        reached = lambda: self.trainings.statuses()[0].step >= until_step or (until is not None and until())  # noqa: E731
        return settle(self.trainings, self.engine, reached, most)

    def submit(self, plan: Path | str, *, reopen: bool = True) -> tuple[TrainingStatus, ...]:
        done = self.trainings.submit(str(plan), reopen=reopen)
        while not done.done():
            self.trainings.advance()
            time.sleep(1e-3)
        return done.result()

    def states(self) -> dict[str, tuple[str, int]]:
        """State and steps by name."""
        return {one.name: (one.state, one.step) for one in self.trainings.statuses()}

    @property
    def status(self) -> TrainingStatus:
        """Of the only training."""
        (found,) = self.trainings.statuses()
        return found

    def serve(self, *requests: Request) -> dict[str, list[int]]:
        """The tokens of requests, without pieces in between."""
        found: dict[str, list[int]] = {}
        for one in requests:
            self.engine.add(one)
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.error is None
                found.setdefault(output.request_id, []).extend(output.token_ids)
        return found


def request(name: str, adapter: str | None, num_tokens: int = 6, num_prompt: int = 7) -> Request:
    ids = tuple(random.Random(name).choices(range(4, 150), k=num_prompt))
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return Request(request_id=name, prompt_ids=ids, adapter=adapter, sampling=sampling)


def settle(
    trainings: Trainings, engine: Engine, until: Callable[[], bool] | None = None, most: float = math.inf
) -> int:
    """Run pieces, and steps if there is work, until no training runs. Returns the number of pieces, at most `most`."""
    num_pieces = 0
    while any(one.state == "running" for one in trainings.statuses()) and num_pieces < most:
        if until is not None and until():
            break
        if engine.has_work:
            engine.step()
        if trainings.advance():
            num_pieces += 1
        elif not engine.has_work:
            time.sleep(1e-3)  # the training waits for its thread
    return num_pieces


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def losses_of(folder: Path) -> list[float]:
    found: list[float] = json.loads((folder / "training.json").read_text())["progress"]["losses"]
    return found


class Alone:
    """The plan's trainings by `PackedTrainer`, without engine, plan, and files."""

    def __init__(self, case: Case, trainings: Sequence[str] = tuple(PLANS), **changes: Any) -> None:
        self.hf_model = HFModel(load_model(case.config()))
        processor = InputProcessor.from_pretrained(case.model)
        encoder = VisionEncoder(self.hf_model, cache_bytes=0)
        rows = [json.loads(line) for line in (case.folder / "data" / "questions.jsonl").read_text().splitlines()]
        samples = []
        for row in rows:
            image = case.folder / "data" / row["image"] if "image" in row else None
            record = Record(row["question"], row["answer"], image, "")
            samples.append(finish(self.hf_model, encoder, record, prepare(processor, record)))
        self.trainer = PackedTrainer(self.hf_model)
        self.losses: dict[str, list[float]] = {name: [] for name in trainings}
        self.held_out: dict[str, list[float]] = {name: [] for name in trainings}
        for name in trainings:
            fields = {**PLANS[name], "targets": tuple(PLANS[name]["targets"]), **changes}
            self.trainer.add(name, LoraSettings(**fields))
        self._evaluate(samples[-1])
        for step in range(STEPS):
            batch = {name: [samples[row] for row in self._rows(name, step)] for name in trainings}
            self.trainer.micro_step(batch).run()
            for name in trainings:
                self.losses[name].append(self.trainer.adapters[name].update().loss)
        self._evaluate(samples[-1])

    def _evaluate(self, sample: Any) -> None:
        losses = self.trainer.micro_step({name: [sample] for name in self.losses}, learns=False).run()
        for name, loss in losses.items():
            self.held_out[name].append(loss.mean)

    def _rows(self, name: str, step: int) -> list[int]:
        """All records in one order per epoch, in batches that continue in the next epoch."""
        order: list[int] = []
        epoch = 0
        while len(order) < (step + 1) * BATCH:
            rows = list(range(NUM_RECORDS))
            random.Random(f"{PLANS[name].get('seed', 0)} {epoch}").shuffle(rows)
            order += rows
            epoch += 1
        return order[step * BATCH : (step + 1) * BATCH]

    def adapter(self, name: str, folder: Path) -> dict[str, torch.Tensor]:
        self.trainer.adapters[name].save(folder / "adapter")
        return adapter_of(folder)


def assert_same(found: Path, wanted: Path | dict[str, torch.Tensor]) -> None:
    """The adapters of two trainings are equal, bit for bit."""
    ours, theirs = adapter_of(found), wanted if isinstance(wanted, dict) else adapter_of(wanted)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
