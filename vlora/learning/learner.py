"""One learning adapter: from corrections to trainings, evaluations, promotions and rollbacks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vlora.errors import AdapterChanged, BadConfig, BadRequest, EngineDead, VLoraError
from vlora.learning.attempt import Attempt, remove_others
from vlora.learning.decision import agreed, bounded, why_roll_back
from vlora.learning.evaluation import Compared, Evaluator, Interrupted, ServedModel, Version
from vlora.learning.plan import LearningEntry
from vlora.learning.sample_store import Labelled, SampleStore
from vlora.learning.versions import SERVER, Versions, comparison_of, describe, origin_of
from vlora.run_folder import lock_folder
from vlora.types.learning import LearningStatus

log = logging.getLogger(__name__)
_MAX_MEASURED = 32  # held-out records, for the loss before and after a training
MAX_INTERRUPTED = 5
"""Evaluations of one version that the engine interrupts. Then it is refused; it can be promoted by hand."""
_END = object()
T = TypeVar("T")


class _Candidate(NamedTuple):
    """A version to evaluate. origin: a training or a folder. by: name of the caller."""

    version: str
    origin: str
    by: str


class Learner:
    """Used from one event loop. Files are read and written by the executor's only thread.

    Attributes:
        store: Its live records; for the executor's thread only.
    """

    def __init__(
        self,
        folder: Path,
        entry: LearningEntry,
        initial: Path | None,
        model: ServedModel,
        executor: Executor,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Lock the folder and read it.

        Args:
            initial: The adapter to begin with, if the folder has none.
            clock: Seconds since 1970.
            sleep: Pauses between attempts of an evaluation.

        Raises:
            BadConfig: The folder is in use or damaged, or there is no adapter to begin with.
            BadAdapter: The initial adapter cannot be copied.
        """
        self.name = entry.settings.name
        self._settings = entry.settings
        self._entry = entry
        self._folder = folder
        self._model = model
        self._executor = executor
        self._compared: tuple[tuple[tuple[Version, Version], int], Compared] | None = None  # by versions and look
        self._num_interrupted: Counter[str] = Counter()  # by the version that is evaluated
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(lock_folder(folder))
        try:
            folder.chmod(0o700)  # it has what callers asked
            self._versions = Versions(folder, self.name, initial, model, executor, clock)
            settings = entry.settings
            self.store = SampleStore(
                folder / "live.sqlite",
                max_records=settings.max_records,
                max_bytes=settings.max_bytes,
                held_out=settings.held_out,
                clock=clock,
            )
        except BaseException:
            self._lock.close()
            raise
        self._evaluator = Evaluator(entry, model, self.store, executor, self._on_question, sleep)
        self._attempt = self._open_attempt()
        remove_others(folder, self._attempt)
        self._candidates: list[_Candidate] = []
        self._doing = "serves"
        self.num_dropped = 0

    # -- the served version -------------------------------------------------------------------------------------------

    @property
    def loaded(self) -> str:
        """The version that the engine has for new requests; empty during a change."""
        return self._versions.loaded

    @property
    def present_folder(self) -> Path:
        return self._versions.files.path(self._versions.present)

    async def check(self) -> None:
        """Raises BadConfig if the adapter, which is registered, cannot learn."""
        try:
            await self._model.check(self.name)
        except BadRequest as error:
            raise BadConfig(str(error)) from error

    async def promote(self, by: str, *, version: str | None, path: str | None, force: bool) -> LearningStatus:
        """Evaluate a version, and promote it if it is better.

        The evaluation runs in the background; `force` promotes at once.

        Args:
            version: One on disk; its first digits suffice. None: the last one that was not promoted.
            path: An adapter folder, instead of a version.
            force: Promote it without evaluation.

        Raises:
            BadRequest: There is no such version, or it is served already.
            BadAdapter: The folder cannot be served.
        """
        if not force and len(self._candidates) >= 8:  # before a folder is copied
            raise BadRequest(f"8 versions of adapter {self.name!r} wait for their evaluation; wait for them")
        if path is not None:
            if version is not None:
                raise BadRequest("version and path are both given; give one of them")
            chosen = await self._in_thread(self._versions.files.add, Path(path), self._versions.present)
            origin = f"from {path}"
        else:
            chosen = await self._in_thread(self._versions.chosen, version)
            origin = origin_of(self._versions.audit_log, chosen)
        if chosen == self._versions.present:
            raise BadRequest(f"version {chosen[:12]} of adapter {self.name!r} is served already")
        if force:
            candidate, details = _Candidate(chosen, origin, by), {"origin": origin}
            await self._promote(candidate, self._versions.present, "without evaluation", details)
        else:
            self._candidates.append(_Candidate(chosen, origin, by))
        return await self.status()

    async def roll_back(self, by: str, version: str | None) -> LearningStatus:
        """Serve an earlier version again. version: its first digits suffice; None: the one before.

        Raises:
            BadRequest: There is no such version.
        """
        served = self._versions.served
        if version is None and not served.before:
            raise BadRequest(f"adapter {self.name!r} has no earlier version")
        chosen = served.before[-1] if version is None else await self._in_thread(self._versions.chosen, version)
        if chosen == served.version:
            raise BadRequest(f"version {chosen[:12]} of adapter {self.name!r} is served already")
        await self._versions.return_to(chosen, served.version, by, "by hand")
        return await self.status()

    async def _promote(self, candidate: _Candidate, before: str, why: str, details: dict[str, Any]) -> None:
        await self._in_thread(self.store.forget_version, candidate.version)  # it is watched from 0
        try:
            await self._versions.promote(candidate.version, before, candidate.by, why, details)
        finally:
            await self._in_thread(self._prune)

    # -- learning -----------------------------------------------------------------------------------------------------

    async def advance(self) -> None:
        """Do what is due: called again and again, by one task.

        Raises:
            OSError: The disk is full, for example. The next call tries again.
            EngineDead, Interrupted: As OSError.
        """
        await self._versions.restore()
        await self._watch()
        while self._candidates:
            with self._as_doing("evaluates a version"):
                await self._evaluate(self._candidates[0])
            self._candidates.pop(0)
        if self._attempt is not None:
            await self._follow(self._attempt)
        elif self._settings.train_after is not None:
            num_new = await self._in_thread(self._num_new)
            if num_new >= self._settings.train_after:
                await self._begin_training()

    async def _watch(self) -> None:
        """Return to the version before if the present one has turned out to be worse."""
        served = self._versions.served
        promoted = self._versions.audit_log.last(served.version, "promoted", "rolled_back", "imported")
        if not served.before or promoted is None or promoted.event != "promoted":
            return
        before, after = [await self._in_thread(self.store.served, one) for one in (served.before[-1], served.version)]
        why = why_roll_back(
            before,
            after,
            comparison_of(promoted.details.get("live")),
            max_share=self._settings.max_share,
            confidence=self._settings.confidence,
        )
        if why is not None:
            log.warning("adapter %r returns to the version before: %s", self.name, why)
            with contextlib.suppress(AdapterChanged):  # by hand, meanwhile
                await self._versions.return_to(served.before[-1], served.version, SERVER, why)

    def _num_new(self) -> int:
        """Corrections since the last training."""
        return self.store.num_corrections_since(self.store.fact("trained_to"))

    async def _begin_training(self) -> None:
        last = self._versions.audit_log.last("", "training")
        number = 1 + (0 if last is None else int(last.details["number"]))
        attempt = Attempt(self._folder, self.name, number)
        start = self._versions.present
        start_folder = self._versions.files.path(start)

        def choose() -> tuple[int, list[Labelled]]:
            records = self.store.labelled()
            live = bounded(agreed([one for one in records if not one.held_out]), self._settings.max_share)
            held = bounded(agreed([one for one in records if one.held_out]), self._settings.max_share)
            return records[-1].correction, [*live, *held[-_MAX_MEASURED:]]

        trained_to, chosen = await self._in_thread(choose)
        count = sum(not one.held_out for one in chosen) + len(self._entry.data)
        if not count:  # all corrections are held out, or of one tenant
            await self._in_thread(self.store.set_fact, "trained_to", trained_to)
            return
        try:
            writing = attempt.write(self._settings.training, start_folder, chosen, self._entry.data, self.store.image)
            while await self._in_thread(next, writing, _END) is not _END:
                pass
        except BaseException:
            await self._in_thread(attempt.remove)  # the disk is full, perhaps
            raise
        details = {"number": number, "trained_to": trained_to, "records": count}
        try:
            await self._versions.append("training", SERVER, before=start, details=details)
        except OSError:  # the audit log is as before; of a call that is cancelled it has the line
            await self._in_thread(attempt.remove)
            raise
        self._attempt = attempt

    async def _follow(self, attempt: Attempt) -> None:
        """Begin or continue a training, or evaluate its result."""
        found = {one.name: one for one in await self._model.trainings()}.get(attempt.name)
        if found is None:
            if not attempt.plan.exists():
                await self._end_attempt(attempt, "its files are missing")
                return
            try:
                await self._model.train(attempt.plan)
            except EngineDead:
                raise
            except VLoraError as error:
                await self._end_attempt(attempt, f"it cannot begin: {error}")
        elif found.state == "running":
            self._doing = f"trains, step {found.step} of {found.num_steps}"
        elif found.state == "finished":
            with self._as_doing("evaluates a training"):
                version = await self._in_thread(
                    self._versions.files.add, attempt.adapter_folder, self._versions.present
                )
                if version != self._versions.present:
                    await self._evaluate(_Candidate(version, attempt.name, SERVER))
            await self._end_attempt(attempt, "", found.num_bad)
        else:
            await self._end_attempt(attempt, f"it was {found.state}: {found.error or 'by hand'}")

    async def _end_attempt(self, attempt: Attempt, problem: str, num_bad: int = 0) -> None:
        last = self._versions.audit_log.last("", "training")
        assert last is not None
        await self._in_thread(self.store.set_fact, "trained_to", last.details["trained_to"])
        details = {"number": attempt.number} | ({"set_aside": num_bad} if num_bad else {})
        await self._versions.append("training_ended", SERVER, why=problem, details=details)
        if problem:
            log.warning("training %s: %s", attempt.name, problem)
        self._attempt, self._doing = None, "serves"
        await self._in_thread(attempt.remove)

    def _open_attempt(self) -> Attempt | None:
        """The training that was under way when the last process ended."""
        last = next(
            (one for one in reversed(self._versions.audit_log.entries) if one.event.startswith("training")), None
        )
        if last is None or last.event == "training_ended":
            return None
        return Attempt(self._folder, self.name, last.details["number"])

    # -- evaluation ---------------------------------------------------------------------------------------------------

    async def _on_question(self, progress: str) -> None:
        self._doing = f"evaluates a version, {progress}"
        await self._watch()  # an evaluation may take long

    async def _evaluate(self, candidate: _Candidate) -> None:
        """Promote a version if it is better than the present one. Versions that cannot be evaluated are refused.

        Raises:
            EngineDead, Interrupted: The evaluation has to be repeated.
        """
        present, name = self._versions.present, f"{self.name}~candidate"
        pair = Version(self.name, present), Version(name, candidate.version)
        look = 1 + self._versions.audit_log.num_evaluations(present)
        try:
            await self._model.check(self.name)
            compared = await self._compare(pair, look)
            compared.details["origin"] = candidate.origin
            fields = {"version": candidate.version, "before": present, "details": compared.details}
            why = compared.why_not
            await self._versions.append("evaluated", candidate.by, why=why or "it is better", **fields)
            if why is None:
                await self._promote(candidate, present, "it is better", compared.details)
            else:
                log.info("version %s of adapter %r is refused: %s", candidate.version, self.name, why)
        except EngineDead:
            raise
        except Interrupted as error:
            self._num_interrupted[candidate.version] += 1
            if self._num_interrupted[candidate.version] < MAX_INTERRUPTED:
                raise
            await self._refuse(candidate, present, f"it cannot be evaluated: {error}")
        except VLoraError as error:
            await self._refuse(candidate, present, f"it cannot be promoted: {error}")
        finally:
            with contextlib.suppress(VLoraError):
                await self._model.unload(name)
            await self._in_thread(self._prune)
        del self._num_interrupted[candidate.version]
        self._compared = None

    async def _compare(self, pair: tuple[Version, Version], look: int) -> Compared:
        """As `Evaluator.compare`, but not again if the audit log could not be written after it, on a full disk."""
        if self._compared is None or self._compared[0] != (pair, look):
            found = await self._evaluator.compare(pair, self._versions.files.path(pair[1].version), look)
            self._compared = (pair, look), found
        return self._compared[1]

    async def _refuse(self, candidate: _Candidate, present: str, why: str) -> None:
        fields = {"version": candidate.version, "before": present, "details": {"origin": candidate.origin}}
        await self._versions.append("evaluated", candidate.by, why=why, **fields)

    # -- state --------------------------------------------------------------------------------------------------------

    async def status(self) -> LearningStatus:
        return await self._in_thread(self._status)

    def _status(self) -> LearningStatus:
        served, size = self._versions.served, self.store.size()
        left: int | None = None
        if self._settings.train_after is not None:
            left = max(0, self._settings.train_after - self._num_new())
        return LearningStatus(
            name=self.name,
            doing=self._doing,
            present=served.version,
            versions=tuple(
                describe(served, self._versions.audit_log, one, self.store)
                for one in reversed(self._versions.files.versions)
            ),
            num_records=size.records,
            num_corrected=size.corrected,
            num_bytes=size.num_bytes,
            num_dropped=self.num_dropped,
            until_training=left,
            training=None if self._attempt is None else self._attempt.name,
        )

    def _prune(self) -> None:
        self._versions.prune([one.version for one in self._candidates], self._settings.max_versions)
        self.store.forget_counts(self._versions.files.versions)

    @contextlib.contextmanager
    def _as_doing(self, what: str) -> Iterator[None]:
        self._doing = what
        try:
            yield
        finally:
            self._doing = "serves"

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    def close(self) -> None:
        """Close the files. Called when no call runs."""
        self.store.close()
        self._lock.close()
