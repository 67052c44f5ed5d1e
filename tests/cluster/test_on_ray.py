"""Replicas on a Ray that the server starts, with sleeping engines: its traps, and what dies under answers.

One Ray serves all tests of the file; the usual tier kills one engine on it, and checks that closing leaves nothing.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.running import NAMES, SLEEPING, InThread, asked, check, outputs_of
from tests.cluster.sleeping_engine import COMMAND
from tests.processes import PATIENCE_S, is_alive, until
from vlora.cluster.members import Health
from vlora.cluster.on_ray.cluster import RayCluster
from vlora.errors import EngineDead
from vlora.types.replicas import SERVING

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

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
    """A running cluster of two replicas, at most three.

    Attributes:
        unusable: While this file exists, no engine starts.
    """

    cluster: RayCluster

    def __init__(self, home: Path) -> None:
        self.home = home
        self.unusable = home / "unusable"
        self.lines: list[str] = []
        check = f"import os, runpy; os.path.exists({str(self.unusable)!r}) and os._exit(3); "
        super().__init__(
            lambda: RayCluster.start(
                SLEEPING,
                2,
                max_replicas=3,
                scale_up_s=0.5,
                scale_down_s=1.0,
                announce=self.lines.append,
                command=(sys.executable, "-c", f"{check}runpy.run_module({COMMAND[2]!r}, run_name='__main__')"),
                health=Health(missed=10),  # a loaded machine is no reason to give a replica up
                hung_s=0.5,
            )
        )

    def processes(self) -> list[psutil.Process]:
        """All that belong to the server, without itself."""
        driver = self.cluster.ray.driver
        assert driver is not None
        assert self.cluster.ray.local is not None and self.cluster.ray.local.process is not None
        roots = [psutil.Process(pid) for pid in (self.cluster.ray.local.process.pid, driver.pid)]
        return [*roots, *(each for root in roots for each in root.children(recursive=True))]

    def used(self) -> set[str]:
        """The replicas that answer mixed requests."""
        found: set[str] = set()
        assert set(self.answer_all(lambda: found.update(map(self.where, ("r0", "r1", "long"))))) == {0}
        return found


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    """Two replicas. The environment names another Ray, which must not be joined.

    An event loop named uvloop is installed, which notes the processes that use it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home := tmp_path_factory.mktemp("home")))
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        modules = tmp_path_factory.mktemp("modules")
        (modules / "uvloop.py").write_text(UVLOOP.format(users=str(home / "users")))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(modules), *filter(None, [os.environ.get("PYTHONPATH")])]))
        found = Here(home)
        try:
            yield found
        finally:
            began = found.processes()
            found.close()
            until(lambda: not any(is_alive(each.pid) for each in began))
            assert len(began) > 8 and not os.path.exists(found.cluster.folder.path)


@pytest.mark.exhaustive
def test_the_processes_that_a_start_makes(here: Here) -> None:
    assert here.lines[0] == "starting Ray"
    assert [line.partition(" serves ")[2] for line in here.lines[1:]] == ["(1 of 2)", "(2 of 2)"]
    assert here.used() <= set(NAMES) and here.serves() and here.cluster.cause is None and not here.cluster.starting
    for actor, replica, engine in here.pids().values():
        assert [psutil.Process(pid).nice() for pid in (actor, replica, engine)] == [psutil.Process().nice()] * 3
        assert psutil.Process(engine).cwd() == os.getcwd()
        assert not any(name.startswith("RAY_") for name in psutil.Process(engine).environ())
        assert not any("libtorch" in found.path for found in psutil.Process(actor).memory_maps())
        assert psutil.Process(actor).memory_full_info().pss < 120 << 20
    # Ray and replicas listen on loopback only.
    listening = set[str]()
    for process in here.processes():
        for found in process.net_connections("inet"):
            if found.status == psutil.CONN_LISTEN:
                listening.add(found.laddr.ip.removeprefix("::ffff:"))
    assert listening == {"127.0.0.1"}
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()  # other tests may have imported it
    assert not (here.home / ".ray").exists()  # where Ray's own, world-readable token would be
    names = [process.name() for process in here.processes()]
    assert names.count("gcs_server") == names.count("raylet") == 1
    # With uvloop installed, an asynchronous actor would run on it, and the transports of the connections fail there.
    users = set(map(int, (here.home / "users").read_text().split())) if (here.home / "users").exists() else set()
    assert not users & {pid for pids in here.pids().values() for pid in pids}


