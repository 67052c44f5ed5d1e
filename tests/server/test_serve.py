"""`vlora serve` as a process: the ready line, signals, tokens that change, and failed starts and engines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from fastapi import FastAPI

from tests.processes import PATIENCE_S, until
from tests.server.scripted import ByteProcessor, ScriptedInterface, write_adapter
from tests.server.served import call, children, until_alive
from tests.server.test_security import ADMIN, USER
from vlora.client import Client
from vlora.config import EngineConfig, ServerConfig
from vlora.errors import Aborted, BadConfig, EngineDead, OverCapacity, Unauthorized
from vlora.server.frontend import FrontEnd
from vlora.server.http.server import HttpServer
from vlora.server.launch import serve
from vlora.server.rpyc.server import RpycServer
from vlora.server.security.access import Access

ROOT = Path(__file__).parents[2]


def launch(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.server.scripted_serve", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


@contextmanager
def serving(*args: str, token: str | None = None) -> Iterator[tuple[subprocess.Popen[str], Client, str]]:
    process = launch(*args)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.match(r"ready: rpyc 127\.0\.0\.1:(\d+) \| http 127\.0\.0\.1:\d+ \| ", line)
        assert match, process.communicate()
        with Client(port=int(match[1]), token=token) as client:
            yield process, client, line
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], *, code: int = 0) -> list[str]:
    """Wait for the end. Returns the log's messages, without time and source."""
    assert process.wait(PATIENCE_S) == code and process.stderr is not None
    form = r"\d{4}-\d\d-\d\dT\S+ warning vlora\.server\.launch: (.*)"
    return [found[1] if (found := re.fullmatch(form, line)) else line for line in process.stderr.read().splitlines()]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive), signal.SIGTERM])
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
        assert ended(process) == []
        assert not Path(f"/proc/{engine}").exists()


@pytest.mark.slow
def test_requests_that_do_not_end_are_aborted_at_the_drain_limit() -> None:
    with serving("scripted", "0.3") as (process, client, _), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.generate, "never")
        until(lambda: bool(client.stats().num_running))
        process.send_signal(signal.SIGTERM)
        ended(process)
        assert isinstance(waiting.exception(), Aborted)


@pytest.mark.exhaustive
def test_a_second_signal_ends_the_server_at_once() -> None:
    with serving("scripted", "60") as (process, client, _):
        stream = client.stream("forever", max_tokens=90_000)
        next(stream)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        ended(process)


@pytest.mark.slow
def test_a_killed_engine_is_reported_over_both_wires_and_restarted() -> None:
    with serving("scripted", "1") as (process, client, line):
        port = int(line.split("http 127.0.0.1:")[1].split()[0])
        assert json.loads(call(port, "GET", "/health")[1]) == {"status": "ok", "model": "scripted"}
        (engine,) = children(process.pid)
        stream = client.stream("forever", max_tokens=90_000)
        next(stream)
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(EngineDead, match="the engine process was killed by SIGKILL"):
            list(stream)
        status, body = call(port, "GET", "/health")
        assert status == 200 or json.loads(body)["error"]["code"] == "engine_dead"
        assert until_alive(client).num_restarts == 1
        assert client.generate("say:again").text == "again" and children(process.pid) != [engine]
        process.send_signal(signal.SIGTERM)
        cause = "the engine process was killed by SIGKILL; it is being restarted"
        assert ended(process) == [cause, "the engine is ready again"]


@pytest.mark.slow
def test_a_server_stopped_while_its_engine_restarts_ends_cleanly() -> None:
    with serving("scripted", "0") as (process, client, _):
        with pytest.raises(EngineDead, match="exit code 3"):
            client.generate("exit")
        process.send_signal(signal.SIGTERM)
        assert ended(process) == ["the engine process ended with exit code 3; it is being restarted"]


@pytest.mark.exhaustive  # several starts of engines, with pauses
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
        assert ended(process, code=1)[-1].startswith("error: the engine process ended with exit code 3")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("broken", "1"), "error: model 'broken' cannot be loaded: there is no such folder"),
        (
            ("scripted", "1", "signs=/nowhere"),
            "error: /nowhere: no adapter_config.json; an adapter is a folder",
        ),
    ],
)
def test_a_failed_start_is_reported_in_one_line(args: tuple[str, ...], message: str) -> None:
    process = launch(*args)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2 and out == ""
    assert err.startswith(message) and err.count("\n") == 1


def test_ctrl_c_while_the_model_loads_ends_at_once() -> None:
    process = launch("slow", "1")
    until(lambda: bool(children(process.pid)))
    (engine,) = children(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)  # the engine would load for that long
    assert (process.returncode, out, err) == (0, "", "") and not Path(f"/proc/{engine}").exists()


def test_tokens_are_read_again_on_sighup(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text(f"old: {{token: {USER}}}")
    file.chmod(0o600)
    with serving("scripted", "1", str(file), token=USER) as (process, client, line):
        assert process.stdout is not None and process.stderr is not None
        log, out = process.stderr, process.stdout
        rows: list[tuple[str, IO[str], str]] = [
            ("new: {token: [", log, "tokens not reloaded: the token file"),
            (f"a: {{token: {USER}}}\nb: {{token: {USER}}}", log, "tokens not reloaded: token 'a' has the same secret"),
            (f"new: {{token: {ADMIN}, admin: true}}", out, "tokens: new\n"),
        ]
        for text, stream, shown in rows:
            client.stats()
            file.write_text(text)
            process.send_signal(signal.SIGHUP)
            assert shown in stream.readline()
        with pytest.raises(Unauthorized):  # in the middle of its connection
            client.stats()
        with Client(port=int(line.split("127.0.0.1:")[1].split()[0]), token=ADMIN) as renewed:
            renewed.stats()


# -- addresses in use, in process -------------------------------------------------------------------------------------


def test_a_port_in_use_is_reported_before_the_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig(rpyc_port=taken.getsockname()[1])
        starting = serve(EngineConfig(model="x"), config, {}, announce=print, engine_command=("false",))
        with pytest.raises(BadConfig, match=r"cannot listen on 127.0.0.1:\d+: .*choose another --rpyc-port"):
            asyncio.run(starting)


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
