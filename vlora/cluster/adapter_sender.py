"""The front end's end of shipped adapters: sends replicas the files that their machines lack."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec

from vlora.adapter_files import ADAPTER_FILES, CONFIG_FILE, content_hash, other_weights
from vlora.cluster.adapter_messages import Files, Finish, Hold, Offer, Piece, ShippedFile
from vlora.cluster.adapter_state import DesiredAdapter
from vlora.engine.ipc.client import EngineClient
from vlora.engine.ipc.messages import Reply
from vlora.errors import Aborted, BadAdapter

PIECE_BYTES = 128 << 10
WINDOW = 4
"""Pieces under way to a replica. A request waits behind them at most: 5 ms on a line of 1 Gbit/s."""

MAX_AT_ONCE = 4  # adapters that are being sent
ANSWER_S, BUSY_S, LOOK_S = 300.0, 60.0, 0.2  # of one message; for another process of the machine; between two looks
_MAX_KNOWN = 4096  # contents


class ShippingLimits(NamedTuple):
    """adapter_bytes: of one adapter that is sent. total_bytes: of all received ones on a machine."""

    adapter_bytes: int = 4 << 30
    total_bytes: int = 20 << 30


class AdapterContent(NamedTuple):
    """The files of a folder. version: their hash."""

    version: str
    files: tuple[ShippedFile, ...]


_Stamp = tuple[tuple[str, int, int, int, int], ...]


class AdapterSender:
    """Reads adapters of the front end's machine, each once until its files change."""

    def __init__(self, limits: ShippingLimits) -> None:
        self.limits = limits
        self.sending = asyncio.Semaphore(MAX_AT_ONCE)
        self._known: dict[str, tuple[_Stamp, AdapterContent]] = {}
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by path

    async def content_of(self, path: str) -> AdapterContent | None:
        """The content of a folder; None if there is no adapter. Raises BadAdapter if it cannot be read."""
        lock = self._reading.setdefault(path, asyncio.Lock())
        async with lock:  # several replicas may ask for the same files at a time
            return await asyncio.to_thread(self._read, path)

    def _read(self, path: str) -> AdapterContent | None:
        try:
            stamp = _stamp_of(Path(path))
            if not any(name == CONFIG_FILE for name, *_ in stamp):
                return None
            if problem := other_weights(Path(path)):
                raise BadAdapter(f"{path}: {problem}")
            if (known := self._known.get(path)) is not None and known[0] == stamp:
                return known[1]
            files = tuple(ShippedFile(name, size) for name, size, *_ in stamp)
            found = AdapterContent(content_hash(Path(path)), files)
            if _stamp_of(Path(path)) != stamp:
                raise BadAdapter(f"{path} was changed while it was read; try again once its files are complete")
        except OSError as error:
            raise BadAdapter(f"{error.filename or path} cannot be read on the front end: {error.strerror}") from error
        except ValueError as error:  # of a path with a null character
            raise BadAdapter(f"{path!r} cannot be read on the front end: {error}") from error
        while len(self._known) >= _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[path] = stamp, found
        return found


