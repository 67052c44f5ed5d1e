"""`vlora cluster` and `vlora serve --cluster`: the replicas of a running server, and machines that cannot join."""

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
from tests.cluster.running import outputs_of, run
from tests.cluster.serving import serving
from tests.processes import PATIENCE_S
from tests.server.scripted import ENGINE_COMMAND
from vlora.cli.cluster import visible_gpus
from vlora.client import AsyncClient, Client
from vlora.cluster.nodes.join import Adapter, Facts
from vlora.cluster.on_ray.settings import is_free
from vlora.types import Request, SamplingParams
from vlora.types.replicas import ClusterStatus, ScalingStatus

FOREVER = Request(
    request_id="r", prompt_ids=tuple(b"forever"), sampling=SamplingParams(max_tokens=50_000, ignore_eos=True, seed=0)
)


@pytest.mark.slow
def test_a_replica_is_drained_and_resumed_by_commands(vlora_command: Vlora) -> None:
    async def main() -> None:
        async with serving("a", "b") as (found, _, port):

            async def command(*args: str) -> tuple[int, str, str]:
                return await asyncio.to_thread(vlora_command, "cluster", *args, "--server", f"127.0.0.1:{port}")

            counts = "0 requests waiting; since the start 0 replicas lost, 0 resubmitted, {} moved\n"
            idle = "a  serving  0 requests\nb  serving  0 requests\n"
            assert await command("status") == (0, idle + counts.format(0), "")
            answering = asyncio.create_task(outputs_of(found.cluster, FOREVER))
            while (name := found.router.where("r")) is None:
                await asyncio.sleep(0.01)
            other = "b" if name == "a" else "a"
            assert await command("drain", name) == (0, f"{name}  drained\n", "")
            assert found.where("r") == other
            code, out, _ = await command("status")
            assert code == 0 and out.endswith(counts.format(1))
            assert set(out.splitlines()[:2]) == {f"{name}  draining  0 requests", f"{other}  serving  1 request"}
            message = f"error: no other replica than {other!r} serves; resume another one before this one is drained\n"
            assert await command("drain", other) == (2, "", message)
            assert await command("resume", name, "--json") == (0, f'{{"name":"{name}","done":"resumed"}}\n', "")
            status = json.loads((await command("status", "--json"))[1])
            assert {each["name"]: each["state"] for each in status["replicas"]} == {"a": "serving", "b": "serving"}
            assert (status["num_moves"], status["num_deaths"]) == (1, 0)
            for change in ("drain", "resume"):
                message = "error: there is no replica 'c'; the replicas are a, b\n"
                assert await command(change, "c") == (2, "", message)
            async with AsyncClient(port=port) as client:  # the other replica has requests now: none, or this one
                assert await client.drain_replica(name, wait_s=5.0)
                await client.resume_replica(name)
                assert (await client.cluster()).num_waiting == 0
            await found.cluster.cancel("r")
            assert (await answering)[-1].finish_reason == "cancelled"

    run(main())


