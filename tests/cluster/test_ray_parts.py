"""What starts replicas on Ray, without Ray: settings, the actor and its process, room on nodes, and the namespace."""

from __future__ import annotations

import importlib.util
import itertools
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from tests.cluster.sleeping_engine import COMMAND
from tests.processes import PATIENCE_S, is_alive, until
from vlora.cluster.model_files import model_digest, own_path, portable
from vlora.cluster.on_ray import settings
from vlora.cluster.on_ray.actor import ReplicaActor
from vlora.cluster.on_ray.processes import driver_settings
from vlora.cluster.on_ray.reports import ActorReport, Ended, Follows, HeadFacts, Opened, Owns, Service, missing
from vlora.cluster.on_ray.settings import Folder, RayOptions, with_cores
from vlora.cluster.replica import ReplicaSettings
from vlora.config import EngineConfig
from vlora.errors import BadConfig

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
SECRET = b"a secret of more than 16 bytes"
NEVER_READY = (sys.executable, "-c", "import time; time.sleep(60)")
ENDS = (sys.executable, "-c", "import os, sys; print('first\\nsecond', file=sys.stderr, flush=True); os._exit(3)")
MISSING = (sys.executable, "-m", "tests.server.scripted_process")


def test_settings_of_another_ray_do_not_reach_a_local_one() -> None:
    folder = Folder("/tmp/f")
    foreign = {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_AUTH_TOKEN": "t", "RAY_AUTH_MODE": "disabled", "HOME": "/h"}
    found = settings.environment(folder, foreign)
    assert found["HOME"] == "/h" and not {"RAY_ADDRESS", "RAY_AUTH_TOKEN"} & set(found)
    assert (found["RAY_AUTH_MODE"], found["RAY_AUTH_TOKEN_PATH"]) == ("token", "/tmp/f/token")


def test_tokens_are_new_and_for_this_user_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The paths of sockets stay short."""
    first, second = Folder.create(), Folder.create()
    try:
        assert stat.S_IMODE(os.stat(first.path).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(first.token_file).st_mode) == 0o600
        tokens = {Path(each.token_file).read_text() for each in (first, second)}
        assert len(tokens) == 2 and {len(each) for each in tokens} == {64}
    finally:
        first.remove()
        second.remove()
    assert not os.path.exists(first.path)
    (long := tmp_path / ("x" * 60)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = Folder.create()
    folder.remove()
    assert len(folder.ray_folder) <= 40


def test_a_folder_of_killed_processes_is_removed_by_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="f-") as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        monkeypatch.setenv("TMPDIR", parent)
        code = "from vlora.cluster.on_ray.settings import Folder; print(Folder.create().path)"
        left = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
        (other := Path(parent, "vlora-ray-other")).mkdir()  # of a process that has just made it
        kept = Folder.create()
        assert not os.path.exists(left)
        last = Folder.create()
        assert os.path.exists(kept.token_file) and other.exists()
        for each in (kept, last):
            each.remove()


def test_old_versions_of_ray_are_refused() -> None:
    for version in ("2.51.2", "1.13.0", "2.9"):
        with pytest.raises(BadConfig, match=rf"^Ray {version} is installed; 2\.60 or later is needed: pip install"):
            settings.check_version(version)
    for version in ("2.60.0", "2.61.1", "3.0.0rc1"):
        settings.check_version(version)


def test_what_an_actor_needs_and_gets() -> None:
    plain = RayOptions().of_actor(0)
    assert (plain["num_cpus"], plain["num_gpus"], plain["scheduling_strategy"]) == (1.0, 0, "SPREAD")
    assert plain["lifetime"] == "detached" and plain["max_restarts"] == -1
    assert plain["runtime_env"] == {"env_vars": {"RAY_worker_niceness": "0"}}
    assert not {"memory", "resources", "label_selector"} & set(plain)
    options = RayOptions(
        cpus=4,
        memory_gib=2,
        resources={"camera": 1},
        labels={"zone": "a"},
        placement="pack",
        runtime_env={"pip": ["x"], "env_vars": {"A": "b", "RAY_worker_niceness": "5"}},
    )
    found = options.of_actor(2)
    assert options.need(2) == {"CPU": 4, "GPU": 2, "memory": 2 << 30, "camera": 1}
    assert (found["memory"], found["resources"], found["label_selector"]) == (2 << 30, {"camera": 1}, {"zone": "a"})
    assert found["scheduling_strategy"] == "DEFAULT"
    assert found["runtime_env"] == {"pip": ["x"], "env_vars": {"A": "b", "RAY_worker_niceness": "5"}}


def test_replicas_divide_the_cores_of_a_machine_or_use_what_ray_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    for config, shared, own in (
        (EngineConfig(model="m"), 4, 3),
        (EngineConfig(model="m", tensor_parallel=2), 2, 1),
        (EngineConfig(model="m", threads=5), 5, 5),
    ):
        assert with_cores(config, 2, None).threads == shared and with_cores(config, 2, 3.5).threads == own
    assert with_cores(EngineConfig(model="m"), 2, 0).threads == 1


def test_a_model_has_the_path_of_each_machine_and_the_same_content(tmp_path: Path) -> None:
    from fusion.embedded import checkpoint_path

    assert portable(checkpoint_path()) == "package:fusion/embedded/checkpoint"
    assert own_path(portable(checkpoint_path())) == checkpoint_path()
    assert (
        portable(str(tmp_path)) == str(tmp_path) == own_path(str(tmp_path)) and portable("a/hub-name") == "a/hub-name"
    )
    (config := tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(2 << 20))
    first = model_digest(str(tmp_path))
    config.write_text("[]")
    assert model_digest(str(tmp_path)) != first and model_digest("a/hub-name") == "name a/hub-name"
    config.write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes((2 << 20) + 1))
    assert model_digest(str(tmp_path)) != first


# -- the actor --------------------------------------------------------------------------------------------------------

Started = Callable[..., ReplicaActor]


@pytest.fixture
def start() -> Iterator[Started]:
    """Starts actors in this process; `ended` counts those that have ended for good."""
    made: list[ReplicaActor] = []

    def started(command: tuple[str, ...] = COMMAND, alone_s: float = 60.0, **fields: Any) -> ReplicaActor:
        config = EngineConfig(model="sleeping", max_batch_size=8, block_size=16)
        given = {"config": config, "secret": SECRET, "command": command, "alone_s": alone_s, **fields}
        actor = ReplicaActor(alone_s, host="127.0.0.1", end=lambda: None)
        made.append(actor)
        actor.start(msgspec.msgpack.encode(ReplicaSettings(**given)))
        return actor

    yield started
    for actor in made:
        if (process := actor.process) is not None:
            process.kill()


def report(actor: ReplicaActor, number: int = 1) -> ActorReport:
    """The next report with another state than the first ones, and all lines since."""
    lines: tuple[str, ...] = ()
    ends_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends_s:
        found = msgspec.msgpack.decode(actor.watch(number, 1.0), type=ActorReport)
        lines += found.lines
        if found.number > number:
            return msgspec.structs.replace(found, lines=lines)
    raise AssertionError(lines)


@pytest.mark.slow
def test_a_replica_ends_with_its_pipe_and_is_started_again_by_a_call(start: Started) -> None:
    actor = start(model_digest="name sleeping")
    found = report(actor)
    opened = found.state
    assert isinstance(opened, Opened) and not opened.tls and opened.pid == os.getpid()
    actor.start(b"")  # it runs: nothing is changed
    actor.end_replica(opened.replica_pid + 1)  # another one
    assert is_alive(opened.replica_pid)
    assert actor.process is not None and actor.process.stdin is not None
    actor.process.stdin.close()
    ended = report(actor, found.number)
    assert isinstance(ended.state, Ended) and ended.state.served
    until(lambda: not is_alive(opened.engine_pid))
    actor.start(msgspec.msgpack.encode(ReplicaSettings(config=EngineConfig(model="m"), secret=SECRET, command=COMMAND)))
    again = report(actor, ended.number + 1).state
    assert isinstance(again, Opened) and again.replica_pid != opened.replica_pid
    os.kill(again.replica_pid, 19)  # both hang
    os.kill(again.engine_pid, 19)
    actor.end_replica(again.replica_pid)
    until(lambda: not is_alive(again.replica_pid) and not is_alive(again.engine_pid))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"command": ENDS}, "the engine process ended with exit code 3 while starting"),
        ({"command": MISSING, "model": "broken"}, "model 'broken' cannot be loaded: there is no such folder"),
        ({"model_digest": "other"}, "the model 'sleeping' is missing on 127.0.0.1, or differs from that of the front"),
    ],
)
def test_a_replica_that_does_not_start_is_reported_with_its_log(
    start: Started, fields: dict[str, Any], message: str
) -> None:
    if (model := fields.pop("model", None)) is not None:
        fields["config"] = EngineConfig(model=model)
    found = report(start(**fields))
    assert isinstance(found.state, Ended) and not found.state.served and message in found.state.error.message
    if fields.get("command") == ENDS:
        assert {"first", "second"} <= {*found.lines}


def test_settings_of_another_version_are_reported() -> None:
    actor = ReplicaActor(60.0, host="127.0.0.1", end=lambda: None)
    actor.start(b"\x01")
    found = report(actor).state
    assert isinstance(found, Ended) and found.error.message.startswith("the front end's settings cannot be used on 127")


@pytest.mark.slow
def test_a_replica_that_still_starts_ends_with_its_pipe(start: Started) -> None:
    actor = start(NEVER_READY)
    assert actor.process is not None and actor.process.stdin is not None
    replica = psutil.Process(actor.process.pid)
    until(lambda: len(replica.children()) == 1)
    [engine] = replica.children()
    actor.process.stdin.close()
    until(lambda: not is_alive(replica.pid) and not is_alive(engine.pid))


def test_an_actor_without_a_driver_and_a_replica_ends_for_good() -> None:
    ended = threading.Event()
    actor = ReplicaActor(0.3, host="127.0.0.1", end=ended.set)
    for _ in range(4):
        actor.watch(0, 0.15)  # a driver
        assert not ended.is_set()
    assert ended.wait(PATIENCE_S)


# -- the driver's parts -----------------------------------------------------------------------------------------------


def node(host: str, labels: dict[str, str] | None = None, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    own = {"NodeID": host, "NodeManagerAddress": host, "Alive": alive, "Labels": labels or {}}
    return {**own, "Resources": resources}


@pytest.mark.parametrize(
    ("need", "labels", "nodes", "free", "message"),
    [
        ({"CPU": 2.0}, {}, [node("a", CPU=4)], {"a": {"CPU": 2.0}}, ""),
        ({"CPU": 2.0}, {}, [node("a", CPU=4)], {"a": {"CPU": 1.0}}, "needs 2 CPU: a has 4 CPU (1 free)"),
        (
            {"CPU": 2.0, "GPU": 1.0},
            {},
            [node("a", CPU=8), node("b", CPU=1, GPU=1), node("c", CPU=8, GPU=8, alive=False)],
            {"a": {"CPU": 8.0}, "b": {"CPU": 1.0, "GPU": 1.0}},
            "needs 2 CPU, 1 GPU: a has 0 GPU (0 free); b has 1 CPU (1 free)",
        ),
        (
            {"CPU": 1.0, "memory": 4.0 * 2**30},
            {"zone": "x"},
            [node("a", {"zone": "y"}, CPU=8), node("b", {"zone": "x"}, CPU=2, memory=2**30)],
            {"a": {"CPU": 8.0}, "b": {"CPU": 2.0, "memory": 2.0**30}},
            "needs 1 CPU, 4 GiB of memory and a node with the labels zone=x: a has the labels zone=y; b has 1 GiB of "
            "memory (1 GiB free)",
        ),
        ({"camera": 1.0}, {}, [], {}, "needs 1 camera: it has no nodes"),
    ],
)
def test_what_is_missing_on_which_nodes(
    need: dict[str, float], labels: dict[str, str], nodes: Any, free: Any, message: str
) -> None:
    found = missing("replica-1", need, labels, nodes, free)
    assert found == (f"no node of Ray has room for replica-1, which {message}" if message else "")


@needs_ray
def test_an_actor_whose_process_starts_slowly_has_room() -> None:
    """Ray counts what it takes of its node, and no longer among what it looks for a node for."""
    from ray.core.generated.gcs_pb2 import ResourceUsageBatchData  # type: ignore[attr-defined]

    from vlora.cluster.on_ray.driver import is_queued

    usage = ResourceUsageBatchData()
    need = {"CPU": 1 / 3, "camera": 1.0}

    def demand(shape: dict[str, float], **queued: int) -> bool:
        usage.resource_load_by_shape.resource_demands.add(shape=shape, **queued)
        return is_queued(usage.SerializeToString(), need)

    of_ray = {"CPU": 0.3333, "camera": 1.0}
    assert not demand({"CPU": 0.3333}, num_ready_requests_queued=1)
    assert not demand(of_ray | {"camera": 2.0}, num_ready_requests_queued=1)
    assert not demand(of_ray)
    assert demand(of_ray, num_infeasible_requests_queued=1)
    del usage.resource_load_by_shape.resource_demands[-1]
    assert demand(of_ray, num_ready_requests_queued=1)


@pytest.mark.parametrize(
    ("facts", "warning"),
    [
        (HeadFacts(None, 60), ""),
        (HeadFacts(True, 600), ""),
        (HeadFacts(True, 60), "Ray's nodes wait 60 s for their head; if it is away for longer, all replicas end; set"),
        (
            HeadFacts(False, 60),
            "Ray's head keeps its state in memory: if it ends, all nodes and replicas end 60 s later",
        ),
    ],
)
def test_a_head_that_does_not_keep_its_state_is_warned_of(facts: HeadFacts, warning: str) -> None:
    assert facts.warning.startswith(warning) and bool(facts.warning) == bool(warning)


@needs_ray
def test_ray_is_asked_for_nodes_and_replicas_leave_those_that_it_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    from vlora.cluster.on_ray import driver

    requests: list[Any] = []
    events: list[Any] = []
    draining, free = {"a": 0}, {"a": {"CPU": 2.0}, "b": {"CPU": 0.0}}
    monkeypatch.setattr(driver, "request_resources", lambda **given: requests.append(given))
    monkeypatch.setattr(driver, "own_actors", set)
    monkeypatch.setattr(driver, "state", SimpleNamespace(get_draining_nodes=lambda: draining))
    monkeypatch.setattr(driver, "available_resources_per_node", lambda: free)
    monkeypatch.setattr(driver.ray, "nodes", lambda: [node("a", {"zone": "x"}, CPU=2), node("b", {"zone": "x"}, CPU=2)])
    monkeypatch.setattr(driver.Driver, "hold", lambda self, name: None)
    monkeypatch.setattr(driver.Driver, "say", lambda self, event: events.append(event))
    options = RayOptions(address="h:1", labels={"zone": "x"})
    replica = ReplicaSettings(config=EngineConfig(model="m"), secret=SECRET)

    def made(most: int) -> Any:
        found: Any = driver.Driver(driver_settings(options, replica, 2, most, Folder("/tmp/f"), "m"), None)
        found.scale(most)
        assert not requests  # another front end owns the service
        found._owns, found._lease = True, SimpleNamespace(release=lambda: True, is_followed=False)  # noqa: SLF001
        return found

    made(2).scale(2)
    assert not requests  # their number is fixed
    found = made(3)
    for number in (2, 3):
        found.scale(number)
        assert requests[-1] == {"bundles": [{"CPU": 1.0}] * number, "bundle_label_selectors": [{"zone": "x"}] * number}
    found.scale(2)

    def look(now_s: float = 0.0) -> list[Any]:
        found.look_at_nodes(now_s)
        return [each.name for each in events]

    found.nodes |= {"replica-0": "a", "replica-1": "a"}
    assert look() == []  # none has room
    free["b"]["CPU"] = 2.0
    assert look() == look() == ["replica-0"]  # one by one
    found.nodes["replica-0"] = "b"
    free["b"]["CPU"] = 0.0
    draining["a"] = 60_000
    assert look(40.0) == ["replica-0"]
    assert look(50.0) == look(51.0) == ["replica-0", "replica-1"]  # it ends soon
    found.stop()
    assert requests[-1] == {"bundles": [], "bundle_label_selectors": []}


@needs_ray
def test_one_front_end_owns_a_service_and_others_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    from vlora.cluster.on_ray import connecting
    from vlora.cluster.on_ray.connecting import Lease

    stored: dict[tuple[bytes, bytes], bytes] = {}
    now_s, times = 0.0, itertools.count()
    store = SimpleNamespace(
        get=lambda key, namespace: stored.get((namespace, key)),
        delete=lambda key, namespace: stored.pop((namespace, key), None),
        put=lambda key, value, namespace, overwrite: put((namespace, key), value, overwrite),
    )

    def put(at: tuple[bytes, bytes], value: bytes, overwrite: bool) -> bool:
        existed = at in stored
        stored[at] = value if overwrite or not existed else stored[at]
        return existed

    monkeypatch.setattr(connecting, "store", store)
    monkeypatch.setattr(connecting, "time", SimpleNamespace(monotonic=lambda: now_s, time_ns=lambda: next(times)))

    def lease(key: str, namespace: str = "n", settings: str = "same", model: str = "m") -> Lease:
        return Lease(namespace, Service(key=key, settings=settings, model=model, host="h", pid=7))

    first, second = lease("a"), lease("b")
    assert first.take() is None and first.renew() is None
    assert (again := lease("a")).take() is None and again.term == first.term  # another driver of the same front end
    assert lease("c", "another").take() is None and not first.is_followed
    used = r"^the Ray namespace 'n' is in use by a server of model 'm' \(process 7 on h\)"
    for other, message in (
        (lease("b", model="other", settings="other"), f"{used}; end it, or choose another"),
        (lease("b", settings="other"), f"{used} with other settings; end it, or choose another"),
    ):
        assert other.take() is not None  # it may have been killed
        first.renew()
        with pytest.raises(BadConfig, match=message):
            other.take()
    while now_s < 20.0:
        now_s += 0.5
        owner = second.take()
        assert owner is not None and owner.key == "a" and first.renew() is None and first.is_followed
    for passed_s in (0.5, 9.5):
        now_s += passed_s
        assert second.take() is not None
    now_s += 1.0  # the first one hangs, or its machine has ended
    assert second.take() is None and second.renew() is None and not second.is_followed
    taker = first.renew()
    assert taker is not None and taker.key == "b"
    assert not first.release()
    assert second.renew() is None
    assert second.release()
    assert {name for name, key in stored if key != b"term"} == {b"vlora:another"}
    assert (last := lease("d")).take() is None and 0 < first.term < second.term < last.term
    # Of two at once one is the owner: who is first where none was, otherwise who has the larger term.
    early, late = lease("e", "new"), lease("f", "new")
    early.renew(first=True)
    hidden, get = [True], store.get
    store.get = lambda key, namespace: None if hidden and hidden.pop() else get(key, namespace)
    taker = late.take()
    assert taker is not None and taker.key == "e"

    def interrupted(put: Any, write: int, taker: Lease) -> Any:
        """A store in which another one takes the service before a write."""
        writes = itertools.count()

        def put_late(*args: Any, **options: Any) -> object:
            if next(writes) == write:
                assert taker.take() is None
            return put(*args, **options)

        return put_late

    for write in range(2):
        early, late = lease("g", f"new {write}"), lease("h", f"new {write}")
        lease("e", f"new {write}").renew(first=True)
        assert early.take() is not None and late.take() is not None
        now_s += 11.0
        kept, store.put = store.put, interrupted(store.put, write, late)
        taker = early.take()
        store.put = kept
        assert late.renew() is None and early.term < late.term
        taker = taker or early.renew()
        assert taker is not None and taker.key == "h" and late.renew() is None


class Handle:
    """Of an actor with a running replica."""

    def __init__(self, settings: bytes) -> None:
        self.settings = SimpleNamespace(remote=lambda: settings)


@needs_ray
def test_replicas_of_other_front_ends_are_kept_if_they_have_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    from vlora.cluster.on_ray import driver

    def of(secret: bytes, model: str = "m") -> bytes:
        return msgspec.msgpack.encode(ReplicaSettings(config=EngineConfig(model=model), secret=secret * 16))

    events, ended = list[Any](), list[str]()
    owner = Service(key="o", settings="", model="m", host="h", pid=7)
    monkeypatch.setattr(driver.Driver, "renew", lambda self, lease: None)
    monkeypatch.setattr(driver.Driver, "hold", lambda self, name: None)
    monkeypatch.setattr(driver.Driver, "say", lambda self, event: events.append(event))
    monkeypatch.setattr(driver.Driver, "end", lambda self, names: ended.extend(names))
    monkeypatch.setattr(driver.Lease, "RENEW_S", 0.0)
    monkeypatch.setattr(driver.ray, "wait", lambda calls, num_returns, timeout: (calls, []))
    monkeypatch.setattr(driver.ray, "get", lambda call: call)
    for found, secret, others in (
        ({}, b"own", []),
        ({"replica-0": b"", "replica-1": of(b"its")}, b"its", []),  # of the first none runs
        ({"replica-0": of(b"its"), "replica-1": of(b"own")}, b"its", ["replica-1"]),
        ({"replica-0": of(b"its", "another"), "replica-1": b"\x01"}, b"own", ["replica-0", "replica-1"]),
    ):
        monkeypatch.setattr(driver, "own_actors", lambda found=found: set(found))
        monkeypatch.setattr(driver.ray, "get_actor", lambda name, found=found: Handle(found[name[len("vlora-") :]]))
        own = msgspec.msgpack.decode(of(b"own"), type=ReplicaSettings)
        settings = driver_settings(RayOptions(address="h:1"), own, 2, 2, Folder("/tmp/f"), "m")
        events.clear()
        ended.clear()
        owners = iter([msgspec.structs.replace(owner, settings=settings.service.settings), owner, None])
        lease: Any = SimpleNamespace(take=lambda owners=owners: next(owners), term=3)
        driver.Driver(settings, None).run(lease)
        assert events[-1] == Owns(secret * 16, 3) and sorted(ended) == others
        # The secret of an owner without replicas is not known yet.
        assert [each.secret for each in events[:-1]] == ([secret * 16] if secret == b"its" else [])


@needs_ray
def test_a_former_owner_is_told_of_the_present_one_and_ends_no_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    from vlora.cluster.on_ray import driver

    events, ended = list[Any](), list[str]()

    def say(self: Any, event: Any) -> None:
        events.append(event)
        sys.exit()  # as the driver does next, without what the test's process does at its end

    replica = ReplicaSettings(config=EngineConfig(model="m"), secret=SECRET)
    settings = driver_settings(RayOptions(address="h:1"), replica, 2, 2, Folder("/tmp/f"), "m")
    monkeypatch.setattr(driver.Driver, "look_at_nodes", lambda self, now_s: None)
    monkeypatch.setattr(driver.Driver, "say", say)
    monkeypatch.setattr(driver.Driver, "end", lambda self, names: ended.extend(names))
    monkeypatch.setattr(driver, "own_actors", lambda: {"replica-0"})
    monkeypatch.setattr(driver.Lease, "RENEW_S", 0.0)
    other = msgspec.structs.replace(settings.service, key="other")
    owners = iter([None, other])
    lease: Any = SimpleNamespace(renew=lambda: next(owners), release=lambda: False, is_followed=False)
    former = driver.Driver(settings, None)
    with pytest.raises(SystemExit):
        former.renew(lease)
    assert events == [Follows(other, SECRET)]
    former._owns, former._lease = True, lease  # noqa: SLF001
    former.stop()
    assert not ended
