"""The main law: each request gets the answer of plain transformers + PEFT on the same weights, for every form of
adapters, in every mode, and whatever happens to the memory of its adapter and KV meanwhile.

`make test` runs each row for one family in turn, fast ones for Qwen2-VL too (`tests/conftest.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.forms import FORMS, NUM_TOKENS, Case, FormReference, continued, words
from tests.engine.moves import shuffled
from tests.families import FAMILIES, MROPE_FAMILIES, VIDEO_FAMILIES, Prompt, build_model, make_prompt
from tests.harness import FixedModes, RecordingEngine, run_engine
from tests.oracle import Oracle
from tests.references import TOLERANCE, assert_same
from vlora.lora.merge_in_place import InPlaceSwitcher
from vlora.models.forward_batch import ForwardBatch
from vlora.models.hf_model import HFModel, Positions
from vlora.models.runner import ModelRunner
from vlora.orchestrator.admission import kv_admission
from vlora.orchestrator.policies.registry import make_policy
from vlora.types import Mode

pytestmark = pytest.mark.gpu

IMAGES_FIRST = 1e9
"""Share of images in a step: otherwise requests may start one after the other, and no step has several adapters."""


def changing(reference: FormReference) -> FixedModes:
    """The merged adapter (or none) changes every few steps, within prompts and answers."""
    first, *others = reference.form.merged
    plan = [(Mode.MIXED, first), (Mode.UNMERGED, None), *((Mode.MIXED, name) for name in others)]
    return FixedModes(*plan[0], plan=plan)


def unmerged(reference: FormReference, _: str) -> None:
    run = reference.run(FixedModes(Mode.UNMERGED), encode_share=IMAGES_FIRST)
    # A step with only base-model requests, with images encoded before, needs no delta: it counts as merged.
    assert Mode.UNMERGED in run.modes and Mode.MIXED not in run.modes


def mixed(reference: FormReference, merged: str) -> None:
    assert Mode.MIXED in reference.run(FixedModes(Mode.MIXED, merged), encode_share=IMAGES_FIRST).modes


def merged(reference: FormReference, name: str) -> None:
    adapter = None if name == "none" else name
    run = reference.run(FixedModes(Mode.MERGED, adapter), cases=reference.of(adapter))
    assert run.modes == {Mode.MERGED}


def modes_change(reference: FormReference, switching: str) -> None:
    """Switching in place restores weights from the checkpoint, if there is one."""
    settings: dict[str, Any] = {"switching": "shadow" if switching == "shadow" else "in_place"}
    if switching != "shadow" and reference.name == "lora" and reference.family != "qwen_vl":
        settings["checkpoint"] = reference.checkpoint

    def made(*arguments: Any, **_: Any) -> InPlaceSwitcher:
        return InPlaceSwitcher(*arguments, subtracting=switching == "subtracting")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vlora.engine.device_runtime.InPlaceSwitcher", made)
        run = reference.run(changing(reference), max_step_tokens=24, encode_share=IMAGES_FIRST, **settings)
    assert run.modes >= {Mode.UNMERGED, Mode.MIXED} and run.num_switches > 5


def chunks(reference: FormReference, max_step_tokens: str) -> None:
    """Twice: the second time with cached prefixes."""
    settings = {"max_step_tokens": int(max_step_tokens), "model": reference.new_model()}
    recorded = RecordingEngine(reference, changing(reference), **settings)
    for _ in range(2):
        reference.expect(recorded.answer(reference.cases, NUM_TOKENS))
    assert all(recorded.cached_tokens)


def no_admission(patch: pytest.MonkeyPatch) -> None:
    """As the fixture `no_kv_admission`: requests preempt each other."""
    patch.setattr(kv_admission, "peak_blocks", lambda needs, block_size: 0)


def moved(reference: FormReference, memory: str) -> None:
    """All pages move between steps. In scarce memory requests are preempted."""
    settings: dict[str, Any] = {"scarce_memory": True} if memory == "scarce" else {"max_step_tokens": 24}
    with pytest.MonkeyPatch.context() as patch:
        no_admission(patch)
        recorded = RecordingEngine(reference, changing(reference), model=reference.new_model(), **settings)
        recorded.answer(reference.cases, 1)  # from now on images are cached, so that all requests start at once
        counts = shuffled(recorded)
        reference.expect(recorded.answer(reference.cases, 12))  # of fewer tokens, memory has room for all on a GPU
        assert len(counts) >= 12 and sum(counts) > 2 * len(counts)
        assert memory == "ample" or recorded.engine.stats().num_preemptions > 0
        # Cached prompt blocks moved as well, and are still found.
        for got, case in zip(recorded.answer(reference.cases, 2), reference.cases, strict=True):
            tokens, logits = reference.answer(*case)
            assert_same(got, (tokens[:2], logits[:2]))
    assert memory == "scarce" or min(recorded.cached_tokens) > 0


def evicted(reference: FormReference, policy: str) -> None:
    """Every adapter under three names, which do not fit at the same time. Threads read and load them."""
    many = copy.copy(reference)
    many.adapters = {f"{name}-{i}": path for i in range(3) for name, path in reference.adapters.items()}
    named = [(name and f"{name}-{i}", prompt) for i in (0, 1, 2, 0) for name, prompt in reference.cases]
    chosen = None if policy == "paper" else FixedModes(Mode.MIXED, f"{reference.form.merged[0]}-1")
    settings = {"scarce_memory": True, "background": True, "model": reference.new_model()}
    run = run_engine(many, chosen, NUM_TOKENS, cases=named, **settings)
    assert run.num_loads >= len(many.adapters) > run.num_resident
    reference.expect(run.answers, 4 * reference.cases)


def background(reference: FormReference, name: str) -> None:
    recorded = RecordingEngine(reference, FixedModes(Mode.MIXED, name), background=True, model=reference.new_model())
    reference.expect(recorded.answer(reference.cases, NUM_TOKENS))


def preempted(reference: FormReference, merged: str) -> None:
    """Eight requests of eight blocks each leave fewer than eight, and each of them needs one more."""
    cases: list[Case] = []
    for seed in range(8):
        adapter, _, *more = reference.form.cases[seed % len(reference.form.cases)]
        text = make_prompt(reference.family, reference.model, seed, text=(15, 15))
        begun = [*text.prompt_ids, *(more[0] if more else ())]
        cases.append((adapter, continued(text, [*begun[30:], *words(seed, 62 - len(begun))])))
    policy = FixedModes(Mode.UNMERGED) if merged == "none" else FixedModes(Mode.MIXED, merged)
    with pytest.MonkeyPatch.context() as patch:
        no_admission(patch)
        assert reference.run(policy, cases=cases, num_tokens=12, scarce_memory=True).num_preemptions > 0


def scheduled(reference: FormReference, policy: str) -> None:
    reference.run(None if policy == "paper" else make_policy(policy))


def without(reference: FormReference, part: str) -> None:
    """Negative control of all rows of a form: the comparison notices that a part is left out."""
    left = reference.form.left_out[part]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(left.owner, left.name, left.without)
        reference.expect_wrong(left.adapter, FixedModes(left.mode, left.merged), encode_share=IMAGES_FIRST)


def video(reference: FormReference, _: str) -> None:
    count = 1 if reference.family == "llava_onevision" else 2
    prompt = make_prompt(reference.family, reference.model, 3, num_videos=count)
    reference.run(FixedModes(Mode.UNMERGED), cases=[("everywhere64", prompt)])


SCENARIOS: dict[str, Callable[[FormReference, str], None]] = {
    each.__name__: each
    for each in (
        *(unmerged, mixed, merged, modes_change, chunks, moved, evicted, background, preempted, scheduled, without),
        video,
    )
}
ROWS = {
    "lora": "unmerged mixed:wide8 mixed:everywhere64 mixed:patterned16 mixed:narrow4 merged:wide8 merged:everywhere64 "
    "merged:none modes_change:shadow modes_change:rewriting modes_change:subtracting chunks:11 moved:ample "
    "moved:scarce evicted:paper evicted:mixed preempted:wide8 scheduled:paper video",
    "dora": "unmerged mixed:dora8 mixed:wide8 mixed:dora_everywhere merged:dora8 merged:dora_everywhere "
    "modes_change:shadow modes_change:rewriting modes_change:subtracting moved:ample evicted:mixed",
    "ia3": "unmerged mixed:dora mixed:plain moved:ample preempted:dora",
    "biases": "unmerged mixed:plain chunks:11 moved:ample",
    "own_layers": "unmerged mixed:head mixed:factors merged:head merged:both merged:factors merged:projector "
    "modes_change:rewriting moved:ample evicted:mixed",
    "tokens": "unmerged mixed:tokens mixed:plain merged:tokens merged:both merged:head merged:alone "
    "modes_change:subtracting moved:ample preempted:tokens",
    "tied": "unmerged mixed:tokens merged:tokens merged:both moved:ample",
    "composed": "unmerged mixed:narrow4+wide8 mixed:wide8 mixed:everywhere16+1.5*rs6+wide8 merged:narrow4+wide8 "
    "merged:everywhere16+1.5*rs6+wide8 merged:wide8+words4 modes_change:shadow background:narrow4+wide8 chunks:11 "
    "preempted:none",
    "activated": "unmerged mixed:wide8 mixed:ordinary8 scheduled:merged_only scheduled:cost_based modes_change:shadow "
    "chunks:9 chunks:11 chunks:40 preempted:none",
}
SLOW = ("chunks", "moved", "evicted", "preempted", "modes_change")
"""Scenarios that run slowly, but for `lora`: it is the form for which `make test-fast` runs all but evictions."""
MOVED = ("lora", "dora")
"""The forms for which `make test` moves pages: a page does not depend on the form of the adapter."""


def rows(*forms: str) -> pytest.MarkDecorator:
    found: list[Any] = []
    for form in forms:
        line = ROWS[form]
        for scenario in [*line.split(), *(f"without:{part}" for part in FORMS[form].left_out)]:
            name = scenario.partition(":")[0]
            slow = name in SLOW and (form != "lora" or name == "evicted")
            exhaustive = name == "moved" and form not in MOVED
            families = VIDEO_FAMILIES if name == "video" else ("qwen2_vl", "llava") if form == "tied" else FAMILIES
            found += [
                pytest.param(
                    (form, family),
                    scenario,
                    marks=[pytest.mark.slow] * slow + [pytest.mark.exhaustive] * exhaustive,
                    id=f"{form}-{scenario.replace(' ', '_')}-{family}",
                )
                for family in families
            ]
    return pytest.mark.parametrize(("reference", "scenario"), found, indirect=["reference"])


@pytest.fixture
def reference(request: pytest.FixtureRequest, form_reference: Callable[[str, str], FormReference]) -> FormReference:
    return form_reference(*request.param)


@rows("lora")
def test_lora(reference: FormReference, scenario: str) -> None:
    name, _, argument = scenario.partition(":")
    SCENARIOS[name](reference, argument)


@rows(*(form for form in ROWS if form != "lora"))
def test_other_forms(reference: FormReference, scenario: str) -> None:
    name, _, argument = scenario.partition(":")
    SCENARIOS[name](reference, argument)


# -- negative controls of parts that all forms need -------------------------------------------------------------------


def without_the_rope_delta(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Positions, "delta", np.zeros((3, 1), dtype=np.int64))


def without_the_de_lora_branch(patch: pytest.MonkeyPatch) -> None:
    lanes = ForwardBatch.lanes
    patch.setattr(ForwardBatch, "lanes", lambda *a: [lane for lane in lanes(*a) if lane.sign > 0])


def without_the_adapter_in_the_keys_of_images(patch: pytest.MonkeyPatch) -> None:
    """As if the embedding cache ignored that an adapter targets the vision tower."""
    add = ModelRunner.add
    patch.setattr(ModelRunner, "add", lambda self, request, key: add(self, request, None))


def without_deepstack_levels(patch: pytest.MonkeyPatch) -> None:
    forward = HFModel.forward
    patch.setattr(HFModel, "forward", lambda self, e, p, s, *visuals: forward(self, e, p, s))


PLAIN, MIXED = FixedModes(Mode.UNMERGED), FixedModes(Mode.MIXED, "wide8")
CONTROLS: list[tuple[str, Any, str | None, FixedModes]] = [
    ("qwen2_vl", without_the_rope_delta, "everywhere64", PLAIN),
    ("qwen2_vl", without_the_de_lora_branch, "everywhere64", MIXED),
    ("qwen2_vl", without_the_adapter_in_the_keys_of_images, "everywhere64", PLAIN),
    ("qwen3_vl", without_deepstack_levels, None, PLAIN),
]


@pytest.mark.parametrize(
    ("reference", "left_out", "adapter", "policy"),
    [pytest.param(("lora", family), part, *others, id=part.__name__) for family, part, *others in CONTROLS],
    indirect=["reference"],
)
def test_without_a_part_answers_are_wrong(
    reference: FormReference,
    left_out: Callable[[pytest.MonkeyPatch], None],
    adapter: str | None,
    policy: FixedModes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_out(monkeypatch)
    reference.expect_wrong(adapter, policy, encode_share=IMAGES_FIRST)


@pytest.mark.parametrize("reference", [("lora", "qwen2_vl")], indirect=True, ids=["qwen2_vl"])
def test_with_a_wrong_scale_or_place_answers_are_wrong(reference: FormReference, tmp_path: Path) -> None:
    """An adapter without rsLoRA's scale, and one that was moved without its views."""
    unscaled = copy.copy(reference)
    changed = tmp_path / "wide8"
    changed.mkdir()
    for file in Path(reference.adapters["wide8"]).iterdir():
        if file.is_file():
            (changed / file.name).write_bytes(file.read_bytes().replace(b'"use_rslora": true', b'"use_rslora": false'))
    unscaled.adapters = {**reference.adapters, "wide8": str(changed)}
    right = [reference.answer(*case) for case in reference.of("wide8")]  # kept for `unscaled`, too
    unscaled.expect_wrong("wide8", PLAIN)
    recorded = RecordingEngine(reference, PLAIN)
    recorded.engine.parts.device.pool.relocate = lambda key: None  # type: ignore[method-assign]
    shuffled(recorded)
    for got, want in zip(recorded.answer(reference.of("wide8"), NUM_TOKENS), right, strict=True):
        assert not torch.allclose(got[1], want[1], atol=1e-3)


