"""`vlora bench bd` without training: matched ranks, resuming, and the table of the runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fusion.bench import compare, parity
from fusion.bench.result_store import ResultStore
from fusion.plan.schema import LoraPlan
from vlora.cli import cli
from vlora.errors import BadConfig


def numbers(lora: LoraPlan) -> int:
    """Two layers of the embedded model's widths: one sharded by outputs, one by inputs."""
    return lora.rank * (256 + 640 // lora.blocks) + lora.rank * (640 // lora.blocks + 256)


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_no_other_rank_has_a_parameter_count_nearer_to_the_loras(blocks: int) -> None:
    rank = parity.matched_rank(numbers, blocks)
    wanted = numbers(LoraPlan(rank=parity.RANK))
    found = abs(numbers(LoraPlan(rank=rank, blocks=blocks)) - wanted)
    assert rank % blocks == 0 and (rank == parity.RANK if blocks == 1 else rank > parity.RANK)
    for other in (rank - blocks, rank + blocks):
        assert abs(numbers(LoraPlan(rank=other, blocks=blocks)) - wanted) >= found


def a_run(blocks: int, seed: int, digits: float) -> dict[str, Any]:
    return {
        "seed": seed,
        "blocks": blocks,
        "rank": 8 * blocks,
        "parameters": 100,
        "test": {"digits": digits, "photos": 0.6, "signs": 0.6},
        "spent": {"cpu s": 1.0},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed in (0, 1, 2):
        for blocks, digits in ((1, 0.9), (2, 0.9 + 0.1 * (seed - 1)), (4, 0.75)):
            ResultStore(tmp_path, {}).write(f"{blocks}-{seed}", a_run(blocks, seed, digits))
    return tmp_path


def test_mean_and_spread_are_over_seeds_and_a_gap_misses_the_goal(folder: Path) -> None:
    """All results are stored, so nothing is trained."""
    found = compare(False, folder, lambda line: None)
    assert [row["method"] for row in found.rows] == ["LoRA", "BD-LoRA, 2 blocks", "BD-LoRA, 4 blocks"]
    two = found.rows[1]
    assert two["digits"] == pytest.approx(0.9) and two["digits +-"] == pytest.approx(0.1 * (2 / 3) ** 0.5)
    assert two["mean"] == pytest.approx(0.7)
    # Per seed the differences are a third of -0.1, 0 and 0.1; their spread gives the standard error.
    assert two["less LoRA"] == pytest.approx(0) and two["standard error"] == pytest.approx(0.1 / 3 / 3**0.5)
    near, far = found.goals
    assert near.value == pytest.approx(0) and far.value == pytest.approx(-0.05)
    assert (near.goal, near.at_most) == (-0.02, False) and len(found.runs) == 9


def test_only_missing_measurements_are_trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "4-1.json").unlink()
    trained: list[tuple[int, int]] = []

    def measure(seed: int, blocks: int, quick: bool, features: Path) -> dict[str, Any]:
        trained.append((seed, blocks))
        return a_run(blocks, seed, 0.75)

    monkeypatch.setattr(parity, "measure", measure)
    compare(False, folder, lambda line: None)
    assert trained == [(1, 4)] and (folder / "4-1.json").exists()


def test_the_command_takes_a_number_of_seeds(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("out")
    (out / "bd").mkdir()
    folder.rename(out / "bd" / "work")
    two = CliRunner().invoke(cli, ["bench", "bd", "--seeds", "2", "--out", str(out)])
    assert len(json.loads(two.output.splitlines()[-1])["runs"]) == 6
    for wrong in (["bench", "step", "--seeds", "2"], ["bench", "bd", "--quick", "--seeds", "2"]):
        refused = CliRunner().invoke(cli, wrong)
        assert isinstance(refused.exception, BadConfig) and "--seeds is valid for `vlora bench bd`" in str(
            refused.exception
        )
