"""Rotary frequencies that depend on a sequence's length are served where they do not, and refused by name elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.families import HEAD_DIM, Prompt, build_model, make_prompt
from tests.harness import FixedModes, RecordingEngine
from tests.oracle import Oracle
from tests.references import assert_same
from vlora.errors import PromptTooLong, UnsupportedModel
from vlora.models.families import family_of
from vlora.types import Mode, Request, SamplingParams

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
    """LLaVA with one type of rotary embedding, and its adapters on disk."""

    family = "llava"

    def __init__(self, rope_type: str, folder: Path) -> None:
        text: dict[str, Any] = {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **ROPES[rope_type]}}
        if rope_type == "dynamic":
            text["max_position_embeddings"] = CONTEXT
        self.model = build_model("llava", text_settings=text)
        self.oracle = Oracle("llava", self.model)
        self.adapters = self.oracle.save(folder)

    def prompt(self, seed: int, num_tokens: int) -> Prompt:
        """A picture of 16 tokens, and text up to `num_tokens`."""
        return make_prompt("llava", self.model, seed, num_images=1, text=(5, num_tokens - 16 - 5 - 2))


@pytest.mark.parametrize("rope_type", ROPES)
def test_a_long_request_changes_no_answer_beside_it(rope_type: str, tmp_path: Path) -> None:
    reference = Reference(rope_type, tmp_path)
    limit = LIMITS[rope_type]
    longest = min(limit, 200) - NUM_TOKENS
    cases = [
        ("wide8", reference.prompt(0, 30)),
        (None, reference.prompt(1, longest)),
        ("wide8", reference.prompt(2, 40)),
        ("narrow4", reference.prompt(3, longest)),
    ]
    want = [reference.oracle.generate(prompt, adapter, NUM_TOKENS) for adapter, prompt in cases]
    engine = RecordingEngine(reference, FixedModes(Mode.UNMERGED), model=reference.model)
    assert engine.engine.limits.max_context == limit
    for got, answer in zip(engine.answer(cases, NUM_TOKENS), want, strict=True):
        assert_same(got, answer)
    too_long = reference.prompt(4, limit - NUM_TOKENS + 1)
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    request = Request(request_id="over", prompt_ids=too_long.prompt_ids, vision=too_long.vision, sampling=sampling)
    with pytest.raises(PromptTooLong, match=f"context of {limit}"):
        engine.engine.add(request)


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_mrope_with_such_frequencies_is_refused_by_name(rope_type: str) -> None:
    """Time indices of a video may exceed the number of tokens, so a bound on tokens does not bound positions."""
    config = build_model("qwen2_vl").config
    config.text_config.rope_parameters["rope_type"] = rope_type
    with pytest.raises(UnsupportedModel, match=f"rope_type '{rope_type}'"):
        family_of(config)


def test_an_unknown_rope_type_is_refused_by_name() -> None:
    config = build_model("llava").config
    config.text_config.rope_parameters["rope_type"] = "proportional"
    with pytest.raises(UnsupportedModel, match="rope_type 'proportional'"):
        family_of(config)
