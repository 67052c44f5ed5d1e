"""The settings of replicas on Ray, and every setting of a Ray that a server starts, with its reason. Imports no Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vlora.cluster.adapter_store import locked
from vlora.config import EngineConfig
from vlora.engine.host_resources import default_threads
from vlora.errors import BadConfig

LOOPBACK = "127.0.0.1"
"""With this address of its node, Ray listens on no other one."""

MIN_VERSION = (2, 60)
"""The first version whose head keeps its state in a file (RocksDB). Before 2.52 access to a port is enough to run code
(CVE-2023-48022)."""

TOKEN_PATH_VARIABLE = "RAY_AUTH_TOKEN_PATH"
"""Its value, a path of this run only, also marks the processes of a Ray that a server has started."""

_ENVIRONMENT = {
    # Without this, an unset mode or a token in the home directory decides.
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # By default a call without a connection, as after the end of Ray, starts another Ray.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # The control service is started again when it ends, and goes on with this state.
    "RAY_gcs_storage": "rocksdb",
    # Ray's own guard would end a small actor, and with it an engine, because other programs use the memory.
    "RAY_memory_monitor_refresh_ms": "0",
}
OBJECT_STORE_BYTES = 80 << 20  # near Ray's minimum: nothing is stored there
_MAX_FOLDER_CHARS = 36  # Ray's part has some 70 characters, and a path of a Unix socket has at most 107
_TOKEN_BYTES = 32


def check_ray(what: str) -> None:
    """Check that Ray is installed, in a version that can be used. Does not import it. Raises BadConfig."""
    if importlib.util.find_spec("ray") is None:
        raise BadConfig(f"{what} needs Ray: pip install 'vlora[cluster]'; without it one engine serves")
    check_version(importlib.metadata.version("ray"))


def check_version(version: str) -> None:
    """Raises BadConfig for a version of Ray that is too old."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < MIN_VERSION:
        needed = ".".join(map(str, MIN_VERSION))
        raise BadConfig(f"Ray {version} is installed; {needed} or later is needed: pip install -U 'vlora[cluster]'")


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """Where replicas run, and what each needs.

    Attributes:
        address: Of the control service of the user's Ray, or "auto"; None starts a Ray on this machine.
        namespace: Of the replicas' actors. One service uses it.
        resources: Custom resources of each replica.
        labels: Those that its node must have.
        runtime_env: See Ray's documentation.
        wait_s: How long a replica may wait for a node with room while the server starts.
    """

    address: str | None = None
    namespace: str = "vlora"
    cpus: float = 1.0
    memory_gib: float = 0.0
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    placement: Literal["spread", "pack"] = "spread"
    runtime_env: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    wait_s: float = 30.0

    def need(self, num_gpus: int) -> dict[str, float]:
        """What a replica takes of its node, by Ray's names."""
        need = {"CPU": self.cpus, "GPU": float(num_gpus), "memory": self.memory_gib * 2**30, **self.resources}
        return {name: number for name, number in need.items() if number}

    def of_actor(self, num_gpus: int) -> dict[str, Any]:
        """The options of a replica's actor.

        Ray ends a driver's actors with it unless they are detached. It starts an actor again wherever there is room,
        and retries no calls; the front end continues requests.
        """
        variables = self.runtime_env.get("env_vars", {})
        return {
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": self.cpus,
            "num_gpus": num_gpus,
            "max_restarts": -1,
            "max_task_retries": 0,
            "max_concurrency": 16,
            "scheduling_strategy": "SPREAD" if self.placement == "spread" else "DEFAULT",
            # Ray runs workers at niceness 15 by default; an engine would inherit it.
            "runtime_env": {**self.runtime_env, "env_vars": {"RAY_worker_niceness": "0", **variables}},
            **({"memory": int(self.memory_gib * 2**30)} if self.memory_gib else {}),
            **({"resources": dict(self.resources)} if self.resources else {}),
            **({"label_selector": dict(self.labels)} if self.labels else {}),
        }


def with_cores(config: EngineConfig, num_replicas: int, cpus: float | None) -> EngineConfig:
    """The configuration of a replica. Without `threads`, it uses the CPUs that a Ray of the user gives it; None: the
    replicas divide the cores of this machine."""
    if config.threads is not None:
        return config
    ranks = config.tensor_parallel
    threads = default_threads(ranks * num_replicas) if cpus is None else max(1, int(cpus) // ranks)
    return dataclasses.replace(config, threads=threads)


_LOCK, _NEW_LOCK = "lock", "lock.new"
_locks: dict[str, int] = {}  # descriptors, by folder, as long as this process runs


class Folder(NamedTuple):
    """The files of one run, for this user only: the driver's log, and the token and files of a Ray that it starts."""

    path: str

    @classmethod
    def create(cls) -> Folder:
        """With a new token. Ray's own default would be a world-readable one in the home directory.

        Folders of runs of which all processes were killed are removed.
        """
        parent = tempfile.gettempdir()
        if len(parent) > _MAX_FOLDER_CHARS - len("/vlora-ray-12345678"):
            parent = "/tmp"
        for lock in Path(parent).glob(f"vlora-ray-*/{_LOCK}"):
            with contextlib.suppress(OSError):  # of another user
                if (left := locked(lock)) is not None:
                    os.close(left)
                    cls(str(lock.parent)).remove()
        self = cls(tempfile.mkdtemp(prefix="vlora-ray-", dir=parent))
        made = locked(Path(self.path, _NEW_LOCK))
        assert made is not None
        _locks[self.path] = made
        os.rename(Path(self.path, _NEW_LOCK), Path(self.path, _LOCK))  # it is locked from its beginning
        token = Path(self.token_file)
        token.touch(0o600)
        token.write_text(secrets.token_hex(_TOKEN_BYTES))
        return self

    @property
    def token_file(self) -> str:
        return f"{self.path}/token"

    @property
    def ray_folder(self) -> str:
        """Ray's sockets and logs. Ray makes it, and lets all users write to it, which this folder prevents."""
        return f"{self.path}/ray"

    @property
    def ray_state(self) -> str:
        """Of the control service."""
        return f"{self.path}/gcs"

    @property
    def driver_log(self) -> str:
        return f"{self.path}/driver.log"

    def forget_ray(self) -> None:
        """Drop the state of a Ray whose processes have all ended."""
        for path in (self.ray_folder, self.ray_state):
            shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if (lock := _locks.pop(self.path, None)) is not None:
            os.close(lock)


def environment(folder: Folder, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a Ray that a server starts. Settings of another Ray, such as its address, are left out."""
    own = {name: value for name, value in environ.items() if not name.startswith("RAY_")}
    return {**own, **_ENVIRONMENT, TOKEN_PATH_VARIABLE: folder.token_file, "RAY_gcs_storage_path": folder.ray_state}
