"""Jobs that store their results on disk, run in parallel in forks, which share this process's memory, mainly the frozen
base."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pickle import UnpicklingError

import torch

from fusion.progress import Progress

Job = Callable[[], object]
RunAhead = Callable[[Mapping[Job, Collection[str]]], None]
"""Runs jobs, with the domains of each, in advance, or does nothing; later calls find the stored results."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STOP = (signal.SIGINT, signal.SIGTERM)


def run_in_parallel(jobs: Sequence[Job], at_once: int, progress: Progress) -> None:
    """Run jobs in forks of one thread each, `at_once` at a time.

    Return values and exceptions of a job are discarded. The parent calls the job again: it finds the stored result, or
    raises the same error.

    For CPUs only: CUDA does not work after a fork.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(jobs))
    running: dict[Connection, BaseProcess] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                receiving, sending = context.Pipe(duplex=False)
                with _signals_blocked():  # until the fork has its own handlers
                    args = (waiting.pop(), progress, sending, os.getpid())
                    running[receiving] = process = context.Process(target=_run, args=args, daemon=True)
                    process.start()
                sending.close()  # leaves only the fork's end, which closes when the fork ends
            ready = wait(list(running))
            for fork in [fork for fork in running if fork in ready]:
                try:
                    progress.receive(fork, fork.recv())
                except (EOFError, OSError, UnpicklingError):  # the fork has ended, possibly within an event
                    progress.receive(fork, None)
                    running.pop(fork).join()
                    fork.close()
    except BaseException:
        for left in running.values():  # before an interrupted run counts its finished trainings
            left.kill()
            left.join()
        raise


def end_with_parent(parent: int) -> bool:
    """Let the system end this process with its parent, also one that is killed. Returns whether the parent still lives.

    A terminal also sends interrupts to this process; they are ignored, because the parent ends it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return os.getppid() == parent


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as forks do, so that results do not depend on which process computes them."""
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


def _run(job: Job, progress: Progress, events: Connection, parent: int) -> None:
    # A living fork of a killed parent would keep the run's folder locked and block a resumed run.
    if not end_with_parent(parent):
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)
    # Progress bars replace these with streams that take a lock, which a parent thread may have held at the fork.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    torch.set_num_threads(1)
    progress.forward(events.send)
    with contextlib.suppress(Exception):  # the parent raises it again
        job()
