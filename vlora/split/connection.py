"""A client's connections to base executors. Calls are pure functions, so one that failed is repeated."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Generator, Sequence
from typing import Protocol

import msgspec
import torch

from vlora.errors import BadConfig, BadRequest, Disconnected, OverCapacity, Unauthorized
from vlora.split import frames, transport
from vlora.split.frames import (
    DTYPES,
    PROTOCOL,
    REPLY_BYTES,
    BaseInfo,
    CallHead,
    ClientInfo,
    Direction,
    Group,
    ReplyHead,
    Status,
)
from vlora.split.peer import SMALL_BYTES
from vlora.wire import framing, handshake
from vlora.wire.address import Address

_RETRY_S = 0.1
_MAX_REPEATS = 3
"""Of one call. An executor that dies on a call would otherwise be given it again whenever it is restarted."""


class LayerCalls(Protocol):
    """Products with the layers of a base, wherever they are computed."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights, and of all tensors of a call."""

    @property
    def groups(self) -> Sequence[Group]:
        """The layers."""

    def call(
        self, direction: Direction, group: int, mask: int, inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """As `BaseExecutor.compute`, for any number of rows in host memory."""

    def close(self) -> None:
        """Close all connections."""


class BaseConnection:
    """One connection to one executor, reopened when it breaks. Used by one call at a time."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        patience_s: float = 60.0,
    ) -> None:
        """Connect and authenticate. Arguments and exceptions are those of `connect`."""
        self.num_calls = 0
        self.num_repeated = 0
        self._address = Address.parse(address)
        self._token = token
        self._tls = tls
        self._patience_s = patience_s
        self._number = 0
        self._sock: socket.socket | None = None
        self._slot: torch.Tensor | None = None
        self._closed = False
        self.info = self._open("", time.monotonic() + patience_s)
        self.dtype: torch.dtype = getattr(torch, self.info.dtype)

    @property
    def groups(self) -> Sequence[Group]:
        return self.info.groups

    def close(self) -> None:
        """Close for good: later calls, and one that another thread waits for, raise Disconnected."""
        self._closed = True
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connection; the next call opens another one."""
        sock, self._sock = self._sock, None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads from it
            sock.close()

    # -- handshake ----------------------------------------------------------------------------------------------------

    def _open(self, fingerprint: str, deadline: float) -> BaseInfo:
        """Connect. fingerprint: of the base that is expected; "" for any. Raises VLoraError."""
        try:
            sock = transport.open_connection(self._address, self._tls, max(_RETRY_S, deadline - time.monotonic()))
        except ssl.SSLError as error:
            raise Disconnected(
                f"no TLS connection to the base executor at {self._address}: {transport.tls_reason(error)}; give the "
                "CA of its certificate (tls=) and a host that the certificate names, or no tls if it has none"
            ) from error
        except OSError as error:
            raise Disconnected(
                f"no base executor at {self._address}: {error.strerror or error}; start one with vlora base serve"
            ) from error
        try:
            return self._introduce(sock, fingerprint, deadline)
        except BaseException as error:
            sock.close()
            if isinstance(error, (OSError, *handshake.UNREADABLE)):
                raise Disconnected(
                    f"the handshake with {self._address} failed: {error}; it may be another kind of server, or "
                    "another version of V-LoRA" + ("" if self._tls or self._address.path else ", or require TLS (tls=)")
                ) from error
            if isinstance(error, Unauthorized) and self._token is None:
                raise Unauthorized(f"{error}; pass it as connect(..., token=...)") from error
            raise

    def _introduce(self, sock: socket.socket, fingerprint: str, deadline: float) -> BaseInfo:
        local = bool(self._address.path) and sys.platform == "linux"
        client = ClientInfo(fingerprint, f"{socket.gethostname()}:{os.getpid()}", local)
        secret = None if self._token is None else self._token.encode()
        descriptors: list[int] = []
        try:
            welcome = handshake.run(
                handshake.introduce(PROTOCOL, secret, peer=str(self._address), about=msgspec.msgpack.encode(client)),
                lambda data: framing.send(sock, data),
                lambda: framing.receive(sock, handshake.MAX_WELCOME_BYTES, deadline, descriptors if local else None),
            )
            info = msgspec.msgpack.decode(welcome, type=BaseInfo)
            if info.dtype not in DTYPES:
                raise BadConfig(f"the base at {self._address} has type {info.dtype}; update this client")
            self._slot = transport.map_memory(descriptors[0], 2 * info.half_bytes) if descriptors else None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        sock.settimeout(self._patience_s)
        self._sock = sock
        return info

    # -- calls --------------------------------------------------------------------------------------------------------

    def rows_per_call(self, direction: Direction, group: int, mask: int) -> int:
        widest = max(map(sum, frames.widths(self.groups[group], direction, mask)))
        return max(1, min(self.info.max_rows, self.info.half_bytes // (widest * self.dtype.itemsize)))

    def exchange(
        self, direction: Direction, group: int, mask: int, inputs: Sequence[torch.Tensor]
    ) -> Generator[None, None, Sequence[torch.Tensor]]:
        """One call: sends it, yields, so that other executors can work too, and returns the result.

        It is repeated on a new connection if this one breaks.

        Raises:
            Disconnected, BadRequest, BadConfig: As `ExecutorCalls.call`.
        """
        deadline = time.monotonic() + self._patience_s
        num_repeats, has_yielded = 0, False
        while True:
            try:
                self.send(direction, group, mask, inputs)
                if not has_yielded:
                    has_yielded = True
                    yield
                    deadline = time.monotonic() + self._patience_s  # others may have been waited for meanwhile
                return self.receive(direction, group, mask, len(inputs[0]))
            except OSError as error:
                self.disconnect()
                self._check_open(error)
                if num_repeats == _MAX_REPEATS:
                    raise Disconnected(
                        f"the base executor at {self._address} failed {_MAX_REPEATS + 1} times during one call "
                        f"({error}); see its log for the cause, and run the step again"
                    ) from error
                self._reopen(deadline, error)
                num_repeats += 1
                self.num_repeated += 1

    def _check_open(self, cause: OSError) -> None:
        """Raise Disconnected after `close`."""
        if self._closed:
            self.disconnect()  # also a connection that was opened while another thread closed this one
            raise Disconnected(
                f"the connection to the base executor at {self._address} is closed; connect and wrap the model again"
            ) from cause

    def _reopen(self, deadline: float, cause: OSError) -> None:
        """Connect again until the deadline. Raises Disconnected after it, BadConfig for another base model."""
        while time.monotonic() < deadline:
            try:
                self._open(self.info.fingerprint, deadline)
            except (Disconnected, OverCapacity):  # the executor may not have noticed yet that this client left
                self._check_open(cause)
                time.sleep(_RETRY_S)
            else:
                self._check_open(cause)
                return
        raise Disconnected(
            f"the base executor at {self._address} does not answer for {self._patience_s:g} s ({cause}); "
            "restart it, and run the step again"
        ) from cause

    def _connected(self) -> socket.socket:
        """Raises ConnectionError."""
        sock = self._sock
        if sock is None:
            raise ConnectionError("the connection is closed")
        return sock

    def send(self, direction: Direction, group: int, mask: int, inputs: Sequence[torch.Tensor]) -> None:
        """Send a call, to be followed by `receive`. Raises OSError."""
        sock = self._connected()
        self._number = (self._number + 1) & 0xFFFFFFFF
        rows, widths = len(inputs[0]), [each.shape[1] for each in inputs]
        size = sum(each.nbytes for each in inputs)
        in_slot = self._slot is not None
        head = CallHead(
            self._number,
            direction,
            DTYPES.index(self.info.dtype),
            group,
            mask,
            rows,
            sum(widths),
            0 if in_slot else size,
        ).pack()
        if self._slot is not None:
            for place, each in zip(transport.carve(self._slot, self.dtype, rows, widths), inputs, strict=True):
                place.copy_(each)
            sock.sendall(head)
        elif size <= SMALL_BYTES:
            sock.sendall(head + b"".join(map(transport.as_bytes, inputs)))
        else:
            sock.sendall(head)
            for each in inputs:
                sock.sendall(transport.as_bytes(each))

    def receive(self, direction: Direction, group: int, mask: int, rows: int) -> Sequence[torch.Tensor]:
        """The result of the call that was sent. Raises OSError, BadRequest."""
        sock = self._connected()
        head = ReplyHead.unpack(framing.receive_exactly(sock, REPLY_BYTES))
        if head.status == Status.REFUSED:
            reason = framing.receive_exactly(sock, min(head.num_bytes, 65_536)).decode(errors="replace")
            self.disconnect()
            raise BadRequest(f"the base executor at {self._address} refused a call: {reason}")
        _, widths = frames.widths(self.groups[group], direction, mask)
        size = rows * sum(widths) * self.dtype.itemsize
        if head.number != self._number or head.num_bytes not in ((0,) if self._slot is not None else (size,)):
            raise ConnectionError("the reply is not that of the call")
        self.num_calls += 1
        if self._slot is not None:
            half = self._slot[self.info.half_bytes :]
            return [each.clone() for each in transport.carve(half, self.dtype, rows, widths)]
        memory = torch.empty(size, dtype=torch.uint8)
        framing.receive_into(sock, transport.as_bytes(memory))
        return transport.carve(memory, self.dtype, rows, widths)


class ExecutorCalls:
    """Calls to one executor, or to all shards of a base at once (Symbiosis, section 3.3).

    Shards do not know of each other: their outputs are joined, and their gradients summed. Thread-safe: calls take
    turns.
    """

    def __init__(self, shards: Sequence[BaseConnection]) -> None:
        """shards: in the order of their outputs."""
        self.dtype = shards[0].dtype
        self.groups = shards[0].groups
        if len(shards) > 1:
            self.groups = [
                tuple(msgspec.structs.replace(layer, first=0, last=layer.d_out, digest=b"") for layer in group)
                for group in self.groups
            ]
        self._shards = shards
        self._lock = threading.Lock()

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def call(
        self, direction: Direction, group: int, mask: int, inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Compute products, in several calls if there are more rows than one may have.

        Raises:
            Disconnected: An executor did not come back in time, failed at each repetition, or `close` was called.
            BadRequest: An executor refused the call.
            BadConfig: Another base model is served at the address now.
        """
        limit = min(shard.rows_per_call(direction, group, mask) for shard in self._shards)
        pieces = zip(*(each.split(limit) for each in inputs), strict=True)
        with self._lock:
            return _joined([self._call(direction, group, mask, rows) for rows in pieces], 0)

    def _call(
        self, direction: Direction, group: int, mask: int, inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        exchanges = []
        for shard in self._shards:
            own = inputs
            if direction == Direction.BACKWARD:  # the gradients of its outputs
                layers = frames.selected(shard.groups[group], mask)
                own = [dy[:, one.first : one.last].contiguous() for dy, one in zip(inputs, layers, strict=True)]
            exchanges.append(shard.exchange(direction, group, mask, own))
        for exchange in exchanges:
            next(exchange)
        made = [_result(exchange) for exchange in exchanges]
        if direction != Direction.BACKWARD:
            return _joined(made, 1)
        total = made[0][0]
        for (part,) in made[1:]:
            total += part
        return [total]


def _result(exchange: Generator[None, None, Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    try:
        next(exchange)
    except StopIteration as end:
        found: Sequence[torch.Tensor] = end.value
        return found
    raise AssertionError("an exchange yields once")


def _joined(parts: Sequence[Sequence[torch.Tensor]], dim: int) -> Sequence[torch.Tensor]:
    return parts[0] if len(parts) == 1 else [torch.cat(each, dim) for each in zip(*parts, strict=True)]
