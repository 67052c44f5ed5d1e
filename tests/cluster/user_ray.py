"""A Ray that a user has started: `ray start` with a folder, a port and a token of its own. Only it is ended."""

from __future__ import annotations

import contextlib
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


class Node:
    """`ray start --block`, in a session of its own."""

    def __init__(self, *arguments: str, environ: dict[str, str]) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *arguments]
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

    def __init__(self, *, num_cpus: int, keeps_state: bool = False) -> None:
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
        self.nodes: list[Node] = []
        self.start_head()

    def start_head(self) -> None:
        (self.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)  # or it refuses to start beside nodes
        self.head = Node(
            "--head",
            f"--port={self._port}",
            f"--num-cpus={self._num_cpus}",
            f"--temp-dir={self.folder}/ray",
            "--include-dashboard=false",
            "--object-store-memory=80000000",
            environ=self._environ | self._state,
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
