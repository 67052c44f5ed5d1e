"""`vlora bench packed`: both ways compute the same losses, and the goals are those of the measured rows."""

from __future__ import annotations

import copy
from typing import Any

from tests.families import build_model
from vlora.bench.training import packed
from vlora.models.hf_model import HFModel


def test_both_ways_train_the_same() -> None:
    model = build_model("qwen2_vl").requires_grad_(False)
    ways = packed.PlainTraining(copy.deepcopy(model)), packed.PackedTraining(HFModel(model), 2)
    plain, ours = ways
    plain.load(ours.trainer.adapters["0"].values())
    batches = [
        [ids % 180 for ids in batch] for batch in packed.batches_of(packed.CASES["ragged, 4 x 16 to 64 tokens"], 2)
    ]
    assert len({len(ids) for ids in batches[0]}) > 1, "the batch is not ragged"
    losses = [(plain.step(batches[0]), ours.step(batches)[0]) for _ in range(4)]
    assert max(abs(theirs - own) for theirs, own in losses) < 1e-5
    assert losses[0][0] - losses[-1][0] > 1e-3, "the training does not learn"


def rows(ratio: float) -> list[dict[str, Any]]:
    ways = [(packed.PLAIN, 4), ("packed", 1), ("packed", 4), (packed.RECOMPUTED, 4)]
    return [
        {"case": case, "way": way, "adapters": adapters, "plain over this": ratio if adapters == 4 else 0.1}
        for case in packed.CASES
        for way, adapters in ways
    ]


def test_goals_are_those_of_four_packed_adapters() -> None:
    held = packed.goals_of(rows(1.5), 1e-7)
    assert len(held) == 4 and all(goal.holds for goal in held)
    missed = packed.goals_of(rows(1.04), 1e-4)
    assert not any(goal.holds for goal in missed)
