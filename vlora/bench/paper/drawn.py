"""A figure with its measurements, as the page and the report need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vlora.bench.paper.figure import Figure, Found
from vlora.bench.paper.measuring import Origin
from vlora.bench.report import Goal


class Drawn(NamedTuple):
    """One figure with its measurements.

    Attributes:
        figure: The figure.
        found: Its measurements.
        device: The device that it uses, in words.
        origins: When its measurements were made, and those from which they were derived, by name.
    """

    figure: Figure
    found: Found
    device: str
    origins: Mapping[str, Origin]

    @property
    def own(self) -> Origin:
        return self.origins[self.figure.stored]

    @property
    def picture(self) -> str:
        return f"{self.figure.paper}-{self.figure.number}.png"

    @property
    def goals(self) -> Sequence[Goal]:
        return self.figure.goals(self.found)

    def other_commits(self, commit: str | None) -> dict[str, Origin]:
        """The origins at other commits than this one."""
        return {name: origin for name, origin in self.origins.items() if origin.commit != commit}

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
