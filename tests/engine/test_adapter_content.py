"""What an adapter contains decides whether it is merged, or refused with the reason."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from tests.engine.forms import FIRST, FORMS, NUM_TOKENS, FormReference
from tests.families import VOCAB, build_model
from tests.harness import RecordingEngine
from tests.oracle import save_adapter
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import BadAdapter

FAMILY = "llava"


@pytest.mark.parametrize(("form", "adapter"), [("ia3", "ia3"), ("biases", "own_bias")])
def test_adapters_that_weights_cannot_hold_are_never_merged(
    form_reference: Callable[[str, str], FormReference], form: str, adapter: str
) -> None:
    reference = form_reference(form, "qwen2_vl")
    recorded = RecordingEngine(reference, None)
    mergeable = {status.name for status in recorded.engine.adapters() if status.mergeable}
    assert mergeable == ({"plain", "dora"} if form == "ia3" else {"plain"})
    reference.expect(recorded.answer(reference.of(adapter), NUM_TOKENS), reference.of(adapter))
    assert recorded.engine.stats().num_switches == 0


def test_biases_of_the_vision_tower_alone_may_be_merged(tmp_path: Path) -> None:
    """LLaVA's language model has no biases to train."""
    reference = FormReference("biases", FAMILY, tmp_path)
    statuses = {status.name: status.mergeable for status in RecordingEngine(reference, None).engine.adapters()}
    assert statuses == {"plain": True, "own_bias": False, "base_bias": True, "dora_bias": True}


@pytest.mark.parametrize(
    ("factor", "mergeable"), [(0.7, True), (0.1, False), (0.0, False), (-1.0, True), (float("inf"), None)]
)
def test_an_adapter_with_a_tiny_scale_is_not_merged(tmp_path: Path, factor: float, mergeable: bool | None) -> None:
    folder = Path(save_adapter(build_model(FAMILY), FORMS["dora"].configs(FAMILY)["dora8"], tmp_path / "a"))
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if "magnitude" in name:
            tensor[0] *= factor
    save_file(tensors, folder / "adapter_model.safetensors")
    engine = local().engine
    if mergeable is None:
        with pytest.raises(BadAdapter, match=r"lora_magnitude_vector.* not finite"):
            engine.load_adapter("changed", str(folder))
    else:
        assert engine.load_adapter("changed", str(folder)).mergeable == mergeable


def local(family: str = FAMILY) -> LocalEngine:
    config = EngineConfig(model="tiny", arena_bytes=2**26, threads=1, merge_fidelity_floor=0.0)
    return LocalEngine(config, model=build_model(family))


@pytest.fixture(scope="module")
def loaded() -> LocalEngine:
    return local()


TOKENS = FORMS["tokens"].configs(FAMILY)
DIFFERENT = "must be a list of different token ids"
IA3_INPUTS = IA3Config(target_modules=["k_proj"], feedforward_modules=["k_proj"])
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (TOKENS["tokens"], {"trainable_token_indices": FIRST[1:]}, r"has shape \(43, 64\) for 42 tokens"),
    (TOKENS["tokens"], {"trainable_token_indices": [VOCAB, *FIRST[1:]]}, f"but this base model has {VOCAB} tokens"),
    (TOKENS["tokens"], {"trainable_token_indices": [7, *FIRST[1:-1], 7]}, DIFFERENT),
    (TOKENS["tokens"], {"trainable_token_indices": [-1, *FIRST[1:]]}, DIFFERENT),
    (TOKENS["tokens"], {"trainable_token_indices": "1"}, DIFFERENT),
    (TOKENS["tokens"], {"trainable_token_indices": {"lm_head": FIRST}}, "trainable_token_indices gives null for .*emb"),
    (TOKENS["tokens"], {"trainable_token_indices": None}, "trainable_token_indices gives null"),
    (TOKENS["plain"], {"trainable_token_indices": FIRST}, "trainable_token_indices is set, but .* has no weights"),
    (TOKENS["alone"], {"token_indices": FIRST}, r"has shape \(19, 64\) for 43 tokens"),
    (TOKENS["alone"], {"peft_type": "IA3"}, "init_weights = true is not supported"),
    (TOKENS["plain"], {"peft_type": "TRAINABLE_TOKENS", "r": None}, "bias = 'none' is not supported"),
    (IA3_INPUTS, {}, r"k_proj.*feedforward_modules"),
    (
        IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        {"peft_type": "LORA", "r": 8, "init_ia3_weights": None, "feedforward_modules": None},
        r"peft_type is 'LORA', but layer .* has ia3_l",
    ),
]


