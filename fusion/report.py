"""What a fusion run says of itself: JSON for machines, a table for people."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from rich.table import Table


@dataclasses.dataclass(frozen=True)
class DomainReport:
    """before, after: accuracy on test data of the base model asked in words, and of the fused adapter's head.

    validation: what the packing decided on. met: whether validation kept the threshold.
    """

    name: str
    task: str
    real_or_synthetic: str
    metric: str
    threshold: float
    before: float
    validation: float
    after: float
    met: bool
    adapter: str
    num_test: int


@dataclasses.dataclass(frozen=True)
class AdapterReport:
    name: str
    domains: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RollbackReport:
    """domain did not fit beside `into`: accuracies below threshold, had it stayed."""

    domain: str
    into: tuple[str, ...]
    broken: dict[str, float]


@dataclasses.dataclass(frozen=True)
class FusionReport:
    base: str
    seed: int
    seconds: float
    domains: tuple[DomainReport, ...]
    adapters: tuple[AdapterReport, ...]
    rollbacks: tuple[RollbackReport, ...]

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def table(self) -> Table:
        table = Table(title=f"{len(self.domains)} domains in {len(self.adapters)} adapters, {self.seconds:.0f} s")
        for column in ("domain", "data", "adapter"):
            table.add_column(column)
        for column in ("threshold", "validation", "test before", "test after"):
            table.add_column(column, justify="right")
        for domain in self.domains:
            table.add_row(
                domain.name,
                domain.real_or_synthetic,
                domain.adapter,
                f"{domain.threshold:.2f}",
                f"{domain.validation:.3f}" + ("" if domain.met else " (missed)"),
                f"{domain.before:.3f}",
                f"{domain.after:.3f}",
            )
        return table
