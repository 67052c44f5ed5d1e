"""Live records on disk: their limits, their split, permissions of corrections, and crashes."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vlora.errors import BadConfig, BadRequest, Forbidden
from vlora.learning.live_store import AnsweredRequest, Corrector, LiveStore, ServedCount, checked_label

ADMIN, ANN, BEN = Corrector("root", True), Corrector("ann", False), Corrector("ben", False)


def store(folder: Path, **settings: Any) -> LiveStore:
    return LiveStore(folder / "live.sqlite", **{"max_records": 100, "max_bytes": 10**6, "held_out": 0.3, **settings})


def answered(name: str, tenant: str | None = "ann", question: str | None = None, image: bytes = b"") -> AnsweredRequest:
    return AnsweredRequest(name, tenant, "v1", question or f"what is {name} ?", "old", image)


def test_a_correction_labels_the_answer(tmp_path: Path) -> None:
    with_one = store(tmp_path)
    with_one.add([answered("r1", image=b"png"), answered("r2")])
    assert with_one.correct("r1", "new", ANN)
    (record,) = with_one.labelled()
    assert (record.question, record.label, record.tenant, record.trusted) == ("what is r1 ?", "new", "ann", False)
    assert with_one.image(record.number) == b"png"
    assert with_one.served("v1") == [ServedCount("ann", 2, 1, 0)]
    assert with_one.correct("r1", "old", ANN), "it was right after all"
    assert with_one.served("v1") == [ServedCount("ann", 2, 0, 0)]
    assert with_one.correct("r1", "new", ADMIN) and with_one.correct("r1", " new ", ADMIN)
    assert with_one.served("v1") == [ServedCount("ann", 2, 1, 1)]
    assert [one.trusted for one in with_one.labelled()] == [True]


def test_only_the_tenant_and_admins_correct_an_answer(tmp_path: Path) -> None:
    with_one = store(tmp_path)
    with_one.add([answered("r1")])
    assert not with_one.correct("r1", "new", BEN) and not with_one.correct("r2", "new", ADMIN)
    assert with_one.labelled() == []
    assert with_one.correct("r1", "true", ADMIN)
    with pytest.raises(Forbidden, match="'r1' was corrected by an admin token; only one can change that"):
        with_one.correct("r1", "false", ANN)
    assert [one.label for one in with_one.labelled()] == ["true"]


def test_records_of_one_content_are_in_one_part(tmp_path: Path) -> None:
    with_many = store(tmp_path, max_records=1000)
    names = [f"r{number}" for number in range(240)]
    with_many.add([answered(name, question=f"q{number % 120}") for number, name in enumerate(names)])
    for name in names:
        with_many.correct(name, "new", ANN)
    part_of: dict[bytes, set[bool]] = {}
    for record in with_many.labelled():
        part_of.setdefault(record.content, set()).add(record.held_out)
    assert len(part_of) == 120 and all(len(parts) == 1 for parts in part_of.values())
    held = sum(parts == {True} for parts in part_of.values())
    assert 18 <= held <= 58, "30 % of 120"


def test_a_caller_cannot_predict_the_part(tmp_path: Path) -> None:
    parts = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        one = store(tmp_path / name, held_out=0.5)
        one.add([answered(f"r{number}") for number in range(64)])
        for number in range(64):
            one.correct(f"r{number}", "new", ANN)
        parts.append([record.held_out for record in one.labelled()])
    assert parts[0] != parts[1]


def test_the_oldest_records_above_the_limits_are_dropped(tmp_path: Path) -> None:
    small = store(tmp_path, max_records=3)
    small.add([answered(f"r{number}") for number in range(5)])
    assert small.size().records == 3 and not small.correct("r1", "new", ANN) and small.correct("r2", "new", ANN)
    small.add([answered(f"s{number}") for number in range(9)])
    assert (small.size().records, small.size().corrected) == (4, 1), "answers do not displace corrections"


def test_bytes_are_bounded_on_disk(tmp_path: Path) -> None:
    small = store(tmp_path, max_bytes=400_000)
    for number in range(40):
        small.add([answered(f"r{number}", image=os.urandom(20_000))])
    assert 350_000 < small.size().num_bytes <= 400_000
    assert (tmp_path / "live.sqlite").stat().st_size < 600_000, "the pages of dropped records are given back"
    assert small.add([answered("large", image=os.urandom(150_000))]) == 1, "it would displace most others"
    assert not small.correct("large", "new", ANN)


def test_a_flood_of_one_tenant_does_not_displace_another(tmp_path: Path) -> None:
    small = store(tmp_path, max_records=20)
    small.add([answered(f"a{number}") for number in range(5)])
    for number in range(5):
        small.correct(f"a{number}", "true", ANN)
    for number in range(100):
        small.add([answered(f"b{number}", "ben")])
        small.correct(f"b{number}", "false", BEN)
    kept = [record.tenant for record in small.labelled()]
    assert kept.count("ann") == 5 and kept.count("ben") == 15


def test_dropped_records_leave_no_trace_on_disk(tmp_path: Path) -> None:
    small = store(tmp_path, max_records=2)
    small.add([answered("secret", question="SECRET-QUESTION")])
    small.add([answered(f"r{number}") for number in range(3)])
    small.close()
    assert b"SECRET-QUESTION" not in (tmp_path / "live.sqlite").read_bytes()
    assert stat.S_IMODE((tmp_path / "live.sqlite").stat().st_mode) == 0o600


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Writes beyond that fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_fails_one_call_and_changes_nothing(tmp_path: Path) -> None:
    full = store(tmp_path)
    full.add([answered("r1")])
    with files_of_at_most(60_000), pytest.raises(OSError):
        full.add([answered("r2", image=os.urandom(100_000))])
    assert full.size().records == 1 and full.correct("r1", "new", ANN)
    full.add([answered("r2", image=os.urandom(100_000))])
    assert full.size().records == 2


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "live.sqlite").write_bytes(b"not a database" * 1000)
    with pytest.raises(BadConfig, match=r"live\.sqlite cannot be used for live records \(file is not a database\)"):
        store(tmp_path)


WRITER = """
import sys
from pathlib import Path
from vlora.learning.live_store import AnsweredRequest, Corrector, LiveStore
store = LiveStore(Path(sys.argv[1]), max_records=10**5, max_bytes=10**9, held_out=0.3)
for number in range(10**6):
    store.add([AnsweredRequest(f"r{number}", "ann", "v1", "what ?", "old", b"x" * 5000)])
    assert store.correct(f"r{number}", "new", Corrector("ann", False))
    print(number, flush=True)
