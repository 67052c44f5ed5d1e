"""The index file: clips with their frames and with statements about them, in SQLite, searched by words (FTS5)."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from apps.retrieval.media import Clip, Fingerprint, Media
from vlora.errors import BadConfig
from vlora.run_folder import NotWritten, lock_file

FORMAT_VERSION = 1
_APPLICATION_ID = 0x764C5278  # distinguishes an index from other databases
_MAGIC, _HEADER_BYTES = b"SQLite format 3\0", 100
_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE media (
    id INTEGER PRIMARY KEY, path TEXT UNIQUE NOT NULL, kind TEXT NOT NULL, size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL, digest TEXT NOT NULL, complete INTEGER NOT NULL DEFAULT 0);
CREATE TABLE clips (
    id INTEGER PRIMARY KEY AUTOINCREMENT, media INTEGER NOT NULL REFERENCES media ON DELETE CASCADE,
    number INTEGER NOT NULL, start_s REAL NOT NULL, seconds REAL NOT NULL, UNIQUE (media, number));
CREATE TABLE frames (
    clip INTEGER NOT NULL REFERENCES clips ON DELETE CASCADE, number INTEGER NOT NULL, jpeg BLOB NOT NULL,
    PRIMARY KEY (clip, number));
CREATE TABLE statements (
    id INTEGER PRIMARY KEY, clip INTEGER NOT NULL REFERENCES clips ON DELETE CASCADE, asked TEXT NOT NULL,
    text TEXT NOT NULL, confidence REAL NOT NULL);
CREATE INDEX statements_of_clip ON statements (clip);
CREATE VIRTUAL TABLE words USING fts5 (text, content='statements', content_rowid='id', tokenize='porter unicode61');
CREATE TRIGGER statement_added AFTER INSERT ON statements BEGIN
    INSERT INTO words (rowid, text) VALUES (new.id, new.text);
END;
CREATE TRIGGER statement_removed AFTER DELETE ON statements BEGIN
    INSERT INTO words (words, rowid, text) VALUES ('delete', old.id, old.text);
END;
"""


_EMBEDDINGS = """
CREATE TABLE IF NOT EXISTS embeddings (
    clip INTEGER NOT NULL, number INTEGER NOT NULL, vector BLOB NOT NULL, PRIMARY KEY (clip, number),
    FOREIGN KEY (clip, number) REFERENCES frames ON DELETE CASCADE);
"""  # added by the first search by a picture


class IndexSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all clips of an index.

    model: the server's name of its model. num_frames, fps: of the clips, see `ClipShape`. heads: ADAPTER/HEAD.
    questions: asked of each of the adapters, or of the base model. max_side: of a stored frame, in pixels.
    """

    model: str
    num_frames: int
    fps: float | None
    adapters: tuple[str, ...]
    heads: tuple[str, ...]
    questions: tuple[str, ...]
    max_tokens: int
    max_side: int


class Statement(NamedTuple):
    """An answer about a clip, in words. asked: the ADAPTER/HEAD or the question. confidence: from 0 to 1."""

    asked: str
    text: str
    confidence: float


class KnownMedia(NamedTuple):
    """A file of the index. complete: all of its clips are in the index."""

    id: int
    fingerprint: Fingerprint
    complete: bool


class StoredClip(NamedTuple):
    """A clip of the index, without its frames."""

    id: int
    path: str
    kind: str
    start_s: float
    seconds: float


class RetrievalIndex:
    """An index file. Use it from one thread, and close it.

    Every method raises BadConfig if the file is damaged, cannot be written, or is in use by another process.

    Attributes:
        settings: see `IndexSettings`.
    """

    def __init__(self, path: Path, settings: IndexSettings | None = None) -> None:
        """Open an index, or create one with these settings.

        Raises:
            BadConfig: it is no index, of another version of the format, or damaged.
        """
        self.path = path
        if settings is not None and _is_absent(path):
            with self.updating():
                if _is_absent(path):
                    self._create(settings)
        _check_header(path)
        with self._errors():
            self._database = sqlite3.connect(path)
            try:
                self._database.execute("PRAGMA foreign_keys = ON")
                self.settings = self._read_settings()
            except BaseException:
                self._database.close()
                raise

    def _create(self, settings: IndexSettings) -> None:
        with self._errors(), contextlib.closing(sqlite3.connect(self.path)) as database, database:
            # One transaction: another process sees the index complete, or not at all.
            database.executescript(
                f"BEGIN; PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {FORMAT_VERSION}; {_SCHEMA}"
            )
            facts = [("settings", msgspec.json.encode(settings)), ("versions", b"{}")]
            database.executemany("INSERT INTO facts VALUES (?, ?)", facts)

    def _read_settings(self) -> IndexSettings:
        (application,) = self._database.execute("PRAGMA application_id").fetchone()
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        if application != _APPLICATION_ID:
            raise BadConfig(f"{str(self.path)!r} is a database of another program, not an index; give another file")
        if version != FORMAT_VERSION:
            raise BadConfig(
                f"index {str(self.path)!r} has format {version}; this version of vlora uses {FORMAT_VERSION}; delete "
                "the file and index again"
            )
        try:
            return msgspec.json.decode(self._fact("settings"), type=IndexSettings)
        except (msgspec.DecodeError, TypeError) as error:
            raise self._damaged(error) from error

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the adapters that answered, by name."""
        with self._errors():
            return msgspec.json.decode(self._fact("versions"), type=dict[str, str])

    def add_versions(self, versions: dict[str, str]) -> None:
        with self._errors(), self._database:
            self._write_fact("versions", msgspec.json.encode(self.versions | versions))

    def _fact(self, name: str) -> bytes:
        row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise self._damaged(f"it has no {name}")
        value: bytes = row[0]
        return value

    def _write_fact(self, name: str, value: bytes) -> None:
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    # -- writing -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Lock the index for an update; it can still be searched.

        Raises:
            BadConfig: another process updates it.
        """
        real = Path(os.path.realpath(self.path))
        with lock_file(real.with_name(f"{real.name}-lock"), f"index {str(self.path)!r}", "index"):
            yield

    def find(self, path: Path) -> KnownMedia | None:
        """The file with this path, if the index has it."""
        with self._errors():
            row = self._database.execute(
                "SELECT id, size, mtime_ns, digest, complete FROM media WHERE path = ?", (str(path),)
            ).fetchone()
        return None if row is None else KnownMedia(row[0], Fingerprint(*row[1:4]), bool(row[4]))

    def begin(self, media: Media, fingerprint: Fingerprint) -> int:
        """Add a file without clips, or continue one with the same content. Returns its id. The clips of another content
        are removed.
        """
        known = self.find(media.path)
        with self._errors(), self._database:
            if known is not None and known.fingerprint.digest == fingerprint.digest:
                self._database.execute("UPDATE media SET mtime_ns = ? WHERE id = ?", (fingerprint.mtime_ns, known.id))
                return known.id
            self._database.execute("DELETE FROM media WHERE path = ?", (str(media.path),))
            added = self._database.execute(
                "INSERT INTO media (path, kind, size, mtime_ns, digest) VALUES (?, ?, ?, ?, ?)",
                (str(media.path), media.kind, *fingerprint),
            )
            assert added.lastrowid is not None
            return added.lastrowid

    def numbers(self, media: int) -> set[int]:
        """The numbers of a file's clips."""
        with self._errors():
            return {row[0] for row in self._database.execute("SELECT number FROM clips WHERE media = ?", (media,))}

    def add(self, media: int, clip: Clip, statements: Iterable[Statement]) -> None:
        """Add a clip; it is on the disk afterwards."""
        with self._errors(), self._database:
            added = self._database.execute(
                "INSERT INTO clips (media, number, start_s, seconds) VALUES (?, ?, ?, ?)",
                (media, clip.number, clip.start_s, clip.seconds),
            ).lastrowid
            self._database.executemany(
                "INSERT INTO frames VALUES (?, ?, ?)", [(added, place, jpeg) for place, jpeg in enumerate(clip.frames)]
            )
            self._database.executemany(
                "INSERT INTO statements (clip, asked, text, confidence) VALUES (?, ?, ?, ?)",
                [(added, *statement) for statement in statements],
            )

    def complete(self, media: int) -> None:
        with self._errors(), self._database:
            self._database.execute("UPDATE media SET complete = 1 WHERE id = ?", (media,))

    def remove(self, paths: Iterable[str]) -> None:
        with self._errors(), self._database:
            self._database.executemany("DELETE FROM media WHERE path = ?", [(path,) for path in paths])

    # -- reading -------------------------------------------------------------------------------------------------------

    def paths(self) -> list[str]:
        with self._errors():
            return [row[0] for row in self._database.execute("SELECT path FROM media ORDER BY path")]

    def clips(self) -> list[StoredClip]:
        """All clips, in order of path and time."""
        with self._errors():
            rows = self._database.execute(
                "SELECT clips.id, path, kind, start_s, seconds FROM clips JOIN media ON media.id = clips.media "
                "ORDER BY path, clips.number"
            )
            return [StoredClip(*row) for row in rows]

    def statements(self, clip: int) -> list[Statement]:
        with self._errors():
            rows = self._database.execute(
                "SELECT asked, text, confidence FROM statements WHERE clip = ? ORDER BY id", (clip,)
            )
            return [Statement(*row) for row in rows]

    def frames(self, clip: int) -> tuple[bytes, ...]:
        with self._errors():
            rows = self._database.execute("SELECT jpeg FROM frames WHERE clip = ? ORDER BY number", (clip,))
            return tuple(row[0] for row in rows)

    def embeddings(self) -> dict[tuple[int, int], bytes]:
        """The embeddings of frames, as far as they are known, by clip and number: float32."""
        with self._errors(), self._database:
            self._database.execute(_EMBEDDINGS)
            rows = self._database.execute("SELECT clip, number, vector FROM embeddings")
            return {(clip, number): vector for clip, number, vector in rows}

    def add_embeddings(self, clip: int, vectors: Iterable[bytes]) -> None:
        """Of a clip's frames. One that has been removed meanwhile is ignored."""
        with self._errors(), self._database:
            self._database.executemany(
                "INSERT OR REPLACE INTO embeddings SELECT clip, number, ? FROM frames WHERE clip = ? AND number = ?",
                [(vector, clip, number) for number, vector in enumerate(vectors)],
            )

    def match(self, phrases: Iterable[str]) -> list[tuple[int, Statement]]:
        """Statements that contain one of the phrases, each with its clip's id. Words match in all of their forms, such
        as plurals (FTS5's Porter stemmer).
        """
        with self._errors():
            rows = self._database.execute(
                "SELECT clip, asked, statements.text, confidence FROM words "
                "JOIN statements ON statements.id = words.rowid WHERE words MATCH ? ORDER BY statements.id",
                (" OR ".join(f'"{phrase}"' for phrase in phrases),),
            )
            return [(clip, Statement(*rest)) for clip, *rest in rows]

    # -- errors --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _damaged(self, why: object) -> BadConfig:
        return BadConfig(f"index {str(self.path)!r} is damaged ({why}); delete the file and index again")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname == "SQLITE_FULL" or error.sqlite_errorname.startswith("SQLITE_IOERR"):
                raise NotWritten(f"cannot write {str(self.path)!r}: {error}; what is indexed is kept") from error
            raise BadConfig(f"cannot use index {str(self.path)!r}: {error}") from error
        except sqlite3.IntegrityError as error:
            raise BadConfig(
                f"index {str(self.path)!r} was changed by another process during the update ({error}); index again"
            ) from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error


