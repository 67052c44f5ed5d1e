"""`vlora serve` as a process, with scripted engines: its lines, signals, changed tokens, failed engines, replicas."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi import FastAPI

from tests.processes import PATIENCE_S, until
from tests.server.api import Api
from tests.server.running import png
from tests.server.scripted import ENGINE_COMMAND, ByteProcessor, ScriptedInterface, write_adapter
from tests.server.served import ROOT, Caller, Served, call, children, last_code, launch, serving, until_alive
from tests.server.test_batches import create, get, line, results, when
from tests.server.test_security import ADMIN, USER
from vlora.client import Client
from vlora.config import EngineConfig, ServerConfig
from vlora.engine.ipc import supervisor
from vlora.errors import BadConfig, BadRequest, EngineDead, OverCapacity, Unauthorized
from vlora.server.frontend import FrontEnd
from vlora.server.http.server import HttpServer
from vlora.server.launch import serve
from vlora.server.rpyc.server import RpycServer
from vlora.server.security.access import Access

SCRIPTED = ("tests.server.scripted_vlora", "serve", "--rpyc-port", "0", "--http-port", "0", "--threads", "1")


def scripted(*arguments: str, model: str = "scripted", **settings: str) -> AbstractContextManager[Served]:
    return serving(*SCRIPTED, "--model", model, *arguments, **settings)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive), signal.SIGTERM])
def test_ready_line_then_a_signal_drains_and_ends_with_code_0(tmp_path: Path, number: int) -> None:
    adapters = [f"--adapter={name}={write_adapter(tmp_path / name)}" for name in ("signs", "cam")]
    text = "under way " * 40
    with scripted("--drain-s", "60", *adapters) as on:
        assert on.ready.endswith("| model scripted | 1 thread | adapters: cam, signs\n")
        (engine,) = children(on.process.pid)
        holding = on.client.stream("forever", max_tokens=90_000)  # until the server drains
        next(holding)
        stream = on.client.stream("say:" + text, max_tokens=2000)
        first = next(stream)
        on.process.send_signal(number)
        os.kill(engine, number)  # as a terminal signals the whole process group
        with pytest.raises(OverCapacity, match="shutting down"):
            while True:
                on.client.generate("say:late")
        assert first + "".join(stream) == text
        holding.close()
        on.end()
        assert on.log == "" and not Path(f"/proc/{engine}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("drain_s", ["0.3", pytest.param("60", marks=pytest.mark.exhaustive)])
def test_a_drain_ends_at_its_limit_and_at_a_second_signal(drain_s: str) -> None:
    with scripted("--drain-s", drain_s) as on:
        waiting = Caller(lambda: on.client.generate("never"))
        until(lambda: bool(on.client.stats().num_running))
        on.process.send_signal(signal.SIGTERM)
        if drain_s == "60":
            time.sleep(0.2)
            assert on.process.poll() is None
            on.process.send_signal(signal.SIGINT)
        on.end()
        waiting.join(PATIENCE_S)
        assert waiting.result == "aborted"


@pytest.mark.slow
def test_a_killed_engine_is_reported_over_both_wires_and_replaced(tmp_path: Path) -> None:
    """Its adapters and pins are restored, and frames that wait for the replacement are answered."""
    folder = write_adapter(tmp_path / "cam", {"night": 1, "never": 1})
    with scripted("--adapter", f"cam={folder}") as on:
        client, port = on.client, on.http_port
        assert call(port, "POST", "/v1/adapters", {"name": "more", "path": folder})[0] == 201
        assert call(port, "PUT", "/v1/adapters/more/pin")[0] == 200
        (engine,) = children(on.process.pid)

        def chat(**fields: Any) -> str:
            body = {"model": "scripted", "messages": [{"role": "user", "content": "never"}], **fields}
            return last_code(call(port, "POST", "/v1/chat/completions", body))

        with client.open_stream(adapter="cam", head="night", drop="none") as frames:
            callers = [
                *(Caller(functools.partial(chat, **fields)) for fields in ({"stream": True}, {"n": 3}, {})),
                Caller(lambda: client.generate("never")),
                Caller(lambda: list(client.stream("never"))),
                Caller(lambda: client.ask_head([png()], "cam", "never")),
            ]
            until(lambda: client.stats().num_running == 8)
            os.kill(engine, signal.SIGSTOP)  # so that the frame waits on any machine
            assert frames.send(png()) == 0
            os.kill(engine, signal.SIGKILL)
            for caller in callers:
                caller.join(PATIENCE_S)
            assert [caller.result for caller in callers] == ["engine_dead"] * 6
            lost = next(frames)
            assert lost.error is not None and lost.error.code == "engine_dead"
            assert frames.send(png()) == 1  # accepted without an engine
            assert until_alive(client).num_restarts == 1
            assert next(frames).answer is not None
        assert json.loads(call(port, "GET", "/health")[1]) == {"status": "ok", "model": "scripted"}
        assert {each.name: each.pinned for each in client.adapters()} == {"cam": False, "more": True}
        assert client.generate("say:again", adapter="more").text == "again" and children(on.process.pid) != [engine]
        on.process.send_signal(signal.SIGTERM)
        on.end()
    cause = "the engine process was killed by SIGKILL; it is being restarted"
    assert on.messages() == [cause, "the engine is ready again"]


@pytest.mark.slow
def test_a_server_may_be_stopped_while_its_engine_is_dead() -> None:
    with scripted("--drain-s", "0") as on:
        with pytest.raises(EngineDead, match="exit code 3"):
            on.client.generate("exit")
        on.process.send_signal(signal.SIGTERM)
        on.end()
    assert on.messages() == ["the engine process ended with exit code 3; it is being restarted"]


@pytest.mark.slow
def test_a_server_whose_engine_stays_dead_ends_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    model = f"gone after {tmp_path / 'started'}"

    def stop() -> None:
        until(lambda: "gave up after" in caplog.text)
        os.kill(os.getpid(), signal.SIGTERM)

    def kill_engine(line: str) -> None:
        (engine,) = (each for each in psutil.Process().children() if ENGINE_COMMAND[-1] in each.cmdline())
        engine.kill()
        threading.Thread(target=stop).start()

    parts: dict[str, Any] = {"engine_command": ENGINE_COMMAND, "load_processor": lambda model: ByteProcessor()}
    with pytest.raises(EngineDead, match=r"exit code 3.*gave up after"):
        asyncio.run(serve(EngineConfig(model=model), ServerConfig(rpyc_port=0), {}, announce=kill_engine, **parts))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "broken"), "error: model 'broken' cannot be loaded: there is no such folder"),
        (("--adapter", "signs=/nowhere"), "error: /nowhere: no adapter_config.json; an adapter is a folder"),
    ],
)
def test_a_failed_start_is_reported_in_one_line(args: tuple[str, ...], message: str) -> None:
    out, err = (process := launch(*SCRIPTED, *args)).communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (2, "") and err.startswith(message) and err.count("\n") == 1


def test_ctrl_c_while_the_model_loads_ends_at_once() -> None:
    process = launch(*SCRIPTED, "--model", "slow")
    until(lambda: bool(children(process.pid)))
    (engine,) = children(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)  # the engine would load for that long
    assert (process.returncode, out, err) == (0, "", "") and not Path(f"/proc/{engine}").exists()


def test_tokens_are_read_again_on_sighup(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text(f"old: {{token: {USER}}}")
    file.chmod(0o600)
    with scripted("--token-file", str(file), token=USER) as on:
        log, out = on.process.stderr, on.process.stdout
        for text, stream, shown in (
            ("new: {token: [", log, "tokens not reloaded: the token file"),
            (f"a: {{token: {USER}}}\nb: {{token: {USER}}}", log, "tokens not reloaded: token 'a' has the same secret"),
            (f"new: {{token: {ADMIN}, admin: true}}", out, "tokens: new\n"),
        ):
            on.client.stats()
            file.write_text(text)
            on.process.send_signal(signal.SIGHUP)
            assert stream is not None and shown in stream.readline()
        with pytest.raises(Unauthorized):  # in the middle of its connection
            on.client.stats()
        with Client(port=int(on.address.partition(":")[2]), token=ADMIN) as renewed:
            renewed.stats()


def test_a_port_in_use_is_reported_before_the_model_loads_and_after_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig(rpyc_port=taken.getsockname()[1])
        starting = serve(EngineConfig(model="x"), config, {}, announce=print, engine_command=("false",))
        with pytest.raises(BadConfig, match=r"cannot listen on 127.0.0.1:\d+: .*choose another --rpyc-port"):
            asyncio.run(starting)
    # Several servers can bind a port while none listens; listening happens after the model is loaded.
    first = RpycServer("127.0.0.1", 0, 1000)
    second = RpycServer("127.0.0.1", first.port, 1000)
    front_end = FrontEnd(ScriptedInterface(), ByteProcessor(), ServerConfig())  # type: ignore[arg-type]
    service = (front_end, asyncio.new_event_loop(), "scripted", Access(()))
    first.start_in_thread(*service)
    with pytest.raises(BadConfig, match=rf"cannot listen on 127.0.0.1:{first.port}: .* choose another --rpyc-port"):
        second.start_in_thread(*service)
    first.close()
    second.close()

    async def web() -> None:
        one = HttpServer(ServerConfig(http_port=0))
        port = int(one.address.rpartition(":")[2])
        two = HttpServer(ServerConfig(http_port=port))
        one.start(FastAPI())
        with pytest.raises(BadConfig, match=rf"cannot listen on 127.0.0.1:{port}: .* choose another --http-port"):
            two.start(FastAPI())
        await asyncio.gather(one.close(), two.close())

    asyncio.run(web())


on_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files. Paths of Ray's sockets must be short."""
    found = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    yield found
    for process in left(found):
        process.kill()
    shutil.rmtree(found)


