"""The settings of Ray where there are several machines, beside those of `settings`. Imports no Ray.

Connections between machines are encrypted: each has a certificate of the cluster, which Ray requires of both ends.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from vlora.cluster.on_ray import settings
from vlora.cluster.on_ray.reports import Need
from vlora.cluster.on_ray.settings import NAMESPACE, OBJECT_STORE_BYTES, Folder, Ports
from vlora.cluster.on_ray.site import SITE_VARIABLE

KEY_PREFIX = "vlora-"
"""Of the names of machines that run replicas."""


class Resources(NamedTuple):
    cpus: int
    gpus: int

    def __str__(self) -> str:
        cpus = f"{self.cpus} CPU{'s' * (self.cpus != 1)}"
        return f"{cpus} and {self.gpus} GPU{'s' * (self.gpus != 1)}" if self.gpus else cpus


def environment(folder: Folder, environ: Mapping[str, str]) -> dict[str, str]:
    return {
        **settings.environment(folder, environ),
        SITE_VARIABLE: folder.site_file,
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": f"{folder.path}/cert.pem",
        "RAY_TLS_SERVER_KEY": f"{folder.path}/key.pem",
        "RAY_TLS_CA_CERT": f"{folder.path}/ca.pem",
    }


def start_command(
    folder: Folder, ports: Ports, host: str, name: str, resources: Resources, *, control: str | None = None
) -> list[str]:
    """Runs Ray until it is ended.

    Args:
        host: The address at which other machines reach this one.
        control: The control service; None starts it here.
    """
    head = control is None
    return [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        f"--node-ip-address={host}",
        f"--node-name={name}",
        f"--temp-dir={folder.ray_folder}",
        f"--num-cpus={resources.cpus}",
        f"--num-gpus={resources.gpus}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--disable-usage-stats",
        "--include-log-monitor=false",
        *(["--head", "--include-dashboard=false", "--no-monitor"] if head else [f"--address={control}"]),
        *ports.flags(head=head),
    ]


def connection(folder: Folder, control: str, host: str) -> dict[str, Any]:
    """The arguments of `ray.init` on a machine: it uses the Ray of this folder, of which there may be several."""
    return {
        "address": control,
        "namespace": NAMESPACE,
        "_node_ip_address": host,
        "_temp_dir": folder.ray_folder,
        "log_to_driver": False,
        "configure_logging": False,
    }


def placed(need: Need) -> dict[str, Any]:
    """Options of a replica's actor on one of several machines, beside `settings.actor_options`.

    It is started again on its machine only. The driver chooses another one when the machine has ended.
    """
    memory = {"memory": need.memory_bytes} if need.memory_bytes else {}
    return {"num_cpus": need.cpus, "num_gpus": need.gpus, **memory}
