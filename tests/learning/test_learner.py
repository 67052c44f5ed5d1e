"""From corrections to promotion and back, over a scripted model: decisions, attackers, failures, and kill -9."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.learning.learners import ADMIN, School, learning, questions, run, settle, with_learner
from tests.learning.scripted_model import ScriptedModel, nothing, write_content
from tests.processes import KillingItself, in_child
from vlora.adapter_files import content_hash
from vlora.confidence import lower_bound
from vlora.errors import (
    BadAdapter,
    BadConfig,
    BadRequest,
    DeadlineMissed,
    EngineDead,
    OverCapacity,
    StepFailed,
    VLoraError,
)
from vlora.learning.evaluation import Interrupted
from vlora.learning.learner import MAX_INTERRUPTED, Learner
from vlora.learning.learning import Learning
from vlora.learning.plan import LearningEntry, LearningSettings
from vlora.learning.sample_store import AnsweredRequest, Corrector, StoreSize
from vlora.learning.versions import AuditLog, Entry, Event, VersionFolder
from vlora.training.plan import TrainingSettings

USER = Corrector("bad", False)
FULL = OverCapacity("there is no room")
PROMOTED = ["imported", "training", "evaluated", "promoted", "training_ended"]
TRUSTED = {f"t{number}": "new" for number in range(20)}


@learning(train_after=40)
async def test_corrections_make_a_better_version_which_is_promoted(school: School, learner: Learner) -> None:
    first = learner.loaded
    school.record(learner, questions(39), "new")
    await settle(learner)
    assert school.events() == ["imported"], "39 corrections are not 40"
    assert (await learner.status()).until_training == 1
    school.record(learner, ["last"], "new")
    await settle(learner)
    assert school.events() == PROMOTED
    assert stat.S_IMODE((school.folder / "own").stat().st_mode) == 0o700
    assert learner.loaded != first == school.audit_log()[3]["before"]
    assert school.model.loaded == {"signs": learner.loaded}, "the candidate's own name is free again"
    assert content_hash(school.model.folders["signs"]) == learner.loaded, "the engine has the promoted content"
    versions = (await learner.status()).versions
    assert [(one.version, one.state) for one in versions] == [(learner.loaded, "present"), (first, "previous")]
    live = versions[0].live
    assert live is not None and live.candidate == live.count > live.present == 0
    held = {question for _, question in school.model.asked}
    training = school.audit_log()[1]["details"]
    assert len(held) == live.count and training["records"] == 40 - len(held), "none is in both parts"
    await settle(learner)
    assert len(school.events()) == 5, "nothing new"


@learning(train_after=30)
async def test_a_version_that_is_not_better_is_refused(school: School, learner: Learner) -> None:
    first = learner.loaded
    school.record(learner, questions(30), "old")  # the present version is right
    await settle(learner)
    assert school.events() == ["imported", "training", "evaluated", "training_ended"] and learner.loaded == first
    assert "not above the present version's 1.000" in school.audit_log()[2]["why"]
    assert [one.state for one in (await learner.status()).versions] == ["refused", "present"]


@pytest.mark.parametrize("uncorrected_are_right", [True, False])
@learning(takes=["uncorrected_are_right"], train_after=40)
async def test_right_answers_without_a_correction_count(school: School, learner: Learner) -> None:
    """Corrections alone say how a version does on the present one's mistakes."""
    school.record(learner, questions(60, "right"), None)
    school.now_s += 301
    school.record(learner, questions(40, "late"), None)  # may be corrected still
    school.record(learner, questions(40, "wrong"), "new")
    await settle(learner)
    live = school.evaluated()["live"]
    if school.settings["uncorrected_are_right"]:
        assert 15 < live["present"] < 45 and live["candidate"] < live["count"] - live["present"] + 1
        assert "promoted" not in school.events()
    else:
        assert live["present"] == 0 and "promoted" in school.events()


