"""Replicas on a Ray that a user has started, with sleeping engines: what dies under answers, and what is refused.

One Ray serves all tests of the file: a head that keeps its state, and two nodes. All are in the tier of all tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests import embedded_cases
from tests.cluster import paced_engine
from tests.cluster.running import NAMES, SLEEPING, InThread, asked, check, outputs_of
from tests.cluster.sleeping_engine import COMMAND
from tests.cluster.test_real_engine import check as check_real
from tests.cluster.test_shipping import write
from tests.cluster.user_ray import UserRay
from tests.embedded_cases import config, write_adapters
from tests.processes import PATIENCE_S, free_port, is_alive, until
from vlora.cluster.adapter_sender import ShippingLimits
from vlora.cluster.members import Health
from vlora.cluster.on_ray.cluster import RayCluster
from vlora.cluster.on_ray.settings import RayOptions
from vlora.engine import LocalEngine
from vlora.engine.operations import RegisterAdapters
from vlora.errors import BadConfig, BadRequest, EngineDead, VLoraError
from vlora.operations import MAX_WAIT_S, DrainReplica, ResumeReplica, Scale, UnloadAdapter
from vlora.types.replicas import DOWN, DRAINING, SERVING

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

PORTABLE, PACED = ("", *COMMAND[1:]), ("", *paced_engine.COMMAND[1:])
VALUE_OF_USER = "of the user"


class Here(InThread):
    """A cluster of two replicas, at most three."""

    cluster: RayCluster

    def __init__(self, ray: UserRay, **options: Any) -> None:
        self.ray = ray
        self.lines: list[str] = options.pop("lines", [])
        super().__init__(lambda: started(ray, announce=self.lines.append, **options))


async def started(ray: UserRay, number: int = 2, **settings: Any) -> RayCluster:
    names = ("address", "cpus", "resources", "labels", "namespace", "placement", "wait_s", "runtime_env")
    options = {name: settings.pop(name) for name in names if name in settings}
    given = {"command": PORTABLE, "health": Health(missed=10), "hung_s": 1.0, "model_name": "sleeping", **settings}
    return await RayCluster.start(SLEEPING, number, RayOptions(**{"address": ray.address, **options}), **given)


@pytest.fixture(scope="module")
def ray() -> Iterator[UserRay]:
    found = UserRay(num_cpus=0, keeps_state=True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**found.environ, "RAY_ADDRESS": found.address}.items():
                patch.setenv(name, value)
            for zone in "ab":
                found.add("--num-cpus=2", f"--labels=zone={zone}")
            yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def here(ray: UserRay) -> Iterator[Here]:
    found = Here(ray, address="auto", max_replicas=3, runtime_env={"env_vars": {"GIVEN": VALUE_OF_USER}})
    try:
        yield found
    finally:
        pids = found.pids()
        found.close()
        until(lambda: not any(is_alive(pid) for each in pids.values() for pid in each))
        assert not os.path.exists(found.cluster.folder.path)
        assert all(is_alive(node.process.pid) for node in (ray.head, ray.nodes[-1]))  # nothing of the user's is ended


def test_replicas_are_on_different_nodes_and_have_nothing_of_ray(here: Here, ray: UserRay) -> None:
    assert set(here.answer_all()) == {0} and here.serves()
    status = here.cluster.status().replicas
    assert len({each.node for each in status}) == 2 and all(each.actor and each.pid for each in status)
    assert here.lines[0] == "connecting to Ray at auto" and " serves (1 of 2) on " in here.lines[1]
    for actor, replica, engine in here.pids().values():
        assert [psutil.Process(pid).nice() for pid in (actor, replica, engine)] == [psutil.Process().nice()] * 3
        environ = psutil.Process(engine).environ()
        assert not any(name.startswith("RAY_") for name in environ) and environ["GIVEN"] == VALUE_OF_USER
        assert not any("libtorch" in found.path for found in psutil.Process(actor).memory_maps())
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()  # the front end is no driver
    # The connections have TLS, and the secret is in no file of Ray.
    assert all(found.at.tls for found in here.cluster.located.values())
    secret = here.cluster._secret  # noqa: SLF001
    for file in ray.folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            data = file.read_bytes()
            assert secret not in data and secret.hex().encode() not in data, file


@pytest.mark.parametrize("what", ["actor", "replica", "engine", "driver", "hangs"])
def test_a_kill_loses_nothing(here: Here, what: str) -> None:
    before, pids, driver = here.cluster.status(), here.pids(), here.cluster.ray.driver
    lost: list[str] = []
    assert driver is not None

    def kill() -> None:
        lost.append(here.where("r0"))
        actor, replica, engine = pids[lost[0]]
        pid = {"actor": actor, "replica": replica, "engine": engine, "driver": driver.pid, "hangs": engine}[what]
        os.kill(pid, signal.SIGSTOP if what == "hangs" else signal.SIGKILL)

    answered = set(here.answer_all(kill))
    if what == "driver":
        until(lambda: here.cluster.ray.driver not in (None, driver))
        time.sleep(3)
        assert answered == {0} and here.pids() == pids and here.serves()
        return
    assert answered == {0, 1}
    until(lambda: here.serves() and here.pids()[lost[0]] != pids[lost[0]])
    assert {name for name in NAMES if here.pids()[name] != pids[name]} == {*lost}
    assert not any(map(is_alive, pids[lost[0]][1:]))
    assert here.cluster.status().num_deaths == before.num_deaths + 1
    assert set(here.answer_all()) == {0}


FOREIGN = """
import sys, ray
ray.init(address=sys.argv[1], namespace="vlora", log_to_driver=False)
class Own:
    def pid(self): import os; return os.getpid()
