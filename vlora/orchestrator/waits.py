"""Measures the longest wait of a request, to compare with the waiting bound. Does not influence decisions."""

from __future__ import annotations


class Waits:
    """Waiting times of requests.

    Attributes:
        longest_s: the longest time from entering the KV room, or from the end of the last step, to the start of the
            next step, including times without a resident adapter.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._theta_s = 0.0
        self._num_ready = 1
        self._step_s = 0.0
        self.longest_s = 0.0

    @property
    def bound_s(self) -> float:
        """theta + ceil(ready / MaxBS) * longest step, with the maximum so far for each term.

        A longer wait of a ready request, at any time, violates the bound.
        """
        return self._theta_s + -(-self._num_ready // self._max_batch_size) * self._step_s

    def decided(self, theta_s: float, num_ready: int) -> None:
        self._theta_s = max(self._theta_s, theta_s)
        self._num_ready = max(self._num_ready, num_ready)

    def waited(self, seconds: float) -> None:
        """Record the wait of a request before its next step."""
        if seconds > self.longest_s:
            self.longest_s = seconds

    def stepped(self, seconds: float) -> None:
        """Record the time of a step, including the switch before it."""
        self._step_s = max(self._step_s, seconds)