# -- one token against others ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trusted", "max_share", "promoted"),
    [({}, 0.5, False), ({"t": "old"}, 1.0, False), ({}, 1.0, True)],
    ids=["bounded share", "operator's records", "unprotected"],
)
@learning(takes=["trusted", "max_share"], train_after=120)
async def test_poisoned_corrections_do_not_get_through(school: School, learner: Learner, promoted: bool) -> None:
    """An attacker corrects right answers, more than all others; many of the corrections are held out."""
    first = learner.loaded
    school.record(learner, questions(15, "good"), "old", "good", Corrector("good", False))
    school.record(learner, questions(105, "bad"), "poison", "bad", USER)
    await settle(learner)
    assert "evaluated" in school.events(), "the attack was trained on"
    assert ("promoted" in school.events(), learner.loaded != first) == (promoted, promoted)


@learning(train_after=20)
async def test_one_tenant_alone_trains_nothing(school: School, learner: Learner) -> None:
    school.record(learner, questions(40), "poison", "bad", USER)
    await settle(learner)
    assert school.events() == ["imported"]
    assert (await learner.status()).until_training == 20, "it does not try again and again"


@learning(train_after=120, max_evaluated=16)
async def test_the_latest_corrections_of_one_tenant_do_not_decide(school: School, learner: Learner) -> None:
    """An evaluation asks the latest records only, which may all be an attacker's."""
    school.record(learner, questions(60, "good"), "old", "good", Corrector("good", False))
    school.record(learner, questions(60, "bad"), "poison", "bad", USER)
    await school.promote(learner, "evil", "poison", force=False)
    await settle(learner)
    live = next(one for one in school.audit_log() if one["event"] == "evaluated")["details"]["live"]
    assert (live["count"], live["candidate"]) == (16, 8) and "promoted" not in school.events()


@learning(max_evaluated=40)
async def test_a_flood_of_answers_does_not_hide_corrections_from_an_evaluation(
    school: School, learner: Learner
) -> None:
    school.record(learner, questions(24, "wrong"), "new", "good")
    school.record(learner, questions(400, "flood"), None, "bad")
    school.now_s += 301
    await school.promote(learner, "better", "new", dict.fromkeys(questions(400, "flood"), "old"), force=False)
    await settle(learner)
    live = school.evaluated()["live"]
    assert live["count"] == live["candidate"] == 40 and 4 < live["gained"] < 20
    assert school.events()[-1] == "promoted"


# -- promotion and rollback --------------------------------------------------------------------------------------------


async def promoted_once(school: School, learner: Learner) -> None:
    school.record(learner, questions(24, "before"), None)
    school.record(learner, questions(8, "wrong"), "new")  # a quarter
    await school.promote(learner, "other")


@learning()
async def test_a_version_that_turns_out_worse_is_rolled_back(school: School, learner: Learner) -> None:
    first = learner.loaded
    await promoted_once(school, learner)
    second = learner.loaded
    school.record(learner, questions(12), None)
    school.record(learner, questions(2, "x"), "new")
    await settle(learner)
    assert learner.loaded == second != first, "two of 14 are not worse than a quarter"
    with school.model.failing("load", [FULL]), pytest.raises(OverCapacity):
        await school.promote(learner, "third", "x")  # it is watched after another could not be loaded
    assert learner.loaded == second == school.model.loaded["signs"]
    assert school.events()[-2:] == ["promoted", "rolled_back"]
    assert school.audit_log()[-1]["why"] == "it cannot be loaded: there is no room"
    school.record(learner, questions(40, "y"), "new")
    await settle(learner)
    assert learner.loaded == first == school.model.loaded["signs"]
    last = school.audit_log()[-1]
    assert (last["event"], last["by"], last["version"], last["before"]) == ("rolled_back", "server", first, second)
    assert "42 of its 54 answers were corrected" in last["why"] and "version before (8 of 32)" in last["why"]
    school.record(learner, questions(10, "z"), "new")
    await settle(learner)
    assert school.events().count("rolled_back") == 2, "there is no version before"
    await learner.promote("ann", version=second[:8], path=None, force=True)
    await settle(learner)
    assert learner.loaded == second, "it is watched from 0"


