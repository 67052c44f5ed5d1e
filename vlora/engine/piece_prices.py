"""Prices of work that cannot be interrupted, learned from how long it took."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Protocol

from vlora.orchestrator.cost_model import measured_s

_RECENT = 64  # pieces of one kind
_RARE = 0.05  # share of the pieces that take longer than expected


class Piece(Protocol):
    """Pieces of one kind take time in proportion to `num_tokens`, or one time if it is 0."""

    @property
    def kind(self) -> Hashable: ...

    @property
    def num_tokens(self) -> int: ...


class PiecePrices:
    """Learns how long pieces take, by kind."""

    def __init__(self) -> None:
        self._recent: dict[Hashable, deque[float]] = {}

    def observe(self, piece: Piece, seconds: float) -> None:
        """Learn from a piece that took `seconds`."""
        self._recent.setdefault(piece.kind, deque(maxlen=_RECENT)).append(
            measured_s(seconds) / max(1, piece.num_tokens)
        )

    def num_measured(self, kind: Hashable) -> int:
        return len(self._recent.get(kind, ()))

    def expected_s(self, piece: Piece) -> float:
        """An upper bound for most pieces; 0 before the first one of its kind."""
        recent = sorted(self._recent.get(piece.kind, (0.0,)))
        return recent[int((1 - _RARE) * (len(recent) - 1))] * max(1, piece.num_tokens)
