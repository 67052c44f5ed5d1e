"""Embeddings against plain transformers + PEFT: the last hidden states of the same weights, pooled, with length 1."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.engine.asking import ask, tokens
from tests.engine.forms import words
from tests.engine.test_heads import Pausing
from tests.engine.test_reuse import BLOCK, MODES, qwen, reference
from tests.families import Prompt
from tests.harness import RecordingEngine
from tests.references import CASES, Reference, prompts_of
from vlora.errors import BadRequest
from vlora.types import Mode, Request, RequestOutput, SamplingParams

__all__ = ["qwen", "reference"]  # fixtures
pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TOLERANCE = 1e-5


@torch.no_grad()
def expected(reference: Reference, prompt: Prompt, adapter: str | None, pooling: str) -> torch.Tensor:
    peft = reference.oracle.peft
    assert peft is not None
    with peft.disable_adapter() if adapter is None else contextlib.nullcontext():
        peft.set_adapter(adapter or "wide8")
        base: Any = peft.get_base_model()
        states = base.model(**prompt.kwargs).last_hidden_state[0]
    return F.normalize(states[-1] if pooling == "last" else states.mean(0), dim=0)


def check(output: RequestOutput, want: torch.Tensor) -> None:
    assert output.error is None and output.finish_reason == "head", output
    assert output.head is not None and output.head.task == "embedding"
    assert float((torch.tensor(output.head.values) - want).abs().max()) < TOLERANCE
    assert output.timings is not None and output.timings.num_completion_tokens == 0


@pytest.mark.parametrize(("mode", "max_step_tokens"), zip(MODES, (512, 512, 512, 11), strict=True))
def test_embeddings_of_texts_and_pictures_in_a_batch_with_text(
    reference: Reference, mode: str, max_step_tokens: int
) -> None:
    recorded = RecordingEngine(reference, MODES[mode], max_step_tokens=max_step_tokens)
    cases = [
        (f"{place} {pooling}", adapter, prompt, pooling)
        for place, (adapter, prompt) in enumerate(prompts_of(reference.family, reference.model, CASES))
        for pooling in ("last", "mean")
        if mode != "merged" or adapter == "wide8"
    ]
    requests = [ask(prompt, name, adapter, pooling=pooling) for name, adapter, prompt, pooling in cases]
    outputs = recorded.local.run([*requests, ask(cases[-1][2], "says", "wide8")])
    for name, adapter, prompt, pooling in cases:
        check(outputs[name][-1], expected(reference, prompt, adapter, pooling))
    assert tokens(outputs["says"]) == reference.oracle.generate(cases[-1][2], "wide8", 6)[0]
    assert recorded.modes >= ({Mode.MIXED, Mode.UNMERGED} if mode == "changing" else {Mode(mode)})


def test_the_last_token_reuses_a_prefix_and_the_mean_of_all_does_not(qwen: Reference) -> None:
    recorded = RecordingEngine(qwen, MODES["unmerged"], max_step_tokens=13)
    prompt = qwen.picture(3, num_images=2)
    whole = (len(prompt.prompt_ids) - 1) // BLOCK * BLOCK
    for pooling, cached in (("mean", 0), ("last", whole), ("mean", 0), ("last", whole)):
        (output,) = recorded.local.run([ask(prompt, "r", "wide8", pooling=pooling)])["r"]
        check(output, expected(qwen, prompt, "wide8", pooling))
        assert output.timings is not None and output.timings.num_cached_tokens == cached
    assert whole > 0
    with pytest.raises(BadRequest, match="an embedding answers in one pass; omit the tokens"):
        recorded.engine.add(ask(prompt, "more", pooling="last", answered=(1,)))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_kv_admission")
def test_states_summed_before_a_preemption_are_summed_again(qwen: Reference) -> None:
    prompt = qwen.picture(0, num_images=2)
    recorded = RecordingEngine(qwen, Pausing(Mode.UNMERGED), max_step_tokens=8, scarce_memory=True)
    long = {"adapter": "wide8", "sampling": SamplingParams(max_tokens=90, ignore_eos=True)}
    speakers = [Request(request_id=f"{i}", prompt_ids=tuple(words(i, 9)), **long) for i in range(8)]  # type: ignore[arg-type]
    paused = ask(prompt, "wide8 detection", "wide8", pooling="mean")
    output = recorded.local.run([paused, *speakers])["wide8 detection"][-1]
    assert output.timings is not None and output.timings.num_preemptions > 0
    check(output, expected(qwen, prompt, "wide8", "mean"))
