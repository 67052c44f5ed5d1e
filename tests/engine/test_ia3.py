"""IA3 adapters answer as under PEFT, unmerged and beside a merged adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from peft import IA3Config, LoraConfig

from tests.families import EACH_FAMILY, LANGUAGE_LINEARS, build_model, vision_linears
from tests.harness import FixedModes, RecordingEngine, run_engine
from tests.oracle import save_adapter
from tests.references import NUM_TOKENS, TOLERANCE, CaseReference
from vlora.errors import BadAdapter
from vlora.lora import adapted_linear
from vlora.types import Mode

pytestmark = pytest.mark.gpu

CASES = (("ia3", 1), ("plain", 1), (None, 1), ("dora", 0), ("vision_ia3", 1), ("ia3", 0))


@pytest.fixture(scope="module", params=EACH_FAMILY)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CaseReference:
    family = request.param
    model, folder = build_model(family), tmp_path_factory.mktemp("ia3")
    language = r".*language_model.*(q_proj|k_proj|v_proj|up_proj|down_proj|o_proj)"
    inputs = r".*language_model.*(down_proj|o_proj)"
    configs = {
        "plain": LoraConfig(r=8, target_modules=LANGUAGE_LINEARS),
        "dora": LoraConfig(r=8, use_dora=True, target_modules=LANGUAGE_LINEARS),
        "ia3": IA3Config(target_modules=language, feedforward_modules=inputs),
        "vision_ia3": IA3Config(target_modules=f"({language}|{vision_linears(family)})", feedforward_modules=inputs),
    }
    return CaseReference.of_configs(family, model, configs, CASES, folder)


@pytest.mark.parametrize(
    ("mode", "merged"),
    [(Mode.UNMERGED, None), (Mode.MIXED, "dora"), pytest.param(Mode.MIXED, "plain", marks=pytest.mark.slow)],
    ids=["unmerged", "mixed-dora", "mixed-plain"],
)
def test_batch_of_several_adapters(reference: CaseReference, mode: Mode, merged: str | None) -> None:
    run = run_engine(reference, FixedModes(mode, merged), NUM_TOKENS, encode_share=1e9)
    assert mode in run.modes
    reference.expect(run.answers)


@pytest.mark.parametrize("left_out", ["apply_changes", "changed_inputs"])
def test_without_the_vectors_answers_are_wrong(
    reference: CaseReference, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapted_linear, left_out, lambda x, *_: x)
    run = run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS, only=[0])
    assert float((run.answers[0][1][0] - reference.answers[0][1][0]).abs().max()) > 100 * TOLERANCE


def test_it_is_never_merged(reference: CaseReference) -> None:
    mergeable = {status.name: status.mergeable for status in RecordingEngine(reference, None).engine.adapters()}
    assert mergeable == {"plain": True, "dora": True, "ia3": False, "vision_ia3": False}


def test_other_inputs_and_other_types_are_refused(reference: CaseReference, tmp_path: Path) -> None:
    engine = RecordingEngine(reference, None).engine
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=["k_proj"])
    folder = save_adapter(build_model(reference.family), config, tmp_path / "inputs")
    with pytest.raises(BadAdapter, match=r"k_proj.*feedforward_modules"):
        engine.load_adapter("inputs", folder)
    other = Path(shutil.copytree(reference.adapters["ia3"], tmp_path / "type"))
    file = other / "adapter_config.json"
    file.write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    with pytest.raises(BadAdapter, match=r"peft_type is 'LORA', but layer .* has ia3_l"):
        engine.load_adapter("type", str(other))
