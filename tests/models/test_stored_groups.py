"""Checkpoints of GPTQ, AWQ and compressed-tensors: read bit for bit and served as stored, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from atmm.grouped import Grouped
from tests import device
from tests.engine.test_quantized_answers import EXACT, language_linears
from tests.families import build_model, make_prompt
from tests.harness import FixedModes, RecordingEngine
from tests.models.grouped_checkpoints import Layout, Stored, set_config, stored_layer
from tests.oracle import Oracle
from tests.references import assert_same
from vlora.config import EngineConfig
from vlora.engine import LocalEngine, quantize
from vlora.errors import BadConfig, UnsupportedModel, VLoraError
from vlora.memory.arena import PAGE_BYTES
from vlora.models.loading import load_model, read_config
from vlora.models.stored_groups import GroupedFiles, grouped_form
from vlora.types import Mode

GPTQ, INT8 = Layout("gptq", 4, 32, symmetric=True), Layout("int8")
LAYOUTS = [
    *(
        Layout("gptq", bits, 64, even, version)
        for bits in (4, 8)
        for even in (True, False)
        for version in ("gptq", "gptq_v2")
    ),
    *(Layout("gptq", 4, group) for group in (32, 128, -1)),
    *(Layout("awq", 4, group) for group in (32, 64, 128, -1)),
    *(Layout("packed", bits, group, even) for bits in (4, 8) for group in (32, -1) for even in (True, False)),
]


def config_of(stored: Stored, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(stored.folder), dtype="float32", arena_bytes=256 * PAGE_BYTES, **settings)


@pytest.fixture(params=[GPTQ], ids=str)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Stored:
    return Stored("qwen2_5_vl", request.param, tmp_path)


BOTH_FORMS = pytest.mark.parametrize("stored", [GPTQ, INT8], indirect=True, ids=str)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weights_are_read_bit_for_bit(layout: Layout, tmp_path: Path) -> None:
    tensors, weight = stored_layer(layout, 48, 256, seed=1)
    file = str(tmp_path / "model.safetensors")
    save_file({f"layers.0.mlp.up_proj.{suffix}": tensor for suffix, tensor in tensors.items()}, file)
    form = grouped_form(layout.settings)
    assert form is not None
    files, name = GroupedFiles(form, [file]), "model.language_model.layers.0.mlp.up_proj"
    files.check({name: nn.Linear(256, 48, device="meta")})
    held = files.weight(name, torch.bfloat16)
    assert torch.equal(held.float(), weight) and held.shape == (48, 256) and held.dtype is torch.bfloat16
    assert held.scales.shape[1] == held.format.num_scales(256)


def test_zeros_of_the_second_version_without_its_name(tmp_path: Path) -> None:
    """With sym the zeros are the middle, in whichever version they are stored."""
    stored = Stored("qwen2_5_vl", Layout("gptq", 4, 32, True, "gptq_v2"), tmp_path)
    stored.set(quantization_config=GPTQ.settings)
    wanted = language_linears(stored.model)
    for name, linear in language_linears(load_model(config_of(stored))).items():
        assert torch.equal(linear.weight, wanted[name].weight)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2_5_vl", GPTQ),
        ("llava_onevision", Layout("awq", 4, 64)),
        ("qwen2_vl", Layout("gptq", 8, -1)),
        ("qwen2_vl", Layout("fp8")),
        ("qwen2_vl", INT8),
        ("llava", Layout("fp8")),
    ],
    ids=str,
)
def test_answers_are_those_of_the_restored_weights(
    family: str, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exact_product(own: Grouped, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, own.decode(values, scales).to(x.dtype), bias)

    if device.name == "cpu":  # a GPU does not round inputs
        monkeypatch.setattr(Grouped, "product", exact_product)
    monkeypatch.setattr(quantize, "FORMATS", EXACT)
    own = Stored(family, layout, tmp_path / "model")
    oracle = Oracle(family, own.model)
    reference = SimpleNamespace(family=family, adapters=oracle.save(tmp_path / "adapters"))
    cases = [
        (adapter, make_prompt(family, own.model, seed, num_images=seed % 2))
        for seed, adapter in enumerate(("wide8", None, "everywhere64"))
    ]
    recorded = RecordingEngine(reference, FixedModes(Mode.UNMERGED), checkpoint=str(own.folder))
    wanted = language_linears(own.model)
    for name, linear in recorded.engine.parts.device.slabs.linears.items():
        assert linear.quantized is not None
        assert torch.equal(linear.quantized.float().cpu(), wanted[name.removeprefix("model.language_model.")].weight)
        if layout.method not in EXACT:
            group = None if layout.group == -1 else layout.group
            assert linear.quantized.format == Grouped(layout.bits, group, symmetric=layout.symmetric)
    for got, (adapter, prompt) in zip(recorded.answer(cases, 6), cases, strict=True):
        assert_same(got, oracle.generate(prompt, adapter, 6))


@BOTH_FORMS
def test_training_reads_the_restored_weights(stored: Stored, caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(config_of(stored))
    assert "UNEXPECTED" not in caplog.text
    for (name, weight), (_, wanted) in zip(model.named_parameters(), stored.model.named_parameters(), strict=True):
        assert torch.equal(weight, wanted), name


def test_no_restored_weights_are_kept(stored: Stored) -> None:
    """The weight that transformers sees takes no memory."""
    model = load_model(config_of(stored, quantize="int4"))
    assert all(linear.weight.untyped_storage().nbytes() == 4 for linear in language_linears(model).values())


def test_a_scale_for_all_rows(tmp_path: Path) -> None:
    def one_scale(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("q_proj.weight_scale")]:
            tensors[name] = torch.tensor([0.25])

    stored = Stored("qwen2_vl", INT8, tmp_path)
    stored.rewrite(one_scale)
    stored.set(quantization_config=changed_settings(INT8, "config_groups group_0 weights strategy", "tensor"))
    linears = LocalEngine(config_of(stored)).engine.parts.device.slabs.linears
    scales = [linear.quantized.scales for name, linear in linears.items() if "q_proj" in name and linear.quantized]
    assert scales and all(part.eq(0.25).all() for part in scales)


# -- refused by name --------------------------------------------------------------------------------------------------


def changed_settings(layout: Layout, path: str, value: Any) -> dict[str, Any]:
    """path: names of the fields, one within the other."""
    settings = layout.settings
    place, (*outer, last) = settings, path.split()
    for name in outer:
        place = place[name]
    place[last] = value
    return settings


GROUP = "config_groups group_0"


@pytest.mark.parametrize(
    ("method", "path", "value", "words"),
    [
        ("gptq", "bits", 3, "gptq with bits 3"),
        ("gptq", "group_size", 16, "gptq with group_size 16"),
        ("gptq", "group_size", None, "gptq with group_size None"),
        ("gptq", "checkpoint_format", "marlin", "gptq with checkpoint_format 'marlin'"),
        ("gptq", "lm_head", True, "gptq with lm_head True"),
        ("gptq", "dynamic", {"-:.*down.*": {}}, "gptq with dynamic"),
        ("awq", "version", "gemv", "awq with version 'gemv'"),
        ("awq", "zero_point", False, "awq with zero_point False"),
        ("packed", f"{GROUP} weights type", "float", "pack-quantized with type 'float'"),
        ("packed", f"{GROUP} weights actorder", "group", "pack-quantized with actorder 'group'"),
        ("packed", f"{GROUP} input_activations", {"num_bits": 8}, "with input_activations"),
        ("packed", "config_groups", {}, "pack-quantized with 0 config_groups"),
        ("packed", "quant_method", "bitsandbytes", "quant_method 'bitsandbytes'"),
        ("int8", "quant_method", "gptq", "gptq with bits None"),
        ("int8", "quant_method", "awq", "awq with bits None"),
        ("int8", "format", "marlin-24", "format 'marlin-24', weights 'int'"),
        ("int8", "kv_cache_scheme", {"num_bits": 8}, "with kv_cache_scheme"),
        ("int8", "transform_config", {"config_groups": {"R1": {}}}, "with transform_config"),
        ("int8", "sparsity_config", {"format": "sparse-24-bitmask"}, "with sparse weights"),
        ("int8", "config_groups", {}, "with 0 config_groups"),
        ("int8", f"{GROUP} weights num_bits", 4, "num_bits 4 of weights"),
        ("int8", f"{GROUP} weights symmetric", False, "symmetric False of weights"),
        ("int8", f"{GROUP} weights strategy", "group", "strategy 'group' of weights"),
        ("int8", f"{GROUP} input_activations dynamic", False, "dynamic False of input_activations"),
        ("int8", f"{GROUP} input_activations", None, "inputs None"),
        ("int8", f"{GROUP} output_activations", {"num_bits": 8}, "with output_activations"),
    ],
)
def test_other_forms_are_refused_by_name(method: Any, path: str, value: Any, words: str, tmp_path: Path) -> None:
    layout = INT8 if method == "int8" else Layout(method, 4, 32)
    build_model("qwen2_5_vl").config.save_pretrained(tmp_path)
    set_config(tmp_path, quantization_config=changed_settings(layout, path, value))
    with pytest.raises(UnsupportedModel, match=f"stored quantized.*{words}.*Use the checkpoint in bfloat16"):
        read_config(str(tmp_path))


Change = Callable[[dict[str, Tensor]], None]


def without(suffix: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[next(name for name in tensors if name.endswith(f"layers.1.mlp.up_proj.{suffix}"))]

    return change


def changed(suffix: str, edit: Callable[[Tensor], Tensor]) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if name.endswith(f"layers.1.mlp.up_proj.{suffix}"))
        tensors[name] = edit(tensors[name]).contiguous()

    return change


def with_tower(suffix: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({f"visual.blocks.0.attn.qkv.{suffix}": tensor})


@pytest.mark.parametrize(
    ("stored", "change", "kind", "words"),
    [
        *(
            (layout, without(suffix), BadConfig, rf"has no .*layers\.1\.mlp\.up_proj\.{suffix}.*incomplete")
            for layout, suffix in ((GPTQ, "qweight"), (GPTQ, "scales"), (GPTQ, "qzeros"), (INT8, "weight_scale"))
        ),
        (GPTQ, changed("qweight", lambda t: t[:-1]), BadConfig, r"qweight has the shape \[7, 128\]; .*\[8, 128\]"),
        (GPTQ, changed("scales", lambda t: t.t()), BadConfig, r"scales has the shape \[128, 2\]; .* it is \[2, 128\]"),
        (GPTQ, changed("qzeros", lambda t: t + 1), BadConfig, r"up_proj\.qzeros has other values than 8"),
        (GPTQ, changed("g_idx", lambda t: t.flip(0)), UnsupportedModel, r"groups of inputs.*\(desc_act\)"),
        (INT8, changed("weight", lambda t: t.float() + 0.5), BadConfig, r"1\.mlp\.up_proj\.weight has other values"),
        (GPTQ, with_tower("qweight", torch.zeros(4, 96, dtype=torch.int32)), UnsupportedModel, "outside the language"),
        (INT8, with_tower("weight_scale", torch.ones(192, 1)), UnsupportedModel, "outside the language model"),
    ],
    indirect=["stored"],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_half_written_checkpoint(stored: Stored, change: Change, kind: type[VLoraError], words: str) -> None:
    stored.rewrite(change)
    with pytest.raises(kind, match=words):
        LocalEngine(config_of(stored))


def test_a_truncated_file(stored: Stored) -> None:
    stored.file.write_bytes(stored.file.read_bytes()[:-100])
    with pytest.raises(BadConfig, match=r"cannot read the weights of .*model\.safetensors"):
        LocalEngine(config_of(stored))


def test_groups_that_do_not_divide_a_layer(stored: Stored) -> None:
    stored.set(quantization_config=Layout("gptq", 4, 128).settings)
    with pytest.raises(UnsupportedModel, match="q_proj has 64 x 64 weights, which groups of 128 do not divide"):
        LocalEngine(config_of(stored))


@BOTH_FORMS
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantize": "fp8"}, "quantize is fp8, but the checkpoint is stored in {}; set quantize none"),
        ({"tensor_parallel": 2}, "tensor_parallel is not possible with a checkpoint that is stored in {}"),
        ({"switching": "in_place"}, "in_place is not possible with quantize {}"),
    ],
)
def test_settings_that_the_stored_format_does_not_allow(stored: Stored, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words.format("int8" if stored.layout == INT8 else "int4")):
        LocalEngine(config_of(stored, **settings))
