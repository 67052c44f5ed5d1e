"""Log probabilities of sampled tokens, compared with a plain float32 computation by transformers + PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.families import build_model, make_prompt
from tests.oracle import Oracle
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import BadRequest
from vlora.types import Request, SamplingParams

FAMILY = "qwen2_vl"
NUM_TOKENS = 6
TOLERANCE = 1e-4


def test_every_token_has_the_oracles_log_probability(tmp_path: Path) -> None:
    oracle = Oracle(FAMILY, build_model(FAMILY))
    model = build_model(FAMILY)
    local = LocalEngine(EngineConfig(model=FAMILY, arena_bytes=64 * 2**20), model=model)
    adapters = oracle.save(tmp_path)
    local.engine.load_adapter("wide8", adapters["wide8"])
    # adapter, number of alternatives, temperature: all in one batch.
    cases = [("wide8", 5, 0.0), (None, 20, 0.0), ("wide8", None, 0.0), (None, 0, 1.0), ("wide8", 3, 2.0)]
    prompts = [make_prompt(FAMILY, model, seed, num_images=seed % 2) for seed in range(len(cases))]
    outputs = local.run(
        Request(
            request_id=str(i),
            prompt_ids=prompt.prompt_ids,
            vision=prompt.vision,
            adapter=adapter,
            sampling=SamplingParams(
                max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=count, temperature=temperature, seed=i
            ),
        )
        for i, ((adapter, count, temperature), prompt) in enumerate(zip(cases, prompts, strict=True))
    )
    for i, ((adapter, count, temperature), prompt) in enumerate(zip(cases, prompts, strict=True)):
        tokens = [token for output in outputs[str(i)] for token in output.token_ids]
        scores = [score for output in outputs[str(i)] for score in output.scores]
        if count is None:
            assert scores == [] and len(tokens) == NUM_TOKENS
            continue
        want_tokens, logits = oracle.generate(prompt, adapter, NUM_TOKENS)
        # A sampled answer and the reference's logits diverge after its first token.
        comparable = NUM_TOKENS if temperature == 0 else 1
        if temperature == 0:
            assert tokens == want_tokens
        assert len(scores) == len(tokens) == NUM_TOKENS
        for token, score, row in zip(tokens, scores, logits.log_softmax(-1)[:comparable], strict=False):
            assert score.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
            values, ids = torch.topk(row, count)
            assert [pair[0] for pair in score.top] == ids.tolist()
            assert [pair[1] for pair in score.top] == pytest.approx(values.tolist(), abs=TOLERANCE)


def test_more_than_the_limit_is_refused() -> None:
    for count in (-1, 21):
        with pytest.raises(BadRequest, match=f"logprobs is {count}; it must be between 0 and 20"):
            SamplingParams(logprobs=count)
