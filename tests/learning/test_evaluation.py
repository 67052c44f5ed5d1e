"""Evaluations while the engine is late, full, dead or restarted, over a scripted model and a clock without waiting."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.learning.learners import School, learning, questions, settle, with_learner
from tests.learning.scripted_model import ScriptedModel, nothing, write_content
from vlora.errors import DeadlineMissed, EngineDead, OverCapacity, StepFailed, VLoraError
from vlora.learning.evaluation import Interrupted
from vlora.learning.learner import MAX_INTERRUPTED, Learner
from vlora.learning.learning import Learning
from vlora.learning.live_store import AnsweredRequest, Corrector
from vlora.learning.plan import LearningEntry, LearningSettings
from vlora.learning.trail import Entry, Event, Trail
from vlora.training.plan import TrainingSettings


@learning(train_after=30)
async def test_a_dead_engine_repeats_the_evaluation(school: School, learner: Learner) -> None:
    school.record(learner, questions(30), "new")

    def die(what: str) -> None:
        school.model.dead = what == "answer"

    school.model.before_call = die
    with pytest.raises(Interrupted, match="no answer after 5 further attempts: the engine was killed"):
        await settle(learner)
    assert school.events() == ["imported", "training"] and school.pauses_s == [1, 2, 4, 8, 16]
    school.model.before_call, school.model.dead = nothing, False
    await settle(learner)
    assert school.events() == ["imported", "training", "evaluated", "promoted", "training_ended"]


def live_of(school: School) -> dict[str, int]:
    (evaluated,) = (one for one in school.trail() if one["event"] == "evaluated")
    live: dict[str, int] = evaluated["details"]["live"]
    return {name: live[name] for name in ("count", "present", "candidate")}


def failing(errors: list[VLoraError], share: float) -> Callable[[str], None]:
    """Fails this share of the calls for an answer, at random."""
    drawn = random.Random(0)

    def fail(what: str) -> None:
        if what == "answer" and drawn.random() < share:
            raise drawn.choice(errors)

    return fail


@pytest.mark.parametrize("share", [0.0, 0.5])
@learning(train_after=40)
async def test_answers_that_come_late_do_not_change_an_evaluation(
    school: School, learner: Learner, share: float
) -> None:
    """A server that is full, an engine that restarts, and deadlines, at half of the calls: they are repeated."""
    school.record(learner, questions(40), "new")
    late = [OverCapacity("full"), DeadlineMissed("late"), EngineDead("killed"), StepFailed("failed")]
    school.model.before_call = failing(late, share)
    await settle(learner)
    school.model.before_call = nothing
    assert school.events() == ["imported", "training", "evaluated", "promoted", "training_ended"]
    held_out = 40 - school.trail()[1]["details"]["records"]
    assert live_of(school) == {"count": held_out, "present": 0, "candidate": held_out}
    assert bool(school.pauses_s) == (share > 0) and max([1.0, *school.pauses_s]) <= 16
    assert "left_out" not in school.trail()[2]["details"]


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
    slow = next(one.question for one in learner.store.labelled() if one.held_out)
    unanswered(school, side, [slow])
    await settle(learner)
    count = 40 - school.trail()[1]["details"]["records"]
    details = school.trail()[2]["details"]
    if side == "signs":
        assert live_of(school) == {"count": count - 1, "present": 0, "candidate": count - 1}
        assert details["left_out"] == 1 and "unanswered" not in details
    else:
        assert live_of(school) == {"count": count, "present": 0, "candidate": count - 1}
        assert details["unanswered"] == 1 and "left_out" not in details
    assert school.pauses_s == [1, 2, 4, 8, 16]


def test_a_candidate_that_fails_where_the_present_version_is_right_is_refused(tmp_path: Path) -> None:
    """It is right in all that it answers: without those that it does not answer it would be better."""
    trusted = {f"t{number}": "old" for number in range(40)}
    school = School(tmp_path, trusted, settings={"train_after": 40})

    async def work(learner: Learner) -> None:
        school.record(learner, questions(40), "new")
        better = write_content(tmp_path / "better", trusted, "new")
        unanswered(school, "signs~candidate", ["t3", "t14", "t15"])
        await learner.promote("ann", version=None, path=str(better), force=False)
        await learner.advance()
        (entry,) = (one for one in school.trail() if one["event"] == "evaluated")
        assert entry["why"].startswith("on the operator's 40 records it has 37 right")
        assert entry["details"]["unanswered"] == 3 and "promoted" not in school.events()

    with_learner(school, work)


@pytest.mark.parametrize("error", [OverCapacity("full"), DeadlineMissed("late"), EngineDead("killed")], ids=type)
@learning(train_after=40)
async def test_a_server_that_stays_full_postpones_an_evaluation(
    school: School, learner: Learner, error: VLoraError
) -> None:
    """It is repeated from its beginning, and after some times given up: with one line in the trail, and no accuracy."""
    school.record(learner, questions(40), "new")
    school.model.before_call = failing([error], 1.0)
    for _ in range(MAX_INTERRUPTED - 1):
        with pytest.raises(Interrupted):
            await settle(learner)
        assert school.events() == ["imported", "training"], "nothing was decided"
    await settle(learner)
    assert school.events() == ["imported", "training", "evaluated", "training_ended"]
    entry = school.trail()[2]
    assert entry["why"].startswith("it cannot be evaluated: ") and "live" not in entry["details"]
    school.model.before_call = nothing
    await learner.promote("ann", version=None, path=None, force=False)
    await settle(learner)
    assert school.events()[-1] == "promoted", "the version is on disk still"


@learning(train_after=40)
async def test_a_candidate_without_room_in_the_engine_is_evaluated_later(school: School, learner: Learner) -> None:
    school.record(learner, questions(40), "new")

    def full(what: str) -> None:
        if what == "load":
            raise OverCapacity("there is no room")

    school.model.before_call = full
    with pytest.raises(Interrupted, match="there is no room"):
        await settle(learner)
    school.model.before_call = nothing
    await settle(learner)
    assert school.events() == ["imported", "training", "evaluated", "promoted", "training_ended"]


@learning(train_after=40, max_records=40)
async def test_records_that_were_dropped_meanwhile_are_not_asked_without_their_picture(
    school: School, learner: Learner
) -> None:
    school.record(learner, questions(40), "new")
    seen: list[str] = []

    def drop(what: str) -> None:
        if what == "answer" and not seen:
            seen.append(what)
            other = Corrector("b", False)
            learner.store.add([AnsweredRequest(f"b{n}", "b", learner.loaded, f"b{n}", "old", None) for n in range(25)])
            assert all(learner.store.correct(f"b{n}", "new", other) for n in range(25))

    school.model.before_call = drop
    await settle(learner)
    asked = live_of(school)["count"]
    left_out = next(one for one in school.trail() if one["event"] == "evaluated")["details"]["left_out"]
    assert left_out > 0 and asked + left_out == 40 - school.trail()[1]["details"]["records"]


@learning()
async def test_a_version_that_turns_out_worse_is_rolled_back_during_an_evaluation(
    school: School, learner: Learner, tmp_path: Path
) -> None:
    """An evaluation may take hours on a busy server."""
    first = learner.loaded
    school.record(learner, questions(40, "before"), None)
    bad = str(write_content(tmp_path / "bad", {}))
    await learner.promote("ann", version=None, path=bad, force=True)
    school.record(learner, questions(20, "old"), None)
    school.now_s += 301
    asked = 0

    def correct(what: str) -> None:
        nonlocal asked
        asked += what == "answer"
        if asked == 8 and what == "answer":
            school.record(learner, questions(40, "late"), "new")

    school.model.before_call = correct
    await learner.promote("ann", version=None, path=str(write_content(tmp_path / "x", {}, "x")), force=False)
    await learner.advance()
    assert learner.loaded == first and "rolled_back" in school.events() and asked < 20


@learning(train_after=40)
async def test_a_full_disk_after_an_evaluation_does_not_repeat_it(
    school: School, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All answers would be computed again each minute, until there is room for a line of the trail."""
    school.record(learner, questions(40), "new")
    append, is_full = Trail.append, True

    def full(trail: Trail, event: Event, by: str, **fields: Any) -> Entry:
        if event == "evaluated" and is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(trail, event, by, **fields)

    monkeypatch.setattr(Trail, "append", full)
    for _ in range(3):
        with pytest.raises(OSError):
            await settle(learner)
    num_asked, is_full = len(school.model.asked), False
    await settle(learner)
    assert school.events() == ["imported", "training", "evaluated", "promoted", "training_ended"]
    assert len(school.model.asked) == num_asked == 2 * live_of(school)["count"]


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

    asyncio.run(asyncio.wait_for(main(), 30))
