"""The outputs of one request on their way from callbacks to the coroutine that reads them."""

from __future__ import annotations

import asyncio

from vlora.types import RequestOutput


class OutputStream:
    """An asynchronous iterator over a request's outputs; it ends after the last one."""

    def __init__(self) -> None:
        """Without outputs and without a bound."""
        self.finished = False
        self._outputs: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._late: asyncio.TimerHandle | None = None

    def end_at(self, until: float | None) -> None:
        """Let a read raise TimeoutError at a time of the running event loop; None for no bound."""
        # One timer for all outputs: a timer per output would cost as much as passing the output on.
        if until is not None:
            self._late = asyncio.get_running_loop().call_at(until, self._outputs.put_nowait, None)

    def put(self, output: RequestOutput) -> None:
        """Add an output. Call in the event loop."""
        self._outputs.put_nowait(output)

    def close(self) -> None:
        if self._late is not None:
            self._late.cancel()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        output = await self._outputs.get()
        if output is None:
            raise TimeoutError
        self.finished = output.finished
        return output
