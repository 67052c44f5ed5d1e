"""One question, or one task head, about many pictures; one answer per picture, in order, as a JSON line.

::

    from apps.image_query import ask_all, find_pictures
    from vlora.client import Client

    with Client() as client:
        for answer in ask_all(client, find_pictures(["photos/"]), adapter="digits"):
            print(answer.image, answer.text)
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from apps.found_files import find_files
from apps.in_order import in_order
from vlora.client import Client, HeadResult
from vlora.errors import (
    BadImage,
    BadRequest,
    Disconnected,
    EngineDead,
    Unauthorized,
    UnknownAdapter,
    UnknownHead,
    VLoraError,
)
from vlora.types.domain import Way
from vlora.types.video import PICTURE_SUFFIXES


class PictureAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """image: its path, with a replacement character for bytes that are not UTF-8. text: the text, or a head's label.
    answer: a head's complete answer. answered_by, confidence: as of `vlora.client.Answer`. problem: the error, if there
    is no answer. question, adapter, head: what was asked.
    """

    image: str
    question: str | None = None
    adapter: str | None = None
    head: str | None = None
    text: str = ""
    answer: HeadResult | None = None
    answered_by: Way = "words"
    confidence: float | None = None
    problem: str | None = None


def printable(picture: Path) -> str:
    return os.fsencode(picture).decode(errors="replace")


def find_pictures(
    paths: Sequence[str | Path],
    on_error: Callable[[BadImage], None] = lambda error: None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """The given files, and the pictures of the given folders in order of name.

    Args:
        on_error: called with the error of each folder in a given one that cannot be read.
        say: called with the names of a folder's files that are no pictures.

    Raises:
        BadImage: a path does not exist or cannot be read, or a folder contains no picture.
    """
    return [file for path in paths for file in find_files(path, PICTURE_SUFFIXES, "no picture", on_error, say)]


def ask_all(
    client: Client,
    pictures: Sequence[Path],
    *,
    question: str | None = None,
    adapter: str | None = None,
    head: str | None = None,
    stop: threading.Event | None = None,
    **sampling: Any,
) -> Iterator[PictureAnswer]:
    """Ask about every picture, several at a time; answers in the order of the pictures.

    A picture that fails does not end the others: its answer contains the error. When `stop` is set, no more requests
    are sent, and running requests finish.

    Args:
        sampling: as for `Client.generate`.

    Raises:
        BadRequest: there is neither a question nor an adapter; a head without its adapter, or with a question.
        Disconnected, EngineDead, Unauthorized, UnknownAdapter, UnknownHead: errors that apply to every picture.
    """
    if (adapter is None and (question is None or head is not None)) or None not in (question, head):
        raise BadRequest("give a question, or a head and the adapter it belongs to, or a domain alone")

    def ask(picture: Path) -> PictureAnswer:
        answer = functools.partial(
            PictureAnswer, image=printable(picture), question=question, adapter=adapter, head=head
        )
        try:
            if head is not None:
                assert adapter is not None
                result = client.ask_head([picture], adapter, head)
                return answer(text=result.label, answer=result, answered_by="head", confidence=result.confidence)
            found = client.generate(question or "", [picture], adapter, **sampling)
            how, sure = found.answered_by, found.confidence
            return answer(text=found.text, answer=found.result, answered_by=how, confidence=sure)
        except (Disconnected, EngineDead, Unauthorized, UnknownAdapter, UnknownHead):
            raise
        except VLoraError as error:
            return answer(problem=str(error))

    running = itertools.takewhile(lambda _: stop is None or not stop.is_set(), pictures)
    return (answer for _, answer in in_order(ask, running))
