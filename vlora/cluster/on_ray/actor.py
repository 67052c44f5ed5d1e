"""The actor of a replica: starts the replica's process, or finds it running, and ends after it.

The process outlives the actor and all of Ray: it is in a session of its own, and listens itself. The next actor
of the same name finds it by its lock.

Ray pickles this class by its name, and of its arguments only bytes. The process loads no torch, and no event loop:
with uvloop installed, Ray runs asynchronous actors on it, which the connections of this project do not support.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

from vlora.cluster import process_lock
from vlora.cluster.on_ray.log_pipe import open_pipe
from vlora.cluster.on_ray.node_settings import NodeSettings, taken_slot
from vlora.cluster.on_ray.own_processes import kill_replica
from vlora.cluster.on_ray.settings import Folder
from vlora.cluster.process_lock import RunningReplica
from vlora.cluster.replica import ReplicaSettings
from vlora.config import EngineConfig
from vlora.errors import BadConfig
from vlora.types import ErrorValue
from vlora.wire.framing import pack_value

_LOOK_S = 0.05  # between two looks for what a starting replica publishes


class ActorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a replica. On one of several machines, its `NodeSettings` has the files, the variables and the model.

    Attributes:
        secret_file: Has the secret of the replicas, which is not passed through Ray.
        command: Starts the engine process; where the first word is empty, with the Python of the machine.
        environ: Variables of the replica that differ from those of Ray's workers; None: not set.
        alone_s: The replica ends after so many seconds without a front end.
        num_gpus: Of the replica, on one of several machines.
    """

    config: EngineConfig
    name: str = ""
    secret_file: str = ""
    lock_file: str = ""
    log_pipe: str = ""
    command: tuple[str, ...]
    environ: dict[str, str | None] = {}
    alone_s: float
    num_gpus: int = 0


class Opened(msgspec.Struct, frozen=True, tag=True):
    """A replica serves.

    Attributes:
        node: The key of its machine (`NodeSettings`); empty on a Ray of one machine.
    """

    pid: int
    replica: RunningReplica
    node: str = ""


class NotOpened(msgspec.Struct, frozen=True, tag=True):
    """A replica's process has ended before it served."""

    error: ErrorValue


class ReplicaActor:
    """Follows one replica's process. settings: an `ActorSettings` as msgpack."""

    def __init__(self, settings: bytes) -> None:
        self._node = NodeSettings.read(os.environ)
        found = msgspec.msgpack.decode(settings, type=ActorSettings)
        self._settings = found if self._node is None else _on(self._node, found)
        self._opening = threading.Lock()
        self._opened: Opened | None = None
        self._starting: int | None = None  # the id of a replica's process before it serves

    def open(self) -> bytes:
        """Start or find the process with the first call. Returns an `Opened` or a `NotOpened` as msgpack."""
        with self._opening:
            if self._opened is not None:
                return msgspec.msgpack.encode(self._opened)
            try:
                found: RunningReplica | NotOpened = self._find() or self._start()
            except BadConfig as error:
                found = NotOpened(ErrorValue.of(error))
            if isinstance(found, NotOpened):
                return msgspec.msgpack.encode(found)
            threading.Thread(target=self.end_after_replica, daemon=True).start()
            self._opened = Opened(os.getpid(), found, "" if self._node is None else self._node.key)
            return msgspec.msgpack.encode(self._opened)

    def watch(self, timeout_s: float) -> None:
        """Return after a time. The call fails earlier if the actor ends."""
        threading.Event().wait(timeout_s)

    def end_replica(self) -> None:
        """Kill the replica's processes. The actor ends with them."""
        if self._opened is not None:
            self._kill(self._opened.replica.pid, self._opened.replica.engine_pid)
        elif (pid := self._starting) is not None:
            # An engine that loads a model does not notice the end of its replica.
            with contextlib.suppress(psutil.Error):
                self._kill(pid, *(each.pid for each in psutil.Process(pid).children(recursive=True)))

    def _kill(self, *pids: int) -> None:
        if self._node is not None:
            kill_replica(Folder(self._node.folder), pids)

    def _find(self) -> RunningReplica | None:
        """The replica that an earlier actor has started; None if it does not run. Waits while it starts.

        On one of several machines one of an earlier front end may run, with other settings. It is ended.
        """
        own = process_lock.digest(self._settings.config, self._settings.command)
        while not process_lock.clear(self._settings.lock_file):
            if (found := process_lock.find(self._settings.lock_file)) is not None:
                if self._node is None or found.settings == own:
                    return found
                self._kill(found.pid, found.engine_pid)
            time.sleep(_LOOK_S)
        return None

    def _start(self) -> RunningReplica | NotOpened:
        if self._node is None:
            return self._run(self._settings.environ, self._replica_settings())
        with taken_slot(self._node, self._settings.num_gpus) as slot:
            settings = msgspec.structs.replace(
                self._replica_settings(),
                host=self._node.host,
                port=slot.port,
                cert_file=self._node.cert_file,
                key_file=self._node.key_file,
            )
            return self._run(self._node.environ(slot.place, self._settings.num_gpus), settings, (slot.file,))

    def _replica_settings(self) -> ReplicaSettings:
        return ReplicaSettings(
            config=self._settings.config,
            secret=Path(self._settings.secret_file).read_bytes(),
            command=self._settings.command,
            lock_file=self._settings.lock_file,
            alone_s=self._settings.alone_s,
        )

    def _run(
        self, environ: Mapping[str, str | None], settings: ReplicaSettings, files: tuple[int, ...] = ()
    ) -> RunningReplica | NotOpened:
        """Start the process. files: descriptors that it inherits."""
        log = open_pipe(self._settings.log_pipe)
        process = subprocess.Popen(
            [sys.executable, "-m", "vlora.cluster.replica"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=_changed(environ),
            start_new_session=True,
            pass_fds=files,
        )
        self._starting = process.pid
        if log is not None:
            os.close(log)
        assert process.stdin is not None and process.stdout is not None
        with process.stdin, process.stdout:
            process.stdin.write(pack_value(settings))
            process.stdin.flush()
            line = process.stdout.readline()
        if line.startswith(b"{"):
            process.wait()
            return NotOpened(msgspec.json.decode(line, type=ErrorValue))
        if not line:
            code = process.wait()
            return NotOpened(ErrorValue("engine_dead", f"the replica's process ended with code {code} while starting"))
        found = process_lock.find(self._settings.lock_file)
        assert found is not None
        return found

    def end_after_replica(self) -> None:
        process_lock.wait_released(self._settings.lock_file)
        os._exit(1)  # Ray starts the actor again


def _changed(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's variables with changes, and without Ray's settings: a replica is none of its processes."""
    kept = {name: value for name, value in os.environ.items() if name not in changes and not name.startswith("RAY_")}
    return kept | {name: value for name, value in changes.items() if value is not None}


def _on(node: NodeSettings, settings: ActorSettings) -> ActorSettings:
    folder = Folder(node.folder)
    first, *others = settings.command
    return msgspec.structs.replace(
        settings,
        config=dataclasses.replace(settings.config, model=node.model),
        secret_file=folder.secret_file,
        lock_file=folder.lock_file(settings.name),
        log_pipe=folder.log_pipe,
        command=(first or sys.executable, *others),
    )
