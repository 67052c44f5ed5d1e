"""Machines that join a head, on a real Ray with sleeping engines.

The second machine is a network namespace, as root; otherwise another address of this machine.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from tests.cluster.running import InThread, asked, check, outputs_of
from tests.cluster.test_shipping import write
from tests.processes import until
from vlora.cluster.connection import connect
from vlora.cluster.members import Health
from vlora.cluster.nodes.cluster import NodesCluster
from vlora.cluster.nodes.plan import ClusterPlan, read_cluster_plan
from vlora.cluster.nodes.runs import HEAD, running
from vlora.cluster.on_ray import settings as ray_settings
from vlora.cluster.on_ray.own_processes import ray_processes, replica_processes
from vlora.cluster.on_ray.settings import Folder, is_free, is_private
from vlora.config import EngineConfig
from vlora.errors import BadConfig, Disconnected
from vlora.types.replicas import SERVING

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8"),
]

T = TypeVar("T")

COMMAND = ("", "-m", "tests.cluster.sleeping_engine")
WAIT_S = 80.0


class Network:
    """The addresses of a head and of a node. With a namespace, the node's link can be cut.

    Attributes:
        command: Runs a program on the node.
    """

    def __init__(self) -> None:
        self.name = f"vlora-{os.getpid()}"
        self.head, self.node = "127.0.0.1", "127.0.0.2"
        self.command: tuple[str, ...] = ()
        self.has_namespace = os.geteuid() == 0 and self._ip(f"netns add {self.name}")
        if not self.has_namespace:
            return
        link, net = f"v{os.getpid()}", f"10.213.{os.getpid() % 256}"
        made = all(
            (
                self._ip(f"link add {link}a type veth peer name {link}b netns {self.name}"),
                self._ip(f"addr add {net}.1/30 dev {link}a"),
                self._ip(f"link set {link}a up"),
                self._ip(f"-n {self.name} addr add {net}.2/30 dev {link}b"),
                self._ip(f"-n {self.name} link set {link}b up"),
                self._ip(f"-n {self.name} link set lo up"),
            )
        )
        if not made:
            self.close()
            self.has_namespace = False
            return
        self.link, self.head, self.node = f"{link}a", f"{net}.1", f"{net}.2"
        self.command = ("ip", "netns", "exec", self.name)

    def cut(self, is_cut: bool) -> None:
        assert self._ip(f"link set {self.link} {'down' if is_cut else 'up'}")

    def close(self) -> None:
        if self.has_namespace:
            self._ip(f"netns del {self.name}")

    def _ip(self, command: str) -> bool:
        if shutil.which("ip") is None:
            return False
        return subprocess.run(["ip", *command.split()], capture_output=True).returncode == 0


class Part:
    """A `vlora cluster` command that runs. on: runs it on a machine."""

    def __init__(self, tmp: Path, *args: str, on: tuple[str, ...] = ()) -> None:
        environ = os.environ | {"TMPDIR": str(tmp)}
        self.log = tmp / f"{len(list(tmp.glob('*.log')))}.log"
        command = [*on, sys.executable, "-m", "vlora.cli", "cluster", *args]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)

    def wait_for(self, text: str) -> None:
        ends_s = time.monotonic() + WAIT_S
        while text not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < ends_s, self.log.read_text()
            time.sleep(0.05)


class Machines(InThread):
    """A head and a node, and a front end."""

    cluster: NodesCluster

    def __init__(self, tmp: Path, network: Network) -> None:
        self.tmp, self.network = tmp, network
        (tmp / "model").mkdir()
        (tmp / "model" / "config.json").write_text("{}")
        # For head, node and front end. Other tests with Ray take ports from 20000 on.
        first = next(first for first in range(26_000, 31_700, 300) if all(map(is_free, range(first, first + 251))))
        self.file = tmp / "cluster.yaml"
        self.file.write_text(
            f"head: {network.head}:{first + 250}\ntoken_file: token\nray_ports: {first}-{first + 199}\n"
            f"door_ports: {first + 200}-{first + 249}\nmodel: model\nreplicas: {{number: 2, most: 3, gpus: 1}}\n"
            "ship_adapters: true\n"
        )
        self.plan: ClusterPlan = read_cluster_plan(self.file)
        self.config = EngineConfig(model=str(tmp / "model"), max_batch_size=8, block_size=16, device="cuda")
        self.head = self.start_head()
        self.node = self.start_node()
        super().__init__(self.join)

    def join(self) -> Coroutine[Any, Any, NodesCluster]:
        return NodesCluster.join(self.config, self.plan, command=COMMAND, health=Health(missed=10), alone_s=5.0)

    def start_head(self) -> Part:
        part = Part(self.tmp, "up", str(self.file), "--cpus", "2", "--gpus", "2")
        part.wait_for("other machines join")
        return part

    def start_node(self) -> Part:
        token = str(self.tmp / "token")
        args = ("--token-file", token, "--host", self.network.node, "--cpus", "2", "--gpus", "2")
        part = Part(self.tmp, "join", str(self.plan.head), *args, on=self.network.command)
        part.wait_for("has joined")
        return part

    def hosts(self) -> dict[str, str]:
        """The machine of each replica that serves."""
        serving = {replica.name for replica in self.cluster.status().replicas if replica.state == SERVING}
        return {name: member.address.host for name, member in self.cluster.members.items() if name in serving}

    def on(self, host: str) -> list[str]:
        """The replicas that serve on a machine."""
        return sorted(name for name, each in self.hosts().items() if each == host)

    def gpus(self) -> set[str]:
        """The GPUs that replicas are given. Their machines were started as if each had two."""
        return {psutil.Process(pids.engine).environ()["CUDA_VISIBLE_DEVICES"] for pids in self.cluster.pids.values()}

    def wait(self, condition: Callable[[], bool]) -> None:
        until(condition, WAIT_S)


def kill_machine(part: Part) -> None:
    """Kill all processes of a node at once, as a power failure does."""
    children = psutil.Process(part.process.pid).children(recursive=True)
    (folder,) = {
        Folder(value)
        for child in children
        if (value := child.environ().get("RAY_AUTH_TOKEN_PATH", "")[: -len("/token")])
    }
    victims = [psutil.Process(part.process.pid), *children, *ray_processes(folder), *replica_processes(folder)]
    for process in victims:
        if process.is_running():
            process.kill()
    part.process.wait()
    folder.remove()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    tmp = tmp_path_factory.mktemp("machines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp))
        patch.setenv("XDG_CACHE_HOME", str(tmp / "caches"))
        network = Network()
        try:
            found = Machines(tmp, network)
            yield found
            found.close()
        finally:
            environ = os.environ | {"TMPDIR": str(tmp)}
            subprocess.run([sys.executable, "-m", "vlora.cli", "cluster", "down"], env=environ, timeout=60, check=True)
            network.close()


def test_each_machine_has_a_replica_and_answers_are_as_on_one_engine(machines: Machines) -> None:
    assert set(machines.answer_all()) == {0}
    assert set(machines.hosts().values()) == {machines.network.head, machines.network.node}
    assert machines.gpus() == {"0"}
    ports = machines.plan.door_ports
    assert all(member.address.port in ports for member in machines.cluster.members.values())
    assert f"{machines.network.node} joins\n" in machines.head.log.read_text()
    # No other user can change the files of a run. Ray gives its own folder to all, also if it was there before.
    folders = [run.folder for run in running()]
    assert len(folders) == 3
    for folder in folders:
        assert folder is not None and is_private(folder.path) and not is_private(folder.ray_folder)
    with pytest.raises(BadConfig, match=r"^a front end of \S+ runs already on this machine"):
        machines.run(machines.join())


@pytest.mark.exhaustive
def test_adapters_are_sent_to_the_machines(machines: Machines, tmp_path: Path) -> None:
    """Their path leads to the files in the front end's process only."""
    version = write(tmp_path)
    opened = os.open(tmp_path, os.O_RDONLY)
    number = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 700)
    try:
        machines.run(machines.cluster.load_adapter("sent", f"/proc/self/fd/{number}"))
        request = asked("sent", 10, adapter="sent")
        check(request, machines.run(outputs_of(machines.cluster, request)), version)
        places = machines.run(machines.cluster.adapter_places())
        assert {(place.state, place.version) for place in places} == {("device", version)} and len(places) == 2
        caches = machines.tmp / "caches" / "vlora" / "adapters"  # of both: they share a disk
        assert [path.name for path in caches.iterdir() if path.is_dir()] == [version]
        machines.run(machines.cluster.unload_adapter("sent"))
    finally:
        os.close(number)
        os.close(opened)


