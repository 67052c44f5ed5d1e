"""Which machine gets a replica: the one with the most room, or the one on which it runs already. Imports no Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vlora.cluster.on_ray.reports import Need
from vlora.errors import BadConfig


class Machine(NamedTuple):
    """A machine in Ray.

    Attributes:
        key: See `Site`.
        node_id: Of Ray, for its present run.
        memory_bytes: For replicas.
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


class Places:
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
            machines: Those that can be used.
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
