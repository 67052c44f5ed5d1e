"""What starts replicas on machines, without Ray: settings, slots, ports, the driver's reports, and the actor."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.processes import PATIENCE_S, until
from vlora.cluster import process_lock
from vlora.cluster.nodes.certificates import Authority
from vlora.cluster.on_ray import settings
from vlora.cluster.on_ray.actor import ActorSettings, NotOpened, Opened, ReplicaActor
from vlora.cluster.on_ray.cluster import with_shared_cores
from vlora.cluster.on_ray.driver import Machine, NodeSlots
from vlora.cluster.on_ray.log_pipe import LogPipe
from vlora.cluster.on_ray.node_settings import NodeSettings, taken_slot, write_node
from vlora.cluster.on_ray.own_processes import end_all, replica_processes
from vlora.cluster.on_ray.reports import DriverSettings, Event, Failed, Need, replica_names
from vlora.cluster.on_ray.settings import NODE_VARIABLE, Folder, Ports, is_free
from vlora.config import EngineConfig
from vlora.errors import BadConfig
from vlora.types import ErrorValue
from vlora.wire.framing import read_value


def test_settings_of_another_ray_do_not_reach_this_one() -> None:
    folder = Folder("/tmp/f")
    foreign = {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_AUTH_TOKEN": "t", "RAY_AUTH_MODE": "disabled", "HOME": "/h"}
    found = settings.environment(folder, foreign)
    assert found["HOME"] == "/h" and not {"RAY_ADDRESS", "RAY_AUTH_TOKEN"} & set(found)
    assert (found["RAY_AUTH_MODE"], found["RAY_AUTH_TOKEN_PATH"]) == ("token", "/tmp/f/token")


def test_secrets_are_new_and_for_this_user_only() -> None:
    first, second = Folder.create(), Folder.create()
    try:
        assert stat.S_IMODE(os.stat(first.path).st_mode) == 0o700
        for file in (first.token_file, first.secret_file):
            assert stat.S_IMODE(os.stat(file).st_mode) == 0o600 and len(Path(file).read_bytes()) == 64
        assert len({first.secret(), second.secret(), *(Path(f.token_file).read_bytes() for f in (first, second))}) == 4
    finally:
        first.remove()
        second.remove()
    assert not os.path.exists(first.path)


def test_paths_versions_and_ports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The paths of sockets stay short, a Ray without authentication is refused, a range with a port in use skipped."""
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = Folder.create()
    folder.remove()
    assert len(folder.ray_folder) <= 40
    for version in ("2.51.2", "1.13.0", "2.9"):
        with pytest.raises(BadConfig, match=rf"^Ray {version} is installed, .*; 2\.52 or later is needed: pip install"):
            settings.check_version(version)
    for version in ("2.52.0", "2.60.0", "3.0.0rc1"):
        settings.check_version(version)
    found = settings.find_ports(4)
    with socket.create_server(("127.0.0.1", found.last)):
        assert settings.find_ports(4).first > found.last
    given = [int(flag.rpartition("=")[2]) for flag in Ports(20_000, 4).flags()]
    assert [port for port in given if port] == [*range(20_000, 20_008), 20_010, 20_041]
    # Each way to Ray has an address, and none is a default.
    assert settings.connection(Folder("/tmp/f"), "127.0.0.1:20000")["address"] == "127.0.0.1:20000"
    command = settings.start_command(Folder("/tmp/f"), Ports(20_000, 2))
    assert {"--include-dashboard=false", "--disable-usage-stats"} <= set(command)


