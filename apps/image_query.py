"""One question, or one task head, over many pictures; an answer for each, in order, as a line of JSON.

::

    from apps.image_query import ask_all, find_pictures
    from vlora.client import Client

    with Client() as client:
        for answer in ask_all(client, find_pictures(["photos/"]), question="what is shown ?", adapter="digits"):
            print(answer.image, answer.text)
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

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
"""Questions under way; enough for the server to batch."""


class PictureAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """image: its path, with a replacement character for what is no UTF-8. text: the words, or a head's label. answer: a
    head's, in full. problem: why there is no answer."""

    image: str
    text: str = ""
    answer: HeadResult | None = None
    problem: str | None = None


def find_pictures(paths: Sequence[str | Path]) -> list[Path]:
    """The files that are named, and of folders their pictures in order of name. Raises BadImage for what is not there,
    and for a folder without a picture."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
            if not inside:
                raise BadImage(f"folder {str(path)!r} holds no picture")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise BadImage(f"there is no file or folder {str(path)!r}")
    return found


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
    """Ask about every picture, AT_ONCE at a time; answers in the pictures' order. sampling: as of `Client.generate`.

    A picture that cannot be answered does not end the others: its answer says why. When `stop` is set no more is
    asked, and what is under way is still answered.

    Raises BadRequest unless there is either a question or a head with its adapter; and what would be the same for every
    picture: Disconnected, EngineDead, Unauthorized, UnknownAdapter, UnknownHead.
    """
    if (question is None) == (head is None) or (head is not None and adapter is None):
        raise BadRequest("give a question, or a head and the adapter it belongs to")

    def ask(picture: Path) -> PictureAnswer:
        image = os.fsencode(picture).decode(errors="replace")
        try:
            if head is not None:
                assert adapter is not None
                result = client.ask_head([picture], adapter, head)
                return PictureAnswer(image=image, text=result.label, answer=result)
            assert question is not None
            said = client.generate(question, [picture], adapter, **sampling)
            return PictureAnswer(image=image, text=said.text)
        except (Disconnected, EngineDead, Unauthorized, UnknownAdapter, UnknownHead):
            raise
        except VLoraError as error:
            return PictureAnswer(image=image, problem=str(error))

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
