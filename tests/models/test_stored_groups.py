"""Checkpoints of GPTQ, AWQ and compressed-tensors' packed form: read bit for bit and served, or refused by name."""

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
from tests.engine.test_quantized_answers import language_linears
from tests.families import build_model, make_prompt
from tests.harness import FixedModes, RecordingEngine
from tests.models.grouped_checkpoints import Layout, StoredGroups, stored_layer
from tests.oracle import Oracle
from tests.references import assert_same
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import BadConfig, UnsupportedModel, VLoraError
from vlora.memory.arena import PAGE_BYTES
from vlora.models.loading import load_model, read_config
from vlora.models.stored_groups import GroupedFiles, grouped_form
from vlora.types import Mode

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


def config_of(stored: StoredGroups, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(stored.folder), dtype="float32", arena_bytes=256 * PAGE_BYTES, **settings)


@pytest.fixture
def stored(tmp_path: Path) -> StoredGroups:
    return StoredGroups("qwen2_5_vl", Layout("gptq", 4, 32, symmetric=True), tmp_path)


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
    stored = StoredGroups("qwen2_5_vl", Layout("gptq", 4, 32, True, "gptq_v2"), tmp_path)
    stored.set(quantization_config=Layout("gptq", 4, 32, True, "gptq").settings)
    wanted = language_linears(stored.model)
    for name, linear in language_linears(load_model(config_of(stored))).items():
        assert torch.equal(linear.weight, wanted[name].weight)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2_5_vl", Layout("gptq", 4, 32, symmetric=True)),
        ("llava_onevision", Layout("awq", 4, 64)),
        ("qwen2_vl", Layout("gptq", 8, -1)),
    ],
    ids=str,
)
def test_answers_are_those_of_the_restored_weights(
    family: str, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exact_product(own: Grouped, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, own.decode(values, scales).to(x.dtype), bias)

    monkeypatch.setattr(Grouped, "product", exact_product)
    own = StoredGroups(family, layout, tmp_path / "model")
    oracle = Oracle(family, own.model)
    reference = SimpleNamespace(family=family, adapters=oracle.save(tmp_path / "adapters"))
    cases = [
        (adapter, make_prompt(family, own.model, seed, num_images=seed % 2))
        for seed, adapter in enumerate(("wide8", None, "everywhere64"))
    ]
    recorded = RecordingEngine(reference, FixedModes(Mode.UNMERGED), checkpoint=str(own.folder))
    linears = recorded.engine.parts.device.slabs.linears
    wanted = language_linears(own.model)
    for name, linear in linears.items():
        assert linear.quantized is not None and linear.quantized.format == grouped_format(layout)
        assert torch.equal(linear.quantized.float(), wanted[name.removeprefix("model.language_model.")].weight)
    for got, (adapter, prompt) in zip(recorded.answer(cases, 6), cases, strict=True):
        assert_same(got, oracle.generate(prompt, adapter, 6))


def grouped_format(layout: Layout) -> Grouped:
    return Grouped(layout.bits, None if layout.group == -1 else layout.group, symmetric=layout.symmetric)


def test_training_reads_the_restored_weights(stored: StoredGroups) -> None:
    model = load_model(config_of(stored))
    for (name, weight), (_, wanted) in zip(model.named_parameters(), stored.model.named_parameters(), strict=True):
        assert torch.equal(weight, wanted), name


def test_no_restored_weights_are_kept(stored: StoredGroups) -> None:
    """The weight that transformers sees takes no memory."""
    model = load_model(config_of(stored, quantize="int4"))
    assert all(linear.weight.untyped_storage().nbytes() == 4 for linear in language_linears(model).values())


@pytest.mark.parametrize(
    ("layout", "path", "value", "words"),
    [
        ("gptq", ("bits",), 3, "gptq with bits 3"),
        ("gptq", ("group_size",), 16, "gptq with group_size 16"),
        ("gptq", ("group_size",), None, "gptq with group_size None"),
        ("gptq", ("checkpoint_format",), "marlin", "gptq with checkpoint_format 'marlin'"),
        ("gptq", ("lm_head",), True, "gptq with lm_head True"),
        ("gptq", ("dynamic",), {"-:.*down.*": {}}, "gptq with dynamic"),
        ("awq", ("version",), "gemv", "awq with version 'gemv'"),
        ("awq", ("zero_point",), False, "awq with zero_point False"),
        ("packed", ("config_groups", "group_0", "weights", "type"), "float", "pack-quantized with type 'float'"),
        (
            "packed",
            ("config_groups", "group_0", "weights", "actorder"),
            "group",
            "pack-quantized with actorder 'group'",
        ),
        ("packed", ("config_groups", "group_0", "input_activations"), {"num_bits": 8}, "with input_activations"),
        ("packed", ("config_groups",), {}, "pack-quantized with 0 config_groups"),
        ("packed", ("quant_method",), "bitsandbytes", "quant_method 'bitsandbytes'"),
    ],
)
def test_other_forms_are_refused_by_name(
    layout: Any, path: tuple[str, ...], value: Any, words: str, tmp_path: Path
) -> None:
    settings = Layout(layout, 4, 32).settings
    place = settings
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    config = build_model("qwen2_5_vl").config
    config.save_pretrained(tmp_path)
    stored = SimpleNamespace(folder=tmp_path)
    StoredGroups.set(stored, quantization_config=settings)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModel, match=f"stored quantized.*{words}.*Use the checkpoint in bfloat16"):
        read_config(str(tmp_path))


