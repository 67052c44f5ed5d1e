"""Requests of one batch with settings of their own: penalties and log probabilities, compared with transformers + PEFT,
and draws by seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.asking import ask, tokens
from tests.families import build_model, make_prompt
from tests.references import TOLERANCE, Reference
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.types import SamplingParams

FAMILY = "qwen2_vl"
NUM_TOKENS = 12
PROMPTS = [make_prompt(FAMILY, build_model(FAMILY), seed, num_images=seed % 2) for seed in range(5)]


def engine(reference: Reference | None = None, **settings: Any) -> LocalEngine:
    """reference: of an adapter to load."""
    local = LocalEngine(EngineConfig(model=FAMILY, arena_bytes=64 * 2**20, **settings), model=build_model(FAMILY))
    if reference is not None:
        local.engine.load_adapter("wide8", reference.adapters["wide8"])
    return local


@pytest.fixture(scope="module")
def reference(references: Callable[[str], Reference]) -> Reference:
    return references(FAMILY)


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, **fields})


@pytest.mark.parametrize("policy", ["unmerged_only", "merged_only"])
def test_penalties_are_those_of_transformers(reference: Reference, policy: str) -> None:
    plain = [reference.oracle.generate(prompt, "wide8", NUM_TOKENS)[0] for prompt in PROMPTS[:4]]
    favourite = plain[3][0]
    # Our parameter and its transformers equivalent: all in one batch, with one request that sets none.
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        ({}, {}),
        ({"logit_bias": ((favourite, -30.0),)}, {"sequence_bias": [[[favourite], -30.0]]}),
    ]
    outputs = engine(reference, policy=policy, encode_share=1e9).run(  # images first: all requests share their steps
        ask(PROMPTS[i], str(i), "wide8", sampling=sampling(**ours)) for i, (ours, _) in enumerate(cases)
    )
    peft = reference.oracle.peft
    assert peft is not None
    peft.set_adapter("wide8")
    for i, (ours, theirs) in enumerate(cases):
        with torch.no_grad():
            whole = peft.generate(**PROMPTS[i].kwargs, max_new_tokens=NUM_TOKENS, do_sample=False, **theirs)
        expected = whole[0, len(PROMPTS[i].prompt_ids) :].tolist()
        assert tokens(outputs[str(i)]) == expected
        assert (expected != plain[i]) == bool(ours), "the oracle's parameter changes the answer"


def test_every_token_has_the_oracles_log_probability(reference: Reference) -> None:
    # adapter, number of alternatives, temperature: all in one batch.
    cases = [("wide8", 5, 0.0), (None, 20, 0.0), ("wide8", None, 0.0), (None, 0, 1.0), ("wide8", 3, 2.0)]
    outputs = engine(reference).run(
        ask(PROMPTS[i], str(i), adapter, sampling=sampling(logprobs=count, temperature=temperature, seed=i))
        for i, (adapter, count, temperature) in enumerate(cases)
    )
    for i, (adapter, count, temperature) in enumerate(cases):
        scores = [score for output in outputs[str(i)] for score in output.scores]
        found = tokens(outputs[str(i)])
        assert len(found) == NUM_TOKENS
        if count is None:
            assert scores == []
            continue
        want, logits = reference.oracle.generate(PROMPTS[i], adapter, NUM_TOKENS)
        # A sampled answer and the reference's logits diverge after its first token.
        comparable = NUM_TOKENS if temperature == 0 else 1
        assert len(scores) == NUM_TOKENS and (temperature or found == want)
        for token, score, row in zip(found, scores, logits.log_softmax(-1)[:comparable], strict=False):
            values, ids = torch.topk(row, count)
            assert score.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
            assert [pair[0] for pair in score.top] == ids.tolist()
            assert [pair[1] for pair in score.top] == pytest.approx(values.tolist(), abs=TOLERANCE)


def test_a_seed_gives_the_same_draws_beside_any_other_requests() -> None:
    local = engine()
    made = [ask(PROMPTS[0], str(seed), sampling=sampling(temperature=1.5, seed=seed)) for seed in (7, 8, 9)]
    together = local.run(made)
    alone = {request.request_id: local.run([request])[request.request_id] for request in reversed(made)}
    answers = {name: tokens(outputs) for name, outputs in together.items()}
    assert answers == {name: tokens(alone[name]) for name in answers}
    assert len(set(map(tuple, answers.values()))) == len(made), "equal draws would prove nothing"


def test_no_end_before_min_tokens() -> None:
    local = engine()
    (eos, *_) = sorted(local.engine.parts.device.hf_model.eos_ids)
    settings: dict[str, dict[str, Any]] = {"at once": {}, "later": {"min_tokens": 5}, "never": {"ignore_eos": True}}
    outputs = local.run(
        ask(PROMPTS[0], name, sampling=SamplingParams(max_tokens=9, logit_bias=((eos, 100.0),), **fields))
        for name, fields in settings.items()
    )
    found = {name: tokens(each) for name, each in outputs.items()}
    assert found["at once"] == [eos]
    assert len(found["later"]) == 6 and found["later"].index(eos) == 5
    assert found["never"] == [eos] * 9


def test_a_bias_of_a_token_that_the_model_lacks_is_refused() -> None:
    (output,) = engine().run([ask(PROMPTS[0], sampling=sampling(logit_bias=((10**6, 1.0),)))])["r"]
    assert output.error is not None and "logit_bias has token id 1000000; this model's ids" in output.error.message
