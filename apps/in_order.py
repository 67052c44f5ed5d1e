"""Requests of an application, several at a time, with their answers in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

AT_ONCE = 8
"""Concurrent requests; enough for the server to batch."""


def in_order(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
    """Each item with its result, AT_ONCE at a time. `items` is read in the caller's thread. Raises `work`'s errors."""
    under_way: deque[tuple[Item, Future[Result]]] = deque()
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ask") as threads:
        for item in items:
            under_way.append((item, threads.submit(work, item)))
            if len(under_way) == AT_ONCE:
                first, future = under_way.popleft()
                yield first, future.result()
        for first, future in under_way:
            yield first, future.result()