def _is_absent(path: Path) -> bool:
    """Whether there is no file, or an empty one: creating an index was killed. Raises BadConfig."""
    try:
        return path.stat().st_size == 0
    except FileNotFoundError:
        return True
    except OSError as error:
        raise BadConfig(f"cannot read index {str(path)!r}: {error.strerror}") from error


def _check_header(path: Path) -> None:
    """Raises BadConfig for a file that is not SQLite's, which `sqlite3` reports at the first statement only."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except FileNotFoundError as error:
        raise BadConfig(f"no index {str(path)!r}; create it with vlora index VIDEOS --out {path}") from error
    except OSError as error:
        raise BadConfig(f"cannot read index {str(path)!r}: {error.strerror}") from error
    if not header.startswith(_MAGIC):
        raise BadConfig(f"{str(path)!r} is not an index (not an SQLite file); give another file")
    if len(header) < _HEADER_BYTES:  # SQLite takes it for an empty database
        raise BadConfig(f"index {str(path)!r} is damaged (truncated); delete the file and index again")


_FLAGS = {"num_frames": "frames", "adapters": "adapter", "heads": "head", "questions": "question"}


def check_settings(index: RetrievalIndex, wanted: IndexSettings, named: Sequence[str]) -> None:
    """Raises BadConfig if the model, or one of the named settings, is not that of the index."""
    for name in ("model", *named):
        has, given = getattr(index.settings, name), getattr(wanted, name)
        if has != given:
            what = f"the model {has!r}; the server has {given!r} (if it is the same, set its --served-model-name)"
            if name != "model":
                flag = _FLAGS.get(name, name.replace("_", "-"))
                what = f"--{flag} {_shown(has)}, not {_shown(given)}"
            raise BadConfig(f"index {str(index.path)!r} was made with {what}; give another index, or delete this one")


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
