"""Replicas of this machine on a real Ray, with sleeping engines: its traps, and what dies under answers.

One Ray serves all tests of the file; the usual tier kills one engine on it, and checks that closing leaves nothing.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from msgspec.structs import replace

from tests.cluster.running import SLEEPING, InThread, asked, check, outputs_of
from tests.cluster.sleeping_engine import COMMAND
from tests.processes import PATIENCE_S, is_alive, until
from vlora.cluster.members import Health
from vlora.cluster.on_ray import settings
from vlora.cluster.on_ray.cluster import LocalCluster
from vlora.cluster.on_ray.own_processes import ray_processes, replica_processes
from vlora.cluster.on_ray.settings import Folder, Ports
from vlora.errors import BadConfig, BadRequest, EngineDead
from vlora.types import RequestOutput
from vlora.types.replicas import DRAINING, SERVING, ClusterStatus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

T = TypeVar("T")

NAMES = ("replica-0", "replica-1")
WAIT_S = PATIENCE_S


def own_processes(folder: Folder) -> list[psutil.Process]:
    return ray_processes(folder) + replica_processes(folder)


def exhaustive(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.exhaustive)


UVLOOP = """
import asyncio, os
def new_event_loop():
    with open({users!r}, "a") as file:
        print(os.getpid(), file=file)
    return asyncio.SelectorEventLoop()
class Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self):
        return new_event_loop()
def install():
    asyncio.set_event_loop_policy(Policy())
"""


class Here(InThread):
    """A running cluster of two replicas, at most three."""

    cluster: LocalCluster

    def __init__(self, home: Path) -> None:
        self.home = home
        self.lines: list[str] = []
        super().__init__(
            lambda: LocalCluster.start(
                SLEEPING,
                2,
                max_replicas=3,
                scale_up_s=0.5,
                scale_down_s=1.0,
                announce=self.lines.append,
                command=COMMAND,
                health=Health(missed=10),  # a loaded machine is no reason to give a replica up
                hung_s=0.5,
            )
        )

    @property
    def driver_pid(self) -> int | None:
        return None if self.cluster.ray.driver is None else self.cluster.ray.driver.pid

    def serves(self) -> bool:
        return self.states() == [SERVING] * len(NAMES)

    def states(self) -> list[str]:
        return [replica.state for replica in self.cluster.status().replicas]

    def status(self) -> ClusterStatus:
        """Without the time since the last change of the number."""
        return replace(self.cluster.status(), scaling=None)

    def engines(self) -> set[int]:
        """The engines' processes that run."""
        command = list(COMMAND)
        found = replica_processes(self.cluster.folder)
        return {process.pid for process in found if is_alive(process.pid) and process.cmdline()[:3] == command}

    def used(self) -> set[str]:
        """The replicas that answer mixed requests."""
        found: set[str] = set()
        assert set(self.answer_all(lambda: found.update(map(self.where, ("r0", "r1", "long"))))) == {0}
        return found

    def where(self, request_id: str) -> str:
        name = self.cluster.where(request_id)
        assert name is not None
        return name


def driver(here: Here, token: dict[str, str], code: str = "") -> subprocess.CompletedProcess[str]:
    """Connect to Ray from another process with a token, then run code there."""
    code = (
        "import ray, sys\n"
        "try: ray.init(address=sys.argv[1], log_to_driver=False, _node_ip_address='127.0.0.1')\n"
        f"except Exception as error: sys.exit(f'refused: {{error}}')\n{code}"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ |= {"RAY_AUTH_MODE": "token", "RAY_NUM_REDIS_GET_RETRIES": "1"}  # otherwise it tries for 20 s
    command = [sys.executable, "-c", code, f"127.0.0.1:{here.cluster.ray.ports.control}"]
    return subprocess.run(command, env=environ | token, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    """Two replicas. The environment names another Ray, which must not be joined, and the first ports cannot be used.

    An event loop named uvloop is installed, which notes the processes that use it.
    """
    find_ports, unusable = settings.find_ports, [Ports(70_000, 2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home := tmp_path_factory.mktemp("home")))
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        patch.setattr(settings, "find_ports", lambda number: unusable.pop() if unusable else find_ports(number))
        patch.delenv("OMP_NUM_THREADS", raising=False)
        modules = tmp_path_factory.mktemp("modules")
        (modules / "uvloop.py").write_text(UVLOOP.format(users=str(home / "users")))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(modules), *filter(None, [os.environ.get("PYTHONPATH")])]))
        found = Here(home)
        try:
            yield found
        finally:
            began = own_processes(found.cluster.folder)
            found.close()
            assert not own_processes(found.cluster.folder) and not any(is_alive(each.pid) for each in began)
            assert not os.path.exists(found.cluster.folder.path)


