"""Uploaded files and batches, in a folder that outlives the server: records in `ID.json`, contents of files in `ID`.

A content without a record was being uploaded, or has the results of a batch that has not ended.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import msgspec

from vlora.config import ServerConfig, Token
from vlora.errors import BadConfig, BadRequest, OverCapacity, UnknownFile
from vlora.run_folder import lock_folder, remove_unfinished, sync, whole, write_whole, writing
from vlora.server.security.access import is_admin

_MAX_RECORDS = 2000
_WINDOW_S, _KEPT_S = 24 * 3600, 30 * 24 * 3600  # of a batch, and of files, as in OpenAI's API

NO_FILES = "this server keeps no files; start it with --file-folder FOLDER"

Status = Literal["validating", "failed", "in_progress", "completed", "expired", "cancelling", "cancelled"]


class StoredFile(msgspec.Struct, kw_only=True, tag="file", tag_field="object"):
    """A file, as in OpenAI's API. tenant: the name of the token that owns it."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"
    tenant: str | None = None


class StoredBatch(msgspec.Struct, kw_only=True, tag="batch", tag_field="object"):
    """A batch. times: when it reached each status. errors: of its file, as in OpenAI's API."""

    id: str
    created_at: int
    expires_at: int
    endpoint: str
    input_file_id: str
    tenant: str | None = None
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    times: dict[str, int] = {}
    errors: list[dict[str, Any]] = []
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def ended(self) -> bool:
        return self.status in ("failed", "completed", "expired", "cancelled")

    @property
    def results(self) -> dict[str, str]:
        """The ids of the files with its answers and with its errors, which exist if there are any."""
        return {kind: f"file-{self.id.removeprefix('batch_')}-{kind}" for kind in ("output", "error")}


Record = TypeVar("Record", StoredFile, StoredBatch)


def path_of(files: FileStore | None, file_id: str, caller: Token | None) -> Path:
    """The content of a file. Raises UnknownFile, and BadRequest on a server that keeps no files."""
    if files is None:
        raise BadRequest(NO_FILES)
    return files.path(files.find(StoredFile, file_id, caller).id)


