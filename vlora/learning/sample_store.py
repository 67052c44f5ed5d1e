"""Answers of one adapter with their questions and pictures on disk, until they are corrected and learned, in SQLite."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlora.errors import BadConfig, BadRequest, Forbidden

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY AUTOINCREMENT, request TEXT UNIQUE NOT NULL, at REAL NOT NULL, tenant TEXT,
    version TEXT NOT NULL, held_out INTEGER NOT NULL, content BLOB NOT NULL, num_bytes INTEGER NOT NULL,
    correction INTEGER UNIQUE, trusted INTEGER NOT NULL DEFAULT 0, label TEXT,
    repeatable INTEGER NOT NULL, question TEXT NOT NULL, answer TEXT NOT NULL, image BLOB);
CREATE INDEX IF NOT EXISTS by_tenant ON records (label IS NULL, tenant, num_bytes);
CREATE INDEX IF NOT EXISTS by_age ON records (label IS NULL, tenant);
CREATE TABLE IF NOT EXISTS served (
    version TEXT NOT NULL, tenant TEXT NOT NULL, answered INTEGER NOT NULL DEFAULT 0, wrong INTEGER NOT NULL DEFAULT 0,
    trusted_wrong INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (version, tenant));
"""
_SPLIT_BYTES = 8
_UNLABELLED_SHARE = 0.25


class AnsweredRequest(NamedTuple):
    """An answer to keep.

    version: of the adapter; empty if it changed meanwhile. repeatable: the version gives it in every evaluation, as it
    was neither sampled nor cut off.
    """

    request_id: str
    tenant: str | None
    version: str
    question: str
    answer: str
    image: bytes | None
    repeatable: bool = True


class Labelled(NamedTuple):
    """A corrected answer, without its picture.

    number: of the record. correction: counts corrections, so that later ones have larger numbers; 0 for an answer that
    was not corrected, which is its own label. content: hash of question and picture. trusted: corrected by an admin
    token, or on a server without tokens.
    """

    number: int
    correction: int
    tenant: str | None
    trusted: bool
    held_out: bool
    content: bytes
    question: str
    label: str


class Corrector(NamedTuple):
    """The sender of a correction. name: of the token; None without tokens. admin: may correct any answer."""

    name: str | None
    admin: bool


class ServedCount(NamedTuple):
    """Answers of one version to one tenant. wrong: corrected to another answer; trusted_wrong: those by an admin."""

    tenant: str
    answered: int
    wrong: int
    trusted_wrong: int


class StoreSize(NamedTuple):
    """Sizes on disk. corrected: records with a label."""

    records: int
    corrected: int
    num_bytes: int


