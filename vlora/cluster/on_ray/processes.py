"""Ray's head and the driver, started again when they end. Neither is needed to serve: replicas have own connections.

On several machines each has such a head, which runs Ray's control service on one of them and a node on the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from vlora.cluster.on_ray.actor import ActorSettings
from vlora.cluster.on_ray.reports import (
    DriverSettings,
    Event,
    Failed,
    HeadReport,
    HeadSettings,
    Located,
    Need,
    Restart,
    Scale,
)
from vlora.cluster.on_ray.settings import Folder, Ports
from vlora.errors import EngineDead, VLoraError
from vlora.types import ErrorValue
from vlora.wire.framing import pack_value, receive_value

log = logging.getLogger("vlora.cluster")

STARTS = 3
"""Failed starts in a row after which the cluster's start fails. One may fail because another program takes a port."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_DRIVER_STOP_S, _HEAD_STOP_S = 5.0, 15.0
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
        self._stdin.write(pack_value(settings))
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, value: Any) -> None:
        self._stdin.write(pack_value(value))

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def stop(self, timeout_s: float) -> None:
        """Close its stdin; after a time, kill it."""
        self._stdin.close()
        await self.end(timeout_s)

    async def end(self, timeout_s: float) -> int:
        """Kill it if it has not ended after a time. Returns its exit code."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._process.wait()
        self.kill()
        return await self._process.wait()


class RayStart(NamedTuple):
    """How Ray is started on this machine, and how a driver finds it.

    Attributes:
        connection: The arguments of `ray.init`.
    """

    ports: Ports
    command: list[str]
    environ: dict[str, str]
    connection: dict[str, Any]


class RayNode:
    """Ray on this machine: the process that runs it, started again when it ends.

    Attributes:
        head: The current process (`vlora.cluster.on_ray.head`); None while there is none.
    """

    def __init__(
        self, folder: Folder, prepare: Callable[[], Awaitable[RayStart]], *, keeps_replicas: bool = False
    ) -> None:
        """Start nothing yet.

        Args:
            prepare: Called before each start. Its errors are those of a start that fails.
            keeps_replicas: Only Ray ends with this process, and replicas serve on.
        """
        self.ports = Ports(0, 0)
        self.head: Process | None = None
        self.runs = False
        self._folder = folder
        self._prepare = prepare
        self._keeps_replicas = keeps_replicas
        self._start: RayStart
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start Ray. Raises EngineDead if it does not start, and errors of `prepare`, such as BadConfig."""
        for attempt in range(STARTS):
            try:
                await self._start_head()
                break
            except EngineDead:
                if attempt == STARTS - 1:
                    raise
        self._running = asyncio.create_task(self._run(), name="vlora-ray")

    def restart(self) -> None:
        """End Ray abruptly; another one starts."""
        if self.head is not None:
            self.head.kill()

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        await self._before_end()
        if self.head is not None:
            await self.head.stop(_HEAD_STOP_S)
        self.head = None

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _start_head(self) -> None:
        start = self._start = await self._prepare()
        self.ports = start.ports
        settings = HeadSettings(self._folder, tuple(start.command), self._keeps_replicas)
        self.head = await Process.start("vlora.cluster.on_ray.head", settings, start.environ)
        problem = "it ended"
        with contextlib.suppress(asyncio.IncompleteReadError):
            problem = (await receive_value(self.head.output, HeadReport)).problem
        if problem:
            await self.head.end(_HEAD_STOP_S)  # with stdin open, so that it keeps the folder for the next start
            self.head = None
            raise EngineDead(f"Ray did not start: {problem}")
        self.runs = True

    async def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                if self.head is None:
                    await self._start_head()
                    log.warning("Ray runs again, on ports %s", self.ports)
                assert self.head is not None
                if await self._keep(self.head):
                    pause_s = _FIRST_PAUSE_S
            except (VLoraError, OSError) as error:
                log.warning("%s; retrying", error)
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    async def _keep(self, head: Process) -> bool:
        """Wait for the end of Ray. Returns whether the next start may follow soon."""
        began_s = time.monotonic()
        await head.wait()
        self._head_ended()
        return time.monotonic() - began_s > _LONGEST_PAUSE_S

    def _head_ended(self) -> None:
        self.head, self.runs = None, False
        log.warning("Ray's head has ended; serving goes on, and another one starts")

    async def _before_end(self) -> None:
        """Called before Ray is ended."""


class RayProcesses(RayNode):
    """Ray on this machine, and the driver of one front end.

    Attributes:
        driver: The current process; None while there is none.
    """

    def __init__(
        self,
        folder: Folder,
        prepare: Callable[[], Awaitable[RayStart]],
        actors: dict[str, ActorSettings],
        number: int,
        on_event: Callable[[Any], None],
        *,
        num_gpus: int = 0,
        need: Need | None = None,
        serves: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Start nothing yet.

        Args:
            prepare: See `RayNode`.
            on_event: Called with each event of the driver (`Located`, `Lost`, `Failed`).
            need: Of each replica, where there are several machines.
            serves: Whether a replica serves, so that a later driver waits for its machine.
        """
        super().__init__(folder, prepare)
        self.driver: Process | None = None
        self._actors = actors
        self._number = number
        self._num_gpus = num_gpus
        self._need = need
        self._serves = serves
        self._on_event = on_event
        self._homes: dict[str, str] = {}
        self._heard = False  # anything from the current driver
        self._num_silent = 0

    def scale(self, number: int) -> None:
        """Start or end actors, now or when a driver runs again."""
        self._number = number
        self._order(Scale(number))

    def restart_replica(self, name: str) -> None:
        """Kill a replica's processes through its actor, so that it is started again."""
        self._order(Restart(name))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _order(self, order: Scale | Restart) -> None:
        if self.driver is not None:
            self.driver.send(order)

    async def _before_end(self) -> None:
        """End the actors first."""
        if self.driver is not None:
            await self.driver.stop(_DRIVER_STOP_S)
        self.driver = None

    async def _keep(self, head: Process) -> bool:
        """Run a driver until it or the head ends. Returns whether the driver has reported anything."""
        settings = DriverSettings(
            connection=self._start.connection,
            actors=self._actors,
            number=self._number,
            log_file=self._folder.ray_log,
            num_gpus=self._num_gpus,
            need=self._need,
            homes={name: key for name, key in self._homes.items() if self._serves(name)},
        )
        driver = self.driver = await Process.start("vlora.cluster.on_ray.driver", settings, self._start.environ)
        self._heard = False
        reading = asyncio.create_task(self._read(driver))
        head_ended = asyncio.create_task(head.wait())
        try:
            ended, _ = await asyncio.wait({reading, head_ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            head_ended.cancel()
        code = await driver.end(0 if head_ended in ended else _EXIT_S)
        self.driver = None
        if head_ended in ended:
            self._head_ended()
        else:
            log.warning("the driver has ended with code %d; serving goes on, and another one starts", code)
        self._num_silent = 0 if self._heard else self._num_silent + 1
        if self._num_silent == STARTS:
            error = EngineDead(f"the driver has ended {STARTS} times before any report; see its messages above")
            self._on_event(Failed("", ErrorValue.of(error)))
        return self._heard

    async def _read(self, driver: Process) -> None:
        """Pass on events until the driver ends."""
        try:
            while True:
                event = await receive_value(driver.output, Event)
                if isinstance(event, Located):
                    self._homes[event.name] = event.at.node
                self._heard = True
                self._on_event(event)
        except asyncio.IncompleteReadError:
            pass
        except msgspec.MsgspecError as error:
            log.warning("the driver has sent an invalid event: %s", error)
