"""Trainings in the engine's process: pieces of them run between two steps, when the latency promise leaves room."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace

from vlora.config import EngineConfig
from vlora.engine.adapter_admin import AdapterAdmin
from vlora.engine.device_runtime import DeviceRuntime
from vlora.engine.limits import free_room
from vlora.errors import Aborted, BadConfig, BadRequest
from vlora.lora.registry import AdapterRegistry
from vlora.models.processing import InputProcessor
from vlora.models.vision.encoder import VisionEncoder
from vlora.orchestrator.cost_model import CostModel
from vlora.orchestrator.latency_promise import LatencyPromise, PiecePrices
from vlora.threads import background_executor
from vlora.training.job import TrainingJob
from vlora.training.loop import Piece, TrainingLoop
from vlora.training.samples import SampleSource, check_records
from vlora.training.trainer import PackedTrainer
from vlora.types import AdapterStatus, Batch, Request, RequestOutput, TrainingStatus

log = logging.getLogger(__name__)

MAX_ENDED = 64  # trainings that are still listed
# Parameters, gradient and two moments in float32, the factors that lanes read, and two checkpoints.
_PARAMETER_BYTES = 16 + 4 + 2 * 16


class _Submission(NamedTuple):
    """A plan that is being read. done: Set when its trainings have begun."""

    reading: Future[list[TrainingJob]]
    reopen: bool
    done: Future[tuple[TrainingStatus, ...]]


@dataclasses.dataclass(kw_only=True, eq=False)
class Trainings:
    """All trainings of an engine. Not thread-safe: it belongs to the engine's thread.

    Training computes with W0 of the shadow switcher's memory, which merging does not change, so that pieces run between
    steps of any mode.

    Attributes:
        wake: See `OtherWork`.
        waits: See `SharedWork`.
        promise: Notified of requests and steps.
        load_processor: Returns the model's processor; called in the training's thread.
    """

    config: EngineConfig
    device: DeviceRuntime
    registry: AdapterRegistry
    admin: AdapterAdmin
    cost: CostModel
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.promise = LatencyPromise(self.config.train_slowdown, self.clock, self.config.max_batch_size)
        self.prices = PiecePrices()
        self.load_processor: Callable[[], InputProcessor] = functools.cache(
            lambda: InputProcessor.from_pretrained(self.config.model)
        )
        self._jobs: dict[str, TrainingJob] = {}
        self._submitted: deque[_Submission] = deque()
        self._reader = background_executor("vlora-training", patient=True)
        self._loop: TrainingLoop | None = None
        self._marked_s = 0.0  # when the present step began, or the previous one was recorded
        self.waits = False
        self.fits_later = False

    # -- the operator's calls -----------------------------------------------------------------------------------------

    def start(self, plan: str) -> None:
        """Begin or continue the trainings of a plan file. Those that were cancelled or have failed remain so.

        Raises:
            BadPlan: The plan or its data cannot be used.
            BadConfig: The engine cannot train, or a target is unknown.
            BadRequest: The name of a training is in use.
        """
        self._admit(self._read(plan, self._model, checks=True), reopen=False)

    def submit(self, plan: str, *, reopen: bool) -> Future[tuple[TrainingStatus, ...]]:
        """As `start`, but the files are read in the background.

        `advance` sets the result, the status of each training, or the exception.

        Args:
            reopen: Continue trainings that were cancelled or have failed, too. False: the plan has been submitted
                before, so that its records are not checked again.
        """
        done: Future[tuple[TrainingStatus, ...]] = Future()
        done.set_running_or_notify_cancel()
        reading = self._reader.submit(self._read, plan, self._model, checks=reopen)
        self._submitted.append(_Submission(reading, reopen, done))
        reading.add_done_callback(lambda _: self.wake())
        return done

    def cancel(self, name: str) -> TrainingStatus:
        """End a training. Submitting its plan again continues it. Raises BadRequest if it is not running."""
        job = self._jobs.get(name)
        if job is None or job.state != "running":
            known = ", ".join(one.name for one in self._jobs.values() if one.state == "running") or "none"
            raise BadRequest(f"no training named {name[:128]!r} is running; running: {known}")
        if self._loop is None or name not in self._loop.jobs:
            raise BadRequest(f"training {name!r} is complete; its adapter is being registered, unload it instead")
        self._loop.cancel(name)
        return job.status()

    def statuses(self) -> tuple[TrainingStatus, ...]:
        """Every training since the start, ended ones too."""
        waiting = self._waiting()
        found = [job.status() for job in self._jobs.values()]
        return tuple(replace(one, waiting=waiting) if one.state == "running" else one for one in found)

    @property
    def jobs(self) -> tuple[TrainingJob, ...]:
        """In the order of `statuses`."""
        return tuple(self._jobs.values())

    # -- between two steps --------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Run one piece, if there is one that the promise allows. Returns whether to call again at once if idle."""
        while self._submitted and self._submitted[0].reading.done():
            self._finish_submission(self._submitted.popleft())
        loop = self._loop
        if loop is None:
            return False
        try:
            return self._run_piece(loop)
        except Exception as error:  # must not end the engine
            log.exception("trainings ended")
            loop.fail(f"internal error ({type(error).__name__}: {error}); see the engine's log")
            self._loop, self.waits = None, False
            return False

    def _run_piece(self, loop: TrainingLoop) -> bool:
        piece = loop.upcoming
        if piece is None:
            self.waits = False
            return False
        loop.max_tokens = self._max_tokens()
        price_s = self.prices.expected_s(piece)
        self.waits = price_s > self.promise.room_s
        if self.waits:
            self.fits_later = price_s <= self.promise.longest_s
            return not self.fits_later and loop.shrink()  # requests have become shorter or more, or pieces longer
        before = self.clock()
        loop.run_piece()
        if self.device.hf_model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = self.clock() - before
        loop.charge(seconds)
        self.promise.spent(seconds)
        self.prices.observe(piece, seconds)
        return True

    @property
    def retry_s(self) -> float | None:
        """How long an idle engine may sleep before `advance` may run a piece; None until `wake` is called."""
        return self.promise.quiet_in_s if self.waits else None

    def add_request(self, request: Request) -> None:
        self.promise.add(request.request_id)

    def begin_step(self) -> tuple[RequestOutput, ...]:
        self._marked_s = self.clock()
        return ()

    def record_step(self, batch: Batch) -> None:
        """A step has served requests: the one that began last or, where steps run ahead, the one before."""
        now = self.clock()
        self.promise.served(now - self._marked_s, self.cost.costs.base_s, len(batch.items))
        self._marked_s = now

    def close(self) -> None:
        """Stop reading and writing files; the checkpoints remain."""
        self._reader.shutdown(cancel_futures=True)
        for job in self._jobs.values():
            job.release()
        for submission in self._submitted:
            submission.done.set_exception(BadRequest("the engine was closed"))
        self._submitted.clear()
        self._loop = None

    # -- internal -----------------------------------------------------------------------------------------------------

    def _read(self, plan: str, model: str, *, checks: bool) -> list[TrainingJob]:
        """The trainings of a plan, with their folders locked. Also called in the training's thread.

        checks: Whether records of new trainings that cannot be used are errors.
        """
        from vlora.training.plan import read_plan  # an engine without trainings needs no pydantic

        folder, entries = read_plan(plan)
        jobs: list[TrainingJob] = []
        try:
            for one, records in entries:
                jobs.append(TrainingJob(one, records, Path(folder) / one.name, model))
            strict = [job.records for job in jobs if job.is_new and job.plan.bad_records == "refuse"]
            if checks and strict:
                checked = dict.fromkeys(one for part in strict for one in (*part.train, *part.held_out))
                check_records(self.load_processor(), self.device.hf_model.max_positions, checked)
        except BaseException:
            for job in jobs:
                job.release()
            raise
        return jobs

    def _finish_submission(self, submission: _Submission) -> None:
        try:
            jobs = submission.reading.result()
            self._admit(jobs, reopen=submission.reopen)
        except BadConfig as error:  # of the engine, which is in order; the caller's request is not
            submission.done.set_exception(BadRequest(str(error)))
        except Exception as error:
            submission.done.set_exception(error)
        else:
            submission.done.set_result(tuple(job.status() for job in jobs))

    def _admit(self, jobs: list[TrainingJob], *, reopen: bool) -> None:
        try:
            self._begin(jobs, reopen=reopen)
        finally:
            for job in jobs:
                if self._jobs.get(job.name) is not job or job.state != "running":
                    job.release()

    def _begin(self, jobs: list[TrainingJob], *, reopen: bool) -> None:
        self._check_names(jobs)
        loop = self._loop = self._loop or self._make_loop()
        for job in jobs:
            job.check_locked()
        self._check_memory([(job, loop.num_parameters(job)) for job in jobs if job.state != "finished"])
        finished = [
            job
            for job in jobs
            if job.plan.register_adapter and job.state == "finished" and job.name not in self.registry
        ]
        self.admin.register({job.name: str(job.adapter_folder) for job in finished})
        if reopen:
            for job in jobs:
                job.reopen()
        for job in jobs:
            self._jobs.pop(job.name, None)
            self._jobs[job.name] = job
            if job.state == "running":
                loop.add(job)
        ended = [name for name, job in self._jobs.items() if job.state != "running"]
        for name in ended[:-MAX_ENDED]:
            del self._jobs[name]

    def _check_names(self, jobs: list[TrainingJob]) -> None:
        for job in jobs:
            known = self._jobs.get(job.name)
            if known is not None and known.state == "running":
                raise BadRequest(f"training {job.name!r} is running already; cancel it first, or choose another name")
            if job.name in self.registry and job.state != "finished":
                raise BadRequest(
                    f"an adapter {job.name!r} is registered already; unload it first, or choose another name"
                )

    def _check_memory(self, jobs: list[tuple[TrainingJob, int]]) -> None:
        """Raises BadConfig for adapters that do not fit into memory, OverCapacity for one that could not be served."""
        hf_model = self.device.hf_model
        for job, count in jobs:
            self.admin.check_room(job.name, count * hf_model.dtype.itemsize)
        needed, free = _PARAMETER_BYTES * sum(count for _, count in jobs), self._free_bytes()
        if needed > free:
            raise BadConfig(
                f"the training of {', '.join(job.name for job, _ in jobs)} needs {needed / 2**30:.2f} GiB for adapters "
                f"and optimizers, and {free / 2**30:.2f} GiB are free; give a smaller rank or fewer targets"
            )

    def _make_loop(self) -> TrainingLoop:
        if self.device.switcher.in_place:
            raise BadConfig(
                "training needs W0 in memory while an adapter is merged; start with --switching shadow, "
                "which needs memory for a second copy of the weights"
            )
        hf_model, slabs = self.device.hf_model, self.device.slabs
        trainer = PackedTrainer(hf_model, {name: slabs.entry(name) for name in slabs.slots})
        encoder = VisionEncoder(hf_model, cache_bytes=0)  # samples keep their features

        def new_source() -> SampleSource:
            return SampleSource(hf_model, encoder, self._reader, self.load_processor, self._wake)

        return TrainingLoop(
            trainer,
            new_source,
            self._reader,
            wake=self._wake,
            free_bytes=lambda: self._free_bytes() // 2,  # steps that serve need memory too
            on_trained=self._register,
        )

    def _free_bytes(self) -> int:
        device = self.device.hf_model.device
        free = free_room(self.config, device).num_bytes
        if device.type == "cuda":  # torch's cache
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free

    @functools.cached_property
    def _model(self) -> str:
        """Hash of a part of the base model's weights: some embeddings, and a row of each layer that adapters change.

        In bfloat16, so that a training continues when the model is served in another type.
        """
        slabs = self.device.slabs
        weights = [slabs.entry(name) for name in sorted(slabs.slots)] if not self.device.switcher.in_place else []
        floats = [weight[:1] for weight in weights if isinstance(weight, torch.Tensor)]
        digest = hashlib.blake2b(digest_size=16)
        for rows in (self.device.hf_model.embed.weight[:8], *floats):
            digest.update(rows.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _wake(self) -> None:
        self.wake()

    def _register(self, job: TrainingJob) -> None:
        """Register a complete training's adapter, if it is to be; `AdapterAdmin.poll` completes it."""
        if not job.plan.register_adapter:
            job.end("finished")
            job.release()
            return

        def registered(loading: Future[AdapterStatus]) -> None:
            if (error := loading.exception()) is None:
                job.end("finished")
            elif isinstance(error, Aborted):  # unloaded, or the engine closes; its files remain for a successor
                job.state = "cancelled"
            else:
                job.end("failed", f"the adapter cannot be registered: {error}")
            job.release()

        if job.name in self.registry:
            job.end("failed", f"an adapter {job.name!r} was registered meanwhile; load {job.adapter_folder} yourself")
            job.release()
            return
        self.admin.load_in_background(job.name, str(job.adapter_folder)).add_done_callback(registered)

    def _max_tokens(self) -> int | None:
        """Tokens of a micro-step with pieces that run in an idle engine and beside requests.

        They take half the time that the former may spend, as prices vary, and at most what requests leave.
        """
        room_s = min(self.promise.usual_room_s / 2, self.promise.beside_room_s)
        token_s = self.prices.expected_s(Piece("layer", 1))
        if math.isinf(room_s) or math.isinf(self.promise.room_s):
            return None
        return int(room_s / token_s) if token_s else 0

    def _waiting(self) -> str | None:
        if not self.waits or self._loop is None or (piece := self._loop.upcoming) is None:
            return None
        price_s, room_s = self.prices.expected_s(piece), self.promise.usual_room_s
        allowance_s = self.promise.usual_allowance_s
        if allowance_s < price_s <= room_s:
            return (
                f"no room under the promise at this load: a piece takes {price_s:.3f} s, and a usual request allows "
                f"{allowance_s:.3f} s in all; it runs when no request does (use shorter records, or a larger "
                "--train-slowdown)"
            )
        if price_s <= room_s:
            return "requests run; the promise leaves no room at present"
        return (
            f"a piece takes {price_s:.3f} s, and the promise leaves {room_s:.3f} s beside requests; it runs when none "
            "was seen for 10 s (use shorter records, or a larger --train-slowdown)"
        )