@pytest.mark.exhaustive
def test_the_processes_that_a_start_makes(here: Here) -> None:
    assert here.lines[0] == "starting Ray" and str(here.cluster.ray.ports) in here.lines[1]
    assert [line.partition(" serves ")[2] for line in here.lines[2:]] == ["(1 of 2)", "(2 of 2)"]
    used = here.used()
    assert here.serves() and used <= set(NAMES) and here.cluster.cause is None and not here.cluster.starting
    for pids in here.cluster.pids.values():
        assert [psutil.Process(pid).nice() for pid in pids] == [psutil.Process().nice()] * 3  # Ray's default is 15
        # Ray sets OMP_NUM_THREADS to 1 for workers. Its token is not for engines.
        environ = psutil.Process(pids.engine).environ()
        assert psutil.Process(pids.engine).cwd() == os.getcwd()
        assert "OMP_NUM_THREADS" not in environ and not any(name.startswith("RAY_") for name in environ)
        actor = psutil.Process(pids.actor)
        assert not any("libtorch" in found.path for found in actor.memory_maps())
        assert actor.memory_full_info().pss < 120 << 20
    # Ray listens on all addresses, on the announced ports only; replicas listen on loopback.
    replica_ports, open_ports = {member.address.port for member in here.cluster.members.values()}, set[int]()
    for process in own_processes(here.cluster.folder):
        for found in process.net_connections("inet"):
            if found.status == psutil.CONN_LISTEN and found.laddr.port not in replica_ports:
                open_ports.add(found.laddr.port)
    ports = here.cluster.ray.ports
    assert ports.control in open_ports and all(ports.first <= port <= ports.last for port in open_ports), open_ports
    # The front end is no driver, drivers live without a head, and all processes belong to one Ray.
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()  # other tests may have imported it
    assert here.cluster.ray.driver is not None and here.cluster.ray.head is not None
    for pid in (here.cluster.ray.driver.pid, here.cluster.ray.head.pid):
        assert psutil.Process(pid).environ()["RAY_gcs_rpc_server_reconnect_timeout_s"] == "600"
    names = [process.name() for process in own_processes(here.cluster.folder)]
    assert names.count("gcs_server") == names.count("raylet") == 1


@pytest.mark.exhaustive
def test_other_drivers_of_ray(here: Here) -> None:
    """Without the token they are refused. A driver without a connection starts no Ray, which nothing would end."""
    assert not (here.home / ".ray").exists()  # where Ray's own, world-readable token would be
    own = {"RAY_AUTH_TOKEN": Path(here.cluster.folder.token_file).read_text()}
    for token in ({}, {"RAY_AUTH_TOKEN": "0" * 64}):
        done = driver(here, token)
        assert done.returncode == 1 and "refused: " in done.stderr, done.stderr
        assert "uthentication token" in done.stderr
    # With uvloop installed, an asynchronous actor runs on it, and the transports of the lines fail there.
    code = (
        "class Asynchronous:\n"
        "    async def pid(self): import os; return os.getpid()\n"
        "print(ray.get(ray.remote(Asynchronous).options(num_cpus=0).remote().pid.remote()))\n"
    )
    done = driver(here, own, code)
    assert done.returncode == 0, done.stderr
    users = set(map(int, (here.home / "users").read_text().split()))
    assert int(done.stdout.split()[-1]) in users
    assert not users & {pid for pids in here.cluster.pids.values() for pid in pids}
    code = "import ray, sys\ntry: ray.remote(int).remote()\nexcept Exception as error: sys.exit(f'refused: {error}')"
    environ = settings.environment(here.cluster.folder, os.environ)
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "refused: " in done.stderr and "ray.init" in done.stderr, done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["driver", "actors", "raylet", "head"])
def test_replicas_serve_on_when_a_part_of_ray_is_killed_and_are_adopted(here: Here, what: str) -> None:
    """`ray start --block` goes on when SIGTERM has ended its raylet."""
    pids, before, driver = dict(here.cluster.pids), here.status(), here.driver_pid
    ray, head = ray_processes(here.cluster.folder), here.cluster.ray.head
    assert driver is not None and head is not None

    def kill() -> None:
        if what == "raylet":
            next(process for process in ray if process.name() == "raylet").terminate()
        for pid in {"driver": [driver], "actors": [each.actor for each in pids.values()], "head": [head.pid]}.get(
            what, []
        ):
            os.kill(pid, signal.SIGKILL)

    if what == "driver":
        here.cluster.pids.clear()
    assert set(here.answer_all(kill)) == {0}
    if what == "driver":
        until(lambda: set(here.cluster.pids) == set(NAMES))
        assert here.cluster.pids == pids and here.driver_pid not in (None, driver)
    else:
        until(lambda: all(here.cluster.pids[name].actor != pids[name].actor for name in NAMES))
    if what in ("raylet", "head"):
        assert not any(is_alive(process.pid) for process in ray)
    assert here.engines() == {each.engine for each in pids.values()}
    assert here.status() == before and here.serves()


