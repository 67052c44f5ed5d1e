"""Greedy answers with penalties, min_tokens and a bias, compared with transformers + PEFT and its logits processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import build_model, make_prompt
from tests.oracle import Oracle
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.types import Request, SamplingParams

FAMILY = "qwen2_vl"
NUM_TOKENS = 12


@pytest.mark.parametrize("merged", [False, True])
def test_answers_equal_those_of_transformers(tmp_path: Path, merged: bool) -> None:
    oracle = Oracle(FAMILY, build_model(FAMILY))
    model = build_model(FAMILY)
    policy = "merged_only" if merged else "unmerged_only"
    local = LocalEngine(EngineConfig(model=FAMILY, arena_bytes=64 * 2**20, policy=policy), model=model)
    for name, path in oracle.save(tmp_path).items():
        local.engine.load_adapter(name, path)
    prompts = [make_prompt(FAMILY, model, seed, num_images=seed % 2) for seed in range(4)]
    plain = [oracle.generate(prompts[i], "wide8", NUM_TOKENS)[0] for i in range(4)]
    favourite = plain[3][0]
    # Our parameter and its transformers equivalent: all in one batch, with one request that sets none.
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        ({}, {}),
        ({"logit_bias": ((favourite, -30.0),)}, {"sequence_bias": [[[favourite], -30.0]]}),
    ]
    outputs = local.run(
        Request(
            request_id=str(i),
            prompt_ids=prompt.prompt_ids,
            vision=prompt.vision,
            adapter="wide8",
            sampling=SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **ours),
        )
        for i, ((ours, _), prompt) in enumerate(zip(cases, prompts, strict=True))
    )
    assert oracle.peft is not None
    oracle.peft.set_adapter("wide8")
    for i, ((ours, theirs), prompt) in enumerate(zip(cases, prompts, strict=True)):
        with torch.no_grad():
            whole = oracle.peft.generate(**prompt.kwargs, max_new_tokens=NUM_TOKENS, do_sample=False, **theirs)
        expected = whole[0, len(prompt.prompt_ids) :].tolist()
        assert [token for output in outputs[str(i)] for token in output.token_ids] == expected
        assert (expected != plain[i]) == bool(ours), "the oracle's parameter changes the answer"


def test_no_end_before_min_tokens(tmp_path: Path) -> None:
    model = build_model(FAMILY)
    local = LocalEngine(EngineConfig(model=FAMILY, arena_bytes=64 * 2**20), model=model)
    prompt = make_prompt(FAMILY, model, 0)
    (eos, *_) = sorted(local.engine.parts.device.hf_model.eos_ids)

    def ask(name: str, **fields: Any) -> Request:
        sampling = SamplingParams(max_tokens=9, logit_bias=((eos, 100.0),), **fields)
        return Request(request_id=name, prompt_ids=prompt.prompt_ids, vision=prompt.vision, sampling=sampling)

    outputs = local.run([ask("at once"), ask("later", min_tokens=5), ask("never", ignore_eos=True)])
    tokens = {name: [token for each in found for token in each.token_ids] for name, found in outputs.items()}
    assert tokens["at once"] == [eos]
    assert len(tokens["later"]) == 6 and tokens["later"].index(eos) == 5
    assert tokens["never"] == [eos] * 9


def test_a_bias_of_an_unknown_token_is_refused() -> None:
    model = build_model(FAMILY)
    local = LocalEngine(EngineConfig(model=FAMILY, arena_bytes=64 * 2**20), model=model)
    sampling = SamplingParams(max_tokens=1, logit_bias=((10**6, 1.0),))
    (output,) = local.run([Request(request_id="r", prompt_ids=(5,), sampling=sampling)])["r"]
    assert output.error is not None and "logit_bias has token id 1000000; this model's ids" in output.error.message
