"""The actor of a replica: starts the replica's process on its node, and ends it.

The process reads a pipe of which this process has the only other end. Whatever ends the actor, even SIGKILL, closes the
pipe, and the replica ends. A replica that ends, or does not start, is reported: the actor stays, so that Ray does not
start it again and again without a reason that anybody sees.

Ray loads this class by its name. The process loads no torch, and no event loop: with uvloop installed, Ray runs
asynchronous actors on it, which the connections of this project do not support.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO

import msgspec

from vlora.cluster.on_ray.reports import ActorReport, Ended, Opened
from vlora.cluster.replica import ReplicaSettings
from vlora.errors import BadConfig, EngineDead, VLoraError
from vlora.types import ErrorValue
from vlora.wire.address import Address
from vlora.wire.framing import pack_value

MAX_LINES = 1000  # of a log that no driver has read; the first ones are dropped
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
STORAGE_VARIABLES = ("RAY_REDIS_ADDRESS", "RAY_gcs_storage")


class ReplicaActor:
    """One replica at a time. Its methods may be called by several threads.

    Attributes:
        process: Of the replica; None while there is none.
    """

    def __init__(self, alone_s: float, *, host: str = "", end: Callable[[], object] | None = None) -> None:
        """Start nothing yet.

        Args:
            alone_s: The actor ends after so many seconds with neither a replica nor a driver.
            host: Other machines reach this node there; empty: as Ray says.
            end: Ends the actor for good; None: through Ray.
        """
        self._host = host or _own_address()
        self._end = end or _end_for_good
        self._changed = threading.Condition()
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._number = 0
        self._settings = b""
        self._state: Opened | Ended | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._num_watching = 0
        self._heard_s = time.monotonic()
        threading.Thread(target=self._wait_forgotten, args=(alone_s,), daemon=True).start()

    def start(self, settings: bytes) -> None:
        """Start the process, unless one runs. settings: `ReplicaSettings` as msgpack."""
        with self._changed:
            self._heard_s = time.monotonic()
            if self.process is not None:
                return
            self._set(None)
            self._settings = settings
            try:
                found = msgspec.msgpack.decode(settings, type=ReplicaSettings)
                self.process = self._started(msgspec.structs.replace(found, host=self._host))
            except (OSError, VLoraError, msgspec.MsgspecError) as error:
                why = BadConfig(
                    f"the front end's settings cannot be used on {self._host}: {error}; install one version"
                )
                self._set(Ended(ErrorValue.of(why), served=False))
                return
        for target in (self._read_log, self._follow):
            threading.Thread(target=target, args=(self.process,), daemon=True).start()

    def watch(self, number: int, timeout_s: float) -> bytes:
        """Wait until the state has another number, or the log has lines. Returns an `ActorReport` as msgpack."""
        with self._changed:
            self._num_watching += 1
            self._changed.wait_for(lambda: self._lines or self._number != number, timeout_s)
            self._num_watching -= 1
            self._heard_s = time.monotonic()
            lines = tuple(self._lines)
            self._lines.clear()
            return msgspec.msgpack.encode(ActorReport(self._number, self._state, lines))

    def settings(self) -> bytes:
        """Those of the replica that runs; empty if none does. A front end that takes over connects with its secret."""
        with self._changed:
            self._heard_s = time.monotonic()
            return b"" if self.process is None else self._settings

    def end_replica(self, pid: int) -> None:
        """Kill the replica and its engine, if this is its process. The driver starts it again."""
        with self._changed:
            if self.process is not None and self.process.pid == pid:
                _kill_group(self.process.pid)

    def about_node(self) -> tuple[str, str, float]:
        """Ray's ids of the node and of this actor, and how long the node waits for Ray's head."""
        import ray

        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_actor_id() or "", reconnect_s()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _set(self, state: Opened | Ended | None) -> None:
        self._state = state
        self._number += 1
        self._changed.notify_all()

    def _started(self, settings: ReplicaSettings) -> subprocess.Popen[bytes]:
        # Without Ray's settings, as its token: a replica is none of its processes.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "vlora.cluster.replica"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(pack_value(settings))
        process.stdin.flush()  # and it stays open
        return process

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None and process.stdin is not None
        line = process.stdout.readline()
        served, error = False, None
        if line.startswith(b"{"):
            error = msgspec.json.decode(line, type=ErrorValue)
        elif line:
            served = True
            port, engine_pid = map(int, line.split())
            with self._changed:
                self._set(
                    Opened(
                        host=self._host,
                        port=port,
                        tls=not Address(self._host, port).is_local,
                        pid=os.getpid(),
                        replica_pid=process.pid,
                        engine_pid=engine_pid,
                    )
                )
        code = process.wait()
        _kill_group(process.pid)  # an engine that hangs, or loads a model, does not notice the end of its replica
        process.stdin.close()
        process.stdout.close()
        if error is None:
            when = "" if served else " while starting"
            error = ErrorValue.of(EngineDead(f"the replica's process ended with code {code}{when}"))
        with self._changed:
            self.process = None
            self._set(Ended(error, served))

    def _read_log(self, process: subprocess.Popen[bytes]) -> None:
        log: IO[bytes] | None = process.stderr
        assert log is not None
        with log:
            for line in log:
                with self._changed:
                    self._lines.append(line.decode(errors="replace").rstrip("\n"))
                    self._changed.notify_all()

    def _wait_forgotten(self, alone_s: float) -> None:
        """End for good if there is neither a replica, which ends without a front end, nor a driver for a time."""
        while True:
            time.sleep(alone_s / 10)
            with self._changed:
                is_needed = self.process is not None or self._num_watching
                if not is_needed and time.monotonic() - self._heard_s > alone_s:
                    break
        self._end()


def keeps_state() -> bool:
    """Run on the node of Ray's head, whose environment this process has."""
    return any(os.environ.get(name, "memory") != "memory" for name in STORAGE_VARIABLES)


def reconnect_s() -> float:
    return float(os.environ.get(RECONNECT_VARIABLE, 60))


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _end_for_good() -> None:
    import ray

    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _kill_group(pid: int) -> None:
    """Kill what is left of a process that began a session, and of those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
