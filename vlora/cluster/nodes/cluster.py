"""`NodesCluster`: replicas on several machines, behind a front end that is in the cluster without resources."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from vlora.cluster.adapter_state import AdapterState
from vlora.cluster.journal_file import JournalFile
from vlora.cluster.members import Health, clients
from vlora.cluster.nodes.node import NO_RESOURCES, Machine, Membership
from vlora.cluster.nodes.plan import ClusterPlan
from vlora.cluster.nodes.runs import FRONT_END, registered
from vlora.cluster.nodes.token import read_token
from vlora.cluster.on_ray.actor import ActorSettings
from vlora.cluster.on_ray.cluster import HUNG_S, LocalCluster, Pids
from vlora.cluster.on_ray.processes import RayProcesses
from vlora.cluster.on_ray.reports import Need, replica_names
from vlora.cluster.replica import ALONE_S
from vlora.config import EngineConfig
from vlora.engine.ipc.client import ENGINE_COMMAND
from vlora.errors import BadConfig
from vlora.routing.scaling import DOWN_AFTER_S, UP_AFTER_S, ScalingSettings
from vlora.types.replicas import DOWN, ClusterStatus


def config_of_replica(config: EngineConfig, plan: ClusterPlan) -> EngineConfig:
    """The configuration of each replica. Without `threads` it uses the CPUs that the plan gives it.

    Raises:
        BadConfig: The device and the plan's GPUs do not agree.
    """
    gpus = 0 if config.device == "cpu" else config.tensor_parallel
    if gpus != plan.replicas.gpus:
        raise BadConfig(
            f"--device {config.device} with --tensor-parallel {config.tensor_parallel} needs {gpus} GPUs, and "
            f"`replicas.gpus` of the plan is {plan.replicas.gpus}; make them agree"
        )
    if config.threads is not None:
        return config
    return dataclasses.replace(config, threads=max(1, plan.replicas.cpus // config.tensor_parallel))


class NodesCluster(LocalCluster):
    """`LocalCluster` over replicas of other machines. Created by `join`.

    The machines' own processes (`vlora cluster up`, `join`) run Ray there. This one runs a Ray without resources, for
    its driver. Machines may join and leave while it runs.
    """

    tls = True
    _entered: contextlib.ExitStack

    @classmethod
    async def join(
        cls,
        config: EngineConfig,
        plan: ClusterPlan,
        *,
        autoscale: bool = False,
        scale_up_s: float = UP_AFTER_S,
        scale_down_s: float = DOWN_AFTER_S,
        journal: JournalFile | None = None,
        adapters: AdapterState | None = None,
        rule: str = "placed",
        ship_adapters: bool = False,
        announce: Callable[[str], None] = lambda line: None,
        command: Sequence[str] = ("", *ENGINE_COMMAND[1:]),
        health: Health | None = None,
        alone_s: float = ALONE_S,
        hung_s: float = HUNG_S,
    ) -> NodesCluster:
        """Join the head, start the replicas, and wait until all serve.

        Arguments are those of `LocalCluster.start`, and these:

        Args:
            ship_adapters: Send adapters' files to machines that lack them, also if the plan does not ask for it.
            command: Starts an engine process; the first word is empty for the Python of each machine.

        Raises:
            VLoraError: There is no such head, its plan differs, or the first replica cannot be started; nothing is left
                running.
        """
        config = config_of_replica(config, plan)
        # The processor has loaded the model here, so its path is known; replicas find theirs by their machine.
        machine = Machine("", NO_RESOURCES, lambda model: config.model)
        membership = Membership(plan.head, read_token(Path(plan.token_file)), machine, front_end=True)
        folder = membership.folder
        number, most = plan.replicas.number, plan.replicas.limit
        entered = contextlib.ExitStack()
        entered.callback(membership.close)
        try:
            entered.enter_context(registered(FRONT_END, str(plan.head))).note(folder)
            await membership.ask()
            if membership.facts.plan != plan.digest:
                raise BadConfig(
                    f"the plan differs from that of the head at {plan.head}; use the same file, and start the head "
                    "again after a change"
                )
            scaling = ScalingSettings(number, most, scale_up_s, scale_down_s)
            shipping = plan.shipping if plan.ship_adapters or ship_adapters else None
            self = cls(config, rule, folder, health, hung_s, number, scaling, autoscale, journal, adapters, shipping)
            self._entered = entered
        except BaseException:
            folder.remove()
            entered.close()
            raise
        actors = {
            name: ActorSettings(
                config=dataclasses.replace(config, model=membership.facts.model),
                name=name,
                command=tuple(command),
                alone_s=alone_s,
                num_gpus=plan.replicas.gpus,
            )
            for name in replica_names(most)
        }
        need = Need(
            cpus=plan.replicas.cpus,
            gpus=plan.replicas.gpus,
            memory_bytes=int(plan.replicas.memory_gib * 2**30),
        )
        self.ray = RayProcesses(folder, membership.prepare, actors, number, self._hear, need=need, serves=self._serves)
        try:
            announce(f"joining the head at {plan.head}")
            await self.ray.start()
            watching = asyncio.create_task(membership.watch(self.ray), name="vlora-head")
            entered.callback(watching.cancel)
            ports = self.ray.ports
            announce(f"Ray listens on ports {ports} of all addresses of this machine, with the cluster's token and TLS")
            await self._wait_joined(number, announce)
            self._autoscaling = asyncio.create_task(self._autoscaler.run(), name="vlora-autoscaler")
        except BaseException:
            await self.close()
            raise
        return self

    def status(self) -> ClusterStatus:
        """See `Cluster`. A replica that does not start has the cause of that."""
        found = super().status()
        replicas = (
            msgspec.structs.replace(each, cause=self._failures.get(each.name, each.cause))
            if each.state == DOWN
            else each
            for each in found.replicas
        )
        return msgspec.structs.replace(found, replicas=tuple(replicas))

    async def close(self) -> None:
        """See EngineInterface. Ends the replicas, and the Ray of this process."""
        await super().close()
        self._entered.close()

    def _serves(self, name: str) -> bool:
        return name in clients(self.members)

    def _end_processes(self, name: str, pids: Pids) -> None:
        """Through the actor: they are processes of another machine."""
        self.ray.restart_replica(name)
