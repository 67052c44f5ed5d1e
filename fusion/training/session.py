"""What the trainings of a run share: its data, and the trainer with the cache of finished trainings."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fusion.plan.check import PlanChecked
from fusion.plan.schema import Plan
from fusion.progress import Progress
from fusion.training.checkpoint import UNTRAINED, Checkpoint
from fusion.training.features import FeatureCache, OnDisk
from fusion.training.fingerprint import ALL, Inputs, hash_of_processing, inputs_of
from fusion.training.frozen_base import Domain, FrozenBase, load_frozen_base
from fusion.training.parallel_jobs import Job, RunAhead, one_thread, run_in_parallel
from fusion.training.run_cache import RunCache
from fusion.training.scoring import score_before_training
from fusion.training.trainer import LoraTrainer
from vlora.errors import BadPlan
from vlora.plan_files.errors import PlanErrors
from vlora.plan_files.reading import PlanText


class Untrained(NamedTuple):
    """score: a domain's metric of the base model's answers in words on the first test samples, before any training.
    pictures: content hashes of all of its pictures."""

    score: float
    pictures: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RunData:
    """The base model and the domains, in the plan's order.

    teacher_scores: validation score of each teacher, by domain. inputs: everything that the run's trainings depend on.
    """

    plan: Plan
    base: FrozenBase
    domains: Mapping[str, Domain]
    teacher_scores: Mapping[str, float]
    inputs: Inputs

    @property
    def features(self) -> FeatureCache:
        assert self.base.features is not None, "a run stores features"
        return self.base.features


def prepare_data(checked: PlanChecked, out: Path, progress: Progress, *, device: str) -> RunData:
    """Load the base model. Samples are encoded when they are first used; image features are stored in OUT/features.
    Raises BadConfig if a part of the base model is missing."""
    plan = checked.plan
    base = load_frozen_base(plan, device, progress, features=out / "features")
    splits = {name: data.splits for name, data in checked.data.items()}
    inputs = inputs_of(plan, splits, base.weights, hash_of_processing(base.processor), device, progress)
    domains = {domain.name: Domain(domain, splits[domain.name], base) for domain in plan.domains}
    return RunData(plan, base, domains, checked.teacher_scores, inputs)


def score_base(data: RunData, text: PlanText, stored: Checkpoint | None) -> dict[str, Untrained]:
    """Encode each domain whose score is not stored, and score the base model on it.

    Call it before a trainer is created, which adds an adapter to the base model, and before trainings are deleted.
    Raises BadPlan for samples that the base model cannot process, with their places in the plan.
    """
    found: dict[str, Untrained] = {}
    errors = PlanErrors(text)
    for index, (name, domain) in enumerate(data.domains.items()):
        known = None if stored is None else stored.measured(UNTRAINED, data.inputs.untrained(name), Untrained)
        try:
            found[name] = known or _score_base(domain)
        except BadPlan as error:
            errors.inside("domains", index).add(str(error))
    errors.raise_if_any()
    return found


def _score_base(domain: Domain) -> Untrained:
    samples = [*domain.train, *domain.validation, *domain.test]
    pictures = {name for one in samples if isinstance(one.features, OnDisk) for name in one.features.pictures}
    return Untrained(score_before_training(domain), tuple(sorted(pictures)))


@dataclasses.dataclass(frozen=True)
class Session:
    """cache: every training of the run, stored in checkpoint. run_ahead: runs trainings in parallel, or does nothing
    with one worker."""

    data: RunData
    trainer: LoraTrainer
    cache: RunCache
    checkpoint: Checkpoint
    run_ahead: RunAhead
    progress: Progress


@contextlib.contextmanager
def training_session(
    data: RunData,
    out: Path,
    progress: Progress,
    *,
    resume: bool,
    untrained: Mapping[str, Untrained] = {},
    workers: int = 1,
    on_cleared: Callable[[], None] = lambda: None,
) -> Iterator[Session]:
    """Create the trainer and open OUT/checkpoint.

    Inside the block, with several workers, this process computes with one thread as they do. The session can be used
    afterwards for scoring.

    Args:
        resume: continue with the trainings in OUT/checkpoint; otherwise they are deleted.
        untrained: by domain, stored for later runs.
        on_cleared: called after an earlier run's trainings have been deleted, or kept.
    """
    parallel = workers > 1

    def run_ahead(jobs: Mapping[Job, Collection[str]]) -> None:
        left = [job for job in jobs if cache.would_train(job)] if parallel else []
        for name in {name: None for job in left for name in jobs[job]}:
            _ = data.domains[name].train, data.domains[name].validation  # a fork's own would end with it
        if left:
            progress.say(f"running {len(left)} trainings in parallel, {workers} at a time")
            run_in_parallel(left, workers, progress)

    with one_thread() if parallel else contextlib.nullcontext():
        trainer = LoraTrainer(data.base, data.domains, data.plan, progress=progress)
        # Opened only now, so that a plan that is refused above deletes nothing.
        checkpoint = Checkpoint(out / "checkpoint", resume=resume)
        on_cleared()
        for name, one in untrained.items():
            checkpoint.keep_measured(UNTRAINED, data.inputs.untrained(name), one)
        if stored := checkpoint.inputs():
            for line in _reused(data.inputs, stored):
                progress.say(line)
        cache = RunCache(trainer, checkpoint, data.inputs, rehearsal=data.plan.training.rehearsal, progress=progress)
        yield Session(data, trainer, cache, checkpoint, run_ahead, progress)


def _reused(inputs: Inputs, stored: Sequence[Mapping[str, Mapping[str, str]]]) -> Iterator[str]:
    """Of which domains the stored trainings are reused, and why those of others are not."""
    changes = inputs.changes(stored)
    if shared := changes.pop(ALL, None):
        yield f"no stored training is reused: {', '.join(shared)} changed"
        return
    reused = [name for name in inputs.training if name not in (ALL, *changes)]
    yield f"trainings are reused if all of their domains are of: {', '.join(reused) or 'none'}"
    for name, changed in changes.items():
        known = any(name in one for one in stored)
        yield f"  not {name}: " + (f"{', '.join(changed)} changed" if known else "it is new")
