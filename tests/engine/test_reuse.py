"""Prefix caching changes no answer (compared with plain transformers + PEFT), and only new tokens are computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.engine.asking import ask
from tests.engine.forms import INVOCATIONS, FormReference, continued, words
from tests.families import Prompt, make_prompt
from tests.harness import FixedModes, RecordingEngine
from tests.references import TOLERANCE, Reference
from vlora.memory.block_manager import BlockManager
from vlora.memory.prefix_cache import TokenChain
from vlora.types import Mode, Request

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

BLOCK = 8
NUM_TOKENS = 12
MODES = {
    "unmerged": FixedModes(Mode.UNMERGED),
    "merged": FixedModes(Mode.MERGED, "wide8"),
    "mixed": FixedModes(Mode.MIXED, "patterned16"),
    "changing": FixedModes(Mode.UNMERGED, plan=[(Mode.MIXED, "wide8"), (Mode.UNMERGED, None)]),
}


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl", "llava"])
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    return references(request.param)


@pytest.fixture(scope="module")
def qwen(references: Callable[[str], Reference]) -> Reference:
    return references("qwen2_vl")


def found(prompt: Prompt) -> int:
    """Tokens that a repeated request finds: whole blocks, and never the last token."""
    return (len(prompt.prompt_ids) - 1) // BLOCK * BLOCK


def check(recorded: RecordingEngine, reference: Any, *cases: tuple[str | None, Prompt]) -> list[int]:
    """Answer requests at once as PEFT does. Returns the tokens of the last one."""
    answers = recorded.answer(cases, NUM_TOKENS)
    for answer, (adapter, prompt) in zip(answers, cases, strict=True):
        reference.expect(answer, adapter, prompt)
    return answers[-1][0]


@pytest.mark.parametrize(("mode", "max_step_tokens"), zip(MODES, (512, 11, 512, 11), strict=True))
def test_two_turns_on_one_picture(reference: Reference, mode: str, max_step_tokens: int) -> None:
    recorded = RecordingEngine(reference, MODES[mode], max_step_tokens=max_step_tokens, vision_cache_bytes=0)
    first = continued(reference.picture(1), words(1, 9))
    answer = check(recorded, reference, ("wide8", first))
    assert recorded.engine.stats().num_vision_encoded == 1
    check(recorded, reference, ("wide8", continued(first, answer + words(2, 7))))
    # All of the first turn except a partial block; the last sampled token's KV was never computed.
    assert recorded.cached_tokens == [(len(first.prompt_ids) + NUM_TOKENS - 1) // BLOCK * BLOCK]
    assert recorded.engine.stats().num_vision_encoded == 1, "the image is entirely in the reused prefix"


@pytest.mark.parametrize("adapter", ["everywhere64", None])
def test_a_second_picture_in_the_second_turn(reference: Reference, adapter: str | None) -> None:
    recorded = RecordingEngine(reference, MODES["unmerged"], vision_cache_bytes=0)
    for count in (1, 2):
        check(recorded, reference, (adapter, continued(reference.picture(2, count), words(count, 6))))
    assert recorded.cached_tokens[0] >= len(reference.picture(2).prompt_ids) - BLOCK
    assert recorded.engine.stats().num_vision_encoded <= 3


@pytest.mark.parametrize(
    ("mode", "together", "prefix_cache"),
    [
        ("unmerged", True, True),
        ("merged", False, True),
        ("mixed", True, True),
        ("changing", False, True),
        ("unmerged", True, False),
    ],
)
def test_ten_questions_on_one_picture(reference: Reference, mode: str, together: bool, prefix_cache: bool) -> None:
    recorded = RecordingEngine(reference, MODES[mode], prefix_cache=prefix_cache)
    cases = [("wide8", continued(reference.picture(3), words(10 + i, 3 + i))) for i in range(10)]
    for several in [cases] if together else [[case] for case in cases]:
        check(recorded, reference, *several)
    stats = recorded.engine.stats()
    num_tokens = sum(len(prompt.prompt_ids) for _, prompt in cases)
    assert stats.num_computed_tokens + stats.num_reused_tokens == num_tokens
    shared = len(reference.picture(3).prompt_ids) // BLOCK * BLOCK
    assert stats.num_reused_tokens == (9 * shared if prefix_cache else 0)
    assert (stats.cached_blocks > 0) == prefix_cache


@pytest.mark.parametrize("mode", ["unmerged", "mixed", "changing"])
def test_each_adapter_computes_its_own_blocks(reference: Reference, mode: str) -> None:
    recorded = RecordingEngine(reference, MODES[mode])
    prompt = continued(reference.picture(4), words(4, 10))
    adapters = [None, "wide8", "everywhere64", "patterned16", "narrow4"]
    for reused in (0, found(prompt)):
        check(recorded, reference, *((adapter, prompt) for adapter in adapters))
        assert recorded.cached_tokens == [reused] * len(adapters)


def test_a_reloaded_name_reuses_no_block_of_its_old_content(reference: Reference) -> None:
    recorded = RecordingEngine(reference, MODES["unmerged"])
    engine, prompt = recorded.engine, continued(reference.picture(5), words(5, 10))
    for content in ("narrow4", "everywhere64", "narrow4", "patterned16"):
        engine.load_adapter("name", reference.adapters[content])
        for reused in (0, found(prompt)):
            (answer,) = recorded.answer([("name", prompt)], NUM_TOKENS)
            reference.expect(answer, content, prompt)
            assert recorded.cached_tokens == [reused]
    engine.unload_adapter("name")
    assert engine.stats().cached_blocks == 0
    engine.check_integrity()


@pytest.mark.parametrize("adapter", ["everywhere64", None])
def test_prompt_lengths_around_a_block_boundary(qwen: Reference, adapter: str | None) -> None:
    picture = qwen.picture(7)
    for over in range(-2, 3):
        recorded = RecordingEngine(qwen, MODES["unmerged"])
        prompt = continued(picture, words(7, -len(picture.prompt_ids) % BLOCK + BLOCK + over))
        assert len(prompt.prompt_ids) % BLOCK == over % BLOCK
        for reused in (0, found(prompt)):
            check(recorded, qwen, (adapter, prompt))
            assert recorded.cached_tokens == [reused]


def test_a_picture_across_a_block_boundary_is_encoded_for_its_remainder(qwen: Reference) -> None:
    """Two prompts with the same image differ within the block in which the image ends."""
    recorded = RecordingEngine(qwen, MODES["unmerged"], vision_cache_bytes=0)
    picture = qwen.picture(1)
    last = max(i for i, token in enumerate(picture.prompt_ids) if token == qwen.model.config.image_token_id)
    assert last % BLOCK < BLOCK - 2 and len(picture.prompt_ids) > last + 2, "tokens after the image share its block"
    for seed in (1, 2):
        check(recorded, qwen, ("everywhere64", continued(picture, words(seed, 9))))
    assert recorded.cached_tokens == [len(picture.prompt_ids) // BLOCK * BLOCK]
    assert recorded.engine.stats().num_vision_encoded == (2 if recorded.cached_tokens[0] <= last else 1)


def test_tokens_before_an_invocation_are_shared(tmp_path: Path) -> None:
    """Activated adapters find the base model's KV of the picture, and no other adapter's."""
    reference = FormReference("activated", "qwen2_vl", tmp_path)
    shared = make_prompt("qwen2_vl", reference.model, 5, num_images=1)
    text, (first, second) = words(9, 20), INVOCATIONS.values()
    cases = [(None, words(8, 20)), ("wide8", [*first, *text]), ("narrow4", [*second, *text])]
    cases += [("wide8", [*first, *text]), (None, [*first, *text])]
    recorded, reused = RecordingEngine(reference, MODES["unmerged"]), []
    for adapter, more in cases:
        case = adapter, continued(shared, more)
        reference.expect(recorded.answer([case], NUM_TOKENS), [case])
        reused += recorded.cached_tokens
    blocks = len(shared.prompt_ids) // BLOCK * BLOCK
    assert reused == [0, blocks, blocks, (len(shared.prompt_ids) + 21) // BLOCK * BLOCK, blocks]


def test_blocks_of_a_failed_step_are_not_reused(qwen: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordingEngine(qwen, MODES["unmerged"], max_step_tokens=16)
    hf_model = recorded.engine.parts.device.hf_model
    forward, calls = hf_model.forward, 0

    def fails_once_it_has_written(embeddings: torch.Tensor, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            forward(torch.full_like(embeddings, torch.nan), *args)
            raise RuntimeError("out of luck")
        return forward(embeddings, *args)

    prompt = continued(qwen.picture(2), words(2, 30))
    monkeypatch.setattr(hf_model, "forward", fails_once_it_has_written)
    (output,) = recorded.local.run([ask(prompt, "lost")])["lost"]
    assert output.error is not None and output.error.code == "step_failed"
    check(recorded, qwen, (None, prompt))
    assert recorded.cached_tokens == [16], "the step before it was correct"


# -- negative controls ------------------------------------------------------------------------------------------------


def worst(reference: Reference, cases: list[tuple[str | None, Prompt]]) -> float:
    """Largest difference of the first token's logits, over cases that one engine runs one after the other."""
    recorded = RecordingEngine(reference, MODES["unmerged"])
    pairs = [(recorded.answer([case], 1)[0], reference.oracle.generate(case[1], case[0], 1)) for case in cases]
    return max(float((got[1] - want[1]).abs().max()) for got, want in pairs)


