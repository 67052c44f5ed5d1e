"""Rank 0's side of tensor parallelism: it starts the other ranks, sends them its decisions, and detects their end.

A rank cannot continue without the others, and after a failed step the state of the other ranks is unknown. So any error
inside a step, and the end of any rank, ends the replica with `EngineDead` and the cause.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec

import torch

from vlora.config import EngineConfig
from vlora.engine.tensor_parallel import messages, worker
from vlora.engine.tensor_parallel.messages import RankReports
from vlora.engine.tensor_parallel.worker import TensorParallelWorker
from vlora.errors import BadConfig, EngineDead, StepFailed
from vlora.lora.peft_format import AdapterHeader
from vlora.lora.registry import Registration
from vlora.memory.arena import Arena
from vlora.memory.page_allocator import PageRun
from vlora.models.grammar import Cursor
from vlora.models.loading import device_of
from vlora.models.runner import ModelRunner
from vlora.parallel.adapter_sharding import ShardingKind
from vlora.parallel.process_group import ProcessGroup, connect
from vlora.types import Batch, Request, StepResult

log = logging.getLogger(__name__)
P = ParamSpec("P")

_STOP_S = 2.0  # how long a rank may take to end before it is killed


def fork_server() -> ForkServerContext:
    """The context that creates rank processes.

    They are forked from a process that has imported everything, so they start at once and share its memory.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([worker.__name__])
    return context


class TensorParallelCoordinator:
    """The other ranks of this process's replica. Also the adapter pool's `OtherRanks`.

    All methods are for the engine's thread.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start the other ranks; they load their models while this process loads its own."""
        self._store_file = _store_file(config)
        self.group: ProcessGroup | None = None
        self.reports = RankReports(on_failure=self._abort_collectives)
        atexit.register(self.close)  # multiprocessing would wait for ranks that were not asked to end
        self._size = config.tensor_parallel
        self._closed = False
        self._sockets = connect(self._size)
        self._ranks: list[_Rank] = []
        self._pending: list[tuple[str, tuple[object, ...]]] = []
        self._registration_of: Callable[[str], Registration] | None = None
        try:
            for rank in range(1, self._size):
                self._ranks.append(self._start(config, rank))
        except BaseException:
            self.close()
            raise

    def _start(self, config: EngineConfig, number: int) -> _Rank:
        here, there = Pipe()
        arguments = (there, self._sockets[number])
        process = fork_server().Process(target=worker.main, args=arguments, name=f"vlora-rank-{number}", daemon=True)
        try:
            process.start()
        except BaseException:
            here.close()
            raise
        finally:
            there.close()
            for end in self._sockets[number].values():
                end.close()  # so that the rank's own copy is the last one and closes with it
        with contextlib.suppress(OSError):  # the listening thread detects a dead rank
            here.send_bytes(messages.encode(messages.StartRank(config, number, self._store_file)))
        thread = threading.Thread(
            target=self.reports.listen, args=(number, here, process), name=process.name, daemon=True
        )
        rank = _Rank(here, process, thread)
        try:
            thread.start()
        except BaseException:
            rank.end()
            raise
        return rank

    def join(self, facts: Mapping[str, str], device: torch.device) -> ProcessGroup:
        """Wait until all ranks have loaded, and connect them.

        Raises BadConfig for ranks that do not match, or the error of a rank that failed.
        """
        self.reports.wait_until_loaded(self._size - 1)
        for rank, others in sorted(self.reports.facts.items()):
            for name, value in facts.items():
                if others.get(name) != value:
                    raise BadConfig(
                        f"rank {rank} has {name} {others.get(name)} and rank 0 has {value}; all ranks must match"
                    )
        self.group = ProcessGroup(0, self._sockets[0], device, self._store_file)
        return self.group

    def distribute(self, runner: ModelRunner) -> TensorParallelRunner:
        """Wait until memory is laid out on all ranks. runner: that of this rank."""
        assert self.group is not None
        self.group.wait_for_all()
        return TensorParallelRunner(self, runner)

    @contextlib.contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """End all ranks if the block fails.

        The error of a failed collective is generic; it is replaced by the one that another rank has reported.
        """
        try:
            yield
        except BaseException as error:
            cause = self.reports.cause_of(error) if isinstance(error, RuntimeError) else None
            self.close()
            if cause is not None:
                raise cause from error
            raise

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self.reports.expect_end()
        for rank in self._ranks:
            rank.request_end()
        for rank in self._ranks:
            rank.end()
        if self.group is not None:
            self.group.close()
        for ends in self._sockets:
            for end in ends.values():
                end.close()
        if self._store_file:
            Path(self._store_file).unlink(missing_ok=True)
        self.reports.close()

    # -- orders -------------------------------------------------------------------------------------------------------

    def send_later(
        self, order: Callable[Concatenate[TensorParallelWorker, P], None], *arguments: P.args, **_: P.kwargs
    ) -> None:
        """Queue a call of the other ranks' workers for the next step."""
        self._pending.append((order.__name__, arguments))

    def run(self, batch: Batch) -> None:
        """Have the other ranks run a step in parallel with this one."""
        self.send_later(TensorParallelWorker.run, batch)
        self._send()

    def copy_pages(self, arena: Arena) -> Callable[[int, int, int], None]:

        def copy(first_page: int, target: int, num_pages: int) -> None:
            arena.copy(first_page, target, num_pages)
            self.send_later(TensorParallelWorker.copy_pages, first_page, target, num_pages)

        return copy

    def forget_adapter(self, key: str) -> None:
        """No more requests for an adapter will arrive."""
        self.send_later(TensorParallelWorker.forget, key)

    def _send(self) -> None:
        self.reports.check()
        assert self.group is not None
        pending, self._pending = self._pending, []
        try:
            self.group.broadcast(messages.encode(pending))
        except RuntimeError as error:
            raise EngineDead(str(self.reports.cause_of(error))) from error

    def _abort_collectives(self) -> None:
        if self.group is not None:
            self.group.abort()

    # -- OtherRanks ---------------------------------------------------------------------------------------------------

    def use_registrations(self, registration_of: Callable[[str], Registration]) -> None:
        """registration_of: the registration of a key to load; set once, before the first load."""
        self._registration_of = registration_of

    def load(self, key: str, run: PageRun) -> Future[None]:
        """Sent at once, because reading takes time."""
        assert self._registration_of is not None
        registration = self._registration_of(key)
        done = self.reports.expect_read(key, range(1, self._size))
        folders = tuple(_folder(*part) for part in registration.parts) or (_folder(registration),)
        self.send_later(TensorParallelWorker.load, key, folders, run)
        self._send()
        return done

    def move(self, key: str, run: PageRun) -> None:
        self.send_later(TensorParallelWorker.move, key, run)

    def evict(self, key: str) -> None:
        self.reports.forget_read(key)
        self.send_later(TensorParallelWorker.evict, key)

    def pack(self, keys: tuple[str, ...], run: PageRun) -> None:
        """Ranks use the copies from the next step on; until then they compute the same without them."""
        self.send_later(TensorParallelWorker.pack, keys, run)

    def unpack(self) -> None:
        self.send_later(TensorParallelWorker.unpack)


