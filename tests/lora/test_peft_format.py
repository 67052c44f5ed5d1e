"""Adapters are read with PEFT's semantics, or rejected by name with the reason."""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from heads import HeadSpec, TaskHead, save_heads
from tests.families import build_model
from tests.lora.made_adapters import factors_of
from vlora.errors import BadAdapter, UnknownAdapter
from vlora.lora.host_adapter import HostAdapter
from vlora.lora.peft_format import read_header
from vlora.lora.peft_settings import resolve
from vlora.lora.peft_target import SiteShape
from vlora.lora.registry import AdapterRegistry
from vlora.models.hf_model import HFModel
from vlora.types.domain import DomainSummary

FAMILY = "qwen2_vl"


@pytest.fixture(scope="module")
def sites() -> dict[str, SiteShape]:
    hf_model = HFModel(build_model(FAMILY))
    return {
        name: SiteShape(linear.in_features, linear.out_features, vision)
        for vision, linears in ((False, hf_model.language_linears), (True, hf_model.vision_linears))
        for name, linear in linears.items()
    }


@pytest.fixture
def registry(sites: dict[str, SiteShape]) -> AdapterRegistry:
    return AdapterRegistry(sites, torch.float32, 64)


@pytest.fixture
def copied(adapter_folders: dict[str, str], tmp_path: Path) -> Path:
    """A valid adapter that a test may corrupt."""
    return Path(shutil.copytree(adapter_folders["wide8"], tmp_path / "adapter"))


def load(registry: AdapterRegistry, name: str, folder: str) -> HostAdapter:
    adapter = registry.accept(registry.read_folder(name, folder)).adapter
    assert adapter is not None
    return adapter


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(str(file))
    change(tensors)
    save_file(tensors, str(file))


@pytest.mark.slow
def test_objects_tracked_by_garbage_collection_do_not_grow_with_layers(
    adapter_folders: dict[str, str], sites: dict[str, SiteShape]
) -> None:
    def objects(folder: str) -> float:
        """Tracked objects per additional adapter, registered and read."""
        registry = AdapterRegistry(sites, torch.float32, 64)
        counts = []
        for number in range(3):
            load(registry, f"a{number}", folder)
            gc.collect()
            counts.append(len(gc.get_objects()))
        return counts[2] - counts[1]

    narrow, wide = (len(read_header(Path(adapter_folders[name]), sites, 64).targets) for name in ("narrow4", "wide8"))
    assert wide > 2 * narrow
    # A registration, its header, the content, and their dicts and tensors; none per layer.
    assert objects(adapter_folders["wide8"]) <= objects(adapter_folders["narrow4"]) <= 16


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [
        ("patterned16", (16, 16 / 16), (5, 20 / 5)),
        ("wide8", (8, 16 / 8**0.5), (8, 16 / 8**0.5)),
    ],  # the latter is rsLoRA
)
def test_ranks_and_scales_follow_patterns_and_rslora(
    name: str,
    usual: tuple[int, float],
    other: tuple[int, float],
    adapter_folders: dict[str, str],
    registry: AdapterRegistry,
) -> None:
    raw = load_file(f"{adapter_folders[name]}/adapter_model.safetensors")
    for site, factors in factors_of(load(registry, name, adapter_folders[name])).items():
        rank, scale = other if site.endswith("layers.1.self_attn.q_proj") else usual
        assert factors.a.shape[0] == rank
        torch.testing.assert_close(factors.bt, (raw[f"base_model.model.{site}.lora_B.weight"] * scale).t())


def test_the_version_is_a_hash_of_the_content(copied: Path, registry: AdapterRegistry) -> None:
    first = load(registry, "a", str(copied)).version
    assert load(registry, "a", str(copied)).version == first

    edit_tensors(copied, lambda tensors: tensors[min(tensors)].mul_(2))
    assert load(registry, "a", str(copied)).version != first


def test_the_last_place_of_the_invocation_counts(
    adapter_folders: dict[str, str], copied: Path, sites: dict[str, SiteShape], registry: AdapterRegistry
) -> None:
    ordinary = read_header(copied, sites, 64)
    assert (ordinary.invocation, ordinary.first_token((1, 2)), ordinary.first_token(())) == ((), 0, 0)
    edit_config(copied, alora_invocation_tokens=[7, 7, 8], task_type="CAUSAL_LM")
    header = read_header(copied, sites, 64)
    prompts = ((7, 7, 8), (1, 7, 7, 7, 8), (7, 7, 8, 7, 7, 8, 9), (7, 8), (7, 7), (8, 7, 7), ())
    assert [header.first_token(prompt) for prompt in prompts] == [0, 2, 3, None, None, None, None]
    assert not header.has_same_content(ordinary)
    edit_config(copied, alora_invocation_tokens=[7], task_type="SEQ_CLS")
    with pytest.raises(BadAdapter, match="task_type is 'SEQ_CLS'; PEFT searches for invocation tokens with"):
        load(registry, "a", str(copied))
    vision = shutil.copytree(adapter_folders["everywhere64"], copied.parent / "vision")
    edit_config(vision, alora_invocation_tokens=[7], task_type="CAUSAL_LM")
    with pytest.raises(BadAdapter, match="it has alora_invocation_tokens and adapts the vision side"):
        load(registry, "a", str(vision))


