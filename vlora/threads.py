"""Which threads of an engine process compute in parallel: the one that runs the steps, and no other.

libgomp counts the threads of all OpenMP pools of a process. Once they outnumber the cores, barriers sleep instead of
spinning, and a step of some 300 parallel regions takes 1.5 to 2 times as long for as long as the second pool lives. A
pool belongs to the thread that first computes in parallel, so every thread but the step's is limited to itself.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

_LOWEST_PRIORITY = 19


def compute_alone() -> None:
    """Limit the calling thread to itself: no pool for torch, oneDNN, MKL or our own OpenMP kernels."""
    _set_own(1)


def compute_with(num_threads: int) -> None:
    """Give the calling thread a pool of `num_threads`; every thread that computes later gets none by itself."""
    _set_own(num_threads)
    # torch hands the number that was set last, by whichever thread, to each thread that computes for the first time.
    last = threading.Thread(target=_set_own, args=(1,), name="vlora-set-threads")
    last.start()
    last.join()


def background_executor(name: str, *, patient: bool = False) -> ThreadPoolExecutor:
    """One thread beside the steps, which computes alone.

    Args:
        name: Of the thread.
        patient: No request waits for its work, so it takes only what the steps leave of the cores (on Linux).
    """
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_compute_patiently if patient else compute_alone)


def _compute_patiently() -> None:
    compute_alone()
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)  # of this thread alone


def _set_own(num_threads: int) -> None:
    # A thread's first question makes torch copy the shared number into it; asked later, that would undo what is set.
    torch.get_num_threads()
    torch.set_num_threads(num_threads)
