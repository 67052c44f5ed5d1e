"""A figure with its measurements, as the page and the report need it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from vlora.bench.paper.figure import Figure, Found
from vlora.bench.report import Goal


class Drawn(NamedTuple):
    """One figure with its measurements.

    Attributes:
        figure: The figure.
        found: Its measurements.
        seconds: Of measuring, in this run or in the one that stored them.
    """

    figure: Figure
    found: Found
    seconds: float

    @property
    def picture(self) -> str:
        return f"{self.figure.paper}-{self.figure.number}.png"

    @property
    def goals(self) -> Sequence[Goal]:
        return self.figure.goals(self.found)

    def rows(self) -> list[dict[str, Any]]:
        """Each of the paper's numbers beside the one measured here."""
        here = self.figure.here(self.found)
        return [
            {
                "figure": self.figure.key,
                "quantity": fact.quantity,
                "unit": fact.unit,
                "paper": fact.value,
                "here": here.get(fact.quantity),
                "simulated": self.figure.simulated,
                "source": fact.source,
            }
            for fact in self.figure.facts
        ]