@pytest.mark.slow
def test_where_each_adapter_is_and_why_it_cannot_be_used(vlora_command: Vlora, tmp_path: Path) -> None:
    for name in ("good", "gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(f'{{"name": "{name}"}}')

    async def main() -> None:
        async with serving("a", "b") as (found, _, port):

            async def status(*args: str) -> str:
                at = ("--server", f"127.0.0.1:{port}")
                return await asyncio.to_thread(vlora_command.out, "cluster", "status", *args, *at)

            assert await status("--adapters") == ""
            good = (await found.cluster.load_adapter("good", str(tmp_path / "good"))).version
            gone = (await found.cluster.load_adapter("gone", str(tmp_path / "gone"))).version
            await found.cluster.pin_adapter("good", True)
            (tmp_path / "gone" / "adapter_config.json").unlink()
            await found.add("c", command=ENGINE_COMMAND)
            cause = f"{tmp_path / 'gone'}: no adapter_config.json; an adapter is a folder in PEFT's format"
            assert (await status("--adapters")).splitlines() == [
                *(f"gone  {replica}  host  {gone}" for replica in "ab"),
                f"gone  c  failed  {cause}",
                *(f"good  {replica}  device  {good}  pinned" for replica in "abc"),
            ]
            [failed] = [each for each in json.loads(await status("--adapters", "--json")) if each["cause"]]
            place = {"adapter": "gone", "replica": "c", "state": "failed", "version": "", "pinned": False}
            assert failed == {**place, "cause": cause}
            assert "c  serving  0 requests  1 adapter failed, see --adapters" in await status()
            async with AsyncClient(port=port) as client:
                assert len(await client.cluster_adapters()) == 6

    run(main())


@pytest.mark.parametrize("automatic", [False, True])
def test_a_number_that_another_call_replaces_is_not_set_again(
    automatic: bool, asking: Vlora, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []
    limits = {"number": 2, "least": 1, "most": 3, "decided_s": None}
    scaling = ScalingStatus(automatic=automatic, decision="", problem="", decisions={}, **limits)  # type: ignore[arg-type]
    none: dict[str, Any] = dict.fromkeys(("num_waiting", "num_deaths", "num_resubmitted", "num_moves"), 0)
    status = ClusterStatus(replicas=(), scaling=scaling, **none)

    def scale(_: Client, number: int, *, wait_s: float) -> bool:
        numbers.append(number)
        return len(numbers) > 5

    monkeypatch.setattr(Client, "scale", scale)
    monkeypatch.setattr(Client, "cluster", lambda _: status)
    now = "2 replicas, set automatically" if automatic else "2 replicas, set by an operator"
    message = f"the change to 3 replicas was replaced by another one: {now}"
    assert asking.refusal("cluster", "scale", "3") == message and numbers == [3]
    numbers.clear()
    if not automatic:
        assert asking.out("cluster", "scale", "2") == "2 replicas\n" and numbers == [2] * 6


needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
RAY = importlib.metadata.version("ray") if importlib.util.find_spec("ray") else ""
PLAN = "head: {head}\ntoken_file: token\nmodel: {model}\nadapters: {adapters}\nreplicas: {{number: {number}}}\n"
UP, SERVE, JOIN = "cluster up PLAN", "serve --rpyc-port 0 --cluster PLAN", "cluster join 127.0.0.1:1 --token-file TOKEN"
NO_MODEL = "PLAN: `model` is './none'; there is no such folder"
NO_GPUS = "--device cpu with --tensor-parallel 1 needs 0 GPUs, and `replicas.gpus`"
NO_NAME = "--host is 'node'; write the IPv4 address of this machine for others"
NO_REPLICAS = "PLAN, line 5, field `replicas.number`: is 0; it must be at least 1"

# A command, fields of its plan, and the begin of the error.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((command, {"number": 0}, NO_REPLICAS) for command in (UP, SERVE)),
    *((command, {"model": "./none"}, NO_MODEL) for command in (UP, SERVE)),
    (UP, {"adapters": "{signs: signs}"}, "adapter 'signs' of the plan: FOLDER/signs has no adapter_config.json"),
    ("cluster up FOLDER/none.yaml", {}, "FOLDER/none.yaml: cannot be read: No such file or directory"),
    (f"{UP} --host 192.0.2.1", {}, "the head cannot listen at 192.0.2.1:1: "),  # for documentation only
    (f"{UP} --host node", {}, NO_NAME),
    (f"{JOIN} --host node", {}, NO_NAME),
    (
        f"{JOIN} --host 0.0.0.0",
        {},
        "--host is 0.0.0.0, which others cannot reach; write the address of this machine",
    ),
    (JOIN, {}, "no connection to a head at 127.0.0.1:1: "),
    (JOIN.replace(":1", ""), {}, "the head's address is '127.0.0.1'; write HOST:PORT, with a port from 1 to 65535"),
    (JOIN.replace("TOKEN", "OPEN"), {}, "the token file 'FOLDER/open' has mode 0644, so others may use it"),
    (SERVE, {"model": "embedded", "number": "2, gpus: 1"}, NO_GPUS),
    *(
        (f"{SERVE} {option}", {}, f"--cluster and {option.split()[0]} are given; the plan PLAN decides that, so omit")
        for option in ("--replicas 2", "--model m", "--adapter a=b", "--train t", "--max-replicas 3")
    ),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For plans and tokens. Runs of other tests are not seen, and no folder of a run is left."""
    made: list[str] = []

    def mkdtemp(**settings: Any) -> str:
        made.append(real(**settings))
        return made[-1]

    real = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    for name, mode in (("token", 0o600), ("open", 0o644)):
        (tmp_path / name).write_text("t" * 32)
        (tmp_path / name).chmod(mode)
    yield tmp_path
    assert not any(map(os.path.exists, made))


def plan(folder: Path, **fields: Any) -> Path:
    fields = {"head": "127.0.0.1:1", "model": ".", "adapters": "{}", "number": 2} | fields
    (file := folder / "cluster.yaml").write_text(PLAN.format(**fields))
    return file


@needs_ray
@pytest.mark.parametrize(("command", "fields", "message"), REFUSED)
def test_wrong_input_is_one_line(
    vlora_command: Vlora, folder: Path, command: str, fields: dict[str, Any], message: str
) -> None:
    names = {"PLAN": plan(folder, **fields), "TOKEN": folder / "token", "OPEN": folder / "open", "FOLDER": folder}

    def filled(text: str) -> str:
        for name, path in names.items():
            text = text.replace(name, str(path))
        return text

    assert vlora_command.refusal(*filled(command).split()).startswith(filled(message))


@needs_ray
def test_ports_of_ray_in_use_are_reported(vlora_command: Vlora, folder: Path) -> None:
    first = next(first for first in range(61_000, 65_000, 100) if all(map(is_free, range(first, first + 81))))
    file = plan(folder, head=f"127.0.0.1:{first + 80}\nray_ports: {first}-{first + 79}")
    with socket.create_server(("", first + 7)):
        message = f"port {first + 7} is in use; choose other `ray_ports` in the plan, or end its program"
        assert vlora_command.refusal("cluster", "up", file) == message


@contextlib.contextmanager
def head(facts: Facts) -> Iterator[str]:
    """The address of a head, in a thread."""
    loop, opened, done = asyncio.new_event_loop(), queue.SimpleQueue[str](), asyncio.Event()

    async def main() -> None:
        async with a_head(facts) as (address, _):
            opened.put(str(address))
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        yield opened.get(timeout=PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


@needs_ray
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ray": "2.99.0"}, rf"Ray {re.escape(RAY)} is installed here, 2\.99\.0 on the head; install the same: pip"),
        ({"python": "3.1"}, r"Python 3\.\d+ runs here, and 3\.1 on the head"),
        ({"model_digest": "other"}, r"the model \S+ has other files here than on the head; copy"),
        ({"model": "/none"}, r"the model is missing here: the model is '/none'; there is no such folder; copy"),
        ({"adapters": {"signs": Adapter("/none", "d")}}, r"adapter 'signs' is missing here: /none has no adapter_conf"),
    ],
)
def test_a_machine_that_differs_from_the_head_is_refused(
    change: dict[str, Any], message: str, vlora_command: Vlora, folder: Path
) -> None:
    facts = msgspec.structs.replace(facts_here(folder), **{"ray": RAY, **change})
    (folder / "token").write_bytes(TOKEN)
    with head(facts) as address:
        assert re.match(message, vlora_command.refusal("cluster", "join", address, "--token-file", folder / "token"))


@needs_ray
def test_a_machine_with_another_token_or_plan_is_refused(vlora_command: Vlora, folder: Path) -> None:
    with head(msgspec.structs.replace(facts_here(folder), ray=RAY)) as address:
        code, out, error = vlora_command("cluster", "join", address, "--token-file", folder / "token")
        *logged, line = error.splitlines()  # the first ones are the head's
        assert (code, out) == (2, "") and all(" warning " in each for each in logged)
        assert line == f"error: the head at {address} has another token; copy its token file to this machine"
        (folder / "token").write_bytes(TOKEN)
        file = plan(folder, model="embedded", head=address)
        message = vlora_command.refusal("serve", "--cluster", file, "--rpyc-port", "0")
        assert message.startswith(f"the plan differs from that of the head at {address}; use the same file")


@needs_ray
def test_down_without_a_cluster_ends_nothing(vlora_command: Vlora, folder: Path) -> None:
    assert vlora_command.out("cluster", "down") == "nothing of a cluster runs on this machine\n"
    assert vlora_command.json("cluster", "down") == [{"ended": []}]


def test_gpus_that_the_process_may_use_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == 2
    for chosen, number in (("", 0), ("-1", 0), ("1", 1), ("GPU-a,GPU-b", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert visible_gpus(tmp_path) == number
