"""The actor of a replica: starts the replica's process, or finds it running, and ends after it.

The process outlives the actor and all of Ray: it is in a session of its own, and serves over its door. The next actor
of the same name finds it by its claim.

Ray pickles this class by its name, and of its arguments only bytes. The process loads no torch, and no event loop:
with uvloop installed, Ray runs asynchronous actors on it, which the lines of this project do not support.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from vlora.cluster import claim
from vlora.cluster.claim import RunningReplica
from vlora.cluster.framing import pack
from vlora.cluster.on_ray.log_pipe import open_pipe
from vlora.cluster.replica import ReplicaSettings
from vlora.config import EngineConfig
from vlora.types import ErrorValue

_LOOK_S = 0.05  # between two looks for what a starting replica publishes


class ActorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a replica on this machine.

    Attributes:
        secret_file: Has the secret of the doors, which is not passed through Ray.
        claim_file: See `claim`.
        log_pipe: The named pipe of the log.
        command: Starts the engine process.
        environ: Variables of the replica that differ from those of Ray's workers; None: not set.
        alone_s: The replica ends after so many seconds without a front end.
    """

    config: EngineConfig
    secret_file: str
    claim_file: str
    log_pipe: str
    command: tuple[str, ...]
    environ: dict[str, str | None]
    alone_s: float


class Opened(msgspec.Struct, frozen=True, tag=True):
    """A replica serves. pid: of the actor."""

    pid: int
    replica: RunningReplica


class NotOpened(msgspec.Struct, frozen=True, tag=True):
    """A replica's process has ended before it served."""

    error: ErrorValue


class ReplicaActor:
    """Follows one replica's process. settings: an `ActorSettings` as msgpack."""

    def __init__(self, settings: bytes) -> None:
        self._settings = msgspec.msgpack.decode(settings, type=ActorSettings)
        self._opening = threading.Lock()
        self._opened: Opened | None = None

    def open(self) -> bytes:
        """Start or find the process with the first call. Returns an `Opened` or a `NotOpened` as msgpack."""
        with self._opening:
            if self._opened is not None:
                return msgspec.msgpack.encode(self._opened)
            found = self._find() or self._start()
            if isinstance(found, NotOpened):
                return msgspec.msgpack.encode(found)
            threading.Thread(target=self._end_after_replica, daemon=True).start()
            self._opened = Opened(os.getpid(), found)
            return msgspec.msgpack.encode(self._opened)

    def watch(self, timeout_s: float) -> None:
        """Return after a time. The call fails earlier if the actor ends."""
        threading.Event().wait(timeout_s)

    def _find(self) -> RunningReplica | None:
        """The replica that an earlier actor has started; None if it does not run. Waits while it starts."""
        while not claim.clear(self._settings.claim_file):
            if (found := claim.find(self._settings.claim_file)) is not None:
                return found
            time.sleep(_LOOK_S)
        return None

    def _start(self) -> RunningReplica | NotOpened:
        log = open_pipe(self._settings.log_pipe)
        process = subprocess.Popen(
            [sys.executable, "-m", "vlora.cluster.replica"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=self._environ(),
            start_new_session=True,
        )
        if log is not None:
            os.close(log)
        settings = ReplicaSettings(
            config=self._settings.config,
            secret=Path(self._settings.secret_file).read_bytes(),
            command=self._settings.command,
            claim_file=self._settings.claim_file,
            alone_s=self._settings.alone_s,
        )
        assert process.stdin is not None and process.stdout is not None
        with process.stdin, process.stdout:
            process.stdin.write(pack(settings))
            process.stdin.flush()
            line = process.stdout.readline()
        if line.startswith(b"{"):
            process.wait()
            return NotOpened(msgspec.json.decode(line, type=ErrorValue))
        if not line:
            code = process.wait()
            return NotOpened(ErrorValue("engine_dead", f"the replica's process ended with code {code} while starting"))
        found = claim.find(self._settings.claim_file)
        assert found is not None
        return found

    def _environ(self) -> dict[str, str]:
        """Without Ray's settings: a replica is none of its processes."""
        changed = self._settings.environ
        kept = {
            name: value for name, value in os.environ.items() if name not in changed and not name.startswith("RAY_")
        }
        return kept | {name: value for name, value in changed.items() if value is not None}

    def _end_after_replica(self) -> None:
        claim.wait_released(self._settings.claim_file)
        os._exit(1)  # Ray starts the actor again