@pytest.mark.parametrize(("config", "changes", "why"), REFUSED, ids=[why[:30] for *_, why in REFUSED])
def test_folders_that_are_refused(
    loaded: LocalEngine, tmp_path: Path, config: Any, changes: dict[str, Any], why: str
) -> None:
    folder = Path(save_adapter(build_model(FAMILY), copy.deepcopy(config), tmp_path / "changed"))
    file = folder / "adapter_config.json"
    settings = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in settings.items() if name[:5] != "init_" or value}))
    with pytest.raises(BadAdapter, match=why) as refused:
        loaded.engine.load_adapter("changed", str(folder))
    assert "\n" not in str(refused.value)


def test_another_base_model_is_refused(loaded: LocalEngine, tmp_path: Path) -> None:
    """PEFT writes the embedding beside its factors; it must be this model's."""
    config = LoraConfig(r=4, target_modules=["embed_tokens"])
    other = save_adapter(build_model(FAMILY, seed=7), config, tmp_path)
    with pytest.raises(BadAdapter, match="is not this base model's weight"):
        loaded.engine.load_adapter("second", other)


def test_an_unloaded_adapter_leaves_no_own_layer(tmp_path: Path) -> None:
    engine, configs = local().engine, FORMS["own_layers"].configs(FAMILY)
    for name in ("head", "both", "factors"):
        engine.load_adapter(name, save_adapter(build_model(FAMILY), configs[name], tmp_path / name))
        engine.pin_adapter(name, True)
    own = engine.parts.device.hf_model.own
    assert own.head and own.embedding
    for name in ("head", "both", "factors"):
        engine.unload_adapter(name)
    assert not own.head and not own.embedding


OLD_NAMES = {
    "lm_head": ("language_model.lm_head", "model.lm_head", "model.language_model.lm_head"),
    "model.language_model.embed_tokens": (
        "model.embed_tokens",
        "language_model.model.embed_tokens",
        "language_model.embed_tokens",
        "model.language_model.model.embed_tokens",
    ),
}


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "llava_onevision"])
def test_names_of_shared_layers_from_before_transformers_5(family: str, tmp_path: Path) -> None:
    """They are read where transformers renames them in this family, else refused with the present name."""
    model, engine = build_model(family), local(family).engine
    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    for current, names in OLD_NAMES.items():
        leaf = current.rpartition(".")[2]
        for config in (
            LoraConfig(r=4, target_modules=["q_proj", leaf]),
            LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=[leaf]),
        ):
            folder = Path(save_adapter(model, config, tmp_path / "adapter"))
            version = engine.load_adapter("a", str(folder)).version
            wanted = engine.parts.registry.get("a").content.run
            file = folder / "adapter_model.safetensors"
            tensors = load_file(file)
            for name in names:
                saved = {key.replace(f".model.{current}.", f".model.{name}."): value for key, value in tensors.items()}
                save_file(saved, file)
                if rename_source_key(f"{name}.weight", renamings, [])[0] == f"{current}.weight":
                    engine.load_adapter("a", str(folder))
                    assert engine.adapters()[0].version != version
                    assert torch.equal(engine.parts.registry.get("a").content.run, wanted)
                else:
                    with pytest.raises(BadAdapter, match=f"no layer '{name}', its .* is '{current}'"):
                        engine.load_adapter("a", str(folder))
            shutil.rmtree(folder)
