"""What the phases with training share: the trainer and its run cache, and parallel processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fusion.packing.algorithm import Adapter, Packing
from fusion.phases.data_ready import DataReady
from fusion.progress.progress import Progress
from fusion.training.checkpoint import Checkpoint, State
from fusion.training.fingerprint import ALL, Inputs
from fusion.training.parallel_jobs import Job, RunAhead, one_thread, run_in_parallel
from fusion.training.run_cache import RunCache
from fusion.training.trainer import LoraTrainer


@dataclasses.dataclass(frozen=True)
class Session:
    """cache: every training of the run, stored in checkpoint. run_ahead: runs trainings in parallel, or does nothing
    with one worker. jointly: the plan trains all domains of an adapter jointly."""

    trainer: LoraTrainer
    cache: RunCache
    checkpoint: Checkpoint
    run_ahead: RunAhead
    progress: Progress
    jointly: bool

    def state(self, packing: Packing, adapter: Adapter) -> State:
        """Weights of an adapter in the plan's packing."""
        if adapter in packing.histories:
            return self.cache.state_of(packing.histories[adapter], adapter)
        return self.cache.state_together(adapter) if self.jointly else self.cache.state(adapter)


@contextlib.contextmanager
def training_session(
    data: DataReady, out: Path, progress: Progress, *, resume: bool, workers: int, on_cleared: Callable[[], None]
) -> Iterator[Session]:
    """Create the trainer and open OUT/checkpoint.

    Inside the block, with several workers, this process computes with one thread as they do. The session can be used
    afterwards for scoring.

    Args:
        resume: continue with the trainings in OUT/checkpoint; otherwise they are deleted.
        workers: number of parallel trainings.
        on_cleared: called after an earlier run's trainings have been deleted, or kept.
    """
    plan, parallel = data.plan, workers > 1

    def run_ahead(jobs: Sequence[Job]) -> None:
        if parallel and jobs:
            progress.say(f"running {len(jobs)} trainings in parallel, {workers} at a time")
            run_in_parallel(jobs, workers, progress)

    with one_thread() if parallel else contextlib.nullcontext():
        trainer = LoraTrainer(data.base, data.domains, plan, progress=progress)
        # Opened only now, so that a plan that is refused above deletes nothing.
        checkpoint = Checkpoint(out / "checkpoint", resume=resume)
        on_cleared()
        if stored := checkpoint.inputs():
            for line in _reused(data.inputs, stored):
                progress.say(line)
        cache = RunCache(trainer, checkpoint, data.inputs, rehearsal=plan.training.rehearsal, progress=progress)
        yield Session(trainer, cache, checkpoint, run_ahead, progress, jointly=plan.packing == "jointly")


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
