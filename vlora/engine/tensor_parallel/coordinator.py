"""Rank 0's side of tensor parallelism: it starts the other ranks, sends them its decisions, and detects their end.

A rank cannot continue without the others, and after a failed step the state of the other ranks is unknown. So any error
inside a step, and the end of any rank, ends the replica with `EngineDead` and the cause.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import torch

from vlora.config import EngineConfig
from vlora.engine.exit_status import how_it_ended
from vlora.engine.tensor_parallel import messages, worker
from vlora.errors import BadConfig, EngineDead, StepFailed, VLoraError
from vlora.lora import Registration
from vlora.memory.arena import Arena
from vlora.memory.books import Run
from vlora.models.grammar import Cursor
from vlora.models.loading import device_of
from vlora.models.runner import ModelRunner
from vlora.parallel import Group, RanksApart, connect
from vlora.types import Batch, ErrorValue, Request, StepResult

_LAST_WORDS_S = 0.5  # the cause of a failed step may arrive from another rank with a delay
_STOP_S = 2.0


def fork_server() -> ForkServerContext:
    """The context that creates rank processes.

    They are forked from a process that has imported everything, so they start at once and share its memory.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([worker.__name__])
    return context


class Team:
    """The other ranks of this process's replica. Also the adapter pool's `OtherRanks`.

    Threads listen to the ranks; all methods are for the engine's thread.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start the other ranks; they load their models while this process loads its own."""
        self._store_file = _store_file(config)
        atexit.register(self.close)  # multiprocessing would wait for ranks that were not asked to end
        self._size = config.tensor_parallel
        self._heard = threading.Condition()
        self._facts: dict[int, dict[str, str]] = {}
        self._awaited: dict[str, _Bringing] = {}
        self._loss: VLoraError | None = None
        self._closing = False
        self._alarm, self._bell = os.pipe()
        self._ends = connect(self._size)
        self._members: list[_Member] = []
        self._pending: list[messages.Order] = []
        self._group: Group | None = None
        self._registration_of: Callable[[str], Registration] | None = None
        try:
            for rank in range(1, self._size):
                self._members.append(self._start(config, rank))
        except BaseException:
            self.close()
            raise

    def _start(self, config: EngineConfig, rank: int) -> _Member:
        here, there = Pipe()
        arguments = (there, self._ends[rank])
        process = fork_server().Process(target=worker.main, args=arguments, name=f"vlora-rank-{rank}", daemon=True)
        try:
            process.start()
        except BaseException:
            here.close()
            raise
        finally:
            there.close()
            for end in self._ends[rank].values():
                end.close()  # so that the rank's own copy is the last one and closes with it
        with contextlib.suppress(OSError):  # the listening thread detects a dead rank
            here.send_bytes(messages.encode(messages.Start(config, rank, self._store_file)))
        thread = threading.Thread(target=self._listen, args=(rank, here, process), name=process.name, daemon=True)
        member = _Member(here, process, thread)
        try:
            thread.start()
        except BaseException:
            member.end()
            raise
        return member

    def meet(self, facts: Mapping[str, str], device: torch.device) -> Group:
        """Wait until all ranks have loaded, and connect them.

        Raises BadConfig for ranks that do not match, or the error of a rank that failed.
        """
        with self._heard:
            self._heard.wait_for(lambda: self._loss is not None or len(self._facts) == self._size - 1)
            if self._loss is not None:
                raise self._loss
        for rank, others in sorted(self._facts.items()):
            for name, value in facts.items():
                if others.get(name) != value:
                    raise BadConfig(
                        f"rank {rank} has {name} {others.get(name)} and rank 0 has {value}; all ranks must match"
                    )
        self._group = Group(0, self._ends[0], device, self._store_file)
        return self._group

    def begin(self, runner: ModelRunner) -> LeadRunner:
        """Wait until memory is laid out on all ranks. runner: that of this rank."""
        assert self._group is not None
        self._group.wait_for_all()
        return LeadRunner(self, runner)

    @property
    def alarm(self) -> int:
        """A file descriptor that becomes readable when a rank dies."""
        return self._alarm

    def check(self) -> None:
        """Raises EngineDead if a rank is dead."""
        if self._loss is not None:
            raise EngineDead(str(self._loss))

    def why(self, error: Exception) -> VLoraError:
        """The cause of an error on this rank: the error that another rank has reported, else `error`."""
        with self._heard:
            self._heard.wait_for(lambda: self._loss is not None, _LAST_WORDS_S)
        return self._loss or EngineDead(
            str(error) if isinstance(error, RanksApart) else f"{type(error).__name__}: {error}"
        )

    def close(self) -> None:
        """End all ranks."""
        atexit.unregister(self.close)
        self._closing = True
        for member in self._members:
            member.tell_to_end()
        for member in self._members:
            member.end()
        if self._group is not None:
            self._group.close()
        for ends in self._ends:
            for end in ends.values():
                end.close()
        if self._store_file:
            Path(self._store_file).unlink(missing_ok=True)
        os.close(self._bell)
        os.close(self._alarm)

    # -- orders -------------------------------------------------------------------------------------------------------

    def tell(self, order: messages.Order) -> None:
        """Queue an order for the next step."""
        self._pending.append(order)

    def run(self, batch: Batch) -> None:
        """Have the other ranks run a step in parallel with this one."""
        self._pending.append(messages.Run(batch))
        self._send()

    def bringing(self, registration_of: Callable[[str], Registration]) -> Team:
        """registration_of: the registration of a key to load."""
        self._registration_of = registration_of
        return self

    def bring(self, key: str, run: Run) -> Future[None]:
        """See OtherRanks. Sent at once, because reading takes time."""
        assert self._registration_of is not None
        registration = self._registration_of(key)
        assert registration.adapter is not None
        brought: Future[None] = Future()
        with self._heard:
            self._awaited[key] = _Bringing(brought, set(range(1, self._size)))
        path, version = str(registration.header.path), registration.adapter.version
        self._pending.append(messages.Bring(key, path, version, registration.way, run.first_page, run.num_pages))
        self._send()
        return brought

    def copying(self, arena: Arena) -> Callable[[int, int, int], None]:
        """`arena.copy` on all ranks."""

        def copy(first_page: int, target: int, num_pages: int) -> None:
            arena.copy(first_page, target, num_pages)
            self.tell(messages.Copy(first_page, target, num_pages))

        return copy

    def move(self, key: str, run: Run) -> None:
        """See OtherRanks."""
        self.tell(messages.Move(key, run.first_page, run.num_pages))

    def drop(self, key: str) -> None:
        """See OtherRanks."""
        with self._heard:
            self._awaited.pop(key, None)
        self.tell(messages.Drop(key))

    def pack(self, keys: tuple[str, ...], run: Run) -> None:
        """See OtherRanks. They use the copies from the next step on; until then they compute the same without them."""
        self.tell(messages.Pack(keys, run.first_page, run.num_pages))

    def unpack(self) -> None:
        """See OtherRanks."""
        self.tell(messages.Unpack())

    def _send(self) -> None:
        self.check()
        assert self._group is not None
        pending, self._pending = self._pending, []
        try:
            self._group.send(messages.encode(pending))
        except RuntimeError as error:
            raise EngineDead(str(self.why(error))) from error

    # -- threads ------------------------------------------------------------------------------------------------------

    def _listen(self, rank: int, link: Connection, process: BaseProcess) -> None:
        last_words: messages.Failed | None = None
        with contextlib.suppress(EOFError, OSError):
            while True:
                match messages.decode_word(link.recv_bytes()):
                    case messages.Loaded(facts):
                        with self._heard:
                            self._facts[rank] = facts
                            self._heard.notify_all()
                    case messages.Brought(key, error):
                        self._brought(rank, key, error)
                    case messages.Failed() as last_words:
                        pass
        process.join()
        if self._closing:
            return
        if last_words is None:
            self._lost(EngineDead(f"rank {rank} {how_it_ended(process.exitcode or 0)}"))
            return
        if last_words.follows:
            with self._heard:  # the cause is that rank's error, which may arrive with a delay
                self._heard.wait_for(lambda: self._loss is not None, _LAST_WORDS_S)
        self._lost(last_words.error.to_exception())

    def _brought(self, rank: int, key: str, error: ErrorValue | None) -> None:
        with self._heard:
            bringing = self._awaited.get(key)
            if bringing is None:
                return
            bringing.missing.discard(rank)
            if error is not None:
                bringing.error = bringing.error or StepFailed(f"rank {rank}: {error.message}")
            if bringing.missing:
                return  # after a failure too: later replies would be attributed to the next attempt
            del self._awaited[key]
        with contextlib.suppress(InvalidStateError):
            if bringing.error is None:
                bringing.brought.set_result(None)
            else:
                bringing.brought.set_exception(bringing.error)

    def _lost(self, loss: VLoraError) -> None:
        with self._heard:
            self._loss = self._loss or loss
            awaited, self._awaited = self._awaited, {}
            self._heard.notify_all()
        for bringing in awaited.values():
            with contextlib.suppress(InvalidStateError):
                bringing.brought.set_exception(EngineDead(str(loss)))
        with contextlib.suppress(OSError):
            os.write(self._bell, b"!")
        if self._group is not None:
            self._group.abort()


