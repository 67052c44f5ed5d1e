"""Compositions of adapters answer as PEFT's `add_weighted_adapter(combination_type="cat")`, in every mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.config import BdLoraConfig

from tests.families import LANGUAGE_LINEARS, Prompt, build_model, make_prompt, vision_linears
from tests.harness import FixedModes, RecordingEngine, run_engine
from tests.oracle import Oracle
from tests.references import NUM_TOKENS, TOLERANCE, Answer, CaseReference, assert_same, prompts_of
from vlora.lora import composition
from vlora.types import Mode, adapter_name

pytestmark = pytest.mark.gpu

PARTS: Mapping[str, Mapping[str, float]] = {
    "narrow4+wide8": {"narrow4": 1, "wide8": 1},
    "0.7*everywhere16+-0.3*narrow4": {"narrow4": -0.3, "everywhere16": 0.7},
    "everywhere16+1.5*rs6+wide8": {"everywhere16": 1, "wide8": 1, "rs6": 1.5},
    "0.5*wide8": {"wide8": 0.5},
    "wide8+words4": {"wide8": 1, "words4": 1},
}
"""Canonical name -> weights, in an order in which PEFT does not rescale: its first adapter must not have rsLoRA
(https://github.com/huggingface/peft/issues/3761)."""
SUMS = {"blocks8+rs6": ["blocks8", "rs6"]}
"""Where PEFT cannot concatenate, or rescales: adapters that are active together, each with weight 1."""
BOTH, THREE = "narrow4+wide8", "everywhere16+1.5*rs6+wide8"
BLOCKS = BdLoraConfig(
    target_modules_bd_a=["o_proj", "down_proj"],
    target_modules_bd_b=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
    nblocks=4,
)
CASES = (
    (BOTH, 1),
    ("wide8", 1),
    ("0.7*everywhere16+-0.3*narrow4", 2),
    (None, 1),
    (THREE, 1),
    ("0.5*wide8", 0),
    ("wide8+words4", 1),
    (BOTH, 0),
    ("blocks8+rs6", 1),
)
PLAN = [(Mode.MIXED, BOTH), (Mode.UNMERGED, None), (Mode.MIXED, THREE), (Mode.MIXED, "wide8")]


class CatOracle(Oracle):
    """Adds the compositions to PEFT's model."""

    def compose(self, parts: Mapping[str, Mapping[str, float]]) -> None:
        assert self.peft is not None
        self._composed = {name: f"composed{number}" for number, name in enumerate(parts)}
        for name, weights in parts.items():
            # A single adapter is combined with itself: PEFT would use another method.
            names, values = list(weights), list(weights.values())
            if len(names) == 1:
                names, values = names * 2, [values[0] / 2] * 2
            self.peft.add_weighted_adapter(names, values, self._composed[name], combination_type="cat")
        self.peft.eval()

    def activate(self, adapter: str) -> None:
        if adapter in SUMS:
            assert self.peft is not None
            self.peft.base_model.set_adapter(SUMS[adapter])  # type: ignore[operator]
        else:
            super().activate(self._composed.get(adapter, adapter))


@dataclasses.dataclass
class ComposedReference(CaseReference):
    """long_cases: eight requests that do not fit into scarce memory together."""

    long_cases: list[tuple[str | None, Prompt]] = dataclasses.field(default_factory=list)
    long_answers: list[Answer] = dataclasses.field(default_factory=list)


def make_reference(family: str, folder: Path) -> ComposedReference:
    model = build_model(family)
    everywhere = f"({LANGUAGE_LINEARS}|{vision_linears(family)})"
    configs = {
        "narrow4": LoraConfig(r=4, lora_alpha=8, target_modules=r".*language_model.*\.(q_proj|v_proj)"),
        "wide8": LoraConfig(r=8, lora_alpha=12, target_modules=LANGUAGE_LINEARS),
        "everywhere16": LoraConfig(r=16, lora_alpha=16, target_modules=everywhere, rank_pattern={"0.mlp.up_proj": 5}),
        "rs6": LoraConfig(r=6, use_rslora=True, target_modules=r".*language_model.*\.(o_proj|down_proj)"),
        "blocks8": LoraConfig(r=8, use_rslora=True, target_modules=LANGUAGE_LINEARS, use_bdlora=BLOCKS),
        "words4": LoraConfig(r=4, target_modules=r".*(lm_head|embed_tokens|q_proj)"),
    }
    oracle = CatOracle(family, model, configs=configs)
    adapters = oracle.save(folder)
    oracle.compose(PARTS)
    cases = prompts_of(family, model, CASES)
    answers = [oracle.generate(prompt, adapter, NUM_TOKENS) for adapter, prompt in cases]
    long: list[tuple[str | None, Prompt]] = [
        (adapter, make_prompt(family, model, seed, text=(31, 31)))
        for seed, adapter in enumerate((BOTH, "wide8", "0.5*wide8", BOTH, BOTH, "0.5*wide8", None, BOTH))
    ]
    long_answers = [oracle.generate(prompt, adapter, NUM_TOKENS) for adapter, prompt in long]
    return ComposedReference(family, adapters, cases, answers, long_cases=long, long_answers=long_answers)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "llava_onevision"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ComposedReference:
    return make_reference(request.param, tmp_path_factory.mktemp("composition"))


def test_names_of_compositions_are_canonical() -> None:
    assert [adapter_name(weights) for weights in PARTS.values()] == list(PARTS)


def test_unmerged_batch_beside_single_adapters(reference: CaseReference) -> None:
    run = run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS, encode_share=1e9)
    assert Mode.UNMERGED in run.modes and Mode.MIXED not in run.modes
    reference.expect(run.answers)


