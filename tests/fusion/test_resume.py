"""A fusion run that is killed over and over ends with the adapters of one that never was."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fusion.small import COLORS, write_base, write_folders
from vlora.errors import BadPlan

# Warnings of third parties about the process they run in are none of ours.
_RUN = "import sys, torch; torch.set_num_threads(1); from vlora.cli import main; sys.argv[0] = 'vlora'; main()"


def write_plan(folder: Path, steps: int) -> Path:
    (folder / "plan.yaml").write_text(
        f"""
base: {folder / "base"}
training: {{steps: {steps}, batch_size: 4}}
lora: {{rank: 2}}
domains:
  - {{name: colors, source: {folder / "colors"}, question: "what color ?", threshold: 0.05}}
  - {{name: others, source: {folder / "others"}, question: "what is it ?", threshold: 0.05}}
  - {{name: chance, source: {folder / "chance"}, question: "which one ?", threshold: 0.95}}
"""
    )
    return folder / "plan.yaml"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_base(folder / "base")
    write_folders(folder / "colors")
    write_folders(folder / "others", tuple(reversed(COLORS)))
    write_folders(folder / "chance", by_chance=True)  # cannot be learned: rolled back, and missed alone
    return folder


def fuse(plan: Path, out: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _RUN, "fuse", str(plan), "--out", str(out), "--oracle", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.suffix in (".safetensors", ".json")
    }


def report(out: Path) -> dict[str, Any]:
    """All but the time it took."""
    told = json.loads((out / "report.json").read_text())
    del told["seconds"]
    for step in told["timeline"]:
        del step["begin"], step["seconds"]
    return told


def num_trained(out: Path) -> int:
    return len(list((out / "checkpoint").glob("*/trained.json")))


@pytest.mark.timeout(600)
def test_a_run_killed_at_any_moment_gives_the_same_adapters(made: Path) -> None:
    plan = write_plan(made, steps=12)
    whole = fuse(plan, made / "whole")
    told, _ = whole.communicate()
    assert whole.returncode == 0, told
    trainings = num_trained(made / "whole")
    assert trainings == 6  # four to pack; one more alone and one together for the oracle
    rng = random.Random(0)
    out = made / "killed"
    for stop_at in (1, trainings - 1):
        process = fuse(plan, out, "--resume")
        while num_trained(out) < stop_at and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.5)  # somewhere within what comes next
        process.kill()
        process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0)
        assert num_trained(out) >= stop_at
    before = num_trained(out)
    rest = fuse(plan, out, "--resume")
    told, _ = rest.communicate()
    assert rest.returncode == 0, told
    assert num_trained(out) == trainings
    assert told.count("training ") <= trainings - before + 1
    assert files(out / "adapters") == files(made / "whole" / "adapters")
    assert report(out) == report(made / "whole")
    assert report(out)["oracle"] == {
        "lower_bound": 2,
        "missed": ["chance"],
        "conflicts": [],
        "optimum": [["colors", "others"], ["chance"]],
    }
    assert "others" in (out / "adapters" / "colors-others" / "README.md").read_text()
    _refuses_other_plans(made, out)


def _refuses_other_plans(made: Path, out: Path) -> None:
    from fusion.commands import fuse as run

    with pytest.raises(BadPlan, match=r"plan's training.steps: was 12, is 13"):
        run(write_plan(made, steps=13), out, resume=True)
    next((made / "colors" / "train" / "red").glob("*.png")).unlink()
    with pytest.raises(BadPlan, match=r"data of colors: was") as refused:
        run(write_plan(made, steps=12), out, resume=True)
    assert "data of others" not in str(refused.value)
