"""Adapters with an output head, a token embedding or a projector of their own answer as under PEFT, in every mode."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from tests.engine.test_relocation import shuffled
from tests.families import EACH_FAMILY, LANGUAGE_LINEARS, build_model
from tests.harness import FixedModes, RecordingEngine, run_engine
from tests.oracle import save_adapter
from tests.references import NUM_TOKENS, TOLERANCE, CaseReference, assert_same
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import BadAdapter
from vlora.lora.own_layers import OwnLayer, ReplacedOutputs
from vlora.types import Mode

pytestmark = pytest.mark.gpu

CASES = (("head", 1), ("both", 1), (None, 1), ("plain", 0), ("factors", 1), ("head", 0), ("projector", 1))
OLD_NAMES = {
    "lm_head": ("language_model.lm_head", "model.lm_head", "model.language_model.lm_head"),
    "model.language_model.embed_tokens": (
        "model.embed_tokens",
        "language_model.model.embed_tokens",
        "language_model.embed_tokens",
        "model.language_model.model.embed_tokens",
    ),
}
PLAN = [(Mode.MIXED, "head"), (Mode.UNMERGED, None), (Mode.MIXED, "plain"), (Mode.MIXED, "factors")]


@pytest.fixture(scope="module", params=EACH_FAMILY)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CaseReference:
    family = request.param
    model, folder = build_model(family), tmp_path_factory.mktemp("own")
    projector = ["linear_1", "linear_2"] if family.startswith("llava") else ["attn.proj"]
    if family == "qwen_vl":
        projector = ["visual.proj", "attn_pool.kv_proj"]
    configs = {
        "plain": LoraConfig(r=8, target_modules=LANGUAGE_LINEARS),
        "head": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]),
        "both": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
        "factors": LoraConfig(r=8, lora_alpha=24, target_modules=["q_proj", "lm_head", "embed_tokens"]),
        "projector": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=projector),
    }
    return CaseReference.of_configs(family, model, configs, CASES, folder)


@pytest.mark.parametrize(
    ("mode", "merged"),
    [(Mode.UNMERGED, None), (Mode.MIXED, "head"), pytest.param(Mode.MIXED, "factors", marks=pytest.mark.slow)],
    ids=["unmerged", "mixed-head", "mixed-factors"],
)
def test_batch_of_several_adapters(reference: CaseReference, mode: Mode, merged: str | None) -> None:
    run = run_engine(reference, FixedModes(mode, merged), NUM_TOKENS, encode_share=1e9)
    assert mode in run.modes
    reference.expect(run.answers)


@pytest.mark.parametrize("merged", ["head", "both", "factors", "projector"])
def test_merged_batch_of_one_adapter(reference: CaseReference, merged: str) -> None:
    own = [i for i, (adapter, _) in enumerate(CASES) if adapter == merged]
    run = run_engine(reference, FixedModes(Mode.MERGED, merged), NUM_TOKENS, only=own)
    assert run.modes == {Mode.MERGED}
    for got, case in zip(run.answers, own, strict=True):
        assert_same(got, reference.answers[case])


@pytest.mark.slow
@pytest.mark.usefixtures("no_kv_admission")
def test_adapters_move_in_the_arena_between_steps(reference: CaseReference) -> None:
    recorded = RecordingEngine(reference, FixedModes(*PLAN[0], plan=PLAN), max_step_tokens=24)
    recorded.answer(reference.cases, 1)  # from now on images are cached, so that all requests start at once
    counts = shuffled(recorded)
    answers = recorded.answer(reference.cases, NUM_TOKENS)
    assert sum(counts) > len(counts)
    reference.expect(answers)


@pytest.mark.parametrize(
    ("left_out", "adapter"),
    [((OwnLayer, "multiply"), "head"), ((OwnLayer, "look_up"), "both"), ((ReplacedOutputs, "add"), "projector")],
    ids=["head", "embedding", "projector"],
)
def test_without_the_own_layer_answers_are_wrong(
    reference: CaseReference, left_out: tuple[type, str], adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*left_out, lambda *_: None)
    case = next(index for index, (name, _) in enumerate(CASES) if name == adapter)
    run = run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS, only=[case])
    assert float((run.answers[0][1][0] - reference.answers[case][1][0]).abs().max()) > 100 * TOLERANCE


def test_an_unloaded_adapter_leaves_no_own_layer(reference: CaseReference) -> None:
    recorded = RecordingEngine(reference, None)
    for name in reference.adapters:
        recorded.engine.unload_adapter(name)
    own = recorded.engine.parts.device.hf_model.own
    assert not own.head and not own.embedding


def test_another_base_model_is_refused(reference: CaseReference, tmp_path: Path) -> None:
    """PEFT writes the embedding beside its factors; it must be this model's."""
    other = save_adapter(
        build_model(reference.family, seed=7), LoraConfig(r=4, target_modules=["embed_tokens"]), tmp_path
    )
    with pytest.raises(Exception, match="is not this base model's weight"):
        RecordingEngine(reference, None).engine.load_adapter("second", other)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "llava_onevision"])
def test_names_of_shared_layers_from_before_transformers_5(family: str, tmp_path: Path) -> None:
    """They are read where transformers renames them in this family, else refused with the present name."""
    model = build_model(family)
    local = LocalEngine(EngineConfig(model="tiny", arena_bytes=2**26, threads=1), model=copy.deepcopy(model))
    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    for current, names in OLD_NAMES.items():
        leaf = current.rpartition(".")[2]
        for kind in ("target_modules", "modules_to_save"):
            layers = {"target_modules": ["q_proj"]}
            layers[kind] = [*layers.get(kind, ()), leaf]
            config = LoraConfig(r=4, **layers)  # type: ignore[arg-type]
            folder = Path(save_adapter(model, config, tmp_path / f"{kind} {leaf}"))
            status = local.engine.load_adapter("a", str(folder))
            wanted = local.engine.parts.registry.get("a").content.run
            file = folder / "adapter_model.safetensors"
            tensors = load_file(file)
            for name in names:
                saved = {key.replace(f".model.{current}.", f".model.{name}."): value for key, value in tensors.items()}
                save_file(saved, file)
                renamed = rename_source_key(f"{name}.weight", renamings, [])[0]
                if renamed == f"{current}.weight":
                    local.engine.load_adapter("a", str(folder))
                    assert local.engine.adapters()[0].version != status.version
                    assert torch.equal(local.engine.parts.registry.get("a").content.run, wanted)
                else:
                    with pytest.raises(BadAdapter, match=f"no layer '{name}', its .* is '{current}'"):
                        local.engine.load_adapter("a", str(folder))
    local.engine.close()