@learning()
async def test_late_corrections_of_an_earlier_period_do_not_count(school: School, learner: Learner) -> None:
    """A version that is promoted again is watched from 0; its earlier answers may be corrected after that."""
    await promoted_once(school, learner)
    second = learner.loaded
    school.record(learner, questions(6, "kept"), None)
    late = [f"r{number}" for number in range(school.num_answers - 5, school.num_answers + 1)]
    await learner.roll_back("ann", None)
    await learner.promote("ann", version=second, path=None, force=True)
    school.record(learner, questions(2, "again"), None)
    for name in late:
        assert learner.store.correct(name, "new", ADMIN)
    await settle(learner)
    assert [(one.answered, one.wrong) for one in learner.store.served(second)] == [(2, 0)]


@learning(trusted=TRUSTED)
async def test_promotion_and_rollback_by_hand(school: School, learner: Learner) -> None:
    first = learner.loaded
    for name, default in (("worse", "wrong"), ("better", "new")):
        await school.promote(learner, name, default, force=False)
    assert learner.loaded == first, "they are evaluated first"
    await settle(learner)
    second = learner.loaded
    assert school.events() == ["imported", "evaluated", "evaluated", "promoted"]
    assert [entry["by"] for entry in school.audit_log()] == ["server", "ann", "ann", "ann"]
    await learner.roll_back("ben", None)
    assert learner.loaded == first and school.audit_log()[-1]["by"] == "ben"
    with pytest.raises(BadRequest, match="adapter 'signs' has no earlier version"):
        await learner.roll_back("ben", None)
    with pytest.raises(BadRequest, match=rf"version {first[:12]} of adapter 'signs' is served already"):
        await learner.promote("ben", version=first[:6], path=None, force=False)
    with pytest.raises(BadRequest, match="no version begins with 'xyz' in adapter 'signs'; on disk: "):
        await learner.roll_back("ben", "xyz")
    with pytest.raises(BadAdapter, match=r"no adapter_config\.json; it is a folder of adapters"):
        await learner.promote("ben", version=None, path=str(school.folder), force=True)
    await learner.promote("ben", version=second, path=None, force=True)
    assert learner.loaded == second == content_hash(school.model.folders["signs"])


@learning(trusted=TRUSTED)
async def test_other_content_than_was_evaluated_is_not_served(school: School, learner: Learner) -> None:
    first = learner.loaded
    await school.promote(learner, "other", "new", force=False)

    def change(what: str) -> None:  # after the last question, before it is promoted
        if what == "answer" and len(school.model.asked) == 39:
            for folder in (school.folder / "own" / "versions").iterdir():
                if folder.name != first:
                    write_content(folder, {}, "evil")

    school.model.before_call = change
    await settle(learner)
    assert learner.loaded == first == school.model.loaded["signs"]
    assert "is damaged" in school.audit_log()[-1]["why"]


@learning(max_versions=3)
async def test_the_number_of_versions_is_bounded(school: School, learner: Learner) -> None:
    for number in range(6):
        await school.promote(learner, f"n{number}", f"answer {number}")
    kept = [one.version for one in (await learner.status()).versions]
    assert len(kept) == 3 and kept[0] == learner.loaded
    await learner.roll_back("ann", None)
    assert learner.loaded == kept[1]
    for number in range(8):
        await school.promote(learner, f"waits{number}", f"waits {number}", force=False)
    for number in range(4):
        with pytest.raises(BadRequest, match="8 versions of adapter 'signs' wait for their evaluation"):
            await school.promote(learner, f"more{number}", f"more {number}", force=False)
    assert len(list((school.folder / "own" / "versions").iterdir())) <= 11, "those that wait are copied to a limit"


def test_the_folder_is_locked_and_needs_an_intact_version(tmp_path: Path) -> None:
    school, loaded = School(tmp_path), []

    async def work(school: School, learner: Learner) -> None:
        with pytest.raises(BadConfig, match="own is in use by process"):
            school.open()
        loaded.append(learner.loaded)
        await promoted_once(school, learner)
        (learner.present_folder / "adapter_model.safetensors").write_bytes(b"damaged")

    async def after(school: School, learner: Learner) -> None:
        assert [learner.loaded] == loaded and school.audit_log()[-1]["why"] == "its files are damaged or missing"

    with_learner(school, work)
    with_learner(school, after)
    other = School(tmp_path / "other")
    other.initial = None  # type: ignore[assignment]
    with pytest.raises(BadConfig, match="adapter 'signs' learns, but there is none yet; give --adapter signs=FOLDER"):
        with_learner(other, work)


