"""The two measurements, each for one seed in one process: the table of packings, and the curves of one task type."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fusion.bench.domains import FAMILIES, BenchDomain, Sizes
from fusion.bench.metering import Meter
from fusion.bench.small_models import SmallScores, score_small_model
from fusion.bench.suite import QUICK, SUITE, suspected
from fusion.data.samples import Splits
from fusion.embedded import checkpoint_path
from fusion.packing.algorithm import Adapter, Packing, by_value, pack_best, pack_in_sequence
from fusion.packing.guided import pack_guided
from fusion.packing.joint import pack_jointly
from fusion.packing.oracle import Oracle
from fusion.packing.orders import at_random
from fusion.phases.packing import orders_of
from fusion.plan.schema import DomainPlan, LoraPlan, Plan, TrainingPlan
from fusion.plan.tasks import METRICS
from fusion.training.checkpoint import Checkpoint, State
from fusion.training.domain import Domain
from fusion.training.fingerprint import hash_of_processing, identity_of
from fusion.training.frozen_base import FrozenBase
from fusion.training.run_cache import RunCache
from fusion.training.trainer import LoraTrainer
from vlora.config import EngineConfig
from vlora.models import InputProcessor
from vlora.models.loading import load_model

ALONE, ALL, DEFAULT = "one adapter per domain", "all in one", "guided (default)"
NAIVE, PACKED, JOINTLY = "naive (V-LoRA 4.2.1)", "first fit", "jointly"
OPTIMUM = "exhaustive optimum"
CONFIDENCE = 0.95
_MINUS = 0.1
_REHEARSAL = 0.5
_DEMO = LoraPlan(rank=16, alpha=32)  # as the demonstration's plan, and so are its steps
_DEMO_STEPS = 100


class Bench:
    """Domains, trainer and trainings on the embedded model; trainings are stored in `folder`."""

    def __init__(
        self,
        made: Sequence[BenchDomain],
        seed: int,
        sizes: Sizes,
        steps: int,
        folder: Path,
        lora: LoraPlan = _DEMO,
    ) -> None:
        self.plan = Plan(
            seed=seed,
            lora=lora,
            training=TrainingPlan(steps=steps, batch_size=16, rehearsal=_REHEARSAL),
            packing="first_fit",
            order=("hardest_first",),
            confidence=CONFIDENCE,
            domains=tuple(
                DomainPlan(name=one.name, source="made", question=one.question, threshold=1.0) for one in made
            ),
        )
        self.splits = {one.name: one.splits(seed, sizes) for one in made}
        path = checkpoint_path()
        processor = InputProcessor.from_pretrained(path)
        base = FrozenBase(load_model(EngineConfig(model=path, dtype="float32")), processor)
        self.domains = {plan.name: Domain(plan, self.splits[plan.name], base) for plan in self.plan.domains}
        self.trainer = LoraTrainer(base, self.domains, self.plan)
        identity = identity_of(self.plan, self.splits, base.weights, hash_of_processing(processor), "cpu")
        checkpoint = Checkpoint(folder, identity, resume=True)
        self.rehearsing = RunCache(self.trainer, checkpoint, rehearsal=_REHEARSAL)
        self.forgetting = RunCache(self.trainer, checkpoint, rehearsal=0.0)

    def tested(self, state: State, names: Sequence[str]) -> dict[str, float]:
        """Scores on test data, which no decision uses."""
        self.trainer.adapter.restore(state)
        return {name: self.trainer.evaluator.score(name, self.domains[name].test) for name in names}

    def packed(self, packing: Packing, trainings: RunCache) -> dict[str, float]:
        """Test scores of a packing; `trainings` has the adapters that were trained in sequence."""
        tested: dict[str, float] = {}
        for adapter in packing.adapters:
            history = packing.histories.get(adapter)
            state = trainings.state(adapter) if history is None else trainings.state_of(history, adapter)
            tested |= self.tested(state, adapter)
        return tested

    def tested_together(self, adapters: Iterable[Collection[str]]) -> dict[str, float]:
        """Like `packed`, for sets of domains that were trained jointly."""
        return {
            name: value
            for names in adapters
            for name, value in self.tested(self.rehearsing.state_together(names), sorted(names)).items()
        }


def extent(quick: bool) -> tuple[tuple[BenchDomain, ...], Sizes, int]:
    """The domains of the table, their samples, and the steps of a training."""
    return (QUICK, Sizes(120, 60, 60), 6) if quick else (SUITE, Sizes(1000, 640, 500), _DEMO_STEPS)


def small_scores(splits: Mapping[str, Splits]) -> dict[str, SmallScores]:
    """By domain: those of a small model that is trained on it."""
    return {name: score_small_model(own, METRICS[own.task][0]) for name, own in splits.items()}


def thresholds_of(small: Mapping[str, SmallScores]) -> dict[str, float]:
    """By domain: the small model's validation score, minus ten points."""
    return {name: max(0.0, score.validation - _MINUS) for name, score in small.items()}


def table(seed: int, quick: bool, folder: Path) -> dict[str, Any]:
    """Adapters, costs and test scores per method of creating adapters."""
    made, sizes, steps = extent(quick)
    bench = Bench(made, seed, sizes, steps, folder)
    names = tuple(bench.domains)
    small = small_scores(bench.splits)  # before any adapter is trained
    thresholds = thresholds_of(small)
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
    bound = oracle.bound(suspected(made))
    if (optimum := oracle.optimum_of_few()) is not None:
        measure(OPTIMUM, optimum.adapters, bench.tested_together(optimum.adapters), meter)
    return {
        "seed": seed,
        "lora": bench.plan.lora.model_dump(mode="json"),
        "steps": steps,
        "samples": sizes._asdict(),
        "thresholds": thresholds,
        "small models": {name: score._asdict() for name, score in small.items()},
        "num_test": {name: len(domain.test) for name, domain in bench.domains.items()},
        "alone": {name: score._asdict() for name, score in alone.items()},
        "all in one": {name: score._asdict() for name, score in all_in_one.scores.items()},
        "methods": methods,
        "missed alone": sorted(bound.missed),
        "lower bound": bound.adapters,
        "conflicts": [list(pair) for pair in bound.conflicts],
    }


def curve(family: str, seed: int, quick: bool, folder: Path) -> dict[str, Any]:
    """Fuse domains of one kind of task in sequence: test scores of all fused domains after each, and of each alone."""
    made = FAMILIES[family][: 2 if quick else None]
    sizes, steps = (Sizes(60, 20, 60), 4) if quick else (Sizes(500, 20, 500), 50)
    bench = Bench(made, seed, sizes, steps, folder, LoraPlan(rank=8, alpha=16))
    order = at_random(tuple(bench.domains), seed)
    alone, fused = {}, []
    for place, name in enumerate(order):
        bench.rehearsing((name,))
        alone[name] = bench.tested(bench.rehearsing.state((name,)), (name,))[name]
        adapter: Adapter = order[: place + 1]
        bench.rehearsing(adapter)
        fused.append(bench.tested(bench.rehearsing.state(adapter), adapter))
    return {"family": family, "seed": seed, "alone": alone, "fused": fused}
