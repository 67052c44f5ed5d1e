"""`vlora bench fusion`: packing on the embedded model against other methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks.fusion.measuring import ALL, ALONE, CONFIDENCE, DEFAULT, OPTIMUM, table
from fusion.packing.guided import BUDGET
from vlora.bench.harness import Bench, Measured, Results, Store
from vlora.bench.plots import Plot
from vlora.bench.report import Goal, Row

_SEEDS = (0, 1, 2)
_THRESHOLDS = "(threshold)"


def cases(quick: bool) -> dict[str, tuple[int, bool]]:
    """quick: one seed, few samples and steps: scores mean nothing."""
    return {f"table-{seed}": (seed, quick) for seed in (_SEEDS[:1] if quick else _SEEDS)}


def measure(case: tuple[int, bool], store: Store) -> Measured:
    seed, quick = case
    return Measured([], {"tables": table(seed, quick, store.folder / f"table-{seed}")})


def combine(results: Results) -> Measured:
    tables = [each.found["tables"] for each in results.values()]
    return Measured(list(_rows(tables)), {"tables": tables})


def _rows(tables: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for found in tables:
        thresholds = found["thresholds"]
        plain = {"adapters": None, "trainings": None, "training s": None, "broken": None, "worst": None}
        yield {"seed": found["seed"], "method": _THRESHOLDS, **plain, **thresholds}
        for method, measured in found["methods"].items():
            room = {name: measured["test"][name] - threshold for name, threshold in thresholds.items()}
            kept = [left for name, left in room.items() if name not in found["missed alone"]]
            yield {
                "seed": found["seed"],
                "method": method,
                "adapters": measured["adapters"],
                "trainings": measured["trainings"],
                "training s": measured["training s"],
                "broken": sum(left < 0 for left in kept),
                "worst": min(kept, default=None),
                **{name: measured["test"][name] for name in thresholds},
            }


def goals(measured: Measured) -> list[Goal]:
    """Domains that miss their thresholds even alone do not count."""
    tables = measured.found["tables"]

    def counted(found: dict[str, Any]) -> list[str]:
        return [name for name in found["thresholds"] if name not in found["missed alone"]]

    def broken(found: dict[str, Any], method: str) -> int:
        return sum(found["methods"][method]["test"][name] < found["thresholds"][name] for name in counted(found))

    def fewest(found: dict[str, Any]) -> int:
        best = found["methods"].get(OPTIMUM)
        return int(found["lower bound"] if best is None else best["adapters"])

    own = [found["methods"][DEFAULT] for found in tables]
    number = sum(len(counted(found)) for found in tables)
    of_all = [made["adapters"] - fewest(found) for made, found in zip(own, tables, strict=True)]
    costs = [made["trainings"] / len(found["thresholds"]) for made, found in zip(own, tables, strict=True)]
    missed = sum(broken(found, DEFAULT) for found in tables)
    allowed = (1 - CONFIDENCE) * number
    return [
        Goal("adapters more than the optimum or its lower bound, worst", max(of_all), 1, True),
        Goal("trainings per domain, worst", max(costs), BUDGET, True),
        Goal(f"thresholds missed on test data, of {number} at {CONFIDENCE:g}", missed, allowed, True),
        Goal("thresholds that all in one misses, fewest of a seed", min(broken(f, ALL) for f in tables), 1, False),
    ]


_PLAIN = ("seed", "method", "adapters", "trainings", "training s", "broken", "worst")


def _by_domain(rows: Sequence[Row]) -> list[Row]:
    """Mean test scores over the seeds, of an adapter for each domain and of packed ones."""
    return [
        {"domain": name, "method": method, "test score": mean(row[name] for row in rows if row["method"] == method)}
        for method in (_THRESHOLDS, ALONE, DEFAULT)
        for name in rows[0]
        if name not in _PLAIN
    ]


BENCH = Bench(
    name="fusion",
    cases=cases,
    measure=measure,
    combine=combine,
    goals=goals,
    same=(),
    jobs=True,
    parts=True,
    plots=(
        Plot(
            file="methods",
            kind="bars",
            x="method",
            y=("adapters", "trainings"),
            by=("seed",),
            apart=True,
            where=lambda row: row["adapters"] is not None,
        ),
        Plot(file="domains", kind="bars", x="domain", y=("test score",), by=("method",), derive=_by_domain),
    ),
)
