"""Opportunistic batching: which calls of the clients the executor computes next, and how long it waits for more.

Calls of one key (layers and direction) are computed together if they are there together. A call waits for another
client only if that client is behind it on the same way through the layers and may arrive in time. For this the executor
is idle no longer than twice the time that the awaited calls would take by themselves, and lets calls behind it pass for
up to four times as long: small requests wait little, because their products are short (Symbiosis, section 3.7). Clients
that are ahead thus wait for those behind, until they travel together; a client that stops is waited for once. A call
never waits for a client with much larger calls, because that would slow it to the larger one's pace.

Among calls that do not wait, the client with the fewest rows served comes first (virtual token counters, as in
`vlora.orchestrator.fairness`). So small calls, those of decoding, precede large ones, those of prefill and training.
But a product cannot be interrupted: calls that come during one wait for its end. While clients with small calls are
active, a large call is therefore computed in pieces, and a call of training also while others infer. Each piece of
training is followed by a pause of its client that pays for the inference that waited for it: with n active clients, a
piece of duration d that all calls of inference waited for is followed by (n - 1) d. Each training thus delays the
others by at most one n-th of the time, and one whose pieces delay no call has no pauses. A client trains if one of its
latest calls, as many as it has keys, was backward.

Plain Python without a clock of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)  # a client
K = TypeVar("K", bound=Hashable)
Key = Hashable

FIXED_ROWS = 16
"""Charge of a product in rows, shared by its calls: below about so many rows, reading the weights takes the time."""
_SIMILAR = 4  # a call waits for clients of at most so many times its rows
_SMOOTHING = 0.25
_MAX_IDLE, _MAX_OVERTAKEN = 2.0, 4.0  # maximum wait of a call, of an idle and of a busy executor
_IDLE_S = 1.0  # longer than a client's own work between two calls
_MAX_CREDIT = 4096.0  # how far a counter may be behind: with more, clients that used little would stop others for long
_LEAST_S = 1e-6  # of a measured product: a clock may not have advanced
_MAX_PAUSED_S = 10.0  # age of a call from which it has no more pauses; clients give up after a minute by default
_MAX_KEYS = 4096  # distinct keys of one client; above, its way is forgotten


@dataclasses.dataclass(frozen=True)
class Call(Generic[C]):
    """A call in the queue, or a piece of it.

    Attributes:
        arrived: Seconds on the executor's clock.
        first: Row of the client's call with which a piece begins.
        backward: Whether it is of a backward pass.
    """

    client: C
    key: Key
    rows: int
    arrived: float
    first: int = 0
    backward: bool = False


@dataclasses.dataclass
class _Progress:
    """Where a client is.

    Attributes:
        served: Its counter of rows, with fixed charges and the smallest counter of the others at its arrival.
    """

    order: int
    step: int = 0
    last_step: dict[Key, int] = dataclasses.field(default_factory=dict)
    key: Key = None
    last_event: float = 0.0
    last_rows: int = 0
    last_backward: float = -math.inf
    resumes: float = 0.0
    served: float = 0.0
    rows: int = 0


class CallQueue(Generic[C]):
    """The calls that were received and not computed, at most one for each client."""

    def __init__(self, *, max_wait_s: float = 0.01, join_rows: int = 64) -> None:
        """Start empty.

        Args:
            max_wait_s: Maximum time that a call waits for others; 0 computes together only what is there.
            join_rows: Calls with more rows are large. They are computed by themselves: such products are bound by
                arithmetic, and copying their rows together would only cost time. A piece has at least about half as
                many rows, and more if they take less than `max_wait_s`.
        """
        self._max_wait_s = max_wait_s
        self._join_rows = join_rows
        self._calls: dict[C, Call[C]] = {}
        self._progress: dict[C, _Progress] = {}
        self._num_joined = 0
        self._free_since = 0.0  # end of the last product
        self._alone_s: dict[tuple[Key, int], float] = {}  # seconds of a product, by key and rows' power of two
        self._row_s: dict[Key, float] = {}  # seconds of a row of large calls
        self._piece: tuple[Call[C], float] | None = None  # the last product, if large, and its duration

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def rows_served(self) -> Mapping[C, int]:
        return {client: progress.rows for client, progress in self._progress.items()}

    def join(self, client: C) -> None:
        """Add a client. It starts at the lowest counter of the others, so that it gets no credit for its absence."""
        least = min((progress.served for progress in self._progress.values()), default=0.0)
        self._progress[client] = _Progress(self._num_joined, served=least)
        self._num_joined += 1

    def leave(self, client: C) -> None:
        self._calls.pop(client, None)
        self._progress.pop(client, None)

    def add(self, call: Call[C]) -> None:
        """Add a client's call; the client has no other one."""
        assert call.client not in self._calls, "a client has one call at a time"
        progress = self._progress[call.client]
        waiting = [self._progress[client].served for client in self._calls]
        if waiting and call.arrived - progress.last_event > _IDLE_S:
            progress.served = max(progress.served, min(waiting))  # idle time earns no credit
        most = max(self._progress[client].served for client in (*self._active(call.arrived), call.client))
        progress.served = max(progress.served, most - _MAX_CREDIT)
        if len(progress.last_step) > _MAX_KEYS:
            progress.last_step.clear()
        progress.step += 1
        progress.last_step[call.key] = progress.step
        progress.key, progress.last_event = call.key, call.arrived
        progress.last_rows = call.rows
        if call.backward:
            progress.last_backward = progress.step
        self._calls[call.client] = call

    def next(self, now: float) -> Sequence[Call[C]]:
        """Remove and return the calls to compute together; empty if all calls are waiting for others.

        Of a large call this may be a piece: then the rest of the call remains. Calls that were added since `computed`
        must be those that came during the product.
        """
        self._begin_pause(now)
        ready = [call for call in self._calls.values() if self._waits_until(call, now) <= now]
        if not ready:
            return ()
        first = min(ready, key=lambda call: (self._progress[call.client].served, call.arrived))
        if self._is_large(first.client):
            batch = [self._take_piece(first, now)]
        else:
            alike = [call.client for call in self._calls.values() if call.key == first.key]
            batch = [self._calls.pop(client) for client in alike if not self._is_large(client)]
        for call in batch:
            progress = self._progress[call.client]
            progress.served += call.rows + FIXED_ROWS / len(batch)
            progress.rows += call.rows
        return batch

    def wait_s(self, now: float) -> float | None:
        """Seconds until a call is ready; None without calls."""
        if not self._calls:
            return None
        return max(0.0, min(self._waits_until(call, now) for call in self._calls.values()) - now)

    def computed(self, batch: Sequence[Call[C]], took_s: float, now: float) -> None:
        """Record the duration of a product, which bounds later waits, and that its calls are answered."""
        key, rows = batch[0].key, sum(call.rows for call in batch)
        took_s = max(_LEAST_S, took_s)
        self._free_since = now
        _average(self._alone_s, (key, rows.bit_length()), took_s)
        if batch[0].client in self._progress and self._is_large(batch[0].client):
            _average(self._row_s, key, took_s / rows)
            self._piece = batch[0], took_s
        for call in batch:
            if call.client in self._progress:
                self._progress[call.client].last_event = now

    def _is_large(self, client: C) -> bool:
        return self._progress[client].last_rows > self._join_rows

    def _precedence(self, client: C) -> int:
        """0 for small calls, 1 for large ones of inference, 2 for those of training; pieces let lower ones pass."""
        progress = self._progress[client]
        # The forward calls of a training step precede its backward calls, so those of the step before count.
        trains = progress.step - progress.last_backward <= len(progress.last_step)
        return self._is_large(client) * (1 + trains)

    def _active(self, now: float) -> list[C]:
        return [
            client
            for client, progress in self._progress.items()
            if client in self._calls or (progress.step and now - progress.last_event <= _IDLE_S)
        ]

    def _take_piece(self, call: Call[C], now: float) -> Call[C]:
        """Remove a large call, or as many rows of it as delay calls that precede it by a bounded time."""
        del self._calls[call.client]
        precedence = self._precedence(call.client)
        if all(self._precedence(client) >= precedence for client in self._active(now)):
            return call
        most = max(self._join_rows, int(self._max_wait_s / self._row_s.get(call.key, math.inf)))
        rows = math.ceil(call.rows / math.ceil(call.rows / most))  # pieces of equal size
        if rows < call.rows:
            rest = dataclasses.replace(call, rows=call.rows - rows, first=call.first + rows)
            self._calls[call.client] = rest
        return dataclasses.replace(call, rows=rows)

    def _begin_pause(self, now: float) -> None:
        """Let a training pay for the calls of inference that wait, if the last product was one of its."""
        if self._piece is None:
            return
        (call, took_s), self._piece = self._piece, None
        if call.client not in self._progress or self._precedence(call.client) < 2:
            return
        active = self._active(now)
        inference = [client for client in active if self._precedence(client) < 2]
        if inference and now - call.arrived < _MAX_PAUSED_S:
            delayed = sum(client in self._calls for client in inference) / len(inference)
            self._progress[call.client].resumes = self._free_since + delayed * took_s * (len(active) - 1)

    def _waits_until(self, call: Call[C], now: float) -> float:
        """When a call is computed at the latest. A small call of unknown duration does not wait."""
        if self._is_large(call.client):
            return max(call.arrived, self._progress[call.client].resumes)
        alone_s = self._alone_s.get((call.key, call.rows.bit_length()), 0.0)
        if alone_s == 0:
            return call.arrived
        coming_s = alone_s * sum(self._comes(call, other, now) for other in self._progress)
        idle = max(call.arrived, self._free_since) + min(_MAX_IDLE * coming_s, self._max_wait_s)
        return min(idle, call.arrived + min(_MAX_OVERTAKEN * coming_s, self._max_wait_s))

    def _comes(self, call: Call[C], other: C, now: float) -> bool:
        """Whether another client may soon make the same call: it is behind, on the same way, and not idle."""
        theirs, ours = self._progress[other], self._progress[call.client]
        if other == call.client or theirs.last_rows > min(self._join_rows, _SIMILAR * call.rows):
            return False
        waiting = self._calls.get(other)
        if waiting is None:
            if now - theirs.last_event > self._max_wait_s:
                return False
        elif waiting.key == call.key:
            return False  # it is there
        behind, ahead = _distance(ours, theirs.key), _distance(theirs, call.key)
        # Half a way apart, each is as far behind the other: the one that came first waits.
        return behind < ahead or (behind == ahead < math.inf and ours.order < theirs.order)


def _average(averages: dict[K, float], key: K, value: float) -> None:
    before = averages.get(key, value)
    averages[key] = before + _SMOOTHING * (value - before)


def _distance(client: _Progress, key: Key) -> float:
    """Number of calls since the client's last call of a key; infinite for a key that it never called."""
    step = client.last_step.get(key)
    return math.inf if step is None else client.step - step