def without(suffix: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[next(name for name in tensors if name.endswith(f"layers.1.mlp.up_proj.{suffix}"))]

    return change


def changed(suffix: str, edit: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if name.endswith(f"layers.1.mlp.up_proj.{suffix}"))
        tensors[name] = edit(tensors[name]).contiguous()

    return change


def with_a_layer_of_the_tower(tensors: dict[str, Tensor]) -> None:
    tensors["visual.blocks.0.attn.qkv.qweight"] = torch.zeros(4, 96, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (without("qweight"), BadConfig, r"has no .*layers\.1\.mlp\.up_proj\.qweight.*incomplete"),
        (without("scales"), BadConfig, r"has no .*layers\.1\.mlp\.up_proj\.scales.*incomplete"),
        (without("qzeros"), BadConfig, r"has no .*layers\.1\.mlp\.up_proj\.qzeros.*incomplete"),
        (
            changed("qweight", lambda t: t[:-1]),
            BadConfig,
            r"qweight has the shape \[7, 128\]; for 128 x 64.*\[8, 128\]",
        ),
        (changed("scales", lambda t: t.t()), BadConfig, r"scales has the shape \[128, 2\]; .* it is \[2, 128\]"),
        (changed("qzeros", lambda t: t + 1), BadConfig, r"up_proj\.qzeros has other values than 8"),
        (changed("g_idx", lambda t: t.flip(0)), UnsupportedModel, r"up_proj has groups of inputs.*\(desc_act\)"),
        (with_a_layer_of_the_tower, UnsupportedModel, r"blocks\.0\.attn\.qkv, which is outside the language model"),
    ],
)
def test_a_half_written_checkpoint(
    stored: StoredGroups, change: Callable[[dict[str, Tensor]], None], kind: type[VLoraError], words: str
) -> None:
    stored.rewrite(change)
    with pytest.raises(kind, match=words):
        LocalEngine(config_of(stored))


def test_a_truncated_file(stored: StoredGroups) -> None:
    stored.file.write_bytes(stored.file.read_bytes()[:-100])
    with pytest.raises(BadConfig, match=r"cannot read the weights of .*model\.safetensors"):
        LocalEngine(config_of(stored))


def test_groups_that_do_not_divide_a_layer(tmp_path: Path) -> None:
    stored = StoredGroups("qwen2_5_vl", Layout("gptq", 4, 32), tmp_path)
    stored.set(quantization_config=Layout("gptq", 4, 128).settings)
    with pytest.raises(UnsupportedModel, match="q_proj has 64 x 64 weights, which groups of 128 do not divide"):
        LocalEngine(config_of(stored))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantize": "int8"}, "quantize is int8, but the checkpoint is stored in int4; set quantize none"),
        ({"tensor_parallel": 2}, "tensor_parallel is not possible with a checkpoint that is stored in int4"),
        ({"switching": "in_place"}, "in_place is not possible with quantize int4"),
    ],
)
def test_settings_that_the_stored_format_does_not_allow(
    stored: StoredGroups, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadConfig, match=words):
        LocalEngine(config_of(stored, **settings))
