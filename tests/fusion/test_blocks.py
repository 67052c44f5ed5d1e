"""Block-diagonal adapters: trained through PEFT, and converted to the nearest one, compared with numpy and PEFT."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from fusion.block_diagonal.blocks import block_side, scaled_alpha
from fusion.block_diagonal.convert import convert, nearest_blocks
from fusion.plan.estimate import lora_size, shapes_of
from fusion.plan.schema import LoraPlan, read_plan_file
from fusion.training.trainer import LoraTrainer
from heads import TASKS, HeadSpec, TaskHead, save_heads
from tests.example_counts import scaled
from tests.fusion.small import COLORS, color_splits, plan_of, trainer_of, write_folders
from tests.fusion.test_check import run
from tests.harness import FixedModes, RecordingEngine
from vlora.cli import cli
from vlora.errors import BadAdapter, BadConfig, BadPlan
from vlora.models.processing import to_tensor
from vlora.parallel.adapter_sharding import Blocks, Side
from vlora.plan_files.errors import PlanErrors, PlanText
from vlora.types import Mode

pytestmark = pytest.mark.slow

LORA = LoraPlan(rank=8, alpha=8, rslora=True, blocks=2)


@pytest.fixture(scope="module")
def trained(base: str) -> LoraTrainer:
    torch.set_num_threads(1)
    trainer = trainer_of(plan_of(base, ("colors",), lora=LORA), {"colors": color_splits()})
    trainer.adapter.reset()
    trainer.train("colors", ())
    return trainer


@pytest.fixture(scope="module")
def trained_adapter(trained: LoraTrainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "colors"
    trained.save(folder, trained.adapter.snapshot())
    return folder


def test_plain_peft_and_the_engine_give_the_same_logits(trained: LoraTrainer, base: str, trained_adapter: Path) -> None:
    domain = trained.domains["colors"]
    assert trained.evaluator.score("colors", domain.test) > 0.8
    processor = trained.adapter.base.processor
    prompts = [
        processor.encode(processor.chat(domain.plan.question, 1), [Image.fromarray(sample.frames[0])])
        for sample in domain.splits.test[:4]
    ]
    served = RecordingEngine(
        SimpleNamespace(adapters={"colors": str(trained_adapter)}, family="llava"),
        FixedModes(Mode.UNMERGED),
        checkpoint=base,
    ).answer([("colors", prompt) for prompt in prompts], 3)  # type: ignore[misc]
    plain = AutoModelForImageTextToText.from_pretrained(base)
    model = PeftModel.from_pretrained(plain, str(trained_adapter)).eval()
    for prompt, (tokens, logits) in zip(prompts, served, strict=True):
        ids = torch.tensor([[*prompt.prompt_ids, *tokens[:-1]]])
        pixels = to_tensor(prompt.vision[0].fields["pixel_values"])
        with torch.no_grad():
            found = model(input_ids=ids, pixel_values=pixels).logits[0, len(prompt.prompt_ids) - 1 :]
            with model.disable_adapter():
                without = model(input_ids=ids, pixel_values=pixels).logits[0, len(prompt.prompt_ids) - 1 :]
        assert (found - without).abs().max() > 0.1, "the adapter has no effect, so the comparison is meaningless"
        torch.testing.assert_close(logits, found, atol=1e-4, rtol=0)
        assert found.argmax(-1).tolist() == tokens


def test_a_block_is_a_lora_of_its_own_scaled_by_the_papers_rule(trained: LoraTrainer, trained_adapter: Path) -> None:
    """BD-LoRA section 3, done literally: adapters of rank r / N on shards of the weight, scaled alpha sqrt(N/r)."""
    config = json.loads((trained_adapter / "adapter_config.json").read_text())
    assert config["use_bdlora"]["nblocks"] == 2 and config["lora_alpha"] == pytest.approx(8 * math.sqrt(2))
    factors = load_file(trained_adapter / "adapter_model.safetensors")
    paper = LORA.alpha * math.sqrt(LORA.blocks) / math.sqrt(LORA.rank)
    found = {name.removeprefix("base_model.model."): m for name, m in trained.adapter.model.named_modules()}
    for layer, by_columns in (("self_attn.q_proj", True), ("mlp.up_proj", True), ("mlp.down_proj", False)):
        name = f"model.language_model.layers.1.{layer}"
        a, b = (factors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        if by_columns:
            shards = [paper * b_i @ a_i for a_i, b_i in zip(a.chunk(2), b.chunk(2), strict=True)]
            wanted = torch.cat(shards)
        else:
            shards = [paper * b_i @ a_i for a_i, b_i in zip(a.chunk(2), b.chunk(2, 1), strict=True)]
            wanted = torch.cat(shards, 1)
        x = torch.randn(5, wanted.shape[1])
        module = found[name]
        with torch.no_grad():
            delta = module(x) - module.base_layer(x)
        torch.testing.assert_close(delta, x @ wanted.t(), atol=1e-4, rtol=1e-3)


def test_size_and_scaling_are_those_of_blocks(trained: LoraTrainer, base: str) -> None:
    plan, errors = plan_of(base, ("colors",), lora=LORA), PlanErrors(PlanText())
    hf_model = shapes_of(plan, errors)
    assert hf_model is not None
    size = lora_size(plan, hf_model, errors)
    assert size is not None and size.parameters == sum(p.numel() for p in trained.adapter.lora.values())
    for rslora, alpha, divide in ((True, 8 * math.sqrt(4), math.sqrt), (False, 8 * 4, float)):
        lora, block = (LoraPlan(rank=r, alpha=8, rslora=rslora, blocks=n) for r, n in ((8, 4), (2, 1)))
        assert scaled_alpha(lora) == pytest.approx(alpha)
        assert scaled_alpha(lora) / divide(8) == pytest.approx(scaled_alpha(block) / divide(2))
    with pytest.raises(BadPlan, match="3 blocks do not divide rank 8"):
        trainer_of(plan_of(base, ("a",), lora=LoraPlan(rank=8, blocks=3)), {"a": color_splits()})


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("{rank: 8, blocks: 3}", "3 blocks do not divide rank 8; 9 works"),
        ("{rank: 9, blocks: 3}", "3 blocks do not divide the 256 outputs of model.language_model.layers.0"),
        ("{rank: 8, blocks: 2, vision: true}", "not together with lora.vision"),
        ("{blocks: 0}", "is 0; it must be at least 1"),
    ],
)
def test_invalid_blocks_are_refused_with_line_and_field(tmp_path: Path, lora: str, message: str) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "seed: 1\nlora: " + lora + "\ndomains:\n  - {name: a, source: drawn-signs, question: what, threshold: 0.5}\n"
    )
    code, output = run(str(plan), "--check")
    assert code != 0
    assert "line 2, field `lora.blocks`" in output and message in output


LANGUAGE = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
QUERY = "model.language_model.layers.1.self_attn.q_proj"


def dense_of(a: torch.Tensor, b: torch.Tensor, blocks: Blocks) -> np.ndarray:
    """The delta of factors in PEFT's format."""
    if blocks.side == "a":
        a = torch.block_diag(*a.chunk(blocks.num))
    else:
        b = torch.block_diag(*b.chunk(blocks.num))
    return (b @ a).double().numpy()