def test_only_what_a_killed_process_left_is_deleted(tmp_path: Path) -> None:
    kept, left = ("notes.txt", "backup-1/file"), ("unfinished-copy/file", "unfinished-1-x", "incoming.part/file")
    for name in (*kept, *left):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert VersionFolder(tmp_path).versions == []
    assert {file.name for file in tmp_path.iterdir()} == {"notes.txt", "backup-1"}


# -- evaluations while the engine is late, full, dead or restarted -----------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.5])
@learning(train_after=40)
async def test_answers_that_come_late_do_not_change_an_evaluation(
    school: School, learner: Learner, share: float
) -> None:
    """A server that is full, an engine that restarts, and deadlines, at half of the calls: they are repeated."""
    school.record(learner, questions(40), "new")
    late = [OverCapacity("full"), DeadlineMissed("late"), EngineDead("killed"), StepFailed("failed")]
    with school.model.failing("answer", late, share):
        await settle(learner)
    assert school.events() == PROMOTED and "left_out" not in school.evaluated()
    held_out = 40 - school.audit_log()[1]["details"]["records"]
    live = school.evaluated()["live"]
    assert (live["count"], live["present"], live["candidate"]) == (held_out, 0, held_out)
    assert bool(school.pauses_s) == (share > 0) and max([1.0, *school.pauses_s]) <= 16


def unanswered(school: School, side: str, names: Sequence[str]) -> None:
    """These questions are too much for one side, each time."""
    answer = school.model.answer

    async def late(question: str, image: bytes | None, *, adapter: str, version: str, label: str) -> str:
        if adapter == side and question in names:
            raise DeadlineMissed("the request was not answered within 120 s")
        return await answer(question, image, adapter=adapter, version=version, label=label)

    school.model.answer = late  # type: ignore[method-assign]


@pytest.mark.parametrize("side", ["signs", "signs~candidate"])
@learning(train_after=40)
async def test_an_item_without_an_answer_never_helps_a_candidate(school: School, learner: Learner, side: str) -> None:
    """It counts for neither if the present version does not answer; otherwise the candidate has it wrong."""
    school.record(learner, questions(40), "new")
    unanswered(school, side, [next(one.question for one in learner.store.labelled() if one.held_out)])
    await settle(learner)
    count = 40 - school.audit_log()[1]["details"]["records"]
    details, by_present = school.evaluated(), side == "signs"
    live = details["live"]
    assert (live["count"], live["present"], live["candidate"]) == (count - by_present, 0, count - 1)
    assert (details.get("left_out"), details.get("unanswered")) == ((1, None) if by_present else (None, 1))
    assert school.pauses_s == [1, 2, 4, 8, 16]


@learning(trusted={f"t{number}": "old" for number in range(40)}, train_after=40)
async def test_a_candidate_that_does_not_answer_where_the_present_version_is_right_is_refused(
    school: School, learner: Learner
) -> None:
    """It is right in all that it answers: without those that it does not answer it would be better."""
    school.record(learner, questions(40), "new")
    unanswered(school, "signs~candidate", ["t3", "t14", "t15"])
    await school.promote(learner, "better", "new", school.trusted, force=False)
    await learner.advance()
    assert school.evaluated()["unanswered"] == 3 and "promoted" not in school.events()
    assert any(
        one.get("why", "").startswith("on the operator's 40 records it has 37 right") for one in school.audit_log()
    )


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("answer", OverCapacity("full")),
        ("answer", DeadlineMissed("late")),
        ("answer", EngineDead("killed")),
        ("load", FULL),
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
@learning(train_after=40)
async def test_an_evaluation_without_an_engine_is_repeated_and_given_up(
    school: School, learner: Learner, what: str, error: VLoraError
) -> None:
    """From its beginning, at most some times: then with one line in the audit log, and no accuracy."""
    school.record(learner, questions(40), "new")
    with school.model.failing(what, [error]):
        for _ in range(MAX_INTERRUPTED - 1):
            with pytest.raises(Interrupted, match=str(error)):
                await settle(learner)
            assert school.events() == ["imported", "training"], "nothing was decided"
        if what == "answer":
            assert school.pauses_s[:5] == [1, 2, 4, 8, 16]
            await settle(learner)
            assert school.events() == ["imported", "training", "evaluated", "training_ended"]
            entry = school.audit_log()[2]
            assert entry["why"].startswith("it cannot be evaluated: ") and "live" not in entry["details"]
    if what == "answer":
        await learner.promote("ann", version=None, path=None, force=False)  # the version is on disk still
    await settle(learner)
    assert "promoted" in school.events()


