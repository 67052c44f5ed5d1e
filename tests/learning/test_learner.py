"""From corrections to promotion and back, over a scripted model: decisions, bounds, and an attacker."""

from __future__ import annotations

import asyncio
import errno
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.learning.learners import ADMIN, School, learning, questions, run, settle, with_learner
from tests.learning.scripted_model import nothing, write_content
from vlora.errors import BadAdapter, BadConfig, BadRequest, OverCapacity
from vlora.learning.learner import Learner
from vlora.learning.live_store import Corrector
from vlora.learning.trail import Entry, Event, Trail


@learning(train_after=40)
async def test_corrections_make_a_better_version_which_is_promoted(
    school: School, learner: Learner, tmp_path: Path
) -> None:
    first = learner.loaded
    school.record(learner, questions(39), "new")
    await settle(learner)
    assert school.events() == ["imported"], "39 corrections are not 40"
    assert (await learner.status()).until_training == 1
    school.record(learner, ["last"], "new")
    await settle(learner)
    assert school.events() == ["imported", "training", "evaluated", "promoted", "training_ended"]
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700
    assert learner.loaded != first == school.trail()[3]["before"]
    assert school.model.loaded == {"signs": learner.loaded}, "the candidate's own name is free again"
    present, previous = (await learner.status()).versions
    assert (present.version, present.state, previous.version, previous.state) == (
        learner.loaded,
        "present",
        first,
        "previous",
    )
    assert present.live is not None and present.live.candidate == present.live.count > present.live.present == 0
    held = {question for _, question in school.model.asked}
    training = school.trail()[1]["details"]
    assert len(held) == present.live.count and training["records"] == 40 - len(held), "none is in both parts"
    await settle(learner)
    assert len(school.events()) == 5, "nothing new"


@learning(train_after=30)
async def test_a_version_that_is_not_better_is_refused(school: School, learner: Learner) -> None:
    first = learner.loaded
    school.record(learner, questions(30), "old")  # the present version is right
    await settle(learner)
    assert school.events() == ["imported", "training", "evaluated", "training_ended"]
    assert "not above the present version's 1.000" in school.trail()[2]["why"]
    assert learner.loaded == first
    assert [one.state for one in (await learner.status()).versions] == ["refused", "present"]


@pytest.mark.parametrize(("uncorrected_are_right", "promoted"), [(True, False), (False, True)])
def test_right_answers_without_a_correction_count(tmp_path: Path, uncorrected_are_right: bool, promoted: bool) -> None:
    """Corrections alone say how a version does on the present one's mistakes."""
    settings = {"train_after": 40, "uncorrected_are_right": uncorrected_are_right}
    school = School(tmp_path, settings=settings)

    async def work(learner: Learner) -> None:
        school.record(learner, questions(60, "right"), None)
        school.now_s += 301
        school.record(learner, questions(40, "late"), None)  # may be corrected still
        school.record(learner, questions(40, "wrong"), "new")
        await settle(learner)
        assert ("promoted" in school.events()) == promoted
        live = school.trail()[2]["details"]["live"]
        if uncorrected_are_right:
            assert 15 < live["present"] < 45 and live["candidate"] < live["count"] - live["present"] + 1
        else:
            assert live["present"] == 0

    with_learner(school, work)


USER = Corrector("bad", False)


@pytest.mark.parametrize(
    ("trusted", "max_share", "promoted"),
    [({}, 0.5, False), ({"t": "old"}, 1.0, False), ({}, 1.0, True)],
    ids=["bounded share", "operator's records", "unprotected"],
)
def test_poisoned_corrections_do_not_get_through(
    tmp_path: Path, trusted: dict[str, str], max_share: float, promoted: bool
) -> None:
    """An attacker corrects right answers, more than all others; many of the corrections are held out."""
    school = School(tmp_path, trusted=trusted, settings={"train_after": 120, "max_share": max_share})

    async def work(learner: Learner) -> None:
        first = learner.loaded
        school.record(learner, questions(15, "good"), "old", "good", Corrector("good", False))
        school.record(learner, questions(105, "bad"), "poison", "bad", USER)
        await settle(learner)
        assert "evaluated" in school.events(), "the attack was trained on"
        assert ("promoted" in school.events(), learner.loaded != first) == (promoted, promoted)

    with_learner(school, work)


