"""Received adapters on the disk of a machine: a folder for each content, named by its hash.

All replicas of a user on the machine share it. A content has a lock: shared while a replica uses it, exclusive while
one receives it. The system releases locks at any end of a process. A content is received into a folder with another
name, which is renamed once all files are on the disk and have the hash: a crash leaves nothing that is taken for whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from vlora.adapter_files import ADAPTER_FILES, CONFIG_FILE, content_hash
from vlora.cluster.adapter_messages import Offer, ShippedFile
from vlora.errors import BadAdapter, BadRequest, OverCapacity

PART, LOCK, COMMON_LOCK = ".part", ".lock", "store.lock"
MAX_INCOMING = 4  # contents that a process receives at a time
_PLACE = "the folder of received adapters"  # in errors, which users of the adapter get too
_VERSION = re.compile(r"[0-9a-f]{32}")
_LOOK_S = 0.02
_WAIT_S = 10.0  # for the common lock, which is held while folders are counted and removed


class Busy(Exception):
    """Another process is receiving the content."""


def default_root(environ: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/vlora/adapters`, default `~/.cache/vlora/adapters`, as other caches. Raises BadRequest."""
    if configured := environ.get("XDG_CACHE_HOME"):
        return Path(configured) / "vlora" / "adapters"
    try:
        return Path.home() / ".cache" / "vlora" / "adapters"
    except RuntimeError as error:
        raise BadRequest("this user has no home folder for received adapters; set XDG_CACHE_HOME") from error


