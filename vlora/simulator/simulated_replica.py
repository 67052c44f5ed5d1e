"""The interface of a simulated replica, which `ExactReplica` and `QuickReplica` implement, and of its requests."""

from __future__ import annotations

import math
from collections.abc import Collection, Set
from typing import NamedTuple, Protocol

from vlora.routing import Need
from vlora.simulator.arrivals import Arrival


class Job:
    """One request on its way through the replicas. Times are in seconds of the world; negative ones are not known.

    Attributes:
        need: as of its last submission to the router.
        answered: tokens that were answered when it was last sent.
        num_reused: prompt tokens found in a prefix cache.
        first_s: time of its first answer.
        refused_s: time at which it was refused because of its deadline.
    """

    __slots__ = ("answered", "arrival", "first_s", "need", "num_reused", "refused_s")

    def __init__(self, arrival: Arrival, need: Need) -> None:
        self.arrival = arrival
        self.need = need
        self.answered = 0
        self.num_reused = 0
        self.first_s = -1.0
        self.refused_s = -1.0

    @property
    def num_tokens(self) -> int:
        """Tokens with KV when it is sent: the prompt, and what was answered."""
        return self.arrival.prompt_tokens + self.answered

    @property
    def left(self) -> int:
        """Answers that remain; a task head gives one."""
        return max(1, self.arrival.answer_tokens) - self.answered


class Totals(NamedTuple):
    """The counters of a replica at its end.

    Attributes:
        num_switches, switch_s: of merged weights.
        num_preemptions: requests that lost their KV to continue others.
        busy_s, batch_s: seconds with requests, and their sum over the requests.
        longest_wait_s, wait_bound_s: of admitted requests for their next step; 0 if not simulated.
    """

    steps_by_mode: dict[str, int]
    num_switches: int
    switch_s: float
    num_preemptions: int
    num_loads: int
    busy_s: float
    batch_s: float
    longest_wait_s: float = 0.0
    wait_bound_s: float = 0.0


class SimulatedReplica(Protocol):
    """A replica in a world. The world calls `advance` at `next_s`, and the others at any time up to then."""

    @property
    def name(self) -> str:
        """Unique among all replicas of a world, past ones included."""

    @property
    def next_s(self) -> float:
        """When `advance` is due; infinite without work."""

    @property
    def jobs(self) -> Collection[Job]:
        """The unfinished requests."""

    @property
    def adapters(self) -> Set[str]:
        """Adapters on the device or being loaded."""

    @property
    def num_loads(self) -> int:
        """Number of adapter loads."""

    def send(self, job: Job, now: float) -> None:
        """A request arrives. `job.answered` tokens of its answer are computed again with the prompt."""

    def remove(self, job: Job, now: float) -> None:
        """Cancel a request, and set what it has answered."""

    def advance(self) -> list[Job]:
        """Continue at `next_s`; return the requests that have ended at that time."""

    def free_blocks(self) -> int:
        """KV blocks that are left if each request holds its present tokens and one more block."""

    def totals(self) -> Totals:
        """The counters so far."""


IDLE_S = math.inf
