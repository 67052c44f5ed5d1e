"""Threads of an engine process: their thread pools and current devices. Only the thread of the steps has a pool.

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


def launch_on(device: torch.device) -> None:
    """Make a GPU with a number the calling thread's current device; other devices change nothing.

    CUDA keeps the current device per thread, and new threads start with the first one. Triton and the compiled kernels
    launch on the current device, wherever their arguments are.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def background_executor(name: str, *, patient: bool = False, device: torch.device | None = None) -> ThreadPoolExecutor:
    """An executor with one background thread, without a pool for parallel computation.

    Args:
        name: The thread's name.
        patient: Run at the lowest priority (on Linux), for work that no request waits for.
        device: The thread's current device, if it is a GPU with a number.
    """
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_start_background, initargs=(patient, device))


def _start_background(patient: bool, device: torch.device | None) -> None:
    compute_alone()
    if device is not None:
        launch_on(device)
    if patient and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)  # this thread only


def _set_own(num_threads: int) -> None:
    # A thread's first query copies the shared number into the thread; a later first query would undo the setting.
    torch.get_num_threads()
    torch.set_num_threads(num_threads)
