"""`vlora cluster up`, `join`, `down` and `vlora serve --cluster` with invalid input: one line, exit code 2. No Ray."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import queue
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.conftest import Vlora
from tests.cluster.nodes.test_joining import TOKEN, a_head, facts_here
from vlora.cli.cluster_nodes import visible_gpus
from vlora.cluster.nodes.greeting import Adapter, Facts
from vlora.cluster.on_ray.settings import is_free

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")

PLAN = "head: 127.0.0.1:1\ntoken_file: token\nmodel: {model}\nadapters: {adapters}\nreplicas: {{number: {number}}}\n"


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of other tests are not seen, and no folder of a run is left."""
    made: list[str] = []

    def mkdtemp(**settings: Any) -> str:
        made.append(real(**settings))
        return made[-1]

    real = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    yield
    assert not any(map(os.path.exists, made))


def plan(tmp_path: Path, model: str = ".", adapters: str = "{}", number: int = 2) -> str:
    (file := tmp_path / "cluster.yaml").write_text(PLAN.format(model=model, adapters=adapters, number=number))
    return str(file)


def token(tmp_path: Path) -> str:
    (file := tmp_path / "token").write_text("t" * 32)
    file.chmod(0o600)
    return str(file)


def refused(result: tuple[int, str, str]) -> str:
    """The message of the only line."""
    code, out, error = result
    assert (code, out) == (2, "") and error.startswith("error: ") and error.count("\n") == 1, result
    return error.removeprefix("error: ").strip()


def test_a_number_of_no_replicas_is_refused(vlora_command: Vlora, tmp_path: Path) -> None:
    file = plan(tmp_path, number=0)
    for args in (("cluster", "up", file), ("serve", "--cluster", file)):
        assert refused(vlora_command(*args)) == f"{file}, line 5, field `replicas.number`: is 0; it must be at least 1"


def test_a_missing_plan_is_refused(vlora_command: Vlora, tmp_path: Path) -> None:
    file = str(tmp_path / "none.yaml")
    assert refused(vlora_command("cluster", "up", file)) == f"{file}: cannot be read: No such file or directory"


def test_a_missing_model_or_adapter_is_refused(vlora_command: Vlora, tmp_path: Path) -> None:
    file = plan(tmp_path, model="./none")
    message = f"{file}: `model` is './none'; there is no such folder"
    assert refused(vlora_command("cluster", "up", file)) == message
    assert refused(vlora_command("serve", "--cluster", file)) == message
    file = plan(tmp_path, adapters="{signs: signs}")
    message = f"adapter 'signs' of the plan: {tmp_path / 'signs'} has no adapter_config.json"
    assert refused(vlora_command("cluster", "up", file)) == message
    assert not (tmp_path / "token").exists()


def test_a_head_on_an_unusable_address_is_refused(vlora_command: Vlora, tmp_path: Path) -> None:
    token(tmp_path)
    args = ("cluster", "up", plan(tmp_path), "--host", "192.0.2.1")  # for documentation only
    assert refused(vlora_command(*args)).startswith("the head cannot listen at 192.0.2.1:1: ")


def test_a_name_as_the_machine_s_address_is_refused(vlora_command: Vlora, tmp_path: Path) -> None:
    message = "--host is 'node'; write the IPv4 address of this machine for others"
    args = ("cluster", "join", "127.0.0.1:1", "--token-file", token(tmp_path), "--host", "node")
    assert refused(vlora_command(*args)) == message
    assert refused(vlora_command("cluster", "up", plan(tmp_path), "--host", "node")) == message
    message = "--host is 0.0.0.0, which others cannot reach; write the address of this machine for them"
    assert refused(vlora_command(*args[:-1], "0.0.0.0")) == message


def test_ports_of_ray_in_use_are_reported(vlora_command: Vlora, tmp_path: Path) -> None:
    token(tmp_path)
    first = next(first for first in range(61_000, 65_000, 100) if all(map(is_free, range(first, first + 81))))
    file = Path(plan(tmp_path))
    ports = f"ray_ports: {first}-{first + 79}\n"
    file.write_text(file.read_text().replace("127.0.0.1:1\n", f"127.0.0.1:{first + 80}\n{ports}"))
    with socket.create_server(("", first + 7)):
        message = f"port {first + 7} is in use; choose other `ray_ports` in the plan, or end its program"
        assert refused(vlora_command("cluster", "up", str(file))) == message


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("10.0.0.1", "the head's address is '10.0.0.1'; write HOST:PORT, with a port from 1 to 65535"),
        ("127.0.0.1:1", "no connection to a head of a cluster at 127.0.0.1:1: "),
    ],
)
def test_a_wrong_address_is_refused(address: str, message: str, vlora_command: Vlora, tmp_path: Path) -> None:
    args = ("cluster", "join", address, "--token-file", token(tmp_path))
    assert refused(vlora_command(*args)).startswith(message)


