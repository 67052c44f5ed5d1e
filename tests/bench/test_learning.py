"""`vlora bench learning`: its pictures, its rows with what was decided, its goals, and its plot."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlora.bench.training import learning
from vlora.bench.training.learning import Frame, Run


def made(protected: bool, *phases: tuple[str, float]) -> Run:
    """A run with phases of 10 pictures, one a second, with these shares of right answers."""
    frames = [
        Frame(100.0 + 10 * place + number, phase, number < 10 * share, f"version-{phase}")
        for place, (phase, share) in enumerate(phases)
        for number in range(10)
    ]
    trail = [{"at": 112.5, "event": "training", "why": ""}, {"at": 115.5, "event": "promoted", "why": "it is better"}]
    return Run(protected, frames, trail)


PROTECTED = ("usual", 1.0), ("changed", 0.4), ("promoted", 0.9), ("after the attack", 0.9), ("rolled back", 0.9)
UNPROTECTED = ("promoted", 0.9), ("attack", 0.5), ("after the attack", 0.3)


def test_a_row_has_the_phases_answers_and_events() -> None:
    rows = learning.rows_of(made(True, *PROTECTED))
    assert [(row["phase"], row["accuracy"], row["from, s"], row["to, s"]) for row in rows[:2]] == [
        ("usual", 1.0, 0.0, 9.0),
        ("changed", 0.4, 10.0, 19.0),
    ]
    assert rows[1]["events"] == [[12.5, "training", ""], [15.5, "promoted", "it is better"]] and not rows[0]["events"]
    assert rows[1]["answers"][3:5] == [[13.0, 1], [14.0, 0]] and rows[1]["version at its end"] == "version-"


def test_goals_fail_without_learning_and_with_a_successful_attack() -> None:
    unprotected = made(False, *UNPROTECTED)  # something is promoted in its second phase
    assert all(goal.holds for goal in learning.goals_of(made(True, *PROTECTED), unprotected))
    worse = [(phase, 0.4 if phase in ("promoted", "rolled back") else share) for phase, share in PROTECTED]
    goals = learning.goals_of(made(True, *worse), unprotected)
    assert [goal.holds for goal in goals] == [True, False, True, True, True, True]
    hit = made(
        True, ("changed", 0.4), ("attack", 0.5), ("promoted", 0.9), ("after the attack", 0.4), ("rolled back", 0.9)
    )
    harmless = made(False, ("attack", 0.9), ("promoted", 0.9))
    assert [goal.holds for goal in learning.goals_of(hit, harmless)] == [True, True, False, False, False, True]


def test_the_plot_has_both_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [*learning.rows_of(made(True, *PROTECTED)), *learning.rows_of(made(False, *UNPROTECTED))]
    learning.draw(rows, tmp_path)
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_pictures_are_inverted() -> None:
    usual, inverted = (
        np.asarray(Image.open(io.BytesIO(learning.picture("stop", np.random.default_rng(0), inverted=one))), int)
        for one in (False, True)
    )
    assert usual.shape == (96, 96, 3) and (usual + inverted == 255).all()
