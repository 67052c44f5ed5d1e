"""Block-diagonal adapters: training through PEFT, the paper's scaling, loading in plain PEFT, and serving."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from fusion.phases.plan_checked import lora_size, shapes_of
from fusion.plan.schema import LoraPlan
from fusion.training.checkpoint import Checkpoint
from fusion.training.fingerprint import identity_of
from fusion.training.trainer import LoraTrainer
from tests.fusion.small import color_splits, plan_of, trainer_of
from tests.fusion.test_check import run
from tests.harness import FixedModes, RecordingEngine
from vlora.errors import BadPlan
from vlora.models.processing import to_tensor
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
def adapter(trained: LoraTrainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "colors"
    trained.save(folder, trained.adapter.snapshot())
    return folder


def test_blocks_learn(trained: LoraTrainer) -> None:
    assert trained.evaluator.score("colors", trained.domains["colors"].test) > 0.8


def test_plain_peft_and_the_engine_give_the_same_logits(trained: LoraTrainer, base: str, adapter: Path) -> None:
    domain = trained.domains["colors"]
    processor = trained.adapter.base.processor
    prompts = [
        processor.encode(processor.chat(domain.plan.question, 1), [Image.fromarray(sample.frames[0])])
        for sample in domain.splits.test[:4]
    ]
    served = RecordingEngine(
        SimpleNamespace(adapters={"colors": str(adapter)}, family="llava"),
        FixedModes(Mode.UNMERGED),
        checkpoint=base,
    ).answer([("colors", prompt) for prompt in prompts], 3)  # type: ignore[misc]
    plain = AutoModelForImageTextToText.from_pretrained(base)
    model = PeftModel.from_pretrained(plain, str(adapter)).eval()
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


def test_a_block_is_a_lora_of_its_own_scaled_by_the_papers_rule(trained: LoraTrainer, adapter: Path) -> None:
    """BD-LoRA section 3, done literally: adapters of rank r / N on shards of the weight, scaled alpha sqrt(N/r)."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["use_bdlora"]["nblocks"] == 2 and config["lora_alpha"] == pytest.approx(8 * math.sqrt(2))
    factors = load_file(adapter / "adapter_model.safetensors")
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


@pytest.mark.parametrize(("rslora", "alpha"), [(True, 8 * math.sqrt(4)), (False, 8 * 4)])
def test_scaling_is_that_of_a_blocks_rank(rslora: bool, alpha: float) -> None:
    from fusion.block_diagonal.blocks import scaled_alpha

    lora = LoraPlan(rank=8, alpha=8, rslora=rslora, blocks=4)
    assert scaled_alpha(lora) == pytest.approx(alpha)
    alone = LoraPlan(rank=2, alpha=8, rslora=rslora)  # a block
    divide = math.sqrt if rslora else float
    assert scaled_alpha(lora) / divide(8) == pytest.approx(scaled_alpha(alone) / divide(2))


def test_the_summary_has_the_trained_size(trained: LoraTrainer, base: str) -> None:
    plan, errors = plan_of(base, ("colors",), lora=LORA), PlanErrors(PlanText())
    hf_model = shapes_of(plan, errors)
    assert hf_model is not None
    size = lora_size(plan, hf_model, errors)
    assert size is not None
    assert size.parameters == sum(p.numel() for p in trained.adapter.lora.values())


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


def test_a_trainer_refuses_invalid_blocks(base: str) -> None:
    with pytest.raises(BadPlan, match="3 blocks do not divide rank 8"):
        trainer_of(plan_of(base, ("a",), lora=LoraPlan(rank=8, blocks=3)), {"a": color_splits()})


def test_trainings_of_other_blocks_are_not_resumed(base: str, tmp_path: Path) -> None:
    splits = {"colors": color_splits()}
    plans = [plan_of(base, ("colors",), lora=LoraPlan(rank=8, blocks=blocks)) for blocks in (1, 2)]
    Checkpoint(tmp_path / "made", identity_of(plans[0], splits, "base", "processing", "cpu"), resume=True)
    with pytest.raises(BadPlan, match=r"plan's lora\.blocks: was 1, is 2"):
        Checkpoint(tmp_path / "made", identity_of(plans[1], splits, "base", "processing", "cpu"), resume=True)
