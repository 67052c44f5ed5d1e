"""The replicas of a cluster: their connections, kept open, and their signs of life."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
        tls: bool,
        health: Health,
        prepare: Callable[[Member, EngineClient], Any],
        on_join: Callable[[Member], None],
        on_leave: Callable[[Member], None],
    ) -> None:
        """Open no connection yet.

        Args:
            secret: See `vlora.wire.handshake`.
            prepare: A coroutine that runs on a new connection before the replica joins.
            on_join, on_leave: Called when it can be used, and when it cannot any more.
        """
        self.name = name
        self.address = address
        self.client: EngineClient | None = None
        self.cause = "it has not been connected yet"
        self._secret = secret
        self._tls = tls
        self._health = health
        self._prepare = prepare
        self._on_join = on_join
        self._on_leave = on_leave
        self._joined = asyncio.Event()
        self._is_closed = False
        self._serving: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Connect once, and keep the connection open from then on.

        Raises:
            Disconnected: It was closed meanwhile.
            VLoraError: As `connect`, and errors of `prepare`.
        """
        client = await self._connect()
        self._serving = asyncio.create_task(self._serve(client), name=f"vlora-replica-{self.name}")
        joined = asyncio.create_task(self._joined.wait())
        await asyncio.wait((joined, self._serving), return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()
        if self._serving.done():  # otherwise it has joined, and if it was lost since, it joins again
            raise self._closed_meanwhile()

    async def wait_joined(self) -> None:
        """Wait until there is a connection."""
        await self._joined.wait()

    async def close(self) -> None:
        self._is_closed = True
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})
        if self.client is not None:
            await self.client.disconnect("the cluster was closed")
            self.client = None

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _connect(self) -> EngineClient:
        client = await connect(self.address, self._secret, tls=self._tls, beat_s=self._health.beat_s)
        beats = asyncio.create_task(self._beat(client))
        try:
            await _first_sign(client)
            await self._prepare(self, client)
            if self._is_closed:
                raise self._closed_meanwhile()
            self.client = client  # at once: later changes of adapters include it
        except BaseException as error:
            await client.disconnect(f"it did not join: {error}")
            raise
        finally:
            beats.cancel()
        return client

    def _closed_meanwhile(self) -> Disconnected:
        return Disconnected(f"replica {self.name!r} was removed before it had joined")

    async def _serve(self, client: EngineClient | None) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            if client is None:
                try:
                    client = await self._connect()
                except VLoraError as error:
                    if str(error) != self.cause:
                        self.cause = str(error)
                        log.warning("replica %r cannot be used: %s", self.name, error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
                    continue
            pause_s = FIRST_PAUSE_S
            self._joined.set()
            log.info("replica %r at %s joins", self.name, self.address)
            self._on_join(self)
            beats = asyncio.create_task(self._beat(client))
            try:
                self.cause = await client.wait_dead()
            finally:
                beats.cancel()
            log.warning("replica %r is lost: %s", self.name, self.cause)
            self.client, client = None, None
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
