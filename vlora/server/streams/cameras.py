"""The cameras that a server reads, each in a process of its own (0100), and kept in a file over restarts."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import re
import sys
import urllib.parse
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vlora.config import ServerConfig, Token
from vlora.errors import BadConfig, BadRequest, Forbidden, OverCapacity, UnknownCamera, VLoraError, listed
from vlora.operations import AddCamera, ChangeCamera, RemoveCamera
from vlora.run_folder import write_whole, writing
from vlora.server.security.access import name_of
from vlora.types.camera import CameraEvent, CameraHealth, CameraReport, CameraState, CameraStatus

log = logging.getLogger(__name__)

FILE, _OWNER = "cameras.json", "added_by"
COMMAND = (sys.executable, "-m", "apps.video_analytics.plan.camera_process")
TENANT = "server-cameras"
"""The name of the cameras' processes in metrics and shares."""
SCHEMES = ("rtsp", "rtsps", "http", "https")
_MAX_BYTES = 64 * 1024  # of a description
_MAX_LINE = 2**20  # of a report
_STARTING = 2  # processes at once, each of which imports OpenCV
_CHECK_S, SILENT_S, STOP_S = 60.0, 30.0, 5.0
FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # before a process is started again
_EVENTS = 10


class _Camera:
    """description: as in a plan, and whether the camera is `paused`. owner: the name of the token that added it."""

    def __init__(self, description: dict[str, Any], owner: str | None) -> None:
        self.description, self.owner = description, owner
        self.name, self._source = str(description["name"]), shown_source(str(description["source"]))
        self.state: CameraState = "paused" if description.get("paused") else "connecting"
        self.tasks: tuple[str, ...] = ()
        self.work: asyncio.Task[None] | None = None
        self._health, self._reported_s = CameraHealth(), 0.0  # the latter by the loop's clock
        self._num_events = 0
        self._events: deque[CameraEvent] = deque(maxlen=_EVENTS)

    def status(self) -> CameraStatus:
        if (age_s := self._health.age_s) is not None:
            age_s += asyncio.get_running_loop().time() - self._reported_s
        health, events = msgspec.structs.replace(self._health, age_s=age_s), tuple(reversed(self._events))
        return CameraStatus(self.name, self._source, self.tasks, self.state, health, self._num_events, events)

    def take(self, report: CameraReport) -> None:
        if (health := report.health) is not None:
            self._health, self._reported_s = health, asyncio.get_running_loop().time()
            before: CameraState = "lost" if health.num_frames or health.error else "connecting"
            self.state = "running" if health.connected else before
        if report.event is not None:
            self._num_events += 1
            self._events.append(report.event)

    def fail(self, cause: str) -> None:
        log.warning("camera %s: %s", self.name, cause)
        self._health = msgspec.structs.replace(self._health, connected=False, fps=0.0, error=cause)
        self.state = "failed"


