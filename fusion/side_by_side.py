"""Work that leaves its results on disk, several jobs at a time: in forks, which share this process's memory as it is,
the frozen base above all."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import torch

Job = Callable[[], object]
Ahead = Callable[[Sequence[Job]], None]
"""Has jobs done that are sure to be asked for, or does nothing: whoever asks later finds what was made."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STOP = (signal.SIGINT, signal.SIGTERM)


def side_by_side(jobs: Sequence[Job], at_once: int, enter: Callable[[], None]) -> None:
    """Run jobs in forks of one thread each, `at_once` at a time. What a job returns or raises is lost: who needs it
    asks again here, which is quick where it was done, and raises where it cannot be.

    enter: called in each fork before its job. For CPUs only: CUDA does not live through a fork.
    """
    context = multiprocessing.get_context("fork")
    running: list[BaseProcess] = []
    try:
        for job in jobs:
            while len(running) >= at_once:
                wait([process.sentinel for process in running])
                running = [process for process in running if process.is_alive()]
            process: BaseProcess = context.Process(target=_run, args=(job, enter, os.getpid()), daemon=True)
            with _signals_blocked():  # until the fork has its own handlers
                process.start()
                running.append(process)
        for left in running:
            left.join()
    except BaseException:
        for left in running:  # before an interrupted run counts what is kept
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


def _run(job: Job, enter: Callable[[], None], parent: int) -> None:
    # With a parent that is killed, too: the run is resumed, and its folder is held as long as a fork lives.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    # A terminal sends an interrupt to forks, too; the parent ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)
    torch.set_num_threads(1)
    enter()
    with contextlib.suppress(Exception):  # the parent meets it again
        job()