@pytest.mark.exhaustive
def test_connections_without_the_cluster_s_certificates_are_refused(machines: Machines) -> None:
    """By a replica, and by Ray, which requires a certificate of its peers too."""
    member = next(iter(machines.cluster.members.values()))
    secret = machines.cluster.folder.secret()
    with pytest.raises(Disconnected):
        machines.run(connect(member.address, secret, tls=False, beat_s=1.0))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and empty settings

    def answer(folder: Folder | None) -> bytes:
        if folder is not None:
            context.load_cert_chain(f"{folder.path}/cert.pem", f"{folder.path}/key.pem")
        control = (machines.network.head, machines.plan.ray_ports.first)
        with socket.create_connection(control, 5) as line, context.wrap_socket(line) as encrypted:
            encrypted.sendall(preface)
            return encrypted.recv(9)

    with pytest.raises((ssl.SSLError, ConnectionError)):
        assert not answer(None)
        raise ConnectionError
    assert len(answer(machines.cluster.folder)) == 9


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.exhaustive
def test_replicas_serve_on_without_a_head_and_the_next_one_finds_them(
    machines: Machines, number: signal.Signals
) -> None:
    """Those of its own machine too. All of its Ray ends with it."""
    names, pids = machines.hosts(), dict(machines.cluster.pids)
    deaths = machines.cluster.status().num_deaths
    assert set(machines.answer_all(lambda: machines.head.process.send_signal(number))) == {0}
    machines.head.process.wait()
    assert set(machines.answer_all()) == {0}
    machines.head = machines.start_head()
    machines.wait(lambda: all(machines.cluster.pids[name].actor != pids[name].actor for name in names))
    for name, former in pids.items():
        found = machines.cluster.pids[name]
        assert (found.replica, found.engine) == (former.replica, former.engine)
    assert machines.hosts() == names and machines.cluster.status().num_deaths == deaths
    assert set(machines.answer_all()) == {0}


