"""A Ray that a user has started: `ray start` with a folder, a port and a token of its own. Only it is ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from tests.processes import free_port

ROOT = str(Path(__file__).parents[2])
_STARTED = "Ray runtime started"
_HEAD_ID = "f" * 51 + "00000"  # with Ray's simulated provider of nodes


class Node:
    """`ray start --block`, in a session of its own."""

    def __init__(self, *arguments: str, environ: dict[str, str]) -> None:
        options = ("--block", "--disable-usage-stats", "--log-color=false")
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.output = ""
        for line in self.process.stdout:
            self.output += line
            if _STARTED in line:
                break
        else:
            raise AssertionError(self.output)

    def part(self, name: str) -> psutil.Process:
        """Its process of a name, such as raylet or gcs_server."""
        return next(each for each in psutil.Process(self.process.pid).children() if each.name() == name)

    def kill(self) -> None:
        """End all of its processes at once, as when the machine ends."""
        with contextlib.suppress(psutil.Error):
            found = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
            for each in found:
                with contextlib.suppress(psutil.Error):
                    each.kill()
            psutil.wait_procs(found, timeout=10)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class UserRay:
    """A head and other nodes, all on this machine.

    Attributes:
        address: What a user gives to `--ray`.
        environ: What a user has set, such as the path of the token.
    """

    def __init__(self, *, num_cpus: int, keeps_state: bool = False, most_nodes: int = 0) -> None:
        """most_nodes: That Ray's autoscaler adds, with a CPU each."""
        self.folder = Path(tempfile.mkdtemp(prefix="ur-", dir="/tmp"))  # paths of sockets are short
        token = self.folder / "token"
        token.touch(0o600)
        token.write_text("0123456789abcdef" * 4)
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        paths = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
        self.environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self._environ = {**own, **self.environ, "PYTHONPATH": paths, "RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
        self._port, self._num_nodes = free_port(), 0
        self._state = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self.folder / "state")}
        if not keeps_state:
            self._state = {}
        self._num_cpus = num_cpus
        self._autoscaling: dict[str, str] = {}
        if most_nodes:
            (self.folder / "autoscaling.json").write_text(json.dumps(self._autoscaler(most_nodes)))
            ids = dict.fromkeys(("RAY_CLOUD_INSTANCE_ID", "RAY_OVERRIDE_NODE_ID_FOR_TESTING"), _HEAD_ID)
            self._autoscaling = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", **ids}
            self._autoscaling["RAY_enable_autoscaler_v2"] = "1"
        self.nodes: list[Node] = []
        self.start_head()

    def _autoscaler(self, most_nodes: int) -> dict[str, object]:
        of_node = {"resources": {"CPU": 1, "object_store_memory": 80_000_000}, "node_config": {}}
        return {
            "cluster_name": "simulated",
            "max_workers": most_nodes,
            "idle_timeout_minutes": 0.1,
            "provider": {
                "type": "external",  # Ray's own type for it needs a file that is not installed
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "launch_multiple": True,
                "head_node_id": _HEAD_ID,
                "gcs_address": f"127.0.0.1:{self._port}",
            },
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                "worker": {**of_node, "min_workers": 0, "max_workers": most_nodes},
            },
            "head_node_type": "ray.head.default",
            "file_mounts": {},
            **{key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
            **{f"{part}_commands": [] for part in ("setup", "head_setup", "worker_setup", "initialization")},
        }

    def start_head(self) -> None:
        (self.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)  # or it refuses to start beside nodes
        self.head = Node(
            "--head",
            f"--port={self._port}",
            f"--num-cpus={self._num_cpus}",
            f"--temp-dir={self.folder}/ray",
            "--include-dashboard=false",
            "--object-store-memory=80000000",
            *([f"--autoscaling-config={self.folder}/autoscaling.json"] if self._autoscaling else []),
            environ=self._environ | self._state | self._autoscaling,
        )
        found = re.search(r"Local node IP: ([0-9.]+)", self.head.output)
        assert found is not None, self.head.output
        self.address = f"{found[1]}:{self._port}"

    def add(self, *arguments: str) -> Node:
        self._num_nodes += 1
        node = Node(
            f"--address={self.address}",
            f"--temp-dir={self.folder}/ray{self._num_nodes}",
            "--object-store-memory=80000000",
            *arguments,
            environ=self._environ,
        )
        self.nodes.append(node)
        return node

    def close(self) -> None:
        for node in (*self.nodes, self.head):
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
