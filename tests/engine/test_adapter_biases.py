"""Adapters with trained biases (PEFT's `bias` and `lora_bias`) answer as under PEFT, in every mode."""

from __future__ import annotations

import copy
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from tests.families import FAMILIES, LANGUAGE_LINEARS, Prompt, build_model, make_prompt, vision_linears
from tests.harness import FixedModes, RecordingEngine, run_engine
from tests.references import NUM_TOKENS, TOLERANCE, Answer, CaseReference, assert_same
from vlora.lora import adapted_linear
from vlora.types import Mode

pytestmark = pytest.mark.gpu

CASES = (("own_bias", 1), ("plain", 1), (None, 1), ("base_bias", 0), ("dora_bias", 1), ("own_bias", 0))


def saved(model: Any, config: PeftConfig, folder: Path) -> str:
    """Write an adapter with random factors, magnitudes and biases."""
    peft = get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if parameter.requires_grad:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.ndim == 2:
                    parameter.copy_(noise * 0.5 / parameter.shape[1] ** 0.5)
                else:
                    parameter.add_(noise * 0.1)
    peft.save_pretrained(str(folder))
    return str(folder)


@torch.no_grad()
def answer_of_peft(model: Any, folder: str | None, prompt: Prompt) -> Answer:
    own = copy.deepcopy(model)
    peft = own if folder is None else PeftModel.from_pretrained(own, folder).eval()
    out = peft.generate(
        **prompt.kwargs,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack([step[0] for step in out.logits])
    return logits.argmax(-1).tolist(), logits


@pytest.fixture(scope="module", params=FAMILIES)
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
    adapters = {name: saved(model, config, folder / name) for name, config in configs.items()}
    cases = [
        (adapter, make_prompt(family, model, seed, num_images=images, text=(5 + 3 * seed, 4 + 2 * seed)))
        for seed, (adapter, images) in enumerate(CASES)
    ]
    answers = [answer_of_peft(model, adapter and adapters[adapter], prompt) for adapter, prompt in cases]
    return CaseReference(family, adapters, cases, answers)


@pytest.mark.parametrize(("mode", "merged"), [(Mode.UNMERGED, None), (Mode.MIXED, "plain")], ids=["unmerged", "mixed"])
def test_batch_of_several_adapters(reference: CaseReference, mode: Mode, merged: str | None) -> None:
    run = run_engine(reference, FixedModes(mode, merged), NUM_TOKENS, encode_share=1e9)
    assert mode in run.modes
    for got, want in zip(run.answers, reference.answers, strict=True):
        assert_same(got, want)


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
