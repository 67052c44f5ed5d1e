"""The driver, and a Ray of this machine where the user has none. Both are started again; neither serves requests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from vlora.cluster.on_ray.reports import (
    RENEWED,
    DriverSettings,
    Event,
    Failed,
    Follows,
    LocalReport,
    LocalSettings,
    Order,
    Owns,
    Scale,
    Service,
)
from vlora.cluster.on_ray.settings import LOOPBACK, Folder, RayOptions, environment
from vlora.cluster.replica import ReplicaSettings
from vlora.errors import EngineDead, VLoraError
from vlora.types import ErrorValue
from vlora.wire.framing import pack_value, receive_value

log = logging.getLogger("vlora.cluster")

STARTS = 3
"""Drivers in a row that end before any report, after which the cluster's start fails."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_STOP_S = 5.0
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

    @property
    def runs(self) -> bool:
        return self._process.returncode is None

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
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._process.wait()
            finally:  # before Python 3.11.4 a timeout in a cancelled task raises CancelledError
                self.kill()
        return await self._process.wait()


class LocalRay:
    """A Ray of this machine, in a process of its own (`local_ray.py`).

    Attributes:
        process: The current one; None before the first start.
    """

    def __init__(self, folder: Folder, num_cpus: int) -> None:
        """Start nothing yet. num_cpus: what replicas may take of it, whatever the machine has."""
        self.process: Process | None = None
        self.environ = environment(folder, os.environ)
        self._settings = LocalSettings(folder=folder, num_cpus=num_cpus)
        self._address = ""

    async def start(self) -> str:
        """Start it, unless it runs. Returns its address. Raises EngineDead."""
        if self.process is not None and self.process.runs:
            return self._address
        self._settings.folder.forget_ray()
        process = await Process.start("vlora.cluster.on_ray.local_ray", self._settings, self.environ)
        report = LocalReport("", "its process has ended")
        with contextlib.suppress(asyncio.IncompleteReadError):
            report = await receive_value(process.output, LocalReport)
        if report.problem:
            await process.end(_EXIT_S)
            raise EngineDead(f"Ray did not start: {report.problem}")
        self.process, self._address = process, report.address
        return self._address

    async def close(self) -> None:
        if self.process is not None:
            await self.process.stop(3 * _STOP_S)


def driver_settings(
    options: RayOptions, replica: ReplicaSettings, number: int, most: int, folder: Folder, model_name: str
) -> DriverSettings:
    """Settings of a driver for so many replicas, at most `most`. model_name: what others are told that uses the
    namespace."""
    num_gpus = 0 if replica.config.device == "cpu" else replica.config.tensor_parallel
    is_local = options.address is None
    alike = (msgspec.structs.replace(replica, secret=b""), dataclasses.replace(options, address=None, wait_s=0))
    # There may be several Rays on a machine.
    local = {"_node_ip_address": LOOPBACK, "_temp_dir": folder.ray_folder}
    return DriverSettings(
        address=options.address or "",
        namespace=options.namespace,
        connection=local if is_local else {},
        service=Service(
            key=secrets.token_hex(8),
            settings=hashlib.sha256(msgspec.msgpack.encode((alike, model_name))).hexdigest(),
            model=model_name,
            host=socket.gethostname(),
            pid=os.getpid(),
        ),
        need=options.need(num_gpus),
        labels=dict(options.labels),
        actor=options.of_actor(num_gpus),
        replica=replica,
        number=number,
        folder=folder,
        checks_head=not is_local,
        scales=not is_local and most > number,
    )


class RayProcesses:
    """The driver of one front end, and its Ray if the user has none. Each is started again when it ends.

    Attributes:
        driver: The current process; None while there is none.
    """

    def __init__(self, settings: DriverSettings, local: LocalRay | None, on_event: Callable[[Any], None]) -> None:
        """Start nothing yet. on_event: called with each event of the driver."""
        self.driver: Process | None = None
        self.local = local
        self._settings = settings
        self._number = settings.number
        self._on_event = on_event
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises EngineDead or BadConfig if Ray does not start on this machine."""
        if self.local is not None:
            await self.local.start()
        self._running = asyncio.create_task(self._run(), name="vlora-ray")

    def scale(self, number: int) -> None:
        """Start or end actors, now or when a driver runs again."""
        self._number = number
        self.send(Scale(number))

    def send(self, order: Order) -> None:
        if self.driver is not None:
            self.driver.send(order)

    async def close(self) -> None:
        """End the actors, and a Ray that was started here."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        if self.driver is not None:
            await self.driver.stop(_STOP_S)
        if self.local is not None:
            await self.local.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause_s, num_silent, told = _FIRST_PAUSE_S, 0, ""
        while True:
            began_s = time.monotonic()
            try:
                heard = await self._run_driver()
                num_silent = 0 if heard else num_silent + 1
                if num_silent == STARTS:
                    error = EngineDead(
                        f"the driver of Ray has ended {STARTS} times before any report; see the log above"
                    )
                    self._on_event(Failed("", ErrorValue.of(error)))
            except (VLoraError, OSError) as error:
                if told != (told := str(error)):
                    log.warning("%s; retrying", error)
            if time.monotonic() - began_s > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    async def _end_with_local(self, driver: Process) -> None:
        """End a driver after the Ray of this machine: for minutes it would wait for that to return."""
        if self.local is not None and self.local.process is not None:
            await self.local.process.wait()
            log.warning("Ray has ended, and the replicas with it; another one starts")
            driver.kill()

    async def _run_driver(self) -> bool:
        """Run a driver until it ends. Returns whether it has reported anything."""
        settings = msgspec.structs.replace(self._settings, number=self._number)
        environ = {**os.environ}
        if self.local is not None:
            settings = msgspec.structs.replace(settings, address=await self.local.start())
            environ = self.local.environ
        driver = self.driver = await Process.start("vlora.cluster.on_ray.driver", settings, environ)
        ending = asyncio.create_task(self._end_with_local(driver))
        if self._number != settings.number:  # it was changed meanwhile
            driver.send(Scale(self._number))
        heard = refused = False
        try:
            while True:
                event = await receive_value(driver.output, Event)
                heard = True
                refused = isinstance(event, Failed) and not event.name
                if isinstance(event, Owns | Follows):  # the next driver may start replicas before it finds others
                    replica = msgspec.structs.replace(self._settings.replica, secret=event.secret)
                    self._settings = msgspec.structs.replace(self._settings, replica=replica)
                self._on_event(event)
        except asyncio.IncompleteReadError:
            pass
        except msgspec.MsgspecError as error:
            log.warning("the driver of Ray has sent an invalid event: %s", error)
        finally:
            ending.cancel()
        code = await driver.end(_EXIT_S)
        self.driver = None
        if code == RENEWED:
            log.info("the driver of Ray is replaced")
        elif not refused:
            log.warning("the driver of Ray has ended with code %d; serving goes on, and another one starts", code)
        return heard