def left(folder: Path) -> list[psutil.Process]:
    """The processes of a server with this folder for temporary files, Ray, replicas and engines included."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


def engines(folder: Path) -> list[psutil.Process]:
    found = []
    for process in left(folder):
        with contextlib.suppress(psutil.Error):
            found += [process] * ("tests.server.scripted_process" in process.cmdline())
    return found


def replicas(folder: Path, *args: str) -> AbstractContextManager[Served]:
    return scripted("--replicas", "2", *args, TMPDIR=str(folder))


def vlora(*args: str) -> str:
    command = [sys.executable, "-m", "vlora.cli", *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@on_ray
@pytest.mark.slow
def test_replicas_serve_both_apis_and_end_with_the_server(folder: Path) -> None:
    journal = str(folder / "routing.jsonl")
    write_adapter(folder / "shelf" / "a")
    settings = ("--replicas", "2:3", "--routing-rule", "least_loaded", "--routing-journal", journal)
    with replicas(folder, *settings, "--adapter-source", str(folder / "shelf")) as on:
        ray, *lines, _ = on.lines
        assert ray == "starting Ray\n"
        assert [line.partition(" serves ")[2] for line in lines] == ["(1 of 2)\n", "(2 of 2)\n"]
        cluster, at = ("cluster", "scale"), ("--server", on.address)
        with ThreadPoolExecutor(8) as threads:
            answers = threads.map(lambda _: on.client.generate("say:light").text, range(8))
            assert list(answers) == ["light"] * 8
        assert on.client.stats().num_finished == 8
        on.client.load_adapter("sent", folder / "shelf" / "a", upload=True)
        assert [on.client.generate("say:x", adapter=name).text for name in ("a", "sent")] == ["x", "x"]
        places = [(each.adapter, each.state) for each in on.client.cluster_adapters()]
        assert places == [("a", "host")] * 2 + [("sent", "host")] * 2
        assert vlora(*cluster, "3", *at) == "3 replicas\n"
        assert [each.state for each in on.client.cluster().replicas] == ["serving"] * 3
        assert vlora(*cluster, "auto", *at) == "automatic\n"
        *_, scaling, change = vlora("cluster", "status", *at).splitlines()
        assert scaling == "scaled automatically: 3 replicas, 2 to 3"
        assert re.fullmatch(r"last change \d+ s ago: 3 instead of 2: set by an operator", change)
        assert json.loads(call(on.http_port, "PUT", "/v1/cluster/scale?wait_s=20", {"replicas": 2})[1])["done"]
        with pytest.raises(BadRequest, match=r"^the number of replicas is 4; it must be between 1 and 3"):
            on.client.scale(4)
        metrics = call(on.http_port, "GET", "/metrics")[1]
        listed = json.loads(call(on.http_port, "GET", "/console/state")[1])["replicas"]
        shown = [(each["name"], each["state"], each["num_requests"]) for each in listed]
        assert shown == [(f"replica-{number}", "serving", 0) for number in range(2)]
        for row in (
            *('replicas{state="serving"} 2', 'replicas{state="down"} 0', "replicas_wanted 2", "cluster_waiting 0"),
            *(f'{name}{{replica="replica-1"}} 0' for name in ("replica_requests", "replica_failed_adapters")),
            *('shipped_bytes_total{replica="replica-1"} 0', "resubmitted_total 0", "replica_deaths_total 0"),
            *("moves_total 0", "scaling_automatic 0", 'scaling_decisions_total{reason="operator"} 2'),
            'scaling_decisions_total{reason="waiting"} 0',
        ):
            assert f"\nvlora_{row}.0\n" in metrics
        until(lambda: len(engines(folder)) == 2)  # the driver ends the released one
        assert len(left(folder)) > 8
        on.process.send_signal(signal.SIGINT)
        on.end()
    assert on.log == "" and not left(folder) and not list(folder.glob("vlora-ray-*"))
    replayed = vlora("simulate", "--replay", journal)
    assert re.fullmatch(r"\d+ calls of the router, each with the recorded result\n", replayed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("replicas", ["1", pytest.param("2", marks=on_ray)])
def test_every_request_of_a_batch_has_one_answer_after_kills_of_engine_and_server(folder: Path, replicas: str) -> None:
    ports = ("--rpyc-port=0", "--http-port=0", "--threads=1", "--model=scripted", f"--replicas={replicas}")
    command = ("tests.server.scripted_vlora", "serve", *ports, f"--file-folder={folder / 'files'}")
    texts = {f"r{number}": "x" * (40 + number % 40) for number in range(200)}

    def api_of(on: Served) -> Api:
        return Api(0, None, None, None, on.http_port)  # type: ignore[arg-type]

    with serving(*command, TMPDIR=str(folder)) as on:
        batch = create(api_of(on), [line(name, f"say:{text}", model="scripted") for name, text in texts.items()])
        until(lambda: get(api_of(on), batch)["request_counts"]["completed"] >= 20)
        engines(folder)[0].kill()
        until(lambda: get(api_of(on), batch)["request_counts"]["completed"] >= 80)
        on.process.kill()
    until(lambda: not left(folder))
    with serving(*command, TMPDIR=str(folder)) as on:
        batch = when(api_of(on), batch, "completed")
        assert results(api_of(on), batch) == texts
        assert batch["request_counts"] == {"total": 200, "completed": 200, "failed": 0}


@on_ray
@pytest.mark.exhaustive
def test_a_killed_server_leaves_nothing_running_but_its_adapters_state(folder: Path) -> None:
    for name in ("given", "loaded", "unloaded"):
        write_adapter(folder / name)
    given = [f"--adapter={name}={folder / name}" for name in ("given", "unloaded")]
    settings = (*given, "--adapter-state", str(folder / "state"))
    with replicas(folder, "--replicas", "1:2", *settings) as on:
        assert on.ready.endswith("| adapters: given, unloaded\n")
        on.client.load_adapter("loaded", folder / "loaded")
        on.client.pin_adapter("loaded", True)
        on.client.unload_adapter("unloaded")
    until(lambda: not left(folder))
    assert not list(folder.glob("vlora-ray-*"))
    # The next server has them again, and starts although one has lost its files.
    (folder / "given" / "adapter_config.json").unlink()
    with replicas(folder, *settings) as on:
        assert on.lines[0] == "adapters unloaded later, and not served: unloaded\n"
        assert on.ready.endswith("| adapters: given, loaded\n")
        places = [(each.adapter, each.state, each.pinned) for each in on.client.cluster_adapters()]
        assert places == [("given", "failed", False)] * 2 + [("loaded", "device", True)] * 2
        # Another server is refused meanwhile.
        other = launch(*SCRIPTED, *settings)
        _, err = other.communicate(timeout=PATIENCE_S)
        assert other.returncode == 2
        assert err == f"error: another server uses {folder / 'state'}; give each server a folder of its own\n"
