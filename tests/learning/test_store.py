"""Live records and the audit log on disk: limits, parts, permissions of corrections, full disks and kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import secrets
import signal
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vlora.errors import BadConfig, BadRequest, Forbidden
from vlora.learning.sample_store import AnsweredRequest, Corrector, SampleStore, ServedCount, checked_label
from vlora.learning.versions import AuditLog, Served

ADMIN, ANN, BEN = Corrector("root", True), Corrector("ann", False), Corrector("ben", False)


def store(folder: Path, **settings: Any) -> SampleStore:
    folder.mkdir(exist_ok=True)
    return SampleStore(folder / "live.sqlite", **{"max_records": 100, "max_bytes": 10**6, "held_out": 0.3, **settings})


def answered(name: str, tenant: str | None = "ann", question: str | None = None, image: bytes = b"") -> AnsweredRequest:
    return AnsweredRequest(name, tenant, "v1", question or f"what is {name} ?", "old", image)


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Writes beyond that fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_correction_labels_the_answer_and_counts_once(tmp_path: Path) -> None:
    own = store(tmp_path)
    own.add([answered("r1", image=b"png"), answered("r2")])
    assert own.correct("r1", "new", ANN) and own.correct("r1", "new", ANN) and own.fact("corrections") == 1
    (record,) = own.labelled()
    assert (record.question, record.label, record.tenant, record.trusted) == ("what is r1 ?", "new", "ann", False)
    assert own.image(record.number) == b"png" and own.served("v1") == [ServedCount("ann", 2, 1, 0)]
    assert own.correct("r1", "old", ANN) and own.fact("corrections") == 2
    assert own.served("v1") == [ServedCount("ann", 2, 0, 0)], "it was right after all"
    assert own.correct("r1", "old", ADMIN) and own.labelled()[0].trusted, "an admin confirms it"
    assert own.correct("r1", "new", ADMIN) and own.correct("r1", " new ", ADMIN)
    assert own.served("v1") == [ServedCount("ann", 2, 1, 1)]


def test_only_the_tenant_and_admins_correct_an_answer(tmp_path: Path) -> None:
    own = store(tmp_path)
    own.add([answered("r1")])
    assert not own.correct("r1", "new", BEN) and not own.correct("r2", "new", ADMIN) and own.labelled() == []
    assert own.correct("r1", "true", ADMIN)
    with pytest.raises(Forbidden, match="'r1' was corrected by an admin token; only one can change that"):
        own.correct("r1", "false", ANN)
    assert [one.label for one in own.labelled()] == ["true"]
    for label, message in (
        ("  ", "the label is empty; send the right answer"),
        ("x" * 11, "the label has 11 characters; at most 10 are taken"),
        ("\ud800", "label contains an unpaired surrogate at index 0"),
    ):
        with pytest.raises(BadRequest, match=message):
            checked_label(label, 10)
    assert checked_label(" stop sign\n", 10) == "stop sign"


def test_records_of_one_content_or_picture_are_in_one_part_that_no_caller_predicts(tmp_path: Path) -> None:
    drawn = []
    for key in ("first", "second", "pictures"):
        own = store(tmp_path / key, max_records=1000)
        pictures = [b"picture %d" % (number % 120) if key == "pictures" else b"" for number in range(240)]
        own.add(
            answered(f"r{number}", question=None if picture else f"q{number % 120}", image=picture)
            for number, picture in enumerate(pictures)
        )
        assert all(own.correct(f"r{number}", "new", ANN) for number in range(240))
        parts: dict[Any, set[bool]] = {}
        for record in own.labelled():
            parts.setdefault(own.image(record.number) or record.content, set()).add(record.held_out)
        assert len(parts) == 120 and all(len(part) == 1 for part in parts.values())
        assert 18 <= sum(part == {True} for part in parts.values()) <= 58, "30 % of 120"
        drawn.append([record.held_out for record in own.labelled()])
    assert drawn[0] != drawn[1]


def test_the_oldest_records_above_the_limits_are_dropped(tmp_path: Path) -> None:
    small = store(tmp_path, max_records=3)
    small.add([answered(f"r{number}") for number in range(5)])
    assert small.size().records == 3 and not small.correct("r1", "new", ANN) and small.correct("r2", "new", ANN)
    small.add([answered(f"s{number}") for number in range(9)])
    assert (small.size().records, small.size().corrected) == (4, 1), "answers do not displace corrections"


def test_bytes_are_bounded_on_disk_and_dropped_records_leave_no_trace(tmp_path: Path) -> None:
    small = store(tmp_path, max_bytes=400_000)
    small.add([answered("secret", question="SECRET-QUESTION")])
    for number in range(40):
        small.add([answered(f"r{number}", image=os.urandom(20_000))])
    file = tmp_path / "live.sqlite"
    assert 350_000 < small.size().num_bytes <= 400_000
    assert file.stat().st_size < 600_000, "the pages of dropped records are given back"
    assert small.add([answered("large", image=os.urandom(150_000))]) == 1, "it would displace most others"
    assert not small.correct("large", "new", ANN)
    small.close()
    assert b"SECRET-QUESTION" not in file.read_bytes() and stat.S_IMODE(file.stat().st_mode) == 0o600
    full = store(tmp_path / "corrected", max_bytes=40_000)
    for number in range(80):
        full.add([answered(f"r{number}", image=bytes(980))])
        assert full.correct(f"r{number}", "new", ANN), f"answer {number} was dropped before its correction"
    full.add([answered(f"s{number}", image=bytes(980)) for number in range(80)])
    assert 25 <= full.size().corrected < 35, "answers without a correction have a quarter"


@pytest.mark.parametrize("limit", ["records", "bytes"])
@pytest.mark.parametrize("corrected", [False, True])
def test_a_tenant_within_its_share_loses_no_record(tmp_path: Path, limit: str, corrected: bool) -> None:
    """Random arrivals of four tenants. Those beyond their share keep their latest records; the limit is used."""
    limits = {"max_records": 40} if limit == "records" else {"max_bytes": 40_000}
    small, counts = store(tmp_path, **limits), {"flood": 150, "more": 40, "share": 10, "few": 3}
    sent: dict[str, list[str]] = {name: [] for name in counts}
    order = [name for name, count in counts.items() for _ in range(count)]
    random.Random(0).shuffle(order)
    for place, tenant in enumerate(order):
        name = f"r{place}"
        sent[tenant].append(name)
        small.add([answered(name, tenant, question=f"{place:17}", image=bytes(980))])
        if tenant == "flood" and corrected:
            assert small.correct(name, "old", Corrector("flood", False)), "it confirms its own answers"
    small.close()
    kept: dict[str, list[str]] = {name: [] for name in sent}
    with sqlite3.connect(tmp_path / "live.sqlite") as database:
        for tenant, name in database.execute("SELECT tenant, request FROM records ORDER BY id"):
            kept[tenant].append(name)
    assert all(kept[name] == sent[name][-len(kept[name]) :] for name in sent), "the oldest ones are dropped"
    assert kept["share"] == sent["share"] and kept["few"] == sent["few"]
    if limit == "records" and corrected:  # records with a label have their own number
        assert (len(kept["flood"]), len(kept["more"])) == (40, 26)
    else:
        assert sum(map(len, kept.values())) == 40 and abs(len(kept["more"]) - len(kept["flood"])) <= 1


def test_an_evaluation_has_the_answers_of_all_tenants_that_a_version_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_bytes", bytes)  # the same records are held out in every run
    many = store(tmp_path, max_records=1000, held_out=0.5, clock=lambda: 0.0)
    many.add([answered(f"a{number}") for number in range(20)])
    many.add([answered(f"b{number}", "ben") for number in range(500)])
    found, everyone = many.held_out_uncorrected(-1, 40), many.held_out_uncorrected(-1, 1000)
    own, others = ([one for one in everyone if one.tenant == name] for name in ("ann", "ben"))
    assert len(found) == 40 and [one for one in found if one.tenant == "ann"] == own and 3 < len(own) < 18
    assert [one for one in found if one.tenant == "ben"] == others[len(own) - 40 :], "the latest ones, oldest first"
    drawn = store(tmp_path / "drawn", held_out=0.99)
    drawn.add([answered(f"r{number}")._replace(repeatable=number >= 30) for number in range(60)])
    asked = [one.question for one in drawn.held_out_uncorrected(-1, 100)]
    assert len(asked) > 20 and not {f"what is r{number} ?" for number in range(30)} & set(asked)


def test_a_full_disk_fails_one_call_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    full, large = store(tmp_path), answered("r2", image=os.urandom(100_000))
    full.add([answered("r1")])
    with files_of_at_most(60_000), pytest.raises(OSError):
        full.add([large])
    assert full.size().records == 1 and full.correct("r1", "new", ANN)
    full.add([large])
    assert full.size().records == 2
    full.close()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "live.sqlite").write_bytes(b"not a database" * 1000)
    with pytest.raises(BadConfig, match=r"live\.sqlite cannot be used for live records \(file is not a database\)"):
        store(tmp_path / "damaged")


def test_corrections_that_were_confirmed_survive_kill_9(tmp_path: Path) -> None:
    limits = {"max_records": 10**5, "max_bytes": 10**9}
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            own = store(tmp_path, **limits)
            for number in range(10**6):
                own.add([answered(f"r{number}", image=b"x" * 5000)])
                assert own.correct(f"r{number}", "new", ANN)
                os.write(writes, b".")
        finally:
            os._exit(1)
    os.close(writes)
    confirmed = sum(len(os.read(reads, 1)) for _ in range(20))
    os.kill(child, signal.SIGKILL)
    while rest := os.read(reads, 1000):
        confirmed += len(rest)
    os.close(reads)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]) and confirmed >= 20
    found = store(tmp_path, **limits)
    count = len(found.labelled())
    assert confirmed <= count <= confirmed + 1
    assert found.served("v1") in ([ServedCount("ann", count, count, 0)], [ServedCount("ann", count + 1, count, 0)])


# -- the audit log -----------------------------------------------------------------------------------------------------


def audit_log(folder: Path) -> AuditLog:
    return AuditLog(folder / "trail.jsonl", lambda: 86400.0)


def test_a_line_has_time_caller_versions_and_reason(tmp_path: Path) -> None:
    fields = {"version": "v2", "before": "v1", "why": "it is better", "details": {"lower": 0.5}}
    audit_log(tmp_path).append("promoted", "ann", **fields)  # type: ignore[arg-type]
    (line,) = (tmp_path / "trail.jsonl").read_text().splitlines()
    stamp = {"at": 86400.0, "time": "1970-01-02T00:00:00Z"}
    assert json.loads(line) == {**stamp, "event": "promoted", "by": "ann", **fields}


def test_the_last_decision_sets_the_served_version(tmp_path: Path) -> None:
    own = audit_log(tmp_path)
    assert own.served() is None
    steps: list[tuple[str, str, Served]] = [
        ("imported", "a", Served("a", ())),
        ("evaluated", "b", Served("a", ())),
        ("promoted", "b", Served("b", ("a",))),
        ("promoted", "c", Served("c", ("a", "b"))),
        ("rolled_back", "b", Served("b", ("a",))),
        ("promoted", "c", Served("c", ("a", "b"))),
        ("promoted", "a", Served("a", ("b", "c"))),
        ("rolled_back", "b", Served("b", ())),
        ("rolled_back", "d", Served("d", ())),
    ]
    for event, version, expected in steps:
        own.append(event, "x", version=version)  # type: ignore[arg-type]
        assert own.served() == audit_log(tmp_path).served() == expected


def test_a_line_that_is_not_whole_on_disk_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own, file = audit_log(tmp_path), tmp_path / "trail.jsonl"
    own.append("imported", "x", version="a")
    size = file.stat().st_size

    def fail(descriptor: int) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(os, "fsync", fail)
        own.append("promoted", "a", version="b", before="a")
    assert own.served() == audit_log(tmp_path).served() == Served("a", ())
    with files_of_at_most(size + 40), pytest.raises(OSError, match="No space left on device"):
        own.append("promoted", "x", version="b")
    assert file.stat().st_size == size, "the part was taken back"
    with file.open("ab") as opened:
        opened.write(b'{"at": 1, "time": ')  # a machine without power
    assert own.served() == audit_log(tmp_path).served() == Served("a", ()) and "line 2 is no entry" in caplog.text
    own.append("promoted", "x", version="c")
    assert audit_log(tmp_path).served() == Served("c", ("a",))
