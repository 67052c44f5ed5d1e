"""The executor's process: takes what clients sent, chooses, computes, answers.

One thread reads, computes and writes; on one machine a call then costs two messages of some bytes and no change of
threads. Handshakes run in threads of their own, so that a slow one delays no other client.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from vlora.config import Token
from vlora.errors import BadRequest
from vlora.split import frames, transport
from vlora.split.admission import Admission, Limits
from vlora.split.batching import Call, CallQueue
from vlora.split.executor import BaseExecutor
from vlora.split.frames import DTYPES, CallHead, Direction, ReplyHead, Status
from vlora.split.peer import Peer, ReceivedCall

log = logging.getLogger(__name__)

_MAX_HANDSHAKES = 32  # of one listener: peers over TCP must not keep clients of a Unix socket out
_FINE_S = 0.02  # epoll rounds waits up to milliseconds, select does not
_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_TICK_S = 0.5  # how often stop requests, stalled peers, removed tokens and free resources are looked for
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Stopped(Exception):
    """Raised by an executor that computes no more: the server ends as if it had been stopped."""


class _Listener(NamedTuple):
    """A listening socket. handshakes: its free places of connections that are not authenticated yet."""

    sock: socket.socket
    handshakes: threading.BoundedSemaphore


@dataclasses.dataclass
class _Pending:
    """A call that is not answered yet.

    outputs: its results: in the client's shared memory, or elsewhere once a piece of it was computed.
    """

    head: CallHead
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] | None


class BaseServer:
    """Serves one executor to clients until it is stopped.

    Attributes:
        admission: Of clients, with their tokens.
        num_batches: Number of products so far; several for a large call beside small ones.
    """

    def __init__(
        self,
        executor: BaseExecutor,
        queue: CallQueue[Peer],
        limits: Limits,
        *,
        tokens: Sequence[Token] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.num_batches = 0
        self.num_calls = 0
        self.admission = Admission(executor, limits, tokens, tls)
        self._executor = executor
        self._queue = queue
        self._limits = limits
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        self._listeners: dict[int, _Listener] = {}
        self._paused: list[socket.socket] = []  # listeners that wait for free resources
        self._peers: dict[int, Peer] = {}
        self._pending: dict[Peer, _Pending] = {}
        self._admitted: deque[Peer] = deque()
        self._computed: Sequence[Call[Peer]] = ()  # of the present product
        self._closing = threading.Lock()
        self._closed = False

    @property
    def num_clients(self) -> int:
        return len(self._peers)

    def listen(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._listeners[sock.fileno()] = _Listener(sock, threading.BoundedSemaphore(_MAX_HANDSHAKES))
        self._poll.register(sock, select.EPOLLIN)

    def run(self, stopped: Callable[[], bool]) -> None:
        """Serve until `stopped` returns true, then close all connections."""
        try:
            with contextlib.suppress(Stopped):
                self._run(stopped)
        finally:
            self._close()

    def wake(self) -> None:
        """Let `run` call `stopped` soon. May be called from any thread."""
        with self._closing:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def attend(self) -> bool:
        """Admit clients during a product. An executor calls this in the server's thread while the product waits.

        Returns:
            Whether one of the product's clients is still connected.
        """
        gone: set[int] = set()
        for descriptor, events in self._poll.poll(0):
            if descriptor == self._wake or descriptor in self._listeners:
                self._admit(descriptor)
            elif events & _GONE:
                gone.add(descriptor)
        return any(call.client.sock.fileno() not in gone for call in self._computed)

    def _run(self, stopped: Callable[[], bool]) -> None:
        checked = 0.0
        batch: Sequence[Call[Peer]] = ()
        while not stopped():
            wait_s = self._queue.wait_s(time.monotonic())
            if batch:
                wait_s = 0.0  # the queue is to know which calls came during the product
            self._take(_TICK_S if wait_s is None else wait_s)
            now = time.monotonic()
            if batch := self._queue.next(now):
                self._compute(batch)
            if now - checked > _TICK_S:
                checked = now
                self._drop_unwanted(now)
                self._resume_listeners()

    # -- connections --------------------------------------------------------------------------------------------------

    def _take(self, timeout_s: float) -> None:
        if 0 < timeout_s < _FINE_S:
            select.select([self._poll], [], [], timeout_s)
            timeout_s = 0
        for descriptor, events in self._poll.poll(timeout_s):
            if descriptor == self._wake or descriptor in self._listeners:
                self._admit(descriptor)
            elif (peer := self._peers.get(descriptor)) is not None:
                self._serve(peer, events)

    def _admit(self, descriptor: int) -> None:
        if descriptor == self._wake:
            os.eventfd_read(self._wake)
            self._add_admitted()
        else:
            self._accept(self._listeners[descriptor])

    def _accept(self, listener: _Listener) -> None:
        try:
            sock, _ = listener.sock.accept()
        except OSError as error:
            if error.errno in _NO_RESOURCES:
                self._pause(listener.sock, error)
            return  # otherwise the client is gone already
        if not listener.handshakes.acquire(blocking=False):
            log.warning("a connection was closed: %d others are not authenticated yet", _MAX_HANDSHAKES)
            sock.close()
            return
        thread = threading.Thread(
            target=self._admit_one, args=(sock, listener), name="vlora-base-handshake", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the system's limit on threads
            log.warning("a connection was closed: %s", error)
            listener.handshakes.release()
            sock.close()

    def _pause(self, sock: socket.socket, error: OSError) -> None:
        """Accept nothing for a while: the connection stays in the kernel's queue, and each poll would report it."""
        log.warning("no connection can be accepted at present: %s", error.strerror)
        self._poll.unregister(sock)
        self._paused.append(sock)

    def _resume_listeners(self) -> None:
        for sock in self._paused:
            self._poll.register(sock, select.EPOLLIN)
        self._paused.clear()

    def _admit_one(self, sock: socket.socket, listener: _Listener) -> None:
        try:
            peer = self.admission.admit(sock)
        finally:
            listener.handshakes.release()
        if peer is None:
            return
        with self._closing:
            if self._closed:
                peer.sock.close()
            else:
                self._admitted.append(peer)
                os.eventfd_write(self._wake, 1)

    def _add_admitted(self) -> None:
        while self._admitted:
            peer = self._admitted.popleft()
            self._peers[peer.sock.fileno()] = peer
            self._queue.join(peer)
            self._poll.register(peer.sock, select.EPOLLIN | select.EPOLLRDHUP)
            log.info("%s connected", peer.name)

    def _serve(self, peer: Peer, events: int) -> None:
        """Read from and write to a client. An error ends its connection and no other one."""
        now = time.monotonic()
        try:
            if events & select.EPOLLOUT:
                peer.flush(now)
                self._watch(peer)
            if events & ~select.EPOLLOUT and (received := peer.read(now)) is not None:
                head = received.head
                self._pending[peer] = self._checked(peer, received)
                key, backward = (head.direction, head.group, head.mask), head.direction == Direction.BACKWARD
                self._queue.add(Call(peer, key, head.rows, now, backward=backward))
        except BadRequest as error:
            self._refuse(peer, error)
        except OSError as error:
            self._drop(peer, _broken(error))

    def _refuse(self, peer: Peer, error: BadRequest) -> None:
        """Send the reason, if the connection takes it, and close."""
        reason = str(error).encode()
        with contextlib.suppress(OSError):
            peer.write(time.monotonic(), ReplyHead(0, Status.REFUSED, len(reason)).pack(), reason)
            peer.discard()
        self._drop(peer, str(error))

    def _drop(self, peer: Peer, reason: str) -> None:
        """Close a connection and forget its call. reason: "" for a client that is done."""
        if reason:
            log.warning("%s: %s; its connection is closed", peer.name, reason)
        else:
            log.info("%s disconnected", peer.name)
        descriptor = peer.sock.fileno()
        self._poll.unregister(descriptor)
        self.admission.client_slots.release()  # before the client is no longer counted
        del self._peers[descriptor]
        self._queue.leave(peer)
        self._pending.pop(peer, None)
        peer.sock.close()

    def _drop_unwanted(self, now: float) -> None:
        """Drop stalled clients, and those with a token that has expired or was removed."""
        for peer in list(self._peers.values()):
            if not peer.is_permitted():
                self._drop(peer, "its token has expired or been removed")
            elif peer.stalled_s(now) > self._limits.stall_s:
                self._drop(peer, f"a call or its reply was incomplete for {self._limits.stall_s:g} s")

    def _watch(self, peer: Peer) -> None:
        self._poll.modify(peer.sock, select.EPOLLIN | select.EPOLLRDHUP | (select.EPOLLOUT if peer.has_unsent else 0))

    def _close(self) -> None:
        with self._closing:
            self._closed = True
            os.close(self._wake)
        for peer in (*self._peers.values(), *self._admitted):
            peer.sock.close()
        for listener in self._listeners.values():
            transport.close_listener(listener.sock)
        self._poll.close()

    # -- calls --------------------------------------------------------------------------------------------------------

    def _checked(self, peer: Peer, received: ReceivedCall) -> _Pending:
        """The call with its tensors. Raises BadRequest for calls that cannot be computed."""
        head, groups, limits = received.head, self._executor.groups, self._limits
        if head.dtype >= len(DTYPES) or DTYPES[head.dtype] != str(self._executor.dtype).removeprefix("torch."):
            raise BadRequest(f"a call has dtype {head.dtype}; the base has {self._executor.dtype}")
        if head.direction not in tuple(Direction):
            raise BadRequest(f"a call has direction {head.direction}; it must be 1 to {len(Direction)}")
        if head.group >= len(groups) or not 0 < head.mask < 1 << len(groups[head.group]):
            raise BadRequest(f"a call selects layers {head.mask:#x} of group {head.group}; the base has no such layers")
        if not 0 < head.rows <= limits.max_rows:
            raise BadRequest(f"a call has {head.rows} rows; it must have 1 to {limits.max_rows}")
        given, made = frames.widths(groups[head.group], head.direction, head.mask)
        if head.width != sum(given):
            raise BadRequest(f"a call has rows of {head.width} values; these layers take {sum(given)}")
        row_bytes = head.rows * self._executor.dtype.itemsize
        if row_bytes * max(sum(given), sum(made)) > limits.half_bytes:
            raise BadRequest(f"a call of {head.rows} rows exceeds {limits.half_bytes} bytes")
        dtype, outputs = self._executor.dtype, None
        if peer.slot is not None:
            memory = peer.slot
            outputs = transport.carve(memory[limits.half_bytes :], dtype, head.rows, made)
        elif received.body is not None and len(received.body) == row_bytes * sum(given):
            memory = torch.frombuffer(received.body, dtype=torch.uint8)
        else:
            raise BadRequest("a call's tensors do not have the size of its head")
        return _Pending(head, transport.carve(memory, dtype, head.rows, given), outputs)

    def _compute(self, batch: Sequence[Call[Peer]]) -> None:
        """Compute calls of one key, and answer them. Calls that fail, such as for lack of memory, are refused."""
        busy_s = self._executor.busy_s
        self._computed = batch
        try:
            answers = self._products(batch)
        except (RuntimeError, MemoryError) as error:
            for call in batch:
                self._refuse(call.client, BadRequest(f"the product failed: {str(error).partition(chr(10))[0]}"))
            return
        # Without the time that an executor waited for its thread, on which later products do not depend.
        self._queue.computed(batch, self._executor.busy_s - busy_s, time.monotonic())
        self.num_batches += 1
        for call, answer in zip(batch, answers, strict=True):
            if call.first + call.rows == self._pending[call.client].head.rows:
                self.num_calls += 1
                self._answer(call.client, answer)

    def _products(self, batch: Sequence[Call[Peer]]) -> Sequence[Sequence[torch.Tensor]]:
        """The results of each call; those of a piece are among the others of its call."""
        if len(batch) == 1:
            return [self._one_product(batch[0])]
        head = self._pending[batch[0].client].head
        given = [self._pending[call.client].inputs for call in batch]
        inputs = [torch.cat(parts) for parts in zip(*given, strict=True)]
        made = self._executor.compute(head.direction, head.group, head.mask, inputs)
        rows = [call.rows for call in batch]
        return list(zip(*(each.split(rows) for each in made), strict=True))

    def _one_product(self, call: Call[Peer]) -> Sequence[torch.Tensor]:
        pending = self._pending[call.client]
        head, inputs = pending.head, pending.inputs
        if call.rows == head.rows:
            return self._executor.compute(head.direction, head.group, head.mask, inputs, pending.outputs)
        if pending.outputs is None:
            _, made = frames.widths(self._executor.groups[head.group], head.direction, head.mask)
            pending.outputs = [torch.empty(head.rows, width, dtype=self._executor.dtype) for width in made]
        rows = slice(call.first, call.first + call.rows)
        self._executor.compute(
            head.direction, head.group, head.mask, [x[rows] for x in inputs], [y[rows] for y in pending.outputs]
        )
        return pending.outputs

    def _answer(self, peer: Peer, tensors: Sequence[torch.Tensor]) -> None:
        pending, now = self._pending.pop(peer), time.monotonic()
        head, places = pending.head, pending.outputs
        peer.waits = False
        try:
            if peer.slot is None or places is None:
                parts = [transport.as_bytes(each.cpu()) for each in tensors]
                peer.write(now, ReplyHead(head.number, Status.OK, sum(map(len, parts))).pack(), *parts)
            else:
                for place, each in zip(places, tensors, strict=True):
                    if place.data_ptr() != each.data_ptr():
                        place.copy_(each)
                peer.write(now, ReplyHead(head.number, Status.OK, 0).pack())
            if peer.has_unsent:
                self._watch(peer)
        except OSError as error:
            self._drop(peer, _broken(error))


def _broken(error: OSError) -> str:
    """Why a connection ended; "" for a client that is done."""
    return str(error) if error.errno is None else f"the connection broke ({error.strerror})"
