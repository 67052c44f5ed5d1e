"""What the trainings of a run share: its encoded data, and the trainer with the cache of finished trainings."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fusion.packing.algorithm import Adapter, Packing
from fusion.plan.check import PlanChecked
from fusion.plan.schema import Plan
from fusion.progress import Progress
from fusion.training.checkpoint import Checkpoint, State
from fusion.training.fingerprint import ALL, Inputs, hash_of_processing, inputs_of
from fusion.training.frozen_base import Domain, FrozenBase, load_frozen_base
from fusion.training.parallel_jobs import Job, RunAhead, one_thread, run_in_parallel
from fusion.training.run_cache import RunCache
from fusion.training.trainer import LoraTrainer
from vlora.errors import BadPlan
from vlora.plan_files.errors import PlanErrors


@dataclasses.dataclass(frozen=True)
class RunData:
    """The base model and the domains encoded for it, in the plan's order.

    teacher_scores: validation score of each teacher, by domain. inputs: everything that the run's trainings depend on.
    """

    plan: Plan
    base: FrozenBase
    domains: Mapping[str, Domain]
    teacher_scores: Mapping[str, float]
    inputs: Inputs


def prepare_data(checked: PlanChecked, out: Path, progress: Progress, *, device: str, encode: bool = True) -> RunData:
    """Load the base model and, if `encode`, all samples for it, else those that are used; image features are stored in
    OUT/features.

    Raises:
        BadPlan: the base model cannot process a sample; with its domain's place in the plan.
        BadConfig: a part of the base model is missing.
    """
    plan = checked.plan
    base = load_frozen_base(plan, device, progress, features=out / "features")
    splits = {name: data.splits for name, data in checked.data.items()}
    inputs = inputs_of(plan, splits, base.weights, hash_of_processing(base.processor), device, progress)
    errors, domains = PlanErrors(checked.text), {}
    for index, domain in enumerate(plan.domains):
        domains[domain.name] = Domain(domain, splits[domain.name], base)
        try:
            if encode:
                domains[domain.name].encode()
        except BadPlan as error:
            errors.inside("domains", index).add(str(error))
    errors.raise_if_any()
    return RunData(plan, base, domains, checked.teacher_scores, inputs)


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

    def state(self, packing: Packing, adapter: Adapter) -> State:
        """Weights of an adapter in the plan's packing."""
        return self.cache.state_of(packing.histories[adapter], adapter)


@contextlib.contextmanager
def training_session(
    data: RunData,
    out: Path,
    progress: Progress,
    *,
    resume: bool,
    workers: int = 1,
    on_cleared: Callable[[], None] = lambda: None,
) -> Iterator[Session]:
    """Create the trainer and open OUT/checkpoint.

    Inside the block, with several workers, this process computes with one thread as they do. The session can be used
    afterwards for scoring.

    Args:
        resume: continue with the trainings in OUT/checkpoint; otherwise they are deleted.
        workers: number of parallel trainings.
        on_cleared: called after an earlier run's trainings have been deleted, or kept.
    """
    parallel = workers > 1

    def run_ahead(jobs: Sequence[Job]) -> None:
        if parallel and jobs:
            progress.say(f"running {len(jobs)} trainings in parallel, {workers} at a time")
            run_in_parallel(jobs, workers, progress)

    with one_thread() if parallel else contextlib.nullcontext():
        trainer = LoraTrainer(data.base, data.domains, data.plan, progress=progress)
        # Opened only now, so that a plan that is refused above deletes nothing.
        checkpoint = Checkpoint(out / "checkpoint", resume=resume)
        on_cleared()
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