@learning(train_after=40, max_records=40)
async def test_records_that_were_dropped_meanwhile_are_not_asked_without_their_picture(
    school: School, learner: Learner
) -> None:
    school.record(learner, questions(40), "new")

    def drop(what: str) -> None:
        if what == "answer":
            school.model.before_call = nothing
            other = Corrector("b", False)
            learner.store.add([AnsweredRequest(f"b{n}", "b", learner.loaded, f"b{n}", "old", None) for n in range(25)])
            assert all(learner.store.correct(f"b{n}", "new", other) for n in range(25))

    school.model.before_call = drop
    await settle(learner)
    left_out = school.evaluated()["left_out"]
    records = school.audit_log()[1]["details"]["records"]
    assert left_out > 0 and school.evaluated()["live"]["count"] + left_out == 40 - records


@learning()
async def test_a_version_that_turns_out_worse_is_rolled_back_during_an_evaluation(
    school: School, learner: Learner
) -> None:
    """An evaluation may take hours on a busy server."""
    first, asked = learner.loaded, 0
    school.record(learner, questions(40, "before"), None)
    await school.promote(learner, "bad")
    school.record(learner, questions(20, "old"), None)
    school.now_s += 301

    def correct(what: str) -> None:
        nonlocal asked
        asked += what == "answer"
        if asked == 8 and what == "answer":
            school.record(learner, questions(40, "late"), "new")

    school.model.before_call = correct
    await school.promote(learner, "x", "x", force=False)
    await learner.advance()
    assert learner.loaded == first and "rolled_back" in school.events() and asked < 20


