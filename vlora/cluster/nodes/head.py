"""The head of a cluster, run by `vlora cluster up`: Ray's control service, and the listener at which machines join."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from vlora.cluster.nodes.certificates import Authority, own_addresses
from vlora.cluster.nodes.content import adapter_digest, model_digest
from vlora.cluster.nodes.join import Adapter, Facts, HeadListener, python_version
from vlora.cluster.nodes.node import Machine, close_run, new_folder, new_key, until_stopped, write_files
from vlora.cluster.nodes.plan import ClusterPlan, absolute_adapters
from vlora.cluster.nodes.runs import HEAD, end_run, registered
from vlora.cluster.nodes.token import derived
from vlora.cluster.on_ray import settings as ray_settings
from vlora.cluster.on_ray.log_pipe import LogPipe
from vlora.cluster.on_ray.node_settings import NodeSettings
from vlora.cluster.on_ray.own_processes import replica_processes
from vlora.cluster.on_ray.processes import RayNode, RayStart
from vlora.cluster.on_ray.settings import Folder, Ports, is_free, is_private
from vlora.errors import BadConfig
from vlora.wire.address import Address
from vlora.wire.tls import Certificate


def address_of(plan: ClusterPlan) -> str:
    """The IPv4 address of the head. Raises BadConfig if its name has none."""
    try:
        found = socket.getaddrinfo(plan.head.host, plan.head.port, socket.AF_INET, socket.SOCK_STREAM)
        return str(found[0][4][0])
    except OSError as error:
        raise BadConfig(f"`head` is {plan.head} in the plan, which has no address: {error}") from error


def facts_of(plan: ClusterPlan, model: str, host: str, resolve: Callable[[str], str]) -> Facts:
    """The facts that all machines must share.

    Args:
        model: A folder, a hub name or `embedded`.

    Raises:
        BadConfig: The model is missing on this machine, or an adapter where none are sent.
    """
    adapters = {}
    for name, path in () if plan.ship_adapters else absolute_adapters(plan).items():
        try:
            adapters[name] = Adapter(path, adapter_digest(path))
        except BadConfig as error:
            raise BadConfig(f"adapter {name!r} of the plan: {error}") from error
    return Facts(
        run="",
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
    """Run the head of a cluster until stopped. Then its Ray ends.

    The replicas on this machine end too, unless a front end uses them: they outlive this process then, however it ends,
    and the next head of this address takes them over.

    Raises:
        VLoraError: Ray does not start, or the address cannot be used.
    """
    with registered(HEAD, str(plan.head)) as entry:
        head = _Head(plan, token, facts, machine, announce, entry.former)
        entry.note(head.folder)
        try:
            await head.open()
            await until_stopped(stop, head.ray.start())
            if not stop.is_set():
                where = f"ports {head.ports} of all addresses of this machine"
                announce(f"Ray listens on {where}, with the cluster's token and TLS")
                file = Path(plan.token_file).absolute()
                announce(f"other machines join with: vlora cluster join {plan.head} --token-file {file}")
                await stop.wait()
        finally:
            await head.close()


def taken_over(former: Folder, token: bytes, host: str) -> str | None:
    """Continue with the folder of an earlier head that has left replicas.

    Returns:
        The key of its machine, by which a front end finds the replicas; None if they were ended, since this head has
        another token or address, or since another user may write to the folder: one may have made it again after a
        program that removes old temporary files.
    """
    with contextlib.suppress(OSError, msgspec.MsgspecError):  # without files, if it was killed while it began
        if is_private(former.path) and former.secret() == derived(token, "replicas").encode():
            node = NodeSettings.of(former)
            if node.host == host:
                return node.key
    end_run(former)
    return None


class _Head:
    """A head's Ray, its listener, and their files."""

    def __init__(
        self,
        plan: ClusterPlan,
        token: bytes,
        facts: Facts,
        machine: Machine,
        announce: Callable[[str], None],
        former: Folder | None,
    ) -> None:
        """former: The folder of an earlier head, if replicas of it serve on."""
        self.ports = Ports(plan.ray_ports.first, plan.replicas.limit)
        self._plan, self._token, self._facts, self._machine, self._announce = plan, token, facts, machine, announce
        key = None if former is None else taken_over(former, token, machine.host)
        self._takes_over = key is not None
        self._key = key or new_key()
        self.folder = new_folder(token) if former is None or key is None else former
        self.ray = RayNode(self.folder, self._prepare, keeps_replicas=True)
        self._listener: HeadListener | None = None
        self._log: LogPipe | None = None

    async def open(self) -> None:
        """Listen, before Ray starts, so that an address in use is known at once."""
        folder, host, authority = self.folder, self._machine.host, Authority()
        self._log = LogPipe(folder.log_pipe)
        certificates = authority.issue(host, own_addresses())
        write_files(folder, self._key, host, self._facts, self._machine, certificates)
        certificate = Certificate(f"{folder.path}/cert.pem", f"{folder.path}/key.pem")
        address = Address(host, self._plan.head.port)
        self._listener = await HeadListener.open(
            address, self._token, certificate, authority, self._known, self._announce
        )

    async def close(self) -> None:
        """End Ray, and the replicas unless they are in use: then the folder stays for the next head."""
        used = self._takes_over  # from a front end that has not come back since
        if self._listener is not None:
            used = self._listener.has_front_end or (used and not self._listener.had_front_end)
            self._listener.close()
        used = used and bool(replica_processes(self.folder))
        await close_run(self.ray, self.folder, self._log, keeps_replicas=used)
        if used:
            self._announce("the replicas on this machine serve on; `vlora cluster down` ends them")

    def _known(self) -> Facts | None:
        return self._facts if self.ray.runs else None

    async def _prepare(self) -> RayStart:
        if self._listener is not None:
            self._listener.drop()
        self._facts = msgspec.structs.replace(self._facts, run=secrets.token_hex())
        if taken := [port for port in range(self.ports.first, self.ports.last + 1) if not is_free(port)]:
            raise BadConfig(f"port {taken[0]} is in use; choose other `ray_ports` in the plan, or end its program")
        return RayStart(
            self.ports,
            ray_settings.start_command(
                self.folder, self.ports, host=self._machine.host, name=self._key, resources=self._machine.resources
            ),
            ray_settings.node_environment(self.folder, os.environ),
            {},
        )