actor = ray.remote(Own).options(name="replica-0", lifetime="detached", num_cpus=0, get_if_exists=True).remote()
print(ray.get(actor.pid.remote()))
"""


def test_a_replica_is_added_and_released(here: Here, ray: UserRay) -> None:
    """The number holds also for a driver that starts after it was changed, and an operator's drain holds.

    An actor of the user in the same namespace, even of such a name, is left alone.
    """
    command = [sys.executable, "-c", FOREIGN, ray.address]
    foreign = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()[-1])
    pids, before = here.pids(), here.cluster.status()
    adding = here.begin(here.cluster.scale(3, PATIENCE_S))
    assert set(here.answer_all()) == {0} and adding.result(PATIENCE_S)
    driver = here.cluster.ray.driver
    assert driver is not None and here.states() == [SERVING] * 3
    os.kill(driver.pid, signal.SIGKILL)
    until(lambda: here.cluster.ray.driver not in (None, driver))
    added = here.pids()["replica-2"]
    assert here.run(here.cluster.drain("replica-2"))
    os.kill(added[2], signal.SIGKILL)
    until(lambda: here.pids()["replica-2"] != added and here.states() == [SERVING, SERVING, DRAINING])
    added = here.pids()["replica-2"]
    releasing: list[Future[bool]] = []
    scaling = functools.partial(here.cluster.scale, 2, PATIENCE_S)
    assert set(here.answer_all(lambda: releasing.append(here.begin(scaling())))) == {0}
    assert releasing[0].result(PATIENCE_S)
    until(lambda: not any(map(is_alive, added)))
    assert here.pids() == pids and here.serves() and set(here.answer_all()) == {0} and is_alive(foreign)
    assert here.cluster.status().num_deaths == before.num_deaths + 1


def test_answers_of_real_engines_are_those_of_one(ray: UserRay, tmp_path: Path) -> None:
    """While the actor of one is killed. Adapters are served from the files of the front end."""
    folders, cases = write_adapters(tmp_path), embedded_cases.cases()
    local = LocalEngine(config())
    local.engine.register_adapters(folders)
    want = local.run(cases.values())

    async def main() -> None:
        options = RayOptions(address=ray.address, namespace="real")
        cluster = await RayCluster.start(config(), 2, options, shipping=ShippingLimits(), command=PACED)
        try:
            await cluster.call(RegisterAdapters(folders))
            at = cluster.located[NAMES[0]].at

            def kill() -> None:
                os.kill(at.pid, signal.SIGKILL)

            first, *others = cases.values()
            found = await asyncio.gather(
                outputs_of(cluster, first, 5, kill), *(outputs_of(cluster, request) for request in others)
            )
            for request, outputs in zip(cases.values(), found, strict=True):
                check_real(request, outputs, want[request.request_id])
            assert cluster.status().num_deaths == 1 and cluster.status().num_resubmitted
        finally:
            await cluster.close()

    asyncio.run(main())


def test_a_service_waits_for_a_node_with_room(here: Here, ray: UserRay) -> None:
    """That is no failure of a start: a node that is added later gets the replica."""

    async def main() -> None:
        options = RayOptions(address=ray.address, namespace="waiting", resources={"camera": 1})
        cluster = await RayCluster.start(SLEEPING, 1, options, max_replicas=2, command=PORTABLE)
        try:
            with pytest.raises(EngineDead, match=r"^replica-1 does not start: no node of Ray has room for replica-1, "):
                while not await cluster.scale(2, 1.0):
                    pass
            status = cluster.status().replicas[1]
            assert status.state == DOWN and "which needs 1 CPU, 1 camera: " in status.cause and not cluster.absent()[1]
            began_s = time.monotonic()
            await asyncio.to_thread(ray.add, "--num-cpus=1", '--resources={"camera": 1}')
            added_s = time.monotonic()
            assert await cluster.scale(2, PATIENCE_S)
            print(f"used {time.monotonic() - added_s:.1f} s after `ray start`, which took {added_s - began_s:.1f} s")
        finally:
            await cluster.close()

    node = ray.add("--num-cpus=1", '--resources={"camera": 1}')
    asyncio.run(main())
    for each in (node, ray.nodes.pop()):
        each.kill()
    ray.nodes.remove(node)


def test_replicas_leave_a_node_that_ray_drains(here: Here, ray: UserRay) -> None:
    """One stays until another node has room."""
    # A resource of this test only: Ray counts that of a node for some time after its end.
    lamp = ("--num-cpus=1", '--resources={"lamp": 1}')
    nodes = [ray.add(*lamp) for _ in range(2)]
    found = Here(ray, namespace="drained", resources={"lamp": 1})
    try:
        assert set(found.answer_all()) == {0}
        pids, before = found.pids(), {each.name: each.node for each in found.cluster.status().replicas}
        reason = ("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test", "--deadline-remaining-seconds=90")
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--address={ray.address}", *reason]
        subprocess.run([*command, f"--node-id={before[NAMES[0]]}"], check=True, capture_output=True, timeout=60)
        time.sleep(5)
        assert found.pids() == pids and found.serves()
        nodes.append(ray.add(*lamp))
        began_s = time.monotonic()
        while found.pids()[NAMES[0]] == pids[NAMES[0]] or not found.serves():
            assert set(found.answer_all()) == {0}
        print(f"moved {time.monotonic() - began_s:.1f} s after a node was added")
        after = {each.name: each.node for each in found.cluster.status().replicas}
        assert after[NAMES[1]] == before[NAMES[1]] and after[NAMES[0]] not in before.values()
        assert found.cluster.status().num_deaths == 0
    finally:
        found.close()
        for node in nodes:
            ray.nodes.remove(node)
            node.kill()


def test_rays_autoscaler_adds_a_node_under_load_and_removes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Ray's simulated provider of nodes, on a head without room for replicas."""
    ray = UserRay(num_cpus=0, most_nodes=2)
    for name, value in ray.environ.items():
        monkeypatch.setenv(name, value)

    def raylets() -> int:
        found = 0
        for each in psutil.Process(ray.head.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += each.name() == "raylet"
        return found

    try:
        began_s = time.monotonic()
        scaling: dict[str, Any] = {"max_replicas": 2, "autoscale": True, "scale_up_s": 0.5, "scale_down_s": 2.0}
        found = Here(ray, number=1, wait_s=PATIENCE_S, **scaling)
        print(f"a node and the first replica after {time.monotonic() - began_s:.1f} s")
        began_s = time.monotonic()
        assert raylets() == 2
        answers = [found.begin(outputs_of(found.cluster, asked(f"busy{number}", 1500))) for number in range(24)]
        until(lambda: found.serves())
        print(f"a node and the second replica after {time.monotonic() - began_s:.1f} s")
        assert len({each.node for each in found.cluster.status().replicas}) == 2 and raylets() == 3
        for number, answer in enumerate(answers):
            assert check(asked(f"busy{number}", 1500), answer.result(PATIENCE_S)).timings.num_deaths == 0  # type: ignore[union-attr]
        began_s = time.monotonic()
        until(lambda: len(found.cluster.status().replicas) == 1 and raylets() == 2)
        print(f"released, and its node removed, {time.monotonic() - began_s:.1f} s after the load")
        assert set(found.answer_all()) == {0}
        found.close()
    finally:
        ray.close()


# -- what is refused --------------------------------------------------------------------------------------------------

METADATA = """
import json, sys
import ray
from ray._common.usage import usage_constants
from ray.experimental import internal_kv
at = dict(key=usage_constants.CLUSTER_METADATA_KEY, namespace=ray._private.ray_constants.KV_NAMESPACE_CLUSTER)
ray.init(address=sys.argv[1], log_to_driver=False)
found = json.loads(internal_kv._internal_kv_get(**at))
print(found["ray_version"])
internal_kv._internal_kv_put(value=json.dumps({**found, "ray_version": sys.argv[2]}), overwrite=True, **at)
"""
NOT_RAY = ("nothing listens", "another program", "wrong token", "no token", "a client's address")


def refusal(ray: UserRay, **settings: Any) -> str:
    """The error of a start that fails."""

    async def main() -> None:
        await (await started(ray, **settings)).close()

    with pytest.raises(VLoraError) as caught:
        asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert isinstance(caught.value, BadConfig | EngineDead)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpus": 100}, "no node of Ray has room for replica-0, which needs 100 CPU: "),
        ({"resources": {"camera": 1}}, "which needs 1 CPU, 1 camera: "),
        ({"labels": {"zone": "c"}}, "which needs 1 CPU and a node with the labels zone=c: "),
        ({"command": ("", "-c", "import os; os._exit(3)")}, "the engine process ended with exit code 3 while starting"),
        ({"runtime_env": {"working_dir": "/none"}}, "/none"),
        (
            {"namespace": "vlora", "model_name": "other"},
            "the Ray namespace 'vlora' is in use by a server of model 'sleeping' (process ",
        ),
        ({"namespace": "vlora", "cpus": 0.5}, " with other settings; end it, or choose another --ray-namespace"),
    ],
)
def test_a_start_that_cannot_succeed(here: Here, ray: UserRay, settings: dict[str, Any], message: str) -> None:
    """One line with the reason; nothing is left, and the other service goes on."""
    pids = here.pids()
    assert message in refusal(ray, number=1, **{"namespace": "other", "wait_s": 0.5, **settings})
    assert here.pids() == pids and here.serves()


