"""Activated adapters (aLoRA) are trained as PEFT computes them, from the invocation in each prompt on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError

from fusion.block_diagonal.distil import distil
from fusion.phases.plan_checked import PlanChecked
from fusion.plan.schema import LoraPlan, Plan, TrainingPlan
from fusion.progress.progress import Progress
from fusion.training.activation import invocation_tokens
from fusion.training.collator import forward_samples
from fusion.training.domain import Domain
from fusion.training.frozen_base import FrozenBase
from fusion.training.trainer import LoraTrainer
from tests.families import build_model
from tests.fusion.test_families import PLAN, clips, inputs_of_transformers, processor_of
from vlora.errors import BadAdapter, BadPlan
from vlora.lora.peft_format import AdapterHeader, read_config

INVOCATION = "shown ?"


def trainer_of(family: str, *, checkpointing: bool = False, invocation: str = INVOCATION) -> LoraTrainer:
    model = build_model(family)
    processor = processor_of(family, model.config)
    lora = LoraPlan(rank=2, activated=True, invocation=invocation)
    base = FrozenBase(model, processor, invocation=invocation_tokens(lora, processor))
    training = TrainingPlan(bfloat16=False, gradient_checkpointing=checkpointing)
    plan = Plan(base=family, lora=lora, training=training, domains=(PLAN,))
    return LoraTrainer(base, {PLAN.name: Domain(PLAN, clips(1), base)}, plan)


def with_random_factors(trainer: LoraTrainer) -> LoraTrainer:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for factor in trainer.adapter.lora.values():
            factor.copy_(torch.randn(factor.shape, generator=generator) / factor.shape[1] ** 0.5)
    return trainer


@torch.no_grad()
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_losses_and_answers_are_those_of_peft(tmp_path: Path, family: str) -> None:
    trainer = with_random_factors(trainer_of(family))
    own, base = trainer.domains[PLAN.name], trainer.adapter.base
    assert len({len(sample.ids) for sample in own.train}) > 1 or family == "llava", "no sample is padded"
    read = forward_samples(base.hf_model, own.train, base.features_of(own.train))
    decoded = trainer.evaluator.decode_answers(PLAN.name, own.train)
    trainer.adapter.model.save_pretrained(str(tmp_path))
    assert read_config(tmp_path)["alora_invocation_tokens"] == list(base.invocation)
    reference = PeftModel.from_pretrained(build_model(family), str(tmp_path)).eval()
    losses, texts = [], []
    for sample, one in zip(own.splits.train, own.train, strict=True):
        inputs = inputs_of_transformers(base.processor, sample, one.answer)
        logits = reference(**inputs).logits[0]
        chosen = torch.log_softmax(logits[-len(one.answer) - 1 : -1].float(), -1)
        losses.append(float(-chosen[torch.arange(len(one.answer)), torch.tensor(one.answer)].mean()))
        prompt = inputs_of_transformers(base.processor, sample, ())
        limit = 2 * max(len(each.answer) for each in own.train)
        tokens = reference.generate(**prompt, max_new_tokens=limit, do_sample=False)[0, len(one.ids) :].tolist()
        texts.append(base.processor.decode(tokens).strip())
    assert read.words.tolist() == pytest.approx(losses, rel=1e-4)
    assert decoded == texts
    assert all(one.start is not None and 0 < one.start < len(one.ids) for one in own.train)


def test_checkpointed_gradients_are_the_same() -> None:
    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        trainer = with_random_factors(trainer_of("qwen2_5_vl", checkpointing=checkpointing))
        for factor in trainer.adapter.lora.values():
            factor.requires_grad_(True)
        trainer.adapter.model.train()
        batch = [(PLAN.name, sample) for sample in trainer.domains[PLAN.name].train]
        trainer.backward(batch, len(batch))
        return {name: factor.grad for name, factor in trainer.adapter.lora.items() if factor.grad is not None}

    plain, checkpointed = gradients(False), gradients(True)
    assert plain.keys() == checkpointed.keys() and any(grad.abs().max() > 1e-4 for grad in plain.values())
    for name, grad in plain.items():
        torch.testing.assert_close(checkpointed[name], grad, atol=1e-5, rtol=1e-4)


def test_the_default_invocation_is_what_the_template_adds() -> None:
    processor = processor_of("qwen2_5_vl", build_model("qwen2_5_vl").config)
    with pytest.raises(BadPlan, match=r"adds nothing after the question; set lora.invocation"):
        invocation_tokens(LoraPlan(activated=True), processor)
    processor.tokenizer.chat_template += "{% if add_generation_prompt %} in the{% endif %}"
    expected = processor.tokenizer("in the", add_special_tokens=False)["input_ids"]
    assert invocation_tokens(LoraPlan(activated=True), processor) == tuple(expected)
    assert invocation_tokens(LoraPlan(), processor) == ()


def test_a_prompt_without_the_invocation_is_refused() -> None:
    with pytest.raises(BadPlan, match=r"does not contain 'picture', the invocation of activated adapters"):
        trainer_of("llava", invocation="picture")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"invocation": "what"}, "is for activated adapters"),
        ({"activated": True, "vision": True}, "remove one of them"),
        ({"activated": True, "blocks": 2}, "not block-diagonal"),
        ({"activated": True, "invocation": " "}, "pattern"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LoraPlan(**settings)  # type: ignore[arg-type]


def test_distillation_of_an_activated_adapter_is_refused(tmp_path: Path) -> None:
    header = AdapterHeader(tmp_path, (), {}, invocation=(5,))
    with pytest.raises(BadAdapter, match=r"is activated by tokens of the prompt.*omit --data"):
        distil(header, tmp_path, "base", PlanChecked.__new__(PlanChecked), Progress())
