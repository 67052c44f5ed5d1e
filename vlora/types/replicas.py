"""The status of several replicas behind one server."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vlora.types.visibility import HIDDEN, admin_only

SERVING, DRAINING, DOWN = STATES = ("serving", "draining", "down")
PENDING, REGISTERED, HOST, DEVICE, FAILED, UNKNOWN = ADAPTER_STATES = (
    "pending",
    "registered",
    "host",
    "device",
    "failed",
    "unknown",
)


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One replica.

    Attributes:
        state: One of `STATES`.
        cause: Why it is down; empty otherwise.
        num_requests, num_failed_adapters: Unfinished requests there, of all front ends; adapters that it cannot serve.
        num_shipped_bytes: Of adapters' files that were sent to it since its connection was opened.
        node, actor, address, pid: Ray's ids, where it listens, and its process there; empty if it is not on Ray.
    """

    name: str
    state: str
    cause: Annotated[str, admin_only(HIDDEN)]
    num_requests: int
    num_failed_adapters: int = 0
    num_shipped_bytes: int = 0
    node: Annotated[str, admin_only("")] = ""
    address: Annotated[str, admin_only("")] = ""
    actor: Annotated[str, admin_only("")] = ""
    pid: Annotated[int, admin_only(0)] = 0


class ScalingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The number of replicas, and why it is so.

    Attributes:
        automatic: Whether the load decides; otherwise an operator does.
        number: Replicas that there should be.
        least, most: Limits of automatic scaling; `most` is also an operator's.
        decision: The last change, with its reason; empty before the first one.
        decided_s: Seconds since then; None before the first one.
        problem: That the last start failed, and when the next one follows; empty if it did not. The log has the cause.
        decisions: Number of changes by reason.
    """

    automatic: bool
    number: int
    least: int
    most: int
    decision: str
    decided_s: float | None
    problem: str
    decisions: dict[str, int]


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas, their queue, and counts since the start.

    Attributes:
        num_waiting: Requests that wait for a replica with room.
        num_deaths: Replicas that were lost while they served.
        num_resubmitted: Requests that continued elsewhere because of it.
        num_moves: Requests that were moved from a replica that serves.
        scaling: Their number; None if this server does not start them.
    """

    replicas: tuple[ReplicaStatus, ...]
    num_waiting: int
    num_deaths: int
    num_resubmitted: int
    num_moves: int
    scaling: ScalingStatus | None = None


class AdapterPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter on one replica.

    Attributes:
        state: One of `ADAPTER_STATES`: "pending" until the replica is as desired, "registered" until its content is
            read, "host" and "device" where the content is, "failed" if the replica gets no requests of it, "unknown"
            while the replica is down.
        version: The hash of the content there; empty until it is read.
        pinned: Whether it stays on the device.
        cause: Why it has failed, is not pinned or not known, or how much of its files was sent; empty otherwise.
    """

    adapter: str
    replica: str
    state: str
    version: str
    pinned: bool
    cause: Annotated[str, admin_only(HIDDEN)]
