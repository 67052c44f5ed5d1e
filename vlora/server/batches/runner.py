"""OpenAI's `/v1/files` and `/v1/batches`: a batch is answered by the application's own routes beside other requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import httpx
import msgspec
from fastapi import FastAPI, File, Form, Query, Request, UploadFile
from fastapi.responses import FileResponse
from pydantic import Field, ValidationError
from starlette.types import ASGIApp

from vlora.config import ServerConfig
from vlora.errors import BadRequest, DeadlineMissed, EngineDead, OverCapacity, RateLimited, UnknownFile, VLoraError
from vlora.run_folder import append, whole_lines
from vlora.server.batches.store import NO_FILES, FileStore, Record, Status, StoredBatch, StoredFile, path_of
from vlora.server.frontend import FrontEnd
from vlora.server.http.chat_request import ChatRequest
from vlora.server.http.embedding_routes import EmbeddingRequest
from vlora.server.http.errors import error_body, first_problem
from vlora.server.http.middleware import FILE_PATHS, MAX_FIELDS
from vlora.server.http.responses import ResponsesRequest
from vlora.server.http.sampling_fields import StrictModel
from vlora.server.http.text_completions import CompletionRequest
from vlora.server.security.access import Access, caller_of, tenant
from vlora.server.security.public_errors import to_vlora_error
from vlora.types import MAX_PRIORITY

_BATCHES = "/v1/batches"

Limit = Annotated[int, Query(ge=1, le=10_000)]
Purpose = Literal["batch", "vision", "user_data"]
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
_MODELS = (ChatRequest, CompletionRequest, ResponsesRequest, EmbeddingRequest)
_BODIES = dict(zip(get_args(Endpoint), _MODELS, strict=True))
_MAX_REQUESTS = 50_000  # of a batch, as in OpenAI's API
_MAX_PROBLEMS = 100
_AT_ONCE = 16  # requests; enough for the server to batch
PAUSE_S, _QUOTA_S = 0.5, 60.0  # before a request is sent again, and at most if a quota is used up
EXPIRY_S = 60.0  # between two removals of what has expired
_MOST_TRIES = dict.fromkeys((OverCapacity.code, RateLimited.code), math.inf) | dict.fromkeys(
    (EngineDead.code, DeadlineMissed.code), 3
)
"""Until it is the answer."""


class BatchLine(StrictModel):
    custom_id: str = Field(min_length=1, max_length=512)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class BatchRunner:
    """Used from one event loop. app: with the checks of tokens and limits. A batch that cannot go on is failed."""

    def __init__(self, store: FileStore, app: ASGIApp, front_end: FrontEnd, access: Access) -> None:
        self.store = store
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._front_end = front_end
        self._access = access
        self._num_slots = min(_AT_ONCE, max(1, front_end.config.max_requests // 4))
        self._slots: dict[str | None, asyncio.Semaphore] = {}  # of a token: what waits for its quota delays no other's
        self._again = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Continue the batches that have not ended, and remove what expires, until the end of the block."""
        self._tasks[""] = asyncio.create_task(self._expire())
        for batch in reversed(self.store.all(StoredBatch)):
            if not batch.ended:
                self.begin(batch)
        try:
            yield
        finally:
            for task in (tasks := tuple(self._tasks.values())):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_S)
            with contextlib.suppress(OSError):  # of a disk that fails: the next caller gets it
                self.store.remove_expired()

    def begin(self, batch: StoredBatch) -> None:
        task = self._tasks[batch.id] = asyncio.create_task(self._run(batch))
        task.add_done_callback(lambda _: self._tasks.pop(batch.id))

    def cancel(self, batch: StoredBatch) -> None:
        """Cancel a batch that has not ended; it keeps the answers that it has."""
        if not batch.ended:
            self.store.enter(batch, "cancelling")
            if batch.id in self._tasks:
                self._tasks[batch.id].cancel()

    async def _run(self, batch: StoredBatch) -> None:
        status: Status = "failed"
        try:
            async with asyncio.timeout(max(0.0, batch.expires_at - self.store.clock())):
                status = await self._process(batch)
        except TimeoutError:
            status = "expired"
        except asyncio.CancelledError:
            if batch.status != "cancelling":
                raise  # the server stops
            status = "cancelled"
        except Exception as error:
            batch.errors = [_problem(to_vlora_error(error))]
        with contextlib.suppress(VLoraError):  # of a full disk: the batch ends at the next start
            self.store.enter(batch, status)

    async def _process(self, batch: StoredBatch) -> Status:
        if batch.status == "cancelling":
            return "cancelled"
        if batch.status == "validating":
            given = self.store.path(batch.input_file_id), batch.endpoint, self._front_end.config
            batch.errors, batch.total = await asyncio.to_thread(check_lines, *given)
            if batch.errors:
                return "failed"
            self.store.enter(batch, "in_progress")
        waiting, slots = (
            self._unanswered(batch),
            self._slots.setdefault(batch.tenant, asyncio.Semaphore(self._num_slots)),
        )
        async with asyncio.TaskGroup() as group:
            while (asked := await asyncio.to_thread(next, waiting, None)) is not None:
                await slots.acquire()
                group.create_task(self._answer(batch, *asked)).add_done_callback(lambda _: slots.release())
        return "completed"

    def _unanswered(self, batch: StoredBatch) -> Iterator[tuple[str, bytes]]:
        """The id and body of each request without a result; the others are counted. A result that was cut goes."""
        found: dict[str, list[str]] = {}
        for kind, name in batch.results.items():
            lines = whole_lines(self.store.path(name))
            found[kind] = [json.loads(line)["custom_id"] for line in lines]
            if self.store.size(name):
                os.truncate(self.store.path(name), sum(map(len, lines)) + len(lines))
        batch.completed, batch.failed = len(found["output"]), len(found["error"])
        answered = {*found["output"], *found["error"]}
        with self.store.path(batch.input_file_id).open("rb") as file:
            for line in file:
                if line.strip() and (asked := json.loads(line))["custom_id"] not in answered:
                    yield asked["custom_id"], json.dumps({**asked["body"], "priority": -MAX_PRIORITY}).encode()

    async def _answer(self, batch: StoredBatch, custom_id: str, body: bytes) -> None:
        """Send a request until it has an answer, also while the server or its engine restarts, and keep that."""
        tries: Counter[str] = Counter()
        while True:
            while self._front_end.draining or not self._front_end.engine_ready:
                await asyncio.sleep(PAUSE_S)
            # Those beside a request that kills the engine are sent again without it.
            async with self._again if tries[EngineDead.code] else contextlib.nullcontext():
                status, answer, quota_s = await self._send(batch, body)
            code = "" if status == 200 else answer["error"]["code"]
            tries[code] += 1
            if status == 200 or not (self._front_end.draining or tries[code] < _MOST_TRIES.get(code, 0)):
                break
            await asyncio.sleep(min(quota_s, _QUOTA_S) if code == RateLimited.code else PAUSE_S)
        response = {"status_code": status, "request_id": f"req_{secrets.token_hex(16)}", "body": answer}
        line = {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": custom_id, "response": response, "error": None}
        kind = "output" if status == 200 else "error"
        # A line that is lost with the machine is asked again.
        append(self.store.path(batch.results[kind]), msgspec.json.encode(line) + b"\n", durable=False)
        batch.completed += status == 200
        batch.failed += status != 200

    async def _send(self, batch: StoredBatch, body: bytes) -> tuple[int, Any, float]:
        """The status and body of one answer, and the time to wait; 401 if the batch's token does not exist any more."""
        secret = next((each.secret for each in self._access.tokens if each.name == batch.tenant), "")
        headers = {"content-type": "application/json", "authorization": f"Bearer {secret}"}
        request = httpx.Request("POST", f"http://localhost{batch.endpoint}", headers=headers, content=body)
        response = await self._transport.handle_async_request(request)
        retry_s = float(response.headers.get("retry-after", PAUSE_S))
        return response.status_code, json.loads(await response.aread()), retry_s


def check_lines(path: Path, endpoint: str, config: ServerConfig) -> tuple[list[dict[str, Any]], int]:
    """What is wrong with the requests of a file, up to a limit, and their number."""
    problems: list[dict[str, Any]] = []
    seen: set[str] = set()
    most, most_commas = config.max_message_bytes // _AT_ONCE, config.max_prompt_chars + MAX_FIELDS
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if len(line) > most or line.count(b",") > most_commas:
                    raise BadRequest(
                        f"the line has {len(line)} bytes; at most {most}, and {most_commas} commas, are allowed"
                    )
                if line.strip():
                    seen.add(_check(json.loads(line), endpoint, seen))
            except BadRequest as error:
                problems.append(_problem(error, number))
            except (ValueError, RecursionError) as error:
                problems.append(
                    _problem(BadRequest(f"the line is not JSON ({error}); write one object per line"), number)
                )
            if len(problems) == _MAX_PROBLEMS or len(seen) > _MAX_REQUESTS:
                break
    if not problems and not 0 < len(seen) <= _MAX_REQUESTS:
        problems.append(_problem(BadRequest(f"the file has no requests, or over {_MAX_REQUESTS}; write one per line")))
    return problems, len(seen)


def _check(line: Any, endpoint: str, seen: set[str]) -> str:
    """The request's id. Raises BadRequest."""
    try:
        found = BatchLine.model_validate(line)
        if found.custom_id in seen:
            raise BadRequest(f"custom_id {found.custom_id[:64]!r} occurs twice", field="custom_id")
        if found.url != endpoint:
            raise BadRequest(f"url is {found.url[:64]!r}; the batch is for {endpoint}", field="url")
        if found.body.get("stream"):
            raise BadRequest("stream: the answers of a batch are not streamed; leave it out", field="stream")
        _BODIES[endpoint].model_validate(found.body)
    except ValidationError as error:
        field, message = first_problem(error.errors())
        raise BadRequest(message, field=field) from error
    return found.custom_id


def _problem(error: VLoraError, line: int | None = None) -> dict[str, Any]:
    shown = error_body(error, param=error.field if isinstance(error, BadRequest) else None)["error"]
    return {**msgspec.to_builtins(shown), "line": line}


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
