"""Listeners of RPyC and HTTP, and their limits: connections, message bytes, quotas."""

from __future__ import annotations

import contextlib
import math
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from vlora.client.sockets import shut_down
from vlora.config import Token
from vlora.errors import BadConfig, RateLimited
from vlora.rate_limits import Bucket

_SPARE = 128  # descriptors for the engine's socket, files and fetched images
_MAX_CONNECTIONS = 2048
_MIN_CONNECTIONS = 8
_PERIODS = {"requests_per_minute": 60.0, "tokens_per_minute": 60.0, "tokens_per_day": 86_400.0}


def connection_share() -> int:
    """The connections that RPyC or HTTP may keep: well below the process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(_MIN_CONNECTIONS, min(_MAX_CONNECTIONS, (soft - _SPARE) // 3))


@contextlib.contextmanager
def listening_at(address: str, option: str) -> Iterator[None]:
    """Convert an OSError of a listener into BadConfig. option: of the command, which sets the port."""
    try:
        yield
    except OSError as error:
        raise BadConfig(f"cannot listen on {address}: {error.strerror}; choose another {option}") from error


def bound_socket(host: str, port: int, option: str) -> socket.socket:
    """A socket that is bound to an address, and does not listen yet. Raises BadConfig."""
    with contextlib.ExitStack() as at_end, listening_at(f"{host}:{port}", option):
        # The protocol is given explicitly: asyncio sets TCP_NODELAY only when it sees TCP here. Without it, every
        # response of two packets (header, body) waits 40 ms for the client's acknowledgement.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = at_end.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        at_end.pop_all()
        return made


class PeerSocket:
    """One connection: its socket, which a TLS handshake exchanges, and whether it is authenticated."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.authenticated = False
        self.ended = False

    def end(self) -> None:
        """Shut the connection down; its reader thread closes it."""
        self.ended = True  # for a reader that exchanges the socket now: the former one has no descriptor left
        shut_down(self.sock)


class ConnectionLimits:
    """The open connections, oldest first. Thread-safe."""

    def __init__(self, max_connections: int, max_unauthenticated: int) -> None:
        self._max_connections = max_connections
        self._max_unauthenticated = max_unauthenticated
        self._open: dict[PeerSocket, None] = {}
        self._lock = threading.Lock()

    def admit(self, peer: PeerSocket) -> bool:
        """Add a connection; at a limit, end the oldest unauthenticated one. False when all are authenticated."""
        with self._lock:
            unauthenticated = [other for other in self._open if not other.authenticated]
            if len(self._open) >= self._max_connections and not unauthenticated:
                return False
            if len(self._open) >= self._max_connections or len(unauthenticated) >= self._max_unauthenticated:
                unauthenticated[0].end()
                del self._open[unauthenticated[0]]
            self._open[peer] = None
            return True

    def remove(self, peer: PeerSocket) -> None:
        """Remove a closed connection. Connections that `admit` ended are ignored."""
        with self._lock:
            self._open.pop(peer, None)


class ByteBudget:
    """Received bytes of requests that have not ended. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        return self._used

    def reserve(self, num_bytes: int, wait_s: float = 0.0) -> bool:
        """Reserve bytes, waiting up to `wait_s` for room. Returns False, with nothing reserved, when there is none."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._used + num_bytes <= self.limit, wait_s):
                return False
            self._used += num_bytes
            return True

    def release(self, num_bytes: int) -> None:
        with self._changed:
            self._used -= num_bytes
            assert self._used >= 0, "more bytes were released than reserved"
            self._changed.notify_all()


class ByteCharge:
    """The bytes that one message has reserved in a budget. Used from one thread at a time."""

    def __init__(self, budget: ByteBudget, num_bytes: int = 0) -> None:
        self._budget = budget
        self.num_bytes = num_bytes

    def add(self, num_bytes: int, wait_s: float) -> bool:
        """Reserve more bytes, waiting up to `wait_s` for room. Returns False, with nothing reserved, without room."""
        if not self._budget.reserve(num_bytes, wait_s):
            return False
        self.num_bytes += num_bytes
        return True

    def shrink_to(self, num_bytes: int) -> None:
        """Release the bytes above `num_bytes`."""
        spare, self.num_bytes = self.num_bytes - num_bytes, num_bytes
        self._budget.release(spare)

    def move(self) -> ByteCharge:
        """Move the bytes to a new charge, which must be released instead of this one."""
        moved = ByteCharge(self._budget, self.num_bytes)
        self.num_bytes = 0
        return moved

    def release(self) -> None:
        """Release all bytes. Has no effect when they were released or moved already."""
        if self.num_bytes:
            self.shrink_to(0)


class Quotas:
    """What the holders of tokens may use in a time, counted in memory. Used from one event loop."""

    def __init__(self, tokens: Sequence[Token], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._buckets: dict[str, dict[str, Bucket]] = {}
        self.replace(tokens)

    def replace(self, tokens: Sequence[Token]) -> None:
        """Use the quotas of other tokens. Quotas that are not changed keep their counts."""
        before, self._buckets = self._buckets, {}
        for token in tokens:
            for quota, period_s in _PERIODS.items():
                if (limit := getattr(token, quota)) is not None:
                    kept = before.get(token.name, {}).get(quota)
                    bucket = kept if kept is not None and kept.limit == limit else Bucket(limit, period_s)
                    self._buckets.setdefault(token.name, {})[quota] = bucket

    def count_request(self, tenant: str | None) -> None:
        """Count a request. Raises RateLimited if none is left, or no token."""
        now, buckets = self.clock(), self._of(tenant)
        for quota, bucket in buckets.items():
            if (wait_s := bucket.wait_s(now)) > 0:
                text = f"{bucket.limit} {quota.replace('_', ' ')}"
                why = f"{tenant!r} has used its quota of {text}; try again in {math.ceil(wait_s)} s"
                raise RateLimited(why, wait_s)
        if "requests_per_minute" in buckets:
            buckets["requests_per_minute"].take(1, now)

    def count_tokens(self, tenant: str | None, number: int) -> None:
        """Count tokens of a prompt or an answer, also above the quotas: later requests then wait."""
        for quota, bucket in self._of(tenant).items():
            if quota.startswith("tokens"):
                bucket.take(number, self.clock())

    def headers(self, tenant: str | None) -> list[tuple[bytes, bytes]]:
        """OpenAI's headers about requests and tokens; of several quotas the one with the least units left."""
        now, found = self.clock(), {}
        for quota, bucket in sorted(self._of(tenant).items(), key=lambda item: -item[1].left(now)):
            reset = f"{max(0.0, bucket.full_at - now):.3f}s"
            for field, value in (("limit", bucket.limit), ("remaining", bucket.left(now)), ("reset", reset)):
                found[f"x-ratelimit-{field}-{quota.partition('_')[0]}".encode()] = str(value).encode()
        return list(found.items())

    def _of(self, tenant: str | None) -> dict[str, Bucket]:
        return {} if tenant is None else self._buckets.get(tenant, {})
