"""An engine's process has one OpenMP pool, for steps: background threads compute single-threaded."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from vlora.threads import background_executor, compute_with

ROOT = Path(__file__).parents[2]


def counts(folder: Path, kind: str) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.engine.pools", str(folder), kind]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=240)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_engine_creates_no_second_openmp_pool(tmp_path: Path) -> None:
    found = counts(tmp_path, "bounded")
    assert set(found.values()) == {found["base model"]}, found


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_count_shows_a_second_pool(tmp_path: Path) -> None:
    found = counts(tmp_path, "unbounded")
    assert found["base model"] < found["adapted"], found


def test_each_thread_computes_with_its_number_of_threads() -> None:
    found: dict[str, int] = {}

    def own_steps() -> None:
        before = torch.get_num_threads()
        compute_with(2)
        executor = background_executor("test")
        found["background"] = executor.submit(torch.get_num_threads).result()
        later = threading.Thread(target=lambda: found.update(later=torch.get_num_threads()))
        later.start()
        later.join()
        torch.randn(100_000).sum()
        found["steps"] = torch.get_num_threads()
        executor.shutdown()
        found["before"] = before

    thread = threading.Thread(target=own_steps)
    before = torch.get_num_threads()
    thread.start()
    thread.join()
    assert found == {"background": 1, "later": 1, "steps": 2, "before": found["before"]}
    assert torch.get_num_threads() == before  # of a thread with its number already set


@pytest.mark.parametrize("room", ["adapters", "engine", "memory", "models", "orchestrator", "parallel"])
def test_executors_are_created_only_in_vlora_threads(room: str) -> None:
    for file in (ROOT / "vlora" / room).rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
        assert not names & {"ThreadPoolExecutor", "ProcessPoolExecutor"}, f"{file}: use vlora.threads"
