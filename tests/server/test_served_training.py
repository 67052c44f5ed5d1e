"""Trainings of `vlora serve` in its own processes: answers beside one, kill -9 of the engine, and the result."""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from tests.training.beside import Case, adapter_of, losses_of, settle
from vlora.client import Client
from vlora.errors import EngineDead
from vlora.types import TrainingStatus

# The supervisor submits trainings again (test_engine_process.py), and they resume (tests/training).
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

ROOT = Path(__file__).parents[2]
NUM_STEPS = 60
QUESTION = "what is shown in the picture ?"
_LONG_S = 300.0  # only ends a test that hangs


@contextmanager
def served(case: Case) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    options = ["--model", case.model, "--dtype", "float32", "--threads", "1", "--switching", "shadow"]
    options += ["--arena-bytes", str(64 << 20), "--rpyc-port", "0", "--train-slowdown", "inf"]
    process = subprocess.Popen(
        [sys.executable, "-m", "vlora.cli", "serve", *options], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        match = re.match(r"ready: rpyc \S+:(\d+) ", process.stdout.readline())
        assert match
        with Client(port=int(match[1]), timeout_s=_LONG_S) as client:
            yield process, client
    finally:
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()
        process.communicate()


def stopped(process: subprocess.Popen[str], folder: Path) -> psutil.Process:
    """The engine, stopped between its first checkpoint and the end of the training."""
    (engine,) = psutil.Process(process.pid).children()
    while not (folder / "checkpoint.pt").exists():
        assert process.poll() is None
        time.sleep(1e-3)
    engine.suspend()
    assert not (folder / "training.json").exists(), "the training has ended already"
    return engine


def wait(client: Client, process: subprocess.Popen[str], until: Callable[[TrainingStatus], bool]) -> TrainingStatus:
    """Poll the only training while an engine is ready, as long as the server runs."""
    found: tuple[TrainingStatus, ...] = ()
    end_s = time.monotonic() + _LONG_S
    while process.poll() is None and time.monotonic() < end_s:
        with contextlib.suppress(EngineDead):
            found = client.trainings()
            if found and until(found[0]):
                return found[0]
        time.sleep(0.01)
    raise AssertionError(f"still {found}")


def test_a_training_survives_kill_9_of_its_engine(tmp_path: Path) -> None:
    """The engine is stopped when it has a checkpoint, so that nothing changes until it is killed."""
    case = Case.make(tmp_path)
    whole = case.engine(case.plan("whole", ["first"], steps=NUM_STEPS))
    settle(whole.parts.trainings, whole)
    expected = losses_of(tmp_path / "whole" / "first")
    plan, folder = case.plan("served", ["first"], steps=NUM_STEPS), tmp_path / "served" / "first"
    with served(case) as (process, client):
        answer = client.generate(QUESTION, max_tokens=8).text
        client.train(str(plan))
        engine = stopped(process, folder)
        saved = torch.load(folder / "checkpoint.pt")["progress"]
        engine.kill()
        engine.wait(_LONG_S)
        after = wait(client, process, lambda one: True)
        assert after.num_tokens >= saved["num_tokens"] > 0 and after.step >= saved["step"], "progress was lost"
        assert client.generate(QUESTION, max_tokens=8).text == answer
        last = wait(client, process, lambda one: one.state == "finished")
        assert client.generate(QUESTION, max_tokens=8).text == answer
        assert client.generate(QUESTION, adapter="first", max_tokens=8).adapter == "first"
    assert losses_of(folder) == expected and len(expected) == NUM_STEPS
    assert last.loss == expected[-1] and math.isfinite(expected[-1])
    found, wanted = (adapter_of(tmp_path / one / "first") for one in ("served", "whole"))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert json.loads((folder / "training.json").read_text())["state"] == "finished"
