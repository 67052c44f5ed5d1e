"""Checkpoints that are stored in eight bits, in the layout of compressed-tensors: served as stored, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atmm.formats import FORMATS
from atmm.quantized import QuantizedWeight
from tests.engine.test_quantized_answers import EXACT, Quantize, language_linears
from tests.families import build_model, make_prompt
from tests.harness import FixedModes, RecordingEngine
from tests.oracle import Oracle
from tests.references import assert_same
from vlora.config import EngineConfig
from vlora.engine import LocalEngine, quantize
from vlora.errors import BadConfig, UnsupportedModel, VLoraError
from vlora.memory.arena import PAGE_BYTES
from vlora.models.loading import load_model, read_config
from vlora.types import Mode

NUM_TOKENS = 6
TYPES = {"fp8": ("float-quantized", "float"), "int8": ("int-quantized", "int")}


def settings_of(chosen: Quantize) -> dict[str, Any]:
    """As llm-compressor writes them for FP8-dynamic and W8A8."""
    layout, kind = TYPES[chosen]
    common = {"num_bits": 8, "type": kind, "symmetric": True, "group_size": None, "actorder": None}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "dynamic": False, "strategy": "channel", "observer": "minmax"},
        "input_activations": {**common, "dynamic": True, "strategy": "token", "observer": None},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["re:visual.*", "lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }


class Stored:
    """A checkpoint, and a model with its restored weights."""

    def __init__(self, family: str, chosen: Quantize, folder: Path) -> None:
        self.family, self.folder = family, folder
        self.model = build_model(family)
        self.model.save_pretrained(folder)
        self.values: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.file = folder / "model.safetensors"
        tensors = load_file(self.file)
        for name, linear in language_linears(self.model).items():
            values, scales = FORMATS[chosen].encode(linear.weight.data)
            scales = (scales * 1.05).bfloat16()  # not the scale that rounding would choose
            self.values[name] = values, scales.float()
            linear.weight.data = FORMATS[chosen].decode(*self.values[name])
            tail = name[name.index("layers.") :]
            key = next(key for key in tensors if key.endswith(f"{tail}.weight") and "vis" not in key)
            tensors[key] = values
            tensors[f"{key}_scale"] = scales
        save_file(tensors, self.file, metadata={"format": "pt"})
        self.set(quantization_config=settings_of(chosen))

    def set(self, **fields: Any) -> None:
        file = self.folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    def rewrite(self, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        tensors = load_file(self.file)
        change(tensors)
        save_file(tensors, self.file, metadata={"format": "pt"})

    def config(self, **settings: Any) -> EngineConfig:
        return EngineConfig(model=str(self.folder), dtype="float32", arena_bytes=256 * PAGE_BYTES, **settings)


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored("qwen2_vl", "int8", tmp_path)


@pytest.mark.parametrize(("family", "chosen"), [("qwen2_vl", "fp8"), ("qwen2_vl", "int8"), ("llava", "fp8")])
def test_answers_are_those_of_the_restored_weights(
    family: str, chosen: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Stored(family, chosen, tmp_path / "model")
    oracle = Oracle(family, own.model)
    reference = SimpleNamespace(family=family, adapters=oracle.save(tmp_path / "adapters"))
    cases = [
        (adapter, make_prompt(family, own.model, seed, num_images=seed % 2))
        for seed, adapter in enumerate(("wide8", None, "everywhere64"))
    ]
    monkeypatch.setattr(quantize, "FORMATS", EXACT)
    recorded = RecordingEngine(reference, FixedModes(Mode.UNMERGED), checkpoint=str(own.folder))
    for name, linear in recorded.engine.parts.device.slabs.linears.items():
        assert isinstance(linear.quantized, QuantizedWeight)
        values, scales = own.values[name.removeprefix("model.language_model.")]
        assert torch.equal(linear.quantized.values.float(), values.float())
        assert torch.equal(linear.quantized.scales, scales)
    for got, (adapter, prompt) in zip(recorded.answer(cases, NUM_TOKENS), cases, strict=True):
        assert_same(got, oracle.generate(prompt, adapter, NUM_TOKENS))


def test_training_reads_the_restored_weights(stored: Stored, caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(EngineConfig(model=str(stored.folder), dtype="float32"))
    assert "UNEXPECTED" not in caplog.text
    wanted = language_linears(stored.model)
    for name, linear in language_linears(model).items():
        assert torch.equal(linear.weight, wanted[name].weight)


def test_a_scale_for_all_rows(stored: Stored) -> None:
    def one_scale(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("q_proj.weight_scale")]:
            tensors[name] = torch.tensor([0.25])

    stored.rewrite(one_scale)
    groups = settings_of("int8")
    groups["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    stored.set(quantization_config=groups)
    linears = LocalEngine(stored.config()).engine.parts.device.slabs.linears
    scales = [
        linear.quantized.scales for name, linear in linears.items() if name.endswith("q_proj") and linear.quantized
    ]
    assert scales and all(part.eq(0.25).all() for part in scales)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("quant_method",), "gptq", "gptq with bits None"),
        (("quant_method",), "awq", "awq with bits None"),
        (("quant_method",), "bitsandbytes", "quant_method 'bitsandbytes'"),
        (("format",), "marlin-24", "format 'marlin-24', weights 'int'"),
        (("kv_cache_scheme",), {"num_bits": 8}, "with kv_cache_scheme"),
        (("transform_config",), {"config_groups": {"R1": {}}}, "with transform_config"),
        (("sparsity_config",), {"format": "sparse-24-bitmask"}, "with sparse weights"),
        (("config_groups",), {}, "with 0 config_groups"),
        (("config_groups", "group_0", "weights", "num_bits"), 4, "num_bits 4 of weights"),
        (("config_groups", "group_0", "weights", "symmetric"), False, "symmetric False of weights"),
        (("config_groups", "group_0", "weights", "strategy"), "group", "strategy 'group' of weights"),
        (("config_groups", "group_0", "input_activations", "dynamic"), False, "dynamic False of input_activations"),
        (("config_groups", "group_0", "input_activations"), None, "inputs None"),
        (("config_groups", "group_0", "output_activations"), {"num_bits": 8}, "with output_activations"),
    ],
)
def test_other_forms_are_refused_by_name(stored: Stored, path: tuple[str, ...], value: Any, words: str) -> None:
    settings = settings_of("int8")
    place = settings
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    stored.set(quantization_config=settings)
    stored.file.unlink()  # nothing is loaded
    with pytest.raises(UnsupportedModel, match=f"stored quantized.*{words}.*Use the checkpoint in bfloat16"):
        read_config(str(stored.folder))


def without_a_scale(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight_scale"))]


def with_other_values(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    tensors[name] = tensors[name].float() + 0.5


def with_a_scale_of_the_tower(tensors: dict[str, torch.Tensor]) -> None:
    tensors["visual.blocks.0.attn.qkv.weight_scale"] = torch.ones(192, 1)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (without_a_scale, BadConfig, r"has no .*layers\.1\.mlp\.up_proj\.weight_scale.*incomplete"),
        (with_other_values, BadConfig, r"layers\.1\.mlp\.up_proj\.weight has other values"),
        (
            with_a_scale_of_the_tower,
            UnsupportedModel,
            r"blocks\.0\.attn\.qkv\.weight_scale.*outside the language model",
        ),
    ],
)
def test_a_half_written_checkpoint(
    stored: Stored, change: Callable[[dict[str, torch.Tensor]], None], kind: type[VLoraError], words: str
) -> None:
    stored.rewrite(change)
    with pytest.raises(kind, match=words):
        LocalEngine(stored.config())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantize": "fp8"}, "quantize is fp8, but the checkpoint is stored in int8; set quantize none"),
        ({"tensor_parallel": 2}, "tensor_parallel is not possible with a checkpoint that is stored in int8"),
        ({"switching": "in_place"}, "in_place is not possible with quantize int8"),
    ],
)
def test_settings_that_the_stored_format_does_not_allow(stored: Stored, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        LocalEngine(stored.config(**settings))
