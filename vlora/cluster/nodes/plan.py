"""The plan of a cluster of several machines: `cluster.yaml`."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from vlora.cluster.adapter_sender import ShippingLimits
from vlora.cluster.on_ray.settings import Ports
from vlora.plan_files.fields import AdapterName, Number, PlanModel, PlanPath, Whole
from vlora.plan_files.reading import read_model
from vlora.wire.address import Address

_RANGE = re.compile(r"(\d{1,5})-(\d{1,5})")
_MAX_PORT = 65_535
_MAX_REPLICAS = 1000
_ADAPTER_GIB = 4.0
_UNSPECIFIED = ("0.0.0.0", "::")


class PortRange(NamedTuple):
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def __contains__(self, port: object) -> bool:
        return isinstance(port, int) and self.first <= port <= self.last

    @property
    def size(self) -> int:
        return self.last - self.first + 1


def _address(text: Any) -> Any:
    if not isinstance(text, str):
        raise ValueError("must be HOST:PORT, for example 10.0.0.1:18870")
    return parse_address(text)


def parse_address(text: str) -> Address:
    """HOST:PORT. Raises ValueError with the problem."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) <= _MAX_PORT:
        raise ValueError(f"is {text!r}; write HOST:PORT, with a port from 1 to {_MAX_PORT}")
    found = Address(host.strip("[]"), int(port))
    if found.host in _UNSPECIFIED:
        raise ValueError(f"is {text!r}, which other machines cannot reach; write the address of the head's machine")
    return found


def _port_range(text: Any) -> Any:
    found = _RANGE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"is {text!r}; write FIRST-LAST, for example 20000-20299")
    first, last = map(int, found.groups())
    if not 1024 <= first <= last <= _MAX_PORT:
        raise ValueError(f"is {text}; ports from 1024 to {_MAX_PORT} can be used, in ascending order")
    return PortRange(first, last)


PlanAddress = Annotated[Any, BeforeValidator(_address)]
PlanPorts = Annotated[Any, BeforeValidator(_port_range)]


class ReplicasPlan(PlanModel):
    """The replicas, which are all alike.

    Attributes:
        most: The limit of that number later; None: `number`.
        memory_gib: Of each; 0: not counted.
    """

    number: Whole = Field(ge=1, le=_MAX_REPLICAS)
    most: Whole | None = Field(None, ge=1, le=_MAX_REPLICAS)
    cpus: Whole = Field(1, ge=1, le=4096)
    gpus: Whole = Field(0, ge=0, le=64)
    memory_gib: Number = Field(0, ge=0, le=1e6)

    @model_validator(mode="after")
    def _at_most(self) -> ReplicasPlan:
        if self.limit < self.number:
            raise ValueError(f"`most` is {self.most}, and `number` {self.number}; it must be at least as large")
        return self

    @property
    def limit(self) -> int:
        return self.most or self.number


class ClusterPlan(PlanModel):
    """A cluster.

    Attributes:
        head: The address at which `vlora cluster up` listens for nodes and front ends.
        token_file: The cluster's token, on every machine; `vlora cluster up` makes it.
        ray_ports: Of Ray, on every machine. Ray uses a part of them.
        model: A folder, a hub name or `embedded`, the same on every machine.
        adapters: Name -> folder, the same path on every machine.
        ship_adapters: Send adapters' files to machines that lack them. Otherwise they must be on every machine.
        shipped_gib: The limit of all files that were sent, on each machine.
        shipped_adapter_gib: The limit of one adapter that is sent; None: 4, if `shipped_gib` allows it.
    """

    head: PlanAddress
    token_file: PlanPath
    ray_ports: PlanPorts = PortRange(20_000, 20_299)
    door_ports: PlanPorts = PortRange(20_300, 20_399)
    model: str = Field("embedded", min_length=1)
    adapters: dict[AdapterName, PlanPath] = Field(default_factory=dict)
    ship_adapters: bool = Field(False, strict=True)
    shipped_gib: Number = Field(20, gt=0, le=1e6)
    shipped_adapter_gib: Number | None = Field(None, gt=0, le=1e6)
    replicas: ReplicasPlan

    @model_validator(mode="after")
    def _ports_suffice(self) -> ClusterPlan:
        # On one machine there may be the head and a front end, each with a Ray.
        needed = 2 * (Ports(0, self.replicas.limit).last + 1)
        if self.ray_ports.size < needed:
            raise ValueError(
                f"`ray_ports` are {self.ray_ports.size} ports; {self.replicas.limit} replicas need {needed}"
            )
        if self.ray_ports.first <= self.door_ports.last and self.door_ports.first <= self.ray_ports.last:
            raise ValueError(f"`ray_ports` {self.ray_ports} and `door_ports` {self.door_ports} overlap")
        for name, ports in (("ray_ports", self.ray_ports), ("door_ports", self.door_ports)):
            if self.head.port in ports:
                raise ValueError(f"the port of `head` is {self.head.port}, one of `{name}`; choose another one")
        return self

    @model_validator(mode="after")
    def _adapter_limit(self) -> ClusterPlan:
        if (one := self.shipped_adapter_gib) is not None and one > self.shipped_gib:
            raise ValueError(
                f"`shipped_adapter_gib` is {one:g}, above the limit `shipped_gib` of all, {self.shipped_gib:g}"
            )
        return self

    @property
    def shipping(self) -> ShippingLimits:
        """The limits of files that are sent, whether or not the plan asks for that."""
        one = min(_ADAPTER_GIB, self.shipped_gib) if self.shipped_adapter_gib is None else self.shipped_adapter_gib
        return ShippingLimits(int(one * 2**30), int(self.shipped_gib * 2**30))

    @property
    def digest(self) -> str:
        """Of all that head and front ends must agree on."""
        return hashlib.sha256(self.model_dump_json(exclude={"token_file"}).encode()).hexdigest()


def read_cluster_plan(file: Path) -> ClusterPlan:
    """Read a plan. Raises BadPlan with file, line and field of every error."""
    plan, _ = read_model(file, ClusterPlan, needed="replicas")
    return plan


def absolute_adapters(plan: ClusterPlan) -> dict[str, str]:
    return {name: os.path.abspath(path) for name, path in plan.adapters.items()}