@learning(train_after=20)
async def test_one_tenant_alone_trains_nothing(school: School, learner: Learner) -> None:
    school.record(learner, questions(40), "poison", "bad", USER)
    await settle(learner)
    assert school.events() == ["imported"]
    assert (await learner.status()).until_training == 20, "it does not try again and again"


def promoted_once(school: School) -> Callable[[Learner], object]:
    async def work(learner: Learner) -> None:
        school.record(learner, questions(24, "before"), None)
        school.record(learner, questions(8, "wrong"), "new")  # a quarter
        await learner.promote("ann", version=None, path=str(write_content(school.folder / "other", {})), force=True)

    return work


@learning()
async def test_a_version_that_turns_out_worse_is_rolled_back(school: School, learner: Learner) -> None:
    first = learner.loaded
    await promoted_once(school)(learner)  # type: ignore[misc]
    second = learner.loaded
    school.record(learner, questions(12), None)
    school.record(learner, questions(2, "x"), "new")
    await settle(learner)
    assert learner.loaded == second != first, "two of 14 are not worse than a quarter"
    school.record(learner, questions(40, "y"), "new")
    await settle(learner)
    assert learner.loaded == first == school.model.loaded["signs"]
    last = school.trail()[-1]
    assert (last["event"], last["by"], last["version"], last["before"]) == ("rolled_back", "server", first, second)
    assert "42 of its 54 answers were corrected" in last["why"] and "version before (8 of 32)" in last["why"]
    school.record(learner, questions(10, "z"), "new")
    await settle(learner)
    assert school.events().count("rolled_back") == 1, "there is no version before"
    await learner.promote("ann", version=second[:8], path=None, force=True)
    await settle(learner)
    assert learner.loaded == second, "it is watched from 0"


@learning(trusted={f"t{number}": "new" for number in range(20)})
async def test_promotion_and_rollback_by_hand(school: School, learner: Learner, tmp_path: Path) -> None:
    first = learner.loaded
    better, worse = write_content(tmp_path / "better", {}, "new"), write_content(tmp_path / "worse", {}, "wrong")
    for folder in (worse, better):
        await learner.promote("ann", version=None, path=str(folder), force=False)
    assert learner.loaded == first, "they are evaluated first"
    await settle(learner)
    second = learner.loaded
    assert school.events() == ["imported", "evaluated", "evaluated", "promoted"]
    assert [entry["by"] for entry in school.trail()] == ["server", "ann", "ann", "ann"]
    await learner.roll_back("ben", None)
    assert learner.loaded == first and school.trail()[-1]["by"] == "ben"
    with pytest.raises(BadRequest, match="adapter 'signs' has no earlier version"):
        await learner.roll_back("ben", None)
    with pytest.raises(BadRequest, match=rf"version {first[:12]} of adapter 'signs' is served already"):
        await learner.promote("ben", version=first[:6], path=None, force=False)
    with pytest.raises(BadRequest, match="no version begins with 'xyz' in adapter 'signs'; on disk: "):
        await learner.roll_back("ben", "xyz")
    with pytest.raises(BadAdapter, match=r"no adapter_config\.json; it is a folder of adapters"):
        await learner.promote("ben", version=None, path=str(tmp_path), force=True)
    await learner.promote("ben", version=second, path=None, force=True)
    assert learner.loaded == second


