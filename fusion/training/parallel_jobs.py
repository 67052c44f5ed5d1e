"""Work that leaves its results on disk, several jobs at a time: in forks, which share this process's memory as it is,
the frozen base above all."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pickle import UnpicklingError
from typing import Protocol

import torch

from fusion.progress.progress import Event

Job = Callable[[], object]
Ahead = Callable[[Sequence[Job]], None]
"""Has jobs done that are sure to be asked for, or does nothing: whoever asks later finds what was made."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STOP = (signal.SIGINT, signal.SIGTERM)


class Watcher(Protocol):
    """Progress of jobs, which is made in forks and shown here (`fusion.progress.progress.Progress`)."""

    def forward(self, send: Callable[[Event], None]) -> None:
        """Send what happens instead of showing it. Called in each fork before its job."""

    def receive(self, fork: Hashable, event: Event | None) -> None:
        """Show what a fork sent; None when it has ended."""


def side_by_side(jobs: Sequence[Job], at_once: int, watcher: Watcher) -> None:
    """Run jobs in forks of one thread each, `at_once` at a time. What a job returns or raises is lost: who needs it
    asks again here, which is quick where it was done, and raises where it cannot be.

    For CPUs only: CUDA does not live through a fork.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(jobs))
    running: dict[Connection, BaseProcess] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                receiving, sending = context.Pipe(duplex=False)
                with _signals_blocked():  # until the fork has its own handlers
                    args = (waiting.pop(), watcher, sending, os.getpid())
                    running[receiving] = process = context.Process(target=_run, args=args, daemon=True)
                    process.start()
                sending.close()  # the fork's own end is the only one, and closes with it
            ready = wait(list(running))
            for fork in [fork for fork in running if fork in ready]:
                try:
                    watcher.receive(fork, fork.recv())
                except (EOFError, OSError, UnpicklingError):  # it has ended, perhaps in the middle of an event
                    watcher.receive(fork, None)
                    running.pop(fork).join()
                    fork.close()
    except BaseException:
        for left in running.values():  # before an interrupted run counts what is kept
            left.kill()
            left.join()
        raise


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as forks do, so that it makes no difference which process computes what."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(job: Job, watcher: Watcher, events: Connection, parent: int) -> None:
    # With a parent that is killed, too: the run is resumed, and its folder is held as long as a fork lives.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    # A terminal sends an interrupt to forks, too; the parent ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)
    # Bars replace these by what takes a lock, which a thread of the parent may have held at the fork.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    torch.set_num_threads(1)
    watcher.forward(events.send)
    with contextlib.suppress(Exception):  # the parent meets it again
        job()
