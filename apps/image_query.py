"""One question, or one task head, about many pictures; one answer per picture, in order, as a JSON line.

::

    from apps.image_query import ask_all, find_pictures
    from vlora.client import Client

    with Client() as client:
        for answer in ask_all(client, find_pictures(["photos/"]), question="what is shown ?", adapter="digits"):
            print(answer.image, answer.text)
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from apps.found_files import find_files
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

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff"}
AT_ONCE = 8
"""Concurrent questions; enough for the server to batch."""


class PictureAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """image: its path, with a replacement character for bytes that are not UTF-8. text: the text, or a head's label.
    answer: a head's complete answer. problem: the error, if there is no answer. question, adapter, head:
    what was asked.
    """

    image: str
    question: str | None = None
    adapter: str | None = None
    head: str | None = None
    text: str = ""
    answer: HeadResult | None = None
    problem: str | None = None


def printable(picture: Path) -> str:
    return os.fsencode(picture).decode(errors="replace")


def find_pictures(paths: Sequence[str | Path], on_error: Callable[[BadImage], None] = lambda error: None) -> list[Path]:
    """The given files, and the pictures of the given folders in order of name.

    Args:
        on_error: called with the error of each folder in a given one that cannot be read.

    Raises:
        BadImage: a path does not exist or cannot be read, or a folder contains no picture.
    """
    return [file for path in paths for file in find_files(path, SUFFIXES, "no picture", on_error)]


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
    """Ask about every picture, AT_ONCE at a time; answers in the order of the pictures.

    A picture that fails does not end the others: its answer contains the error. When `stop` is set, no more requests
    are sent, and running requests finish.

    Args:
        sampling: as for `Client.generate`.

    Raises:
        BadRequest: there is neither a question nor a head with its adapter, or both.
        Disconnected, EngineDead, Unauthorized, UnknownAdapter, UnknownHead: errors that apply to every picture.
    """
    if (question is None) == (head is None) or (head is not None and adapter is None):
        raise BadRequest("give a question, or a head and the adapter it belongs to")

    def ask(picture: Path) -> PictureAnswer:
        answer = functools.partial(
            PictureAnswer, image=printable(picture), question=question, adapter=adapter, head=head
        )
        try:
            if head is not None:
                assert adapter is not None
                result = client.ask_head([picture], adapter, head)
                return answer(text=result.label, answer=result)
            assert question is not None
            return answer(text=client.generate(question, [picture], adapter, **sampling).text)
        except (Disconnected, EngineDead, Unauthorized, UnknownAdapter, UnknownHead):
            raise
        except VLoraError as error:
            return answer(problem=str(error))

    under_way: deque[Future[PictureAnswer]] = deque()
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ask") as threads:
        for picture in pictures:
            if stop is not None and stop.is_set():
                break
            under_way.append(threads.submit(ask, picture))
            if len(under_way) >= AT_ONCE:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
