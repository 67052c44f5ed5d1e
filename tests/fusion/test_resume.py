"""A fusion run that is killed repeatedly gives the same adapters as one that is never killed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion.commands import fuse as run
from tests.fusion.small import COLORS, write_base, write_folders
from vlora.cli import main
from vlora.errors import BadConfig, BadPlan

pytestmark = pytest.mark.slow


def write_plan(folder: Path, steps: int, packing: str = "first_fit") -> Path:
    (folder / "plan.yaml").write_text(
        f"""
base: {folder / "base"}
packing: {packing}
confidence: null
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
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("resume")
    write_base(folder / "base")
    write_folders(folder / "colors")
    write_folders(folder / "others", tuple(reversed(COLORS)))
    write_folders(folder / "chance", by_chance=True)  # cannot be learned: rolled back, and misses its threshold alone
    yield folder
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # noqa: SLF001  # it would outlive these tests


def command(told: Path, *arguments: str) -> None:
    """Run the command line in a process of its own, with its output in a file."""
    torch.set_num_threads(1)
    sys.argv = ["vlora", *arguments]
    with told.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        main()


@contextlib.contextmanager
def fuse(plan: Path, out: Path, *flags: str) -> Iterator[tuple[BaseProcess, Path]]:
    """A running process and its output file. It is forked from a server that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    told = out.with_suffix(".txt")
    process = context.Process(target=command, args=(told, "fuse", str(plan), "--out", str(out), "--oracle", *flags))
    process.start()
    yield process, told
    process.join()


def finished(plan: Path, out: Path, *flags: str) -> str:
    """The output of a run that is not killed."""
    with fuse(plan, out, *flags) as (process, told):
        process.join()
    assert process.exitcode == 0, told.read_text()
    return told.read_text()


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.suffix in (".safetensors", ".json")
    }


def report(out: Path) -> dict[str, Any]:
    """The report without durations."""
    told = json.loads((out / "report.json").read_text())
    del told["seconds"]
    for step in told["timeline"]:
        del step["begin"], step["seconds"]
    return told


def num_trained(out: Path) -> int:
    return len(list((out / "checkpoint").glob("*/trained.json")))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("packing", "moments", "trainings"),
    [
        ("first_fit", (2,), 6),  # four to pack; one more alone and one together for the oracle
        pytest.param("first_fit", (0, 1, 5), 6, marks=pytest.mark.exhaustive),
        pytest.param(
            "guided", (0, 1, 4), 5, marks=pytest.mark.exhaustive
        ),  # all at once, the one that misses alone; both others alone and together for the oracle
        pytest.param(
            "jointly", (0, 1, 4), 5, marks=pytest.mark.exhaustive
        ),  # all at once, the two that fit together, the other one; two more alone for the oracle
    ],
)
def test_a_run_killed_at_any_moment_gives_the_same_adapters(
    made: Path, packing: str, moments: tuple[int, ...], trainings: int
) -> None:
    """moments: numbers of stored trainings after which the process is killed; each run starts from them."""
    plan = write_plan(made, steps=12, packing=packing)
    name = f"{packing}-{len(moments)}"
    whole, out = made / f"{name}-whole", made / f"{name}-killed"
    finished(plan, whole)
    assert num_trained(whole) == trainings
    rng = random.Random(0)
    for stop_at in moments:
        with fuse(plan, out, "--resume") as (process, _):
            while process.is_alive() and not ((out / "checkpoint/run.json").exists() and num_trained(out) >= stop_at):
                time.sleep(0.002)
            time.sleep(rng.random() * 0.2)  # at a random point of the next work
            process.kill()
        assert process.exitcode in (-signal.SIGKILL, 0)
        assert num_trained(out) >= stop_at
    before = num_trained(out)
    told = finished(plan, out, "--resume")
    assert num_trained(out) == trainings
    assert told.count("training ") <= 2 * (trainings - before) + 1, "a first and a last line for each that was left"
    assert files(out / "adapters") == files(whole / "adapters")
    assert report(out) == report(whole)
    assert report(out)["oracle"] == {
        "lower_bound": 2,
        "missed": ["chance"],
        "conflicts": [],
        "optimum": [["colors", "others"], ["chance"]],
    }
    assert "others" in (out / "adapters" / "colors-others" / "README.md").read_text()
    with pytest.raises(BadPlan, match=r"plan's training.steps: was 12, is 13"):
        run(write_plan(made, steps=13, packing=packing), out, resume=True)


def test_a_run_of_other_data_is_not_resumed(made: Path) -> None:
    plan, out = write_plan(made, steps=1), made / "other-data"
    finished(plan, out)
    next((made / "colors" / "train" / "red").glob("*.png")).unlink()
    with pytest.raises(BadPlan, match=r"data of colors: was") as refused:
        run(plan, out, resume=True)
    assert "data of others" not in str(refused.value)


def test_a_refused_plan_deletes_nothing_of_an_earlier_run(made: Path) -> None:
    plan, out = write_plan(made, steps=1), made / "kept"
    finished(plan, out)
    before = num_trained(out)
    with pytest.raises(BadConfig, match="--restart"):
        run(plan, out)
    good = plan.read_text()
    for asked, instead, told in (
        ("{rank: 2}", "{rank: 2, targets: [p_proj]}", "p_proj"),  # a linear layer that the base lacks
        ('"what color ?"', f'"{"what " * 5000}?"', "tokens"),  # more tokens than the base has positions
    ):
        plan.write_text(good.replace(asked, instead))
        with pytest.raises(BadPlan, match=told):
            run(plan, out, restart=True)
        assert num_trained(out) == before > 0
