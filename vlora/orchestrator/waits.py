"""How long requests were kept waiting, beside what the waiting bound came to. Nothing is decided by it."""

from __future__ import annotations


class Waits:
    """longest_s: the longest time from when a request was let in, or from the end of its last step, to the start of its
    next one; times in which its adapter was not in memory included."""

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._theta_s = 0.0
        self._num_ready = 1
        self._step_s = 0.0
        self.longest_s = 0.0

    @property
    def bound_s(self) -> float:
        """theta + ceil(ready / MaxBS) * longest step at its loosest: each at the most it has been. A wait of a ready
        request that is longer breaks the bound, whenever it was."""
        return self._theta_s + -(-self._num_ready // self._max_batch_size) * self._step_s

    def decided(self, theta_s: float, num_ready: int) -> None:
        self._theta_s = max(self._theta_s, theta_s)
        self._num_ready = max(self._num_ready, num_ready)

    def waited(self, seconds: float) -> None:
        """A request gets its next step."""
        if seconds > self.longest_s:
            self.longest_s = seconds

    def stepped(self, seconds: float) -> None:
        """A step took so long, the switch before it included."""
        self._step_s = max(self._step_s, seconds)