@learning()
async def test_a_version_that_cannot_be_loaded_leaves_the_one_before(
    school: School, learner: Learner, tmp_path: Path
) -> None:
    first = learner.loaded

    def full(what: str) -> None:
        if what == "load":
            raise OverCapacity("there is no room")

    school.model.before_call = full
    with pytest.raises(OverCapacity):
        await learner.promote("ann", version=None, path=str(write_content(tmp_path / "other", {})), force=True)
    assert learner.loaded == first == school.model.loaded["signs"]
    assert school.events() == ["imported", "promoted", "rolled_back"]
    assert school.trail()[-1]["why"] == "it cannot be loaded: there is no room"


@learning(trusted={f"t{number}": "new" for number in range(20)})
async def test_other_content_than_was_evaluated_is_not_served(school: School, learner: Learner, tmp_path: Path) -> None:
    first = learner.loaded
    await learner.promote("ann", version=None, path=str(write_content(tmp_path / "other", {}, "new")), force=False)

    def change(what: str) -> None:  # after the last question, before it is promoted
        if what == "answer" and len(school.model.asked) == 39:
            for folder in (tmp_path / "own" / "versions").iterdir():
                if folder.name != first:
                    write_content(folder, {}, "evil")

    school.model.before_call = change
    await settle(learner)
    assert learner.loaded == first == school.model.loaded["signs"]
    assert "is damaged" in school.trail()[-1]["why"]


@learning(max_versions=3)
async def test_the_number_of_versions_is_bounded(school: School, learner: Learner, tmp_path: Path) -> None:
    for number in range(6):
        folder = write_content(tmp_path / f"n{number}", {}, f"answer {number}")
        await learner.promote("ann", version=None, path=str(folder), force=True)
    kept = [one.version for one in (await learner.status()).versions]
    assert len(kept) == 3 and kept[0] == learner.loaded
    await learner.roll_back("ann", None)
    assert learner.loaded == kept[1]


def test_the_folder_is_locked_and_needs_a_version(tmp_path: Path) -> None:
    school = School(tmp_path)

    async def work(learner: Learner) -> None:
        with pytest.raises(BadConfig, match="own is in use by process"):
            school.open()

    with_learner(school, work)
    other = School(tmp_path / "other")
    other.initial = None  # type: ignore[assignment]
    with pytest.raises(BadConfig, match="adapter 'signs' learns, but there is none yet; give --adapter signs=FOLDER"):
        run_open(other)


def run_open(school: School) -> None:
    async def main() -> None:
        school.open()

    run(main())


def test_damaged_files_of_the_served_version_are_not_served(tmp_path: Path) -> None:
    school = School(tmp_path)
    first = ""

    async def work(learner: Learner) -> None:
        nonlocal first
        first = learner.loaded
        await promoted_once(school)(learner)  # type: ignore[misc]
        (learner.present_folder / "adapter_model.safetensors").write_bytes(b"damaged")

    async def after(learner: Learner) -> None:
        assert learner.loaded == first
        assert school.trail()[-1]["why"] == "its files are damaged or missing"

    with_learner(school, work)
    with_learner(school, after)


@learning(train_after=120, max_evaluated=16)
async def test_the_latest_corrections_of_one_tenant_do_not_decide(
    school: School, learner: Learner, tmp_path: Path
) -> None:
    """An evaluation asks the latest records only, which may all be an attacker's."""
    school.record(learner, questions(60, "good"), "old", "good", Corrector("good", False))
    school.record(learner, questions(60, "bad"), "poison", "bad", USER)
    await learner.promote("ann", version=None, path=str(write_content(tmp_path / "evil", {}, "poison")), force=False)
    await settle(learner)
    details = next(one for one in school.trail() if one["event"] == "evaluated")["details"]
    assert (details["live"]["count"], details["live"]["candidate"]) == (16, 8)
    assert "promoted" not in school.events()


@learning()
async def test_late_corrections_of_an_earlier_period_do_not_count(school: School, learner: Learner) -> None:
    """A version that is promoted again is watched from 0; its earlier answers may be corrected after that."""
    await promoted_once(school)(learner)  # type: ignore[misc]
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


