"""The handshake of a head and a machine that joins: TLS, proof of the token, and the facts that all must share."""

from __future__ import annotations

import asyncio
import datetime
import platform
from collections.abc import Callable

import msgspec

from vlora.cluster.connection import protocol
from vlora.cluster.nodes.certificates import Authority, Certificates, own_addresses, utc_now
from vlora.cluster.nodes.content import adapter_digest, model_digest
from vlora.cluster.nodes.token import derived
from vlora.errors import BadConfig, Disconnected, Unauthorized, VLoraError
from vlora.wire.address import Address
from vlora.wire.connection import Listener, connect
from vlora.wire.framing import MessageTransport
from vlora.wire.handshake import read_about
from vlora.wire.heartbeat import keep_alive
from vlora.wire.tls import Certificate

_SERVER = "head"
_SHOWN_TIME = "%Y-%m-%d %H:%M"


class Adapter(msgspec.Struct, frozen=True):
    path: str
    digest: str


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that all machines of a cluster share.

    Attributes:
        run: Of Ray's control service: another one knows no machine.
        plan: The digest of the head's plan.
        ray, python: Versions.
        ray_ports, door_ports: First and last.
        model: A folder, a hub name or `embedded`; `model_digest`: see `content`.
        adapters: By name; none where files are sent to machines that lack them.
    """

    run: str
    plan: str
    ray: str
    python: str
    control: str
    ray_ports: tuple[int, int]
    door_ports: tuple[int, int]
    most: int
    model: str
    model_digest: str
    adapters: dict[str, Adapter]


class Join(msgspec.Struct, frozen=True):
    """A machine's message.

    Attributes:
        host: Its address for others; empty: the one of this connection.
        addresses: All of its addresses, for its certificate.
        front_end: It is the cluster's front end, as long as this connection is open.
    """

    host: str
    addresses: tuple[str, ...]
    front_end: bool = False


class Admitted(msgspec.Struct, frozen=True):
    """The head's answer.

    Attributes:
        host: The machine's address.
        clock: Of the head, which the certificates are issued by.
    """

    host: str
    facts: Facts
    certificates: Certificates
    clock: datetime.datetime


def python_version() -> str:
    return ".".join(platform.python_version_tuple()[:2])


class HeadListener:
    """The head's end. Created by `open`.

    Attributes:
        had_front_end: Whether the cluster's front end was connected at any time.
    """

    def __init__(
        self, authority: Authority, facts: Callable[[], Facts | None], announce: Callable[[str], None]
    ) -> None:
        self._authority = authority
        self._facts = facts
        self._announce = announce
        self.had_front_end = False
        self._front_end: str | None = None  # its address
        self._connections: set[MessageTransport] = set()
        self._listener: Listener

    @classmethod
    async def open(
        cls,
        address: Address,
        token: bytes,
        certificate: Certificate,
        authority: Authority,
        facts: Callable[[], Facts | None],
        announce: Callable[[str], None],
    ) -> HeadListener:
        """Listen for machines.

        Args:
            facts: Returns what they need; None while Ray does not run.
            announce: Called with a line for each machine.

        Raises:
            BadConfig: The address cannot be used.
        """
        self = cls(authority, facts, announce)
        secret = derived(token, "head").encode()
        self._listener = await Listener.open(address, protocol(_SERVER), secret, self._admit, certificate=certificate)
        return self

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def has_front_end(self) -> bool:
        return self._front_end is not None

    def close(self) -> None:
        self._listener.close()
        self.drop()

    def drop(self) -> None:
        """Close the connections of all machines. They ask again."""
        for each in tuple(self._connections):
            each.close()

    def _admit(self, transport: MessageTransport, about: bytes, address: str) -> bytes:
        join = read_about(about, Join)
        host = join.host or address.rpartition(":")[0].strip("[]")
        if (facts := self._facts()) is None:
            raise Disconnected("Ray does not run on the head; it is started again")
        if join.front_end and (other := self._front_end) is not None:
            raise BadConfig(f"the cluster has a front end already, at {other}; end it before you start another one")
        _hold(transport)
        found = Admitted(host, facts, self._authority.issue(host, join.addresses), self._authority.clock())
        self._announce(f"{host} joins{' with the front end' if join.front_end else ''}")
        if join.front_end:
            self._front_end, self.had_front_end = host, True
        self._connections.add(transport)
        transport.closed.add_done_callback(lambda closed: self._left(transport, closed, front_end=join.front_end))
        return msgspec.msgpack.encode(found)

    def _left(self, transport: MessageTransport, closed: asyncio.Future[None], *, front_end: bool) -> None:
        closed.cancelled() or closed.exception()  # it has left in any way
        self._connections.discard(transport)
        if front_end:
            self._front_end = None


def _hold(transport: MessageTransport) -> None:
    """Keep a connection open. Nothing follows the Welcome: a message ends it."""
    keep_alive(transport.extra("socket"))
    transport.max_bytes, transport.on_message = 0, lambda data: transport.close()


async def ask_head(
    address: Address, token: bytes, host: str, *, front_end: bool = False, version: str | None = None
) -> tuple[Admitted, MessageTransport]:
    """Ask a head to join.

    Args:
        host: The machine's address for others; empty: the one that the head sees.
        front_end: Be the front end until the connection is closed.
        version: For tests; None is the installed one.

    Raises:
        Unauthorized: The tokens differ.
        BadConfig: The versions differ, or there is another front end.
        Disconnected: There is no head at the address, or its Ray does not run.

    Returns:
        Its answer, and the connection, which stays open as long as the head and its Ray.
    """
    about = msgspec.msgpack.encode(Join(host, own_addresses(), front_end))
    secret = derived(token, "head").encode()
    try:
        transport, _, found = await connect(
            address, protocol(_SERVER, version), secret, Admitted, tls=True, about=about
        )
    except Unauthorized as error:
        raise Unauthorized(f"the head at {address} has another token; copy its token file to this machine") from error
    except Disconnected as error:
        if not isinstance(error.__cause__, OSError):  # something answers there
            raise
        raise Disconnected(f"{error}; `vlora cluster up` starts a head") from error
    _hold(transport)
    return found, transport


def check_clock(found: Admitted, clock: datetime.datetime | None = None) -> None:
    """Raises BadConfig if the certificates are not valid by this machine's clock: Ray would refuse them without a line.

    Args:
        clock: The time here; None: the present one.
    """
    clock = clock or utc_now()
    begin, end = found.certificates.validity
    if begin <= clock <= end:
        return
    raise BadConfig(
        f"the clock of this machine shows {clock:{_SHOWN_TIME}} UTC, that of the head {found.clock:{_SHOWN_TIME}} UTC, "
        f"so the cluster's certificates {'are not valid yet' if clock < begin else 'have expired'} here; set the wrong "
        "clock, for example with NTP"
    )


def check_versions(facts: Facts, ray: str) -> None:
    """Raises BadConfig if Ray or Python differ from the head's. vlora's own are compared by the handshake."""
    if ray != facts.ray:
        raise BadConfig(
            f"Ray {ray} is installed here, {facts.ray} on the head; install the same: pip install 'ray=={facts.ray}'"
        )
    if python_version() != facts.python:
        raise BadConfig(
            f"Python {python_version()} runs here, and {facts.python} on the head; Ray needs the same on all machines"
        )


def check_content(facts: Facts, resolve: Callable[[str], str]) -> None:
    """Compare the model and the adapters of this machine with the head's.

    Args:
        resolve: The path of a model here.

    Raises:
        BadConfig: One is missing or differs.
    """
    try:
        found = model_digest(resolve(facts.model))
    except VLoraError as error:
        raise BadConfig(f"the model is missing here: {error}; copy the head's folder") from error
    if found != facts.model_digest:
        raise BadConfig(
            f"the model {facts.model} has other files here than on the head; copy the head's, or use the same revision"
        )
    for name, adapter in facts.adapters.items():
        try:
            digest = adapter_digest(adapter.path)
        except VLoraError as error:
            raise BadConfig(f"adapter {name!r} is missing here: {error}; copy the head's folder") from error
        if digest != adapter.digest:
            raise BadConfig(f"adapter {name!r} in {adapter.path} has other content than on the head; copy the head's")
