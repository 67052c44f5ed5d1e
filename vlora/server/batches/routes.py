"""OpenAI's `/v1/files` and `/v1/batches`."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, File, Form, Query, Request, UploadFile
from fastapi.responses import FileResponse
from pydantic import Field

from vlora.errors import BadRequest, UnknownFile
from vlora.server.batches.runner import BatchRunner, Endpoint
from vlora.server.batches.store import NO_FILES, Record, StoredBatch, StoredFile, path_of
from vlora.server.http.middleware import FILE_PATHS
from vlora.server.http.sampling_fields import StrictModel
from vlora.server.security.access import caller_of, tenant

_BATCHES = "/v1/batches"

Limit = Annotated[int, Query(ge=1, le=10_000)]
Purpose = Literal["batch", "vision", "user_data"]


class BatchBody(StrictModel):
    """A batch over an uploaded file of requests. endpoint: of all its requests."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=16)


class FileRoutes:
    """runner: None on a server that keeps no files."""

    def __init__(self, runner: BatchRunner | None) -> None:
        self._own = runner

    def add_to(self, app: FastAPI) -> None:
        app.post(FILE_PATHS)(self.upload_file)
        app.get(FILE_PATHS)(self.list_files)
        app.get(FILE_PATHS + "/{file_id}")(self.retrieve_file)
        app.get(FILE_PATHS + "/{file_id}/content")(self.file_content)
        app.delete(FILE_PATHS + "/{file_id}")(self.delete_file)
        app.post(_BATCHES)(self.create_batch)
        app.get(_BATCHES)(self.list_batches)
        app.get(_BATCHES + "/{batch_id}")(self.retrieve_batch)
        app.post(_BATCHES + "/{batch_id}/cancel")(self.cancel_batch)

    @property
    def _runner(self) -> BatchRunner:
        if self._own is None:
            raise BadRequest(NO_FILES)
        return self._own

    async def upload_file(
        self,
        request: Request,
        file: Annotated[UploadFile, File()],
        purpose: Annotated[Purpose, Form()],
        kept_s: Annotated[int, Form(alias="expires_after[seconds]", ge=3600, le=2_592_000)] = 2_592_000,
    ) -> dict[str, Any]:
        """Keep a file, for a batch its requests as JSON lines."""
        store = self._runner.store
        name, owner = (file.filename or "")[:255].encode(errors="replace").decode(), tenant(request)
        with store.room(file.size or 0, owner):
            await asyncio.to_thread(store.write, file_id := f"file-{secrets.token_hex(16)}", file.file)
            return msgspec.to_builtins(store.add(file_id, kept_s, filename=name, purpose=purpose, tenant=owner))

    async def list_files(
        self, request: Request, purpose: Purpose | None = None, after: str | None = None, limit: Limit = 10_000
    ) -> dict[str, Any]:
        """The caller's files, the newest first; all for an admin."""
        found = self._runner.store.all(StoredFile, caller_of(request))
        return _page([each for each in found if purpose in (None, each.purpose)], after, limit, msgspec.to_builtins)

    async def retrieve_file(self, file_id: str, request: Request) -> Any:
        return msgspec.to_builtins(self._runner.store.find(StoredFile, file_id, caller_of(request)))

    async def file_content(self, file_id: str, request: Request) -> FileResponse:
        path = path_of(self._runner.store, file_id, caller_of(request))
        return FileResponse(path, media_type="application/octet-stream", stat_result=os.stat(path))

    async def delete_file(self, file_id: str, request: Request) -> dict[str, Any]:
        """Delete a file that no batch reads."""
        store = self._runner.store
        store.delete(store.find(StoredFile, file_id, caller_of(request)))
        return {"id": file_id, "object": "file", "deleted": True}

    async def create_batch(self, body: BatchBody, request: Request) -> dict[str, Any]:
        """Answer the requests of a file beside others, with the lowest priority."""
        store = self._runner.store
        file = store.find(StoredFile, body.input_file_id, caller_of(request))
        if file.purpose != "batch":
            raise BadRequest(f"file {file.id!r} has purpose {file.purpose!r}; upload it for 'batch'")
        batch = store.create_batch(tenant=tenant(request), **body.model_dump(exclude={"completion_window"}))
        self._runner.begin(batch)
        return self._batch(batch)

    async def list_batches(self, request: Request, after: str | None = None, limit: Limit = 20) -> dict[str, Any]:
        """The caller's batches, the newest first; all for an admin."""
        return _page(self._runner.store.all(StoredBatch, caller_of(request)), after, limit, self._batch)

    async def retrieve_batch(self, batch_id: str, request: Request) -> dict[str, Any]:
        return self._batch(self._runner.store.find(StoredBatch, batch_id, caller_of(request)))

    async def cancel_batch(self, batch_id: str, request: Request) -> dict[str, Any]:
        """Cancel a batch that has not ended; the answers that it has are kept."""
        batch = self._runner.store.find(StoredBatch, batch_id, caller_of(request))
        self._runner.cancel(batch)
        return self._batch(batch)

    def _batch(self, batch: StoredBatch) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(batch)
        times, errors = found.pop("times"), found.pop("errors")
        found["completion_window"] = "24h"
        found["errors"] = {"object": "list", "data": errors} if errors else None
        found["request_counts"] = {name: found.pop(name) for name in ("total", "completed", "failed")}
        for kind, name in batch.results.items():
            found[f"{kind}_file_id"] = name if batch.ended and self._runner.store.size(name) else None
        return found | {f"{status}_at": time for status, time in times.items()}


def _page(
    records: list[Record], after: str | None, limit: int, as_json: Callable[[Record], dict[str, Any]]
) -> dict[str, Any]:
    """So many records after the one with this id. Raises UnknownFile."""
    names = [each.id for each in records]
    if after is not None and after not in names:
        raise UnknownFile(f"after is {after[:64]!r}, which is not in the list")
    begin = 0 if after is None else names.index(after) + 1
    data = list(map(as_json, records[begin : begin + limit]))
    return {"object": "list", "data": data, "has_more": len(records) > begin + limit}