class Cameras:
    """Used from the front end's event loop. Its processes are clients of the server, over a connection of their own."""

    def __init__(
        self, config: ServerConfig, folder: Path | None, variables: Mapping[str, str], command: Sequence[str] = COMMAND
    ) -> None:
        """Raises BadConfig if the file in `folder` cannot be used. variables: with which the processes are admitted."""
        self._config = config
        self._file = None if folder is None else folder / FILE
        # The server's own secrets are not for decoders.
        self._environment = {**{name: os.environ[name] for name in os.environ if name[:6] != "VLORA_"}, **variables}
        self._command = command
        self._changing = asyncio.Lock()
        self._starting = asyncio.Semaphore(_STARTING)
        self._cameras = {each.name: each for each in self._read()}
        for camera in self._cameras.values():
            self._begin(camera, None)

    def statuses(self) -> tuple[CameraStatus, ...]:
        return tuple(camera.status() for camera in self._cameras.values())

    async def perform(self, operation: AddCamera | ChangeCamera | RemoveCamera, caller: Token | None) -> Any:
        """Make a change to its end, also if its caller is gone; one at a time. See `AsyncClient` for its errors."""

        async def alone() -> CameraStatus | None:
            async with self._changing:
                match operation:
                    case AddCamera(camera):
                        self._check_new(str(camera.get("name")), caller)
                        return await self._put({}, camera, name_of(caller))
                    case ChangeCamera(name, changes):
                        former = self.get(name)
                        if changes.get("name", name) != name:
                            raise BadRequest("a camera's name cannot be changed; remove it, and add another")
                        return await self._put(former.description, changes, former.owner)
                    case RemoveCamera(name):
                        removed = self.get(name)
                        await self._keep({key: each for key, each in self._cameras.items() if key != name})
                        await self._end(removed)
                return None

        return await asyncio.shield(asyncio.create_task(alone()))

    async def close(self) -> None:
        """End all processes."""
        async with self._changing:
            await asyncio.gather(*map(self._end, self._cameras.values()))

    def _check_new(self, name: str, caller: Token | None) -> None:
        if (most := self._config.max_cameras) <= len(self._cameras):
            raise OverCapacity(f"the server has {most} cameras, its limit; remove one, or raise --max-cameras")
        if caller is not None and caller.cameras is not None:
            num_own = sum(each.owner == caller.name for each in self._cameras.values())
            if num_own >= caller.cameras:
                raise OverCapacity(f"{caller.name!r} has added {num_own} cameras, its quota; remove one of them")
        if name.lower() in map(str.lower, self._cameras):
            raise BadRequest(f"there is a camera {name!r} already; change it, or give another name", field="name")

    async def _put(self, former: dict[str, Any], changes: dict[str, Any], owner: str | None) -> CameraStatus:
        """Have a camera with the former description and changes to it."""
        description = {field: value for field, value in (former | changes).items() if value is not None}
        only_pauses = bool(former) and changes == {"paused": True}  # also of a camera whose plan cannot run
        process = None if only_pauses else await self._checked(description)
        camera = _Camera(description, owner)
        before = self._cameras.get(camera.name)
        try:
            await self._keep({**self._cameras, camera.name: camera})
        except BaseException:
            if process is not None:
                await process.stop()
            raise
        if before is not None:
            await self._end(before)
        self._begin(camera, process)
        return camera.status()

    def get(self, name: str) -> _Camera:
        """Raises UnknownCamera."""
        if name not in self._cameras:
            raise UnknownCamera(f"there is no camera {name[:100]!r}; there are: {listed(self._cameras)}")
        return self._cameras[name]

    async def _keep(self, cameras: dict[str, _Camera]) -> None:
        """Have these cameras, on the disk first."""
        if self._file is not None:
            data = msgspec.json.encode([{_OWNER: each.owner, **each.description} for each in cameras.values()])
            with writing(self._file):
                await asyncio.to_thread(write_whole, self._file, data, mode=0o600)
        self._cameras = cameras

    def _read(self) -> list[_Camera]:
        try:
            data = b"[]" if self._file is None or not self._file.exists() else self._file.read_bytes()
            kept = msgspec.json.decode(data, type=list[dict[str, Any]])
            found = [_Camera(description, description.pop(_OWNER, None)) for description in kept]
        except (OSError, msgspec.MsgspecError, KeyError) as error:
            raise BadConfig(f"{self._file} is not a list of cameras ({error}); move it away to begin") from error
        if len(found) > (most := self._config.max_cameras):
            raise BadConfig(f"{self._file} has {len(found)} cameras; raise --max-cameras from {most}, or move it away")
        return found

    def _begin(self, camera: _Camera, process: _Process | None) -> None:
        """process: of the camera, which waits for its start."""
        camera.tasks = () if process is None else process.tasks
        camera.work = asyncio.create_task(self._supervise(camera, process))

    async def _end(self, camera: _Camera) -> None:
        if camera.work is not None:
            camera.work.cancel()
            await asyncio.wait({camera.work})

    async def _supervise(self, camera: _Camera, process: _Process | None) -> None:
        """Keep a process for a camera; one that ends is started again, with pauses."""
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        try:
            while camera.state not in ("paused", "ended"):
                began = loop.time()
                try:
                    process = process or await self._checked(camera.description)
                    camera.tasks = process.tasks
                    async for report in process.reports():
                        camera.take(report)
                    camera.state = "ended"
                    continue
                except Exception as error:  # this camera alone fails
                    camera.fail(str(error) if isinstance(error, VLoraError) else f"{type(error).__name__}: {error}")
                if process is not None:
                    await process.stop()
                    process = None
                pause_s = FIRST_PAUSE_S if loop.time() - began > _LONGEST_PAUSE_S else pause_s
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            if process is not None:
                await process.stop()

    async def _checked(self, description: dict[str, Any]) -> _Process:
        """A process that has accepted a description and waits for its start. Raises VLoraError."""
        if not isinstance(description.get("paused", False), bool):
            raise BadRequest("`paused` is true or false", field="paused")
        try:
            plan = {field: value for field, value in description.items() if field != "paused"}
            line = json.dumps(plan).encode() + b"\n"
        except RecursionError:
            raise BadRequest("the camera's description is nested too deeply") from None
        if len(line) > _MAX_BYTES:
            raise BadRequest(f"the camera's description has {len(line)} bytes; at most {_MAX_BYTES} are accepted")
        check_source(description.get("source"), self._config)
        async with self._starting:
            process = _Process(
                await asyncio.create_subprocess_exec(
                    *self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=self._environment, limit=_MAX_LINE
                )
            )
            try:
                await process.check(line)
            except BaseException:
                await process.stop()
                raise
            return process


