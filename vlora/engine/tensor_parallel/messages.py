"""Messages between rank 0 and the other ranks, as msgpack, and what rank 0 does with the reports. No pickle.

Orders, which are names and arguments of methods of the worker, go to all ranks in one broadcast per step; reports
return over one pipe per rank: that it has loaded, that it has read an adapter, and how it ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import msgspec

from vlora.config import EngineConfig
from vlora.engine.host_resources import describe_exit
from vlora.errors import BadAdapter, EngineDead, StepFailed, VLoraError
from vlora.parallel.adapter_sharding import ShardingKind
from vlora.parallel.process_group import CollectiveFailed
from vlora.types import ErrorValue

_CAUSE_DELAY_S = 0.5  # the cause of a failed step may arrive from another rank with a delay


class AdapterFolder(msgspec.Struct, frozen=True):
    """The content of an adapter. version: hash of the content that rank 0 has read. weight: its factor of the delta."""

    key: str
    path: str
    version: str
    sharding: ShardingKind
    weight: float = 1.0


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """The only message of rank 0 over the pipe: load the model. store_file: where NCCL's ranks meet."""

    config: EngineConfig
    rank: int
    store_file: str


class ModelLoaded(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded. facts: values that must be equal on all ranks, by name."""

    facts: dict[str, str]


class AdapterRead(msgspec.Struct, frozen=True, tag=True):
    key: str
    error: ErrorValue | None = None


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The rank is about to end, with the cause. follows: the cause is the end of another rank."""

    error: ErrorValue
    follows: bool = False


Report = ModelLoaded | AdapterRead | RankFailed

encode = msgspec.msgpack.Encoder().encode
decode_orders = msgspec.msgpack.Decoder(tuple[tuple[str, msgspec.Raw], ...]).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_start = msgspec.msgpack.Decoder(StartRank).decode


@dataclasses.dataclass
class _PendingRead:
    """A read of an adapter on other ranks. missing: ranks that have not replied; error: the first one reported."""

    done: Future[None]
    missing: set[int]
    error: BadAdapter | StepFailed | None = None


class RankReports:
    """Collects the reports of the other ranks, each in a thread of its own that runs `listen`.

    The end of any rank is recorded as the cause of the replica's end; the first cause is kept.
    """

    def __init__(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """on_failure: called after the end of a rank, from the thread that listens to it."""
        self.facts: dict[int, dict[str, str]] = {}
        """Of every rank that has loaded its model: values that must be equal on all ranks, by name."""
        self.alarm, self._alarm_writer = os.pipe()
        """A file descriptor that becomes readable when a rank dies."""
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._reads: dict[str, _PendingRead] = {}  # by key
        self._cause: VLoraError | None = None
        self._expects_end = False

    def check(self) -> None:
        """Raises EngineDead if a rank is dead."""
        if self._cause is not None:
            raise EngineDead(str(self._cause))

    def cause_of(self, error: Exception) -> VLoraError:
        """The cause of an error on this rank: the error that another rank has reported, else `error`."""
        with self._changed:
            self._changed.wait_for(lambda: self._cause is not None, _CAUSE_DELAY_S)
        return self._cause or EngineDead(
            str(error) if isinstance(error, CollectiveFailed) else f"{type(error).__name__}: {error}"
        )

    def wait_until_loaded(self, num_ranks: int) -> None:
        """Wait until this many ranks have loaded their models. Raises the error of a rank that failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._cause is not None or len(self.facts) == num_ranks)
            if self._cause is not None:
                raise self._cause

    def expect_read(self, key: str, ranks: Iterable[int]) -> Future[None]:
        """A future that is done when these ranks have read an adapter; it fails with the first error of one."""
        done: Future[None] = Future()
        with self._changed:
            self._reads[key] = _PendingRead(done, set(ranks))
        return done

    def forget_read(self, key: str) -> None:
        """Ignore further reports on an adapter."""
        with self._changed:
            self._reads.pop(key, None)

    def expect_end(self) -> None:
        self._expects_end = True

    def close(self) -> None:
        """Close the alarm; no thread may listen any more."""
        os.close(self._alarm_writer)
        os.close(self.alarm)

    # -- threads ------------------------------------------------------------------------------------------------------

    def listen(self, rank: int, link: Connection, process: BaseProcess) -> None:
        """Record a rank's reports until its end."""
        failure: RankFailed | None = None
        with contextlib.suppress(EOFError, OSError):
            while True:
                try:
                    report = decode_report(link.recv_bytes())
                except msgspec.MsgspecError as problem:
                    self._fail(EngineDead(f"a report of rank {rank} cannot be read: {problem}"))
                    return
                match report:
                    case ModelLoaded(facts):
                        with self._changed:
                            self.facts[rank] = facts
                            self._changed.notify_all()
                    case AdapterRead(key, error):
                        self._record_read(rank, key, error)
                    case RankFailed() as failure:
                        pass
        process.join()
        if self._expects_end:
            return
        if failure is None:
            self._fail(EngineDead(f"rank {rank} {describe_exit(process.exitcode or 0)}"))
            return
        if failure.follows:
            with self._changed:  # the cause is another rank's error, which may arrive with a delay
                self._changed.wait_for(lambda: self._cause is not None, _CAUSE_DELAY_S)
        self._fail(failure.error.to_exception())

    def _record_read(self, rank: int, key: str, error: ErrorValue | None) -> None:
        with self._changed:
            read = self._reads.get(key)
            if read is None:
                return
            read.missing.discard(rank)
            if error is not None:
                raised = BadAdapter if error.code == BadAdapter.code else StepFailed
                read.error = read.error or raised(f"rank {rank}: {error.message}")
            if read.missing:
                return  # after a failure too: later reports would be attributed to the next attempt
            del self._reads[key]
        with contextlib.suppress(InvalidStateError):
            if read.error is None:
                read.done.set_result(None)
            else:
                read.done.set_exception(read.error)

    def _fail(self, cause: VLoraError) -> None:
        with self._changed:
            self._cause = self._cause or cause
            reads, self._reads = self._reads, {}
            self._changed.notify_all()
        for read in reads.values():
            with contextlib.suppress(InvalidStateError):
                read.done.set_exception(EngineDead(str(cause)))
        with contextlib.suppress(OSError):
            os.write(self._alarm_writer, b"!")
        self._on_failure()
