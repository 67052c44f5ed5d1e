"""Runs trainings in pieces: packed micro-steps, images to encode, optimizer steps and files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future
from typing import Literal, NamedTuple

from vlora.errors import BadConfig, BadImage, BadRequest, VLoraError
from vlora.run_folder import writing
from vlora.training.batch import Sample
from vlora.training.job import TrainingJob
from vlora.training.micro_step import MicroStep
from vlora.training.samples import SampleSource
from vlora.training.trainer import PackedTrainer

log = logging.getLogger(__name__)

_MAX_TRACEBACKS = 4  # of records, of which there may be millions
_AHEAD = 16  # records that are prepared before they are used; each may have a large picture


class Piece(NamedTuple):
    """Work that cannot be interrupted.

    kind: the creation of an adapter, a layer of a micro-step, the encoding of an image, or an optimizer step.
    num_tokens: of the micro-step.
    """

    kind: Literal["begin", "layer", "image", "update"]
    num_tokens: int


Work = Generator[Piece | None, None, None]
"""Yields the piece that it computes next, before it does; None while it waits for another thread."""

_Packed = list[tuple[TrainingJob, list[Sample]]]


class TrainingLoop:
    """Trains the adapters of all running jobs, those in the same phase packed together.

    All calls come from the thread that runs the model.

    Attributes:
        max_tokens: Tokens of a packed micro-step at most, but one record of each adapter at least. None: as the plans.
    """

    def __init__(
        self,
        trainer: PackedTrainer,
        new_source: Callable[[], SampleSource],
        executor: Executor,
        *,
        wake: Callable[[], None],
        free_bytes: Callable[[], int],
        on_trained: Callable[[TrainingJob], None],
    ) -> None:
        """Start without jobs.

        Args:
            new_source: Makes the source of a job's samples.
            wake: Called from any thread when `upcoming` may no longer be None.
            free_bytes: Memory that a micro-step may take now.
            on_trained: Called when the adapter's folder is complete. The job is no longer in `jobs`.
        """
        self._trainer = trainer
        self._new_source = new_source
        self._executor = executor
        self._wake = wake
        self._free_bytes = free_bytes
        self._on_trained = on_trained
        self.jobs: dict[str, TrainingJob] = {}
        self.max_tokens: int | None = None
        self._sources: dict[str, SampleSource] = {}
        self._writing: list[tuple[TrainingJob, Future[None], bool]] = []  # whether it is the adapter's folder
        self._step: MicroStep | None = None  # under way
        self._shrinks = False  # whether that is abandoned for a smaller one
        self._working: tuple[TrainingJob, ...] = ()  # in the last piece
        self._work = self._run()
        self._upcoming: Piece | None = None
        self._num_tracebacks = 0

    def num_parameters(self, job: TrainingJob) -> int:
        """Raises BadConfig for targets that the model lacks."""
        return sum(job.plan.rank * (d_in + d_out) for d_in, d_out in self._trainer.shapes(job.settings).values())

    def add(self, job: TrainingJob) -> None:
        """Begin or continue a job, whose name no other running job has."""
        self.jobs[job.name] = job
        self._sources[job.name] = self._new_source()

    def cancel(self, name: str) -> None:
        """End a job. Its adapter is removed when the micro-step that it takes part in is complete."""
        self._end(self.jobs[name], "cancelled")

    def fail(self, error: str) -> None:
        for job in tuple(self.jobs.values()):
            self._end(job, "failed", error)

    @property
    def upcoming(self) -> Piece | None:
        """The next piece; None if there is nothing to do, or if all jobs wait for another thread."""
        if self._upcoming is None:
            self._upcoming = next(self._work)
        return self._upcoming

    def run_piece(self) -> None:
        assert self.upcoming is not None, "no piece is ready"
        self._upcoming = next(self._work)

    def shrink(self) -> bool:
        """Replace the micro-step under way by one of at most `max_tokens`. Returns False if it is no longer than that.

        Its pieces so far are lost.
        """
        step = self._step
        if step is None or self.max_tokens is None or step.batch.num_tokens <= self.max_tokens:
            return False
        if len(step.batch.spans) == len(step.batch.adapters):
            return False  # one record each
        self._shrinks = True
        self._upcoming = next(self._work)
        return True

    def charge(self, seconds: float) -> None:
        """Count the time of the last piece."""
        for job in self._working:
            job.progress.seconds += seconds / len(self._working)

    # -- the work -----------------------------------------------------------------------------------------------------

    def _run(self) -> Work:
        while True:
            if not self._collect_writes():
                yield None
                continue
            yield from self._exchange_adapters()
            begun = [job for job in self.jobs.values() if job.adapter is not None]
            if not begun:
                if not self.jobs:
                    yield None
                continue
            for job in [one for one in begun if one.progress.phase == "done"]:
                yield from self._announce(Piece("update", 0), job)
                if self._runs(job):
                    self._write(job, job.save_adapter, is_adapter=True)
            evaluating = [job for job in begun if job.progress.phase in ("before", "after")]
            due = evaluating or [job for job in begun if job.learns]
            found = []
            for job in due:
                found.append((job, (yield from self._samples(job, len(due)))))
            packed = [(job, samples) for job, samples in found if samples and self._runs(job)]
            packed, recompute = self._fitting(packed)
            if packed:
                yield from self._micro_step(packed, learns=not evaluating, recompute=recompute)

    def _announce(self, piece: Piece, *jobs: TrainingJob) -> Work:
        self._working = jobs
        yield piece

    def _runs(self, job: TrainingJob) -> bool:
        """Whether a job is neither cancelled nor failed, nor replaced by another of its name."""
        return self.jobs.get(job.name) is job

    def _samples(self, job: TrainingJob, num_packed: int) -> Generator[Piece | None, None, list[Sample]]:
        """The samples of the job's next micro-step; none if it, or its evaluation, has ended meanwhile."""
        phase = job.progress.phase
        while self._runs(job) and job.progress.phase == phase:  # another job may have waited for its samples
            found = yield from self._collected(job, num_packed)
            if found is not None:
                return found
        return []

    def _collected(self, job: TrainingJob, num_packed: int) -> Generator[Piece | None, None, list[Sample] | None]:
        """As `_samples`; None if a record was set aside, or the job has ended."""
        budget = job.plan.micro_batch_tokens
        if self.max_tokens is not None:
            budget = min(budget, self.max_tokens // num_packed)
        found: list[Sample] = []
        num_tokens, source = 0, self._sources[job.name]
        # A record has two tokens at least, and one record is always taken.
        upcoming = job.upcoming(min(2 * job.plan.batch, budget // 2 + 1 + _AHEAD))
        for place, record in enumerate(upcoming[: job.num_left]):
            wanted = upcoming[place : place + _AHEAD]
            source.request(wanted)
            while not source.is_prepared(record):
                yield None
                if not self._runs(job):
                    return None
                source.request(wanted)
            try:
                if source.needs_encoding(record):
                    yield from self._announce(Piece("image", 0), job)
                    if not self._runs(job):
                        return None
                sample = source.get(record)
            except (BadRequest, BadImage) as error:
                self._refuse(job, place, str(error))
                return None
            except BadConfig as error:  # of the processor
                self._end(job, "failed", str(error))
                return None
            except Exception as error:
                if self._num_tracebacks < _MAX_TRACEBACKS:
                    self._num_tracebacks += 1
                    log.exception("training %s: %s", job.name, record.place)
                self._refuse(job, place, f"{record.place}: {type(error).__name__}: {error}")
                return None
            num_tokens += len(sample.ids)
            if found and num_tokens > budget:
                break
            found.append(sample)
        return found

    def _refuse(self, job: TrainingJob, ahead: int, reason: str) -> None:
        """Set a record aside that cannot be used, or end its job. ahead: its place in `upcoming`."""
        if job.plan.bad_records == "refuse":
            self._end(job, "failed", f"{reason} (or set `bad_records: skip`, and submit the plan again)")
        elif (problem := job.set_aside(ahead, reason)) is not None:
            self._end(job, "failed", problem)

    def _fitting(self, packed: _Packed) -> tuple[_Packed, bool]:
        """The part of a micro-step that fits into memory, and whether its layers must be computed again for that.

        A first record that does not fit alone cannot be used.
        """
        free = self._free_bytes()
        while packed:
            single = [(job, own[:1]) for job, own in packed]
            for part, recompute in ((packed, False), (packed, True), (single, True), (single[:1], True)):
                lengths = [len(sample.ids) for _, own in part for sample in own]
                needed = self._trainer.step_bytes(lengths, recompute=recompute)
                if needed <= free:
                    return part, recompute
            job, (sample, *_) = packed.pop(0)
            reason = (
                f"a record of {len(sample.ids)} tokens needs {needed / 2**20:,.0f} MiB of memory for its activations"
            )
            reason = f"{job.upcoming(1)[0].place}: {reason}, and {free / 2**20:,.0f} MiB may be used; shorten it"
            self._refuse(job, 0, reason)
        return [], False

    def _micro_step(self, packed: _Packed, *, learns: bool, recompute: bool) -> Work:
        jobs = [job for job, _ in packed]
        try:
            step = self._trainer.micro_step({job.name: own for job, own in packed}, recompute=recompute, learns=learns)
            self._step = step
            complete = False
            while not complete:
                yield from self._announce(Piece("layer", step.batch.num_tokens), *jobs)
                if self._shrinks:
                    self._shrinks = False
                    step.abandon()
                    for job in jobs:
                        job.rewind()
                    return
                for job in jobs:
                    job.begin_micro_step()
                complete = step.advance()
        except Exception as error:
            log.exception("a micro-step of %s failed", ", ".join(job.name for job in jobs))
            for job in filter(self._runs, jobs):
                self._end(job, "failed", f"the micro-step failed: {type(error).__name__}: {error}")
            return
        finally:
            self._step = None
        for job, samples in packed:
            if self._runs(job):
                yield from self._announce(Piece("update", 0), job)
                if self._runs(job):
                    self._record(job, step, samples)

    def _record(self, job: TrainingJob, step: MicroStep, samples: Sequence[Sample]) -> None:
        try:
            job.record(step.losses[job.name], len(samples), sum(len(sample.ids) for sample in samples))
        except FloatingPointError as error:
            self._end(job, "failed", str(error))
            return
        except Exception as error:  # of the optimizer: out of memory
            log.exception("training %s: an optimizer step failed", job.name)
            self._end(job, "failed", f"the optimizer step failed: {type(error).__name__}: {error}")
            return
        checkpoint = job.checkpoint()
        self._write(job, lambda: job.save(checkpoint))

    # -- ends and files -----------------------------------------------------------------------------------------------

    def _write(self, job: TrainingJob, write: Callable[[], None], *, is_adapter: bool = False) -> None:
        def named() -> None:
            with writing(job.folder):
                write()

        future = self._executor.submit(named)
        self._writing.append((job, future, is_adapter))
        future.add_done_callback(lambda _: self._wake())

    def _collect_writes(self) -> bool:
        """Whether no file is being written. A micro-step begins after the results of the previous one are on disk."""
        while self._writing and self._writing[0][1].done():
            job, future, is_adapter = self._writing.pop(0)
            if not self._runs(job):
                continue
            if (error := future.exception()) is not None:
                self._end(job, "failed", f"{error}" if isinstance(error, VLoraError) else f"cannot write: {error!r}")
            elif is_adapter:
                self._forget(job)
                self._on_trained(job)
        return not self._writing

    def _end(self, job: TrainingJob, state: Literal["failed", "cancelled"], error: str | None = None) -> None:
        job.end(state, error)
        self._forget(job)
        self._executor.submit(job.release)  # after its writes

    def _forget(self, job: TrainingJob) -> None:
        self.jobs.pop(job.name, None)
        if (source := self._sources.pop(job.name, None)) is not None:
            source.close()

    def _exchange_adapters(self) -> Work:
        """Remove the adapters of ended jobs and create those of new ones. Called between two micro-steps."""
        kept = {id(job.adapter) for job in self.jobs.values()}
        for name in [name for name, adapter in self._trainer.adapters.items() if id(adapter) not in kept]:
            self._trainer.remove(name)
        for job in [one for one in self.jobs.values() if one.adapter is None]:
            yield from self._announce(Piece("begin", 0), job)
            if not self._runs(job):
                continue
            try:
                job.begin(self._trainer.add(job.name, job.settings))
            except Exception as error:  # out of memory, or a checkpoint of another model
                log.exception("training %s cannot begin", job.name)
                self._end(job, "failed", f"it cannot begin: {type(error).__name__}: {error}")
