"""Ray's head and the keeper, started again when they end. Neither is needed to serve: the replicas' lines do that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from vlora.cluster import framing
from vlora.cluster.on_ray import settings as ray_settings
from vlora.cluster.on_ray.actor import ActorSettings
from vlora.cluster.on_ray.reports import Event, Failed, HeadReport, HeadSettings, KeeperSettings, Scale
from vlora.cluster.on_ray.settings import Folder, Ports
from vlora.errors import BadConfig, EngineDead
from vlora.types import ErrorValue

log = logging.getLogger("vlora.cluster")

STARTS = 3
"""Failed starts in a row after which the cluster's start fails. One may fail because another program takes a port."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_KEEPER_STOP_S, _HEAD_STOP_S = 5.0, 15.0
_EXIT_S = 1.0  # between the end of a process's output and its exit


class Process:
    """A process that ends when its stdin is closed. Created by `start`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self.output = process.stdout

    @classmethod
    async def start(cls, module: str, settings: Any, environ: dict[str, str]) -> Process:
        """In a session of its own: Ctrl-C in a terminal reaches only the front end, which ends the others last."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
        self = cls(process)
        self._stdin.write(framing.pack(settings))
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, value: Any) -> None:
        """Write a value to its stdin."""
        self._stdin.write(framing.pack(value))

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self, timeout_s: float) -> None:
        """Close its stdin; after a time, kill it."""
        self._stdin.close()
        await self.end(timeout_s)

    async def end(self, timeout_s: float) -> int:
        """Kill it if it has not ended after a time. Returns its exit code."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
        return await self._process.wait()


class RayProcesses:
    """Head and keeper of one front end.

    Attributes:
        ports: Of the current head.
        head, keeper: The current processes; None while there is none.
    """

    def __init__(
        self,
        folder: Folder,
        actors: dict[str, ActorSettings],
        number: int,
        num_gpus: int,
        on_event: Callable[[Any], None],
    ) -> None:
        """Start nothing yet.

        Args:
            actors: Of all replicas that there may be.
            number: Of the first ones that there are.
            num_gpus: Of each replica.
            on_event: Called with each event of the keeper (`Located`, `Lost`, `Failed`).
        """
        self.ports = Ports(0, len(actors))
        self.head: Process | None = None
        self.keeper: Process | None = None
        self._folder = folder
        self._actors = actors
        self._number = number
        self._num_gpus = num_gpus
        self._on_event = on_event
        self._environ = ray_settings.environment(folder, os.environ)
        self._heard = False  # anything from the current keeper
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start both. Raises BadConfig if no ports are free, EngineDead if Ray does not start."""
        for attempt in range(STARTS):
            try:
                await self._start_head()
                break
            except EngineDead:
                if attempt == STARTS - 1:
                    raise
        self._running = asyncio.create_task(self._run(), name="vlora-ray")

    def scale(self, number: int) -> None:
        """Start or end actors, now or when a keeper runs again."""
        self._number = number
        if self.keeper is not None:
            self.keeper.send(Scale(number))

    async def close(self) -> None:
        """End the actors, then Ray."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        if self.keeper is not None:
            await self.keeper.stop(_KEEPER_STOP_S)
        if self.head is not None:
            await self.head.stop(_HEAD_STOP_S)
        self.keeper = self.head = None

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _start_head(self) -> None:
        self.ports = ray_settings.find_ports(len(self._actors))
        settings = HeadSettings(self._folder, self.ports)
        self.head = await Process.start("vlora.cluster.on_ray.head", settings, self._environ)
        problem = "it ended"
        with contextlib.suppress(asyncio.IncompleteReadError):
            problem = (await framing.receive(self.head.output, HeadReport)).problem
        if problem:
            await self.head.end(_HEAD_STOP_S)  # with stdin open, so that it keeps the folder for the next start
            self.head = None
            raise EngineDead(f"Ray did not start: {problem}")

    async def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        num_silent = 0
        while True:
            try:
                if self.head is None:
                    await self._start_head()
                    log.warning("Ray runs again, on ports %s", self.ports)
                assert self.head is not None
                if await self._keep(self.head):
                    pause_s, num_silent = _FIRST_PAUSE_S, 0
                elif (num_silent := num_silent + 1) == STARTS:
                    error = EngineDead(f"the keeper has ended {STARTS} times before any report; see its messages above")
                    self._on_event(Failed("", ErrorValue.of(error)))
            except (BadConfig, EngineDead, OSError) as error:
                log.warning("%s; retrying", error)
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    async def _keep(self, head: Process) -> bool:
        """Run a keeper until it or the head ends. Returns whether the keeper has reported anything."""
        settings = KeeperSettings(
            ports=self.ports,
            actors=self._actors,
            number=self._number,
            log_file=self._folder.ray_log,
            num_gpus=self._num_gpus,
        )
        keeper = self.keeper = await Process.start("vlora.cluster.on_ray.keeper", settings, self._environ)
        self._heard = False
        reading = asyncio.create_task(self._read(keeper))
        head_ended = asyncio.create_task(head.wait())
        try:
            ended, _ = await asyncio.wait({reading, head_ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            head_ended.cancel()
        code = await keeper.end(0 if head_ended in ended else _EXIT_S)
        self.keeper = None
        if head_ended in ended:
            self.head = None
            log.warning("Ray's head has ended; serving goes on, and another one starts")
        else:
            log.warning("the keeper has ended with code %d; serving goes on, and another one starts", code)
        return self._heard

    async def _read(self, keeper: Process) -> None:
        """Pass on events until the keeper ends."""
        try:
            while True:
                self._on_event(await framing.receive(keeper.output, Event))
                self._heard = True
        except asyncio.IncompleteReadError:
            pass
        except msgspec.MsgspecError as error:
            log.warning("the keeper has sent an invalid event: %s", error)