@learning()
async def test_a_version_is_watched_after_another_could_not_be_loaded(
    school: School, learner: Learner, tmp_path: Path
) -> None:
    first = learner.loaded
    await promoted_once(school)(learner)  # type: ignore[misc]

    def full(what: str) -> None:
        if what == "load":
            raise OverCapacity("there is no room")

    school.model.before_call = full
    with pytest.raises(OverCapacity):
        await learner.promote("ann", version=None, path=str(write_content(tmp_path / "x", {}, "x")), force=True)
    school.model.before_call = nothing
    school.record(learner, questions(40, "y"), "new")
    await settle(learner)
    assert learner.loaded == first and school.trail()[-1]["event"] == "rolled_back"


@learning(max_evaluated=40)
async def test_answers_of_one_tenant_do_not_hide_corrections_from_an_evaluation(
    school: School, learner: Learner, tmp_path: Path
) -> None:
    """A flood of later answers of one token would leave the evaluation without the mistakes of the present version."""
    school.record(learner, questions(24, "wrong"), "new", "good")
    school.record(learner, questions(400, "flood"), None, "bad")
    school.now_s += 301
    answers = {one: "old" for one in questions(400, "flood")}
    await learner.promote(
        "ann", version=None, path=str(write_content(tmp_path / "better", answers, "new")), force=False
    )
    await settle(learner)
    live = school.trail()[1]["details"]["live"]
    assert live["count"] == live["candidate"] == 40 and 4 < live["gained"] < 20
    assert school.events()[-1] == "promoted"


@learning(train_after=40)
async def test_a_full_disk_leaves_no_part_of_a_training(
    school: School, learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep the disk full, so that no correction could be kept. Later the training begins."""
    school.record(learner, questions(40), "new")
    image, calls = learner.store.image, 0

    def full(number: int) -> bytes | None:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return image(number)

    monkeypatch.setattr(learner.store, "image", full)
    with pytest.raises(OSError):
        await learner.advance()
    assert not list((tmp_path / "own").glob("training-*")) and school.events() == ["imported"]
    await settle(learner)
    assert school.events()[-1] == "training_ended"


@learning(train_after=40)
async def test_a_full_disk_leaves_no_training_without_a_line_in_the_trail(
    school: School, learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    school.record(learner, questions(40), "new")

    def full(trail: Trail, event: Event, by: str, **fields: Any) -> Entry:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Trail, "append", full)
        with pytest.raises(OSError):
            await learner.advance()
    assert not list((tmp_path / "own").glob("training-*"))
    await settle(learner)
    assert school.events()[-1] == "training_ended"


def test_corrections_are_kept_while_a_training_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's thread is free after some records: pictures may be many."""
    monkeypatch.setattr("vlora.learning.attempt.PART", 4)
    school = School(tmp_path, settings={"train_after": 40})

    async def work(learner: Learner) -> None:
        school.record(learner, questions(60), "new")
        image, read, order = learner.store.image, threading.Event(), []

        def noted(number: int) -> bytes | None:
            order.append("record")
            read.set()
            return image(number)

        monkeypatch.setattr(learner.store, "image", noted)
        writing = asyncio.ensure_future(learner.advance())
        await asyncio.to_thread(read.wait, 10)
        await learner.status()
        order.append("status")
        await writing
        assert order.index("status") <= 12 and order.count("record") > 25

    with_learner(school, work)


@learning()
async def test_waiting_versions_are_not_copied_without_a_limit(
    school: School, learner: Learner, tmp_path: Path
) -> None:
    folders = [str(write_content(tmp_path / f"n{number}", {}, f"answer {number}")) for number in range(12)]
    for folder in folders[:8]:
        await learner.promote("ann", version=None, path=folder, force=False)
    for folder in folders[8:]:
        with pytest.raises(BadRequest, match="8 versions of adapter 'signs' wait for their evaluation"):
            await learner.promote("ann", version=None, path=folder, force=False)
    assert len(list((tmp_path / "own" / "versions").iterdir())) == 9