# -- positions --------------------------------------------------------------------------------------------------------


def long_video(reference: FormReference, seed: int = 0, after: int = 4) -> Prompt:
    """Twelve frames, then `after` + 2 tokens of text and the video's end marker: the last time index exceeds the
    positions of the text after it."""
    return make_prompt(reference.family, reference.model, seed, num_videos=1, frames=12, text=(5, after))


LONG_VIDEOS = pytest.mark.parametrize(
    "reference", [("lora", "qwen2_vl"), ("lora", "qwen2_5_vl")], indirect=True, ids=lambda each: each[1]
)


@LONG_VIDEOS
def test_the_answer_to_a_long_video_continues_the_last_position(reference: FormReference) -> None:
    """The last prompt ends in a video: time, height and width of its last token differ."""
    cases = [
        (adapter, long_video(reference, after=after)) for adapter in (None, "everywhere64") for after in (0, 4, 60)
    ]
    whole = cases[0][1]
    kwargs = {
        name: value[:, :-3] if name in ("input_ids", "attention_mask", "mm_token_type_ids") else value
        for name, value in whole.kwargs.items()
    }
    reference.run(PLAIN, cases=[*cases, ("everywhere64", Prompt(kwargs, whole.prompt_ids[:-3], whole.vision))])


@LONG_VIDEOS
def test_long_videos_in_chunks_cached_and_preempted(reference: FormReference, no_kv_admission: None) -> None:
    engine = RecordingEngine(reference, MIXED, max_step_tokens=11)
    cases: list[Case] = [("wide8", long_video(reference)), ("narrow4", long_video(reference, 1))]
    for _ in range(2):
        reference.expect(engine.answer(cases, NUM_TOKENS), cases)
    assert all(engine.cached_tokens)
    cases = [("wide8" if seed % 2 else None, long_video(reference, seed)) for seed in range(6)]
    assert reference.run(PLAIN, cases=cases, scarce_memory=True, encode_share=IMAGES_FIRST).num_preemptions > 0


