"""Every setting of Ray, with its reason. Imports no Ray."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vlora.errors import BadConfig

LOOPBACK = "127.0.0.1"
NAMESPACE = "vlora"
MIN_VERSION = (2, 52)
"""The first version with authentication by a token. Before, access to a port is enough to run code (CVE-2023-48022)."""

TOKEN_PATH_VARIABLE = "RAY_AUTH_TOKEN_PATH"
"""Its value, a path of this run only, also marks Ray's processes of this run."""

RUN_VARIABLE = "VLORA_REPLICAS_OF"
"""Marks replicas and engines with the folder of their run. They are none of Ray's processes, and have no token."""

NODE_VARIABLE = "VLORA_CLUSTER_NODE"
"""Has the path of `Folder.node_file`."""

KEY_PREFIX = "vlora-"
"""Of the names of machines that run replicas."""

THREADS_VARIABLE, GPUS_VARIABLE = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"

_ENVIRONMENT = {
    # Ray runs workers at niceness 15 by default, and an engine would inherit it.
    "RAY_worker_niceness": "0",
    # Without this, an unset mode or a token in the home directory decides.
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # By default a call without a connection, as after the end of Ray, starts another Ray.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # A node that has died or hangs is known after seconds; by default after 18 and 62 s.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "1000",
    # By default drivers and raylets end 60 s after the control service. Actors could go on serving.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    # By default a worker that is ended kills its child processes: a replica outlives its actor.
    "RAY_kill_child_processes_on_worker_exit": "false",
    # Ray's own guard would end a small actor, and with it an engine, because other programs use the memory.
    "RAY_memory_monitor_refresh_ms": "0",
}
_HEAD_PORTS = ("port", "dashboard-port")
OBJECT_STORE_BYTES = 80 << 20  # near Ray's minimum: nothing is stored there
_MAX_FOLDER_CHARS = 36  # Ray's part has some 70 characters, and a path of a Unix socket has at most 107
_TOKEN_BYTES = 32


def check_ray(what: str) -> None:
    """Check that Ray is installed and has authentication. Does not import it.

    Raises:
        BadConfig: It is missing, or too old.
    """
    if importlib.util.find_spec("ray") is None:
        raise BadConfig(f"{what} needs Ray: pip install 'vlora[cluster]'; without it one engine serves")
    check_version(importlib.metadata.version("ray"))


def check_version(version: str) -> None:
    """Raises BadConfig for a version of Ray without authentication."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < MIN_VERSION:
        needed = ".".join(map(str, MIN_VERSION))
        raise BadConfig(
            f"Ray {version} is installed, which has no authentication: access to a port is enough to run code; "
            f"{needed} or later is needed: pip install -U 'vlora[cluster]'"
        )


class Resources(NamedTuple):
    cpus: int
    gpus: int

    def __str__(self) -> str:
        cpus = f"{self.cpus} CPU{'s' * (self.cpus != 1)}"
        return f"{cpus} and {self.gpus} GPU{'s' * (self.gpus != 1)}" if self.gpus else cpus


class Ports(NamedTuple):
    """The ports on which Ray listens. Each is fixed, so that a firewall can name them.

    Ray listens on all addresses of the machine, whatever address it is given.
    """

    first: int
    num_replicas: int

    @property
    def control(self) -> int:
        """Of the control service, to which drivers connect."""
        return self.first

    @property
    def first_worker(self) -> int:
        return self.first + 10

    @property
    def last(self) -> int:
        """The last one. A worker process has a port: idle ones, drivers, and actors with their successors."""
        return self.first_worker + 15 + 4 * self.num_replicas

    def flags(self, *, head: bool = True) -> list[str]:
        """The options of `ray start`. head: with the control service."""
        names = (
            "port",
            "node-manager-port",
            "object-manager-port",
            "dashboard-agent-grpc-port",
            "dashboard-agent-listen-port",
            "runtime-env-agent-port",
            "metrics-export-port",
            "dashboard-port",
        )
        named = [(name, self.first + place) for place, name in enumerate(names)]
        # Ray Client's server, which starts by default where grpc is installed, and has no flag elsewhere.
        without_client = ["--ray-client-server-port=0"] if importlib.util.find_spec("grpc") and head else []
        return [
            *(f"--{name}={port}" for name, port in named if head or name not in _HEAD_PORTS),
            f"--min-worker-port={self.first_worker}",
            f"--max-worker-port={self.last}",
            *without_client,
        ]

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


def find_ports(num_replicas: int) -> Ports:
    """A free range, below the ports that systems give to connections. Raises BadConfig if there is none."""
    size = Ports(0, num_replicas).last + 1
    for first in range(20_000, 32_000 - size, -(-size // 100) * 100):
        ports = Ports(first, num_replicas)
        if all(map(is_free, range(first, ports.last + 1))):
            return ports
    raise BadConfig(f"no {size} adjacent ports between 20000 and 32000 are free for Ray; end other programs there")


def is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("", port)):
        return True
    return False


def write_private(path: str, content: str) -> None:
    """Write a new file that only this user can read. Raises FileExistsError if it exists."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(content)


def is_private(folder: str | Path) -> bool:
    """Whether it is a folder that only this user can use. Raises OSError if there is none."""
    found = os.lstat(folder)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


