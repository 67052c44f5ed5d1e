"""The front ends of a service. One of them owns it: it makes the changes, and the others have what it has."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from vlora.cluster.adapter_state import AdapterFailure, DesiredAdapter
from vlora.cluster.connection import own_certificate, protocol, said_by
from vlora.cluster.members import Health, Member
from vlora.cluster.on_ray.reports import Listens, Located, Service
from vlora.engine.ipc import messages
from vlora.engine.ipc.client import EngineClient
from vlora.engine.operations import LoadAdapter, RegisterAdapters
from vlora.errors import Aborted, EngineDead, VLoraError
from vlora.operations import DrainReplica, Operation, PinAdapter, ResumeReplica, Scale, UnloadAdapter
from vlora.types import ErrorValue
from vlora.types.replicas import ScalingStatus
from vlora.wire.address import Address
from vlora.wire.connection import Listener
from vlora.wire.framing import MessageTransport

log = logging.getLogger("vlora.cluster")

_SERVER = "front end"
_AGAIN_S = 0.2
_PONG = messages.encode(messages.Pong(0.0))


class ServiceState(msgspec.Struct, frozen=True, kw_only=True):
    """What the front ends of a service have in common.

    Attributes:
        number: Replicas that there are to be.
        drained: Those that get no requests. leaving: of these, replicas that end or move.
        causes: Why replicas are not there, by name.
        failures: Adapters that replicas cannot serve.
        version: Changes with the others.
    """

    number: int
    located: dict[str, Located]
    drained: frozenset[str]
    leaving: frozenset[str]
    causes: dict[str, str]
    adapters: dict[str, DesiredAdapter]
    failures: dict[str, dict[str, AdapterFailure]]
    scaling: ScalingStatus
    version: int = 0

    @property
    def without_times(self) -> ServiceState:
        return msgspec.structs.replace(self, version=0, scaling=msgspec.structs.replace(self.scaling, decided_s=None))


class WatchService(Operation, frozen=True):
    """Returns the state once it has another version, of which the first one is 1."""

    result = ServiceState
    version: int


Change = RegisterAdapters | LoadAdapter | UnloadAdapter | PinAdapter | DrainReplica | ResumeReplica | Scale
"""What only the owner does."""

_decode = msgspec.msgpack.Decoder(Change | WatchService).decode


class FrontEnds:
    """This front end among the others of its service.

    Attributes:
        owner: The connection to the owner; None while this is the owner, or the only one.
        state: As the owner last sent it; None before.
        num_followers: Front ends with a connection to this one.
    """

    def __init__(
        self,
        key: str,
        health: Health,
        *,
        make_state: Callable[[], ServiceState],
        on_state: Callable[[ServiceState], object],
        perform: Callable[[Operation], Awaitable[Any]],
    ) -> None:
        """Own the service, without others. Call in a running event loop."""
        self.owner: Member | None = None
        self.state: ServiceState | None = None
        self._key = key
        self._secret = b""  # of the owner
        self._health = health
        self._make_state = make_state
        self._on_state = on_state
        self._perform = perform
        self._version = 0  # of the owner's state
        self._listener: Listener | None = None
        self._tls = False
        self._lines: set[MessageTransport] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()

    @property
    def num_followers(self) -> int:
        return len(self._lines)

    async def listen(self, host: str, secret: bytes) -> Listens:
        """Let others connect, at a free port of the host. Raises BadConfig."""
        if self._listener is None:
            address = Address(host, 0)
            self._tls = not address.is_local
            with own_certificate() if self._tls else contextlib.nullcontext() as certificate:
                self._listener = await Listener.open(
                    address, protocol(_SERVER), secret, self._admit, certificate=certificate
                )
        return Listens(self._listener.port, self._tls)

    def own(self, secret: bytes) -> None:
        """Make the changes from now on, or still, with another driver."""
        if self.owner is not None:
            self.state = None
        if self._listener is not None:
            self._listener.secret = secret
        self._leave()

    def follow(self, service: Service, secret: bytes) -> None:
        """Have what another front end has, from now on."""
        address = Address(service.address, service.port)
        if self.owner is not None and (self.owner.address, self._secret) == (address, secret):
            return
        self._secret = secret
        for line in tuple(self._lines):
            line.close()
        self._leave()
        self.owner = Member(
            str(service),
            address,
            secret,
            key=self._key,
            tls=service.tls,
            health=self._health,
            server=_SERVER,
            on_join=lambda member: self._begin(self._watch(member.client)),
        )
        self.owner.start()

    async def call(self, change: Change) -> Any:
        """Let the owner make a change, and have its new state. Raises EngineDead if it is gone, and its errors."""
        assert self.owner is not None
        if (client := self.owner.client) is None:
            raise EngineDead(
                f"{self.owner.name}, which makes changes of this service, cannot be reached: {self.owner.cause}; try "
                "again later"
            )
        found = await client.call(change)
        self._take(await client.call(WatchService(-1)))
        return found

    def publish(self) -> None:
        """Send what the owner has to the others, if it has changed."""
        if not self._lines or self.owner is not None:
            return
        state, before = self._make_state(), self.state
        if before is None or state.without_times != before.without_times:
            self.state = msgspec.structs.replace(state, version=1 if before is None else before.version + 1)
            self._wake()

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for line in tuple(self._lines):
            line.close_after_sending()
        for task in self._tasks:
            task.cancel()
        if self.owner is not None:
            await self.owner.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _wake(self) -> None:
        """Let the calls that wait for a change look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _leave(self) -> None:
        owner, self.owner = self.owner, None
        if owner is not None:
            self._begin(owner.close())

    async def _watch(self, client: EngineClient | None) -> None:
        self._version = 0
        while client is not None and self.owner is not None and client is self.owner.client:
            try:
                self._take(await client.call(WatchService(self._version)))
            except EngineDead:
                return
            except VLoraError:  # it does not own the service yet, or any more
                await asyncio.sleep(_AGAIN_S)

    def _take(self, state: ServiceState) -> None:
        if self.owner is not None and state.version > self._version:
            self.state, self._version = state, state.version
            self._on_state(state)

    # -- the owner ----------------------------------------------------------------------------------------------------

    def _admit(self, transport: MessageTransport, about: bytes, address: str) -> bytes:
        said_by(about)
        self._lines.add(transport)
        transport.closed.add_done_callback(lambda closed: self._left(transport, closed.exception(), address))
        transport.on_message = lambda data: self._receive(transport, data)
        log.info("the front end at %s follows this one", address)
        return messages.encode(messages.Ready("", os.getpid(), 0))

    def _left(self, transport: MessageTransport, error: BaseException | None, address: str) -> None:
        self._lines.discard(transport)
        self._wake()
        log.info("the front end at %s follows this one no more%s", address, "" if error is None else f": {error}")

    def _receive(self, transport: MessageTransport, data: bytes) -> None:
        match messages.decode_to_engine(data):
            case messages.Ping():
                transport.send(_PONG)
            case messages.Call(call_id, operation):
                self._begin(self._answer(transport, call_id, _decode(operation)))
            case other:
                raise ValueError(f"a front end may not send {type(other).__name__} to another one")

    async def _answer(self, transport: MessageTransport, call_id: int, operation: Operation) -> None:
        value, failed = None, None
        try:
            value = await self._result(transport, operation)
        except VLoraError as error:
            failed = ErrorValue.of(error)
        except Exception as error:
            log.exception("a change of another front end")
            failed = ErrorValue.of(Aborted(f"internal error: {type(error).__name__}; see the log of the owner"))
        self.publish()
        if not transport.closed.done():
            transport.send(messages.encode(messages.Reply(call_id, value, failed)))

    async def _result(self, transport: MessageTransport, operation: Operation) -> Any:
        if self.owner is not None:
            raise Aborted(f"{self.owner.name} makes the changes of this service now; try again")
        if not isinstance(operation, WatchService):
            return await self._perform(operation)
        self.publish()
        while self.state is None or self.state.version == operation.version:
            await self._changed.wait()
            if transport.closed.done() or self.owner is not None:
                raise Aborted("this front end does not make the changes of the service any more; try again")
        return self.state
