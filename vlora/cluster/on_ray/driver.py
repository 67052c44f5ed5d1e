"""The only driver of Ray, in a process of its own. It creates the replicas' actors and reports on them.

Run as `python -m vlora.cluster.on_ray.driver`, with a `DriverSettings` and later `Order`s on stdin. It writes events
(`reports.py`) to stdout, and ends the actors when stdin ends, unless another front end follows. They outlive a driver
that is killed; the next one finds them by their names. Ray may end a driver after its head, so no front end is one.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import msgspec
import ray
from ray._private import services
from ray._private.state import actors, available_resources_per_node, state
from ray.autoscaler.sdk import request_resources
from ray.core.generated.gcs_pb2 import ResourceUsageBatchData  # type: ignore[attr-defined]
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vlora.cluster.on_ray.actor import ReplicaActor, keeps_state
from vlora.cluster.on_ray.connecting import MAX_CHARS, Lease, connect, find_address, line_of
from vlora.cluster.on_ray.reports import (
    RENEWED,
    ActorReport,
    Draining,
    DriverSettings,
    Ended,
    Event,
    Failed,
    Follows,
    Found,
    HeadFacts,
    Listens,
    Located,
    Logged,
    Lost,
    NoRoom,
    Opened,
    Order,
    Owns,
    Restart,
    Scale,
    Service,
    missing,
    replica_names,
)
from vlora.cluster.replica import ReplicaSettings
from vlora.errors import BadConfig
from vlora.types import ErrorValue
from vlora.wire.framing import pack_value, read_value

_WATCH_S = 10.0  # of one call that watches an actor; those of a killed driver end by then
_LOOK_S = 3.0
_PENDING_S = 8.0  # in which Ray finds a node that has room, and reports what it finds none for
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_AGAIN_S, _RESTART_S = 0.2, 0.7  # between two calls of an actor that has ended; in which it is started again
_STOP_S, _END_S = 3.0, 1.5
_AWAY_S = 3.0  # of Ray's head, whose answer comes once it has started again
_LATE_S = 15.0  # before the end of a node, its replicas leave it also if no other one has room
_PREFIX = "vlora-"  # of the names of actors
_ROUNDING = 1e-3  # more than that of Ray's numbers of resources

# -- the driver -------------------------------------------------------------------------------------------------------


class Driver:
    """Holds one actor for each replica that there is to be, with a thread for each.

    Attributes:
        nodes: Ray's ids of the nodes of replicas that serve, by name.
    """

    def __init__(self, settings: DriverSettings, out: Any) -> None:
        """out: a binary file for events."""
        self._settings = settings
        self._out = out
        self.listening: queue.SimpleQueue[Listens] = queue.SimpleQueue()
        self._saying = threading.Lock()
        self._replica = msgspec.msgpack.encode(settings.replica)
        self._handles: dict[str, Any] = {}
        self._scaled = threading.Condition()
        self._number = settings.number
        self._wanted: tuple[str, ...] = ()
        self._following: set[str] = set()
        self.nodes: dict[str, str] = {}
        self._leaving: dict[str, str] = {}  # the nodes of those that are to move
        self._lease: Lease | None = None  # None: the driver starts
        self._owns = False
        self._looked_at_head = not settings.checks_head

    def start(self) -> None:
        """Own the service, or follow its owner. Raises BadConfig if another service uses the namespace."""
        here = self._settings.service
        if self._settings.checks_head:  # otherwise nothing else uses this Ray
            address = ray.util.get_node_ip_address()
            self.say(Found(address))
            listens = self.listening.get()
            here = msgspec.structs.replace(here, address=address, port=listens.port, tls=listens.tls)
        self._lease = Lease(self._settings.namespace, here)
        self.run(self._lease)

    def run(self, lease: Lease) -> None:
        """Follow the owner of the service; own it once there is none."""
        followed: Service | None = None
        while (other := lease.take()) is not None:
            if other != followed and other.settings == self._settings.service.settings and (secret := self._secret()):
                followed = other
                self.say(Follows(other, secret))
            time.sleep(Lease.RENEW_S / 2)
        threading.Thread(target=self.renew, args=(lease,), daemon=True).start()
        secret = self._secret(ends_others=True) or self._settings.replica.secret
        self._replica = msgspec.msgpack.encode(msgspec.structs.replace(self._settings.replica, secret=secret))
        self.say(Owns(secret, lease.term))
        self._owns = True
        self.scale(self._number)

    def _secret(self, *, ends_others: bool = False) -> bytes:
        """Of the replicas, which any front end of the service has started; empty if none runs.

        ends_others: End replicas with other settings or another secret, of former front ends.
        """
        secret = b""
        calls: dict[str, Any] = {name: ray.get_actor(_PREFIX + name).settings.remote() for name in own_actors()}
        ready = ray.wait([*calls.values()], num_returns=len(calls), timeout=_LOOK_S)[0] if calls else []
        for name in sorted(name for name, call in calls.items() if call in ready):
            with contextlib.suppress(RayError):  # it is started again
                if not (data := ray.get(calls[name])):
                    continue
                with contextlib.suppress(msgspec.MsgspecError):  # of another version
                    found = msgspec.msgpack.decode(data, type=ReplicaSettings)
                    alike = msgspec.structs.replace(self._settings.replica, secret=found.secret) == found
                    if alike and secret in (b"", found.secret):
                        secret = found.secret
                        continue
                if ends_others:
                    self.end([name])
        return secret

    def stop(self) -> None:
        """End the actors, unless another front end follows, which takes them over."""
        if self._owns and self._lease is not None and self._lease.release() and not self._lease.is_followed:
            self.end(own_actors())
            self._request_nodes(0)

    def scale(self, number: int) -> None:
        """Have the first replicas, and end the actors of others, once this front end owns the service."""
        self._number = number
        if not self._owns:
            return
        with self._scaled:
            self._wanted = replica_names(number)
            self._scaled.notify_all()
        for name in set(self._wanted) - self._following:
            self._following.add(name)
            threading.Thread(target=self.hold, args=(name,), name=name, daemon=True).start()
        self._request_nodes(number)
        self.end(own_actors() - set(self._wanted))

    def restart(self, name: str, replica_pid: int, *, moves: bool) -> None:
        if (handle := self._handles.get(name)) is None:
            return
        if not moves:
            handle.end_replica.remote(replica_pid)
        elif name in self._leaving and self.nodes.get(name) == self._leaving[name]:
            del self.nodes[name]
            ray.kill(handle, no_restart=False)  # Ray starts it again, on a node that it does not drain

    def say(self, event: Event) -> None:
        with self._saying:
            self._out.write(pack_value(event))
            self._out.flush()

    # -- inside -------------------------------------------------------------------------------------------------------

    def end(self, names: Collection[str]) -> None:
        for name in names:
            with contextlib.suppress(ValueError):  # it has ended
                ray.kill(ray.get_actor(_PREFIX + name), no_restart=True)

    def _request_nodes(self, number: int) -> None:
        """Have Ray's autoscaler, if there is one, keep nodes for so many replicas, and add those that are missing."""
        if self._settings.scales:
            need, labels = self._settings.need, self._settings.labels
            request_resources(bundles=[need] * number, bundle_label_selectors=[labels] * number)

    def look_at_nodes(self, now_s: float) -> None:
        """Report the replicas that are to leave nodes which Ray drains: one by one, as others have room for them, or
        all of a node that ends soon."""
        draining = state.get_draining_nodes()  # and when they end, in milliseconds; 0: nobody has said
        here = {name: node for name, node in tuple(self.nodes.items()) if name in self._wanted and node in draining}
        moving = any(self.nodes.get(name) in (None, self._leaving.get(name)) for name in self._wanted)
        for name, node in sorted(here.items()):
            is_late = 0 < draining[node] < 1000 * (now_s + _LATE_S)
            if self._leaving.get(name) != node and (is_late or not (moving or self._missing(name, draining))):
                self._leaving[name], moving = node, True
                self.say(Draining(name, node))

    def renew(self, lease: Lease) -> None:
        while True:
            time.sleep(Lease.RENEW_S)
            began_s = time.monotonic()
            with contextlib.suppress(RayError, RuntimeError):  # Ray's head is away
                self.look_at_nodes(time.time())
                if time.monotonic() - began_s > _AWAY_S:  # it is back, and tells drivers no more of its actors
                    os._exit(RENEWED)
                if (other := lease.renew()) is not None:
                    if other.key != self._settings.service.key:  # that front end owns the service
                        self.say(Follows(other, msgspec.msgpack.decode(self._replica, type=ReplicaSettings).secret))
                    os._exit(RENEWED)

    def hold(self, name: str) -> None:
        """Have the replica's actor start it, as long as there is to be one, and again whenever it has ended."""
        pause_s, told = _FIRST_PAUSE_S, ""
        known: Opened | None = None  # the latest one
        heard_s = time.monotonic()
        while True:
            with self._scaled:
                self._scaled.wait_for(lambda: name in self._wanted)
            located: Opened | None = None
            reports = self._reports(name)
            try:
                for report in reports:
                    heard_s = time.monotonic()
                    if name not in self._wanted:
                        break
                    if report.lines:
                        self.say(Logged(name, report.lines))
                    if isinstance(report.state, Opened) and report.state != located:
                        known = located = report.state
                        pause_s, told = _FIRST_PAUSE_S, ""
                        self._locate(name, located)
                    elif isinstance(report.state, Ended):
                        error = report.state.error
                        if report.state.served:
                            self.say(Lost(name, error.message))
                        elif told != error.message:
                            told = error.message
                            self.say(Failed(name, error))
                        if not report.state.served:
                            time.sleep(pause_s)
                            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
                        self._handles[name].start.remote(self._replica)
            except Exception as error:  # also of a runtime environment that cannot be used
                if name not in self._wanted:
                    continue
                text = _of_actor(error)
                if located is not None:
                    if self.nodes.pop(name, None) is not None:  # otherwise it moves
                        self.say(Lost(name, text))
                    heard_s = time.monotonic()
                elif known is not None and time.monotonic() - heard_s > _RESTART_S:
                    self._replace_outdated(name, known)
                if located is not None or isinstance(error, ActorUnavailableError):  # it is being started again
                    time.sleep(_AGAIN_S)
                    continue
                if told != text:
                    told = text
                    self.say(Failed(name, ErrorValue("engine_dead", text)))
                time.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    def _reports(self, name: str) -> Iterator[ActorReport]:
        """Start the replica through its actor, and yield what follows. Raises RayError when the actor has ended."""
        # By name each time: an actor that has ended for good is replaced by a new one.
        handle: Any = (
            ray.remote(ReplicaActor)
            .options(name=_PREFIX + name, **self._settings.actor)
            .remote(self._settings.replica.alone_s)
        )
        self._handles[name] = handle
        handle.start.remote(self._replica)
        number, told, began_s = -1, "", time.monotonic()
        while True:
            call = handle.watch.remote(number, _WATCH_S)
            while not ray.wait([call], timeout=_LOOK_S)[0]:
                if number < 0 and time.monotonic() - began_s > _PENDING_S:
                    told = self._tell_room(name, told, self._why_pending(name))
            told = self._tell_room(name, told, "")
            report = msgspec.msgpack.decode(ray.get(call), type=ActorReport)
            number = report.number
            yield report

    def _tell_room(self, name: str, told: str, what: str) -> str:
        """Report that a replica waits for room, once, and that it has found some. Returns what was reported last."""
        if what != told:
            self.say(NoRoom(name, what))
        return what

    def _why_pending(self, name: str) -> str:
        """Why Ray looks for a node for an actor; empty if it has one, where starting a process may take long."""
        data = state._connect_and_get_accessor().get_all_resource_usage()  # noqa: SLF001
        if not is_queued(data, self._settings.need) or self._actor(name).get("State") == "ALIVE":
            return ""
        return self._missing(name, state.get_draining_nodes())

    def _missing(self, name: str, draining: Collection[str]) -> str:
        nodes = [node for node in ray.nodes() if node["NodeID"] not in draining]
        return missing(name, self._settings.need, self._settings.labels, nodes, available_resources_per_node())

    def _actor(self, name: str) -> Mapping[str, Any]:
        """What Ray's head knows of an actor; other services may have actors of this name."""
        return actors(self._handles[name]._actor_id.hex())  # type: ignore[no-any-return]  # noqa: SLF001

    def _locate(self, name: str, at: Opened) -> None:
        node, actor, reconnect_s = ray.get(self._handles[name].about_node.remote())
        self.nodes[name] = node
        self.say(Located(name, at, node, actor))
        if not self._looked_at_head:
            self._looked_at_head = True
            threading.Thread(target=self._look_at_head, args=(reconnect_s,), daemon=True).start()

    def _look_at_head(self, reconnect_s: float) -> None:
        """Whether the head keeps its state is in its environment, which a task on its node has."""
        keeps: bool | None = None
        with contextlib.suppress(RayError, RuntimeError):
            keeps = state.get_system_config().get("gcs_storage", "memory") != "memory" or None
            for node in ray.nodes():
                if not keeps and node["Alive"] and "node:__internal_head__" in node["Resources"]:
                    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                    asking = ray.remote(keeps_state).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
                    keeps = bool(ray.get(asking.remote(), timeout=30))
        self.say(HeadFacts(keeps, reconnect_s))

    def _replace_outdated(self, name: str, known: Opened) -> None:
        """End this process if Ray's head knows another process of a running actor than the one that this driver was
        told of: after a restart of the head, drivers are not told of actors that are started again."""
        with contextlib.suppress(RayError, RuntimeError):
            found = self._actor(name)
            if found.get("State") == "ALIVE" and found["Pid"] != known.pid:
                os._exit(RENEWED)


