"""The comparison of a candidate with the present version of an adapter, by their answers to labelled questions."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from vlora.errors import (
    Aborted,
    AdapterChanged,
    BadAdapter,
    BadRequest,
    DeadlineMissed,
    EngineDead,
    OverCapacity,
    StepFailed,
    UnknownAdapter,
)
from vlora.learning.decision import agreed, as_right, bounded, compare, confidence_of_look, latest_of_each, why_not
from vlora.learning.plan import Item, LearningEntry
from vlora.learning.sample_store import SampleStore, same
from vlora.types import TrainingStatus
from vlora.types.learning import Comparison

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Before further attempts at a question."""
MAX_UNANSWERED = 0.1
"""Share of the questions that an evaluation may leave out because they are not answered in time."""


class ServedModel(Protocol):
    """The engine, as learning uses it. Methods raise VLoraError."""

    async def answer(self, question: str, image: bytes | None, *, adapter: str, version: str, label: str) -> str:
        """The greedy answer of an adapter with this content, at the lowest priority.

        Args:
            image: Encoded bytes.
            version: The content that it must have.
            label: The answer may end once it is longer.

        Raises:
            AdapterChanged: It has other content.
            BadRequest: The question or its picture cannot be used.
        """
        ...

    def check_label(self, label: str) -> None:
        """Raises BadRequest for a label that would fail every training that has it."""
        ...

    async def load(self, name: str, folder: Path) -> str:
        """Give a name the content of a folder, as `EngineInterface.load_adapter` does. Returns the content's hash."""
        ...

    async def check(self, name: str) -> None:
        """Raises BadRequest if the adapter has parts that trainings do not make."""
        ...

    async def unload(self, name: str) -> None:
        """Free a name, if it is in use."""
        ...

    async def train(self, plan: Path) -> None:
        """Begin or continue the training of a plan file."""
        ...

    async def trainings(self) -> tuple[TrainingStatus, ...]: ...


class Version(NamedTuple):
    """An adapter's name, and the content that it has."""

    adapter: str
    version: str


class Interrupted(Exception):
    """The engine does not answer at present; the evaluation has to be repeated."""


class RightAnswers(NamedTuple):
    """found: for each version, which items it answers right.

    num_left_out: items without answers. num_unanswered: those that only the first version answers.
    """

    found: list[list[bool]]
    num_left_out: int
    num_unanswered: int


