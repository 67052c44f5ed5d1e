"""The keeper's reports of replicas that no machine can take. Ray is not started."""

from __future__ import annotations

import importlib.util
import io
import threading
import time
from typing import Any

import pytest

from vlora.cluster import framing
from vlora.cluster.on_ray.actor import ActorSettings
from vlora.cluster.on_ray.reports import Event, Failed, KeeperSettings, Need, replica_names
from vlora.config import EngineConfig
from vlora.errors import BadConfig

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


def test_a_replica_without_room_is_reported_again_after_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front end has forgotten the report of the replica that it released."""
    from vlora.cluster.on_ray import keeper
    from vlora.cluster.on_ray.keeper import Keeper

    def no_room(self: Keeper, name: str) -> Any:
        raise BadConfig("no machine has room")

    monkeypatch.setattr(keeper, "LOOK_S", 0.02)
    monkeypatch.setattr(keeper, "list_named_actors", list)
    monkeypatch.setattr("ray.cluster_resources", dict)
    monkeypatch.setattr(Keeper, "actor", no_room)
    left = threading.Semaphore(0)
    monkeypatch.setattr(Keeper, "leave", lambda self, name: left.release())
    actors = {name: ActorSettings(config=EngineConfig(model="m"), command=(), alone_s=1.0) for name in replica_names(1)}
    settings = KeeperSettings(connection={}, actors=actors, number=1, log_file="", need=Need(cpus=1), join_s=0.0)
    out = io.BytesIO()
    found = Keeper(settings, out)
    found.start()

    def reports() -> list[Any]:
        data = io.BytesIO(out.getvalue())
        events: list[Any] = []
        while data.tell() < len(data.getvalue()):
            events.append(framing.read(data, Event))  # type: ignore[arg-type]
        return events

    def wait_for(number: int) -> None:
        ends_s = time.monotonic() + 5
        while len(reports()) < number:
            assert time.monotonic() < ends_s, reports()
            time.sleep(0.02)

    wait_for(1)
    time.sleep(0.1)
    assert len(reports()) == 1  # and no more
    found.scale(0)
    assert left.acquire(timeout=5)
    found.scale(1)
    wait_for(2)
    found.scale(0)
    assert left.acquire(timeout=5)  # the thread waits from now on
    assert {type(each) for each in reports()} == {Failed}
