"""The last time index of a long video exceeds the positions of the text after it; the answer continues the text's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.families import Prompt, make_prompt
from tests.harness import FixedModes, RecordingEngine, run_engine
from tests.references import Reference
from vlora.types import Mode

pytestmark = pytest.mark.gpu

NUM_TOKENS = 12


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    return references(request.param)


def long_video(reference: Reference, seed: int = 0, after: int = 4) -> Prompt:
    """Twelve frames, then `after` + 2 tokens of text (and the video's end marker)."""
    return make_prompt(reference.family, reference.model, seed, num_videos=1, frames=12, text=(5, after))


@pytest.mark.parametrize("after", [0, 4, 60], ids=["two words", "short text", "long text"])
def test_the_answer_continues_the_last_position(reference: Reference, after: int) -> None:
    cases = [(adapter, long_video(reference, after=after)) for adapter in (None, "everywhere64")]
    run = run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS, cases=cases)
    for got, case in zip(run.answers, cases, strict=True):
        reference.expect(got, *case)


def test_in_chunks_and_with_cached_prefixes(reference: Reference) -> None:
    engine = RecordingEngine(reference, FixedModes(Mode.MIXED, "wide8"), max_step_tokens=11)
    cases = [("wide8", long_video(reference)), ("narrow4", long_video(reference, 1))]
    for _ in range(2):
        for got, case in zip(engine.answer(cases, NUM_TOKENS), cases, strict=True):
            reference.expect(got, *case)
    assert all(engine.cached_tokens)


@pytest.mark.usefixtures("no_kv_admission")
def test_preempted_answers_continue_at_the_same_positions(reference: Reference) -> None:
    cases = [("wide8" if seed % 2 else None, long_video(reference, seed)) for seed in range(6)]
    policy = FixedModes(Mode.UNMERGED)
    run = run_engine(reference, policy, NUM_TOKENS, cases=cases, scarce_memory=True, encode_share=1e9)
    assert run.num_preemptions > 0
    for got, case in zip(run.answers, cases, strict=True):
        reference.expect(got, *case)


def test_a_prompt_that_ends_in_a_video(reference: Reference) -> None:
    """Time, height and width of its last token differ, and so do the rows of the answer's positions."""
    whole = long_video(reference, after=0)
    num_tokens = len(whole.prompt_ids) - 3
    kwargs = {
        name: value[:, :num_tokens] if name in ("input_ids", "attention_mask", "mm_token_type_ids") else value
        for name, value in whole.kwargs.items()
    }
    case = ("everywhere64", Prompt(kwargs, whole.prompt_ids[:num_tokens], whole.vision))
    run = run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS, cases=[case])
    reference.expect(run.answers[0], *case)
