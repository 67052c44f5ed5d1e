"""DoRA, trained biases and own output heads on several ranks answer as under PEFT."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from peft import LoraConfig

from tests.families import LANGUAGE_LINEARS, build_model, vision_linears
from tests.harness import FixedModes, RecordingEngine
from tests.oracle import save_adapter
from tests.references import NUM_TOKENS, CaseReference
from vlora.errors import BadAdapter
from vlora.types import Mode

FAMILY = "qwen2_vl"
CASES = (("dora", 1), ("plain", 1), (None, 0), ("bias", 1), ("head", 0), ("dora", 0))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> CaseReference:
    model, folder = build_model(FAMILY), tmp_path_factory.mktemp("forms")
    columns = f"({LANGUAGE_LINEARS.replace('|o', '').replace('|down', '')}|{vision_linears(FAMILY)})"
    configs = {
        "plain": LoraConfig(r=8, target_modules=LANGUAGE_LINEARS),
        "dora": LoraConfig(r=8, use_dora=True, target_modules=columns),
        "bias": LoraConfig(r=4, lora_bias=True, target_modules=columns),
        "head": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    }
    model.save_pretrained(folder / "model")
    return CaseReference.of_configs(FAMILY, model, configs, CASES, folder)


@pytest.fixture(scope="module")
def recorded(reference: CaseReference) -> Iterator[RecordingEngine]:
    folder = str(reference.adapters["plain"]).removesuffix("plain")
    recorded = RecordingEngine(
        reference,
        None,
        checkpoint=f"{folder}model",
        tensor_parallel=2,
        sharding=("dora=slora", "*=replicated"),
        threads=1,
    )
    yield recorded
    recorded.engine.close()


@pytest.mark.parametrize(("mode", "merged"), [(Mode.UNMERGED, None), (Mode.MIXED, "plain")], ids=["unmerged", "mixed"])
def test_batch_of_several_adapters(
    reference: CaseReference, recorded: RecordingEngine, mode: Mode, merged: str | None
) -> None:
    recorded.engine.parts.scheduler.policy = FixedModes(mode, merged)
    answers = recorded.answer(reference.cases, NUM_TOKENS)
    assert mode in recorded.modes
    reference.expect(answers)


def test_scales_of_other_ranks_are_unknown_so_dora_is_never_merged(recorded: RecordingEngine) -> None:
    mergeable = {status.name: status.mergeable for status in recorded.engine.adapters()}
    assert mergeable == {"plain": True, "dora": False, "bias": False, "head": True}


def test_layers_with_inputs_on_several_ranks_are_refused(
    recorded: RecordingEngine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = LoraConfig(r=4, use_dora=True, target_modules=["down_proj"])
    folder = save_adapter(build_model(FAMILY), config, tmp_path_factory.mktemp("down"))
    with pytest.raises(BadAdapter, match=r"use_dora is not supported .* tensor_parallel = 2"):
        recorded.engine.load_adapter("down", folder)