class Folder(NamedTuple):
    """The files of one run, for this user only: two secrets, those of replicas, and Ray's sockets and logs."""

    path: str

    @classmethod
    def create(cls, token: str | None = None, secret: str | None = None) -> Folder:
        """With these secrets, or new ones. Ray's own default would be a world-readable token in the home directory."""
        parent = tempfile.gettempdir()
        if len(parent) > _MAX_FOLDER_CHARS - len("/vlora-ray-12345678"):
            parent = "/tmp"
        self = cls(tempfile.mkdtemp(prefix="vlora-ray-", dir=parent))
        for file, content in ((self.token_file, token), (self.secret_file, secret)):
            write_private(file, secrets.token_hex(_TOKEN_BYTES) if content is None else content)
        return self

    @property
    def token_file(self) -> str:
        return f"{self.path}/token"

    @property
    def secret_file(self) -> str:
        return f"{self.path}/secret"

    def lock_file(self, name: str) -> str:
        return f"{self.path}/{name}"

    @property
    def ray_folder(self) -> str:
        """Ray's sockets and logs. Ray makes it, and lets all users write to it, which this folder prevents."""
        return f"{self.path}/ray"

    @property
    def ray_log(self) -> str:
        return f"{self.path}/driver.log"

    @property
    def log_pipe(self) -> str:
        return f"{self.path}/log"

    @property
    def last_address(self) -> str:
        """Written by Ray: the address of the control service. Ray does not start one there again while any process of
        this machine uses the former one, as the Ray of a front end does.
        """
        return f"{self.ray_folder}/ray_current_cluster"

    def secret(self) -> bytes:
        return Path(self.secret_file).read_bytes()

    @property
    def node_file(self) -> str:
        """See `node`, on one of several machines."""
        return f"{self.path}/node"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def environment(folder: Folder, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of Ray's processes. Settings of another Ray, such as its address and token, are left out."""
    own = {name: value for name, value in environ.items() if not name.startswith("RAY_")}
    return {**own, **_ENVIRONMENT, TOKEN_PATH_VARIABLE: folder.token_file}


def node_environment(folder: Folder, environ: Mapping[str, str]) -> dict[str, str]:
    """As `environment`, on one of several machines: Ray requires a certificate of the cluster of both ends."""
    return {
        **environment(folder, environ),
        NODE_VARIABLE: folder.node_file,
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": f"{folder.path}/cert.pem",
        "RAY_TLS_SERVER_KEY": f"{folder.path}/key.pem",
        "RAY_TLS_CA_CERT": f"{folder.path}/ca.pem",
    }


def replica_environment(
    folder: Folder, environ: Mapping[str, str], *, place: int, num_gpus: int
) -> dict[str, str | None]:
    """The variables of a replica that differ from those of Ray's workers; None: not set.

    Ray gives its workers one thread and the GPUs that are free. But replicas outlive it, and a later Ray does not know
    which GPUs they have, so each has fixed ones.
    """
    gpus = environ.get(GPUS_VARIABLE)
    if num_gpus:
        first = place * num_gpus
        every = map(str, range(first + num_gpus)) if gpus is None else gpus.split(",")
        gpus = ",".join(list(every)[first : first + num_gpus])
    return {THREADS_VARIABLE: environ.get(THREADS_VARIABLE), GPUS_VARIABLE: gpus, RUN_VARIABLE: folder.path}


def start_command(
    folder: Folder,
    ports: Ports,
    *,
    host: str = LOOPBACK,
    name: str | None = None,
    resources: Resources | None = None,
    control: str | None = None,
) -> list[str]:
    """Runs Ray until it is ended.

    Args:
        host: The address at which other machines reach this one.
        name: Of the machine in Ray.
        resources: None: each replica counts as one CPU, so that all find a place, and Ray finds the GPUs.
        control: The control service; None starts it here.
    """
    cpus = ports.num_replicas if resources is None else resources.cpus
    return [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        f"--node-ip-address={host}",
        *([] if name is None else [f"--node-name={name}"]),
        f"--temp-dir={folder.ray_folder}",
        f"--num-cpus={cpus}",
        *([] if resources is None else [f"--num-gpus={resources.gpus}"]),
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--disable-usage-stats",
        "--include-log-monitor=false",
        # Without the autoscaler, 96 MiB.
        *(["--head", "--include-dashboard=false", "--no-monitor"] if control is None else [f"--address={control}"]),
        *ports.flags(head=control is None),
    ]


def connection(folder: Folder, control: str, host: str = LOOPBACK) -> dict[str, Any]:
    """The arguments of `ray.init`. Without an address it would join whichever Ray was started last on the machine.

    control: The address of the control service.
    """
    return {
        "address": control,
        "namespace": NAMESPACE,
        "_node_ip_address": host,
        "_temp_dir": folder.ray_folder,  # there may be several Rays on a machine
        "log_to_driver": False,  # see `log_pipe`
        "configure_logging": False,
    }


def actor_options(name: str, num_gpus: int) -> dict[str, Any]:
    """The options of a replica's actor.

    Ray ends a driver's actors with it unless they are detached. It starts an actor again wherever there is room, and
    retries no calls; the front end continues requests.
    """
    return {
        "name": name,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 1,
        "num_gpus": num_gpus,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": 16,
    }
