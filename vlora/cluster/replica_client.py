"""`ReplicaClient`: an engine behind a replica's door, and the files on its machine."""

from __future__ import annotations

import asyncio
import itertools

from vlora.cluster import adapter_messages
from vlora.cluster.adapter_messages import FilesCall, FilesReply
from vlora.engine.ipc import messages
from vlora.engine.ipc.client import EngineClient, EngineProcess
from vlora.engine.ipc.transport import ClientTransport
from vlora.errors import EngineDead
from vlora.types import ErrorValue


class ReplicaClient(EngineClient):
    """`EngineClient` that also sends messages about adapters' files."""

    def __init__(self, process: EngineProcess, transport: ClientTransport, ready: messages.Ready) -> None:
        self._file_calls: dict[int, asyncio.Future[FilesReply]] = {}
        self._file_ids = itertools.count()
        super().__init__(process, transport, ready)

    @property
    def next_file_id(self) -> int:
        return next(self._file_ids)

    def call_files(self, call: FilesCall) -> asyncio.Future[FilesReply]:
        """Send a call. Its answer has an error if the replica refuses it, or is lost before it answers.

        Raises:
            EngineDead: The replica is gone.
        """
        if self.cause is not None:
            raise EngineDead(self.cause)
        found = self._file_calls[call.call_id] = asyncio.get_running_loop().create_future()
        self._transport.send(adapter_messages.encode(call))
        return found

    # -- inside -------------------------------------------------------------------------------------------------------

    def _receive(self, data: bytes) -> None:
        message = adapter_messages.decode_from_replica(data)
        if isinstance(message, FilesReply):
            self._answered(message)
        else:
            self._handle(message)

    def _answered(self, reply: FilesReply) -> None:
        found = self._file_calls.pop(reply.call_id, None)
        if found is not None and not found.done():  # otherwise nothing waits for it any more
            found.set_result(reply)

    def _fail_pending(self, code: int | None) -> None:
        super()._fail_pending(code)
        error = ErrorValue.of(EngineDead(self.cause or ""))
        for call_id in tuple(self._file_calls):
            self._answered(FilesReply(call_id=call_id, error=error))
