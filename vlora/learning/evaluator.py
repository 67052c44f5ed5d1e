"""The comparison of a candidate with the present version of an adapter, on its records, in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from vlora.errors import BadAdapter, DeadlineMissed, OverCapacity, UnknownAdapter
from vlora.learning.decision import compare, confidence_of_look, why_not
from vlora.learning.evaluation import Interrupted, Item, RightAnswers, ServedModel, Version, right_answers
from vlora.learning.plan import LearningEntry
from vlora.learning.sample_store import SampleStore
from vlora.learning.selection import agreed, as_right, bounded, latest_of_each
from vlora.types.learning import Comparison

T = TypeVar("T")


class Compared(NamedTuple):
    """details: of the evaluation, for the audit log. why_not: reason not to promote the candidate."""

    details: dict[str, Any]
    why_not: str | None


class Evaluator:
    """Used from one event loop. The store belongs to the executor's thread."""

    def __init__(
        self,
        entry: LearningEntry,
        model: ServedModel,
        store: SampleStore,
        executor: Executor,
        on_question: Callable[[str], Awaitable[None]],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        """Arguments are those of `Learner`. on_question: called after each question, with the progress as text."""
        self._entry = entry
        self._settings = entry.settings
        self._model = model
        self._store = store
        self._executor = executor
        self._on_question = on_question
        self._sleep = sleep

    async def compare(self, pair: tuple[Version, Version], candidate: Path, look: int) -> Compared:
        """Load a candidate, and compare it with the present version.

        Args:
            pair: The present version, and the candidate under its own name.
            look: Number of this evaluation against the present version, from 1.

        Raises:
            EngineDead, Interrupted: The evaluation has to be repeated.
            VLoraError: The candidate cannot be served, or another version is served by now.
        """
        confidence = confidence_of_look(self._settings.confidence, look)
        try:
            if await self._model.load(pair[1].adapter, candidate) != pair[1].version:
                raise BadAdapter("its files were changed")
            live, live_answers = await self._answers(await self._in_thread(self._held_out), pair, confidence)
            trusted, trusted_answers = await self._answers(self._entry.trusted, pair, confidence)
        except (OverCapacity, DeadlineMissed, UnknownAdapter) as error:  # the last one: after the engine's restart
            raise Interrupted(f"{type(error).__name__}: {error}") from error
        details = {"live": msgspec.to_builtins(live)}
        if self._entry.trusted:
            details["trusted"] = msgspec.to_builtins(trusted)
        if left_out := live_answers.num_left_out + trusted_answers.num_left_out:
            details["left_out"] = left_out
        if unanswered := live_answers.num_unanswered + trusted_answers.num_unanswered:
            details["unanswered"] = unanswered
        operators = trusted if self._entry.trusted else None
        return Compared(details, why_not(live, operators, self._settings.max_trusted_loss, confidence))

    async def _answers(
        self, items: Sequence[Item], pair: Sequence[Version], confidence: float
    ) -> tuple[Comparison, RightAnswers]:
        count = 0

        async def count_one() -> None:
            nonlocal count
            count += 1
            await self._on_question(f"{count} of {len(items)} questions")

        answered = await right_answers(self._model, items, pair, self._image_of, count_one, self._sleep)
        present, candidate = answered.found
        return compare(present, candidate, confidence), answered

    def _held_out(self) -> list[Item]:
        settings = self._settings
        held = [one for one in self._store.labelled() if one.held_out]
        records = bounded(agreed(held), settings.max_share, settings.max_evaluated)
        if settings.uncorrected_are_right:
            uncorrected = self._store.held_out_uncorrected(settings.correct_within_s, settings.max_evaluated)
            records += as_right(uncorrected, held)
        chosen = latest_of_each(records, settings.max_evaluated)
        return [Item(one.question, one.label, number=one.number) for one in chosen]

    async def _image_of(self, item: Item) -> bytes | None:
        if item.image is not None:
            return await self._in_thread(item.image.read_bytes)
        return None if item.number is None else await self._in_thread(self._store.image, item.number)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