@pytest.mark.parametrize(
    "how",
    ["engine killed", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("replica killed", "hangs"))],
)
def test_a_lost_replica_loses_no_request_and_comes_back(here: Here, how: str) -> None:
    before, pids = here.cluster.status(), dict(here.cluster.pids)
    lost: list[str] = []

    def lose() -> None:
        lost.append(here.where("r0"))
        found = pids[lost[0]]
        if how == "hangs":
            os.kill(found.engine, signal.SIGSTOP)
        else:
            os.kill(found.engine if how == "engine killed" else found.replica, signal.SIGKILL)

    assert set(here.answer_all(lose)) == {0, 1}
    until(lambda: here.serves() and here.cluster.pids != pids)
    assert {name for name in NAMES if here.cluster.pids[name] != pids[name]} == set(lost)
    assert not any(map(is_alive, pids[lost[0]]))
    after = here.cluster.status()
    assert after.num_deaths == before.num_deaths + 1 and after.num_resubmitted > before.num_resubmitted
    assert set(here.answer_all()) == {0}


@pytest.mark.exhaustive
def test_a_drained_replica_stays_drained_after_a_restart(here: Here) -> None:
    name, other = NAMES
    former = here.cluster.pids[name]
    assert here.run(here.cluster.drain(name))
    os.kill(former.engine, signal.SIGKILL)
    until(lambda: here.cluster.pids[name] != former and here.states() == [DRAINING, SERVING])
    assert here.used() == {other}
    here.cluster.resume(name)
    assert here.serves()


@pytest.mark.exhaustive
def test_a_replica_is_added_and_released_under_answers(here: Here) -> None:
    """The number holds also for a driver that starts after it was changed."""
    pids, before = dict(here.cluster.pids), here.cluster.status()
    adding = here.begin(here.cluster.scale(3, 30.0))
    assert set(here.answer_all()) == {0} and adding.result(30)
    assert here.states() == [SERVING] * 3 and len(here.engines()) == 3
    assert here.driver_pid is not None
    here.cluster.pids.clear()
    os.kill(here.driver_pid, signal.SIGKILL)
    until(lambda: len(here.cluster.pids) == 3)
    added = here.cluster.pids["replica-2"]
    releasing: list[Future[bool]] = []
    scaling = functools.partial(here.cluster.scale, 2, 30.0)
    assert set(here.answer_all(lambda: releasing.append(here.begin(scaling())))) == {0}
    assert releasing[0].result(30)
    until(lambda: not any(map(is_alive, added)))
    assert here.cluster.pids == pids and here.serves()
    assert here.cluster.status().num_deaths == before.num_deaths
    os.kill(here.driver_pid, signal.SIGKILL)
    here.cluster.pids.clear()
    until(lambda: len(here.cluster.pids) == 2)
    time.sleep(0.5)
    assert here.cluster.pids == pids
    for number in (0, 4):
        with pytest.raises(BadRequest, match=f"^the number of replicas is {number}; it must be between 1 and 3, see"):
            here.run(here.cluster.scale(number, 1.0))


@pytest.mark.exhaustive
def test_replicas_follow_the_load_until_an_operator_sets_their_number(here: Here) -> None:
    pids, before = dict(here.cluster.pids), here.cluster.status()
    requests = [asked(f"busy{number}", 500) for number in range(24)]

    async def answer() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(outputs_of(here.cluster, request) for request in requests))

    assert here.run(here.cluster.scale("auto", 0.0))
    answering = here.begin(answer())
    until(lambda: here.states() == [SERVING] * 3)
    scaling = here.cluster.status().scaling
    assert scaling is not None and scaling.automatic and scaling.decision.startswith("3 instead of 2: ")
    for request, outputs in zip(requests, answering.result(60), strict=True):
        check(request, outputs)
    until(lambda: here.serves() and here.cluster.pids == pids)
    scaling = here.cluster.status().scaling
    assert scaling is not None and scaling.decision.startswith("2 instead of 3: the others had room for all requests")
    assert here.cluster.status().num_deaths == before.num_deaths
    assert here.run(here.cluster.scale(2, 5.0))
    scaling = here.cluster.status().scaling
    assert scaling is not None and not scaling.automatic and scaling.decision == "2 as before: set by an operator"


