"""Variants of LLaVA: each vision tower and selection of its features, and each type of rotary embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.engine.asking import ask
from tests.families import HEAD_DIM, Prompt, build_model, make_prompt
from tests.harness import FixedModes, RecordingEngine
from tests.oracle import Oracle
from tests.references import assert_same
from vlora.errors import PromptTooLong, UnsupportedModel
from vlora.models.families import family_of
from vlora.types import Mode

CONTEXT = 64  # tokens of the original context
NUM_TOKENS = 8
ROPES: dict[str, dict[str, Any]] = {
    "longrope": {
        "factor": 16.0,
        "original_max_position_embeddings": CONTEXT,
        "short_factor": [1.0 + i / 8 for i in range(HEAD_DIM // 2)],
        "long_factor": [4.0 + i for i in range(HEAD_DIM // 2)],
    },
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 16.0, "original_max_position_embeddings": CONTEXT},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": CONTEXT,
    },
}
# `dynamic` changes its frequencies over the model's maximum, `longrope` over its original maximum.
LIMITS = {"longrope": CONTEXT, "dynamic": CONTEXT, "yarn": 1024, "linear": 1024, "llama3": 1024}


class Reference:
    """LLaVA with these settings, and its adapters on disk."""

    family = "llava"

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.model = build_model("llava", **settings)
        self.oracle = Oracle("llava", self.model)
        self.adapters = self.oracle.save(folder)

    def prompt(self, seed: int, num_tokens: int) -> Prompt:
        """A picture of 16 tokens, and text up to `num_tokens`."""
        return make_prompt("llava", self.model, seed, num_images=1, text=(5, num_tokens - 16 - 5 - 2))

    def check(self, *cases: tuple[str | None, Prompt]) -> RecordingEngine:
        """Answer requests at once as PEFT does."""
        recorded = RecordingEngine(self, FixedModes(Mode.UNMERGED), model=self.model)
        want = [self.oracle.generate(prompt, adapter, NUM_TOKENS) for adapter, prompt in cases]
        for got, answer in zip(recorded.answer(cases, NUM_TOKENS), want, strict=True):
            assert_same(got, answer)
        return recorded


@pytest.mark.parametrize("selection", ["full", "default"])
@pytest.mark.parametrize("tower", ["clip", "siglip"])
def test_pictures_are_read_with_every_tower_and_selection(tower: str, selection: str, tmp_path: Path) -> None:
    settings = {"vision_feature_select_strategy": selection, "vision_feature_layer": -1}
    reference = Reference(tmp_path, tower=tower, **settings)
    images = ((None, 1), ("everywhere64", 2), ("wide8", 1))
    reference.check(
        *((name, make_prompt("llava", reference.model, i, num_images=count)) for i, (name, count) in enumerate(images))
    )


@pytest.mark.parametrize("rope_type", ROPES)
def test_a_long_request_changes_no_answer_beside_it(rope_type: str, tmp_path: Path) -> None:
    """Frequencies that depend on a sequence's length are served where they do not."""
    text: dict[str, Any] = {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **ROPES[rope_type]}}
    if rope_type == "dynamic":
        text["max_position_embeddings"] = CONTEXT
    reference, limit = Reference(tmp_path, text_settings=text), LIMITS[rope_type]
    longest = min(limit, 200) - NUM_TOKENS
    lengths = (("wide8", 30), (None, longest), ("wide8", 40), ("narrow4", longest))
    recorded = reference.check(*((name, reference.prompt(i, length)) for i, (name, length) in enumerate(lengths)))
    assert recorded.engine.limits.max_context == limit
    with pytest.raises(PromptTooLong, match=f"context of {limit}"):
        recorded.engine.add(ask(reference.prompt(4, limit - NUM_TOKENS + 1), num_tokens=NUM_TOKENS))


@pytest.mark.parametrize(
    ("family", "rope_type"), [("qwen2_vl", "longrope"), ("qwen2_vl", "dynamic"), ("llava", "proportional")]
)
def test_other_rope_types_are_refused_by_name(family: str, rope_type: str) -> None:
    """Time indices of a video may exceed the number of tokens, so a bound on tokens does not bound M-RoPE positions."""
    config = build_model(family).config
    config.text_config.rope_parameters["rope_type"] = rope_type
    with pytest.raises(UnsupportedModel, match=f"rope_type '{rope_type}'"):
        family_of(config)


def test_a_tower_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="vision tower of type 'pixtral'"):
        family_of(AutoConfig.for_model("llava", vision_config=AutoConfig.for_model("pixtral")))
