"""The actor of a replica on one of several machines, without Ray: its process, and one that it finds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.cluster.nodes.test_places import a_site
from vlora.cluster import claim
from vlora.cluster.nodes.certificates import Authority
from vlora.cluster.on_ray.actor import ActorSettings, NotOpened, Opened, ReplicaActor
from vlora.cluster.on_ray.own_processes import end_all, replica_processes
from vlora.cluster.on_ray.settings import Folder
from vlora.cluster.on_ray.site import SITE_VARIABLE, write_site
from vlora.config import EngineConfig

pytestmark = pytest.mark.slow

SLEEPING = ("", "-m", "tests.cluster.sleeping_engine")
NEVER_READY = ("", "-c", "import time; time.sleep(60)")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """The files of a machine."""
    found = Folder(str(tmp_path))
    Path(found.secret_file).write_text("a secret of more than 16 bytes")
    Authority().issue("127.0.0.1").write(found)
    site = a_site(tmp_path)
    files = {"cert_file": f"{tmp_path}/cert.pem", "key_file": f"{tmp_path}/key.pem"}
    write_site(found, msgspec.structs.replace(site, **files))
    monkeypatch.setenv(SITE_VARIABLE, found.site_file)
    monkeypatch.setattr(ReplicaActor, "end_after_replica", lambda actor: None)  # it would end this process
    yield found
    end_all(found)


def an_actor(command: tuple[str, ...] = SLEEPING, **settings: int) -> ReplicaActor:
    config = EngineConfig(model="m", **settings)  # type: ignore[arg-type]
    return ReplicaActor(
        msgspec.msgpack.encode(ActorSettings(config=config, name="replica-0", command=command, alone_s=30.0))
    )


def opened(actor: ReplicaActor) -> Opened:
    return msgspec.msgpack.decode(actor.open(), type=Opened)


def wait(condition: Callable[[], object]) -> None:
    ends_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.02)


def test_a_replica_with_other_settings_is_ended_not_used(folder: Folder) -> None:
    """That of an earlier front end, which was killed."""
    first = opened(an_actor(max_batch_size=8)).replica
    assert opened(an_actor(max_batch_size=8)).replica == first
    second = opened(an_actor(max_batch_size=4)).replica
    assert second.pid != first.pid and claim.find(folder.claim_file("replica-0")) == second
    assert not {first.pid, first.engine_pid} & {process.pid for process in replica_processes(folder)}


def test_a_replica_that_still_starts_is_ended_with_its_actor(folder: Folder) -> None:
    actor, answers = an_actor(NEVER_READY), list[bytes]()
    opening = threading.Thread(target=lambda: answers.append(actor.open()))
    opening.start()
    wait(lambda: len(replica_processes(folder)) == 2)  # with the engine's process
    actor.end_replica()
    opening.join(10)
    (answer,) = answers
    assert "ended with code" in msgspec.msgpack.decode(answer, type=NotOpened).error.message
    wait(lambda: not [each for each in replica_processes(folder) if each.status() != psutil.STATUS_ZOMBIE])
