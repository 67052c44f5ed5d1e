"""Selects the task head that a question belongs to."""

from __future__ import annotations

from collections.abc import Iterable

from vlora.types import AdapterStatus


def head_of_question(
    statuses: Iterable[AdapterStatus], question: str, num_images: int, adapter: str | None
) -> str | None:
    """Name of the adapter's only head for this question and number of images; None if there is none, or several.

    Questions are compared without regard to whitespace. An empty question stands for the adapter's own question.
    """
    words = question.split()
    heads = [
        head.name
        for status in statuses
        if status.name == adapter
        for head in status.heads
        if head.num_frames == num_images and words in ([], head.prompt.split())
    ]
    return heads[0] if len(heads) == 1 else None
