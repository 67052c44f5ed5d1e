"""Numbers of the paper's text and tables (Symbiosis, https://arxiv.org/abs/2507.03220)."""

from __future__ import annotations

from typing import NamedTuple


class Batching(NamedTuple):
    """A line of table 5. calls: computed together on average."""

    tokens_per_s: float
    latency_s: float
    calls: float


TABLE_5 = {
    "no lockstep": Batching(94, 1.02, 1),
    "lockstep": Batching(88, 1.6, 8),
    "opportunistic": Batching(103, 0.77, 3.7),
}
"""Eight clients that decode with batch sizes from 2 to 256 (section 4.5)."""

TOKEN_S = 1.4
"""Seconds of a token of inference clients, with and without training clients (section 4.4)."""

FITTING_COPIES, FITTING_CLIENTS = 2, 5
"""Trainings that fit on one GPU with copies of the model, and with an executor (section 4.1.2)."""