@pytest.mark.exhaustive
def test_other_drivers_need_the_token(here: Here) -> None:
    code = (
        "import sys, ray\nfrom ray._private import services\nservices.resolve_ip_for_localhost = lambda host: host\n"
        "try: ray.init(address=sys.argv[1], log_to_driver=False, _node_ip_address='127.0.0.1')\n"
        "except Exception as error: sys.exit(f'refused: {error}')\n"
    )
    assert here.cluster.ray.local is not None
    address = here.run(here.cluster.ray.local.start())  # it runs: only its address
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ |= {"RAY_AUTH_MODE": "token", "RAY_NUM_REDIS_GET_RETRIES": "1"}
    for token in ({}, {"RAY_AUTH_TOKEN": "0" * 64}):
        done = subprocess.run(
            [sys.executable, "-c", code, address], env=environ | token, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1 and "refused: " in done.stderr and "uthentication token" in done.stderr


@pytest.mark.exhaustive
def test_replicas_serve_on_when_the_control_service_is_killed(here: Here) -> None:
    """`test_user_ray` kills the driver."""
    pids = here.pids()
    [control] = [each for each in here.processes() if each.name() == "gcs_server"]

    assert set(here.answer_all(control.kill)) == {0}
    until(lambda: any(each.name() == "gcs_server" and each != control for each in here.processes()))
    time.sleep(3)
    assert here.pids() == pids and here.serves() and set(here.answer_all()) == {0}
    # What ends afterwards is started again.
    os.kill(pids[NAMES[0]][0], signal.SIGKILL)
    until(lambda: here.serves() and here.pids()[NAMES[0]] != pids[NAMES[0]])
    assert here.pids()[NAMES[1]] == pids[NAMES[1]]


def test_a_lost_replica_loses_no_request_and_comes_back(here: Here) -> None:
    """`test_user_ray` has the other ends."""
    before, pids = here.cluster.status(), here.pids()
    lost: list[str] = []

    def lose() -> None:
        lost.append(here.where("r0"))
        os.kill(pids[lost[0]][2], signal.SIGKILL)

    assert set(here.answer_all(lose)) == {0, 1}
    until(lambda: here.serves() and here.pids() != pids)
    assert {name for name in NAMES if here.pids()[name] != pids[name]} == set(lost)
    assert not any(map(is_alive, pids[lost[0]][1:]))
    after = here.cluster.status()
    assert after.num_deaths == before.num_deaths + 1 and after.num_resubmitted > before.num_resubmitted
    assert set(here.answer_all()) == {0}


@pytest.mark.exhaustive
def test_a_replica_that_does_not_start_is_reported_once_and_tried_again_or_given_up(
    here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    here.unusable.touch()
    cause = r"replica-2 does not start: the engine process ended with exit code 3 while starting"
    with pytest.raises(EngineDead, match=rf"^{cause}.*; it is tried again$"):
        while not here.run(here.cluster.scale(3, 1.0)):
            pass
    actor = here.cluster.status().replicas[2]
    assert actor.state == "down" and "exit code 3" in actor.cause
    assert [each.getMessage().startswith("replica-2 does not start") for each in caplog.records].count(True) == 1
    here.unusable.unlink()
    assert here.run(here.cluster.scale(3, PATIENCE_S)) and here.states() == [SERVING] * 3
    assert here.run(here.cluster.scale(2, PATIENCE_S)) and here.serves()
    # One that automatic scaling has added is given up.
    here.unusable.touch()
    assert here.run(here.cluster.scale("auto", 0.0))
    answering = [here.begin(outputs_of(here.cluster, asked(f"given{number}", 400))) for number in range(24)]
    until(lambda: (scaling := here.cluster.status().scaling) is not None and bool(scaling.problem))
    until(lambda: here.cluster.num_replicas == 2)
    here.unusable.unlink()
    for number, found in enumerate(answering):
        check(asked(f"given{number}", 400), found.result(PATIENCE_S))
    scaling = here.cluster.status().scaling
    assert scaling is not None and scaling.number == 2 and scaling.decisions["failed"] == 1
    assert here.run(here.cluster.scale(2, PATIENCE_S)) and here.serves()


@pytest.mark.exhaustive
def test_ray_ends_and_another_one_starts(here: Here) -> None:
    """Its replicas end with it: requests wait for the next ones."""
    pids = here.pids()

    def kill() -> None:
        next(each for each in here.processes() if each.name() == "raylet").kill()

    deaths = here.answer_all(kill)
    assert {0, 1, 2} >= set(deaths)
    until(lambda: here.serves() and not {*pids.values()} & {*here.pids().values()})
    assert set(here.answer_all()) == {0}


@pytest.mark.exhaustive
@pytest.mark.parametrize("victims", ["front end", "front end, Ray and driver"])
def test_nothing_is_left_after_a_kill(victims: str) -> None:
    code = (
        "import asyncio\n"
        "from tests.cluster.test_on_ray import COMMAND, SLEEPING, RayCluster\n"
        "async def main():\n"
        "    cluster = await RayCluster.start(SLEEPING, 2, command=COMMAND, alone_s=1.0)\n"
        "    print(cluster.folder.path, cluster.ray.local.process.pid, cluster.ray.driver.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as front_end:
        assert front_end.stdout is not None
        path, *pids = front_end.stdout.readline().split()
        began = psutil.Process(front_end.pid).children(recursive=True)
        try:
            assert len(began) > 10
            for pid in (front_end.pid, *map(int, pids if "Ray" in victims else [])):
                os.kill(pid, signal.SIGKILL)
            _, left = psutil.wait_procs(began, timeout=2 * PATIENCE_S)  # Ray's agents look for it for a minute
            assert not left
        finally:
            front_end.kill()
            for process in began:
                if process.is_running():
                    process.kill()
            shutil.rmtree(path, ignore_errors=True)


@pytest.mark.exhaustive
def test_a_start_that_fails_leaves_nothing() -> None:
    ends = (sys.executable, "-c", "import os; os._exit(3)")

    async def main() -> Any:
        return await RayCluster.start(SLEEPING, 2, command=ends)

    before = psutil.Process().children(recursive=True)
    with pytest.raises(EngineDead, match="the engine process ended with exit code 3 while starting"):
        asyncio.run(main())
    until(lambda: {*psutil.Process().children(recursive=True)} <= {*before})