@pytest.mark.parametrize(
    "what", ["nothing listens", "another program", "wrong token", "no token", "a client's address"]
)
def test_a_ray_that_cannot_be_used(ray: UserRay, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (other := tmp_path / "token").write_text("f" * 64)
    other.chmod(0o600)
    with socket.create_server(("", 0)) as server:
        address, message = {
            "nothing listens": (f"127.0.0.1:{free_port()}", "nothing answers at "),
            "another program": (f"127.0.0.1:{server.getsockname()[1]}", "this machine has no node of the Ray at "),
            "a client's address": ("ray://127.0.0.1:10001", "--ray ray://127.0.0.1:10001 is no address of a Ray"),
        }.get(what, (ray.address, "oken"))
        if what == "wrong token":
            monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(other))
        elif what == "no token":
            monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
            monkeypatch.setenv("HOME", str(tmp_path))
        began_s = time.monotonic()
        found = refusal(SimpleNamespace(address=address))  # type: ignore[arg-type]
        print(f"{what}: {time.monotonic() - began_s:.1f} s: {found}")
    assert message in found and len(found) < 700


def test_another_version_of_ray_is_refused(ray: UserRay) -> None:
    def change(version: str) -> str:
        command = [sys.executable, "-c", METADATA, ray.address, version]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    own = change("2.99.0")
    try:
        found = refusal(ray, namespace="other")
        assert "2.99.0" in found and own in found and "ersion" in found, found
    finally:
        # With the changed version this driver is refused too.
        code = METADATA.replace("import ray\n", "import ray; ray.__version__ = '2.99.0'\n")
        subprocess.run([sys.executable, "-c", code, ray.address, own], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("victims", ["front end", "front end and driver"])
def test_nothing_of_a_killed_service_is_left(ray: UserRay, here: Here, victims: str) -> None:
    """Without its driver, replicas end after a time without a front end, and actors after them."""
    pids = here.pids()
    code = (
        "import asyncio, sys\n"
        "from tests.cluster.test_user_ray import SimpleNamespace, started\n"
        "async def main():\n"
        "    ray = SimpleNamespace(address=sys.argv[1])\n"
        "    cluster = await started(ray, 1, namespace='killed', alone_s=2.0)\n"
        "    at = cluster.located['replica-0'].at\n"
        "    print(cluster.ray.driver.pid, at.pid, at.replica_pid, at.engine_pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", code, ray.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as front_end:
        assert front_end.stdout is not None
        driver, *processes = map(int, front_end.stdout.readline().split())
        for pid in (front_end.pid, driver)[: 1 + ("driver" in victims)]:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(is_alive, processes)))
        until(lambda: not is_alive(driver))
    assert here.pids() == pids and here.serves()


