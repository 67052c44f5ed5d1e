"""The process that runs Ray on a machine, and ends all that belongs to it and nothing else.

Run as `python -m vlora.cluster.on_ray.head`, with a `HeadSettings` on stdin. It writes a `HeadReport` to stdout, and
ends Ray and the replicas when stdin ends, or only Ray where the settings say so. If Ray ends, so does this process, but
replicas serve on. `ray stop` is never used: it ends every Ray of the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

import psutil

from vlora.cluster.on_ray.own_processes import end_all, end_ray
from vlora.cluster.on_ray.reports import HeadReport, HeadSettings
from vlora.cluster.on_ray.settings import Folder
from vlora.wire.framing import pack_value, read_value

_STARTED = "Ray runtime started"
_SESSIONS = 3
_STOP_S = 5.0
_LOOK_S = 0.1
_PARTS = ("gcs_server", "raylet")
_PR_SET_PDEATHSIG = 1


def wait_started(output: IO[str], lines: deque[str]) -> bool:
    """Read Ray's messages until it has started. False: it has ended."""
    for line in output:
        if line.strip():
            lines.append(line.strip())
        if _STARTED in line:
            return True
    return False


def main() -> None:
    settings = read_value(sys.stdin.buffer, HeadSettings)
    end_ray(settings.folder)  # of a head that was killed
    with contextlib.suppress(FileNotFoundError):
        os.unlink(settings.folder.last_address)
    _remove_sessions(settings.folder)
    ray = subprocess.Popen(
        settings.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    closed = threading.Event()
    parts: list[psutil.Process] = []
    threading.Thread(target=_wait_closed, args=(closed,), daemon=True).start()
    threading.Thread(target=_report, args=(ray, parts), daemon=True).start()
    while ray.poll() is None and not closed.is_set() and all(map(_runs, parts)):
        time.sleep(_LOOK_S)
    if ray.poll() is None:
        ray.terminate()
        try:
            ray.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            ray.kill()
    if closed.is_set() and not settings.keeps_replicas:
        end_all(settings.folder)
        settings.folder.remove()
    else:
        end_ray(settings.folder)
    os._exit(0 if closed.is_set() else 1)


def _remove_sessions(folder: Folder) -> None:
    """Keep the logs of the latest starts of Ray only: it may be started again without end."""
    for session in sorted(Path(folder.ray_folder).glob("session_[0-9]*"))[:-_SESSIONS]:  # their names have the time
        shutil.rmtree(session, ignore_errors=True)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _wait_closed(closed: threading.Event) -> None:
    sys.stdin.buffer.read()
    closed.set()


def _report(ray: subprocess.Popen[str], parts: list[psutil.Process]) -> None:
    """Report the start, then discard Ray's messages, so that it never waits for a reader.

    Args:
        parts: Gets the processes without which Ray is of no use. `ray start --block` goes on if SIGTERM has ended one.
    """
    assert ray.stdout is not None
    lines: deque[str] = deque(maxlen=3)
    if started := wait_started(ray.stdout, lines):
        with contextlib.suppress(psutil.Error):  # it has ended since
            parts += [each for each in psutil.Process(ray.pid).children() if each.name() in _PARTS]
    report = HeadReport("" if started else " / ".join(lines) or f"it ended with code {ray.wait()}")
    sys.stdout.buffer.write(pack_value(report))
    sys.stdout.buffer.flush()
    for _ in ray.stdout:
        pass


if __name__ == "__main__":
    main()
