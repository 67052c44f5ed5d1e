"""kill -9 at many places between corrections and promotion: the next process serves the trail's version."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.learning.learners import School, questions, run, settle
from tests.learning.scripted_model import write_content
from vlora.adapter_files import content_hash
from vlora.confidence import lower_bound
from vlora.learning.trail import Trail

FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.utime", "shutil.copyfile"}
SETTINGS = {"train_after": 18, "max_share": 1.0, "confidence": 0.6}


def in_child(work: Callable[[], None]) -> int:
    """Run in a forked process. Returns its wait status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def learn(folder: Path, die_at: int | None, places: Path | None = None) -> None:
    """Corrections, a training, a promotion, another one by hand, and a rollback.

    Args:
        folder: With its files.
        die_at: The number of the file operation or call of the engine at which the process kills itself.
        places: A file for the number of all of them.
    """
    school = School(folder, settings=SETTINGS)
    count = 0

    def reach(*_: object) -> None:
        nonlocal count
        count += 1
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_event(event: str, args: tuple[object, ...]) -> None:
        if event in FILE_EVENTS and str(args[0]).startswith(str(folder / "own")):
            reach()

    async def main() -> None:
        sys.addaudithook(on_event)
        school.model.before_call = reach
        learner = school.open()
        try:
            if not learner.store.size().records:
                school.record(learner, questions(18), "new")
            await settle(learner)
            await learner.promote("ann", version=None, path=str(folder / "other"), force=True)
            await learner.roll_back("ann", None)
        finally:
            if places is not None:
                places.write_text(str(count))
            learner.close()

    run(main())


def check(folder: Path) -> None:
    """Start again: a version is served, the trail names it, and learning goes on."""
    school = School(folder, settings=SETTINGS)

    async def main() -> None:
        before = Trail(folder / "own" / "trail.jsonl").served()
        learner = school.open()
        served = school.model.loaded["signs"]
        assert served == learner.loaded == content_hash(learner.present_folder)
        assert before is None or before.version == served, "the version of the trail"
        await settle(learner)
        assert school.model.loaded["signs"] == learner.loaded == Trail(folder / "own" / "trail.jsonl").served()[0]  # type: ignore[index]
        if learner.store.size().corrected == 18:
            assert "promoted" in school.events() and school.events().count("training") == 1
            assert school.events().count("training_ended") == 1
        assert not list((folder / "own").glob("training-*")) and not list((folder / "own").glob("**/*.part"))
        learner.close()

    run(main())


@pytest.mark.slow
def test_after_kill_9_the_served_version_is_that_of_the_trail(tmp_path: Path) -> None:
    lower_bound(1, 1, 0.5)  # imports scipy once for all children
    write_content(tmp_path / "whole" / "other", {}, "other")
    assert in_child(lambda: learn(tmp_path / "whole", None, tmp_path / "places")) == 0
    num_places = int((tmp_path / "places").read_text())
    assert num_places > 60
    killed = 0
    for die_at in range(1, num_places + 1, 11):
        folder = tmp_path / str(die_at)
        write_content(folder / "other", {}, "other")
        status = in_child(lambda at=die_at, own=folder: learn(own, at))  # type: ignore[misc]
        killed += os.WIFSIGNALED(status)
        assert in_child(lambda own=folder: check(own)) == 0, f"killed at place {die_at} of {num_places}"  # type: ignore[misc]
    assert killed >= num_places // 11 - 1
