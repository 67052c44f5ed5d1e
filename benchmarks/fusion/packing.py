"""`vlora bench fusion`: packing on the embedded model against other methods, one seed in a process."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.adapters import base_of, trainer_of
from benchmarks.fusion.domains import load
from benchmarks.plots import Picture
from fusion.packing.algorithm import (
    Adapter,
    History,
    Packing,
    TrainingResult,
    at_random,
    by_value,
    pack_best,
    pack_in_sequence,
)
from fusion.packing.guided import BUDGET, Conflicts, pack_guided
from fusion.packing.joint import Oracle, pack_jointly
from fusion.plan.schema import LoraPlan, TrainingPlan
from fusion.run import orders_of
from fusion.training.checkpoint import Checkpoint, State
from fusion.training.fingerprint import hash_of_processing, inputs_of
from fusion.training.run_cache import RunCache
from vlora.bench.harness import Bench, Measured, Results, Store
from vlora.bench.report import Goal, Row

ALONE, ALL, DEFAULT = "one adapter per domain", "all in one", "guided (default)"
NAIVE, PACKED, JOINTLY = "naive (V-LoRA 4.2.1)", "first fit", "jointly"
OPTIMUM = "exhaustive optimum"
CONFIDENCE = 0.95
_MINUS = 0.1
_REHEARSAL = 0.5
_RANK, _STEPS = 1, 100
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
            yield {
                "seed": found["seed"],
                "method": method,
                "adapters": measured["adapters"],
                "trainings": measured["trainings"],
                "training s": measured["training s"],
                "broken": sum(left < 0 for left in room.values()),
                "worst": min(room.values()),
                **{name: measured["test"][name] for name in thresholds},
            }


def goals(measured: Measured) -> list[Goal]:
    """Thresholds count that a domain misses even in an adapter of its own."""
    tables = measured.found["tables"]

    def broken(found: dict[str, Any], method: str) -> int:
        return sum(found["methods"][method]["test"][name] < value for name, value in found["thresholds"].items())

    def fewest(found: dict[str, Any]) -> int:
        best = found["methods"].get(OPTIMUM)
        return int(found["lower bound"] if best is None else best["adapters"])

    own = [found["methods"][DEFAULT] for found in tables]
    number = sum(len(found["thresholds"]) for found in tables)
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


def pictures(rows: Sequence[Row]) -> dict[str, Picture]:
    made = [row for row in rows if row["adapters"] is not None]
    columns = {name: name for name in ("adapters", "trainings")}
    return {"methods": Picture(made, [{"kind": "bars", "x": "{method}", "columns": columns, "name": "seed {seed}"}])}


BENCH = Bench(
    name="fusion",
    cases=cases,
    measure=measure,
    combine=combine,
    goals=goals,
    pictures=pictures,
    same=(),
    jobs=True,
    parts=True,
)


class Meter:
    """A `RunCache` that counts the distinct trainings that are requested.

    trainings: in single-domain trainings, measured conflicts included. seconds: of trainings with their scoring, and of
    measuring conflicts.
    """

    def __init__(self, cache: RunCache) -> None:
        self._cache = cache
        self._found: dict[object, tuple[int, float]] = {}
        self._conflicts = self._conflict_s = 0.0

    @property
    def trainings(self) -> float:
        return self._conflicts + sum(count for count, _ in self._found.values())

    @property
    def seconds(self) -> float:
        return self._conflict_s + sum(seconds for _, seconds in self._found.values())

    def __call__(self, adapter: Adapter) -> TrainingResult:
        return self._count(adapter, 1, self._cache(adapter))

    def together(self, domains: Collection[str]) -> TrainingResult:
        names = tuple(sorted(domains))
        # A single domain is the same training as in sequence.
        key: object = names if len(names) == 1 else frozenset(names)
        return self._count(key, len(names), self._cache.together(names))

    def join(self, before: History, beside: Adapter, domain: str) -> TrainingResult:
        return self._count((before, beside, domain), 1, self._cache.join(before, beside, domain))

    @property
    def conflict_cost(self) -> float:
        return self._cache.conflict_cost

    def conflicts(self, history: History, domains: Collection[str]) -> Conflicts:
        self._conflicts += self.conflict_cost * len(domains)
        started = time.perf_counter()
        found = self._cache.conflicts(history, domains)
        self._conflict_s += time.perf_counter() - started
        return found

    def _count(self, key: object, count: int, found: TrainingResult) -> TrainingResult:
        self._found[key] = (count, found.seconds)
        return found


class Training:
    """Domains, trainer and trainings on the embedded model; trainings are stored in `folder`, features beside it."""

    def __init__(self, seed: int, rank: int, steps: int, folder: Path, *, quick: bool) -> None:
        plan, self.splits = load(quick)
        self.plan = plan.model_copy(
            update={
                "seed": seed,
                "lora": LoraPlan(rank=rank, alpha=2 * rank),
                "training": TrainingPlan(steps=steps, batch_size=16, rehearsal=_REHEARSAL),
                "packing": "first_fit",
                "order": ("hardest_first",),
                "confidence": CONFIDENCE,
            }
        )
        base = base_of(folder.with_name("features"))
        self.trainer = trainer_of(self.plan, base, self.splits)
        self.domains = self.trainer.domains
        inputs = inputs_of(self.plan, self.splits, base.weights, hash_of_processing(base.processor), "cpu")
        checkpoint = Checkpoint(folder, resume=True)
        self.rehearsing = RunCache(self.trainer, checkpoint, inputs, rehearsal=_REHEARSAL)
        self.forgetting = RunCache(self.trainer, checkpoint, inputs, rehearsal=0.0)

    def tested(self, state: State, names: Sequence[str]) -> dict[str, float]:
        """Scores on test data, which no decision uses."""
        self.trainer.adapter.restore(state)
        return {name: self.trainer.evaluator.score(name, self.domains[name].test) for name in names}

    def packed(self, packing: Packing, trainings: RunCache) -> dict[str, float]:
        """Test scores of a packing; `trainings` has the adapters that were trained in sequence."""
        tested: dict[str, float] = {}
        for adapter in packing.adapters:
            state = trainings.state_of(packing.histories[adapter], adapter)
            tested |= self.tested(state, adapter)
        return tested

    def tested_together(self, adapters: Iterable[Collection[str]]) -> dict[str, float]:
        """Like `packed`, for sets of domains that were trained jointly."""
        found: dict[str, float] = {}
        for names in adapters:
            found |= self.tested(self.rehearsing.state_of(History(tuple(sorted(names))), names), sorted(names))
        return found


def fused(bench: Training, seed: int) -> Row:
    """Adapters of `vlora fuse`, the fewest that can do, and thresholds missed on test data, over all domains."""
    names = tuple(bench.domains)
    scores = bench.rehearsing.together
    thresholds = {name: max(0.0, scores((name,)).scores[name].value - _MINUS) for name in names}
    packing = pack_guided(names, thresholds, bench.rehearsing)
    tested = bench.packed(packing, bench.rehearsing)
    oracle = Oracle(names, thresholds, scores)
    bound = oracle.bound(())
    return {
        "what": "fusion",
        "seed": seed,
        "adapters": len(packing.adapters),
        "fewest": _fewest(oracle, names),
        "packing": [sorted(own) for own in packing.adapters],
        "thresholds": thresholds,
        "test": tested,
        "missed": sum(tested[name] < value for name, value in thresholds.items()),
        "missed alone": sorted(bound.missed),
    }


def _fewest(oracle: Oracle, names: Sequence[str]) -> int:
    """A lower bound on adapters: one more than those that miss alone, or two if the others do not fit into one."""
    missed = oracle.bound(()).missed
    return len(missed) + 1 + (not oracle.keeps(frozenset(names).difference(missed)))


def table(seed: int, quick: bool, folder: Path) -> dict[str, Any]:
    """Adapters, costs and test scores per method of creating adapters.

    A domain's threshold is the validation score of an adapter of its own, minus ten points.
    """
    bench = Training(seed, _RANK, 6 if quick else _STEPS, folder, quick=quick)
    names = tuple(bench.domains)
    methods: dict[str, dict[str, Any]] = {}

    def measure(method: str, adapters: Collection[Collection[str]], tested: dict[str, float], meter: Meter) -> None:
        methods[method] = {
            "adapters": len(adapters),
            "packing": [sorted(names) for names in adapters],
            "trainings": meter.trainings,
            "training s": meter.seconds,
            "test": tested,
        }

    meter = Meter(bench.rehearsing)
    alone = {name: meter((name,)).scores[name] for name in names}
    thresholds = {name: max(0.0, score.value - _MINUS) for name, score in alone.items()}
    measure(ALONE, [(name,) for name in names], bench.tested_together([(name,) for name in names]), meter)
    meter = Meter(bench.rehearsing)
    all_in_one = meter.together(names)
    measure(ALL, [names], bench.tested_together([names]), meter)
    meter = Meter(bench.rehearsing)
    default = pack_guided(names, thresholds, meter)
    measure(DEFAULT, default.adapters, bench.packed(default, bench.rehearsing), meter)
    meter = Meter(bench.forgetting)
    naive = pack_in_sequence(at_random(names, seed), thresholds, by_value(meter))
    measure(NAIVE, naive.adapters, bench.packed(naive, bench.forgetting), meter)
    meter = Meter(bench.rehearsing)
    first_fit = pack_best(orders_of(bench.plan, bench.domains, meter), thresholds, meter)
    measure(PACKED, first_fit.adapters, bench.packed(first_fit, bench.rehearsing), meter)
    meter = Meter(bench.rehearsing)
    jointly = pack_jointly(names, thresholds, meter.together)
    measure(JOINTLY, jointly.adapters, bench.tested_together(jointly.adapters), meter)
    meter = Meter(bench.rehearsing)
    oracle = Oracle(names, thresholds, meter.together)
    bound = oracle.bound(())
    if (optimum := oracle.optimum()) is not None:
        measure(OPTIMUM, optimum, bench.tested_together(optimum), meter)
    return {
        "seed": seed,
        "lora": bench.plan.lora.model_dump(mode="json"),
        "steps": bench.plan.training.steps,
        "thresholds": thresholds,
        "num_test": {name: len(domain.test) for name, domain in bench.domains.items()},
        "alone": {name: score._asdict() for name, score in alone.items()},
        "all in one": {name: score._asdict() for name, score in all_in_one.scores.items()},
        "methods": methods,
        "missed alone": sorted(bound.missed),
        "lower bound": _fewest(oracle, names),
    }
