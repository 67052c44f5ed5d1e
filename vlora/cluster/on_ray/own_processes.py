"""The processes of one run: how they are found and ended. Others on the machine, also of another Ray, are left alone.

They are found by paths of the run, which are unique, so an end of their parents hides none: in their environment, or
among their open files where Ray has overwritten the environment with a title.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

import psutil

from vlora.cluster.on_ray.settings import RUN_VARIABLE, TOKEN_PATH_VARIABLE, Folder

_EXIT_S = 1.0


def ray_processes(folder: Folder) -> list[psutil.Process]:
    """Ray's, drivers and actors. Without the calling process."""
    variable, value = TOKEN_PATH_VARIABLE, folder.token_file
    return _find(lambda process: _has_title(process, folder) or _is_marked(process, variable, value))


def replica_processes(folder: Folder) -> list[psutil.Process]:
    return _find(lambda process: _is_marked(process, RUN_VARIABLE, folder.path))


def end_ray(folder: Folder) -> None:
    _end(lambda: ray_processes(folder))


def end_all(folder: Folder) -> None:
    """End what is left of a run: Ray first, which would start replicas again."""
    end_ray(folder)
    _end(lambda: replica_processes(folder))


def kill_replica(folder: Folder, pids: Iterable[int]) -> None:
    """Kill a replica's processes, unless they have ended. Ids of other processes are ignored."""
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            if _is_marked(process, RUN_VARIABLE, folder.path):
                process.kill()


def _is_marked(process: psutil.Process, variable: str, value: str) -> bool:
    return process.environ().get(variable) == value


def _has_title(process: psutil.Process, folder: Folder) -> bool:
    """Whether it is an agent or a worker. Agents may outlive their raylet."""
    title = (process.cmdline() or [""])[0]
    return title.startswith("ray::") and any(file.path.startswith(f"{folder.path}/") for file in process.open_files())


def _find(is_own: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        # Others are of another user, or have ended.
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and is_own(process):
                found.append(process)
    return found


def _end(find: Callable[[], list[psutil.Process]]) -> None:
    if not (left := find()):
        return
    for process in left:
        _send(process, "terminate")
    psutil.wait_procs(left, timeout=_EXIT_S)
    for process in (left := find()):
        _send(process, "kill")
    psutil.wait_procs(left, timeout=_EXIT_S)


def _send(process: psutil.Process, action: str) -> None:
    with contextlib.suppress(psutil.Error):  # it has ended
        getattr(process, action)()
