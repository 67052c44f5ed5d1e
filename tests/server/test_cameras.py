"""Cameras of a server: over scripted processes, and real ones over RTSP and MJPEG of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.server
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mcp
import pytest

from tests.apps.test_rtsp import camera, has_gstreamer
from tests.processes import free_port, is_alive
from tests.server.running import png
from tests.server.scripted import write_adapter
from tests.server.served import Served, call, serving
from tests.server.test_serve import SCRIPTED
from vlora.config import ServerConfig, Token
from vlora.errors import (
    BadConfig,
    BadPlan,
    BadRequest,
    DeadlineMissed,
    Forbidden,
    OverCapacity,
    UnknownCamera,
    VLoraError,
)
from vlora.operations import AddCamera, ChangeCamera, GetCameras, GetFrame, RemoveCamera
from vlora.server.streams import cameras as module
from vlora.server.streams.cameras import FILE, Cameras, check_source, shown_source
from vlora.types.camera import CameraStatus

SECRET = "pass%2Fword-9"
CONFIG = ServerConfig(
    camera_hosts=("10.1.0.0/16", "camera-7.example", "*.yard.example", "::1"),
    camera_paths=("/srv/videos",),
    max_cameras=2,
)
SCRIPT = """
import json, os, sys, time
camera = json.loads(sys.stdin.readline())
kind = camera["source"].rpartition("/")[2]
def say(**fields):
    print(json.dumps(fields), flush=True)
if kind == "refused" or "tasks" not in camera:
    say(refused={"code": "bad_plan", "message": "field `tasks`: is missing"})
    sys.exit()
say(tasks=["cam/night"])
if not sys.stdin.readline():
    sys.exit()
error = f"{os.environ.get('VLORA_TOKEN')} {os.getpid()}"
say(health={"connected": True, "fps": camera.get("rate", 25), "age_s": 0.5, "num_frames": 3, "error": error})
say(event={"event": "seen", "time": "2026-11-30T00:00:00Z", "label": "night", "confidence": 1.0})
if kind == "crash":
    sys.exit(3)
if kind == "garbage":
    print("no report", flush=True)
if kind == "end":
    say(ended="")
if kind == "hang":
    time.sleep(1000)