def best_by_numpy(delta: np.ndarray, blocks: Blocks, rank: int) -> np.ndarray:
    parts = np.split(delta, blocks.num, axis=1 if blocks.side == "a" else 0)
    best = []
    for part in parts:
        u, s, vt = np.linalg.svd(part, full_matrices=False)
        kept = rank // blocks.num
        best.append((u[:, :kept] * s[:kept]) @ vt[:kept])
    return np.concatenate(best, axis=1 if blocks.side == "a" else 0)


# -- one layer --------------------------------------------------------------------------------------------------------


@settings(max_examples=scaled(60))
@given(
    side=st.sampled_from(["a", "b"]),
    num=st.sampled_from([2, 3, 4]),
    each=st.integers(1, 4),
    own=st.integers(1, 9),
    widths=st.tuples(st.integers(1, 5), st.integers(1, 14)),
    seed=st.integers(0, 1000),
)
def test_no_other_block_factors_are_nearer(
    side: Side, num: int, each: int, own: int, widths: tuple[int, int], seed: int
) -> None:
    """Random deltas of any rank: numpy's truncated SVD of each block, in float64."""
    torch.manual_seed(seed)
    blocks, shared, other = Blocks(side, num), widths[0] * num, widths[1]
    d_in, d_out = (shared, other) if side == "a" else (other, shared)
    a, b = torch.randn(own, d_in, dtype=torch.float64), torch.randn(d_out, own, dtype=torch.float64)
    found = nearest_blocks(a, b, blocks, each * num)
    delta = (b @ a).numpy()
    best = best_by_numpy(delta, blocks, each * num)
    assert found.error == pytest.approx(np.linalg.norm(delta - best) / np.linalg.norm(delta), abs=1e-9)
    made = dense_of(found.a, found.b, blocks)
    assert np.linalg.norm(delta - made) / np.linalg.norm(delta) == pytest.approx(found.error, abs=1e-9)
    assert nearest_blocks(a, torch.zeros_like(b), blocks, each * num).error == 0
    assert found.a.shape == (each * num, d_in // num if side == "a" else d_in)
    assert found.b.shape == (d_out, each if side == "b" else each * num)


# -- a whole adapter --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random factors, a layer of another rank and alpha, rsLoRA, the projector, a head."""
    folder = tmp_path_factory.mktemp("dense") / "random"
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        use_rslora=True,
        target_modules=rf"{LANGUAGE}|.*multi_modal_projector.linear_1",
        rank_pattern={r"layers.1.self_attn.q_proj": 4},
        alpha_pattern={r"layers.1.self_attn.q_proj": 20},
        base_model_name_or_path=base,
    )
    model = get_peft_model(AutoModelForImageTextToText.from_pretrained(base), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 / parameter.shape[1] ** 0.5)
    model.save_pretrained(str(folder))
    spec = HeadSpec(
        name="colors",
        task="classification",
        labels=COLORS,
        parameters=TASKS["classification"].for_training(COLORS, [0, 1, 2]).parameters,
        prompt="what color ?",
        num_frames=1,
        hidden_size=64,
    )
    save_heads(folder, {"colors": TaskHead(spec, torch.randn(3, 64), torch.randn(3))})
    return folder


