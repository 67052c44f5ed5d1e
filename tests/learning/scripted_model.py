"""An engine for a learner without a model: the content of an adapter is a table of its answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from vlora.adapter_files import content_hash
from vlora.errors import AdapterChanged, BadAdapter, EngineDead, UnknownAdapter, VLoraError
from vlora.types import TrainingStatus


def nothing(what: str) -> None:
    """Fails no call."""


def write_content(folder: Path, answers: Mapping[str, str], default: str = "?") -> Path:
    """A folder with the files of an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"answers": dict(answers), "default": default}))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


class ScriptedModel:
    """See `ServedModel`. A training learns its `train` rows by heart, and the most frequent answer for others.

    Attributes:
        before_call: Called first in each method, with its name; raises to fail it.
        dead: Every call raises EngineDead.
        loaded: Version by name.
    """

    def __init__(self) -> None:
        self.before_call: Callable[[str], None] = nothing
        self.dead = False
        self.loaded: dict[str, str] = {}
        self.folders: dict[str, Path] = {}
        self.asked: list[tuple[str, str]] = []
        self._trainings: dict[str, TrainingStatus] = {}

    def register(self, folders: Mapping[str, str]) -> None:
        """As the server does at its start."""
        for name, folder in folders.items():
            self.folders[name], self.loaded[name] = Path(folder), content_hash(Path(folder))

    @contextmanager
    def failing(self, what: str, errors: list[VLoraError], share: float = 1.0) -> Iterator[None]:
        """Fail this share of the calls of a method, at random, with one of the errors."""
        drawn = random.Random(0)

        def fail(called: str) -> None:
            if called == what and drawn.random() < share:
                raise drawn.choice(errors)

        self.before_call = fail
        yield
        self.before_call = nothing

    def _call(self, what: str) -> None:
        self.before_call(what)
        if self.dead:
            raise EngineDead("the engine was killed")

    async def answer(self, question: str, image: bytes | None, *, adapter: str, version: str, label: str) -> str:
        self._call("answer")
        if self.loaded[adapter] != version:
            raise AdapterChanged(f"{adapter} has {self.loaded[adapter]}")
        self.asked.append((adapter, question))
        content = json.loads((self.folders[adapter] / "adapter_config.json").read_text())
        found: str = content["answers"].get(question, content["default"])
        return found

    def check_label(self, label: str) -> None:
        self._call("check_label")

    async def load(self, name: str, folder: Path) -> str:
        self._call("load")
        if not (folder / "adapter_config.json").exists():
            raise BadAdapter(f"{folder} has no adapter")
        self.register({name: str(folder)})
        return self.loaded[name]

    async def check(self, name: str) -> None:
        self._call("check")

    async def unload(self, name: str) -> None:
        self._call("unload")
        if self.loaded.pop(name, None) is None:
            raise UnknownAdapter(f"no {name}")

    async def train(self, plan: Path) -> None:
        self._call("train")
        found = yaml.safe_load(plan.read_text())
        entry: dict[str, Any] = found["trainings"][0]
        rows = [json.loads(line) for line in (plan.parent / "questions.jsonl").read_text().splitlines()]
        learned = [row for row in rows if row["split"] == "train"]
        answers = [row["answer"] for row in learned]
        default = max(sorted(set(answers)), key=answers.count)
        write_content(
            plan.parent / found["folder"] / entry["name"] / "adapter",
            {row["question"]: row["answer"] for row in learned},
            default,
        )
        self._trainings[entry["name"]] = TrainingStatus(name=entry["name"], state="finished", step=1, num_steps=1)

    async def trainings(self) -> tuple[TrainingStatus, ...]:
        self._call("trainings")
        return tuple(self._trainings.values())