class _Process:
    """The process of a camera. Its stderr is discarded, as FFmpeg writes addresses with passwords there."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._input, self._output = process, process.stdin, process.stdout
        self.tasks: tuple[str, ...] = ()

    async def check(self, line: bytes) -> None:
        """Have a description checked, which may contain a password, so that it is no argument. Raises VLoraError."""
        self._input.write(line)
        report = await self._next(_CHECK_S)
        if report.refused is not None:
            raise report.refused.to_exception()
        self.tasks = report.tasks or ()

    async def reports(self) -> AsyncIterator[CameraReport]:
        """Start it, and yield its reports to the end of the source. Raises VLoraError if it ends for another reason."""
        self._input.write(b"\n")
        while (report := await self._next(SILENT_S)).ended is None:
            yield report
        if report.ended:
            raise VLoraError(report.ended)

    async def stop(self) -> None:
        """End it: by the end of its input, and by force if a camera blocks it."""
        self._input.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
        finally:  # before Python 3.11.4 a timeout in a cancelled task raises CancelledError
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()

    async def _next(self, wait_s: float) -> CameraReport:
        try:
            async with asyncio.timeout(wait_s):  # `wait_for` of Python 3.11 may lose a cancellation
                line = await self._output.readline()
        except TimeoutError:
            raise VLoraError(f"the camera's process reported nothing for {wait_s:.0f} s") from None
        if not line:
            raise VLoraError(f"the camera's process ended with exit code {await self._process.wait()}")
        return msgspec.json.decode(line, type=CameraReport)


def shown_source(source: str) -> str:
    """A source without what may be a credential: of a URL, its scheme, host and port."""
    scheme, of_url, rest = source.partition("://")
    return f"{scheme}://{re.split('[/?#]', rest)[0].rpartition('@')[2]}/..." if of_url else source


def check_source(source: object, config: ServerConfig) -> None:
    """Raises Forbidden for a source that the operator has not allowed, BadRequest for a URL with several readings."""
    if not isinstance(source, str | int):
        return  # refused with its plan
    text = str(source)
    if (url := re.match(r"(\w+)://", text)) is None:
        path = Path(os.path.realpath(f"/dev/video{text}" if text.isdecimal() else text))
        folders = [os.path.realpath(each) for each in config.camera_paths]
        if not (text.isdecimal() or os.path.isabs(text)) or not any(map(path.is_relative_to, folders)):
            remedy = "give an absolute path in one of them, or have the operator add it"
            raise Forbidden(f"source {shown_source(text)[:100]!r} is not in --camera-paths of this server; {remedy}")
        return
    if url[1] not in SCHEMES:
        raise BadRequest(f"a camera's URL begins with {'://, '.join(SCHEMES)}://, not {url[1][:20]}://", field="source")
    try:
        parts = urllib.parse.urlsplit(text)
        host, _ = parts.hostname or "", parts.port
        ambiguous = "\\" in text or ("@" in text and "@" not in parts.netloc)
        if ambiguous or not all("!" <= letter <= "~" for letter in text):
            raise ValueError
    except ValueError:
        remedy = "write special characters of a password as %2F and so on"
        raise BadRequest(f"the source's host or port cannot be read; {remedy}", field="source") from None
    if not host or not any(_matches(host, each.lower()) for each in config.camera_hosts):
        raise Forbidden(f"cameras at {host[:100]!r} are not allowed; have the operator add it to --camera-hosts")


def _matches(host: str, allowed: str) -> bool:
    """Names match names only, not what they resolve to, which may change."""
    try:
        return allowed == "*" or ipaddress.ip_address(host) in ipaddress.ip_network(allowed, strict=False)
    except ValueError:
        return host == allowed or (allowed.startswith("*.") and host.endswith(allowed[1:]))
