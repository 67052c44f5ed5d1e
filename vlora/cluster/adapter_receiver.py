"""The replica's end of shipped adapters: answers a front end's messages about files, in order, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from vlora.cluster.adapter_messages import FilesCall, FilesReply, Finish, Hold, Offer, Piece, encode
from vlora.cluster.adapter_store import AdapterStore, Busy, check_versions, default_root
from vlora.errors import Aborted, OverCapacity, VLoraError
from vlora.types import ErrorValue

log = logging.getLogger("vlora.cluster")

MAX_WAITING = 64  # messages; a front end sends few before it waits for the answers
_CLOSE_S = 1.0


class _Waiting(NamedTuple):
    call: FilesCall
    send: Callable[[bytes], object]


class AdapterReceiver:
    """The received adapters of one replica. Contents in use outlive a front end; incomplete ones do not."""

    def __init__(self, root: Path | None = None) -> None:
        """Create no folder and no thread yet. root: of the store; None: see `default_root`."""
        self._root = root
        self._store: AdapterStore | None = None  # used by the thread only
        self._thread = ThreadPoolExecutor(1, "vlora-adapter-files")
        self._calls: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._answering: asyncio.Task[None] | None = None

    def receive(self, call: FilesCall, send: Callable[[bytes], object]) -> None:
        """Answer a call after those before it. send: sends the answer."""
        if self._calls.qsize() >= MAX_WAITING:
            error = Aborted(f"{MAX_WAITING} messages about files wait on this machine; its disk may hang")
            send(encode(FilesReply(call_id=call.call_id, error=ErrorValue.of(error))))
            return
        self._calls.put_nowait(_Waiting(call, send))
        if self._answering is None:
            self._answering = asyncio.create_task(self._answer_all(), name="vlora-adapter-files")

    def front_end_left(self) -> None:
        """Drop incomplete contents, and answer no calls that wait."""
        if self._answering is not None:
            self._answering.cancel()
            self._answering = None
            while not self._calls.empty():
                self._calls.get_nowait()
            self._thread.submit(self._abort_all)

    async def close(self) -> None:
        """Drop incomplete contents, and use nothing any more. If the disk hangs, the next process drops them."""
        self.front_end_left()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._close_store)
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _answer_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            call, send = await self._calls.get()
            send(encode(await loop.run_in_executor(self._thread, self._answer, call)))

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _answer(self, call: FilesCall) -> FilesReply:
        try:
            if self._store is None:
                self._store = AdapterStore(self._root or default_root(os.environ))
            return _done(self._store, call)
        except Busy:
            return FilesReply(call_id=call.call_id, busy=True)
        except OSError as error:
            log.warning("received adapters: %s", error)
            why = OverCapacity(f"its files cannot be written there: {error.strerror}")
            found = ErrorValue.of(why)
        except VLoraError as error:
            found = ErrorValue.of(error)
        except Exception as error:  # otherwise no later call would be answered
            log.exception("received adapters")
            found = ErrorValue.of(Aborted(f"internal error: {type(error).__name__}; the log of the replica has it"))
        if self._store is not None and not isinstance(call, Hold):
            with contextlib.suppress(OSError):
                self._store.abort(call.version)
        return FilesReply(call_id=call.call_id, error=found)

    def _abort_all(self) -> None:
        if self._store is not None:
            self._store.abort_all()

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()


def _done(store: AdapterStore, call: FilesCall) -> FilesReply:
    match call:
        case Offer():
            path, missing = store.find(call), tuple[str, ...]()
            if path is None and call.receive and not (missing := store.begin(call)):
                path = store.finish(call.version)
            return FilesReply(call_id=call.call_id, path=path or "", missing=missing)
        case Piece():
            store.write(call.version, call.name, call.data)
        case Finish():
            return FilesReply(call_id=call.call_id, path=store.finish(call.version))
        case Hold():
            check_versions(call.versions)
            store.hold(call.versions)
    return FilesReply(call_id=call.call_id)
