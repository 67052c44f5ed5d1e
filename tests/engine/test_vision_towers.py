"""LLaVA with each vision tower and each selection of its features: as many placeholders as embeddings, same answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.families import build_model, make_prompt
from tests.harness import FixedModes, run_engine
from tests.oracle import Oracle
from tests.references import assert_same
from vlora.errors import UnsupportedModel
from vlora.models.families import family_of
from vlora.types import Mode

NUM_TOKENS = 8
CASES = ((None, 1), ("everywhere64", 2), ("wide8", 1))


class Reference:
    """LLaVA with one tower and selection, and its adapters on disk."""

    family = "llava"

    def __init__(self, tower: str, selection: str, folder: Path) -> None:
        self.model = build_model(
            "llava", tower=tower, vision_feature_select_strategy=selection, vision_feature_layer=-1
        )
        self.oracle = Oracle("llava", self.model)
        self.adapters = self.oracle.save(folder)


@pytest.mark.parametrize("selection", ["full", "default"])
@pytest.mark.parametrize("tower", ["clip", "siglip"])
def test_pictures_are_read_with_every_tower_and_selection(tower: str, selection: str, tmp_path: Path) -> None:
    reference = Reference(tower, selection, tmp_path)
    cases = [
        (adapter, make_prompt("llava", reference.model, seed, num_images=images))
        for seed, (adapter, images) in enumerate(CASES)
    ]
    want = [reference.oracle.generate(prompt, adapter, NUM_TOKENS) for adapter, prompt in cases]
    run = run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS, cases=cases, model=reference.model)
    for got, answer in zip(run.answers, want, strict=True):
        assert_same(got, answer)


def test_a_tower_of_another_kind_is_refused_by_name() -> None:
    config = AutoConfig.for_model("llava", vision_config=AutoConfig.for_model("pixtral"))
    with pytest.raises(UnsupportedModel, match="vision tower of type 'pixtral'"):
        family_of(config)