# -- full disks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["records", "training", "evaluated"])
@learning(train_after=40)
async def test_a_full_disk_leaves_no_part_and_repeats_no_evaluation(
    school: School, learner: Learner, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A part would keep the disk full, so that no correction could be kept. Later the training goes on."""
    school.record(learner, questions(40), "new")
    image, append, calls = learner.store.image, AuditLog.append, 0

    def read(number: int) -> bytes | None:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return image(number)

    def add(audit_log: AuditLog, event: Event, by: str, **fields: Any) -> Entry:
        if event == where:
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(audit_log, event, by, **fields)

    with monkeypatch.context() as patched:
        patched.setattr(learner.store, "image", read if where == "records" else image)
        patched.setattr(AuditLog, "append", add)
        for _ in range(1 if where == "records" else 3):
            with pytest.raises(OSError):
                await settle(learner)
    num_asked = len(school.model.asked)
    assert bool(list((school.folder / "own").glob("training-*"))) == (where == "evaluated")
    await settle(learner)
    assert school.events() == PROMOTED
    assert len(school.model.asked) == 2 * school.evaluated()["live"]["count"]
    assert num_asked == (len(school.model.asked) if where == "evaluated" else 0), "no answer is computed again"


@learning(train_after=40)
async def test_corrections_are_kept_while_a_training_is_written(
    school: School, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's thread is free after some records: pictures may be many."""
    monkeypatch.setattr("vlora.learning.attempt.PART", 4)
    school.record(learner, questions(60), "new")
    image, size, order = learner.store.image, learner.store.size, list[str]()
    read, asked = threading.Event(), threading.Event()

    def noted(number: int) -> bytes | None:
        order.append("record")
        read.set()
        asked.wait(10)
        return image(number)

    def sized() -> StoreSize:
        order.append("status")
        return size()

    monkeypatch.setattr(learner.store, "image", noted)
    writing = asyncio.ensure_future(learner.advance())
    await asyncio.to_thread(read.wait, 10)
    monkeypatch.setattr(learner.store, "size", sized)
    status = asyncio.ensure_future(learner.status())
    await asyncio.sleep(0)  # until it waits for the store's thread
    asked.set()
    await asyncio.gather(status, writing)
    assert order.index("status") <= 12 and order.count("record") > 25


# -- ends of processes -------------------------------------------------------------------------------------------------


def test_a_server_closes_while_its_engine_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlora.learning.learning.CLOSE_S", 0.05)
    monkeypatch.setattr("vlora.learning.learning.POLL_S", 0.0)
    model, initial = ScriptedModel(), write_content(tmp_path / "initial", {}, "old")
    settings = LearningSettings(name="signs", training=TrainingSettings(steps=1))

    async def main() -> None:
        learning = Learning(tmp_path / "learning", [LearningEntry(settings, (), ())], {"signs": str(initial)}, model)
        model.register(learning.folders)
        hangs = asyncio.Event()

        async def unload(name: str) -> None:
            hangs.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.Event().wait()

        model.unload = unload  # type: ignore[method-assign]
        await learning.start()
        other = str(write_content(tmp_path / "other", {}))
        await learning.get("signs").promote("ann", version=None, path=other, force=False)
        await hangs.wait()
        await learning.close()

    run(main())


KILLED = {"train_after": 18, "max_share": 1.0, "confidence": 0.6}


def learn(folder: Path, die_at: int | None, places: Path | None = None) -> None:
    """Corrections, a training, a promotion, another one by hand, and a rollback.

    Args:
        folder: With its files.
        die_at: The number of the file operation or call of the engine at which the process kills itself.
        places: A file for the number of all of them.
    """
    school, killing = School(folder, settings=KILLED), KillingItself(folder / "own", die_at)

    async def work(school: School, learner: Learner) -> None:
        if not learner.store.size().records:
            school.record(learner, questions(18), "new")
        await settle(learner)
        await school.promote(learner, "other", "other")
        await learner.roll_back("ann", None)
        if places is not None:
            places.write_text(str(killing.count))

    school.model.before_call = killing.reach
    with_learner(school, work)


def check(folder: Path) -> None:
    """Start again: a version is served, the audit log names it, and learning goes on."""
    school, file = School(folder, settings=KILLED), folder / "own" / "trail.jsonl"
    before = AuditLog(file).served()

    async def work(school: School, learner: Learner) -> None:
        served = school.model.loaded["signs"]
        assert served == learner.loaded == content_hash(learner.present_folder)
        assert before is None or before.version == served, "the version of the audit log"
        await settle(learner)
        assert school.model.loaded["signs"] == learner.loaded == AuditLog(file).served()[0]  # type: ignore[index]
        if learner.store.size().corrected == 18:
            assert "promoted" in school.events() and school.events().count("training") == 1
            assert school.events().count("training_ended") == 1
        assert not list((folder / "own").glob("training-*")) and not list((folder / "own").glob("**/*.part"))

    with_learner(school, work)


@pytest.mark.slow
def test_after_kill_9_the_served_version_is_that_of_the_trail(tmp_path: Path) -> None:
    lower_bound(1, 1, 0.5)  # imports scipy once for all children
    assert in_child(learn, tmp_path / "whole", None, tmp_path / "places") == 0
    num_places, killed = int((tmp_path / "places").read_text()), 0
    assert num_places > 60
    for die_at in range(1, num_places + 1, 11):
        killed += os.WIFSIGNALED(in_child(learn, tmp_path / str(die_at), die_at))
        assert in_child(check, tmp_path / str(die_at)) == 0, f"killed at place {die_at} of {num_places}"
    assert killed >= num_places // 11 - 1