sys.stdin.read()
"""


def described(name: str = "gate", kind: str = "main", **fields: Any) -> dict[str, Any]:
    source = f"rtsp://user:{SECRET}@10.1.0.7/{kind}"
    return {"name": name, "source": source, "tasks": [{"head": "cam/night"}], **fields}


def opened(folder: Path | None, config: ServerConfig = CONFIG, script: str = SCRIPT) -> Cameras:
    return Cameras(config, folder, {"VLORA_TOKEN": "token"}, (sys.executable, "-SEc", script))


async def add(cameras: Cameras, description: dict[str, Any]) -> CameraStatus:
    return await cameras.perform(AddCamera(description), None)


async def change(cameras: Cameras, **changes: Any) -> CameraStatus:
    return await cameras.perform(ChangeCamera("gate", changes), None)


async def reached(cameras: Cameras, holds: Callable[[CameraStatus], bool], name: str = "gate") -> CameraStatus:
    async with asyncio.timeout(30):
        while True:
            (found,) = (each for each in cameras.statuses() if each.name == name)
            if holds(found):
                return found
            await asyncio.sleep(0.01)


def is_running(status: CameraStatus) -> bool:
    return status.state == "running" and status.num_events > 0


def pid_of(status: CameraStatus) -> int:
    token, pid = (status.health.error or "").split()
    assert token == "token"
    return int(pid)


async def test_a_camera_is_added_changed_paused_and_removed_and_kept(tmp_path: Path) -> None:
    cameras = opened(tmp_path)
    assert (await add(cameras, described())).state == "connecting"
    first = await reached(cameras, is_running)
    assert (first.health.fps, first.source, first.tasks) == (25, "rtsp://10.1.0.7/...", ("cam/night",))
    assert first.events[0].event == "seen" and first.health.age_s is not None and first.health.age_s >= 0.5
    await change(cameras, rate=5, max_latency_s=None)
    second = await reached(cameras, is_running)
    assert second.health.fps == 5 and not is_alive(pid_of(first))
    with pytest.raises(BadPlan, match="tasks"):
        await change(cameras, tasks=None)
    assert is_alive(pid_of(second)), "what is refused changes nothing"
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    await cameras.close()
    assert not is_alive(pid_of(second))
    cameras = opened(tmp_path)
    assert (await reached(cameras, is_running)).health.fps == 5
    assert (await change(cameras, paused=True)).state == (await change(cameras, paused=True)).state == "paused"
    await change(cameras, rate=None)
    await cameras.close()
    cameras = opened(tmp_path)
    assert cameras.statuses()[0].state == "paused"
    await change(cameras, paused=None)
    third = await reached(cameras, is_running)
    assert third.health.fps == 25
    await cameras.perform(RemoveCamera("gate"), None)
    assert not is_alive(pid_of(third)) and cameras.statuses() == () and (tmp_path / FILE).read_text() == "[]"


@pytest.mark.parametrize(
    ("description", "error", "message"),
    [
        (described("GATE"), BadRequest, "there is a camera 'GATE' already"),
        (described("more", "refused"), BadPlan, "field `tasks`: is missing"),
        (described("more", source="rtsp://10.2.0.7/main"), Forbidden, "cameras at '10.2.0.7' are not allowed"),
        (described("more", note="x" * 70_000), BadRequest, "at most 65536 are accepted"),
    ],
)
async def test_what_cannot_be_added(description: dict[str, Any], error: type[VLoraError], message: str) -> None:
    cameras = opened(None)
    await add(cameras, described())
    with pytest.raises(error, match=message):
        await add(cameras, description)
    await cameras.close()


async def test_limits_and_names(tmp_path: Path) -> None:
    token = Token(name="me", secret="s" * 16, admin=True, cameras=1)
    cameras = opened(tmp_path)
    await add(cameras, described("gate"))
    await cameras.perform(AddCamera(described("yard")), token)
    await cameras.close()
    cameras = opened(tmp_path, dataclasses.replace(CONFIG, max_cameras=3))
    await cameras.perform(ChangeCamera("yard", {"rate": 3}), None)
    with pytest.raises(OverCapacity, match="'me' has added 1 cameras, its quota"):
        await cameras.perform(AddCamera(described("more")), token)
    await cameras.close()
    cameras = opened(tmp_path)
    with pytest.raises(OverCapacity, match="2 cameras, its limit"):
        await add(cameras, described("more"))
    for operation in (RemoveCamera("no"), ChangeCamera("no", {})):
        with pytest.raises(UnknownCamera, match="no camera 'no'; there are: gate, yard"):
            await cameras.perform(operation, None)
    with pytest.raises(BadRequest, match="name cannot be changed"):
        await change(cameras, name="yard")
    await cameras.close()
    with pytest.raises(BadConfig, match="raise --max-cameras from 1"):
        opened(tmp_path, dataclasses.replace(CONFIG, max_cameras=1))
    for wrong in ("{", '[{"camera": {}}]'):
        (tmp_path / FILE).write_text(wrong)
        with pytest.raises(BadConfig, match="move it away"):
            opened(tmp_path)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [("crash", "ended with exit code 3"), ("garbage", "malformed"), ("hang", "reported nothing for 0 s")],
)
async def test_a_process_that_fails_is_started_again(
    kind: str, cause: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "STOP_S", 0.05)
    if kind == "hang":
        monkeypatch.setattr(module, "SILENT_S", 0.3)
    cameras = opened(None)
    await add(cameras, described(kind=kind))
    failed = await reached(cameras, lambda each: each.state == "failed")
    assert cause in (failed.health.error or "") and not failed.health.connected
    await reached(cameras, lambda each: each.num_events >= 3)
    await cameras.perform(RemoveCamera("gate"), None)
    assert cause in caplog.text and SECRET not in caplog.text


async def test_a_file_ends_and_a_removal_does_not_wait_for_a_camera(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.05)
    cameras = opened(None)
    await add(cameras, described(kind="end"))
    assert (await reached(cameras, lambda each: each.state == "ended")).num_events == 1
    await add(cameras, described("yard", "hang"))
    hanging = await reached(cameras, is_running, "yard")
    await cameras.perform(RemoveCamera("yard"), None)
    assert not is_alive(pid_of(hanging))
    await cameras.close()


SOURCES: dict[Any, type[VLoraError] | None] = {
    **dict.fromkeys(("rtsp://10.1.2.3/a", "rtsps://u:p@10.1.0.1:322/a?b=c", "http://[::1]:8/a"), None),
    **dict.fromkeys(("http://CAMERA-7.example/a", "rtsp://a.yard.example", "/srv/videos/a.mp4", 3.5), None),
    **dict.fromkeys(("rtsp://10.2.0.1/", "rtsp://10.1.0.1@evil.example/", "rtsp://10.1.0.1.evil.example/"), Forbidden),
    **dict.fromkeys(("http://0x0a010001/", "http://167837697/", "http://[::ffff:10.1.0.1]/", "http:///a"), Forbidden),
    **dict.fromkeys(("rtsp://yard.example/", "rtsp://camera-7.example.evil/", "rtsp://*/"), Forbidden),
    **dict.fromkeys(("/etc/passwd", "/srv/videos/../x", "videos/a.mp4", "0", 0, "concat:/srv/videos/a"), Forbidden),
    **dict.fromkeys(("file:///srv/videos/a.mp4", "udp://10.1.0.1", "RTSP://10.1.0.1/", "data://x"), BadRequest),
    **dict.fromkeys(("rtsp://10.1.0.1\\@evil/", "rtsp://10.1.0.1 /", "rtsp://10.1.0.1\n.evil/"), BadRequest),
    **dict.fromkeys(("rtsp://u:a/b@10.1.0.1/", "rtsp://10.1.0.1:12/x@evil/", "rtsp://[10.1.0.1/"), BadRequest),
}


@pytest.mark.parametrize("source", SOURCES)
def test_sources_that_the_operator_allows(source: Any) -> None:
    if (error := SOURCES[source]) is None:
        check_source(source, CONFIG)
    else:
        with pytest.raises(error):
            check_source(source, CONFIG)


def test_the_operator_may_allow_devices_and_every_host() -> None:
    config = ServerConfig(camera_hosts=("*",), camera_paths=("/dev/video0",))
    for source in (0, "0", "/dev/video0", "http://169.254.1.1/"):
        check_source(source, config)
    with pytest.raises(Forbidden):
        check_source(1, config)
    for wrong in ({"camera_hosts": ("10.0.0.0/99",)}, {"camera_paths": ("videos",)}, {"max_cameras": 0}):
        with pytest.raises(BadConfig, match=next(iter(wrong))):
            ServerConfig(**wrong)  # type: ignore[arg-type]


def test_a_source_is_shown_without_credentials() -> None:
    for source, shown in {
        f"rtsp://user:{SECRET}@10.1.0.7:554/main": "rtsp://10.1.0.7:554/...",
        f"http://cam/user=u_password={SECRET}?pwd={SECRET}": "http://cam/...",
        f"http://cam?{SECRET}": "http://cam/...",
        "/srv/videos/a.mp4": "/srv/videos/a.mp4",
        "0": "0",
    }.items():
        assert shown_source(source) == shown


@contextlib.contextmanager
def mjpeg(port: int) -> Iterator[None]:
    """A camera of 100 frames a second over HTTP, whose connections end with the block."""
    ended = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            jpeg = png(230, (64, 48), "JPEG")
            with contextlib.suppress(OSError):
                while not ended.wait(0.01):
                    self.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\n\r\n" + jpeg + b"\r\n")

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        ended.set()
        server.shutdown()


def wait_for(on: Served, holds: Callable[[CameraStatus], bool], name: str = "gate") -> CameraStatus:
    deadline = time.monotonic() + 100
    while True:
        (found,) = (each for each in on.client.call(GetCameras()) if each.name == name)
        if holds(found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


async def asked_by_an_agent(on: Served) -> str:
    command = ["-m", "vlora.cli", "mcp", "--server", on.address]
    stdio = mcp.stdio_client(mcp.StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ)))
    async with mcp.Client(stdio) as agent:
        cameras = await agent.call_tool("list_cameras")
        assert cameras.structured_content is not None
        (camera,) = cameras.structured_content["result"]
        question = {"camera": camera["name"], "question": "say:dusk", "show": True}
        text, picture = (await agent.call_tool("ask_camera", question)).content
        assert picture.type == "image" and picture.mime_type == "image/jpeg" and text.type == "text"
        return text.text


def serving_cameras(folder: Path) -> contextlib.AbstractContextManager[Served]:
    cam = write_adapter(folder / "cam", {"night": 1})
    flags = f"--camera-hosts 127.0.0.1 --camera-sinks --adapter-state {folder}/state --adapter cam={cam}".split()
    return serving(*SCRIPTED, "--model", "scripted", *flags)


LINES = [{"name": "log", "jsonl": {"file": "events.jsonl"}}]
EVENTS = [{"name": "seen", "when": {"head": "cam/night", "label": "bright"}}]


@pytest.mark.slow
def test_a_camera_over_http_is_lost_comes_back_and_outlives_the_server(tmp_path: Path) -> None:
    """No credential is in any output."""
    port, shown = free_port(), list[str]()
    source = f"http://user:{SECRET}@127.0.0.1:{port}/{SECRET}?key={SECRET}"
    wanted = described(source=source, events=EVENTS, sinks=LINES)
    with serving_cameras(tmp_path) as on:
        with mjpeg(port):
            assert call(on.http_port, "POST", "/v1/cameras", wanted)[0] == 201
            assert call(on.http_port, "PATCH", "/v1/cameras/gate", {"rate": 5})[0] == 200
            found = wait_for(on, lambda each: each.health.num_answers > 8 and each.health.fps > 30)
            assert (found.state, found.num_events, found.events[0].label) == ("running", 1, "bright")
            assert on.client.call(GetFrame("gate"))[:2] == b"\xff\xd8", "a JPEG"
            assert asyncio.run(asked_by_an_agent(on)) == "dusk", "over stdio"
        shown.append(str(wait_for(on, lambda each: each.state == "lost").health.error))
        with pytest.raises(DeadlineMissed, match=r"'gate' sent no frame within 0\.1 s; its state is lost"):
            on.client.call(GetFrame("gate", 0.1))
        with mjpeg(port):
            wait_for(on, lambda each: each.health.num_reconnects == 1)
        for path in ("/v1/cameras", "/console/state", "/metrics"):
            shown.append(call(on.http_port, "GET", path)[1])
        wrong = {**wanted, "name": "yard", "tasks": [{"head": "cam/none"}], "events": [], "sinks": []}
        status, text = call(on.http_port, "POST", "/v1/cameras", wrong)
        assert status == 400 and "field `tasks[0].head`: adapter 'cam' has no head 'none'" in text
        on.process.send_signal(signal.SIGTERM)
        on.end()
        shown += [text, on.log]
    (event,) = (tmp_path / "state" / "camera-sinks" / "gate").rglob("events.jsonl")
    assert '"event":"seen"' in event.read_text()
    with serving_cameras(tmp_path) as on, mjpeg(port):
        assert wait_for(on, lambda each: each.health.num_answers > 0).tasks == ("cam/night",)
        assert call(on.http_port, "DELETE", "/v1/cameras/gate")[0] == 204
        on.process.kill()
    assert 'vlora_camera_reconnects_total{camera="gate"} 1.0' in shown[3]
    assert [text for text in shown if SECRET in text or "user" in text] == []


@pytest.mark.exhaustive
@pytest.mark.skipif(not has_gstreamer(), reason="needs GStreamer's RTSP server")
def test_a_camera_over_rtsp_reconnects_and_its_process_ends_with_a_killed_server(tmp_path: Path) -> None:
    with camera("h264") as address, serving_cameras(tmp_path) as on:
        on.client.call(AddCamera(described(source=address, rate=2)))
        assert wait_for(on, lambda each: each.health.num_frames > 40).state == "running"
        assert wait_for(on, lambda each: each.health.num_reconnects == 1).health.num_answers > 5
        (reader,) = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _reads(pid, on.process.pid)]
        on.process.kill()
        deadline = time.monotonic() + 30
        while is_alive(reader):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _reads(pid: int, parent: int) -> bool:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"camera_process" in command and f"PPid:\t{parent}\n" in Path(f"/proc/{pid}/status").read_text()
    return False
