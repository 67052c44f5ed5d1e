"""The router as the cluster uses it: decisions only, every call returns what is to be done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Protocol


class RoutedNeed(Protocol):
    """A request as the router sees it."""

    @property
    def request_id(self) -> str: ...


class RoutedPlace(Protocol):
    """A request to send to a replica."""

    @property
    def need(self) -> Any: ...

    @property
    def replica(self) -> str: ...


class RoutedMove(Protocol):
    """A request to cancel on one replica and to send to another. It is counted there already."""

    @property
    def request_id(self) -> str: ...

    @property
    def target(self) -> str: ...


class RoutedRefusal(Protocol):
    """A waiting request that cannot be served. reason: "deadline" or "room"."""

    @property
    def need(self) -> Any: ...

    @property
    def reason(self) -> str: ...


class RoutedRefusals(Protocol):
    @property
    def refusals(self) -> Iterable[RoutedRefusal]: ...

    @property
    def placed(self) -> Iterable[RoutedPlace]: ...


class RequestsRouter(Protocol):
    """Decides which replica gets which request."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room on a replica."""
        ...

    def join(self, name: str, room: Any) -> Iterable[RoutedPlace]:
        """A replica serves from now on."""
        ...

    def leave(self, name: str) -> Iterable[RoutedNeed]:
        """A replica has ended. Returns its requests, for the caller to submit again."""
        ...

    def drain(self, name: str, draining: bool = True) -> Iterable[RoutedPlace]:
        """Send no further requests to a replica; `consolidate` then moves its requests away. False ends this."""
        ...

    def bar(self, name: str, adapter: str, barred: bool = True) -> Iterable[RoutedPlace]:
        """A replica cannot load an adapter."""
        ...

    def report(self, name: str, report: Any) -> Iterable[RoutedPlace]:
        """A replica has reported its load."""
        ...

    def submit(self, need: Any) -> Iterable[RoutedPlace]:
        """A request arrives or returns."""
        ...

    def ended(self, request_id: str) -> Iterable[RoutedPlace]:
        """A request has ended or was cancelled, on a replica or waiting."""
        ...

    def grew(self, request_id: str, blocks: int) -> None:
        """A request on a replica holds so many KV blocks."""
        ...

    def refuse(self, now: float) -> RoutedRefusals:
        """Remove the waiting requests that cannot be served."""
        ...

    def consolidate(self) -> Iterable[RoutedMove]:
        """Moves that empty a replica, those that drain first."""
        ...


@dataclasses.dataclass(frozen=True)
class Routing:
    """A router and its values.

    Attributes:
        need: Makes a request's need of its fields: request_id, adapter, blocks, arrival, priority, tenant, answer_by,
            returned and prefix.
        room: Makes a replica's room of max_batch_size and blocks.
        report: Makes a report of free_blocks, taken, ended and adapters.
    """

    router: RequestsRouter
    need: Callable[..., Any]
    room: Callable[..., Any]
    report: Callable[..., Any]