async def right_answers(
    model: ServedModel,
    items: Sequence[Item],
    versions: Sequence[Version],
    read: Callable[[Item], Awaitable[bytes | None]],
    on_progress: Callable[[], Awaitable[None]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> RightAnswers:
    """Which items each version answers right. Items that the first one does not answer are left out of all.

    Those that another one does not answer are wrong for it, so that a version that fails cannot pass for a better one.
    A call that fails for another reason than its question is repeated, after a pause that doubles. Up to
    `MAX_UNANSWERED` of the items may miss their deadlines each time.

    Args:
        model: Asked one question at a time.
        versions: To ask, the present one first.
        read: Returns an item's picture. Raises LookupError if the item does not exist any more.

    Raises:
        AdapterChanged: A version was replaced meanwhile.
        Interrupted: The engine is dead or full for longer than the pauses, or too many items were not answered.
        VLoraError: The engine has failed.
    """
    found: list[list[bool]] = [[] for _ in versions]
    num_late = num_unanswered = 0
    for item in items:
        right: list[bool] = []
        try:
            image = await read(item)
            for version in versions:
                right.append(same(item.label, await _answer(model, item, image, version, sleep)))
        except (AdapterChanged, UnknownAdapter):
            raise
        except _Unanswered as error:
            num_late += 1
            if num_late > max(1, MAX_UNANSWERED * len(items)):
                raise Interrupted(f"{num_late} of {len(items)} questions were not answered: {error}") from error
            if right:
                num_unanswered += 1
                right += [False] * (len(versions) - len(right))
        except (BadRequest, LookupError, OSError):  # its picture is broken, or it is longer than the context
            right = []
        for own, is_right in zip(found, right, strict=False):
            own.append(is_right)
        await on_progress()
    return RightAnswers(found, len(items) - len(found[0]), num_unanswered)


class _Unanswered(Exception):
    """An item was not answered, perhaps because of its length."""


async def _answer(
    model: ServedModel,
    item: Item,
    image: bytes | None,
    version: Version,
    sleep: Callable[[float], Awaitable[None]],
) -> str:
    for pause_s in (*PAUSES_S, None):
        try:
            return await model.answer(
                item.question, image, adapter=version.adapter, version=version.version, label=item.label
            )
        except (DeadlineMissed, StepFailed, Aborted) as error:
            if pause_s is None:
                raise _Unanswered(str(error)) from error
        except (OverCapacity, EngineDead) as error:
            if pause_s is None:
                raise Interrupted(f"no answer after {len(PAUSES_S)} further attempts: {error}") from error
        if pause_s is not None:
            await sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


T = TypeVar("T")


class Compared(NamedTuple):
    """details: of the evaluation, for the audit log. why_not: reason not to promote the candidate."""

    details: dict[str, Any]
    why_not: str | None


@dataclasses.dataclass(eq=False)
class Evaluator:
    """Used from one event loop. The store belongs to the executor's thread.

    Attributes:
        on_question: Called after each question, with the progress as text.
    """

    entry: LearningEntry
    model: ServedModel
    store: SampleStore
    executor: Executor
    on_question: Callable[[str], Awaitable[None]]
    sleep: Callable[[float], Awaitable[None]]

    async def compare(self, pair: tuple[Version, Version], candidate: Path, look: int) -> Compared:
        """Load a candidate, and compare it with the present version.

        Args:
            pair: The present version, and the candidate under its own name.
            look: Number of this evaluation against the present version, from 1.

        Raises:
            EngineDead, Interrupted: The evaluation has to be repeated.
            VLoraError: The candidate cannot be served, or another version is served by now.
        """
        confidence = confidence_of_look(self.entry.settings.confidence, look)
        try:
            if await self.model.load(pair[1].adapter, candidate) != pair[1].version:
                raise BadAdapter("its files were changed")
            live, live_answers = await self._answers(await self._in_thread(self._held_out), pair, confidence)
            trusted, trusted_answers = await self._answers(self.entry.trusted, pair, confidence)
        except (OverCapacity, DeadlineMissed, UnknownAdapter) as error:  # the last one: after the engine's restart
            raise Interrupted(f"{type(error).__name__}: {error}") from error
        details = {"live": msgspec.to_builtins(live)}
        if self.entry.trusted:
            details["trusted"] = msgspec.to_builtins(trusted)
        if left_out := live_answers.num_left_out + trusted_answers.num_left_out:
            details["left_out"] = left_out
        if unanswered := live_answers.num_unanswered + trusted_answers.num_unanswered:
            details["unanswered"] = unanswered
        operators = trusted if self.entry.trusted else None
        return Compared(details, why_not(live, operators, self.entry.settings.max_trusted_loss, confidence))

    async def _answers(
        self, items: Sequence[Item], pair: Sequence[Version], confidence: float
    ) -> tuple[Comparison, RightAnswers]:
        count = 0

        async def count_one() -> None:
            nonlocal count
            count += 1
            await self.on_question(f"{count} of {len(items)} questions")

        answered = await right_answers(self.model, items, pair, self._image_of, count_one, self.sleep)
        present, candidate = answered.found
        return compare(present, candidate, confidence), answered

    def _held_out(self) -> list[Item]:
        settings = self.entry.settings
        held = [one for one in self.store.labelled() if one.held_out]
        records = bounded(agreed(held), settings.max_share, settings.max_evaluated)
        if settings.uncorrected_are_right:
            uncorrected = self.store.held_out_uncorrected(settings.correct_within_s, settings.max_evaluated)
            records += as_right(uncorrected, held)
        chosen = latest_of_each(records, settings.max_evaluated)
        return [Item(one.question, one.label, number=one.number) for one in chosen]

    async def _image_of(self, item: Item) -> bytes | None:
        if item.image is not None:
            return await self._in_thread(item.image.read_bytes)
        return None if item.number is None else await self._in_thread(self.store.image, item.number)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *args)
