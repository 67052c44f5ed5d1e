"""The files of one adapter while they are received, in a folder of their own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from vlora.cluster.adapter_messages import ShippedFile
from vlora.errors import BadAdapter, BadRequest


def digest_of(path: Path) -> str:
    """See `ShippedFile`. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _hash).hexdigest()


def _hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


class IncomingFiles:
    """Files that are received one after the other.

    Attributes:
        lock: The descriptor of the content's exclusive lock.
        missing: Names of the files that are not there yet, in order.
        sources: Received folders that share a file with this one.
    """

    def __init__(self, folder: Path, files: tuple[ShippedFile, ...], lock: int) -> None:
        """Make the folder. Its files have their full size at once, so that they count as used room. Raises OSError."""
        self.files = files
        self.lock = lock
        self.sources: list[Path] = []
        self._folder = folder
        self._waiting = list(files)
        self._file = -1
        self._num_written = 0
        self._digest = _hash()
        folder.mkdir(mode=0o700)
        for file in files:
            made = os.open(folder / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.truncate(made, file.size)
            finally:
                os.close(made)

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(file.name for file in self._waiting)

    def take_from(self, candidates: Iterable[tuple[ShippedFile, Path, bool]]) -> None:
        """Use files of this machine instead. Those that were received are shared; others are copied. Raises OSError."""
        for file, path, is_received in candidates:
            if file not in self._waiting:
                continue
            target = self._folder / file.name
            if is_received:
                linked = target.with_name(file.name + ".link")
                with contextlib.suppress(OSError):  # it was removed meanwhile, or the disk has no links
                    os.link(path, linked)
                    os.replace(linked, target)
                    self._waiting.remove(file)
                    self.sources.append(path.parent)
            else:
                shutil.copyfile(path, target)
                _synchronize(target)
                self._waiting.remove(file)
        self._skip_empty()

    def write(self, name: str, data: bytes) -> None:
        """Append to the first missing file.

        Raises:
            BadRequest: It has another name, or would be longer than offered.
            BadAdapter: It is complete, and has another hash than offered.
            OSError: It cannot be written.
        """
        if not self._waiting or self._waiting[0].name != name:
            raise BadRequest(f"a piece of {name[:64]!r} is out of turn")
        file = self._waiting[0]
        if self._num_written + len(data) > file.size or not data:
            raise BadRequest(f"a piece of {len(data)} bytes does not fit into {name}, which has {file.size}")
        if self._file < 0:
            self._file = os.open(self._folder / name, os.O_WRONLY | os.O_CLOEXEC)
        left = memoryview(data)
        while left:
            count = os.write(self._file, left)
            left = left[count:]
        self._digest.update(data)
        self._num_written += len(data)
        if self._num_written == file.size:
            self._complete(file)

    def close(self) -> None:
        """All pieces were written. Raises BadAdapter if some were not."""
        if self._waiting:
            raise BadAdapter(f"{self._waiting[0].name} has not arrived in full; the files are dropped")

    def discard(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # -- inside -------------------------------------------------------------------------------------------------------

    def _complete(self, file: ShippedFile) -> None:
        found = self._digest.hexdigest()
        if found != file.digest:
            raise BadAdapter(
                f"{file.name} arrived with content {found} instead of {file.digest}: it was changed while it was sent, "
                "or on the way; it is dropped"
            )
        os.fsync(self._file)
        self.discard()
        self._waiting.pop(0)
        self._num_written, self._digest = 0, _hash()
        self._skip_empty()

    def _skip_empty(self) -> None:
        while self._waiting and self._waiting[0].size == 0:
            self._waiting.pop(0)


def _synchronize(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
