"""Merge several async generators into one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def interleave(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield items in arrival order, with their stream's index. The first error or an early close ends all streams."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(place: int, stream: AsyncGenerator[T, None]) -> None:
        async with contextlib.aclosing(stream):
            async for item in stream:
                arrived.put_nowait((place, item))

    tasks = [asyncio.create_task(pump(place, stream)) for place, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(arrived.put_nowait)
    running = len(tasks)
    try:
        while running:
            news = await arrived.get()
            if isinstance(news, asyncio.Task):
                news.result()
                running -= 1
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