@pytest.mark.exhaustive
def test_a_replica_that_does_not_start_is_reported_and_tried_again_or_given_up(here: Here) -> None:
    unusable = Path(here.cluster.folder.lock_file("replica-2"))
    unusable.unlink(missing_ok=True)
    unusable.mkdir()
    with pytest.raises(EngineDead, match=r"^replica-2 does not start: IsADirectoryError: .*; it is tried again$"):
        here.run(here.cluster.scale(3, 3.0))
    unusable.rmdir()
    assert here.run(here.cluster.scale(3, 20.0)) and here.states() == [SERVING] * 3
    assert here.run(here.cluster.scale(2, 20.0)) and here.serves()
    # One that automatic scaling has added is given up.
    unusable.unlink(missing_ok=True)
    unusable.mkdir()
    assert here.run(here.cluster.scale("auto", 0.0))
    answering = [here.begin(outputs_of(here.cluster, asked(f"given{number}", 400))) for number in range(24)]
    until(lambda: (scaling := here.cluster.status().scaling) is not None and bool(scaling.problem))
    until(lambda: here.cluster.num_replicas == 2)
    unusable.rmdir()
    for number, found in enumerate(answering):
        check(asked(f"given{number}", 400), found.result(60))
    scaling = here.cluster.status().scaling
    assert scaling is not None and scaling.number == 2 and scaling.decisions["failed"] == 1
    assert here.run(here.cluster.scale(2, 5.0)) and here.serves()


@pytest.mark.exhaustive
def test_replicas_serve_without_ray_and_the_next_one_adopts_them(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of Ray's processes end under answers, and no other Ray can start for a time."""
    pids, before = dict(here.cluster.pids), here.status()
    ends = threading.Event()

    def no_ports(number: int) -> Ports:
        if ends.is_set():
            return find_ports(number)
        raise BadConfig("no ports")

    find_ports = settings.find_ports
    monkeypatch.setattr(settings, "find_ports", no_ports)

    def kill() -> None:
        for process in ray_processes(here.cluster.folder):
            process.kill()

    assert set(here.answer_all(kill)) == {0}
    until(lambda: here.cluster.ray.head is None and not ray_processes(here.cluster.folder))
    assert set(here.answer_all()) == {0}
    assert here.engines() == {each.engine for each in pids.values()} and here.status() == before
    ends.set()
    until(lambda: all(here.cluster.pids[name].actor != pids[name].actor for name in NAMES))
    assert here.engines() == {each.engine for each in pids.values()} and here.status() == before
    names = [process.name() for process in ray_processes(here.cluster.folder)]
    assert names.count("gcs_server") == names.count("raylet") == 1
    # The replicas that were found are started again as others are.
    os.kill(here.cluster.pids[NAMES[0]].replica, signal.SIGKILL)
    until(lambda: here.serves() and here.cluster.pids[NAMES[0]].replica != pids[NAMES[0]].replica)


@pytest.mark.exhaustive
def test_nothing_is_left_after_a_kill_of_front_end_head_and_driver() -> None:
    code = (
        "import asyncio\n"
        "from tests.cluster.test_on_ray import COMMAND, SLEEPING, LocalCluster\n"
        "async def main():\n"
        "    cluster = await LocalCluster.start(SLEEPING, 2, command=COMMAND, alone_s=1.0)\n"
        "    print(cluster.folder.path, cluster.ray.head.pid, cluster.ray.driver.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as front_end:
        assert front_end.stdout is not None
        path, *pids = front_end.stdout.readline().split()
        folder = Folder(path)
        began = own_processes(folder)
        try:
            assert len(began) > 10
            for pid in (front_end.pid, *map(int, pids)):
                os.kill(pid, signal.SIGKILL)
            _, left = psutil.wait_procs(began, timeout=WAIT_S)
            assert not left
        finally:
            front_end.kill()
            for process in own_processes(folder):
                process.kill()
            folder.remove()


@pytest.mark.exhaustive
def test_closing_ends_nothing_else(here: Here, tmp_path: Path) -> None:
    """`ray stop` would end every process named raylet."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    (tmp_path / "raylet").symlink_to(sleep)
    with subprocess.Popen([tmp_path / "raylet", "60"]) as foreign:
        try:
            began = own_processes(here.cluster.folder)
            titles = {process.cmdline()[0] for process in began}
            assert {"ray::DashboardAgent", "ray::RuntimeEnvAgent"} < titles and len(began) > 10
            here.run(here.cluster.close())
            assert foreign.poll() is None
        finally:
            foreign.kill()
