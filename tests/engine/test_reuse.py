"""Prefix caching changes no answer (compared with plain transformers + PEFT), and only new tokens are computed."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from heads import HeadSpec, TaskHead, save_heads
from tests.families import HIDDEN, VIDEO_FAMILIES, Prompt, make_prompt
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


def continued(prompt: Prompt, more: list[int]) -> Prompt:
    """The prompt with more text appended."""
    count = len(more)
    kwargs = dict(prompt.kwargs)
    kwargs["input_ids"] = torch.cat([kwargs["input_ids"], torch.tensor([more])], 1)
    kwargs["attention_mask"] = torch.ones_like(kwargs["input_ids"])
    if "mm_token_type_ids" in kwargs:
        kwargs["mm_token_type_ids"] = torch.cat(
            [kwargs["mm_token_type_ids"], torch.zeros(1, count, dtype=torch.int)], 1
        )
    return dataclasses.replace(prompt, kwargs=kwargs, prompt_ids=(*prompt.prompt_ids, *more))


def words(seed: int, count: int) -> list[int]:
    return torch.randint(3, 180, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def found(prompt: Prompt) -> int:
    """Tokens that a repeated request finds: whole blocks, and never the last token."""
    return (len(prompt.prompt_ids) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_step_tokens", [512, 11])
def test_two_turns_on_one_picture(reference: Reference, mode: str, max_step_tokens: int) -> None:
    recorded = RecordingEngine(reference, MODES[mode], max_step_tokens=max_step_tokens, vision_cache_bytes=0)
    first = continued(reference.picture(1), words(1, 9))
    (answer,) = recorded.answer([("wide8", first)], NUM_TOKENS)
    reference.expect(answer, "wide8", first)
    assert recorded.engine.stats().num_vision_encoded == 1
    second = continued(first, answer[0] + words(2, 7))
    (again,) = recorded.answer([("wide8", second)], NUM_TOKENS)
    reference.expect(again, "wide8", second)
    # All of the first turn except a partial block; the last sampled token's KV was never computed.
    in_place = (len(first.prompt_ids) + NUM_TOKENS - 1) // BLOCK * BLOCK
    assert recorded.cached_tokens == [in_place]
    assert recorded.engine.stats().num_vision_encoded == 1, "the image is entirely in the reused prefix"


@pytest.mark.parametrize("adapter", ["everywhere64", None])
def test_a_second_picture_in_the_second_turn(reference: Reference, adapter: str | None) -> None:
    recorded = RecordingEngine(reference, MODES["unmerged"], vision_cache_bytes=0)
    first, second = (continued(reference.picture(2, count), words(count, 6)) for count in (1, 2))
    for prompt in (first, second):
        (answer,) = recorded.answer([(adapter, prompt)], NUM_TOKENS)
        reference.expect(answer, adapter, prompt)
    assert recorded.cached_tokens[0] >= len(reference.picture(2).prompt_ids) - BLOCK
    assert recorded.engine.stats().num_vision_encoded <= 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("together", "prefix_cache"), [(True, True), (False, True), (True, False)])
def test_ten_questions_on_one_picture(reference: Reference, mode: str, together: bool, prefix_cache: bool) -> None:
    recorded = RecordingEngine(reference, MODES[mode], prefix_cache=prefix_cache)
    prompts = [continued(reference.picture(3), words(10 + i, 3 + i)) for i in range(10)]
    cases = [("wide8", prompt) for prompt in prompts]
    answers = (
        recorded.answer(cases, NUM_TOKENS) if together else [recorded.answer([case], NUM_TOKENS)[0] for case in cases]
    )
    for answer, prompt in zip(answers, prompts, strict=True):
        reference.expect(answer, "wide8", prompt)
    stats = recorded.engine.stats()
    tokens = sum(len(prompt.prompt_ids) for prompt in prompts)
    assert stats.num_computed_tokens + stats.num_reused_tokens == tokens
    shared = len(reference.picture(3).prompt_ids) // BLOCK * BLOCK
    assert stats.num_reused_tokens == (9 * shared if prefix_cache else 0)
    assert (stats.cached_blocks > 0) == prefix_cache


@pytest.mark.parametrize("mode", ["unmerged", "mixed", "changing"])
def test_each_adapter_computes_its_own_blocks(reference: Reference, mode: str) -> None:
    recorded = RecordingEngine(reference, MODES[mode])
    prompt = continued(reference.picture(4), words(4, 10))
    adapters = [None, "wide8", "everywhere64", "patterned16", "narrow4"]
    for reused in (0, found(prompt)):
        answers = recorded.answer([(adapter, prompt) for adapter in adapters], NUM_TOKENS)
        for adapter, answer in zip(adapters, answers, strict=True):
            reference.expect(answer, adapter, prompt)
        assert recorded.cached_tokens == [reused] * len(adapters)


def test_a_reloaded_name_reuses_no_block_of_its_old_content(reference: Reference) -> None:
    recorded = RecordingEngine(reference, MODES["unmerged"])
    engine = recorded.engine
    prompt = continued(reference.picture(5), words(5, 10))
    for content in ("narrow4", "everywhere64", "narrow4", "patterned16"):
        engine.load_adapter("name", reference.adapters[content])
        for reused in (0, found(prompt)):
            (answer,) = recorded.answer([("name", prompt)], NUM_TOKENS)
            reference.expect(answer, content, prompt)
            assert recorded.cached_tokens == [reused]
    engine.unload_adapter("name")
    assert engine.stats().cached_blocks == 0
    engine.check_integrity()


@pytest.mark.usefixtures("no_kv_admission")
def test_preempted_requests_reuse_their_remaining_blocks(reference: Reference) -> None:
    recorded = RecordingEngine(reference, MODES["mixed"], scarce_memory=True, vision_cache_bytes=0)
    adapters = ["wide8", None, "patterned16", "wide8"]
    cases = [
        (adapter, continued(reference.picture(6 + picture), words(20 + i, 70)))
        for i, (adapter, picture) in enumerate((adapter, picture) for picture in range(3) for adapter in adapters)
    ]
    for _ in range(2):
        for (adapter, prompt), answer in zip(cases, recorded.answer(cases, NUM_TOKENS), strict=True):
            reference.expect(answer, adapter, prompt)
    stats = recorded.engine.stats()
    assert stats.num_preemptions > 0 and stats.num_reused_tokens > 0


@pytest.mark.parametrize("over", range(-2, 3))
@pytest.mark.parametrize("adapter", ["everywhere64", None])
def test_prompt_lengths_around_a_block_boundary(qwen: Reference, over: int, adapter: str | None) -> None:
    recorded = RecordingEngine(qwen, MODES["unmerged"])
    picture = qwen.picture(7)
    prompt = continued(picture, words(7, -len(picture.prompt_ids) % BLOCK + BLOCK + over))
    assert len(prompt.prompt_ids) % BLOCK == over % BLOCK
    for reused in (0, found(prompt)):
        (answer,) = recorded.answer([(adapter, prompt)], NUM_TOKENS)
        qwen.expect(answer, adapter, prompt)
        assert recorded.cached_tokens == [reused]


def test_a_picture_across_a_block_boundary_is_encoded_for_its_remainder(qwen: Reference) -> None:
    """Two prompts with the same image differ within the block in which the image ends."""
    recorded = RecordingEngine(qwen, MODES["unmerged"], vision_cache_bytes=0)
    picture = qwen.picture(1)
    last = max(i for i, token in enumerate(picture.prompt_ids) if token == qwen.model.config.image_token_id)
    assert last % BLOCK < BLOCK - 2 and len(picture.prompt_ids) > last + 2, "tokens after the image share its block"
    for seed in (1, 2):
        prompt = continued(picture, words(seed, 9))
        (answer,) = recorded.answer([("everywhere64", prompt)], NUM_TOKENS)
        qwen.expect(answer, "everywhere64", prompt)
    assert recorded.cached_tokens == [len(picture.prompt_ids) // BLOCK * BLOCK]
    assert recorded.engine.stats().num_vision_encoded == (2 if recorded.cached_tokens[0] <= last else 1)


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_two_turns_on_videos(family: str, tmp_path: Path) -> None:
    reference = Reference(family, tmp_path)
    recorded = RecordingEngine(reference, MODES["unmerged"], vision_cache_bytes=0)
    count = 1 if family == "llava_onevision" else 2
    first = make_prompt(family, reference.model, 3, num_videos=count, text=(5, 9))
    (answer,) = recorded.answer([("everywhere64", first)], NUM_TOKENS)
    reference.expect(answer, "everywhere64", first)
    second = continued(first, answer[0] + words(2, 7))
    (again,) = recorded.answer([("everywhere64", second)], NUM_TOKENS)
    reference.expect(again, "everywhere64", second)
    assert recorded.cached_tokens == [(len(first.prompt_ids) + NUM_TOKENS - 1) // BLOCK * BLOCK]
    assert recorded.engine.stats().num_vision_encoded == count


def test_a_head_reads_the_same_after_reused_blocks(qwen: Reference, tmp_path: Path) -> None:
    spec = HeadSpec(
        name="kind", task="classification", labels=("cat", "dog"), prompt="what is it", num_frames=1, hidden_size=HIDDEN
    )
    folder = shutil.copytree(qwen.adapters["wide8"], tmp_path / "headed")
    weight = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(0)) / 4
    save_heads(str(folder), {"kind": TaskHead(spec, weight, torch.zeros(2))})
    prompt = continued(qwen.picture(1), words(1, 11))
    scores: dict[bool, tuple[float, ...]] = {}
    for prefix_cache in (True, False):
        recorded = RecordingEngine(qwen, MODES["unmerged"], prefix_cache=prefix_cache)
        recorded.engine.load_adapter("headed", str(folder))
        (answer,) = recorded.answer([("headed", prompt)], NUM_TOKENS)
        qwen.expect(answer, "wide8", prompt)
        request = Request(
            request_id="head", prompt_ids=prompt.prompt_ids, vision=prompt.vision, adapter="headed", head="kind"
        )
        (output,) = recorded.local.run([request])["head"]
        assert output.head is not None and output.timings is not None
        assert output.timings.num_cached_tokens == (found(prompt) if prefix_cache else 0)
        scores[prefix_cache] = output.head.scores
    assert scores[True] == pytest.approx(scores[False], abs=TOLERANCE)


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
    lost = Request(request_id="lost", prompt_ids=prompt.prompt_ids, vision=prompt.vision)
    (output,) = recorded.local.run([lost])["lost"]
    assert output.error is not None and output.error.code == "step_failed"
    (answer,) = recorded.answer([(None, prompt)], NUM_TOKENS)
    qwen.expect(answer, None, prompt)
    assert recorded.cached_tokens == [16], "the step before it was correct"


# -- negative controls ------------------------------------------------------------------------------------------------


def worst(recorded: RecordingEngine, reference: Reference, cases: list[tuple[str | None, Prompt]]) -> float:
    """Largest difference of the first token's logits, over cases run one after the other."""
    out = 0.0
    for adapter, prompt in cases:
        (answer,) = recorded.answer([(adapter, prompt)], 1)
        _, want = reference.oracle.generate(prompt, adapter, 1)
        out = max(out, float((answer[1] - want).abs().max()))
    return out


