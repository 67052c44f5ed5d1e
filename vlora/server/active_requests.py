"""The requests in progress: their limit, their deadlines, their outcomes in the metrics, and draining."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from vlora.config import ServerConfig
from vlora.errors import BadRequest, DeadlineMissed, OverCapacity, VLoraError
from vlora.server.metrics import Metrics
from vlora.server.security.limits import Quotas
from vlora.types.composition import UNKNOWN

if TYPE_CHECKING:
    from vlora.tracing import RequestTrace, Tracing

log = logging.getLogger("vlora.server.frontend")  # the documented name: operators select the lines by it


class RequestClock:
    """One request's arrival time and deadline.

    adapter: for the metrics; the adapter's name once it is known to be registered, or `BASE` without one. trace: None
    without tracing.
    """

    def __init__(self, timeout_s: float, trace: RequestTrace | None = None) -> None:
        self.adapter = UNKNOWN
        self.trace = trace
        self._timeout_s = timeout_s
        self._arrived = time.monotonic()
        self.deadline = asyncio.get_running_loop().time() + timeout_s

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._arrived

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Convert a timeout into DeadlineMissed."""
        try:
            yield
        except TimeoutError as error:
            raise DeadlineMissed(
                f"the request was not answered within {self._timeout_s:g} s, which is this server's limit"
            ) from error


@contextlib.contextmanager
def reporting(report: Callable[[str], None]) -> Iterator[None]:
    """Report how a block ends: ok, cancelled, or the code of its error."""
    outcome = "cancelled"
    try:
        yield
        outcome = "ok"
    except Exception as error:
        outcome = error.code if isinstance(error, VLoraError) else VLoraError.code
        raise
    finally:
        report(outcome)


class ActiveRequests:
    """Used from one event loop."""

    def __init__(self, config: ServerConfig, metrics: Metrics, quotas: Quotas, tracing: Tracing | None) -> None:
        self._config = config
        self._quotas, self._tracing = quotas, tracing
        self._metrics = metrics
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    def __len__(self) -> int:
        return self._num_active

    @property
    def draining(self) -> bool:
        return self._draining

    @contextlib.contextmanager
    def admit(self, tenant: str | None, operation: str, num_choices: int = 1) -> Iterator[RequestClock]:
        """Count a request, its end and its outcome. Raises OverCapacity when there is no room for it.

        operation: Its kind in traces.
        """
        trace = None if self._tracing is None else self._tracing.begin(operation, tenant)
        clock = RequestClock(self._config.request_timeout_s, trace)

        def report(outcome: str) -> None:
            self._metrics.count(outcome, clock.adapter, tenant)
            if trace is not None:
                trace.end(outcome, clock.adapter)
            fields = {"outcome": outcome, "seconds": round(clock.elapsed_s, 4), "choices": num_choices}
            log.info("a request ended", extra={"fields": fields})

        with reporting(report), self._counted(num_choices):
            self._quotas.count_request(tenant)
            yield clock

    async def drain(self) -> None:
        """Refuse new requests and wait up to `drain_s` seconds for active ones to end."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_s):
                await self._idle.wait()

    @contextlib.contextmanager
    def _counted(self, num_choices: int) -> Iterator[None]:
        limit = self._config.max_requests
        if self._draining:
            raise OverCapacity("the server is shutting down and accepts no new requests")
        if num_choices > limit:
            raise BadRequest(f"n is {num_choices}; this server allows at most {limit}", field="n")
        if self._num_active + num_choices > limit:
            raise OverCapacity(
                f"{self._num_active} requests are in progress; this server's limit is {limit}; try again later"
            )
        self._num_active += num_choices
        self._metrics.active.inc(num_choices)
        self._idle.clear()
        try:
            yield
        finally:
            self._num_active -= num_choices
            self._metrics.active.dec(num_choices)
            if self._num_active == 0:
                self._idle.set()