@pytest.mark.exhaustive
def test_a_head_starts_its_ray_again_beside_that_of_a_front_end(machines: Machines) -> None:
    """The front end's Ray, on the same machine, still uses the address of the former one."""
    names, pids = machines.hosts(), dict(machines.cluster.pids)
    (head,) = [run for run in running() if run.kind == HEAD]
    assert head.folder is not None
    for process in ray_processes(head.folder):
        process.kill()
    assert set(machines.answer_all()) == {0}
    machines.wait(lambda: all(machines.cluster.pids[name].actor != pids[name].actor for name in names))
    assert {name: pids[name].engine for name in names} == {name: machines.cluster.pids[name].engine for name in names}
    assert set(machines.answer_all()) == {0}


@pytest.mark.exhaustive
def test_a_killed_machine_loses_no_request_and_its_replica_moves(machines: Machines) -> None:
    before = machines.cluster.status().num_deaths
    assert 1 in machines.answer_all(lambda: kill_machine(machines.node))
    machines.wait(lambda: len(machines.on(machines.network.head)) == 2)
    assert machines.cluster.status().num_deaths == before + 1
    assert set(machines.answer_all()) == {0}
    assert machines.gpus() == {"0", "1"}


@pytest.mark.exhaustive
def test_a_machine_that_joins_gets_the_next_replica(machines: Machines) -> None:
    machines.node = machines.start_node()
    assert machines.run(machines.cluster.scale(3, 30.0))
    assert machines.on(machines.network.node) == ["replica-2"]
    assert set(machines.answer_all()) == {0}


FORGET = """
import json, sys, ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_list
ray.init(**json.loads(sys.argv[1]))
for key in _internal_kv_list(b"ActorClass", namespace=b"fun"):
    assert _internal_kv_del(key, namespace=b"fun")
"""


def forget_classes(machines: Machines) -> None:
    """Let Ray forget the classes that drivers have sent, as it may when their machine ends."""
    folder, host = machines.cluster.folder, machines.network.head
    where = ray_settings.connection(folder, f"{host}:{machines.plan.ray_ports.first}", host)
    command = [sys.executable, "-c", FORGET, json.dumps(where)]
    subprocess.run(command, env=ray_settings.node_environment(folder, os.environ), check=True, capture_output=True)


@pytest.mark.exhaustive
def test_a_killed_replica_stays_on_its_machine(machines: Machines) -> None:
    """Also where Ray has forgotten the class of its actor."""
    forget_classes(machines)
    pids = machines.cluster.pids["replica-2"]
    assert set(machines.answer_all(lambda: os.kill(pids.engine, signal.SIGKILL))) <= {0, 1}
    machines.wait(lambda: machines.cluster.pids["replica-2"] != pids and len(machines.hosts()) == 3)
    assert machines.on(machines.network.node) == ["replica-2"]


@pytest.mark.exhaustive
def test_a_machine_without_a_network_loses_no_request(machines: Machines) -> None:
    """No end is notified of the cut. Its replica ends by itself, and is started again when the network is back."""
    if not machines.network.has_namespace:
        pytest.skip("a cut network needs root and network namespaces")
    pids = machines.cluster.pids["replica-2"]
    assert 1 in machines.answer_all(lambda: machines.network.cut(True))
    machines.wait(lambda: not machines.on(machines.network.node))
    machines.wait(lambda: not psutil.pid_exists(pids.replica))
    machines.network.cut(False)
    machines.wait(lambda: machines.on(machines.network.node) == ["replica-2"])
    assert set(machines.answer_all()) == {0}