def test_values_too_large_for_the_model_s_precision(copied: Path, sites: dict[str, SiteShape]) -> None:
    edit_tensors(copied, lambda tensors: tensors[min(tensors)].fill_(1e5))
    with pytest.raises(BadAdapter, match=r"not finite \(NaN or infinity\) in torch.float16"):
        load(AdapterRegistry(sites, torch.float16, 64), "a", str(copied))
    assert load(AdapterRegistry(sites, torch.float32, 64), "a", str(copied)).shapes


def test_a_convolution_is_refused_as_one(tmp_path: Path, registry: AdapterRegistry) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "patch_embed.proj"])
    get_peft_model(build_model(FAMILY), config).save_pretrained(str(tmp_path / "cam"))
    with pytest.raises(BadAdapter) as caught:
        load(registry, "cam", str(tmp_path / "cam"))
    assert str(caught.value).startswith(f"{tmp_path / 'cam'}: module ")
    for part in ("visual.patch_embed.proj' is a convolution (Conv3d", "exclude_modules=['patch_embed.proj']"):
        assert part in str(caught.value)


# -- refused by name --------------------------------------------------------------------------------------------------

Change = Callable[[Path], object]


def config(**changes: Any) -> Change:
    return lambda folder: edit_config(folder, **changes)


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    return lambda folder: edit_tensors(folder, change)


def domains(text: str) -> Change:
    return lambda folder: (folder / "domains.json").write_text(text)


def blocks(size: object, **targets: list[str]) -> Change:
    return config(use_bdlora=size if isinstance(size, bool) else {"nblocks": size, **targets})


def six_rows(found: dict[str, torch.Tensor]) -> None:
    """Factors of q_proj alone, of rank 6."""
    for name in list(found):
        del found[name]
        if "q_proj" in name:
            found[name] = torch.randn((6, 64) if "lora_A" in name else (64, 2))


def of_layer_77(found: dict[str, torch.Tensor]) -> None:
    for name in [name for name in found if "layers.0" in name]:
        found[name.replace("layers.0", "layers.77")] = found.pop(name)


def first(found: dict[str, torch.Tensor], part: str) -> str:
    return next(name for name in found if part in name)


