"""The actor of a replica, which holds the replica's process. Both end together.

Ray pickles this class by its name, and of its arguments only bytes. The process loads no torch, and no event loop:
with uvloop installed, Ray runs asynchronous actors on it, which the lines of this project do not support.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from vlora.cluster.framing import pack
from vlora.cluster.on_ray.log_pipe import open_pipe
from vlora.cluster.replica import ReplicaSettings
from vlora.config import EngineConfig
from vlora.types import ErrorValue

_THREADS_VARIABLE = "OMP_NUM_THREADS"


class ActorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a replica on this machine.

    Attributes:
        secret_file: Has the secret of the doors, which is not passed through Ray.
        log_pipe: The named pipe of the log.
        command: Starts the engine process.
        omp_threads: OMP_NUM_THREADS of the engine; None: not set. Ray sets it to 1 for its workers.
    """

    config: EngineConfig
    secret_file: str
    log_pipe: str
    command: tuple[str, ...]
    omp_threads: str | None = None


class Opened(msgspec.Struct, frozen=True, tag=True):
    """A replica serves. pid: of the actor."""

    host: str
    port: int
    pid: int
    engine_pid: int


class NotOpened(msgspec.Struct, frozen=True, tag=True):
    """A replica's process has ended before it served."""

    error: ErrorValue


class ReplicaActor:
    """Holds one replica's process. settings: an `ActorSettings` as msgpack."""

    def __init__(self, settings: bytes) -> None:
        self._settings = msgspec.msgpack.decode(settings, type=ActorSettings)
        self._opening = threading.Lock()
        self._opened: Opened | None = None

    def open(self) -> bytes:
        """Start the process with the first call. Returns an `Opened` or a `NotOpened` as msgpack."""
        with self._opening:
            if self._opened is not None:
                return msgspec.msgpack.encode(self._opened)
            found = self._start()
            if isinstance(found, Opened):
                self._opened = found
            return msgspec.msgpack.encode(found)

    def watch(self, timeout_s: float) -> None:
        """Return after a time. The call fails earlier if the actor ends."""
        threading.Event().wait(timeout_s)

    def _start(self) -> Opened | NotOpened:
        environ = {name: value for name, value in os.environ.items() if name != _THREADS_VARIABLE}
        if self._settings.omp_threads is not None:
            environ[_THREADS_VARIABLE] = self._settings.omp_threads
        log = open_pipe(self._settings.log_pipe)
        process = subprocess.Popen(
            [sys.executable, "-m", "vlora.cluster.replica"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environ,
        )
        if log is not None:
            os.close(log)
        assert process.stdin is not None and process.stdout is not None
        settings = ReplicaSettings(
            config=self._settings.config,
            secret=Path(self._settings.secret_file).read_bytes(),
            command=self._settings.command,
        )
        process.stdin.write(pack(settings))
        process.stdin.flush()
        line = process.stdout.readline()
        if line.startswith(b"{"):
            process.wait()
            return NotOpened(msgspec.json.decode(line, type=ErrorValue))
        words = line.split()
        if len(words) != 2:
            code = process.wait()
            return NotOpened(ErrorValue("engine_dead", f"the replica's process ended with code {code} while starting"))
        threading.Thread(target=self._share_fate, args=(process,), daemon=True).start()
        return Opened(settings.host, int(words[0]), os.getpid(), int(words[1]))

    def _share_fate(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        os._exit(1)  # Ray starts the actor again
