"""Merged streams: no item is lost; the first error or an early close ends all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from vlora.server.interleave import interleave


class Streams:
    """Counts open streams."""

    def __init__(self) -> None:
        self.open = 0

    async def numbers(self, count: int, *, fails: bool = False) -> AsyncGenerator[int, None]:
        self.open += 1
        try:
            for number in range(count):
                await asyncio.sleep(0)
                yield number
            if fails:
                raise ValueError("the stream broke")
        finally:
            self.open -= 1


@pytest.mark.parametrize("num_streams", [1, 3])
def test_items_of_one_stream_stay_in_order(num_streams: int) -> None:
    async def main() -> None:
        streams = Streams()
        came: dict[int, list[int]] = {place: [] for place in range(num_streams)}
        async for place, number in interleave([streams.numbers(5 + place) for place in range(num_streams)]):
            came[place].append(number)
        assert came == {place: list(range(5 + place)) for place in range(num_streams)} and streams.open == 0

    asyncio.run(main())


@pytest.mark.parametrize("num_streams", [1, 3])
def test_an_error_or_an_early_close_ends_all_streams(num_streams: int) -> None:
    async def main() -> None:
        streams = Streams()
        others = [streams.numbers(10**6) for _ in range(num_streams - 1)]
        with pytest.raises(ValueError, match="the stream broke"):
            async for _ in interleave([streams.numbers(3, fails=True), *others]):
                pass
        assert streams.open == 0
        async with contextlib.aclosing(interleave([streams.numbers(10**6) for _ in range(num_streams)])) as parts:
            assert (await anext(parts))[1] == 0
        assert streams.open == 0

    asyncio.run(main())
