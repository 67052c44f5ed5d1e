"""The blocking stream of an answer's text."""

from __future__ import annotations

import queue
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from typing import Self

from vlora.client.calls import Call
from vlora.client.connection import ServerConnection
from vlora.client.values import Answer, StreamPart
from vlora.errors import DeadlineMissed


class TextStream(Iterator[str]):
    """Pieces of an answer's text; `answer` is set after the last piece."""

    def __init__(self, connection: ServerConnection, call: Call[StreamPart], timeout_s: float) -> None:
        self._parts = _parts(connection, connection.numbered(call), timeout_s)
        next(self._parts)  # yields once without text after the request is sent
        self.answer: Answer | None = None

    def __next__(self) -> str:
        part = next(self._parts)
        if isinstance(part, Answer):
            self.answer = part
            raise StopIteration
        return part

    def close(self) -> None:
        """Cancel the rest of the answer."""
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _parts(connection: ServerConnection, call: Call[StreamPart], timeout_s: float) -> Generator[str | Answer]:
    """Yields once after the request is sent, then its text, then its answer. Leaving earlier cancels the request."""
    arrived: queue.SimpleQueue[StreamPart | Future[StreamPart]] = queue.SimpleQueue()

    def on_value(part: StreamPart) -> bool:
        if part.answer is None:
            arrived.put(part)
        return part.answer is None

    future = connection.start(call, on_value)
    future.add_done_callback(arrived.put)
    try:
        yield ""
        while True:
            part = arrived.get(timeout=timeout_s)
            if isinstance(part, Future):
                break
            yield part.text
        answer = part.result().answer
        assert answer is not None
        yield answer
    except queue.Empty as error:
        raise DeadlineMissed(f"no response from the server within {timeout_s:g} s") from error
    finally:
        if not future.done():
            connection.abandon(call)
