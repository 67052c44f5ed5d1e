"""Adapters with trained biases (PEFT's `bias` and `lora_bias`) answer as under PEFT, in every mode."""

from __future__ import annotations

import pytest
from peft import LoraConfig
from safetensors.torch import load_file

from tests.families import EACH_FAMILY, LANGUAGE_LINEARS, build_model, vision_linears
from tests.harness import FixedModes, RecordingEngine, run_engine
from tests.references import NUM_TOKENS, TOLERANCE, CaseReference, assert_same
from vlora.lora import adapted_linear
from vlora.types import Mode

pytestmark = pytest.mark.gpu

CASES = (("own_bias", 1), ("plain", 1), (None, 1), ("base_bias", 0), ("dora_bias", 1), ("own_bias", 0))


@pytest.fixture(scope="module", params=EACH_FAMILY)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CaseReference:
    family = request.param
    model, folder = build_model(family), tmp_path_factory.mktemp("biases")
    everywhere = f"({LANGUAGE_LINEARS}|{vision_linears(family)})"
    configs = {
        "plain": LoraConfig(r=8, target_modules=LANGUAGE_LINEARS),
        "own_bias": LoraConfig(r=4, lora_alpha=12, lora_bias=True, target_modules=everywhere),
        "base_bias": LoraConfig(r=8, bias="lora_only", target_modules=everywhere),
        "dora_bias": LoraConfig(r=4, bias="lora_only", use_dora=True, target_modules=everywhere),
    }
    return CaseReference.of_configs(family, model, configs, CASES, folder)


@pytest.mark.parametrize(("mode", "merged"), [(Mode.UNMERGED, None), (Mode.MIXED, "plain")], ids=["unmerged", "mixed"])
def test_batch_of_several_adapters(reference: CaseReference, mode: Mode, merged: str | None) -> None:
    run = run_engine(reference, FixedModes(mode, merged), NUM_TOKENS, encode_share=1e9)
    assert mode in run.modes
    reference.expect(run.answers)


def has_biases(adapter: str) -> bool:
    """Whether an adapter has trained biases in the language model: some families' layers have none there."""
    names = load_file(f"{adapter}/adapter_model.safetensors")
    return any(name.endswith(".bias") and "language_model" in name for name in names)


def test_the_scheduler_never_merges_an_adapter_with_biases(reference: CaseReference) -> None:
    recorded = RecordingEngine(reference, None)
    assert {status.name: status.mergeable for status in recorded.engine.adapters()} == {
        name: not has_biases(path) for name, path in reference.adapters.items()
    }
    own = [case for case in reference.cases if case[0] == "own_bias"]
    answers = recorded.answer(own, NUM_TOKENS)
    assert recorded.engine.stats().num_switches == 0
    wanted = [answer for answer, case in zip(reference.answers, reference.cases, strict=True) if case[0] == "own_bias"]
    for got, want in zip(answers, wanted, strict=True):
        assert_same(got, want)


def test_without_the_biases_answers_are_wrong(reference: CaseReference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapted_linear, "apply_changes", lambda *_: None)
    biased = {name for name in ("own_bias", "base_bias") if has_biases(reference.adapters[name])}
    own = [index for index, (adapter, _) in enumerate(CASES) if adapter in biased]
    run = run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS, only=own)
    for got, index in zip(run.answers, own, strict=True):
        assert float((got[1][0] - reference.answers[index][1][0]).abs().max()) > 100 * TOLERANCE