def logits(base: str, adapter: Path) -> torch.Tensor:
    model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), str(adapter)).eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(20, 40)[None]).logits


def deltas(base: str, adapter: Path) -> dict[str, np.ndarray]:
    """Deltas by layer, as plain PEFT adds them to the weights."""
    model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), str(adapter))
    found = {}
    inner: Any = model.base_model.model
    for name, module in inner.named_modules():
        if hasattr(module, "lora_A"):
            weight = module.get_base_layer().weight
            before = weight.detach().double().clone()
            module.merge()
            found[name] = (weight.detach().double() - before).numpy()
    return found


def test_each_layers_error_is_the_float64_optimum_in_plain_peft(base: str, adapter: Path, tmp_path: Path) -> None:
    found = convert(adapter, tmp_path / "bd", blocks=2)
    before, after = deltas(base, adapter), deltas(base, tmp_path / "bd")
    assert {layer.layer for layer in found.layers} == set(before) == set(after)
    for layer in found.layers:
        delta, made = before[layer.layer], after[layer.layer]
        error = np.linalg.norm(delta - made) / np.linalg.norm(delta)
        assert error == pytest.approx(layer.error, abs=1e-5)
        if (side := block_side(layer.layer)) is None:
            assert "projector" in layer.layer and layer.error == 0
        else:
            best = best_by_numpy(delta, Blocks(side, 2), layer.rank)
            assert layer.error == pytest.approx(np.linalg.norm(delta - best) / np.linalg.norm(delta), abs=1e-5)
            assert 0.2 < layer.error < 0.8 and layer.rank == (4 if layer.layer == QUERY else 8)
    for file in ("heads.json", "heads.safetensors"):
        assert (tmp_path / "bd" / file).read_bytes() == (adapter / file).read_bytes()


def test_rank_times_blocks_is_lossless(base: str, adapter: Path, tmp_path: Path) -> None:
    found = convert(adapter, tmp_path / "bd", blocks=4, rank=32)
    assert max(layer.error for layer in found.layers) < 1e-6
    torch.testing.assert_close(logits(base, tmp_path / "bd"), logits(base, adapter), atol=1e-4, rtol=0)
    zeros = load_file(tmp_path / "bd" / "adapter_model.safetensors")
    assert zeros[f"base_model.model.{QUERY}.lora_B.weight"].shape == (64, 8)


# -- refused conversions ----------------------------------------------------------------------------------------------