class ReplicaFiles:
    """The files of the adapters of one replica.

    Attributes:
        progress: How far contents are that are being sent.
    """

    def __init__(self, sender: AdapterSender, client: EngineClient) -> None:
        self.progress: dict[str, str] = {}
        self._sender = sender
        self._client = client
        self.num_bytes_sent = 0
        self._held: frozenset[str] | None = None  # None: the replica may hold others, as of another front end

    async def find(self, wanted: DesiredAdapter) -> str | None:
        """The folder of a content on the replica's machine; None if it has to be sent.

        Raises:
            BadAdapter: It is not there, and the front end does not have it either.
            EngineDead: The replica is gone.
        """
        content = await self._content(wanted)
        reply = await self._offer(wanted, content, receive=False)
        if reply.path:
            return self._found(wanted, reply.path)
        if content is None:
            raise BadAdapter(
                f"{wanted.path}: content {wanted.version} is not on the replica's machine, and cannot be sent: it is "
                "not in that folder of the front end either; load the adapter again to serve other content"
            )
        return None

    async def send(self, wanted: DesiredAdapter, is_wanted: Callable[[], bool] = lambda: True) -> str:
        """Send a content, unless the replica's machine has it. Returns the folder there.

        Args:
            is_wanted: Returns whether to go on; called before each piece.

        Raises:
            BadAdapter: It cannot be sent, or is over the limit of one adapter.
            OverCapacity: The machine has no room for it.
            Aborted: It is not wanted any more, the machine does not answer, or another process there is receiving it
                for long.
            EngineDead: The replica is gone.
        """
        ends_s = asyncio.get_running_loop().time() + BUSY_S
        while True:
            if (content := await self._content(wanted)) is None:
                if (path := await self.find(wanted)) is not None:
                    return path
                continue  # the front end has it again
            async with self._sender.sending:
                reply = await self._offer(wanted, content, receive=True)
                if not reply.busy:
                    return self._found(wanted, reply.path or await self._send_files(wanted, content, is_wanted))
            if asyncio.get_running_loop().time() > ends_s:
                raise Aborted(
                    f"another process of the machine has been receiving the adapter, or using a damaged copy, for "
                    f"{BUSY_S:g} s; it is tried again"
                )
            await asyncio.sleep(LOOK_S)

    async def hold(self, versions: Collection[str]) -> None:
        """Let the machine remove received contents other than these when it needs the room. Raises EngineDead."""
        held = frozenset(versions)
        if held != self._held:
            self._held = held
            try:
                await self._answer(self._client.post(Hold(tuple(sorted(held)))))
            except BaseException:
                self._held = None
                raise

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _content(self, wanted: DesiredAdapter) -> AdapterContent | None:
        """The content at the front end, if it is the desired one."""
        content = await self._sender.content_of(wanted.path)
        return content if content is not None and content.version == wanted.version else None

    def _found(self, wanted: DesiredAdapter, path: str) -> str:
        if path != wanted.path:
            self._held = None
        return path

    async def _offer(self, wanted: DesiredAdapter, content: AdapterContent | None, *, receive: bool) -> Files:
        limits = self._sender.limits
        offer = Offer(
            path=wanted.path,
            version=wanted.version,
            files=() if content is None else content.files,
            receive=receive,
            adapter_bytes=limits.adapter_bytes,
            total_bytes=limits.total_bytes,
        )
        return await self._answer(self._client.post(offer))

    async def _send_files(self, wanted: DesiredAdapter, content: AdapterContent, is_wanted: Callable[[], bool]) -> str:
        total, sent = sum(file.size for file in content.files), 0
        answers: deque[asyncio.Future[Reply[msgspec.Raw]]] = deque()
        try:
            for file in content.files:
                async for data in pieces_of(Path(wanted.path, file.name), file.size):
                    if not is_wanted():
                        raise Aborted("it is not wanted there any more")
                    self.progress[wanted.version] = f"{sent / 1e6:.1f} of {total / 1e6:.1f} MB of its files were sent"
                    call = Piece(wanted.version, file.name, data)
                    answers.append(self._client.post(call))
                    sent += len(data)
                    self.num_bytes_sent += len(data)
                    if len(answers) >= WINDOW:
                        await self._answer(answers.popleft())
            while answers:
                await self._answer(answers.popleft())
        finally:
            self.progress.pop(wanted.version, None)
            # Also after an error, so that the replica drops what has arrived.
            finish = self._client.post(Finish(wanted.version))
        return (await self._answer(finish)).path

    async def _answer(self, reply: asyncio.Future[Reply[msgspec.Raw]]) -> Files:
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await reply
        except TimeoutError as error:
            raise Aborted(f"it did not answer within {ANSWER_S:g} s; its disk may hang") from error
        if found.error is not None:
            raise found.error.to_exception()
        return msgspec.msgpack.decode(found.value, type=Files)


async def pieces_of(path: Path, size: int) -> AsyncIterator[bytes]:
    """The first bytes of a file. Raises BadAdapter if it cannot be read, or has fewer."""
    try:
        file = await asyncio.to_thread(path.open, "rb")
        with file:
            while size:
                data = await asyncio.to_thread(file.read, min(PIECE_BYTES, size))
                if not data:
                    raise BadAdapter(f"{path} became shorter while it was sent")
                size -= len(data)
                yield data
    except OSError as error:
        raise BadAdapter(f"{path} cannot be read on the front end: {error.strerror}") from error


def _stamp_of(folder: Path) -> _Stamp:
    found = []
    for name in ADAPTER_FILES:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(folder / name)
            # Copies may keep the time of a change (mtime), but not that of the file (ctime).
            found.append((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
    return tuple(found)
