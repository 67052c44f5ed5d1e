"""`vlora bench fusion`: packing on the embedded model against other methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks.fusion.domains import FAMILIES
from benchmarks.fusion.measuring import ALL, ALONE, CONFIDENCE, DEFAULT, OPTIMUM, curve, growth, table
from fusion.packing.guided import BUDGET
from vlora.bench.harness import Bench, Measured, Results, Store
from vlora.bench.plots import Plot
from vlora.bench.report import Goal, Row

_SEEDS = (0, 1, 2)
_THRESHOLDS = "(threshold)"

Case = tuple[str, int, bool]
"""The kind of a measurement ("table", "growth", or the family of domains that a curve is of), the seed, quick."""


def cases(quick: bool) -> dict[str, Case]:
    """Tables first, since they take longest. quick: one seed, few samples and steps: scores mean nothing."""
    seeds = _SEEDS[:1] if quick else _SEEDS
    every = [*(("table", seed) for seed in seeds), ("growth", seeds[0])]
    every += [(family, seed) for family in FAMILIES for seed in seeds]
    return {f"{kind}-{seed}": (kind, seed, quick) for kind, seed in every}


def measure(case: Case, store: Store) -> Measured:
    kind, seed, quick = case
    folder = store.folder / f"{kind}-{seed}"
    if kind == "table":
        return Measured([], {"tables": table(seed, quick, folder)})
    if kind == "growth":
        return Measured([], {"growth": growth(seed, quick, folder)})
    return Measured([], {"curves": curve(kind, seed, quick, folder)})


def combine(results: Results) -> Measured:
    found: dict[str, list[Any]] = {
        kind: [each.found[kind] for each in results.values() if kind in each.found]
        for kind in ("tables", "curves", "growth")
    }
    found["growth"] = found["growth"][0]["rows"]
    return Measured(list(_rows(found["tables"])), found)


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
    tables, parts = measured.found["tables"], measured.found["growth"]

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
    of_parts = [part["adapters"] - (part["optimum"] or part["lower bound"]) for part in parts]
    costs = [made["trainings"] / len(found["thresholds"]) for made, found in zip(own, tables, strict=True)]
    costs += [part["trainings"] / len(part["domains"]) for part in parts]
    missed = sum(broken(found, DEFAULT) for found in tables)
    allowed = (1 - CONFIDENCE) * number
    return [
        Goal("adapters more than the optimum or its lower bound, worst", max(*of_all, *of_parts), 1, True),
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