def test_a_token_file_that_others_may_read_is_refused(vlora_command: Vlora, tmp_path: Path) -> None:
    file = Path(token(tmp_path))
    file.chmod(0o644)
    args = ("cluster", "join", "127.0.0.1:1", "--token-file", str(file))
    assert refused(vlora_command(*args)).startswith(f"the token file {str(file)!r} has mode 0644, so others may use it")


@pytest.mark.parametrize(
    "option", [("--replicas", "2"), ("--model", "m"), ("--adapter", "a=b"), ("--train", "t"), ("--max-replicas", "3")]
)
def test_options_that_the_plan_replaces_are_refused(
    option: tuple[str, str], vlora_command: Vlora, tmp_path: Path
) -> None:
    file = plan(tmp_path)
    message = f"--cluster and {option[0]} are given; the plan {file} decides that, so omit the option"
    assert refused(vlora_command("serve", "--cluster", file, *option)) == message


@contextlib.contextmanager
def head(facts: Facts) -> Iterator[str]:
    """The address of a head's door, in a thread."""
    loop, opened, done = asyncio.new_event_loop(), queue.SimpleQueue[str](), asyncio.Event()

    async def main() -> None:
        async with a_head(facts) as (address, _):
            opened.put(str(address))
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        yield opened.get(timeout=10)
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


RAY = importlib.metadata.version("ray") if importlib.util.find_spec("ray") else ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ray": "2.99.0"}, rf"Ray {re.escape(RAY)} is installed here, 2\.99\.0 on the head; install the same: pip"),
        ({"python": "3.1"}, r"Python 3\.\d+ runs here, and 3\.1 on the head"),
        ({"model_digest": "other"}, r"the model \S+ has other files here than on the head; copy"),
        ({"model": "/none"}, r"the model is missing here: the model is '/none'; there is no such folder; copy"),
        (
            {"adapters": {"signs": Adapter("/none", "d")}},
            r"adapter 'signs' is missing here: /none has no adapter_config",
        ),
    ],
)
def test_a_machine_that_differs_from_the_head_is_refused(
    change: dict[str, Any], message: str, vlora_command: Vlora, tmp_path: Path
) -> None:
    facts = msgspec.structs.replace(facts_here(tmp_path), **{"ray": RAY, **change})
    file = tmp_path / "secret"
    file.write_bytes(TOKEN)
    file.chmod(0o600)
    with head(facts) as address:
        assert re.match(message, refused(vlora_command("cluster", "join", address, "--token-file", str(file))))


def test_a_machine_with_another_token_is_refused(vlora_command: Vlora, tmp_path: Path) -> None:
    with head(facts_here(tmp_path)) as address:
        code, out, error = vlora_command("cluster", "join", address, "--token-file", token(tmp_path))
    *logged, line = error.splitlines()  # the first ones are the head's
    assert (code, out) == (2, "") and all(" warning " in each for each in logged)
    assert line == f"error: the head at {address} has another token; copy its token file to this machine"


def test_a_front_end_with_another_plan_is_refused(vlora_command: Vlora, tmp_path: Path) -> None:
    facts = msgspec.structs.replace(facts_here(tmp_path), ray=RAY)
    (tmp_path / "token").write_bytes(TOKEN)
    (tmp_path / "token").chmod(0o600)
    with head(facts) as address:
        file = Path(plan(tmp_path, model="embedded"))
        file.write_text(file.read_text().replace("127.0.0.1:1\n", f"{address}\n"))
        result = vlora_command("serve", "--cluster", str(file), "--rpyc-port", "0")
        assert refused(result).startswith(f"the plan differs from that of the head at {address}; use the same file")


def test_gpus_of_the_plan_and_the_options_must_agree(vlora_command: Vlora, tmp_path: Path) -> None:
    token(tmp_path)
    file = Path(plan(tmp_path, model="embedded"))
    file.write_text(file.read_text().replace("number: 2", "number: 2, gpus: 1"))
    result = vlora_command("serve", "--cluster", str(file), "--rpyc-port", "0")
    assert refused(result).startswith("--device cpu with --tensor-parallel 1 needs 0 GPUs, and `replicas.gpus`")


def test_down_without_a_cluster_ends_nothing(vlora_command: Vlora) -> None:
    assert vlora_command("cluster", "down") == (0, "nothing of a cluster runs on this machine\n", "")
    code, out, _ = vlora_command("cluster", "down", "--json")
    assert (code, json.loads(out)) == (0, {"ended": []})


def test_gpus_that_the_process_may_use_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == 2
    for chosen, number in (("", 0), ("-1", 0), ("1", 1), ("GPU-a,GPU-b", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert visible_gpus(tmp_path) == number
