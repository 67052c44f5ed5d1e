"""A learner over a scripted model, its records, and a clock."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.learning.scripted_model import ScriptedModel, write_content
from vlora.learning.learner import Learner
from vlora.learning.plan import Item, LearningEntry, LearningSettings
from vlora.learning.sample_store import AnsweredRequest, Corrector
from vlora.training.plan import TrainingSettings

ADMIN = Corrector("operator", True)


@dataclasses.dataclass
class School:
    """A folder for a learner. trusted: the operator's questions with their answers."""

    folder: Path
    trusted: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = ScriptedModel()
        self.now_s = 1000.0
        self.pauses_s: list[float] = []
        self.num_answers = 0
        self.initial = write_content(self.folder / "initial", {}, "old")

    def open(self) -> Learner:
        """A learner as after the start of a server: its version is registered."""
        fields = {"train_after": None, "held_out": 0.5, **self.settings}
        settings = LearningSettings(name="signs", training=TrainingSettings(steps=1), **fields)
        trusted = tuple(Item(question, label) for question, label in self.trusted.items())
        entry, clock = LearningEntry(settings, (), trusted), lambda: self.now_s
        own, executor = self.folder / "own", ThreadPoolExecutor(1)
        learner = Learner(own, entry, self.initial, self.model, executor, clock, self._pause)
        self.model.register({"signs": str(learner.present_folder)})
        return learner

    async def _pause(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.now_s += seconds

    def record(
        self, learner: Learner, questions: Sequence[str], label: str | None, tenant: str = "a", by: Corrector = ADMIN
    ) -> None:
        """Answers "old" of the present version, corrected to the label."""
        first = self.num_answers + 1
        self.num_answers += len(questions)
        named = {f"r{number}": question for number, question in enumerate(questions, first)}
        version = learner.loaded
        learner.store.add([AnsweredRequest(name, tenant, version, asked, "old", None) for name, asked in named.items()])
        for name in named if label is not None else ():
            assert label is not None and learner.store.correct(name, label, by)

    async def promote(
        self,
        learner: Learner,
        name: str,
        default: str = "?",
        answers: Mapping[str, str] | None = None,
        force: bool = True,
    ) -> None:
        """Promote a new content, which is written to the folder `name`."""
        folder = write_content(self.folder / name, answers or {}, default)
        await learner.promote("ann", version=None, path=str(folder), force=force)

    def audit_log(self) -> list[dict[str, Any]]:
        return trail_of(self.folder / "own")

    def events(self) -> list[str]:
        return [entry["event"] for entry in self.audit_log()]

    def evaluated(self) -> dict[str, Any]:
        """The details of the only evaluation."""
        (entry,) = (one for one in self.audit_log() if one["event"] == "evaluated")
        details: dict[str, Any] = entry["details"]
        return details


def trail_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trail.jsonl").read_text().splitlines()]


def questions(count: int, prefix: str = "q") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


async def settle(learner: Learner, most: int = 20) -> None:
    """Advance until nothing is under way."""
    for _ in range(most):
        await learner.advance()
        status = await learner.status()
        if status.training is None:
            return
    raise AssertionError(f"still {status}")


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def learning(
    trusted: Mapping[str, str] | None = None, takes: Sequence[str] = (), **settings: Any
) -> Callable[[Any], Callable[..., None]]:
    """Run a test, a coroutine of a `school` and its open `learner`, in a folder of its own.

    Args:
        takes: Parameters that are settings of the learner, or `trusted`, and not arguments of the test.
    """

    def decorate(test: Any) -> Callable[..., None]:
        names = [name for name in inspect.signature(test).parameters if name not in ("school", "learner")]

        @functools.wraps(test)
        def run_it(tmp_path: Path, **given: Any) -> None:
            taken = {name: given.pop(name) for name in takes}
            known = taken.pop("trusted", trusted or {})
            with_learner(School(tmp_path, known, settings | taken), lambda *both: test(*both, **given))

        fixtures = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (*names, *takes, "tmp_path")]
        run_it.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return run_it

    return decorate


def with_learner(school: School, work: Callable[[School, Learner], Any]) -> None:
    async def main() -> None:
        learner = school.open()
        try:
            await work(school, learner)
        finally:
            learner.close()

    run(main())
