"""bfloat16 is compared with a float32 reference: merged and mixed must not be much noisier than unmerged."""

from __future__ import annotations

import pytest
import torch

from tests.families import Prompt, build_model, make_prompt
from tests.harness import FixedModes, run_engine
from tests.oracle import Oracle
from tests.references import CaseReference
from vlora.types import Mode

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PROMPTS = 24


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> CaseReference:
    """Weights rounded to bfloat16 once, shared by the reference and the test; many prompts for one and two adapters."""
    family = "qwen2_vl"
    rounded = build_model(family, torch.bfloat16).float()
    # LoRA deltas of about a tenth of the weight, as after training.
    oracle = Oracle(family, rounded, scale=0.1)
    adapters = oracle.save(tmp_path_factory.mktemp(family))
    cases: list[tuple[str | None, Prompt]] = [
        (
            ("wide8", "everywhere64")[seed % 2],
            make_prompt(family, rounded, seed, num_images=seed // 2 % 2, text=(12, 12)),
        )
        for seed in range(PROMPTS)
    ]
    answers = [oracle.generate(prompt, adapter, 1) for adapter, prompt in cases]
    return CaseReference(family, adapters, cases, answers)


def distance(reference: CaseReference, mode: Mode, merged: str | None, adapter: str) -> float:
    """Relative RMS error of the first token's logits against float32, over one adapter's prompts."""
    cases = [i for i, (name, _) in enumerate(reference.cases) if mode is not Mode.MERGED or name == adapter]
    run = run_engine(reference, FixedModes(mode, merged), 1, only=cases, dtype=torch.bfloat16)
    assert mode in run.modes
    error = truth = 0.0
    for i, (_, logits) in zip(cases, run.answers, strict=True):
        if reference.cases[i][0] == adapter:
            want = reference.answers[i][1]
            error += float((logits - want).square().sum())
            truth += float(want.square().sum())
    return (error / truth) ** 0.5


@pytest.mark.parametrize("adapter", ["wide8", "everywhere64"])
def test_merged_is_as_close_to_the_truth_as_unmerged(reference: CaseReference, adapter: str) -> None:
    unmerged = distance(reference, Mode.UNMERGED, None, adapter)
    assert 1e-4 < unmerged < 0.1
    assert distance(reference, Mode.MERGED, adapter, adapter) <= 1.25 * unmerged


def test_mixed_is_as_close_to_the_truth_as_unmerged(reference: CaseReference) -> None:
    unmerged = distance(reference, Mode.UNMERGED, None, "wide8")
    assert distance(reference, Mode.MIXED, "everywhere64", "wide8") <= 1.25 * unmerged
