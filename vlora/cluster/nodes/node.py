"""A machine in a cluster, with its files and its Ray: run by `vlora cluster join`, and used by a front end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from vlora.cluster.nodes.certificates import Certificates
from vlora.cluster.nodes.join import Admitted, Facts, ask_head, check_clock, check_content, check_versions
from vlora.cluster.nodes.runs import NODE, registered
from vlora.cluster.nodes.token import derived
from vlora.cluster.on_ray import settings as ray_settings
from vlora.cluster.on_ray.log_pipe import LogPipe
from vlora.cluster.on_ray.node_settings import NodeSettings, variables_of, write_node
from vlora.cluster.on_ray.own_processes import end_all
from vlora.cluster.on_ray.processes import RayNode, RayStart
from vlora.cluster.on_ray.settings import KEY_PREFIX, Folder, Ports, Resources, is_free
from vlora.errors import BadConfig, VLoraError
from vlora.wire.address import Address
from vlora.wire.framing import MessageTransport

log = logging.getLogger("vlora.cluster")

_KEY_BYTES = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
NO_RESOURCES = Resources(cpus=0, gpus=0)


class Machine(NamedTuple):
    """Settings of a machine that joins.

    Attributes:
        host: Its address for others; empty: the one that the head sees.
        resolve: The path of a model here.
    """

    host: str
    resources: Resources
    resolve: Callable[[str], str]


def free_ports(facts: Facts, num_replicas: int) -> Ports:
    """A free part of the cluster's range, as there may be several Rays on a machine.

    Parts have fixed places: Ray opens most ports later, so that a part in use may look free in part.

    Raises:
        BadConfig: There is none.
    """
    (first, last), size = facts.ray_ports, Ports(0, facts.most).last + 1
    for start in range(first, last + 2 - size, size):
        if all(map(is_free, range(start, start + size))):
            return Ports(start, num_replicas)
    raise BadConfig(
        f"no part of {size} ports from {first} to {last} is free for Ray; end other programs there, or choose other "
        "`ray_ports` in the plan"
    )


def new_folder(token: bytes) -> Folder:
    return Folder.create(derived(token, "ray"), derived(token, "replicas"))


def write_files(
    folder: Folder, key: str, host: str, facts: Facts, machine: Machine, certificates: Certificates
) -> None:
    certificates.write(folder)
    node = NodeSettings(
        key=key,
        folder=folder.path,
        host=host,
        first_port=facts.door_ports[0],
        last_port=facts.door_ports[1],
        cert_file=f"{folder.path}/cert.pem",
        key_file=f"{folder.path}/key.pem",
        model=machine.resolve(facts.model),
        num_gpus=machine.resources.gpus,
        variables=variables_of(os.environ),
    )
    write_node(folder, node)


def new_key() -> str:
    return KEY_PREFIX + secrets.token_hex(_KEY_BYTES)


class Membership:
    """This machine in a cluster: asks the head again before each start of Ray."""

    def __init__(self, address: Address, token: bytes, machine: Machine, *, front_end: bool = False) -> None:
        """front_end: be the cluster's front end until `close`."""
        self.folder = new_folder(token)
        self.key = new_key()
        self.host = machine.host
        self.facts: Facts
        self._address = address
        self._token = token
        self._machine = machine
        self._front_end = front_end
        self._asking = asyncio.Lock()  # a connection that is forgotten would stay the front end's
        self._connection: MessageTransport | None = None
        self._admitted: Admitted | None = None  # for the next start
        self._run = ""  # of the Ray that this one belongs to

    async def ask(self) -> Admitted:
        """Ask the head, for the next start of Ray. Raises as `ask_head`, `check_versions`, `check_clock`."""
        async with self._asking:
            self.close()
            host, front_end = self._machine.host, self._front_end
            found, connection = await ask_head(self._address, self._token, host, front_end=front_end)
            try:
                check_versions(found.facts, importlib.metadata.version("ray"))
                check_clock(found)
            except BadConfig:
                connection.close()
                raise
            self.facts, self.host = found.facts, found.host
            self._admitted, self._connection = found, connection
            return found

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    async def watch(self, ray: RayNode) -> None:
        """Ask again whenever the head is gone. Start Ray again for another control service, which knows no machine.

        Ray itself would try for minutes to reach the former one.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            if (connection := self._connection) is not None:
                await asyncio.wait({connection.closed})
            if self._connection is not connection:
                continue  # asked for a start of Ray meanwhile
            try:
                await self.ask()
            except VLoraError as error:
                if pause_s == _FIRST_PAUSE_S:
                    log.warning("the head is gone: %s; retrying", error)
                await asyncio.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
                continue
            pause_s = _FIRST_PAUSE_S
            if self.facts.run != self._run:
                log.warning("the head has started again; so does Ray on this machine")
                ray.restart()
                self._run = self.facts.run

    async def prepare(self) -> RayStart:
        """Raises BadConfig if the machine cannot be part of the cluster, and errors of `ask`."""
        found, self._admitted = self._admitted or await self.ask(), None
        facts = found.facts
        self._run = facts.run
        machine = self._machine
        await asyncio.to_thread(check_content, facts, machine.resolve)
        write_files(self.folder, self.key, self.host, facts, machine, found.certificates)
        replicas = facts.most if machine.resources.cpus else 0
        ports = free_ports(facts, replicas)
        name = self.key if machine.resources.cpus else f"front-end-{self.key}"
        return RayStart(
            ports,
            ray_settings.start_command(
                self.folder, ports, host=self.host, name=name, resources=machine.resources, control=facts.control
            ),
            ray_settings.node_environment(self.folder, os.environ),
            ray_settings.connection(self.folder, facts.control, self.host),
        )


async def run_node(
    address: Address, token: bytes, machine: Machine, *, announce: Callable[[str], None], stop: asyncio.Event
) -> None:
    """Be part of a cluster until stopped. Then Ray and the replicas on this machine end.

    Raises:
        VLoraError: The machine cannot join.
    """
    with registered(NODE, str(address)) as entry:
        membership = Membership(address, token, machine)
        folder = membership.folder
        entry.note(folder)
        ray = RayNode(folder, membership.prepare)
        replicas_log: LogPipe | None = None
        try:
            replicas_log = LogPipe(folder.log_pipe)
            await until_stopped(stop, ray.start())
            if not stop.is_set():
                announce(
                    f"{membership.host} has joined the head at {address} with {machine.resources}; Ray listens on "
                    f"ports {ray.ports} of all addresses of this machine"
                )
                watching = asyncio.create_task(membership.watch(ray), name="vlora-head")
                await stop.wait()
                watching.cancel()
        finally:
            membership.close()
            await close_run(ray, folder, replicas_log)


async def until_stopped(stop: asyncio.Event, starting: Coroutine[Any, Any, None]) -> None:
    """Wait for a coroutine's end, or cancel it when stopped."""
    task = asyncio.create_task(starting)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    else:
        task.result()


async def close_run(
    ray: RayNode, folder: Folder, replicas_log: LogPipe | None, *, keeps_replicas: bool = False
) -> None:
    """End Ray and the replicas of this machine, and remove their files. keeps_replicas: end Ray only."""
    await ray.close()
    if not keeps_replicas:
        await asyncio.to_thread(end_all, folder)
    if replicas_log is not None:
        replicas_log.close()
    if not keeps_replicas:
        folder.remove()