def truncate(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


A, B = "target_modules_bd_a", "target_modules_bd_b"
REFUSED: dict[str, tuple[Change, str]] = {
    **{
        setting: (config(**{setting: value}), setting)
        for setting, value in {
            "use_dora": True,
            "bias": "sometimes",
            "lora_bias": True,
            "target_parameters": ["w"],
            "trainable_token_indices": [1],
            "alora_invocation_tokens": [1, -2],
            "layer_replication": [[0, 1]],
            "use_qalora": True,
            "kasa_config": {"beta": 0.1},
            "setting_of_a_later_version": 1,
            "init_lora_weights": "pissa",
            "peft_type": "LOHA",
        }.items()
    },
    **{
        f"{setting} {number}": (config(**{setting: value}), re.escape(f"{setting} {message}"))
        for setting in ("alpha_pattern", "rank_pattern")
        for number, (value, message) in enumerate(
            [(["q_proj"], "is a list of 1 item"), ({"q_(": 3}, "has 'q_(', which is not a regular expression")]
        )
    },
    "nothing to cut": (blocks(0), "expected an object with nblocks of at least 1"),
    "no object": (blocks(True), "expected an object with nblocks of at least 1"),
    "both factors": (blocks(2, **{A: ["q_proj"], B: ["q_"]}), f"names 'q_proj' both in {A} and {B}"),
    "no divisor": (blocks(3, **{A: ["q_proj"]}), "3 blocks in its configuration, which do not divide the 64 inputs"),
    "other shapes": (blocks(2, **{B: ["q_proj"]}), r"expected \[r, in\] and \[out, r / 2\]"),
    "r": (config(r=16), "have rank 8, but r and rank_pattern of the configuration give 16"),
    "rank_pattern": (config(rank_pattern={"q_proj": 4}), "but r and rank_pattern of the configuration give 4"),
    "not a number": (tensors(lambda found: found[sorted(found)[3]].view(-1)[0].fill_(float("nan"))), "not finite"),
    "truncated": (truncate, "may be truncated"),
    "another model by shape": (
        tensors(lambda found: found.update({first(found, "lora_A"): torch.zeros(8, 4096)})),
        "maps 4096 to .* made for another model",
    ),
    "another model by layer": (tensors(of_layer_77), r"layers\.77.*another model"),
    **{
        f"tensor {name}": (tensors(lambda found, name=name: found.update({name: torch.zeros(2, 2)})), part)  # type: ignore[misc]
        for name, part in (
            ("base_model.model.lm_head.lora_embedding_A", "lora_embedding_A"),
            ("base_model.model.lm_head.weight", "weight"),
            ("extra", "extra"),
        )
    },
    "no partner": (tensors(lambda found: found.pop(first(found, "lora_B"))), "no lora_B"),
    **{
        f"no {file}": (lambda folder, file=file: (folder / file).unlink(), file)  # type: ignore[misc]
        for file in ("adapter_config.json", "adapter_model.safetensors")
    },
    **{
        f"domains: {why}": (domains(text), f"domains.json: .*{why}")
        for text, why in (
            ("{", "truncated"),
            ('{"domains": 1}', "Expected `array`"),
            ('{"domains": [{"name": "a"}]}', "required field `question`"),
            ('{"domains": [{"name": "a+b", "question": "?"}]}', "domain name 'a.b' is invalid"),
            ('{"domains": [{"name": "a", "question": "?", "head": "b"}]}', "has head 'b'; its heads: none"),
            ('{"domains": [{"name": "a", "question": "?", "answer": "head"}]}', "has head None; its heads: none"),
            ('{"domains": [{"name": "a", "question": "?"}, {"name": "a", "question": "!"}]}', "two domains have"),
        )
    },
    "no JSON": (
        lambda folder: (folder / "adapter_config.json").write_text("{"),
        "is not JSON: line 1, column 2: a field's name in double quotes is expected",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_by_name(case: str, copied: Path, registry: AdapterRegistry) -> None:
    change, message = REFUSED[case]
    change(copied)
    with pytest.raises(BadAdapter, match=message):
        load(registry, "a", str(copied))


def test_declared_domains_are_read_and_are_part_of_the_content(
    copied: Path, sites: dict[str, SiteShape], registry: AdapterRegistry
) -> None:
    assert read_header(copied, sites, 64).domains == ()
    version = load(registry, "a", str(copied)).version
    declared = (
        DomainSummary(name="a", question="what ?", words_accuracy=0.5),
        DomainSummary(name="b", question="who ?"),
    )
    (copied / "domains.json").write_bytes(msgspec.json.encode({"domains": declared}))
    assert read_header(copied, sites, 64).domains == declared and load(registry, "a", str(copied)).version != version
    head = HeadSpec(name="kind", task="binary", labels=("no", "yes"), prompt="is it ?", num_frames=1, hidden_size=64)
    save_heads(copied, {"kind": TaskHead(head, torch.zeros(1, 64), torch.zeros(1))})
    (copied / "domains.json").unlink()
    (own,) = read_header(copied, sites, 64).domains
    assert own == DomainSummary(name="kind", question="is it ?", head="kind", answer="head")


def test_blocks_that_do_not_divide_a_layer(copied: Path, registry: AdapterRegistry) -> None:
    edit_tensors(copied, six_rows)
    edit_config(copied, use_bdlora={"nblocks": 3, B: ["q_proj"]})
    with pytest.raises(BadAdapter, match="has rank 6 and 64 outputs, which cannot be divided into its 3 blocks"):
        load(registry, "a", str(copied))


def test_registering_reads_no_tensor(copied: Path, registry: AdapterRegistry) -> None:
    edit_tensors(copied, lambda tensors: tensors[min(tensors)].fill_(float("nan")))
    registry.register({"a": str(copied)})
    assert registry.names == ("a",) and registry.num_bytes == 0
    with pytest.raises(BadAdapter, match="not finite"):
        registry.read(registry.get("a").key)


def test_unknown_names_list_the_known_ones(copied: Path, registry: AdapterRegistry) -> None:
    registry.register({"a": str(copied)})
    with pytest.raises(UnknownAdapter, match="'b'; registered: a"):
        registry.get("b")
    registry.register({f"a{number:04}": str(copied) for number in range(1000)})
    with pytest.raises(UnknownAdapter, match=r"registered: a, a0000, .*, a0018 and 981 more$"):
        registry.get("b")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("language_model.model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"),
        ("model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"),
        ("visual.blocks.1.attn.qkv", "model.visual.blocks.1.attn.qkv"),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1", "model.vision_tower.encoder.layers.0.mlp.fc1"),
        ("multi_modal_projector.linear_1", "model.multi_modal_projector.linear_1"),
        ("model.language_model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"),
    ],
)
def test_names_from_before_transformers_5(old: str, new: str) -> None:
    assert resolve(old, {new}) == new