"""


def test_corrections_that_were_confirmed_survive_kill_9(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path / "live.sqlite")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) >= 20:
            break
    writer.send_signal(signal.SIGKILL)
    confirmed = 20 + len(writer.stdout.readlines())
    writer.wait()
    found = store(tmp_path, max_records=10**5, max_bytes=10**9)
    count = len(found.labelled())
    assert confirmed < count + 1 <= confirmed + 3
    assert found.served("v1") in ([ServedCount("ann", count, count, 0)], [ServedCount("ann", count + 1, count, 0)])


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("  ", "the label is empty; send the right answer"),
        ("x" * 11, "the label has 11 characters; at most 10 are taken"),
        ("\ud800", "label contains an unpaired surrogate at index 0"),
    ],
)
def test_labels_are_checked(label: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        checked_label(label, 10)
    assert checked_label(" stop sign\n", 10) == "stop sign"


def test_answers_that_no_version_repeats_do_not_count_as_right(tmp_path: Path) -> None:
    with_many = store(tmp_path, held_out=0.99)
    with_many.add([answered(f"r{number}")._replace(repeatable=number >= 30) for number in range(60)])
    found = [one.question for one in with_many.held_out_uncorrected(-1, 100)]
    assert len(found) > 20 and not {f"what is r{number} ?" for number in range(30)} & set(found)


def test_all_questions_about_a_picture_are_in_one_part(tmp_path: Path) -> None:
    with_many = store(tmp_path, held_out=0.5)
    names = [f"r{number}" for number in range(80)]
    with_many.add([answered(name, image=b"picture %d" % (number % 16)) for number, name in enumerate(names)])
    for name in names:
        with_many.correct(name, "new", ANN)
    parts: dict[bytes | None, set[bool]] = {}
    for record in with_many.labelled():
        parts.setdefault(with_many.image(record.number), set()).add(record.held_out)
    assert len(parts) == 16 and all(len(one) == 1 for one in parts.values()) and len(set(map(str, parts.values()))) == 2
