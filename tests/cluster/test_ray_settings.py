"""Ray's settings, and the actor's class without Ray."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from vlora.cluster.on_ray import settings
from vlora.cluster.on_ray.actor import ActorSettings, NotOpened, ReplicaActor
from vlora.cluster.on_ray.cluster import with_shared_cores
from vlora.cluster.on_ray.log_pipe import LogPipe
from vlora.cluster.on_ray.settings import Folder, Ports
from vlora.config import EngineConfig
from vlora.errors import BadConfig
from vlora.types import ErrorValue


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


def test_the_paths_of_sockets_stay_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = Folder.create()
    folder.remove()
    assert len(folder.ray_folder) <= 40


@pytest.mark.parametrize("version", ["2.51.2", "1.13.0", "2.9"])
def test_a_ray_without_authentication_is_refused(version: str) -> None:
    with pytest.raises(BadConfig, match=rf"^Ray {version} is installed, .*; 2\.52 or later is needed: pip install"):
        settings.check_version(version)


@pytest.mark.parametrize("version", ["2.52.0", "2.60.0", "3.0.0rc1"])
def test_a_ray_with_authentication_is_accepted(version: str) -> None:
    settings.check_version(version)


def test_a_range_with_a_port_in_use_is_skipped() -> None:
    found = settings.find_ports(4)
    with socket.create_server(("127.0.0.1", found.last)):
        assert settings.find_ports(4).first > found.last
    given = [int(flag.rpartition("=")[2]) for flag in Ports(20_000, 4).flags()]
    assert [port for port in given if port] == [*range(20_000, 20_008), 20_010, 20_041]


def test_each_way_to_ray_has_an_address_and_none_is_a_default() -> None:
    assert settings.connection(Ports(20_000, 2))["address"] == "127.0.0.1:20000"
    command = settings.start_command(Folder("/tmp/f"), Ports(20_000, 2))
    assert {"--include-dashboard=false", "--disable-usage-stats"} <= set(command)


def actor_settings(tmp_path: Path, config: EngineConfig, command: tuple[str, ...]) -> bytes:
    (secret := tmp_path / "secret").write_bytes(b"a secret of more than 16 bytes")
    return msgspec.msgpack.encode(
        ActorSettings(
            config=config,
            secret_file=str(secret),
            claim_file=str(tmp_path / "claim"),
            log_pipe=str(tmp_path / "log"),
            command=command,
            environ={},
            alone_s=60.0,
        )
    )


def test_replicas_divide_the_cores_unless_threads_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert with_shared_cores(EngineConfig(model="m"), 2).threads == 4
    assert with_shared_cores(EngineConfig(model="m", tensor_parallel=2), 2).threads == 2
    assert with_shared_cores(EngineConfig(model="m", threads=3), 2).threads == 3


def test_replicas_have_fixed_gpus_and_the_variables_of_the_front_end() -> None:
    """A later Ray does not know which GPUs the replicas have that it finds."""
    folder, marked = Folder("/tmp/f"), {"VLORA_REPLICAS_OF": "/tmp/f"}
    given = {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "4,5,6,7", "RAY_AUTH_TOKEN": "t"}
    found = [settings.replica_environment(folder, given, place=place, num_gpus=2) for place in (0, 1)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["4,5", "6,7"] and found[0]["OMP_NUM_THREADS"] == "3"
    found = [settings.replica_environment(folder, {}, place=place, num_gpus=1) for place in (0, 1)]
    assert found == [{"OMP_NUM_THREADS": None, "CUDA_VISIBLE_DEVICES": gpu, **marked} for gpu in ("0", "1")]
    found = [settings.replica_environment(folder, given, place=1, num_gpus=0)]
    assert found == [{"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "4,5,6,7", **marked}]


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ((sys.executable, "-c", "import os; os._exit(3)"), "the engine process ended with exit code 3 while starting"),
        (
            (sys.executable, "-m", "tests.server.scripted_process"),
            "model 'broken' cannot be loaded: there is no such folder",
        ),
    ],
)
def test_an_actor_returns_the_error_of_an_engine_that_does_not_start(
    command: tuple[str, ...], error: str, tmp_path: Path
) -> None:
    answer = ReplicaActor(actor_settings(tmp_path, EngineConfig(model="broken"), command)).open()
    found = msgspec.msgpack.decode(answer, type=NotOpened).error
    assert isinstance(found, ErrorValue) and error in found.message


def test_the_log_of_a_replica_reaches_the_front_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import os, sys; print('first\\nsecond', file=sys.stderr, flush=True); os._exit(3)"
    given = actor_settings(tmp_path, EngineConfig(model="m"), (sys.executable, "-c", code))

    async def main() -> None:
        log = LogPipe(str(tmp_path / "log"))
        await asyncio.to_thread(ReplicaActor(given).open)
        log.close()

    asyncio.run(main())
    assert capsys.readouterr().err == "first\nsecond\n"
