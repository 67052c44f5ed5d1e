"""The two measurements, each for one seed in one process: the table of packings, and the curves of one task type."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fusion.bench.domains import FAMILIES, SIX, BenchDomain, Sizes
from fusion.embedded import checkpoint_path
from fusion.packing.algorithm import Adapter, Packing, by_value, pack_best, pack_in_sequence
from fusion.packing.joint import pack_jointly
from fusion.packing.oracle import Oracle
from fusion.packing.orders import at_random
from fusion.phases.packing import orders_of
from fusion.phases.thresholds import thresholds_of
from fusion.plan.schema import DomainPlan, LoraPlan, Plan, RelativeThreshold, TrainingPlan
from fusion.teachers.built_in import TEACHERS
from fusion.training.checkpoint import Checkpoint, State
from fusion.training.domain import Domain
from fusion.training.fingerprint import hash_of_processing, identity_of
from fusion.training.frozen_base import FrozenBase
from fusion.training.run_cache import RunCache
from fusion.training.trainer import LoraTrainer
from vlora.config import EngineConfig
from vlora.models import InputProcessor
from vlora.models.loading import load_model

NAIVE, PACKED, JOINTLY = "naive (V-LoRA 4.2.1)", "packed, first fit", "packed jointly"
OPTIMUM = "exhaustive optimum"
CONFIDENCE = 0.95
_MINUS = 0.05  # the rule for all thresholds, fixed before training: validation score alone, minus five points
_REHEARSAL = 0.5


class Bench:
    """Domains, trainer and trainings on the embedded model; trainings are stored in `folder`."""

    def __init__(self, made: Sequence[BenchDomain], seed: int, sizes: Sizes, steps: int, folder: Path) -> None:
        self.plan = Plan(
            seed=seed,
            lora=LoraPlan(rank=8, alpha=16),
            training=TrainingPlan(steps=steps, batch_size=16, rehearsal=_REHEARSAL),
            order=("hardest_first",),
            confidence=CONFIDENCE,
            domains=tuple(
                DomainPlan(
                    name=one.name,
                    source="made",
                    question=one.question,
                    threshold=RelativeThreshold(relative_to="alone", minus=_MINUS),
                )
                for one in made
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
        return {
            name: value
            for adapter in packing.adapters
            for name, value in self.tested(trainings.state(adapter), adapter).items()
        }

    def tested_together(self, adapters: Iterable[Collection[str]]) -> dict[str, float]:
        """Like `packed`, for sets of domains that were trained jointly."""
        return {
            name: value
            for names in adapters
            for name, value in self.tested(self.rehearsing.state_together(names), sorted(names)).items()
        }


def table(seed: int, quick: bool, folder: Path) -> dict[str, Any]:
    """Test scores per method of creating adapters, and of small models on the same data."""
    made = SIX[:3] if quick else SIX
    sizes, steps = (Sizes(120, 60, 60), 6) if quick else (Sizes(1200, 500, 500), 80)
    bench = Bench(made, seed, sizes, steps, folder)
    names = tuple(bench.domains)
    thresholds = thresholds_of(bench.plan, bench.rehearsing, {})
    methods: dict[str, dict[str, Any]] = {}

    def measure(method: str, adapters: int, tested: dict[str, float], rollbacks: int = 0) -> None:
        methods[method] = {"adapters": adapters, "rollbacks": rollbacks, "test": tested}

    alone = {name: bench.tested(bench.rehearsing.state((name,)), (name,))[name] for name in names}
    measure("one adapter per domain", len(names), alone)
    bench.rehearsing.together(names)
    measure("all in one", 1, bench.tested(bench.rehearsing.state_together(names), names))
    naive = pack_in_sequence(at_random(names, seed), thresholds, by_value(bench.forgetting))
    measure(NAIVE, len(naive.adapters), bench.packed(naive, bench.forgetting), len(naive.rollbacks))
    orders = orders_of(bench.plan, bench.domains, bench.rehearsing)
    packing = pack_best(orders, thresholds, bench.rehearsing)
    measure(PACKED, len(packing.adapters), bench.packed(packing, bench.rehearsing), len(packing.rollbacks))
    jointly = pack_jointly(names, thresholds, bench.rehearsing.together)
    measure(JOINTLY, len(jointly.adapters), bench.tested_together(jointly.adapters), len(jointly.rollbacks))
    optimum = Oracle(names, thresholds, bench.rehearsing.together).optimum()
    measure(OPTIMUM, len(optimum.adapters), bench.tested_together(optimum.adapters))
    return {
        "seed": seed,
        "thresholds": thresholds,
        "num_test": {name: len(domain.test) for name, domain in bench.domains.items()},
        "methods": methods,
        "missed alone": sorted(packing.missed),
        "packing": [list(adapter) for adapter in packing.adapters],
        "packing, jointly": [list(adapter) for adapter in jointly.adapters],
        "optimum": [sorted(group) for group in optimum.adapters],
        "sets trained for the optimum": optimum.num_trained,
        "teachers": _teacher_scores(made, bench),
    }


def curve(family: str, seed: int, quick: bool, folder: Path) -> dict[str, Any]:
    """Fuse domains of one kind of task in sequence: test scores of all fused domains after each, and of each alone."""
    made = FAMILIES[family][: 2 if quick else None]
    sizes, steps = (Sizes(60, 20, 60), 4) if quick else (Sizes(500, 20, 500), 50)
    bench = Bench(made, seed, sizes, steps, folder)
    order = at_random(tuple(bench.domains), seed)
    alone, fused = {}, []
    for place, name in enumerate(order):
        bench.rehearsing((name,))
        alone[name] = bench.tested(bench.rehearsing.state((name,)), (name,))[name]
        adapter: Adapter = order[: place + 1]
        bench.rehearsing(adapter)
        fused.append(bench.tested(bench.rehearsing.state(adapter), adapter))
    return {"family": family, "seed": seed, "alone": alone, "fused": fused}


def _teacher_scores(made: Sequence[BenchDomain], bench: Bench) -> Mapping[str, float]:
    """Test scores of small models on the same training data, for domains that have one."""
    teacher_scores = {}
    for one in made:
        if one.teacher is not None:
            splits, task = bench.splits[one.name], bench.domains[one.name].task
            teacher = TEACHERS[one.teacher]()
            teacher.fit(splits)
            teacher_scores[one.name] = task.metric(
                teacher.answers(splits.test), [sample.target for sample in splits.test]
            )
    return teacher_scores
