"""Negative controls: the oracle tests fail if one part of the implementation is disabled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.harness import FixedModes, Run, run_engine
from tests.references import NUM_TOKENS, TOLERANCE, CaseReference
from vlora.models.forward_batch import ForwardBatch
from vlora.models.hf_model import HFModel, Positions
from vlora.types import Mode

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def reference(case_references: Callable[[str], CaseReference]) -> CaseReference:
    return case_references("qwen2_vl")


def worst(run: Run, reference: CaseReference) -> float:
    """Largest logit difference over all requests, up to the first token that differs (later inputs differ too)."""
    out = 0.0
    for (tokens, logits), (want_tokens, want) in zip(run.answers, reference.answers, strict=True):
        same = 0
        while same < NUM_TOKENS and tokens[same] == want_tokens[same]:
            same += 1
        out = max(out, float((logits[: same + 1] - want[: same + 1]).abs().max()))
    return out


def test_the_unchanged_engine_differs_by_rounding_only(reference: CaseReference) -> None:
    assert worst(run_engine(reference, FixedModes(Mode.MIXED, "wide8"), NUM_TOKENS), reference) < TOLERANCE


def test_without_the_rope_delta(reference: CaseReference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Positions, "delta", np.zeros((3, 1), dtype=np.int64))
    assert worst(run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS), reference) > 100 * TOLERANCE


def test_without_the_de_lora_branch(reference: CaseReference, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = ForwardBatch.lanes
    monkeypatch.setattr(ForwardBatch, "lanes", lambda *a: [lane for lane in lanes(*a) if lane.sign > 0])
    assert worst(run_engine(reference, FixedModes(Mode.MIXED, "wide8"), NUM_TOKENS), reference) > 100 * TOLERANCE


@pytest.fixture
def unscaled(reference: CaseReference, tmp_path: Path) -> Iterator[Any]:
    """The same adapters on disk, one of them without rsLoRA's scale."""
    import shutil

    folder = tmp_path / "wide8"
    shutil.copytree(reference.adapters["wide8"], folder)
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_rslora": true', '"use_rslora": false'))

    class Changed:
        family = reference.family
        cases = reference.cases
        adapters: ClassVar[dict[str, str]] = {**reference.adapters, "wide8": str(folder)}

    yield Changed()


def test_with_a_wrong_adapter_scale(reference: CaseReference, unscaled: Any) -> None:
    assert worst(run_engine(unscaled, FixedModes(Mode.UNMERGED), NUM_TOKENS), reference) > 100 * TOLERANCE


def test_with_image_embeddings_of_the_wrong_adapter(reference: CaseReference, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the embedding cache ignored that an adapter targets the vision tower.
    from vlora.models.runner import ModelRunner

    add = ModelRunner.add
    monkeypatch.setattr(ModelRunner, "add", lambda self, request, key: add(self, request, None))
    assert worst(run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS), reference) > 100 * TOLERANCE


@pytest.mark.slow
def test_without_deepstack_levels(
    case_references: Callable[[str], CaseReference], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = case_references("qwen3_vl")
    forward = HFModel.forward

    def without(self: HFModel, e: torch.Tensor, p: torch.Tensor, s: Any, mask: Any, deepstack: Any) -> torch.Tensor:
        return forward(self, e, p, s, None, [])

    monkeypatch.setattr(HFModel, "forward", without)
    assert worst(run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS), reference) > 100 * TOLERANCE
