"""One training: where it is, which records come next, and its files."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vlora.errors import BadConfig, BadPlan
from vlora.run_folder import lock_folder, remove, remove_unfinished, whole, write_whole
from vlora.training.adapter import LoraSettings, TrainableLora, read_start
from vlora.training.micro_step import Loss
from vlora.training.records import MAX_NAMED, Phase, Progress, Record, RecordOrder, Records, too_many
from vlora.types import TrainingStatus
from vlora.types.training import MAX_LOSSES, TrainingState

if TYPE_CHECKING:
    from vlora.training.plan import TrainingPlan

log = logging.getLogger(__name__)

_FORMAT = 2
MAX_TRIES = 3
"""Ends of a process in the first micro-step of a training that it began or continued. The next one fails it."""
_SET_ASIDE = "training %s: a record is set aside: %s"
_MAX_LOGGED = 100  # records that cannot be used, of a training; all are counted


class TrainingJob:
    """A training with its folder, which has a checkpoint while it runs, and `training.json` and the adapter at its end.

    Attributes:
        state: See `TrainingStatus`.
        adapter: None before the first micro-step.
    """

    def __init__(self, plan: TrainingPlan, records: Records, folder: Path, model: str = "") -> None:
        """Lock the folder, if no other process has, and read its files.

        Raises:
            BadPlan: The folder has a training with other settings, data or base model, or an adapter of another
                origin; or `start` cannot be used.
        """
        self.plan = plan
        self.records = records
        self.folder = folder
        self.state: TrainingState = "running"
        self.error: str | None = None
        self.progress = Progress()
        self.adapter: TrainableLora | None = None
        self._start = None if plan.start is None else read_start(plan.start, self.settings, self.name)
        self._model = model
        self._fingerprint = _fingerprint(plan, records, None if self._start is None else self._start.digest)
        self._restored: dict[str, Any] | None = None  # of the checkpoint's adapter, until it is used
        self._last: dict[str, Any] | None = None  # state of the adapter after the last micro-step
        self._saved = Progress()  # that of the checkpoint, for `reopen`
        self._has_tried = self._is_saved = False  # in this process
        self._lock = contextlib.ExitStack()
        self._not_locked: BadConfig | None = None
        try:
            self._lock.enter_context(lock_folder(folder))
        except BadConfig as error:
            self._not_locked = error
        try:
            self._read_files()
        except BaseException:
            self.release()
            raise
        self._order = self._new_order()
        self._skip_empty()
        for reason in records.bad if self.is_new else ():
            log.warning(_SET_ASIDE, self.name, reason)

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def adapter_folder(self) -> Path:
        """Of the result, in PEFT's format."""
        return self.folder / "adapter"

    @property
    def settings(self) -> LoraSettings:
        own = {field.name: getattr(self.plan, field.name) for field in dataclasses.fields(LoraSettings)}
        return LoraSettings(**own)

    @property
    def is_new(self) -> bool:
        """Whether it runs and has no checkpoint yet."""
        return self.state == "running" and self._restored is None

    @property
    def learns(self) -> bool:
        """Whether the next micro-step trains; otherwise it evaluates."""
        return self.progress.phase == "train"

    def status(self) -> TrainingStatus:
        progress = self.progress
        return TrainingStatus(
            name=self.name,
            state=self.state,
            step=progress.step,
            num_steps=self.plan.steps,
            num_tokens=progress.num_tokens,
            loss=progress.losses[-1] if progress.losses else None,
            held_out_before=progress.held_out_before,
            held_out_after=progress.held_out_after,
            seconds=progress.seconds,
            path=str(self.adapter_folder) if self.state == "finished" else None,
            error=self.error,
            losses=_sampled(progress.losses),
            num_bad=self.num_bad,
            bad=(*self.records.bad, *progress.reasons)[:MAX_NAMED],
        )

    # -- records ------------------------------------------------------------------------------------------------------

    def upcoming(self, most: int) -> list[Record]:
        """Up to `most` records in the order of use, first those of the next micro-step; none across an evaluation."""
        if not self.learns:
            return self._order.held_out(self.progress.place, most)
        left = (self.plan.steps - self.progress.step) * self.plan.batch - self.progress.place
        return [self._order.record(number) for number in itertools.islice(self._usable(), min(most, left))]

    def _usable(self) -> Iterator[int]:
        """Numbers of the records that the training uses from now on."""
        progress = self.progress
        return self._order.usable(progress.step * self.plan.batch + progress.place + progress.num_passed)

    @property
    def num_left(self) -> int:
        """Records before the next optimizer step, or the end of the evaluation."""
        whole = self.plan.batch if self.learns else self._order.num_held_out
        return whole - self.progress.place

    @property
    def num_bad(self) -> int:
        """Records that cannot be used, of those seen so far."""
        return self.records.num_bad + len(self.progress.bad) + len(self.progress.bad_held_out)

    def set_aside(self, ahead: int, reason: str) -> str | None:
        """Leave out a record that cannot be used, in the training and in its evaluations.

        Args:
            ahead: Its place in `upcoming`.
            reason: With its file and line.

        Returns:
            Why the training cannot go on; None if enough records remain.
        """
        progress, records = self.progress, self.records
        if self.learns:
            progress.bad.append(self._order.set_aside(next(itertools.islice(self._usable(), ahead, None))))
        else:
            progress.bad_held_out.append(self._order.set_held_out_aside(progress.place + ahead))
        if len(progress.reasons) < MAX_NAMED:
            progress.reasons.append(reason)
        if self.num_bad <= _MAX_LOGGED:
            log.warning(_SET_ASIDE, self.name, reason)
        num_records = len(records.train) + len(records.held_out) + records.num_bad
        if too_many(self.num_bad, num_records) or not self._order.num_train:
            first = (*records.bad, *progress.reasons)[0]
            return f"{self.num_bad} of its {num_records} records cannot be used, the first one: {first}"
        if not self.learns and self.num_left == 0:
            self._end_evaluation()
        return None

    # -- progress -----------------------------------------------------------------------------------------------------

    def begin(self, adapter: TrainableLora) -> None:
        """Use an adapter with these settings, and continue from the checkpoint, if there is one."""
        self.adapter = adapter
        if self._restored is not None:
            adapter.restore(self._restored)
            self._last, self._restored = self._restored, None
        elif self._start is not None:
            if self._start.factors.keys() != adapter.factors.keys():
                raise BadPlan(f"{self.plan.start} has other layers than `targets` of training {self.name!r}")
            adapter.load(self._start.factors)

    def begin_micro_step(self) -> None:
        """Count a try, before the first micro-step of this process: it may end the process, for lack of memory.

        The next process would repeat the micro-step, and so on. The checkpoint after it ends the count.
        """
        if not self._has_tried:
            self._has_tried = True
            with contextlib.suppress(OSError):  # the checkpoint fails the training then
                self._tries.write_text(f"{self._num_tries() + 1}\n")

    def _num_tries(self) -> int:
        try:
            return int(self._tries.read_text())
        except (OSError, ValueError):
            return 0

    def rewind(self) -> None:
        """Restore the gradients before a micro-step that was abandoned."""
        if self.learns and self._last is not None:
            assert self.adapter is not None
            self.adapter.restore(self._last)

    def record(self, loss: Loss, num_records: int, num_tokens: int) -> None:
        """Count a complete micro-step of so many records and tokens.

        After the last one of an optimizer step the adapter changes.

        Raises:
            FloatingPointError: The loss, the gradient or a parameter is not finite.
        """
        progress = self.progress
        if not math.isfinite(loss.total):
            raise FloatingPointError(f"the loss is {loss.total} in step {progress.step + 1}; lower the learning rate")
        progress.num_tokens += num_tokens
        if self.learns:
            last = next(itertools.islice(self._usable(), num_records - 1, None))
            used = progress.step * self.plan.batch + progress.place + num_records
            progress.num_passed = last + 1 - used
        progress.place += num_records
        complete = self.num_left == 0
        if self.learns:
            if complete:
                self._update()
            return
        progress.total += loss.total
        progress.count += loss.num_tokens
        if complete:
            self._end_evaluation()

    def _end_evaluation(self) -> None:
        progress = self.progress
        mean = progress.total / progress.count if progress.count else None
        if progress.phase == "before":
            progress.held_out_before, progress.phase = mean, "train"
        else:
            progress.held_out_after, progress.phase = mean, "done"
        progress.place, progress.total, progress.count = 0, 0.0, 0

    def _update(self) -> None:
        progress, adapter = self.progress, self.adapter
        assert adapter is not None
        update = adapter.update()
        if not update.applied:
            raise FloatingPointError(
                f"the gradient is not finite in step {progress.step + 1} (loss {update.loss:g}); "
                "lower the learning rate, or set max_norm"
            )
        if not adapter.is_finite:  # without held-out records nothing after the last step would find it
            raise FloatingPointError(
                f"a parameter is not finite after step {progress.step + 1}; lower the learning rate"
            )
        progress.losses.append(update.loss)
        progress.step, progress.place = progress.step + 1, 0
        if progress.step == self.plan.steps:
            progress.phase = "after"
            self._skip_empty()

    def _skip_empty(self) -> None:
        """Leave evaluations without records."""
        if not self._order.num_held_out:
            following: dict[Phase, Phase] = {"before": "train", "after": "done"}
            self.progress.phase = following.get(self.progress.phase, self.progress.phase)

    # -- files --------------------------------------------------------------------------------------------------------

    @property
    def _tries(self) -> Path:
        return self.folder / "tries"

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    @property
    def _summary(self) -> Path:
        return self.folder / "training.json"

    def checkpoint(self) -> dict[str, Any]:
        """A copy of everything that `save` writes."""
        assert self.adapter is not None
        # `asdict` would copy each loss by itself, in the engine's thread.
        progress = {name: list(one) if isinstance(one, list) else one for name, one in vars(self.progress).items()}
        head = {"format": _FORMAT, "fingerprint": self._fingerprint, "model": self._model, "progress": progress}
        self._last = self.adapter.state()
        return {**head, "adapter": self._last}

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Replace the checkpoint's file as a whole. May be called in another thread."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with whole(self._checkpoint, durable=False) as part, part.open("wb") as file:
            torch.save(checkpoint, file)
        if not self._is_saved:
            self._is_saved = True
            self._tries.unlink(missing_ok=True)

    def save_adapter(self) -> None:
        """Write the adapter's folder as a whole. May be called in another thread once no micro-step runs."""
        assert self.adapter is not None
        with whole(self.adapter_folder, durable=False) as part:
            self.adapter.save(part)
            remove(self.adapter_folder)

    def end(self, state: TrainingState, error: str | None = None) -> None:
        """Write the summary. The checkpoint of a finished training is removed; others continue from theirs."""
        self.state, self.error = state, error
        self._free()
        head = {
            "format": _FORMAT,
            "fingerprint": self._fingerprint,
            "model": self._model,
            "state": state,
            "error": error,
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # In the engine's thread, with all losses: `asdict` and `indent` would take many times as long.
            text = json.dumps({**head, "progress": vars(self.progress)}) + "\n"
            write_whole(self._summary, text.encode(), durable=False)
            if state == "finished":
                self._checkpoint.unlink(missing_ok=True)
        except OSError as problem:
            self.state, self.error = "failed", error or f"cannot write {str(self.folder)!r}: {problem.strerror}"

    def reopen(self) -> None:
        """Continue a failed or cancelled training from its checkpoint."""
        if self.state in ("failed", "cancelled"):
            self._summary.unlink(missing_ok=True)
            self._tries.unlink(missing_ok=True)
            self.state, self.error, self.progress = "running", None, self._saved
            self._order = self._new_order()
            self._skip_empty()

    def check_locked(self) -> None:
        """Raises BadConfig if another process has locked the folder of a training that is not finished."""
        if self._not_locked is not None and self.state != "finished":
            raise self._not_locked

    def release(self) -> None:
        """Unlock the folder. Its files are not written from now on."""
        if self._has_tried:
            with contextlib.suppress(OSError):
                self._tries.unlink(missing_ok=True)
        self._lock.close()
        if self.state != "running":
            self._free()

    def _free(self) -> None:
        """Ended trainings are listed for long."""
        self.adapter = self._last = self._restored = self._start = None
        self.records = self.records._replace(train=(), held_out=())
        self._order = self._new_order()

    def _new_order(self) -> RecordOrder:
        return RecordOrder(self.records, self.plan.seed, self.progress.bad, self.progress.bad_held_out)

    def _read_files(self) -> None:
        try:
            if self._not_locked is None:
                remove_unfinished(self.folder)
            ended = self._summary.is_file()
            if ended:
                found = json.loads(self._summary.read_text())
                self._check(found)
                self.state, self.error = found["state"], found["error"]
                self.progress = Progress(**found["progress"])
            if self.state != "finished" and self._checkpoint.is_file():
                found = torch.load(self._checkpoint, weights_only=True)
                self._check(found)
                self._saved, self._restored = Progress(**found["progress"]), found["adapter"]
                self.progress = self.progress if ended else self._saved
            elif not ended and self.adapter_folder.exists():
                raise BadPlan(f"{self.adapter_folder} is not of training {self.name!r}; choose another folder or name")
            if self.state == "running" and self._num_tries() >= MAX_TRIES:
                self.state, self.error = (
                    "failed",
                    (
                        f"its micro-step has ended the engine's process {MAX_TRIES} times, perhaps for lack of memory; "
                        "submit it again to try once more, or use shorter records and a smaller micro_batch_tokens"
                    ),
                )
        except (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            raise BadPlan(f"{self.folder}: its training cannot be read ({why}); remove the folder") from error

    def _check(self, found: dict[str, Any]) -> None:
        if found["format"] != _FORMAT or found["fingerprint"] != self._fingerprint:
            raise BadPlan(
                f"{self.folder} has training {self.name!r} with other settings or data; "
                "remove the folder, or choose another name"
            )
        if found["model"] != self._model:
            raise BadPlan(
                f"{self.folder} has training {self.name!r} of another base model; serve that one, remove the folder, "
                "or choose another name"
            )


def _sampled(losses: list[float]) -> tuple[float, ...]:
    count = len(losses)
    if count <= MAX_LOSSES:
        return tuple(losses)
    return tuple(losses[place * count // MAX_LOSSES - 1] for place in range(1, MAX_LOSSES + 1))


def _fingerprint(plan: TrainingPlan, records: Records, start: str | None) -> str:
    fields = plan.model_dump(mode="json", exclude={"data", "start", "bad_records"})
    text = json.dumps([fields, records.digest, start], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