class TensorParallelRunner:
    """Rank 0's `ModelRunner`, which forwards all calls to the other ranks.

    A request is sent with the first step that computes its tokens or encodes its images: under overload many requests
    never run, and images are sent once.
    """

    def __init__(self, coordinator: TensorParallelCoordinator, runner: ModelRunner) -> None:
        self._coordinator = coordinator
        self._runner = runner
        self._unsent: dict[str, tuple[Request, str | None]] = {}
        self._sent: set[str] = set()

    @property
    def num_requests(self) -> int:
        return len(self._unsent) + len(self._sent)

    def add(self, request: Request, vision_key: str | None) -> None:
        self._runner.add(request, vision_key)
        self._unsent[request.request_id] = request, vision_key

    def begin_grammar(self, request_id: str, cursor: Cursor) -> None:
        self._runner.begin_grammar(request_id, cursor)  # only the sampling rank needs it

    def release(self, request_id: str) -> None:
        self._runner.release(request_id)
        self._unsent.pop(request_id, None)
        if request_id in self._sent:
            self._sent.remove(request_id)
            self._coordinator.send_later(TensorParallelWorker.release, request_id)

    def run(self, batch: Batch) -> StepResult:
        """Run one step on all ranks. Raises EngineDead for any error in it."""
        encoded = () if batch.encode is None else batch.encode.items
        for request_id in (*(item.request_id for item in batch.items), *(request_id for request_id, _ in encoded)):
            if (unsent := self._unsent.pop(request_id, None)) is not None:
                self._sent.add(request_id)
                self._coordinator.send_later(TensorParallelWorker.add, *unsent)
        self._coordinator.run(batch)
        reports = self._coordinator.reports
        try:
            result = self._runner.run(batch)
        except (StepFailed, RuntimeError) as error:
            raise EngineDead(str(reports.cause_of(error))) from error
        reports.check()  # aborted collectives return as well
        self._coordinator.send_later(TensorParallelWorker.take_tokens, result.tokens)
        return result


def choose_sharding(config: EngineConfig, name: str, header: AdapterHeader) -> ShardingKind:
    """The sharding of an adapter's dense factors, by its name: as configured, and `auto` replicates them.

    Logs a block-diagonal adapter that is served dense because the ranks cut through its blocks.
    """
    dense = next((target for target in header.targets if target.cut.densified is not None), None)
    if dense is not None and dense.blocks is not None:
        log.warning(
            "adapter %r has %d blocks, which %d ranks do not divide evenly; it is served dense, including zeros",
            name,
            dense.blocks.num,
            config.tensor_parallel,
        )
    return "slora" if config.sharding_of(name) == "slora" else "replicated"


def _folder(registration: Registration, weight: float = 1.0) -> messages.AdapterFolder:
    path, version = str(registration.folder_header.path), registration.content.version
    return messages.AdapterFolder(registration.key, path, version, registration.sharding, weight)


def _store_file(config: EngineConfig) -> str:
    """An empty private file in which NCCL's ranks meet; "" on a CPU. Raises BadConfig if there is no such device."""
    if device_of(config, 0).type != "cuda":
        return ""
    descriptor, path = tempfile.mkstemp(prefix="vlora-nccl-")
    os.close(descriptor)
    return path


class _Rank(NamedTuple):
    """Another rank: its process, the pipe to it, and the thread that listens on the pipe."""

    link: Connection
    process: BaseProcess
    thread: threading.Thread

    def request_end(self) -> None:
        with contextlib.suppress(OSError):
            self.link.send_bytes(b"")  # the rank ends when the pipe becomes readable

    def end(self) -> None:
        """Wait briefly, then kill."""
        if self.thread.ident is not None:
            self.thread.join(_STOP_S)
        self.process.kill()
        if self.thread.ident is not None:
            self.thread.join()
        self.process.join()
        self.process.close()
        self.link.close()
