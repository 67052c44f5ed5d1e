"""The keeper: the only driver of Ray, in a process of its own. It creates the replicas' actors and reports on them.

Run as `python -m vlora.cluster.on_ray.keeper`, with a `KeeperSettings` and later `Scale`s on stdin. It writes events
(`reports.py`) to stdout, and ends the actors when stdin ends. The actors outlive a keeper that is killed; the next one
finds them by their names, or creates new ones, which find the replicas. Ray may end a driver after its head, so a front
end is no driver.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError

from vlora.cluster import framing
from vlora.cluster.on_ray import settings as ray_settings
from vlora.cluster.on_ray.actor import NotOpened, Opened, ReplicaActor
from vlora.cluster.on_ray.reports import Event, Failed, KeeperSettings, Located, Lost, Scale
from vlora.errors import BadConfig
from vlora.types import ErrorValue

_WATCH_S = 60.0  # of one call that watches an actor; those of a killed keeper end by then
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_STOP_S = 3.0


class Keeper:
    """Holds one actor for each replica that there is, with a thread for each that there may be."""

    def __init__(self, settings: KeeperSettings, out: Any) -> None:
        """out: a binary file for events."""
        self._settings = settings
        self._out = out
        self._saying = threading.Lock()
        self._handles: dict[str, Any] = {}
        self._number = settings.number
        self._scaled = threading.Condition()

    def start(self) -> None:
        """Begin to hold the replicas.

        Raises:
            BadConfig: The machine has not enough GPUs.
        """
        number = len(self._settings.actors)
        wanted, found = number * self._settings.num_gpus, int(ray.cluster_resources().get("GPU", 0))
        if wanted > found:
            raise BadConfig(
                f"{number} replicas need {wanted} GPUs, and Ray finds {found} on this machine; lower --replicas or "
                "--tensor-parallel"
            )
        for place, name in enumerate(self._settings.actors):
            threading.Thread(target=self._hold, args=(name, place), name=name, daemon=True).start()

    def stop(self) -> None:
        """End the actors."""
        for handle in tuple(self._handles.values()):
            ray.kill(handle, no_restart=True)

    def scale(self, number: int) -> None:
        """Have the first replicas; end the actors of others."""
        with self._scaled:
            self._number = number
            self._scaled.notify_all()
        for name in tuple(self._settings.actors)[number:]:
            if (handle := self._handles.pop(name, None)) is not None:
                ray.kill(handle, no_restart=True)  # its thread sees the end

    def say(self, event: Event) -> None:
        with self._saying:
            self._out.write(framing.pack(event))
            self._out.flush()

    def _hold(self, name: str, place: int) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            located = False
            try:
                if place >= self._number:
                    _end_actor(name)
                    with self._scaled:
                        self._scaled.wait_for(lambda: place < self._number)
                # By name each time: an actor that has ended for good is replaced by a new one.
                handle = self._handles[name] = self._actor(name)
                found = msgspec.msgpack.decode(ray.get(handle.open.remote()), type=Opened | NotOpened)
                if isinstance(found, NotOpened):
                    self.say(Failed(name, found.error))
                    time.sleep(pause_s)
                    pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
                    continue
                located, pause_s = place < self._number, _FIRST_PAUSE_S
                if located:
                    self.say(Located(name, found))
                while place < self._number:
                    ray.get(handle.watch.remote(_WATCH_S))
            except RayTaskError as error:  # of the actor's own code
                self.say(Failed(name, ErrorValue("engine_dead", f"{type(error.cause).__name__}: {error.cause}")))
                time.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
            except RayError as error:
                if located and place < self._number:
                    self.say(Lost(name, str(error).strip().splitlines()[0]))
                time.sleep(_FIRST_PAUSE_S)  # until Ray has started it again, calls may fail

    def _actor(self, name: str) -> Any:
        """A new actor, or the one of an earlier keeper."""
        options = ray_settings.actor_options(name, self._settings.num_gpus)
        return ray.remote(ReplicaActor).options(**options).remote(msgspec.msgpack.encode(self._settings.actors[name]))


def _end_actor(name: str) -> None:
    """End the actor of a replica that is not wanted any more, as an earlier keeper may have left it."""
    with contextlib.suppress(ValueError):  # there is none
        ray.kill(ray.get_actor(name), no_restart=True)


def main() -> None:
    settings = framing.read(sys.stdin.buffer, KeeperSettings)
    # Ray writes pages to both when a process ends; the front end's log has its own lines about that.
    out, problems = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(2), "w")
    with open(settings.log_file, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    keeper = Keeper(settings, out)
    try:
        ray.init(**ray_settings.connection(settings.ports))
        keeper.start()
    except BadConfig as error:
        keeper.say(Failed("", ErrorValue.of(error)))
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        print(f"the keeper cannot use Ray: {lines[0]}", file=problems, flush=True)
        os._exit(1)
    with contextlib.suppress(EOFError):  # the front end has closed it, or has ended
        while True:
            keeper.scale(framing.read(sys.stdin.buffer, Scale).number)
    # If Ray's head is gone, the calls do not return.
    threading.Thread(target=_leave_late, daemon=True).start()
    keeper.stop()
    ray.shutdown()
    os._exit(0)


def _leave_late() -> None:
    time.sleep(_STOP_S)
    os._exit(1)


if __name__ == "__main__":
    main()