def test_without_pictures_in_the_keys(qwen: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    # Seeds 3 and 7 give images of one size; the text before them is made equal.
    one, other = (make_prompt("qwen2_vl", qwen.model, seed, num_images=1, text=(0, 0)) for seed in (3, 7))
    prompts = [continued(dataclasses.replace(p, prompt_ids=one.prompt_ids), words(1, 12)) for p in (one, other)]
    for prompt in prompts:
        prompt.kwargs["input_ids"] = torch.tensor([prompt.prompt_ids])
    cases: list[tuple[str | None, Prompt]] = [(None, prompt) for prompt in prompts]
    assert worst(RecordingEngine(qwen, MODES["unmerged"]), qwen, cases) < TOLERANCE
    monkeypatch.setattr(BlockManager, "chain", lambda self, request: TokenChain(request, self.block_size, {}))
    assert worst(RecordingEngine(qwen, MODES["unmerged"]), qwen, cases) > 100 * TOLERANCE


def test_without_the_adapter_in_the_keys(qwen: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = continued(qwen.picture(1), words(1, 12))
    cases: list[tuple[str | None, Prompt]] = [("wide8", prompt), (None, prompt)]
    assert worst(RecordingEngine(qwen, MODES["unmerged"]), qwen, cases) < TOLERANCE
    chain = BlockManager.chain

    def nameless(self: BlockManager, request: Request) -> TokenChain | None:
        return chain(self, msgspec.structs.replace(request, adapter=None))

    monkeypatch.setattr(BlockManager, "chain", nameless)
    assert worst(RecordingEngine(qwen, MODES["unmerged"]), qwen, cases) > 100 * TOLERANCE