def is_queued(usage: bytes, need: Mapping[str, float]) -> bool:
    """Whether Ray looks for a node for something with this need. usage: of `get_all_resource_usage`."""
    load = ResourceUsageBatchData.FromString(usage).resource_load_by_shape
    return any(
        each.num_ready_requests_queued + each.num_infeasible_requests_queued
        and each.shape.keys() == need.keys()
        and all(math.isclose(each.shape[key], number, abs_tol=_ROUNDING) for key, number in need.items())
        for each in load.resource_demands
    )


def own_actors() -> set[str]:
    """The names of replicas with an actor in this namespace, in which the user may have others."""
    return {name.removeprefix(_PREFIX) for name in list_named_actors() if name.startswith(_PREFIX)}


def _of_actor(error: BaseException) -> str:
    """The reason why an actor has ended or is not created, without Ray's page about it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ActorUnavailableError) or (
        isinstance(error, ActorDiedError) and "creation task" not in str(error)
    ):
        return "its actor has ended, or its node cannot be reached"
    # The last line of a page about an error of the actor's own code is the error itself.
    return (lines or [type(error).__name__])[-1][:MAX_CHARS]


def follow_orders(driver: Driver, settings: DriverSettings) -> None:
    """Follow the orders on stdin; end this process after them."""
    with contextlib.suppress(EOFError):  # the front end has closed it, or has ended
        while True:
            order: Any = read_value(sys.stdin.buffer, cast(Any, Order))
            match order:
                case Scale(number=number):
                    driver.scale(number)
                case Listens():
                    driver.listening.put(order)
                case Restart(name, replica_pid, moves):
                    driver.restart(name, replica_pid, moves=moves)
    # If Ray's head is gone, the calls do not return.
    threading.Thread(target=_leave_late, daemon=True).start()
    if settings.checks_head:  # otherwise the Ray of this machine removes it
        settings.folder.remove()
    driver.stop()
    ray.shutdown()
    os._exit(0)


def main() -> None:
    settings = read_value(sys.stdin.buffer, DriverSettings)
    # Ray writes pages to both when a process ends; the front end's log has its own lines about that.
    out, problems = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(2), "w")
    with open(settings.folder.driver_log, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    driver = Driver(settings, out)
    if settings.connection:  # a Ray on loopback, whose address would be replaced by another one of this machine
        services.resolve_ip_for_localhost = lambda host: host
    try:
        connect(settings, find_address(settings.address))
        ordering = threading.Thread(target=follow_orders, args=(driver, settings), daemon=True)
        ordering.start()
        driver.start()
        ordering.join()
    except BadConfig as error:
        driver.say(Failed("", ErrorValue.of(error)))
    except Exception as error:
        print(f"the driver cannot use Ray: {line_of(str(error))}", file=problems, flush=True)
    os._exit(1)


def _leave_late() -> None:
    time.sleep(_STOP_S)
    os._exit(1)


if __name__ == "__main__":
    main()