class FileStore:
    """One per server, used from one event loop. Its folder is locked until `close`."""

    def __init__(self, folder: Path, config: ServerConfig, clock: Callable[[], float] = time.time) -> None:
        """Raises BadConfig if the folder cannot be used, or a record cannot be read."""
        self.clock = clock
        self._folder = folder
        self._config = config
        self._records: dict[str, StoredFile | StoredBatch] = {}
        self._coming: list[tuple[str | None, int]] = []  # the tokens and bytes of files that are written now
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock_folder(folder))
            folder.chmod(0o700)
            remove_unfinished(folder)
            for path in folder.glob("*.json"):
                try:
                    record = msgspec.json.decode(path.read_bytes(), type=StoredFile | StoredBatch)
                except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
                    raise BadConfig(f"{path} is not the record of a file or a batch ({error}); move it away") from error
                self._records[record.id] = record
            for path in folder.glob("file-*"):
                if path.suffix != ".json" and path.name not in _names(self._records.values()):
                    path.unlink()
            self.close = stack.pop_all().close

    def path(self, file_id: str) -> Path:
        return self._folder / file_id

    def size(self, file_id: str) -> int:
        path = self.path(file_id)
        return path.stat().st_size if path.exists() else 0

    def all(self, kind: type[Record], caller: Token | None = None) -> list[Record]:
        """The records of a caller, those of all callers for an admin, the newest first."""
        found = [each for each in self._records.values() if isinstance(each, kind)]
        mine = [each for each in found if is_admin(caller) or (caller is not None and each.tenant == caller.name)]
        return sorted(mine, key=lambda each: (each.created_at, each.id), reverse=True)

    def find(self, kind: type[Record], name: str, caller: Token | None) -> Record:
        """Raises UnknownFile, also for a record of another token."""
        self.remove_expired()
        for each in self.all(kind, caller):
            if each.id == name:
                return each
        raise UnknownFile(f"there is no file or batch {name[:64]!r} of this kind; it may be deleted or expired")

    def check_room(self, num_bytes: int = 0, tenant: str | None = None) -> None:
        """Raises OverCapacity if there is no room for a batch, or a file of this size. A token may take half of it."""
        self.remove_expired()
        for who, part in (("this server", 1), ("this token", 2))[: 1 if tenant is None else 2]:
            own = [each for each in self._records.values() if part == 1 or each.tenant == tenant]
            coming = [size for name, size in self._coming if part == 1 or name == tenant]
            number, used = len(own) + len(coming), sum(map(self.size, _names(own))) + sum(coming)
            if number >= (most := _MAX_RECORDS // part) or used + num_bytes > self._config.max_file_bytes // part:
                raise OverCapacity(
                    f"no room for {num_bytes} bytes: {who} keeps {number} files and batches with {used} bytes, at most "
                    f"{most} with {self._config.max_file_bytes // part}; delete files, or wait until some expire"
                )

    @contextlib.contextmanager
    def room(self, num_bytes: int, tenant: str | None) -> Iterator[None]:
        """A block that writes and adds a file of this size. Raises OverCapacity."""
        self.check_room(num_bytes, tenant)
        self._coming.append((tenant, num_bytes))
        try:
            yield
        finally:
            self._coming.remove((tenant, num_bytes))

    def write(self, file_id: str, content: BinaryIO) -> None:
        """Write an uploaded file, in any thread; `add` makes it known. Raises NotWritten."""
        with writing(self._folder), whole(self.path(file_id)) as part, open(part, "xb") as file:
            shutil.copyfileobj(content, file)

    def add(self, file_id: str, kept_s: int = _KEPT_S, **fields: Any) -> StoredFile:
        now, size = int(self.clock()), self.size(file_id)
        return self._save(StoredFile(id=file_id, bytes=size, created_at=now, expires_at=now + kept_s, **fields))

    def create_batch(self, **fields: Any) -> StoredBatch:
        self.check_room(tenant=fields.get("tenant"))
        now, name = int(self.clock()), f"batch_{secrets.token_hex(16)}"
        return self._save(StoredBatch(id=name, created_at=now, expires_at=now + _WINDOW_S, **fields))

    def enter(self, batch: StoredBatch, status: Status) -> None:
        """Give a batch another status, which outlives the process; at its end, its results become files."""
        batch.status = status
        batch.times[status] = int(self.clock())
        for kind, name in batch.results.items() if batch.ended else ():
            if self.size(name):
                sync(self.path(name))
                self.add(name, filename=f"{batch.id}_{kind}.jsonl", purpose="batch_output", tenant=batch.tenant)
        self._save(batch)

    def delete(self, file: StoredFile) -> None:
        """Raises BadRequest if a batch needs the file."""
        if (batch := self._readers().get(file.id)) is not None:
            raise BadRequest(f"batch {batch!r} reads file {file.id!r}; cancel it, or wait until it has ended")
        self._forget(file)
        self.path(file.id).unlink(missing_ok=True)

    def remove_expired(self) -> None:
        """Also batches, as long after their end at the latest."""
        needed, now = self._readers(), self.clock()
        for file in self.all(StoredFile):
            if file.expires_at <= now and file.id not in needed:
                self.delete(file)
        for batch in self.all(StoredBatch):
            if batch.ended and batch.expires_at + _KEPT_S <= now:
                self._forget(batch)

    def _readers(self) -> dict[str, str]:
        return {each.input_file_id: each.id for each in self.all(StoredBatch) if not each.ended}

    def _forget(self, record: StoredFile | StoredBatch) -> None:
        self._records.pop(record.id, None)
        self.path(f"{record.id}.json").unlink(missing_ok=True)

    def _save(self, record: Record) -> Record:
        with writing(self._folder):
            write_whole(self.path(f"{record.id}.json"), msgspec.json.encode(record), mode=0o600)
        self._records[record.id] = record
        return record


def _names(records: Iterable[StoredFile | StoredBatch]) -> set[str]:
    """The names of their files; a batch has none of its own."""
    results = (name for each in records if isinstance(each, StoredBatch) for name in each.results.values())
    return {*results, *(each.id for each in records)}
