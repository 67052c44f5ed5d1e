"""`vlora serve --train` in its own processes: answers beside a training, kill -9 of the engine, and the result."""

from __future__ import annotations

import json
import math
import re
import signal
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

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NUM_STEPS = 60
QUESTION = "what is shown in the picture ?"


@contextmanager
def served(case: Case, plan: Path) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    options = ["--model", case.model, "--dtype", "float32", "--threads", "1", "--switching", "shadow"]
    options += ["--arena-bytes", str(64 << 20), "--rpyc-port", "0", "--train", str(plan), "--train-slowdown", "inf"]
    process = subprocess.Popen(
        [sys.executable, "-m", "vlora.cli", "serve", *options], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        match = re.match(r"ready: rpyc \S+:(\d+) ", process.stdout.readline())
        assert match
        with Client(port=int(match[1]), timeout_s=60) as client:
            yield process, client
    finally:
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()
        process.communicate()


def wait(client: Client, until: Callable[[TrainingStatus], bool]) -> TrainingStatus:
    """Poll the only training while an engine is ready."""
    for _ in range(2000):
        try:
            found = client.trainings()
            if found and until(found[0]):
                return found[0]
        except EngineDead:
            pass
        time.sleep(0.01)
    raise AssertionError(f"still {found}")


def test_a_training_survives_kill_9_of_its_engine(tmp_path: Path) -> None:
    case = Case.make(tmp_path)
    whole = case.engine(case.plan("whole", ["first"], steps=NUM_STEPS))
    settle(whole.parts.trainings, whole)
    expected = losses_of(tmp_path / "whole" / "first")
    plan = case.plan("served", ["first"], steps=NUM_STEPS)
    with served(case, plan) as (process, client):
        before = wait(client, lambda one: one.step >= 5)
        answer = client.generate(QUESTION, max_tokens=8).text
        (engine,) = psutil.Process(process.pid).children()
        engine.send_signal(signal.SIGKILL)
        after = wait(client, lambda one: True)
        # A status counts a step before its checkpoint is on disk.
        assert after.step >= before.step - 1, f"step {before.step} became {after.step}"
        assert client.generate(QUESTION, max_tokens=8).text == answer
        last = wait(client, lambda one: one.state == "finished")
        assert client.generate(QUESTION, max_tokens=8).text == answer
        assert client.generate(QUESTION, adapter="first", max_tokens=8).adapter == "first"
    assert losses_of(tmp_path / "served" / "first") == expected and len(expected) == NUM_STEPS
    assert last.loss == expected[-1] and math.isfinite(expected[-1])
    found, wanted = (adapter_of(tmp_path / folder / "first") for folder in ("served", "whole"))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert json.loads((tmp_path / "served" / "first" / "training.json").read_text())["state"] == "finished"