class SampleStore:
    """The records of one adapter in a file. It belongs to one thread at a time.

    Every method raises OSError if the file is damaged or cannot be written, for example because the disk is full. A
    method that raises has changed nothing.
    """

    def __init__(
        self, file: Path, *, max_records: int, max_bytes: int, held_out: float, clock: Callable[[], float] = time.time
    ) -> None:
        """Open or create the file, which only this user may read.

        Args:
            max_records: Records with a label, and also those without one. Tenants share them equally.
            held_out: Share of the contents that is never trained on. A key in the file draws them, so that callers
                cannot choose the part of a record. Stored records stay in their part when the share changes.
            clock: Seconds since 1970.

        Raises:
            BadConfig: The file is not such a store, or is damaged.
        """
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._held_out = held_out
        self._clock = clock
        try:
            os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
            self._database = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
            # Each transaction is on disk before it ends. Dropped records are overwritten, and their pages given back.
            for pragma in ("auto_vacuum=INCREMENTAL", "journal_mode=WAL", "synchronous=FULL", "secure_delete=ON"):
                self._database.execute(f"PRAGMA {pragma}")
            self._database.execute(f"PRAGMA journal_size_limit={16 << 20}")
            self._database.executescript(_SCHEMA)
            new = (secrets.token_bytes(32),)
            self._database.execute("INSERT OR IGNORE INTO facts VALUES ('key', ?)", new)
            self._key = bytes(self._fact("key"))
        except (OSError, sqlite3.Error) as error:
            raise BadConfig(f"{file} cannot be used for live records ({error}); remove it, or free the disk") from error

    def close(self) -> None:
        self._database.close()

    # -- answers and corrections --------------------------------------------------------------------------------------

    def add(self, answers: Iterable[AnsweredRequest]) -> int:
        """Keep answers, and drop records above the limits. Returns how many were too large to keep."""
        num_refused = 0
        with self._transaction():
            for one in answers:
                num_bytes = len(one.question.encode()) + len(one.answer.encode()) + len(one.image or b"")
                if num_bytes > self._max_bytes // 4:  # one request must not displace most others
                    num_refused += 1
                    continue
                content = hashlib.blake2b(len(one.question).to_bytes(8) + one.question.encode(), digest_size=16)
                content.update(one.image or b"")
                digest = content.digest()
                # All questions about a picture are in one part: a model that has learned it knows it again.
                drawn = digest if not one.image else hashlib.blake2b(one.image, digest_size=16).digest()
                self._database.execute(
                    "INSERT OR IGNORE INTO records (request, at, tenant, version, held_out, content, num_bytes, "
                    "repeatable, question, answer, image) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        *(one.request_id, self._clock(), one.tenant, one.version, self._is_held_out(drawn), digest),
                        *(num_bytes, one.repeatable, one.question, one.answer, one.image),
                    ),
                )
                self._count(one.version, one.tenant, answered=1)
            self._drop()
        self._shrink()
        return num_refused

    def correct(self, request_id: str, label: str, by: Corrector) -> bool:
        """Label an answer; a later label replaces it. Returns False if there is no such record of this caller.

        Raises:
            Forbidden: An admin has labelled it, and the caller is none.
        """
        if not request_id.isascii():  # SQLite takes no unpaired surrogates
            return False
        found = self._one(
            "SELECT id, tenant, version, answer, label, trusted FROM records WHERE request = ?", (request_id,)
        )
        if found is None or not (by.admin or found[1] == by.name):
            return False
        number, tenant, version, answer, before, was_trusted = found
        if was_trusted and not by.admin:
            raise Forbidden(f"request {request_id!r} was corrected by an admin token; only one can change that")
        if (before, bool(was_trusted)) == (label, by.admin):
            return True  # no new correction
        with self._transaction():
            correction = self.fact("corrections") + 1
            self._set_fact("corrections", correction)
            self._database.execute(
                "UPDATE records SET label = ?, trusted = ?, correction = ? WHERE id = ?",
                (label, by.admin, correction, number),
            )
            was_wrong = before is not None and not same(before, answer)
            wrong = not same(label, answer)
            self._count(
                version,
                tenant,
                wrong=wrong - was_wrong,
                trusted_wrong=(wrong and by.admin) - (was_wrong and bool(was_trusted)),
            )
            self._drop()
        self._shrink()
        return True

    # -- reading ------------------------------------------------------------------------------------------------------

    def labelled(self) -> list[Labelled]:
        """Every corrected record, the one corrected last at the end."""
        rows = self._all(
            "SELECT id, correction, tenant, trusted, held_out, content, question, label FROM records "
            "WHERE label IS NOT NULL ORDER BY correction",
            (),
        )
        return [
            Labelled(number, correction, tenant, bool(trusted), bool(held_out), content, question, label)
            for number, correction, tenant, trusted, held_out, content, question, label in rows
        ]

    def held_out_uncorrected(self, within_s: float, most: int) -> list[Labelled]:
        """The latest held-out answers that were not corrected, each with itself as label, oldest first.

        Each tenant has the same number of them, as far as it has so many. Answers that no version can repeat are left
        out: all versions would have them wrong.

        Args:
            within_s: Later answers may still be corrected, and are left out.
        """
        rows = self._all(
            "SELECT id, tenant, content, question, answer FROM records WHERE id IN (SELECT id FROM "
            "(SELECT id, row_number() OVER (PARTITION BY tenant ORDER BY id DESC) AS place FROM records "
            "WHERE label IS NULL AND held_out AND repeatable AND at <= ?) ORDER BY place, id DESC LIMIT ?) ORDER BY id",
            (self._clock() - within_s, most),
        )
        return [
            Labelled(number, 0, tenant, False, True, content, question, answer)
            for number, tenant, content, question, answer in rows
        ]

    def image(self, number: int) -> bytes | None:
        """The picture of a record; None if it has none. Raises LookupError if the record was dropped."""
        found = self._one("SELECT image FROM records WHERE id = ?", (number,))
        if found is None:
            raise LookupError(f"record {number} was dropped")
        image: bytes | None = found[0]
        return image

    def num_corrections_since(self, number: int) -> int:
        """Records that were corrected after the correction with this number."""
        found = self._one("SELECT count(*) FROM records WHERE correction > ?", (number,))
        return 0 if found is None else int(found[0])

    def served(self, version: str) -> list[ServedCount]:
        """The answers of a version and their corrections, by tenant."""
        rows = self._all(
            "SELECT tenant, answered, wrong, trusted_wrong FROM served WHERE version = ? ORDER BY tenant", (version,)
        )
        return [ServedCount(*row) for row in rows]

    def size(self) -> StoreSize:
        # All of it is in the index, so that pictures are not read.
        found = self._one(
            "SELECT count(*), count(*) - coalesce(sum(label IS NULL), 0), coalesce(sum(num_bytes), 0) FROM records", ()
        )
        return StoreSize(*(found or (0, 0, 0)))

    def fact(self, name: str) -> int:
        """A number kept under a name; 0 before it is set."""
        return int(self._fact(name) or 0)

    def set_fact(self, name: str, value: int) -> None:
        with self._transaction():
            self._set_fact(name, value)

    def forget_version(self, version: str) -> None:
        """Count the answers of a version from 0 again. Later corrections of those so far do not count."""
        with self._transaction():
            self._database.execute("UPDATE records SET version = '' WHERE version = ?", (version,))
            self._database.execute("DELETE FROM served WHERE version = ?", (version,))

    def forget_counts(self, kept: Sequence[str]) -> None:
        """Forget what `served` returns for all versions but these."""
        with self._transaction():
            marks = ", ".join("?" for _ in kept)
            self._database.execute(f"DELETE FROM served WHERE version NOT IN ({marks})", tuple(kept))

    # -- internal -----------------------------------------------------------------------------------------------------

    def _is_held_out(self, content: bytes) -> bool:
        drawn = hashlib.blake2b(content, key=self._key, digest_size=_SPLIT_BYTES).digest()
        return int.from_bytes(drawn) < self._held_out * 256**_SPLIT_BYTES

    def _count(
        self, version: str, tenant: str | None, answered: int = 0, wrong: int = 0, trusted_wrong: int = 0
    ) -> None:
        key = (version, tenant or "")
        self._database.execute("INSERT OR IGNORE INTO served (version, tenant) VALUES (?, ?)", key)
        self._database.execute(
            "UPDATE served SET answered = answered + ?, wrong = wrong + ?, trusted_wrong = trusted_wrong + ? "
            "WHERE version = ? AND tenant = ?",
            (answered, wrong, trusted_wrong, *key),
        )

    def _drop(self) -> None:
        """Drop records above the limits, each the oldest one of the tenant that has the most.

        So a tenant with at most the limit divided by the number of tenants loses no record. The number of records is
        bounded with and without a label. Of a tenant's bytes, those without one are dropped first, but for a share:
        a new answer must have room until it is corrected.
        """
        for unlabelled in (True, False):
            counts = self._by_tenant("count(*)", "WHERE (label IS NULL) = ?", unlabelled)
            dropped: Counter[str | None] = Counter()
            for _ in range(counts.total() - self._max_records):
                tenant = max(counts, key=counts.__getitem__)
                counts[tenant] -= 1
                dropped[tenant] += 1
            for tenant, count in dropped.items():
                self._database.execute(
                    "DELETE FROM records WHERE id IN "
                    "(SELECT id FROM records WHERE (label IS NULL) = ? AND tenant IS ? ORDER BY id LIMIT ?)",
                    (unlabelled, tenant, count),
                )
        sizes = self._by_tenant("sum(num_bytes)")
        unlabelled_sizes = self._by_tenant("sum(num_bytes)", "WHERE label IS NULL")
        while sizes.total() > self._max_bytes:
            tenant = max(sizes, key=sizes.__getitem__)
            unlabelled = unlabelled_sizes[tenant] > _UNLABELLED_SHARE * sizes[tenant]
            num_bytes = self._drop_oldest(tenant, unlabelled)
            sizes[tenant] -= num_bytes
            unlabelled_sizes[tenant] -= num_bytes * unlabelled

    def _by_tenant(self, what: str, where: str = "", *values: object) -> Counter[str | None]:
        return Counter(dict(self._all(f"SELECT tenant, {what} FROM records {where} GROUP BY tenant", values)))

    def _drop_oldest(self, tenant: str | None, unlabelled: bool) -> int:
        """Drop one such record, which exists. Returns its bytes."""
        number, num_bytes = self._all(
            "SELECT id, num_bytes FROM records WHERE (label IS NULL) = ? AND tenant IS ? ORDER BY id LIMIT 1",
            (unlabelled, tenant),
        )[0]
        self._database.execute("DELETE FROM records WHERE id = ?", (number,))
        return int(num_bytes)

    def _shrink(self) -> None:
        """Give the pages of dropped records back to the file system; on a full disk, later."""
        with contextlib.suppress(sqlite3.Error):
            self._database.execute("PRAGMA incremental_vacuum").fetchall()

    def _fact(self, name: str) -> Any:
        found = self._one("SELECT value FROM facts WHERE name = ?", (name,))
        return None if found is None else found[0]

    def _set_fact(self, name: str, value: int) -> None:
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with _as_os_errors():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # a full disk may have rolled it back already
                    self._database.execute("ROLLBACK")
                raise

    def _one(self, query: str, values: tuple[object, ...]) -> tuple[Any, ...] | None:
        rows = self._all(query, values)
        return rows[0] if rows else None

    def _all(self, query: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        with _as_os_errors():
            return self._database.execute(query, values).fetchall()


def same(label: str, answer: str) -> bool:
    """Whether two answers are equal, except for white space."""
    return label.split() == answer.split()


def checked_label(label: str, max_chars: int) -> str:
    """A label without white space at its ends. Raises BadRequest if it is empty, too long, or not Unicode text."""
    text = label.strip()
    if not text:
        raise BadRequest("the label is empty; send the right answer", field="label")
    if len(text) > max_chars:
        raise BadRequest(f"the label has {len(text)} characters; at most {max_chars} are taken", field="label")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"label contains an unpaired surrogate at index {error.start}", field="label") from error
    return text


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(str(error)) from error