@pytest.mark.parametrize("merged", [BOTH, "wide8", THREE])
def test_mixed_batch_over_one_merged_adapter(reference: CaseReference, merged: str) -> None:
    run = run_engine(reference, FixedModes(Mode.MIXED, merged), NUM_TOKENS, encode_share=1e9)
    assert Mode.MIXED in run.modes
    reference.expect(run.answers)


@pytest.mark.parametrize("merged", [BOTH, THREE, "wide8+words4"])
def test_merged_batch_of_one_composition(reference: CaseReference, merged: str) -> None:
    own = [i for i, (adapter, _) in enumerate(CASES) if adapter == merged]
    run = run_engine(reference, FixedModes(Mode.MERGED, merged), NUM_TOKENS, only=own)
    assert run.modes == {Mode.MERGED}
    for got, case in zip(run.answers, own, strict=True):
        assert_same(got, reference.answers[case])


def test_modes_change_in_the_middle_of_requests(reference: CaseReference) -> None:
    run = run_engine(reference, FixedModes(*PLAN[0], plan=PLAN), NUM_TOKENS, max_step_tokens=24)
    assert run.modes >= {Mode.UNMERGED, Mode.MIXED} and run.num_switches > 10
    reference.expect(run.answers)


def test_parts_are_read_in_the_background(reference: CaseReference) -> None:
    recorded = RecordingEngine(reference, FixedModes(Mode.MIXED, BOTH), background=True)
    for _ in range(2):  # the second time with cached prefixes
        reference.expect(recorded.answer(reference.cases, NUM_TOKENS))
    assert all(cached > 0 for cached in recorded.cached_tokens)


@pytest.mark.usefixtures("no_kv_admission")
def test_preempted_answers(reference: ComposedReference) -> None:
    run = run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS, cases=reference.long_cases, scarce_memory=True)
    assert run.num_preemptions > 0
    for got, want in zip(run.answers, reference.long_answers, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("left_out", ["weights", "a part"])
def test_without_weights_or_a_part_answers_are_wrong(
    reference: CaseReference, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = composition.compose

    def changed(key, parts, *arguments):  # type: ignore[no-untyped-def]
        parts = [(adapter, 1.0) for adapter, _ in parts] if left_out == "weights" else parts[1:] or parts
        return inner(key, parts, *arguments)

    monkeypatch.setattr("vlora.lora.registry.compose", changed)
    case = 2 if left_out == "weights" else 0
    run = run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS, only=[case])
    difference = run.answers[0][1][0] - reference.answers[case][1][0]
    assert float(torch.as_tensor(difference).abs().max()) > 100 * TOLERANCE