def _store_file(config: EngineConfig) -> str:
    """An empty private file in which NCCL's ranks meet; "" on a CPU. Raises BadConfig if there is no such device."""
    if device_of(config, 0).type != "cuda":
        return ""
    descriptor, path = tempfile.mkstemp(prefix="vlora-nccl-")
    os.close(descriptor)
    return path


class _Member(NamedTuple):
    """Another rank: its process, the pipe to it, and the thread that listens on the pipe."""

    link: Connection
    process: BaseProcess
    thread: threading.Thread

    def tell_to_end(self) -> None:
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


@dataclasses.dataclass
class _Bringing:
    """A load of an adapter on other ranks. missing: ranks that have not replied; error: the first one reported."""

    brought: Future[None]
    missing: set[int]
    error: StepFailed | None = None


class LeadRunner:
    """Rank 0's `ModelRunner`, which forwards all calls to the other ranks.

    A request is sent with the first step that computes its tokens or encodes its images: under overload many requests
    never run, and images are sent once.
    """

    def __init__(self, team: Team, runner: ModelRunner) -> None:
        self._team = team
        self._runner = runner
        self._new: dict[str, messages.Add] = {}
        self._told: set[str] = set()

    def add(self, request: Request, vision_key: str | None) -> None:
        self._runner.add(request, vision_key)
        self._new[request.request_id] = messages.Add(request, vision_key)

    def begin_grammar(self, request_id: str, cursor: Cursor) -> None:
        self._runner.begin_grammar(request_id, cursor)  # only the sampling rank needs it

    def release(self, request_id: str) -> None:
        self._runner.release(request_id)
        self._new.pop(request_id, None)
        if request_id in self._told:
            self._told.remove(request_id)
            self._team.tell(messages.Release(request_id))

    def run(self, batch: Batch) -> StepResult:
        """Run one step on all ranks. Raises EngineDead for any error in it."""
        encoded = () if batch.encode is None else batch.encode.items
        for request_id in (*(item.request_id for item in batch.items), *(request_id for request_id, _ in encoded)):
            if (new := self._new.pop(request_id, None)) is not None:
                self._told.add(request_id)
                self._team.tell(new)
        self._team.run(batch)
        try:
            result = self._runner.run(batch)
        except (StepFailed, RuntimeError) as error:
            raise EngineDead(str(self._team.why(error))) from error
        self._team.check()  # aborted collectives return as well
        self._team.tell(messages.Sampled(result.tokens))
        return result
