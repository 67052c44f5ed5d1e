"""`vlora serve` as a process: the ready line, Ctrl-C, and the errors of a failed start and of an engine that dies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi import FastAPI

from tests.server.scripted import ByteProcessor, ScriptedInterface, write_adapter
from vlora.client import Client
from vlora.config import ServerConfig
from vlora.errors import Aborted, BadConfig, EngineDead, OverCapacity, VLoraError
from vlora.server.frontend import FrontEnd
from vlora.server.http.server import HttpServer
from vlora.server.rpyc.server import RpycServer
from vlora.server.security.access import Access
from vlora.types import EngineStats

ROOT = Path(__file__).parents[2]


def launch(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.server.scripted_serve", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@contextmanager
def serving(*args: str) -> Iterator[tuple[subprocess.Popen[str], Client, str]]:
    process = launch(*args)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.match(r"ready: rpyc 127\.0\.0\.1:(\d+) \| ", line)
        assert match, process.communicate()
        with Client(port=int(match[1])) as client:
            yield process, client, line
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_ready_line_then_a_signal_drains_and_ends_with_code_0(tmp_path: Path, number: int) -> None:
    adapters = [f"{name}={write_adapter(tmp_path / name)}" for name in ("signs", "cam")]
    text = "under way " * 40
    with serving("scripted", "60", *adapters) as (process, client, line):
        assert line.endswith("| model scripted | 1 thread | adapters: cam, signs\n")
        (engine,) = children(process.pid)
        holding = client.stream("forever", max_tokens=90_000)  # until the server drains
        next(holding)
        stream = client.stream("say:" + text, max_tokens=2000)
        first = next(stream)
        process.send_signal(number)
        os.kill(engine, number)  # as a terminal signals the whole process group
        with pytest.raises(OverCapacity, match="shutting down"):
            while True:
                client.generate("say:late")
        assert first + "".join(stream) == text
        holding.close()
        assert process.wait(30) == 0
        assert process.stderr is not None and process.stderr.read() == ""
        assert not Path(f"/proc/{engine}").exists()


@pytest.mark.slow
def test_requests_that_do_not_end_are_aborted_at_the_drain_limit() -> None:
    with serving("scripted", "0.3") as (process, client, _):
        errors: list[VLoraError] = []

        def wait() -> None:
            try:
                client.generate("never")
            except VLoraError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        while not client.stats().num_running:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        thread.join(30)
        assert [type(error) for error in errors] == [Aborted]


@pytest.mark.slow
def test_a_second_signal_ends_the_server_at_once() -> None:
    with serving("scripted", "60") as (process, client, _):
        stream = client.stream("forever", max_tokens=90_000)
        next(stream)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


@pytest.mark.slow
def test_a_killed_engine_is_reported_and_restarted() -> None:
    with serving("scripted", "1") as (process, client, _):
        (engine,) = children(process.pid)
        stream = client.stream("forever", max_tokens=90_000)
        next(stream)
        died = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(EngineDead, match="the engine process was killed by SIGKILL"):
            list(stream)
        assert time.monotonic() - died < 20  # long before the request's own limit
        assert until_alive(client).num_restarts == 1
        assert client.generate("say:again").text == "again" and children(process.pid) != [engine]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert warnings(process.stderr.read()) == [
            "the engine process was killed by SIGKILL; it is being restarted",
            "the engine is ready again",
        ]


def warnings(written: str) -> list[str]:
    """The log messages, without time and source."""
    lines = [
        re.fullmatch(r"\d{4}-\d\d-\d\dT\S+ warning vlora\.server\.launch: (.*)", line) for line in written.splitlines()
    ]
    return [line[1] if line else written for line in lines]


def until_alive(client: Client) -> EngineStats:
    deadline = time.monotonic() + 200
    while True:
        try:
            return client.stats()
        except EngineDead:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.slow
def test_a_server_stopped_while_its_engine_restarts_ends_cleanly() -> None:
    with serving("scripted", "0") as (process, client, _):
        with pytest.raises(EngineDead, match="exit code 3"):
            client.generate("exit")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None
        logged = warnings(process.stderr.read())
        assert logged == ["the engine process ended with exit code 3; it is being restarted"]


@pytest.mark.slow
def test_a_server_stopped_with_a_dead_engine_reports_the_cause() -> None:
    with serving("scripted", "0") as (process, client, _):
        cause = ""
        while "gave up after" not in cause:
            try:
                client.generate("exit")
            except EngineDead as error:
                cause = str(error)
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 1
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[-1].startswith("error: the engine process ended with exit code 3")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["broken", "1"], "error: model 'broken' cannot be loaded: there is no such folder"),
        (
            ["scripted", "1", "signs=/nowhere"],
            "error: /nowhere: no adapter_config.json; an adapter is a folder in PEFT's",
        ),
    ],
)
def test_a_failed_start_is_reported_in_one_line(args: list[str], message: str) -> None:
    process = launch(*args)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2 and out == ""
    assert err.startswith(message) and err.count("\n") == 1


def test_ctrl_c_while_the_model_loads_ends_at_once() -> None:
    process = launch("slow", "1")
    deadline = time.monotonic() + 60
    while not children(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    (engine,) = children(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=5)
    assert (process.returncode, out, err) == (0, "", "")
    assert not Path(f"/proc/{engine}").exists()


def test_a_port_in_use_is_reported_before_the_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = (
            "import asyncio\n"
            "from vlora.server.launch import serve\n"
            "from vlora.config import EngineConfig, ServerConfig\n"
            f"config = ServerConfig(rpyc_port={taken.getsockname()[1]})\n"
            "asyncio.run(serve(EngineConfig(model='x'), config, {}, announce=print, engine_command=('false',)))"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "BadConfig: cannot listen on 127.0.0.1:" in done.stderr and "choose another --rpyc-port" in done.stderr


def test_of_two_servers_that_bind_one_port_the_later_one_fails() -> None:
    """Several servers can bind a port while none listens; listening happens after the model is loaded."""
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


def test_http_is_served_beside_rpyc() -> None:
    code = (
        "import asyncio\n"
        "from tests.server.scripted import ENGINE_COMMAND, ByteProcessor\n"
        "from vlora.server.launch import serve\n"
        "from vlora.config import EngineConfig, ServerConfig\n"
        "config = ServerConfig(rpyc_port=0, http_port=0)\n"
        "asyncio.run(serve(EngineConfig(model='scripted'), config, {}, announce=lambda line: print(line, flush=True),\n"
        "                  engine_command=ENGINE_COMMAND, load_processor=lambda model: ByteProcessor()))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    match = re.match(r"ready: rpyc \S+ \| http 127\.0\.0\.1:(\d+) \| model scripted", line)
    assert match, process.communicate()
    (engine,) = children(process.pid)
    with urllib.request.urlopen(f"http://127.0.0.1:{match[1]}/health", timeout=30) as response:
        assert json.load(response) == {"status": "ok", "model": "scripted"}
    os.kill(engine, signal.SIGKILL)
    statuses: list[int] = []
    while statuses[-1:] != [200] or 503 not in statuses:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{match[1]}/health", timeout=30) as response:
                statuses.append(response.status)
        except urllib.error.HTTPError as error:
            statuses.append(error.code)
            assert json.load(error)["error"]["code"] == "engine_dead"
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