def test_replicas_divide_the_cores_and_have_fixed_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later Ray does not know which GPUs the replicas have that it finds."""
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    for config, threads in (
        (EngineConfig(model="m"), 4),
        (EngineConfig(model="m", tensor_parallel=2), 2),
        (EngineConfig(model="m", threads=3), 3),
    ):
        assert with_shared_cores(config, 2).threads == threads
    folder, marked = Folder("/tmp/f"), {"VLORA_REPLICAS_OF": "/tmp/f"}
    given = {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "4,5,6,7", "RAY_AUTH_TOKEN": "t"}
    found = [settings.replica_environment(folder, given, place=place, num_gpus=2) for place in (0, 1)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["4,5", "6,7"] and found[0]["OMP_NUM_THREADS"] == "3"
    found = [settings.replica_environment(folder, {}, place=place, num_gpus=1) for place in (0, 1)]
    assert found == [{"OMP_NUM_THREADS": None, "CUDA_VISIBLE_DEVICES": gpu, **marked} for gpu in ("0", "1")]
    found = [settings.replica_environment(folder, given, place=1, num_gpus=0)]
    assert found == [{"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "4,5,6,7", **marked}]


def actor_settings(tmp_path: Path, config: EngineConfig, command: tuple[str, ...]) -> bytes:
    (tmp_path / "secret").write_bytes(b"a secret of more than 16 bytes")
    files: dict[str, Any] = {"secret_file": str(tmp_path / "secret"), "lock_file": str(tmp_path / "lock")}
    settings = ActorSettings(
        config=config, log_pipe=str(tmp_path / "log"), command=command, environ={}, alone_s=60.0, **files
    )
    return msgspec.msgpack.encode(settings)


def test_an_actor_returns_the_error_of_an_engine_that_does_not_start_and_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import os, sys; print('first\\nsecond', file=sys.stderr, flush=True); os._exit(3)"
    for command, error in (
        ((sys.executable, "-c", code), "the engine process ended with exit code 3 while starting"),
        ((sys.executable, "-m", "tests.server.scripted_process"), "model 'broken' cannot be loaded: there is no such"),
    ):
        given = actor_settings(tmp_path, EngineConfig(model="broken"), command)

        async def opened(given: bytes = given) -> bytes:
            log = LogPipe(str(tmp_path / "log"))
            try:
                return await asyncio.to_thread(ReplicaActor(given).open)
            finally:
                log.close()

        found = msgspec.msgpack.decode(asyncio.run(opened()), type=NotOpened).error
        assert isinstance(found, ErrorValue) and error in found.message
        assert command[1] == "-m" or capsys.readouterr().err == "first\nsecond\n"


ONE, TWO = (
    Machine("vlora-1", "a", "10.0.0.1", cpus=4, gpus=2, memory_bytes=8 << 30),
    Machine("vlora-2", "b", "10.0.0.2", cpus=8, gpus=0, memory_bytes=64 << 30),
)


def chosen(slots: NodeSlots, name: str, *machines: Machine) -> str:
    found = slots.choose(name, machines)
    assert found is not None
    return found.key


def test_replicas_go_where_the_most_room_is_and_stay() -> None:
    slots = NodeSlots(Need(cpus=2), {})
    found = [chosen(slots, f"r{index}", ONE, TWO) for index in range(6)]
    assert found == ["vlora-2", "vlora-2", "vlora-1", "vlora-2", "vlora-1", "vlora-2"]
    assert chosen(slots, "r2", ONE, TWO) == "vlora-1"
    with pytest.raises(BadConfig) as caught:
        slots.choose("r6", [ONE, TWO])
    assert str(caught.value) == (
        "no machine has room for r6, which needs 2 CPUs; 10.0.0.1 has 4 CPUs and 2 replicas, 10.0.0.2 has 8 CPUs and 4 "
        "replicas; let another machine join, or change `replicas` in the plan"
    )
    slots.leave("r0")
    assert chosen(slots, "r6", ONE, TWO) == "vlora-2"
    # The scarcest resource decides.
    scarce = ((Need(cpus=4), [1, 2]), (Need(cpus=1, gpus=1), [2, 0]), (Need(cpus=1, memory_bytes=4 << 30), [2, 8]))
    for need, room in scarce:
        assert [machine.room(need) for machine in (ONE, TWO)] == room


def test_a_replica_of_a_lost_machine_or_that_does_not_start_gets_another_one() -> None:
    """A later driver waits for the machine of a running replica, for a time."""
    slots = NodeSlots(Need(cpus=2), {})
    found = [chosen(slots, "r", *machines) for machines in ((ONE, TWO), (ONE,), (ONE, TWO))]
    assert found == ["vlora-2", "vlora-1", "vlora-1"]
    with pytest.raises(BadConfig, match="which needs 2 CPUs; none has joined; let another"):
        slots.choose("other", [])
    slots, third, tried = NodeSlots(Need(cpus=4), {}), ONE._replace(key="vlora-3", cpus=2), []  # which has no room
    for _ in range(4):
        tried.append(chosen(slots, "r", ONE, TWO, third))
        slots.fail("r")
    assert tried == ["vlora-2", "vlora-1", "vlora-2", "vlora-1"]
    assert chosen(slots, "other", ONE, TWO, third) == "vlora-2"
    later = [NodeSlots(Need(cpus=2), {"r": "vlora-2"}) for _ in range(3)]
    assert later[0].choose("r", [ONE], wait_for_home=True) is None
    assert [chosen(later[0], "r", ONE, TWO), chosen(later[1], "r", ONE)] == ["vlora-2", "vlora-1"]  # after its patience
    assert chosen(later[2], "r", ONE, TWO) == "vlora-2"
    found_again = later[2].choose("r", [ONE], wait_for_home=True)  # it was there, and is lost since
    assert found_again is not None and found_again.key == "vlora-1"


def a_node(tmp_path: Path, *, ports: int = 3, num_gpus: int = 0, **variables: str) -> NodeSettings:
    # Above the ports that the system gives to connections.
    first = next(first for first in range(61_000, 65_000, 10) if all(map(is_free, range(first, first + ports))))
    files = {"cert_file": "c", "key_file": "k", "model": "m", "host": "127.0.0.1"}
    return NodeSettings(
        key="vlora-1",
        folder=str(tmp_path),
        first_port=first,
        last_port=first + ports - 1,
        num_gpus=num_gpus,
        variables=variables,
        **files,
    )


def test_replicas_of_a_machine_have_different_ports_and_gpus(tmp_path: Path) -> None:
    node = a_node(tmp_path, num_gpus=5, CUDA_VISIBLE_DEVICES="3,4,5,6,7")
    with taken_slot(node, 2) as one, taken_slot(node, 2) as two:
        assert (one.place, two.place) == (0, 1)
        assert [node.environ(slot.place, 2)["CUDA_VISIBLE_DEVICES"] for slot in (one, two)] == ["3,4", "5,6"]
        with pytest.raises(
            BadConfig, match=r"^127\.0\.0\.1 has 5 GPUs, which 2 replicas use; let another machine join"
        ):
            taken_slot(node, 2).__enter__()
    with taken_slot(node, 2) as again:
        assert again.place == 0


def test_a_slot_is_held_by_the_process_that_has_inherited_it(tmp_path: Path) -> None:
    node = a_node(tmp_path)
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with taken_slot(node, 0) as slot:
        replica = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(slot.file,), close_fds=True
        )
    with replica:
        assert replica.stdout is not None and replica.stdout.readline()
        with taken_slot(node, 0) as other:
            assert other.place == slot.place + 1
        replica.kill()
    with taken_slot(node, 0) as again:
        assert again.place == slot.place


def test_a_port_of_another_program_is_skipped(tmp_path: Path) -> None:
    node = a_node(tmp_path, ports=2)
    with socket.create_server(("", node.first_port)):
        with taken_slot(node, 0) as slot:
            assert (slot.place, slot.port) == (0, node.first_port + 1)
        with (
            socket.create_server(("", node.last_port)),
            pytest.raises(BadConfig, match=r"^all ports from \d+ to \d+ of"),
        ):
            taken_slot(node, 0).__enter__()


def test_a_site_is_read_from_the_file_that_the_environment_names(tmp_path: Path) -> None:
    node, folder = a_node(tmp_path, OMP_NUM_THREADS="3"), Folder(str(tmp_path))
    write_node(folder, node)
    write_node(folder, node)
    assert NodeSettings.read({NODE_VARIABLE: folder.node_file}) == node and NodeSettings.read({}) is None
    found = node.environ(0, 0)
    assert found["OMP_NUM_THREADS"] == "3" and found[NODE_VARIABLE] is None
    assert found["VLORA_REPLICAS_OF"] == str(tmp_path) and os.listdir(tmp_path) == ["node"]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_replica_without_room_is_reported_again_after_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front end has forgotten the report of the replica that it released."""
    from vlora.cluster.on_ray import driver
    from vlora.cluster.on_ray.driver import Driver

    def no_room(self: Driver, name: str) -> Any:
        raise BadConfig("no machine has room")

    monkeypatch.setattr(driver, "LOOK_S", 0.02)
    monkeypatch.setattr(driver, "list_named_actors", list)
    monkeypatch.setattr("ray.cluster_resources", dict)
    monkeypatch.setattr(Driver, "actor", no_room)
    left = threading.Semaphore(0)
    monkeypatch.setattr(Driver, "leave", lambda self, name: left.release())
    actors = {name: ActorSettings(config=EngineConfig(model="m"), command=(), alone_s=1.0) for name in replica_names(1)}
    settings = DriverSettings(connection={}, actors=actors, number=1, log_file="", need=Need(cpus=1), join_s=0.0)
    out = io.BytesIO()
    found = Driver(settings, out)
    found.start()

    def reports() -> list[Any]:
        data = io.BytesIO(out.getvalue())
        events: list[Any] = []
        while data.tell() < len(data.getvalue()):
            events.append(read_value(data, Event))  # type: ignore[arg-type]
        return events

    until(lambda: len(reports()) == 1)
    time.sleep(0.1)
    assert len(reports()) == 1  # and no more
    found.scale(0)
    assert left.acquire(timeout=PATIENCE_S)
    found.scale(1)
    until(lambda: len(reports()) == 2)
    found.scale(0)
    assert left.acquire(timeout=PATIENCE_S)  # the thread waits from now on
    assert {type(each) for each in reports()} == {Failed}