class AdapterStore:
    """One process's view of the folder. Belongs to one thread at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._held: dict[str, int] = {}  # descriptors of shared locks, by content
        self._incoming: dict[str, IncomingFiles] = {}

    def find(self, offer: Offer) -> str | None:
        """The folder with a content; None if it is not on this machine.

        Raises:
            BadRequest: The offer is invalid.
            BadAdapter: Others may write to the folder.
            Busy: Another process is receiving it.
        """
        check_offer(offer)
        if offer.version in self._incoming:
            raise Busy
        local = Path(offer.path)
        if _is_whole(local, offer):
            return offer.path
        folder = self.root / offer.version
        if not (folder.is_dir() or self._part(offer.version).is_dir()):
            return None
        self._check_root()
        if offer.version not in self._held:
            if (lock := locked(self._lock_of(offer.version), shared=True)) is None:
                raise Busy
            self._held[offer.version] = lock
        if _is_whole(folder, offer):
            os.utime(folder)
            return str(folder)
        os.close(self._held.pop(offer.version))
        return None

    def begin(self, offer: Offer) -> bool:
        """Begin to receive a content that `find` has not found. Returns whether bytes are to follow.

        Raises:
            Busy: Another process is receiving it, or uses a damaged folder of it.
            BadAdapter: It is over the limit of one adapter.
            OverCapacity: There is no room for it.
            OSError: The folder cannot be used.
        """
        needed = sum(file.size for file in offer.files)
        if needed > offer.adapter_bytes:
            raise BadAdapter(
                f"its files have {needed} bytes, over the limit of {offer.adapter_bytes} for an adapter that is sent "
                "(`--shipped-adapter-gib`); copy them to this machine"
            )
        if len(self._incoming) >= MAX_INCOMING:
            raise Busy
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_root()
        with self._alone():
            if (lock := locked(self._lock_of(offer.version))) is None:
                raise Busy
            try:
                self._remove(offer.version)  # the remains of a crash, or a damaged folder
                self._make_room(needed, offer.total_bytes)
                self._incoming[offer.version] = IncomingFiles(self._part(offer.version), offer.files, lock)
            except BaseException:
                self._drop(offer.version, lock)
                raise
        return needed > 0

    def write(self, version: str, name: str, data: bytes) -> None:
        """Append to a file. Raises BadRequest out of turn, and OSError."""
        if (incoming := self._incoming.get(version)) is None:
            raise BadRequest("no content with this hash is being received")
        incoming.write(name, data)

    def finish(self, version: str) -> str:
        """Check the content and put it in its place. Returns the folder. Raises as `write`, and BadAdapter."""
        if (incoming := self._incoming.get(version)) is None:
            raise BadRequest("no content with this hash is being received")
        incoming.close()
        part, folder = self._part(version), self.root / version
        if (found := content_hash(part)) != version:
            raise BadAdapter(
                f"the files that arrived have content {found} instead of {version}: they were changed while they were "
                "sent, or on the way; they are dropped"
            )
        _synchronize(part)
        with self._alone():  # no other process takes the lock while it becomes a shared one
            os.rename(part, folder)
            fcntl.flock(incoming.lock, fcntl.LOCK_SH)
        _synchronize(self.root)
        self._held[version] = incoming.lock
        del self._incoming[version]
        return str(folder)

    def put(self, offer: Offer, folder: Path) -> str:
        """Copy a content of this machine, unless it is there. Returns its folder. Raises as `find` and `begin`."""
        if (found := self.find(offer)) is not None:
            return found
        self.begin(offer)
        try:
            for file in offer.files:
                with (folder / file.name).open("rb") as content:
                    while data := content.read(2**20):
                        self.write(offer.version, file.name, data)
            return self.finish(offer.version)
        finally:
            self.abort(offer.version)

    def abort(self, version: str) -> None:
        """Drop a content that is not received any more. Unknown ones are ignored."""
        if (incoming := self._incoming.pop(version, None)) is not None:
            incoming.discard()
            self._drop(version, incoming.lock)

    def hold(self, versions: Collection[str]) -> None:
        """These contents are in use, as far as they are here, and no others."""
        for version in set(versions) - self._held.keys():
            if (self.root / version).is_dir() and (lock := locked(self._lock_of(version), shared=True)) is not None:
                self._held[version] = lock
        for version in self._held.keys() - set(versions):
            with contextlib.suppress(OSError):  # the time of its last use, by which contents are removed
                os.utime(self.root / version)
            os.close(self._held.pop(version))

    def close(self) -> None:
        for version in tuple(self._incoming):
            self.abort(version)
        self.hold(())

    # -- inside -------------------------------------------------------------------------------------------------------

    def _part(self, version: str) -> Path:
        return self.root / (version + PART)

    def _check_root(self) -> None:
        found = self.root.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise BadAdapter(
                f"{_PLACE} belongs to another user there, or others may write to it; give it to the server, mode 0700"
            )

    def _lock_of(self, version: str) -> Path:
        return self.root / (version + LOCK)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Count and remove folders while no other process does."""
        if (lock := locked(self.root / COMMON_LOCK, wait_s=_WAIT_S)) is None:
            raise OverCapacity(f"another process has locked {_PLACE} for {_WAIT_S:g} s; its disk may hang")
        try:
            yield
        finally:
            os.close(lock)

    def _make_room(self, needed: int, total_bytes: int) -> None:
        """Remove the remains of crashes, then contents that no replica uses, the least recently used first.

        Raises:
            OverCapacity: The contents in use take too much room.
        """
        folders = [path for path in self.root.iterdir() if _VERSION.fullmatch(path.name.removesuffix(PART))]
        unused = deque(sorted(folders, key=_age))
        sizes = {folder: _size_of(folder) for folder in unused}  # once: there may be thousands of folders
        used = sum(sizes.values())
        while True:
            free = shutil.disk_usage(self.root).free
            stale = bool(unused) and unused[0].suffix == PART
            if not stale and used + needed <= total_bytes and needed <= free:
                return
            if not unused:
                raise OverCapacity(
                    f"{_PLACE} has no room for {needed} bytes: adapters in use take {used} of at most {total_bytes} "
                    f"(`--shipped-gib`), and {free} are free on the disk"
                )
            folder = unused.popleft()
            if self._remove_unused(folder):
                used -= sizes[folder]

    def _remove_unused(self, folder: Path) -> bool:
        """Remove a folder and its lock, unless a process uses it. Returns whether it is gone."""
        version = folder.name.removesuffix(PART)
        if (lock := locked(self._lock_of(version))) is None:
            return False
        self._remove(folder.name)
        self._drop(version, lock)
        return not folder.exists()

    def _drop(self, version: str, lock: int) -> None:
        """Remove a part that this process has locked alone, and the lock's file if there is no content."""
        try:
            self._remove(version + PART)
            if not (self.root / version).exists():
                self._lock_of(version).unlink(missing_ok=True)
        finally:
            os.close(lock)

    def _remove(self, name: str) -> None:
        """Remove a folder that this process has locked. It is renamed first, so that no part of it is taken for it."""
        path = self.root / name
        if name.endswith(PART):
            shutil.rmtree(path, ignore_errors=True)
            return
        part = self._part(name)
        shutil.rmtree(part, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, part)
        shutil.rmtree(part, ignore_errors=True)


