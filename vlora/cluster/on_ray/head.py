"""The process that runs Ray's head, and ends all that belongs to it and nothing else.

Run as `python -m vlora.cluster.on_ray.head`, with a `HeadSettings` on stdin (`framing`). It writes a `HeadReport` to
stdout, and ends Ray when stdin ends; if Ray ends, so does this process. `ray stop` is never used: it ends every Ray of
the machine. Processes of this run are found by the path of their token, which is unique.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from typing import IO

import psutil

from vlora.cluster import framing
from vlora.cluster.on_ray import settings as ray_settings
from vlora.cluster.on_ray.reports import HeadReport, HeadSettings
from vlora.cluster.on_ray.settings import Folder

_STARTED = "Ray runtime started"
_START_S = 60.0
_STOP_S = 5.0


def own_processes(folder: Folder) -> list[psutil.Process]:
    """The processes of a run: Ray's, keepers, actors, replicas, engines. Without the calling one."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(ray_settings.TOKEN_PATH_VARIABLE) == folder.token_file
        except (psutil.Error, OSError):
            continue  # of another user, or ended
        if marked and process.pid != os.getpid():
            found.append(process)
    return found


def end_processes(folder: Folder) -> None:
    """End what is left of a run."""
    for process in (left := own_processes(folder)):
        _send(process, "terminate")
    _, left = psutil.wait_procs(left, timeout=1.0)
    for process in (left := own_processes(folder)):
        _send(process, "kill")
    psutil.wait_procs(left, timeout=1.0)


def _send(process: psutil.Process, action: str) -> None:
    with contextlib.suppress(psutil.Error):  # it has ended
        getattr(process, action)()


def wait_started(output: IO[str], lines: deque[str]) -> bool:
    """Read Ray's messages until it has started. False: it has ended."""
    for line in output:
        if line.strip():
            lines.append(line.strip())
        if _STARTED in line:
            return True
    return False


def main() -> None:
    settings = framing.read(sys.stdin.buffer, HeadSettings)
    end_processes(settings.folder)  # of a head that was killed
    environ = ray_settings.environment(settings.folder, os.environ)
    ray = subprocess.Popen(
        ray_settings.start_command(settings.folder, settings.ports),
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    closed = threading.Event()
    threading.Thread(target=_wait_closed, args=(closed,), daemon=True).start()
    threading.Thread(target=_report, args=(ray,), daemon=True).start()
    while ray.poll() is None and not closed.is_set():
        time.sleep(0.1)
    if ray.poll() is None:
        ray.terminate()
        try:
            ray.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            ray.kill()
    end_processes(settings.folder)
    if closed.is_set():
        settings.folder.remove()
    os._exit(0 if closed.is_set() else 1)


def _wait_closed(closed: threading.Event) -> None:
    sys.stdin.buffer.read()
    closed.set()


def _report(ray: subprocess.Popen[str]) -> None:
    """Report the start, then discard Ray's messages, so that it never waits for a reader."""
    assert ray.stdout is not None
    lines: deque[str] = deque(maxlen=3)
    started = wait_started(ray.stdout, lines)
    report = HeadReport("" if started else " / ".join(lines) or f"it ended with code {ray.wait()}")
    sys.stdout.buffer.write(framing.pack(report))
    sys.stdout.buffer.flush()
    for _ in ray.stdout:
        pass


if __name__ == "__main__":
    main()