def test_what_cannot_be_converted_is_refused(base: str, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    convert(adapter, tmp_path / "bd", blocks=2)
    shutil.copytree(adapter, tmp_path / "broken")
    factors = load_file(adapter / "adapter_model.safetensors")
    factors[f"base_model.model.{QUERY}.lora_A.weight"][0, 0] = torch.nan
    save_file(factors, tmp_path / "broken" / "adapter_model.safetensors")
    everywhere = LoraConfig(r=2, target_modules=["q_proj"], base_model_name_or_path=base)
    model = get_peft_model(AutoModelForImageTextToText.from_pretrained(base), everywhere)
    model.save_pretrained(str(tmp_path / "everywhere"))
    before = sorted(path.name for path in tmp_path.iterdir())
    refused: list[tuple[type[Exception], str, Path, dict[str, Any]]] = [
        (BadAdapter, "is not a folder", tmp_path / "none", {}),
        (BadAdapter, r"no adapter_config\.json", tmp_path / "empty", {}),
        (BadAdapter, "already block-diagonal", tmp_path / "bd", {}),
        (BadConfig, "already exists", adapter, {"out": tmp_path / "bd"}),
        (BadConfig, "cannot be loaded; choose another with --model", adapter, {"base": str(tmp_path / "none")}),
        (BadAdapter, rf"the factors of {QUERY} contain values that are not finite", tmp_path / "broken", {}),
        (BadAdapter, r"adapts .*vision_tower.*q_proj, which is not sharded", tmp_path / "everywhere", {}),
        (BadAdapter, r"8 blocks do not divide rank 4 of .*q_proj; --rank 8 works", adapter, {"blocks": 8}),
        (BadAdapter, r"2 blocks do not divide rank 7 of .*; --rank 8 works", adapter, {"rank": 7}),
        (BadAdapter, r"3 blocks do not divide the \d+ (inputs|outputs) of model\.", adapter, {"blocks": 3, "rank": 9}),
    ]
    for kind, message, source, options in refused:
        with pytest.raises(kind, match=message):
            convert(source, **{"out": tmp_path / "new", "blocks": 2, **options})
    assert sorted(path.name for path in tmp_path.iterdir()) == before


# -- distillation -----------------------------------------------------------------------------------------------------


def test_distillation_reduces_the_distance_on_unseen_data(base: str, tmp_path: Path) -> None:
    trainer = trainer_of(plan_of(base, ("colors",), lora=LoraPlan(rank=4, alpha=8)), {"colors": color_splits()})
    trainer.adapter.reset()
    trainer.train("colors", ())
    trainer.save(tmp_path / "colors", trainer.adapter.snapshot())
    write_folders(tmp_path / "pictures")
    plan = tmp_path / "plan.yaml"
    labels = f", labels: [{', '.join(COLORS)}]"
    plan.write_text(
        f"base: {base}\ntraining: {{steps: 20, batch_size: 8}}\nconfidence: null\ndomains:\n"
        "  - {name: colors, source: pictures, question: what color is the image, threshold: 0.8" + labels + "}\n"
    )
    found = convert(tmp_path / "colors", tmp_path / "bd", blocks=4, data=read_plan_file(plan))
    (domain,) = found.domains
    assert domain.apart_distilled < 0.7 * domain.apart_converted
    assert domain.original > 0.8 and domain.distilled > 0.8
    plain = CliRunner().invoke(cli, ["convert-bd", str(tmp_path / "colors"), "--blocks", "4"])
    assert plain.exit_code == 0 and f"{QUERY}  rank 4, error 0." in plain.output and "test score" not in plain.output
    made, first = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("bd", "colors-bd4"))
    assert made.keys() == first.keys() and all(made[name].shape == first[name].shape for name in made)
    assert not any(torch.equal(made[name], first[name]) for name in made)
    plan.write_text(plan.read_text().replace(labels, ""))
    with pytest.raises(BadPlan, match=r"has the labels blue, green, red, the adapter's head red, green, blue"):
        convert(tmp_path / "colors", tmp_path / "more", blocks=4, data=read_plan_file(plan))
    plan.write_text(plan.read_text().replace("name: colors", "name: hues"))
    with pytest.raises(BadPlan, match=r"none of the plan's domains \(hues\) has a head in .*, which has colors"):
        convert(tmp_path / "colors", tmp_path / "more", blocks=4, data=read_plan_file(plan))
    assert not (tmp_path / "more").exists() and not (tmp_path / "more.unfinished").exists()
