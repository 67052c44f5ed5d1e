"""Live records on disk: their limits, their split, permissions of corrections, and crashes."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import secrets
import signal
import sqlite3
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


@pytest.mark.parametrize("limit", ["records", "bytes"])
@pytest.mark.parametrize("corrected", [False, True])
def test_a_tenant_within_its_share_loses_no_record(tmp_path: Path, limit: str, corrected: bool) -> None:
    """Random arrivals of four tenants. Those beyond their share keep their latest records; the limit is used."""
    limits = {"max_records": 40} if limit == "records" else {"max_bytes": 40_000}
    small, drawn = store(tmp_path, **limits), random.Random(0)
    sent: dict[str, list[str]] = {name: [] for name in ("flood", "more", "share", "few")}
    order = [name for name, count in (("flood", 150), ("more", 40), ("share", 10), ("few", 3)) for _ in range(count)]
    drawn.shuffle(order)
    for place, tenant in enumerate(order):
        name = f"r{place}"
        sent[tenant].append(name)
        small.add([answered(name, tenant, question=f"{place:17}", image=bytes(980))])
        if tenant == "flood" and corrected:
            assert small.correct(name, "old", Corrector("flood", False)), "it confirms its own answers"
    small.close()
    with sqlite3.connect(tmp_path / "live.sqlite") as database:
        kept: dict[str, list[str]] = {name: [] for name in sent}
        for tenant, name in database.execute("SELECT tenant, request FROM records ORDER BY id"):
            kept[tenant].append(name)
    assert all(kept[name] == sent[name][-len(kept[name]) :] for name in sent), "the oldest ones are dropped"
    assert kept["share"] == sent["share"] and kept["few"] == sent["few"]
    if limit == "records" and corrected:  # records with a label have their own number
        assert (len(kept["flood"]), len(kept["more"])) == (40, 26)
    else:
        assert sum(map(len, kept.values())) == 40 and abs(len(kept["more"]) - len(kept["flood"])) <= 1


def test_new_answers_can_be_corrected_when_corrections_fill_the_disk(tmp_path: Path) -> None:
    small = store(tmp_path, max_bytes=40_000)
    for number in range(80):
        small.add([answered(f"r{number}", image=bytes(980))])
        assert small.correct(f"r{number}", "new", ANN), f"answer {number} was dropped before its correction"
    small.add([answered(f"s{number}", image=bytes(980)) for number in range(80)])
    assert 25 <= small.size().corrected < 35, "answers without a correction have a quarter"


def test_a_flood_does_not_hide_the_answers_of_others_from_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_bytes", bytes)  # the same records are held out in every run
    with_many = store(tmp_path, max_records=1000, held_out=0.5, clock=lambda: 0.0)
    with_many.add([answered(f"a{number}") for number in range(20)])
    with_many.add([answered(f"b{number}", "ben") for number in range(500)])
    found = with_many.held_out_uncorrected(-1, 40)
    everyone = with_many.held_out_uncorrected(-1, 1000)
    own = [one for one in everyone if one.tenant == "ann"]
    assert len(found) == 40 and [one for one in found if one.tenant == "ann"] == own and 3 < len(own) < 18
    others = [one for one in everyone if one.tenant == "ben"]
    assert [one for one in found if one.tenant == "ben"] == others[len(own) - 40 :], "the latest ones, oldest first"


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


def test_the_same_correction_again_is_no_new_one(tmp_path: Path) -> None:
    """Otherwise one token could begin trainings without an end."""
    with_one = store(tmp_path)
    with_one.add([answered("r1"), answered("r2")])
    for label in ("new", "new", "newer"):
        assert with_one.correct("r1", label, ANN)
    assert with_one.fact("corrections") == 2
    assert with_one.correct("r1", "newer", ADMIN) and with_one.labelled()[0].trusted, "an admin confirms it"
