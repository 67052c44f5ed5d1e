"""The processes that end with a head, and those that the next one and `down` find. A program stands in for Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from vlora.cli import cli
from vlora.cluster.nodes import runs
from vlora.cluster.nodes.head import taken_over
from vlora.cluster.nodes.runs import HEAD, NODE, Run, runs_folder
from vlora.cluster.nodes.token import derived
from vlora.cluster.on_ray.log_pipe import LogPipe, open_pipe
from vlora.cluster.on_ray.node_settings import NodeSettings, write_node
from vlora.cluster.on_ray.own_processes import ray_processes, replica_processes
from vlora.cluster.on_ray.processes import Process
from vlora.cluster.on_ray.reports import HeadReport, HeadSettings
from vlora.cluster.on_ray.settings import RUN_VARIABLE, TOKEN_PATH_VARIABLE, Folder
from vlora.errors import BadConfig
from vlora.wire.framing import receive_value

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="other systems do not show the environment of processes"),
]

TOKEN = b"a token of at least 32 characters"
HOST = "10.0.0.1"
SLEEP = "import time; time.sleep(60)"
RAY = f"print('Ray runtime started', flush=True); {SLEEP}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = Folder.create(derived(TOKEN, "ray"), derived(TOKEN, "replicas"))
    files = {"cert_file": "", "key_file": "", "model": "embedded", "variables": {}}
    node = NodeSettings(key="vlora-1", folder=found.path, host=HOST, first_port=1, last_port=2, num_gpus=0, **files)  # type: ignore[arg-type]
    write_node(found, node)
    yield found
    found.remove()


@pytest.fixture
def replica(folder: Folder) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is marked as a replica of the folder's run."""
    with subprocess.Popen([sys.executable, "-c", SLEEP], env=os.environ | {RUN_VARIABLE: folder.path}) as process:
        while not replica_processes(folder):  # its environment is visible shortly after its start
            assert process.poll() is None
            time.sleep(0.01)
        yield process
        process.kill()


def left_by(kind: str, folder: Folder) -> Path:
    """The file of a run that was killed."""
    file = runs_folder() / f"{kind}-{HOST}-1"
    file.write_bytes(msgspec.json.encode(Run(kind, f"{HOST}:1", 1, folder)))
    return file


@pytest.mark.parametrize("keeps_replicas", [True, False])
def test_the_end_of_the_process_above_ends_ray_and_keeps_replicas_if_asked(
    keeps_replicas: bool, folder: Folder, replica: subprocess.Popen[bytes]
) -> None:
    settings = HeadSettings(folder, (sys.executable, "-c", RAY), keeps_replicas)
    for number in range(12):  # the files of earlier ones
        os.makedirs(f"{folder.ray_folder}/session_2026-01-01_00-00-{number:02}_1_1/logs")
    os.symlink("session_2026-01-01_00-00-11_1_1", f"{folder.ray_folder}/session_latest")
    Path(folder.last_address).write_text("10.0.0.1:20000")  # of an earlier head

    async def main() -> None:
        environ = os.environ | {TOKEN_PATH_VARIABLE: folder.token_file}
        head = await Process.start("vlora.cluster.on_ray.head", settings, environ)
        assert (await receive_value(head.output, HeadReport)).problem == ""
        assert not os.path.exists(folder.last_address)
        kept = [f"session_2026-01-01_00-00-{number:02}_1_1" for number in (9, 10, 11)]
        assert sorted(os.listdir(folder.ray_folder)) == [*kept, "session_latest"]
        await head.stop(10.0)

    asyncio.run(main())
    assert (replica.poll() is None) == keeps_replicas
    assert os.path.exists(folder.path) == keeps_replicas
    assert not ray_processes(folder)


def test_the_next_head_finds_the_replicas_of_one_that_was_killed(
    folder: Folder, replica: subprocess.Popen[bytes]
) -> None:
    file = left_by(HEAD, folder)
    with runs.registered(HEAD, f"{HOST}:1") as entry:
        assert entry.former == folder and replica.poll() is None
        assert taken_over(folder, TOKEN, HOST) == "vlora-1"
        (run,) = runs.running()
        assert run.folder == folder  # also if it is killed before it serves
    assert file.read_bytes() and not runs.running()
    assert [(run.kind, run.folder) for run in runs.end_left()] == [(HEAD, folder)]
    assert replica.poll() is not None and not os.path.exists(folder.path) and runs.end_left() == []