FIRST = """
import asyncio, signal, sys
from tests.cluster.test_user_ray import RegisterAdapters, SimpleNamespace, started
async def main():
    ray = SimpleNamespace(address=sys.argv[1])
    cluster = await started(ray, 2, namespace="joined", max_replicas=3, cpus=0.5)
    await cluster.call(RegisterAdapters({"x": sys.argv[2]}))
    print(cluster.ray.driver.pid, *(each.at.replica_pid for each in cluster.located.values()), flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await cluster.close()
asyncio.run(main())
"""


@pytest.mark.parametrize("ends", ["by SIGTERM", "killed", "killed with its driver"])
def test_two_front_ends_serve_at_once_and_the_other_one_goes_on(ray: UserRay, tmp_path: Path, ends: str) -> None:
    version, other = write(tmp_path / "x"), write(tmp_path / "y", seed=1)
    command = [sys.executable, "-c", FIRST, ray.address, str(tmp_path / "x")]
    with contextlib.ExitStack() as ending:
        first = ending.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        ending.callback(first.kill)
        assert first.stdout is not None
        driver, *pids = map(int, first.stdout.readline().split())
        began_s = time.monotonic()
        found = Here(ray, namespace="joined", max_replicas=3, cpus=0.5)
        ending.callback(found.close)
        cluster = found.cluster
        print(f"the second one serves after {time.monotonic() - began_s:.1f} s")
        assert any("serves in this namespace; this one serves beside it" in line for line in found.lines)
        assert set(found.answer_all()) == {0}
        # Changes through the second one are made by the first one, and seen by both.
        assert set(cluster.desired_adapters) == {"x"}
        assert found.run(cluster.load_adapter("y", str(tmp_path / "y"))).version == other
        assert cluster.desired_adapters["y"].version == other
        assert found.run(cluster.call(DrainReplica(NAMES[0], 5.0)))
        assert [each.state for each in cluster.status().replicas] == [DRAINING, SERVING]
        found.run(cluster.call(ResumeReplica(NAMES[0])))
        with pytest.raises(BadRequest, match="it must be between 1 and 3"):
            found.run(cluster.call(Scale(4, 0.0)))
        until(lambda: found.run(cluster.call(Scale(3, MAX_WAIT_S))))
        until(lambda: len(found.pids()) == 3 and cluster.status().replicas[2].state == SERVING)
        until(lambda: found.run(cluster.call(Scale(2, MAX_WAIT_S))))
        until(found.serves)
        # Nothing of the second one waits when the first one ends.
        os.kill(first.pid, signal.SIGTERM if ends == "by SIGTERM" else signal.SIGKILL)
        if ends == "killed with its driver":
            os.kill(driver, signal.SIGKILL)
        began_s = time.monotonic()
        while cluster.front_ends.owner is not None:
            assert set(found.answer_all()) == {0}
        print(f"{ends}: the other one makes the changes after {time.monotonic() - began_s:.1f} s")
        assert sorted(pid for _, pid, _ in found.pids().values()) == sorted(pids)
        assert set(cluster.desired_adapters) == {"x", "y"} and set(found.answer_all()) == {0}
        for name, content in (("x", version), ("y", other)):
            request = asked("own", adapter=name)
            check(request, found.run(outputs_of(cluster, request)), content)
        found.run(cluster.call(UnloadAdapter("y", True)))
        os.kill(found.pids()[NAMES[0]][2], signal.SIGKILL)  # the new owner has it started again
        until(lambda: sorted(pid for _, pid, _ in found.pids().values()) != sorted(pids) and found.serves())
        assert set(found.answer_all()) == {0} and set(cluster.desired_adapters) == {"x"}
        pids = [pid for each in found.pids().values() for pid in each]
    until(lambda: not any(map(is_alive, pids)))