class IncomingFiles:
    """Files that are received one after the other, in a folder of their own.

    Attributes:
        lock: The descriptor of the content's exclusive lock.
    """

    def __init__(self, folder: Path, files: tuple[ShippedFile, ...], lock: int) -> None:
        """Make the folder. Its files have their full size at once, so that they count as used room. Raises OSError."""
        self.lock = lock
        self._folder = folder
        self._waiting = deque(file for file in files if file.size)
        self._file = -1
        self._num_written = 0
        folder.mkdir(mode=0o700)
        for file in files:
            made = os.open(folder / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.truncate(made, file.size)
            finally:
                os.close(made)

    def write(self, name: str, data: bytes) -> None:
        """Append to the first file that is not complete. Raises BadRequest for another one, or if it gets longer."""
        if not self._waiting or self._waiting[0].name != name:
            raise BadRequest(f"a piece of {name[:64]!r} is out of turn")
        file = self._waiting[0]
        if self._num_written + len(data) > file.size or not data:
            raise BadRequest(f"a piece of {len(data)} bytes does not fit into {name}, which has {file.size}")
        if self._file < 0:
            self._file = os.open(self._folder / name, os.O_WRONLY | os.O_CLOEXEC)
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]
        self._num_written += len(data)
        if self._num_written == file.size:
            os.fsync(self._file)
            self.discard()
            self._waiting.popleft()
            self._num_written = 0

    def close(self) -> None:
        """All pieces were written. Raises BadAdapter if some were not."""
        if self._waiting:
            raise BadAdapter(f"{self._waiting[0].name} has not arrived in full; the files are dropped")

    def discard(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def check_offer(offer: Offer) -> None:
    """Raises BadRequest for names that are not those of an adapter's files, and for sizes that cannot be."""
    if not _VERSION.fullmatch(offer.version):
        raise BadRequest(f"{offer.version[:64]!r} is no hash of an adapter's content")
    names = [file.name for file in offer.files]
    if unknown := [name for name in names if name not in ADAPTER_FILES]:
        raise BadRequest(f"{unknown[0][:64]!r} is no file of an adapter; those are {', '.join(ADAPTER_FILES)}")
    if len({*names}) < len(names) or any(file.size < 0 for file in offer.files):
        raise BadRequest("an adapter's files are offered twice, or with a negative size")


def check_versions(versions: Sequence[str]) -> None:
    """Raises BadRequest for values that are no hashes of contents."""
    for version in versions:
        if not _VERSION.fullmatch(version):
            raise BadRequest(f"{version[:64]!r} is no hash of an adapter's content")


def _is_whole(folder: Path, offer: Offer) -> bool:
    """Whether a folder has a content. Sizes are compared before files are read."""
    try:
        if not (folder / CONFIG_FILE).is_file():
            return False
        sizes = {name: (folder / name).stat().st_size for name in ADAPTER_FILES if (folder / name).is_file()}
        if offer.files and sizes != {file.name: file.size for file in offer.files}:
            return False
        return content_hash(folder) == offer.version
    except OSError:
        return False


def _size_of(folder: Path) -> int:
    """Of all files. One that is being received has its full size."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    return 0


def _age(folder: Path) -> tuple[bool, float]:
    """Parts first, then the least recently used."""
    try:
        return folder.suffix != PART, folder.stat().st_mtime
    except FileNotFoundError:  # a part that another process has dropped
        return False, 0.0


def _synchronize(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def locked(path: Path, *, shared: bool = False, wait_s: float = 0.0) -> int | None:
    """Lock a file, which is created if it is missing; None if another process has locked it otherwise.

    The system releases a lock when the process ends, in any way. Whoever has the exclusive lock may remove the file.

    Args:
        wait_s: How long to try.

    Returns:
        Its descriptor, which is to be closed.
    """
    ends_s = time.monotonic() + wait_s
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
            os.close(file)
        except BlockingIOError:
            os.close(file)
            if time.monotonic() >= ends_s:
                return None
            time.sleep(_LOOK_S)
        except FileNotFoundError:  # removed meanwhile
            os.close(file)
        except BaseException:
            os.close(file)
            raise
