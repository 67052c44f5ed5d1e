"""`vlora serve --replicas 2` as a process, on a real Ray with scripted engines: its lines, its answers, its end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.server.served import call
from vlora.client import Client
from vlora.errors import BadRequest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files. Paths of Ray's sockets must be short."""
    found = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    yield found
    for process in left(found):
        process.kill()
    shutil.rmtree(found)


def left(folder: Path) -> list[psutil.Process]:
    """The processes of a Ray in this folder, replicas and engines included."""
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            paths = [environ.get(name, "") for name in ("RAY_AUTH_TOKEN_PATH", "VLORA_REPLICAS_OF")]
            if any(path.startswith(f"{folder}/") for path in paths):
                found.append(process)
        except psutil.Error:
            continue
    return found


def serve(folder: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.docs.scripted_vlora", "serve", "--rpyc-port", "0", "--http-port", "0"]
    return subprocess.Popen(
        [*command, "--replicas", "2", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def vlora(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vlora.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def address_of(ready: str) -> tuple[str, int, int]:
    """For `--server`, and the ports of RPyC and HTTP."""
    found = re.search(r"rpyc (127\.0\.0\.1:(\d+)) \| http 127\.0\.0\.1:(\d+) ", ready)
    assert found
    return found[1], int(found[2]), int(found[3])


def wait_ready(process: subprocess.Popen[str]) -> list[str]:
    """The lines until the server is ready."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith("ready: "):
            return lines
    raise AssertionError((lines, process.communicate()))


def test_replicas_serve_both_apis_and_end_with_the_server(folder: Path) -> None:
    journal = str(folder / "routing.jsonl")
    process = serve(folder, "--routing-rule", "least_loaded", "--max-replicas", "3", "--routing-journal", journal)
    try:
        *lines, ready = wait_ready(process)
        assert lines[0] == "starting Ray" and re.match(r"Ray listens on ports 2\d{4}-2\d{4} of all addresses", lines[1])
        assert [line.partition(" serves ")[2] for line in lines[2:]] == ["(1 of 2)", "(2 of 2)"]
        server, rpyc_port, port = address_of(ready)
        with Client(port=rpyc_port) as client, ThreadPoolExecutor(8) as threads:
            answers = threads.map(lambda _: client.generate("say:light").text, range(8))
            assert list(answers) == ["light"] * 8
            assert client.stats().num_finished == 8
            scaled = vlora("cluster", "scale", "3", "--server", server)
            assert (scaled.returncode, scaled.stdout, scaled.stderr) == (0, "3 replicas\n", "")
            assert [each.state for each in client.cluster().replicas] == ["serving"] * 3
            scaled = vlora("cluster", "scale", "auto", "--server", server)
            assert (scaled.returncode, scaled.stdout, scaled.stderr) == (0, "automatic\n", "")
            *_, scaling, change = vlora("cluster", "status", "--server", server).stdout.splitlines()
            assert scaling == "scaled automatically: 3 replicas, 2 to 3"
            assert re.fullmatch(r"last change \d+ s ago: 3 instead of 2: set by an operator", change)
            assert json.loads(call(port, "PUT", "/v1/cluster/scale?wait_s=20", {"replicas": 2})[1])["done"]
            with pytest.raises(BadRequest, match=r"^the number of replicas is 4; it must be between 1 and 3"):
                client.scale(4)
        metrics = call(port, "GET", "/metrics")[1]
        replicas = json.loads(call(port, "GET", "/console/state")[1])["replicas"]
        assert [(each["name"], each["state"], each["num_requests"]) for each in replicas] == [
            ("replica-0", "serving", 0),
            ("replica-1", "serving", 0),
        ]
        for row in (
            *('replicas{state="serving"} 2', 'replicas{state="down"} 0', "replicas_wanted 2", "cluster_waiting 0"),
            *(f'{name}{{replica="replica-1"}} 0' for name in ("replica_requests", "replica_failed_adapters")),
            *('shipped_bytes_total{replica="replica-1"} 0', "resubmitted_total 0", "replica_deaths_total 0"),
            *("moves_total 0", "scaling_automatic 0", 'scaling_decisions_total{reason="operator"} 2'),
            'scaling_decisions_total{reason="waiting"} 0',
        ):
            assert f"\nvlora_{row}.0\n" in metrics
        engines = [each for each in left(folder) if "tests.server.scripted_process" in each.cmdline()]
        assert len(engines) == 2
        assert len(left(folder)) > 8
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "", "")
        assert not left(folder) and not list(folder.glob("vlora-ray-*"))
        replayed = vlora("simulate", "--replay", journal)
        assert replayed.returncode == 0
        assert re.fullmatch(r"\d+ calls of the router, each with the recorded result\n", replayed.stdout)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.exhaustive
def test_a_killed_server_leaves_nothing_running_but_its_adapters_state(folder: Path) -> None:
    for name in ("given", "loaded", "unloaded"):
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text("{}")
    given = [f"--adapter={name}={folder / name}" for name in ("given", "unloaded")]
    settings = (*given, "--adapter-state", str(folder / "state"))
    process = serve(folder, "--replicas", "1", "--max-replicas", "2", "--autoscale", *settings)
    try:
        ready = wait_ready(process)[-1]
        assert ready.endswith("| adapters: given, unloaded")
        server, rpyc_port, port = address_of(ready)
        with Client(port=rpyc_port) as client:
            client.load_adapter("loaded", folder / "loaded")
            client.pin_adapter("loaded", True)
            client.unload_adapter("unloaded")
        process.kill()
        process.communicate()
        ends_s = time.monotonic() + 30
        while left(folder) and time.monotonic() < ends_s:
            time.sleep(0.1)
        assert not left(folder) and not list(folder.glob("vlora-ray-*"))
        # The next server has them again, and starts although one has lost its files.
        (folder / "given" / "adapter_config.json").unlink()
        process = serve(folder, *settings)
        *lines, ready = wait_ready(process)
        assert lines[0] == "adapters unloaded later, and not served: unloaded"
        assert ready.endswith("| adapters: given, loaded")
        server, rpyc_port, port = address_of(ready)
        listed = {each["name"]: each for each in json.loads(call(port, "GET", "/v1/adapters")[1])["data"]}
        assert [(name, each["pinned"]) for name, each in listed.items()] == [("given", False), ("loaded", True)]
        assert listed["given"]["error"].startswith(f"replica 'replica-0': {folder / 'given'}: no adapter_config.json")
        places = [(each["replica"], each["state"], each["cause"]) for each in listed["loaded"]["replicas"]]
        assert places == [("replica-0", "device", ""), ("replica-1", "device", "")]
        shown = vlora("cluster", "status", "--adapters", "--server", server).stdout.splitlines()
        assert [line.split()[:3] for line in shown] == [
            [name, replica, state]
            for name, state in (("given", "failed"), ("loaded", "device"))
            for replica in ("replica-0", "replica-1")
        ]
        # Another server is refused meanwhile.
        other = serve(folder, *settings)
        _, err = other.communicate(timeout=60)
        assert other.returncode == 2
        assert err == f"error: another server uses {folder / 'state'}; give each server a folder of its own\n"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.exhaustive
def test_an_engine_that_cannot_start_is_one_line_and_exit_code_2(folder: Path) -> None:
    process = serve(folder, "--model", "broken")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "ready" not in out
    assert err == "error: model 'broken' cannot be loaded: there is no such folder\n"
    assert not left(folder)