# -- what ends last ---------------------------------------------------------------------------------------------------


def test_the_head_ends_and_returns(here: Here, ray: UserRay) -> None:
    """Serving goes on. What is killed afterwards is known again, by a driver that has replaced the first one."""
    pids = here.pids()
    assert set(here.answer_all(ray.head.kill)) == {0}
    time.sleep(3)
    assert set(here.answer_all()) == {0} and here.pids() == pids
    ray.start_head()
    until(lambda: here.cluster.ray.driver is not None)
    assert set(here.answer_all()) == {0} and here.pids() == pids
    os.kill(pids[NAMES[0]][0], signal.SIGKILL)
    began_s = time.monotonic()
    until(lambda: here.serves() and here.pids()[NAMES[0]] != pids[NAMES[0]])
    print(f"known again after {time.monotonic() - began_s:.1f} s")
    assert set(here.answer_all()) == {0}


def test_a_node_ends(here: Here, ray: UserRay) -> None:
    """Its replica is started on the other node."""
    pids = here.pids()
    lost = {each.name: each.node for each in here.cluster.status().replicas}
    node = ray.nodes[0]
    children = {each.pid for each in psutil.Process(node.process.pid).children(recursive=True)}
    [name] = [name for name in NAMES if pids[name][0] in children]
    assert set(here.answer_all(node.kill)) <= {0, 1}
    began_s = time.monotonic()
    until(lambda: here.serves() and here.pids()[name] != pids[name])
    print(f"elsewhere after {time.monotonic() - began_s:.1f} s")
    assert {each.node for each in here.cluster.status().replicas} == {*lost.values()} - {lost[name]}
    assert set(here.answer_all()) == {0}
