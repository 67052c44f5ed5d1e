"""The front ends of a replica, which its engine takes for one, and the adapters' files that they send."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from vlora.cluster import adapter_messages
from vlora.cluster.adapter_messages import Files, FilesOperation, Finish, Hold, Lead, Offer, Piece
from vlora.cluster.adapter_store import AdapterStore, Busy, check_versions, default_root
from vlora.engine.ipc import messages
from vlora.engine.operations import KeepAdapters, LoadAdapter, RegisterAdapters
from vlora.errors import Aborted, BadRequest, OverCapacity, VLoraError
from vlora.operations import PinAdapter, UnloadAdapter
from vlora.types import ErrorValue, RequestOutput

log = logging.getLogger("vlora.cluster")

MAX_WAITING = 64  # messages; a front end sends few before it waits for the answers
_CLOSE_S = 1.0
_CHANGES = LoadAdapter | PinAdapter | RegisterAdapters | UnloadAdapter
_FORMER = Aborted("another front end makes the changes of this service now; try again")


class _Waiting(NamedTuple):
    call_id: int
    operation: FilesOperation
    send: Callable[[bytes], object]  # to the front end that waits for the answer


class AdapterReceiver:
    """The received adapters of one replica. Contents in use outlive a front end; incomplete ones do not."""

    def __init__(self, root: Path | None = None) -> None:
        """Create no folder and no thread yet. root: of the store; None: see `default_root`."""
        self._root = root
        # Used by the thread only.
        self._store: AdapterStore | None = None
        self._senders: dict[str, Callable[[bytes], object]] = {}  # of incomplete contents
        self._thread = ThreadPoolExecutor(1, "vlora-adapter-files")
        self._calls: deque[_Waiting] = deque()
        self._answering: asyncio.Task[None] | None = None  # while some wait

    def receive(self, call_id: int, operation: FilesOperation, send: Callable[[bytes], object]) -> None:
        if len(self._calls) >= MAX_WAITING:
            error = Aborted(f"{MAX_WAITING} messages about files wait on this machine; its disk may hang")
            send(messages.encode(messages.Reply(call_id, error=ErrorValue.of(error))))
            return
        self._calls.append(_Waiting(call_id, operation, send))
        if self._answering is None:
            self._answering = asyncio.create_task(self._answer_all(), name="vlora-adapter-files")

    def peer_left(self, send: Callable[[bytes], object]) -> None:
        """Drop its incomplete contents, and answer none of its calls that wait."""
        self._calls = deque(each for each in self._calls if each.send != send)
        self._thread.submit(self._abort_of, send)

    async def close(self) -> None:
        """Drop incomplete contents, and use nothing any more. If the disk hangs, the next process drops them."""
        self._calls.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._close_store)
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _answer_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._calls:
            call = self._calls.popleft()
            call.send(messages.encode(await loop.run_in_executor(self._thread, self._answer, call)))
        self._answering = None

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _answer(self, call: _Waiting) -> messages.Reply[Files]:
        call_id, operation, send = call
        try:
            if self._store is None:
                self._store = AdapterStore(self._root or default_root(os.environ))
            return messages.Reply(call_id, self._done(self._store, operation, send))
        except Busy:
            return messages.Reply(call_id, Files(busy=True))
        except OSError as error:
            log.warning("received adapters: %s", error)
            why = OverCapacity(f"its files cannot be written there: {error.strerror}")
            found = ErrorValue.of(why)
        except VLoraError as error:
            found = ErrorValue.of(error)
        except Exception as error:  # otherwise no later call would be answered
            log.exception("received adapters")
            found = ErrorValue.of(Aborted(f"internal error: {type(error).__name__}; the log of the replica has it"))
        if not isinstance(operation, Hold) and self._senders.get(operation.version) == send:
            self._abort(operation.version)
        return messages.Reply(call_id, error=found)

    def _done(self, store: AdapterStore, operation: FilesOperation, send: Callable[[bytes], object]) -> Files:
        match operation:
            case Offer(version=version):
                path = store.find(operation)
                if path is None and operation.receive:
                    follows = store.begin(operation)
                    self._senders[version] = send
                    path = None if follows else self._finish(store, version)
                return Files(path=path or "")
            case Piece(version=version) | Finish(version=version) if self._senders.get(version) != send:
                raise BadRequest("no content with this hash is being received from this front end")
            case Piece():
                store.write(operation.version, operation.name, operation.data)
            case Finish():
                return Files(path=self._finish(store, operation.version))
            case Hold():
                check_versions(operation.versions)
                store.hold(operation.versions)
        return Files()

    def _finish(self, store: AdapterStore, version: str) -> str:
        path = store.finish(version)
        del self._senders[version]
        return path

    def _abort(self, version: str) -> None:
        del self._senders[version]
        with contextlib.suppress(OSError):
            if self._store is not None:
                self._store.abort(version)

    def _abort_of(self, send: Callable[[bytes], object]) -> None:
        for version in [version for version, sender in self._senders.items() if sender == send]:
            self._abort(version)

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()


class Peer:
    """A front end, as a replica sees it.

    Attributes:
        num_taken, num_ended: See `LoadReport`.
        keeps, holds: Contents of adapters, as it last asked.
        sends_files: Whether it has sent files of adapters.
        term: See `Lead`; 0 before one.
    """

    def __init__(self, send: Callable[[bytes], object]) -> None:
        self.send = send
        self.num_taken = self.num_ended = 0
        self.keeps: dict[str, tuple[str, ...]] = {}
        self.holds: tuple[str, ...] = ()
        self.sends_files = False
        self.term = 0


class Peers:
    """The front ends of an engine, which takes them for one. Ids of requests are unique among front ends."""

    def __init__(self, to_engine: Callable[[bytes], object]) -> None:
        self.present: dict[str, Peer] = {}  # by their keys
        self.files = AdapterReceiver()
        self._to_engine = to_engine
        self._owners: dict[str, Peer] = {}  # of unfinished requests
        self._unreported: deque[Peer] = deque()  # of requests that no report includes yet
        self._num_reported = 0
        self._calls: dict[int, tuple[Peer, int]] = {}  # whose, and its own id, by the id that the engine sees
        self._call_ids = itertools.count()
        self._term = 0  # the latest of all

    def leave(self, key: str) -> None:
        """A front end is gone: nothing reads the answers of its requests."""
        left = self.present.pop(key)
        for request_id in [each for each, owner in self._owners.items() if owner is left]:
            del self._owners[request_id]
            self._to_engine(messages.encode(messages.Cancel(request_id)))
        self._calls = {own_id: call for own_id, call in self._calls.items() if call[0] is not left}
        # What it keeps is kept until the next call about that: it may connect again.
        if left.sends_files:
            self.files.peer_left(left.send)

    def from_peer(self, sender: Peer, data: bytes) -> None:
        """Pass a message on. Raises ValueError and msgspec.MsgspecError for others than those of a front end."""
        message = messages.PING if data == messages.PING else messages.decode_to_engine(data)
        match message:
            case messages.Add():
                self._owners[message.request.request_id] = sender
                self._unreported.append(sender)
            case messages.Call(call_id, data_of_operation):
                operation = adapter_messages.decode_operation(data_of_operation)
                if isinstance(operation, FilesOperation):
                    self._about_files(sender, call_id, operation)
                    return
                if isinstance(operation, Lead):
                    sender.term, self._term = operation.term, max(operation.term, self._term)
                if isinstance(operation, Lead | _CHANGES):
                    error = ErrorValue.of(_FORMER) if sender.term < self._term else None
                    if error is not None or isinstance(operation, Lead):
                        sender.send(messages.encode(messages.Reply(call_id, error=error)))
                        return
                if isinstance(operation, KeepAdapters):
                    sender.keeps = operation.versions
                    operation = self._kept()
                own_id = next(self._call_ids)
                self._calls[own_id] = sender, call_id
                data = messages.encode(messages.Call(own_id, operation))
            case messages.Cancel() | messages.WatchLoad() | messages.Ping() | messages.PING:
                pass
            case _:
                raise ValueError(f"a front end may not send {type(message).__name__} to a replica")
        self._to_engine(data)

    def from_engine(self, data: bytes) -> None:
        message = messages.decode_from_engine(data)
        match message:
            case messages.Outputs():
                self._pass_on(message, data)
            case messages.Reply():
                if (found := self._calls.pop(message.call_id, None)) is not None:
                    found[0].send(messages.encode(msgspec.structs.replace(message, call_id=found[1])))
            case messages.LoadReport():
                while self._num_reported < message.num_taken:
                    self._num_reported += 1
                    self._unreported.popleft().num_taken += 1
                for each in self.present.values():
                    own = {"num_taken": each.num_taken, "num_ended": each.num_ended, "num_sharing": len(self.present)}
                    each.send(messages.encode(msgspec.structs.replace(message, **own)))
            case _:
                for each in self.present.values():
                    each.send(data)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _pass_on(self, message: messages.Outputs, data: bytes) -> None:
        own: dict[Peer | None, list[RequestOutput]] = {}
        for output in message.outputs:
            owner = self._owners.get(output.request_id)
            own.setdefault(owner, []).append(output)
            if owner is not None and output.finished:
                del self._owners[output.request_id]
                owner.num_ended += 1
        for owner, outputs in own.items():
            if owner is not None:
                owner.send(data if len(own) == 1 else messages.encode(messages.Outputs(tuple(outputs))))

    def _about_files(self, sender: Peer, call_id: int, operation: FilesOperation) -> None:
        if isinstance(operation, Hold):
            sender.holds = operation.versions
            operation = Hold(tuple(sorted({version for each in self.present.values() for version in each.holds})))
        else:
            sender.sends_files = True
        self.files.receive(call_id, operation, sender.send)

    def _kept(self) -> KeepAdapters:
        kept: dict[str, tuple[str, ...]] = {}
        for each in self.present.values():
            for name, versions in each.keeps.items():
                kept[name] = tuple(dict.fromkeys((*kept.get(name, ()), *versions)))
        return KeepAdapters(kept)