@pytest.mark.parametrize("reference", [("lora", "qwen2_vl")], indirect=True, ids=["qwen2_vl"])
def test_pictures_of_different_sizes_have_their_own_positions(reference: FormReference) -> None:
    assert reference.family in MROPE_FAMILIES
    prompt = make_prompt(reference.family, reference.model, 0, num_images=3)
    assert len({item.num_tokens for item in prompt.vision}) > 1
    reference.run(PLAIN, cases=[(None, prompt), ("everywhere64", prompt)])


# -- rounding ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_in_bfloat16_every_mode_is_as_close_to_float32_as_unmerged(tmp_path: Path) -> None:
    """Weights are rounded to bfloat16 once and shared; deltas of about a tenth of the weight, as after training."""
    rounded = build_model("qwen2_vl", torch.bfloat16).float()
    oracle = Oracle("qwen2_vl", rounded, scale=0.1)
    cases: list[Case] = [
        (adapter, make_prompt("qwen2_vl", rounded, 2 * seed + place, num_images=seed % 2, text=(12, 12)))
        for seed in range(12)
        for place, adapter in enumerate(("wide8", "everywhere64"))
    ]
    truth = [oracle.generate(prompt, adapter, 1)[1] for adapter, prompt in cases]
    reference: Any = type("Reference", (), {"family": "qwen2_vl", "adapters": oracle.save(tmp_path)})

    def distance(mode: Mode, merged: str | None, adapter: str) -> float:
        """Relative RMS error of the first token's logits, over one adapter's prompts."""
        own = [i for i, (name, _) in enumerate(cases) if mode is not Mode.MERGED or name == adapter]
        chosen = [cases[i] for i in own]
        run = run_engine(reference, FixedModes(mode, merged), 1, cases=chosen, dtype=torch.bfloat16)
        assert mode in run.modes
        pairs = [(got[1], truth[i]) for got, i in zip(run.answers, own, strict=True) if cases[i][0] == adapter]
        error = sum(float((got - want).square().sum()) for got, want in pairs)
        return (error / sum(float(want.square().sum()) for _, want in pairs)) ** 0.5

    for adapter, other in (("wide8", "everywhere64"), ("everywhere64", "wide8")):
        alone = distance(Mode.UNMERGED, None, adapter)
        assert TOLERANCE < alone < 0.1
        assert distance(Mode.MERGED, adapter, adapter) <= 1.25 * alone
        if adapter == "wide8":
            assert distance(Mode.MIXED, other, adapter) <= 1.25 * alone