def test_replicas_are_left_to_the_next_head_or_end_with_the_next_node(
    folder: Folder, replica: subprocess.Popen[bytes]
) -> None:
    """Also after an error of a head that ends, as that of its last line to a program that Ctrl-C has ended too."""
    with pytest.raises(BrokenPipeError), runs.registered(HEAD, f"{HOST}:1") as entry:
        entry.note(folder)
        assert runs.end_left() == [] and replica.poll() is None, "what runs is not ended as left"
        raise BrokenPipeError
    with runs.registered(HEAD, f"{HOST}:1") as entry:
        assert entry.former == folder and replica.poll() is None
    left_by(NODE, folder)
    with runs.registered(NODE, f"{HOST}:1") as entry:
        assert entry.former is None and replica.poll() is not None


def test_a_killed_head_without_replicas_leaves_nothing(folder: Folder) -> None:
    left_by(HEAD, folder)
    with runs.registered(HEAD, f"{HOST}:1") as entry:
        assert entry.former is None and not os.path.exists(folder.path)


@pytest.mark.parametrize("what", ["token", "address", "mode", "link"])
def test_replicas_of_another_head_or_in_a_folder_that_others_may_change_end(
    what: str, folder: Folder, replica: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    real = tmp_path / "real"
    if what == "link":
        shutil.move(folder.path, real)
        os.symlink(real, folder.path)
    elif what == "mode":
        os.chmod(folder.path, 0o770)
    token, host = TOKEN[::-1] if what == "token" else TOKEN, "10.0.0.2" if what == "address" else HOST
    assert taken_over(folder, token, host) is None and replica.poll() is not None
    if what == "link":
        os.unlink(folder.path)
        assert os.listdir(real)  # the folder behind a link stays
    else:
        assert what == "mode" or not os.path.exists(folder.path)


def test_no_id_of_a_killed_process_is_in_a_locked_file(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have it by then, and `down` would end that one."""
    found: list[list[int]] = []
    monkeypatch.setattr(runs, "end_run", lambda folder: found.append([run.pid for run in runs.running()]))
    left_by(NODE, folder)
    with runs.registered(NODE, f"{HOST}:1"):
        pass
    left_by(NODE, folder)
    runs.end_left()
    assert found == [[os.getpid()], []]


def test_a_head_does_not_start_while_down_ends_the_replicas(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(folder: Folder) -> None:
        with pytest.raises(BadConfig, match=r"^`vlora cluster down` ends what an earlier head of .* start it again$"):
            runs.registered(HEAD, f"{HOST}:1").__enter__()

    monkeypatch.setattr(runs, "end_run", start)
    left_by(HEAD, folder)
    assert [run.kind for run in runs.end_left()] == [HEAD]


def test_the_next_head_reads_the_log_of_replicas(folder: Folder, capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        first = LogPipe(folder.log_pipe)
        file = open_pipe(folder.log_pipe)
        assert file is not None
        first.close()
        with pytest.raises(BrokenPipeError):
            os.write(file, b"not read\n")
        second = LogPipe(folder.log_pipe)
        os.write(file, b"read again\n")
        os.close(file)
        second.close()

    asyncio.run(main())
    assert capfd.readouterr().err == "read again\n"


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("as_json", [False, True])
def test_down_ends_what_a_killed_head_has_left(as_json: bool, folder: Folder, replica: subprocess.Popen[bytes]) -> None:
    left_by(HEAD, folder)
    (other := Folder.create()).remove()  # of a head whose files are gone
    (runs_folder() / "head-10.0.0.9-1").write_bytes(msgspec.json.encode(Run(HEAD, "10.0.0.9:1", 1, other)))
    result = CliRunner().invoke(cli, ["cluster", "down", *(["--json"] if as_json else [])])
    assert result.exit_code == 0 and replica.poll() is not None and not os.path.exists(folder.path)
    addresses = [f"{HOST}:1", "10.0.0.9:1"]
    if as_json:
        assert json.loads(result.output) == {"ended": [{"kind": HEAD, "address": each} for each in addresses]}
    else:
        assert result.output == "".join(f"ended what an earlier head of {each} had left\n" for each in addresses)
    again = CliRunner().invoke(cli, ["cluster", "down"])
    assert again.output == "nothing of a cluster runs on this machine\n"
