"""The replicas of a cluster: their connections, kept open, and their signs of life."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from vlora.cluster.connection import connect, watch_beats
from vlora.engine.ipc.client import EngineClient
from vlora.errors import Disconnected, EngineDead, VLoraError
from vlora.wire.address import Address

log = logging.getLogger("vlora.cluster")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
_LOOK_S = 0.01


class Health(NamedTuple):
    """When a replica counts as dead.

    Attributes:
        beat_s: The time between two signs of life.
        missed: Beats without one.
    """

    beat_s: float = 0.5
    missed: int = 4
    step_s: float = 60.0


class Member:
    """One replica. Its connection is opened again after it was lost, until `close`.

    Attributes:
        client: Its engine; None while there is no connection.
    """

    def __init__(
        self,
        name: str,
        address: Address,
        secret: bytes,
        *,
        key: str,
        tls: bool,
        health: Health,
        server: str = "replica",
        prepare: Callable[[Member, EngineClient], Awaitable[object]] | None = None,
        on_join: Callable[[Member], object],
        on_leave: Callable[[Member], object] = lambda member: None,
    ) -> None:
        """Open no connection yet.

        Args:
            secret: See `vlora.wire.handshake`.
            key: Of this front end.
            server: What it is: a replica, or another front end.
            prepare: A coroutine that runs on a new connection before the replica joins.
            on_join, on_leave: Called when it can be used, and when it cannot any more.
        """
        self.name = name
        self.address = address
        self.client: EngineClient | None = None
        self.cause = "it has not been connected yet"
        self._server = server
        self._connect_to = functools.partial(connect, address, secret, tls=tls, key=key, server=server)
        self._health = health
        self._prepare = prepare
        self._on_join = on_join
        self._on_leave = on_leave
        self._joined = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect, again and again if that fails."""
        self._serving = asyncio.create_task(self._serve(), name=f"vlora-{self._server}-{self.name}")

    async def wait_joined(self) -> None:
        """Wait until there is a connection."""
        await self._joined.wait()

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})
        if self.client is not None:
            await self.client.disconnect("the cluster was closed")
            self.client = None

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _connect(self) -> EngineClient:
        client = await self._connect_to(beat_s=self._health.beat_s)
        beats = asyncio.create_task(self._beat(client))
        try:
            await _first_sign(client)
            if self._prepare is not None:
                await self._prepare(self, client)
            self.client = client  # at once: later changes of adapters include it
        except BaseException as error:
            await client.disconnect(f"it did not join: {error}")
            raise
        finally:
            beats.cancel()
        return client

    async def _serve(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                client = await self._connect()
            except VLoraError as error:
                if str(error) != self.cause:
                    self.cause = str(error)
                    log.warning("%s %r cannot be used: %s", self._server, self.name, error)
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
                continue
            pause_s = FIRST_PAUSE_S
            self._joined.set()
            log.info("%s %r at %s joins", self._server, self.name, self.address)
            self._on_join(self)
            beats = asyncio.create_task(self._beat(client))
            try:
                self.cause = await client.wait_dead()
            finally:
                beats.cancel()
            log.warning("%s %r is lost: %s", self._server, self.name, self.cause)
            self.client = None
            self._joined.clear()
            self._on_leave(self)

    async def _beat(self, client: EngineClient) -> None:
        """Give up a replica without signs of life, whatever its connection says."""
        with contextlib.suppress(EngineDead, Disconnected):
            reason = await watch_beats(client, self._health.beat_s, self._health.missed, self._health.step_s)
            await client.disconnect(reason)


async def _first_sign(client: EngineClient) -> None:
    """Wait for an answer of the engine itself: the replica's process accepts connections while its engine hangs.

    Raises EngineDead when the connection is closed.
    """
    while client.pong is None:
        if client.cause is not None:
            raise EngineDead(client.cause)
        await asyncio.sleep(_LOOK_S)


def clients(members: Mapping[str, Member]) -> dict[str, EngineClient]:
    return {name: member.client for name, member in sorted(members.items()) if member.client is not None}


def alive(members: Mapping[str, Member]) -> dict[str, EngineClient]:
    """As `clients`. Raises EngineDead with the causes if there are none."""
    found = clients(members)
    if not found:
        causes = "; ".join(f"{name}: {member.cause}" for name, member in sorted(members.items()))
        raise EngineDead(f"no replica can be used{': ' if causes else ''}{causes}")
    return found
