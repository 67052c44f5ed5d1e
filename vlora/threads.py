"""Thread pools of an engine process: only the thread that runs the steps has one.

libgomp counts the threads of all OpenMP pools of a process. If they outnumber the cores, barriers sleep instead of
spinning, and a step of about 300 parallel regions takes 1.5 to 2 times as long while the second pool exists. A thread
creates a pool when it first computes in parallel, so every other thread is limited to one thread.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

_LOWEST_PRIORITY = 19


def compute_alone() -> None:
    """Limit the calling thread to one thread: no pool for torch, oneDNN, MKL or this project's OpenMP kernels."""
    _set_own(1)


def compute_with(num_threads: int) -> None:
    """Give the calling thread a pool of `num_threads`; threads that first compute later get none."""
    _set_own(num_threads)
    # A thread that computes for the first time takes the number that any thread set last.
    last = threading.Thread(target=_set_own, args=(1,), name="vlora-set-threads")
    last.start()
    last.join()


def background_executor(name: str, *, patient: bool = False) -> ThreadPoolExecutor:
    """An executor with one background thread, without a pool for parallel computation.

    Args:
        name: The thread's name.
        patient: Run at the lowest priority (on Linux), for work that no request waits for.
    """
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_compute_patiently if patient else compute_alone)


def _compute_patiently() -> None:
    compute_alone()
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)  # this thread only


def _set_own(num_threads: int) -> None:
    # A thread's first query copies the shared number into the thread; a later first query would undo the setting.
    torch.get_num_threads()
    torch.set_num_threads(num_threads)