def test_without_pictures_in_the_keys(qwen: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    # Seeds 3 and 7 give images of one size; the text before them is made equal.
    one, other = (make_prompt("qwen2_vl", qwen.model, seed, num_images=1, text=(0, 0)) for seed in (3, 7))
    prompts = [continued(dataclasses.replace(p, prompt_ids=one.prompt_ids), words(1, 12)) for p in (one, other)]
    for prompt in prompts:
        prompt.kwargs["input_ids"] = torch.tensor([prompt.prompt_ids])
    assert worst(qwen, [(None, prompt) for prompt in prompts]) < TOLERANCE
    monkeypatch.setattr(BlockManager, "chain", lambda self, request: TokenChain(request, self.block_size, {}))
    assert worst(qwen, [(None, prompt) for prompt in prompts]) > 100 * TOLERANCE


def test_without_the_adapter_in_the_keys(qwen: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = continued(qwen.picture(1), words(1, 12))
    cases: list[tuple[str | None, Prompt]] = [("wide8", prompt), (None, prompt)]
    assert worst(qwen, cases) < TOLERANCE
    chain = BlockManager.chain

    def nameless(self: BlockManager, request: Request) -> TokenChain | None:
        return chain(self, msgspec.structs.replace(request, adapter=None))

    monkeypatch.setattr(BlockManager, "chain", nameless)
    assert worst(qwen, cases) > 100 * TOLERANCE
