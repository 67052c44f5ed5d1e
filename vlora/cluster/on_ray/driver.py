"""The only driver of Ray, in a process of its own. It creates the replicas' actors and reports on them.

Run as `python -m vlora.cluster.on_ray.driver`, with a `DriverSettings` and later `Order`s on stdin. It writes events
(`reports.py`) to stdout, and ends the actors when stdin ends. The actors outlive a driver that is killed; the next one
finds them by their names, or creates new ones, which find the replicas. Ray may end a driver after its head, so a front
end is no driver.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError
from ray.job_config import JobConfig
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vlora.cluster import process_lock
from vlora.cluster.on_ray import settings as ray_settings
from vlora.cluster.on_ray.actor import NotOpened, Opened, ReplicaActor
from vlora.cluster.on_ray.reports import DriverSettings, Event, Failed, Located, Lost, Need, Order, Restart, Scale
from vlora.errors import BadConfig
from vlora.types import ErrorValue
from vlora.wire.framing import pack_value, read_value

_WATCH_S = 60.0  # of one call that watches an actor; those of a killed driver end by then
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_STOP_S = 3.0
_END_S = 1.5
LOOK_S = 0.5


class Driver:
    """Holds one actor for each replica that there is, with a thread for each that there may be."""

    def __init__(self, settings: DriverSettings, out: Any) -> None:
        """out: a binary file for events."""
        self._settings = settings
        self._out = out
        self._saying = threading.Lock()
        self._handles: dict[str, Any] = {}
        self._number = settings.number
        self._scaled = threading.Condition()
        self._slots = None if settings.need is None else NodeSlots(settings.need, settings.homes)
        self._began_s = time.monotonic()
        # Ray's name of an actor has its settings: one of an earlier front end has others, and goes.
        self._named = {name: f"{name} {process_lock.digest(each)}" for name, each in settings.actors.items()}

    def start(self) -> None:
        """Begin to hold the replicas.

        Raises:
            BadConfig: The machine has not enough GPUs.
        """
        number = len(self._settings.actors)
        wanted, found = number * self._settings.num_gpus, int(ray.cluster_resources().get("GPU", 0))
        if wanted > found and self._slots is None:
            raise BadConfig(
                f"{number} replicas need {wanted} GPUs, and Ray finds {found} on this machine; lower --replicas or "
                "--tensor-parallel"
            )
        for former in set(list_named_actors()) - set(self._named.values()):
            with contextlib.suppress(ValueError):  # it has ended
                self._end([ray.get_actor(former)])
        for place, name in enumerate(self._settings.actors):
            threading.Thread(target=self._hold, args=(name, place), name=name, daemon=True).start()

    def stop(self) -> None:
        self._end(tuple(self._handles.values()))

    def scale(self, number: int) -> None:
        """Have the first replicas; end the actors of others."""
        with self._scaled:
            self._number = number
            self._scaled.notify_all()
        left = [self._handles.pop(name, None) for name in tuple(self._settings.actors)[number:]]
        self._end([handle for handle in left if handle is not None])  # their threads see the end

    def restart(self, name: str) -> None:
        """Kill the processes of a replica; its actor ends with them, and is started again."""
        if (handle := self._handles.get(name)) is not None:
            handle.end_replica.remote()

    def _end(self, handles: Sequence[Any]) -> None:
        """End actors. On several machines the front end cannot end their replicas itself."""
        if self._slots is not None and handles:
            ending = [handle.end_replica.remote() for handle in handles]
            ray.wait(ending, num_returns=len(ending), timeout=_END_S)
        for handle in handles:
            ray.kill(handle, no_restart=True)

    def say(self, event: Event) -> None:
        with self._saying:
            self._out.write(pack_value(event))
            self._out.flush()

    def _hold(self, name: str, place: int) -> None:
        pause_s, told = _FIRST_PAUSE_S, ""
        while True:
            located = False
            try:
                if place >= self._number:
                    told = ""
                    self.leave(name)
                    with self._scaled:
                        self._scaled.wait_for(lambda: place < self._number)
                # By name each time: an actor that has ended for good is replaced by a new one.
                if (handle := self.actor(name)) is None:
                    time.sleep(LOOK_S)
                    continue
                self._handles[name] = handle
                found = msgspec.msgpack.decode(ray.get(handle.open.remote()), type=Opened | NotOpened)
                if isinstance(found, NotOpened):
                    self.say(Failed(name, found.error))
                    if self._slots is not None:
                        self._slots.fail(name)
                        self._end([handle])  # the next one may be on another machine
                    time.sleep(pause_s)
                    pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
                    continue
                located, pause_s, told = place < self._number, _FIRST_PAUSE_S, ""
                if located:
                    if self._slots is not None:
                        self._slots.settle(name, found.node)
                    self.say(Located(name, found))
                while place < self._number:
                    ray.get(handle.watch.remote(_WATCH_S))
            except RayTaskError as error:  # of the actor's own code
                self.say(Failed(name, ErrorValue("engine_dead", f"{type(error.cause).__name__}: {error.cause}")))
                time.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
            except BadConfig as error:  # no machine has room
                if told != str(error) and time.monotonic() - self._began_s > self._settings.join_s:
                    told = str(error)
                    self.say(Failed(name, ErrorValue.of(error)))
                time.sleep(LOOK_S)
            except RayError as error:
                if located and place < self._number:
                    self.say(Lost(name, str(error).strip().splitlines()[0]))
                time.sleep(_FIRST_PAUSE_S)  # until Ray has started it again, calls may fail

    def actor(self, name: str) -> Any:
        """A new actor, or the one of an earlier driver; None while the machine of a running replica joins Ray again.

        Raises:
            BadConfig: No machine has room.
        """
        options = ray_settings.actor_options(self._named[name], self._settings.num_gpus)
        if self._slots is not None and self._settings.need is not None:
            recent = time.monotonic() - self._began_s < self._settings.join_s
            machine = self._slots.choose(name, machines(), wait_for_home=recent)
            if machine is None:
                return None
            # It is started again on its machine only. This driver chooses another one when the machine has ended.
            need = self._settings.need
            options |= {"num_cpus": need.cpus, "num_gpus": need.gpus}
            if need.memory_bytes:
                options["memory"] = need.memory_bytes
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(machine.node_id, soft=False)
        return ray.remote(ReplicaActor).options(**options).remote(msgspec.msgpack.encode(self._settings.actors[name]))

    def leave(self, name: str) -> None:
        """End the actor of a replica that is not wanted any more, as an earlier driver may have left it."""
        if self._slots is not None:
            self._slots.leave(name)
        with contextlib.suppress(ValueError):  # there is none
            self._end([ray.get_actor(self._named[name])])


def machines() -> list[Machine]:
    found = []
    for node in ray.nodes():
        resources = node["Resources"]
        if node["Alive"] and (key := node["NodeName"]).startswith(ray_settings.KEY_PREFIX):
            found.append(
                Machine(
                    key=key,
                    node_id=node["NodeID"],
                    host=node["NodeManagerAddress"],
                    cpus=int(resources.get("CPU", 0)),
                    gpus=int(resources.get("GPU", 0)),
                    memory_bytes=int(resources.get("memory", 0)),
                )
            )
    return found


def main() -> None:
    settings = read_value(sys.stdin.buffer, DriverSettings)
    # Ray writes pages to both when a process ends; the front end's log has its own lines about that.
    out, problems = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(2), "w")
    with open(settings.log_file, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    driver = Driver(settings, out)
    try:
        # Actors are loaded from the installed package: Ray may forget the class with the driver that sent it, and would
        # then start its actors again without end.
        ray.init(**settings.connection, job_config=JobConfig(code_search_path=[sys.prefix]))
        driver.start()
    except BadConfig as error:
        driver.say(Failed("", ErrorValue.of(error)))
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        print(f"the driver cannot use Ray: {lines[0]}", file=problems, flush=True)
        os._exit(1)
    with contextlib.suppress(EOFError):  # the front end has closed it, or has ended
        while True:
            order: Any = read_value(sys.stdin.buffer, cast(Any, Order))
            match order:
                case Scale(number=number):
                    driver.scale(number)
                case Restart(name=name):
                    driver.restart(name)
    # If Ray's head is gone, the calls do not return.
    threading.Thread(target=_leave_late, daemon=True).start()
    driver.stop()
    ray.shutdown()
    os._exit(0)


def _leave_late() -> None:
    time.sleep(_STOP_S)
    os._exit(1)


# Which machine gets a replica: the one with the most room, or the one on which it runs already.


class Machine(NamedTuple):
    """A machine in Ray.

    Attributes:
        key: See `NodeSettings`.
        node_id: Of Ray, for its present run.
    """

    key: str
    node_id: str
    host: str
    cpus: int
    gpus: int
    memory_bytes: int

    def room(self, need: Need) -> int:
        """How many replicas it takes."""
        rooms = [self.cpus // need.cpus]
        if need.gpus:
            rooms.append(self.gpus // need.gpus)
        if need.memory_bytes:
            rooms.append(self.memory_bytes // need.memory_bytes)
        return min(rooms)


class NodeSlots:
    """The machines of replicas. Its methods may be called by several threads."""

    def __init__(self, need: Need, homes: Mapping[str, str]) -> None:
        """homes: where replicas may run already, by name."""
        self._need = need
        self._homes = dict(homes)
        self._awaited = {name for name, key in homes.items() if key}
        self._failed: dict[str, set[str]] = {}  # machines on which replicas did not start, by name
        self._lock = threading.Lock()

    def choose(self, name: str, machines: Iterable[Machine], *, wait_for_home: bool = False) -> Machine | None:
        """The machine for a replica, which has a place there from now on.

        Args:
            wait_for_home: Return None while a machine that `homes` named has not been among them.

        Raises:
            BadConfig: No machine has room.
        """
        found = sorted(machines)
        with self._lock:
            home = self._homes.get(name)
            for machine in found:
                if machine.key == home:
                    self._awaited.discard(name)
                    return machine
            if name in self._awaited and wait_for_home:
                return None
            self._awaited.discard(name)
            self._homes.pop(name, None)
            used = {machine.key: 0 for machine in found}
            for key in self._homes.values():
                if key in used:
                    used[key] += 1
            free = {machine: machine.room(self._need) - used[machine.key] for machine in found}
            failed = self._failed.get(name, set())
            best = max(found, key=lambda each: (free[each] > 0, each.key not in failed, free[each]), default=None)
            if best is None or free[best] < 1:
                raise BadConfig(self._no_room(name, found, used))
            self._homes[name] = best.key
            return best

    def fail(self, name: str) -> None:
        """A replica does not start on its machine. It gets another one, if one has room that it was not tried on."""
        with self._lock:
            if (key := self._homes.pop(name, None)) is None:
                return
            failed = self._failed.setdefault(name, set())
            if key in failed:  # all have been tried
                failed.clear()
            failed.add(key)

    def settle(self, name: str, key: str) -> None:
        """A replica runs on a machine."""
        with self._lock:
            self._failed.pop(name, None)
            self._awaited.discard(name)
            self._homes[name] = key

    def leave(self, name: str) -> None:
        """A replica is not wanted any more."""
        with self._lock:
            self._homes.pop(name, None)

    def _no_room(self, name: str, machines: list[Machine], used: Mapping[str, int]) -> str:
        shown = ", ".join(
            f"{each.host} has {_resources(each.cpus, each.gpus, each.memory_bytes, self._need)} and "
            f"{used[each.key]} replica{'s' * (used[each.key] != 1)}"
            for each in machines
        )
        need = _resources(self._need.cpus, self._need.gpus, self._need.memory_bytes, self._need)
        return (
            f"no machine has room for {name}, which needs {need}; {shown or 'none has joined'}; let another machine "
            "join, or change `replicas` in the plan"
        )


def _resources(cpus: int, gpus: int, memory_bytes: int, need: Need) -> str:
    parts = [f"{cpus} CPU{'s' * (cpus != 1)}"]
    if need.gpus:
        parts.append(f"{gpus} GPU{'s' * (gpus != 1)}")
    if need.memory_bytes:
        parts.append(f"{memory_bytes / 2**30:.3g} GiB")
    return ", ".join(parts)


if __name__ == "__main__":
    main()
