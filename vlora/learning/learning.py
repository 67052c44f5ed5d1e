"""All learning adapters of a server: answers come in, corrections are kept, and each adapter advances."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from vlora.errors import BadRequest, EngineDead, OverCapacity, listed
from vlora.learning.evaluation import ServedModel
from vlora.learning.learner import Learner
from vlora.learning.plan import LearningEntry
from vlora.learning.sample_store import AnsweredRequest, Corrector, checked_label
from vlora.types.learning import Correction, LearningStatus

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 0.5
_LONGEST_PAUSE_S = 60.0
CLOSE_S = 10.0
MAX_QUEUED_BYTES = 64 << 20
MAX_QUEUED = 4096
_MAX_SHARE = 0.5  # of both, for one tenant
MAX_LABEL_CHARS = 4000


class _Queued(NamedTuple):
    learner: Learner
    answer: AnsweredRequest
    num_bytes: int
    encode: Callable[[], bytes | None]


class Learning:
    """Used from one event loop. Its thread has the lowest demands: a full queue drops answers, requests never wait."""

    def __init__(
        self,
        folder: Path,
        entries: list[LearningEntry],
        initial: Mapping[str, str],
        model: ServedModel,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the folders of all adapters. Arguments and exceptions are those of `Learner`, `initial` by name."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vlora-learning")
        self._model = model
        self.learners: dict[str, Learner] = {}
        self._queue: deque[_Queued] = deque()
        self._queued: Counter[str | None] = Counter()  # answers by tenant, until they are on disk
        self._queued_bytes: Counter[str | None] = Counter()
        self._lock = threading.Lock()  # of the queue, its sizes and writing, and `num_dropped`
        self._is_writing = False  # whether `_write` was called and will write what is queued now
        self._tasks: list[asyncio.Task[None]] = []
        self._warned_s = -float("inf")
        try:
            for entry in entries:
                name = entry.settings.name
                own = Path(initial[name]) if name in initial else None
                self.learners[name] = Learner(folder / name, entry, own, model, self._thread, clock)
        except BaseException:
            self._close_files()
            raise

    @property
    def folders(self) -> dict[str, str]:
        return {name: str(one.present_folder) for name, one in self.learners.items()}

    async def start(self) -> None:
        """Advance each adapter from now on, in tasks of the running loop. Raises BadConfig if one cannot learn."""
        for learner in self.learners.values():
            await learner.check()
        self._tasks = [
            asyncio.create_task(self._run(one), name=f"vlora-learn-{name}") for name, one in self.learners.items()
        ]

    async def close(self) -> None:
        """Stop, and close the files once the answers so far are on disk."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)  # an engine that hangs answers no call
        with contextlib.suppress(OSError):
            await self._in_thread(self._write)
        await asyncio.to_thread(self._thread.shutdown)
        self._close_files()

    def _close_files(self) -> None:
        for learner in self.learners.values():
            learner.close()

    # -- answers ------------------------------------------------------------------------------------------------------

    def version_of(self, adapter: str | None) -> str | None:
        """The version that new requests of an adapter get; None if its answers are not kept."""
        learner = self.learners.get(adapter or "")
        return None if learner is None else learner.loaded

    def keep(self, adapter: str, answer: AnsweredRequest, num_bytes: int, encode: Callable[[], bytes | None]) -> None:
        """Keep an answer, soon, in another thread.

        Args:
            answer: Without its picture. Its version is dropped if the adapter has another one by now.
            encode: Returns the picture's encoded bytes; called in the other thread.
        """
        learner = self.learners[adapter]
        num_bytes += len(answer.question) + len(answer.answer)
        if answer.version != learner.loaded:
            answer = answer._replace(version="")
        with self._lock:
            if not self._has_room(answer.tenant, num_bytes):
                learner.num_dropped += 1
                return
            self._queue.append(_Queued(learner, answer, num_bytes, encode))
            self._queued[answer.tenant] += 1
            self._queued_bytes[answer.tenant] += num_bytes
            begins, self._is_writing = not self._is_writing, True
        if begins:
            with contextlib.suppress(RuntimeError):  # closed
                self._thread.submit(self._write)

    def _has_room(self, tenant: str | None, num_bytes: int) -> bool:
        """Whether the queue takes an answer. One tenant's answers leave room for those of others."""
        for queued, more, most in ((self._queued, 1, MAX_QUEUED), (self._queued_bytes, num_bytes, MAX_QUEUED_BYTES)):
            if queued.total() + more > most or queued[tenant] + more > _MAX_SHARE * most:
                return False
        return True

    def _write(self) -> None:
        """Write all queued answers. Called in the thread."""
        while True:
            with self._lock:
                if not self._queue:
                    self._is_writing = False
                    return
                queued = list(self._queue)
                self._queue.clear()
            for learner in {id(one.learner): one.learner for one in queued}.values():
                self._keep(learner, [one for one in queued if one.learner is learner])
            with self._lock:
                for one in queued:
                    self._queued[one.answer.tenant] -= 1
                    self._queued_bytes[one.answer.tenant] -= one.num_bytes
                self._queued, self._queued_bytes = +self._queued, +self._queued_bytes  # without tenants at 0

    def _keep(self, learner: Learner, queued: list[_Queued]) -> None:
        answers, num_dropped = [], 0
        for one in queued:
            try:
                answers.append(one.answer._replace(image=one.encode()))
            except Exception as error:  # of one picture; the other answers are kept
                num_dropped += 1
                self._warn(f"an answer of adapter {learner.name!r} was not kept: {type(error).__name__}: {error}")
        try:
            num_dropped += learner.store.add(answers)
        except Exception as error:  # the disk is full
            num_dropped += len(answers)
            self._warn(f"{len(answers)} answers of adapter {learner.name!r} were not kept: {error}")
        with self._lock:  # the event loop counts those without room meanwhile
            learner.num_dropped += num_dropped

    async def correct(self, request_id: str, label: str, by: Corrector) -> Correction:
        """Keep the right answer of a request. Returns once it is on disk.

        Raises:
            BadRequest: There is no such answer of this caller, or the label cannot be used.
            Forbidden: An admin has corrected it.
            OverCapacity: The disk is full.
        """
        text = checked_label(label, MAX_LABEL_CHARS)
        self._model.check_label(text)
        try:
            adapter = await self._in_thread(self._correct, request_id, text, by)
        except OSError as error:
            self._warn(f"a correction was not kept: {error}")
            raise OverCapacity("the correction cannot be written to disk; try again later") from error
        if adapter is None:
            raise BadRequest(
                f"no answer with id {request_id[:128]!r} is kept for this token; corrections are taken for single "
                f"questions with at most one image to {listed(self.learners)}, as long as the answer is on disk",
                field="id",
            )
        return Correction(request_id=request_id, adapter=adapter, label=text)

    def _correct(self, request_id: str, label: str, by: Corrector) -> str | None:
        self._write()  # the answer may be in the queue still
        problem: OSError | None = None
        for name, learner in self.learners.items():
            try:
                if learner.store.correct(request_id, label, by):
                    return name
            except OSError as error:  # one damaged file must not stop the other adapters
                problem = error
        if problem is not None:
            raise problem
        return None

    # -- the operator's calls -----------------------------------------------------------------------------------------

    def get(self, name: str) -> Learner:
        """Raises BadRequest for an adapter that does not learn."""
        if name not in self.learners:
            raise BadRequest(f"adapter {name[:128]!r} does not learn; learning: {listed(self.learners)}", field="name")
        return self.learners[name]

    async def statuses(self) -> tuple[LearningStatus, ...]:
        return tuple([await one.status() for one in self.learners.values()])

    # -- internal -----------------------------------------------------------------------------------------------------

    async def _run(self, learner: Learner) -> None:
        pause_s = POLL_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                await learner.advance()
                pause_s = POLL_S
            except Exception as error:  # the next call tries again
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                if not isinstance(error, EngineDead):
                    self._warn(f"adapter {learner.name!r} does not learn at present: {type(error).__name__}: {error}")

    def _warn(self, text: str) -> None:
        """Log, but not for every answer while a disk is full."""
        if time.monotonic() - self._warned_s >= _LONGEST_PAUSE_S:
            self._warned_s = time.monotonic()
            log.warning("%s", text)

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
