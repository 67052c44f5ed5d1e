"""bfloat16 and eight-bit weights on two ranks are compared with a float32 reference: sums cut in two may be rounded
twice, and must not be much noisier than on one rank. Ranks scale their own parts of quantized rows.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.families import build_model, make_prompt
from tests.harness import FixedModes, RecordingEngine
from tests.oracle import Oracle
from vlora.types import Mode

FAMILY = "qwen2_vl"
ADAPTERS = ("wide8", "everywhere64", "narrow4", None)
WAYS = ("wide8=slora", "*=replicated")


def distance(one: list[torch.Tensor], other: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Relative RMS of the first token's logits."""
    error = sum(float((a - b).square().sum()) for a, b in zip(one, other, strict=True))
    return (error / sum(float(logits.square().sum()) for logits in truth)) ** 0.5


@pytest.fixture(scope="module", params=["none", "fp8"])
def logits(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, Mode], list[torch.Tensor]]:
    """Logits of 32 prompts by number of ranks and mode; 0 ranks: the float32 reference. Weights are rounded to
    bfloat16 once and shared.
    """
    folder: Path = tmp_path_factory.mktemp(FAMILY)
    rounded = build_model(FAMILY, torch.bfloat16).float()
    rounded.save_pretrained(folder / "model")
    oracle = Oracle(FAMILY, rounded, scale=0.1)  # deltas of about a tenth of the weight, as after training
    adapters = oracle.save(folder / "adapters")
    cases = [(ADAPTERS[i % 4], make_prompt(FAMILY, rounded, i, num_images=i % 2, text=(12, 12))) for i in range(32)]
    truth = [oracle.generate(prompt, adapter, 1)[1] for adapter, prompt in cases]
    found = {(0, Mode.UNMERGED): truth, (0, Mode.MIXED): truth}
    for size in (1, 2):
        recorded = RecordingEngine(
            SimpleNamespace(family=FAMILY, adapters=adapters),
            FixedModes(Mode.UNMERGED),
            dtype=torch.bfloat16,
            quantize=request.param,
            checkpoint=str(folder / "model"),
            tensor_parallel=size,
            threads=1,
            sharding=WAYS,
        )
        try:
            for mode in (Mode.UNMERGED, Mode.MIXED):
                recorded.modes.clear()
                recorded.engine.parts.scheduler.policy = FixedModes(mode, "wide8" if mode is Mode.MIXED else None)
                found[size, mode] = [logits.float() for _, logits in recorded.answer(cases, 1)]
                assert mode in recorded.modes
        finally:
            recorded.engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Mode.UNMERGED, Mode.MIXED])
def test_two_ranks_are_as_close_to_the_truth_as_one(
    logits: dict[tuple[int, Mode], list[torch.Tensor]], mode: Mode
) -> None:
    truth = logits[0, mode]
    one, two = (distance(logits[size, mode], truth, truth) for size in (1, 2))
    assert 1e-4 < one < 0.1
    assert two <= 1.25 * one
    assert distance(logits[1, mode], logits[2, mode], truth) <= 1.5 * one
