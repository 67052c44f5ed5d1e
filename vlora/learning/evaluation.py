"""Answers of the served adapters to labelled questions, through the same calls as those of users."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from vlora.errors import AdapterChanged, BadRequest
from vlora.learning.live_store import same
from vlora.types import TrainingStatus


class Item(NamedTuple):
    """A question with its right answer. image: a file. number: of the live record that has the picture instead."""

    question: str
    label: str
    image: Path | None = None
    number: int | None = None


class ServedModel(Protocol):
    """The engine, as learning uses it. Methods raise VLoraError."""

    async def answer(self, question: str, image: bytes | None, *, adapter: str, version: str, label: str) -> str:
        """The greedy answer of an adapter with this content, at the lowest priority.

        Args:
            question: As a user asks it.
            image: Encoded bytes.
            adapter: Its name.
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

    async def trainings(self) -> tuple[TrainingStatus, ...]:
        """Every training."""
        ...


class Version(NamedTuple):
    """An adapter's name, and the content that it has."""

    adapter: str
    version: str


async def right_answers(
    model: ServedModel,
    items: Sequence[Item],
    versions: Sequence[Version],
    read: Callable[[Item], Awaitable[bytes | None]],
    on_progress: Callable[[], None],
) -> list[list[bool]]:
    """Which items each version answers right. Items that cannot be asked are left out.

    Args:
        model: Asked one question at a time.
        items: Questions.
        versions: To ask.
        read: Returns an item's picture.
        on_progress: Called after each item.

    Raises:
        AdapterChanged: A version was replaced meanwhile.
        VLoraError: The engine has failed.
    """
    found: list[list[bool]] = [[] for _ in versions]
    for item in items:
        try:
            image = await read(item)
            answers = [
                await model.answer(item.question, image, adapter=name, version=version, label=item.label)
                for name, version in versions
            ]
        except AdapterChanged:
            raise
        except (BadRequest, OSError):  # its picture is broken, or it is longer than the context
            answers = []
        for own, answer in zip(found, answers, strict=False):
            own.append(same(item.label, answer))
        on_progress()
    return found
