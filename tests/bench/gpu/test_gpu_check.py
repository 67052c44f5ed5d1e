"""`vlora gpu-check --device cpu`: every stage with small shapes, in an installation without a server's packages."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.gpu.only_engine_packages import others
from vlora.bench.gpu.runner import STAGES
from vlora.bench.harness import ROOT
from vlora.simulator.machine import read_costs

pytestmark = pytest.mark.slow

MOST_CPU_SECONDS = 180  # of all stages; wall time depends on what else runs
NEED_MORE = {"oracle": "pytest is not installed", "costs": "No module named 'scipy'"}


def gpu_check(out: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """path: precedes the checkout on PYTHONPATH."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (path, str(ROOT))))}
    command = [sys.executable, "-m", "vlora.cli", "gpu-check", "--device", "cpu", "--out", str(out), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=570)


def records(out: Path) -> dict[str, dict[str, Any]]:
    return {stage.name: json.loads((out / stage.file_name).read_text()) for stage in STAGES}


@pytest.fixture(scope="module")
def without_others(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("path")
    (folder / "sitecustomize.py").write_text(
        "from tests.bench.gpu.only_engine_packages import hide_others\nhide_others()\n"
    )
    return str(folder)


@pytest.mark.gpu_sim
def test_the_engine_and_every_stage_are_imported_without_a_servers_packages(without_others: str) -> None:
    stages = [each.module for each in STAGES]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((without_others, str(ROOT)))}
    command = [sys.executable, "-c", f"import vlora.engine.engine, {', '.join(stages)}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu_sim
@pytest.mark.timeout(1200)  # for a busy machine
def test_every_stage_runs_without_a_servers_packages(tmp_path: Path, without_others: str) -> None:
    assert {"rpyc", "fastapi", "uvicorn", "greenlet", "scipy", "pytest", "PIL", "cv2"} <= others()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = gpu_check(tmp_path, path=without_others)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = records(tmp_path)
    failed = {name: record["error"]["message"] for name, record in found.items() if not record["ok"]}
    assert failed.keys() == NEED_MORE.keys(), (failed, done.stderr[-2000:])
    for name, message in NEED_MORE.items():
        assert message in failed[name]
    assert done.returncode == 1 and done.stdout.count("failed") == len(NEED_MORE)
    assert "rpyc" in found["facts"]["result"]["missing"]
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < MOST_CPU_SECONDS, f"{seconds:.0f} s"

    # With the packages, another call runs these two only.
    done = gpu_check(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stderr.splitlines() if "at most" in line] == list(NEED_MORE)
    found = records(tmp_path)
    assert all(record["ok"] for record in found.values())
    assert found["oracle"]["result"]["passed"] > 0
    costs, load_s = read_costs(tmp_path / "costs.json")
    # The other costs are fitted, and loading is a difference of two times: 0 where a busy machine hides them.
    assert costs.base_s > 0 and min(costs) >= 0 and load_s >= 0


def test_a_missing_gpu_is_one_error_line(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("for machines without a GPU")
    done = gpu_check(tmp_path, "--device", "cuda", "--stages", "facts")
    assert done.returncode == 2 and not done.stdout and not any(tmp_path.iterdir())
    assert done.stderr.startswith("error: torch finds no CUDA device") and done.stderr.count("\n") == 1
