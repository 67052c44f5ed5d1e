"""The head of a cluster, run by `vlora cluster up`: Ray's control service, and the door at which machines join."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import socket
from collections.abc import Callable
from pathlib import Path

from vlora.cluster.door import Address, Certificate
from vlora.cluster.nodes.certificates import Authority, own_addresses
from vlora.cluster.nodes.content import adapter_digest, model_digest
from vlora.cluster.nodes.greeting import Adapter, Facts, HeadDoor, python_version
from vlora.cluster.nodes.node import Machine, close_run, new_folder, new_key, until_stopped, write_files
from vlora.cluster.nodes.plan import ClusterPlan, absolute_adapters
from vlora.cluster.nodes.runs import HEAD, registered
from vlora.cluster.on_ray import node_settings
from vlora.cluster.on_ray.log_pipe import LogPipe
from vlora.cluster.on_ray.processes import RayNode, RayStart
from vlora.cluster.on_ray.settings import Ports, is_free
from vlora.errors import BadConfig


def address_of(plan: ClusterPlan) -> str:
    """The IP address of the head. Raises BadConfig if its name has none."""
    try:
        return str(socket.getaddrinfo(plan.head.host, plan.head.port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise BadConfig(f"`head` is {plan.head} in the plan, which has no address: {error}") from error


def facts_of(plan: ClusterPlan, model: str, host: str, resolve: Callable[[str], str]) -> Facts:
    """The facts that all machines must share.

    Args:
        model: A folder, a hub name or `embedded`.
        host: The address of this machine for others.
        resolve: The path of a model here.

    Raises:
        BadConfig: The model or an adapter is missing on this machine.
    """
    adapters = {}
    for name, path in absolute_adapters(plan).items():
        try:
            adapters[name] = Adapter(path, adapter_digest(path))
        except BadConfig as error:
            raise BadConfig(f"adapter {name!r} of the plan: {error}") from error
    return Facts(
        plan=plan.digest,
        ray=importlib.metadata.version("ray"),
        python=python_version(),
        control=f"{host}:{plan.ray_ports.first}",
        ray_ports=tuple(plan.ray_ports),
        door_ports=tuple(plan.door_ports),
        most=plan.replicas.limit,
        model=model,
        model_digest=model_digest(resolve(model)),
        adapters=adapters,
    )


async def run_head(
    plan: ClusterPlan,
    token: bytes,
    facts: Facts,
    machine: Machine,
    *,
    announce: Callable[[str], None],
    stop: asyncio.Event,
) -> None:
    """Run the head of a cluster until stopped. Then its Ray and the replicas on this machine end.

    Args:
        announce: Called with a line for the start and for each machine that joins.

    Raises:
        VLoraError: Ray does not start, or the address cannot be used.
    """
    with registered(HEAD, str(plan.head)):
        authority, key = Authority(), new_key()
        folder = new_folder(token)
        host = machine.host
        ports = Ports(plan.ray_ports.first, plan.replicas.limit)

        async def prepare() -> RayStart:
            if taken := [port for port in range(ports.first, ports.last + 1) if not is_free(port)]:
                raise BadConfig(f"port {taken[0]} is in use; choose other `ray_ports` in the plan, or end its program")
            return RayStart(
                ports,
                node_settings.start_command(folder, ports, host, key, machine.resources),
                node_settings.environment(folder, os.environ),
                {},
            )

        ray = RayNode(folder, prepare)
        replicas_log: LogPipe | None = None
        door: HeadDoor | None = None
        try:
            replicas_log = LogPipe(folder.log_pipe)
            write_files(folder, key, host, facts, machine, authority.issue(host, own_addresses()))
            certificate = Certificate(f"{folder.path}/cert.pem", f"{folder.path}/key.pem")
            # Before Ray, so that an address in use is known at once.
            door = await HeadDoor.open(
                Address(host, plan.head.port),
                token,
                certificate,
                authority,
                lambda: facts if ray.head else None,
                announce,
            )
            await until_stopped(stop, ray.start())
            if not stop.is_set():
                announce(
                    f"Ray listens on ports {ports} of all addresses of this machine, with the cluster's token and TLS"
                )
                announce(
                    f"other machines join with: vlora cluster join {plan.head} --token-file "
                    f"{Path(plan.token_file).absolute()}"
                )
                await stop.wait()
        finally:
            if door is not None:
                door.close()
            await close_run(ray, folder, replicas_log)