SLEEPING = ("", "-m", "tests.cluster.sleeping_engine")
NEVER_READY = ("", "-c", "import time; time.sleep(60)")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """The files of a machine."""
    found = Folder(str(tmp_path))
    Path(found.secret_file).write_text("a secret of more than 16 bytes")
    Authority().issue("127.0.0.1").write(found)
    node = a_node(tmp_path)
    files = {"cert_file": f"{tmp_path}/cert.pem", "key_file": f"{tmp_path}/key.pem"}
    write_node(found, msgspec.structs.replace(node, **files))
    monkeypatch.setenv(NODE_VARIABLE, found.node_file)
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


@pytest.mark.slow
def test_a_replica_with_other_settings_is_ended_not_used(folder: Folder) -> None:
    """That of an earlier front end, which was killed."""
    first = opened(an_actor(max_batch_size=8)).replica
    assert opened(an_actor(max_batch_size=8)).replica == first
    second = opened(an_actor(max_batch_size=4)).replica
    assert second.pid != first.pid and process_lock.find(folder.lock_file("replica-0")) == second
    assert not {first.pid, first.engine_pid} & {process.pid for process in replica_processes(folder)}


@pytest.mark.slow
def test_a_replica_that_still_starts_is_ended_with_its_actor(folder: Folder) -> None:
    actor, answers = an_actor(NEVER_READY), list[bytes]()
    opening = threading.Thread(target=lambda: answers.append(actor.open()))
    opening.start()
    until(lambda: len(replica_processes(folder)) == 2)  # with the engine's process
    actor.end_replica()
    opening.join(PATIENCE_S)
    (answer,) = answers
    assert "ended with code" in msgspec.msgpack.decode(answer, type=NotOpened).error.message
    until(lambda: not [each for each in replica_processes(folder) if each.status() != psutil.STATUS_ZOMBIE])
