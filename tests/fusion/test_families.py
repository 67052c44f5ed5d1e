"""Every served family and activated adapters train as in transformers and PEFT; any other is refused before loading."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from PIL import Image
from pydantic import ValidationError
from transformers import AutoConfig

from fusion.block_diagonal.distil import distil
from fusion.data.samples import Sample, Splits
from fusion.plan.check import PlanChecked
from fusion.plan.estimate import lora_size, shapes_of
from fusion.plan.schema import DomainPlan, LoraPlan, Plan, TrainingPlan
from fusion.progress import Progress
from fusion.run import fuse
from fusion.training.collator import forward_samples, invocation_tokens
from fusion.training.frozen_base import Domain, FrozenBase
from fusion.training.trainer import LoraTrainer
from tests.families import FAMILIES, MROPE_FAMILIES, build_model
from tests.fusion.made import write_plan
from tests.fusion.test_formats import folder_of_labels, one_folder_yolo
from tests.processors import image_processor, tokenizer
from vlora.cli import main
from vlora.errors import BadAdapter, BadPlan
from vlora.lora.peft_format import AdapterHeader, read_config
from vlora.models.processing import InputProcessor, to_tensor
from vlora.plan_files.errors import PlanErrors, PlanText

SIZES = ((40, 24), (20, 33), (64, 64))
ANSWERS = ("what", "what is", "what is shown")
PLAN = DomainPlan(name="asked", source="made", question="what is shown ?", threshold=0.5)


def processor_of(family: str, config: object) -> InputProcessor:
    tokens = tokenizer()
    if family in MROPE_FAMILIES:  # these tokens separate the positions of two pictures
        tokens.chat_template = str(tokens.chat_template).replace("<image>", "<vs><image><ve>")
    return InputProcessor(config, tokens, image_processor(family))


def clips(num_frames: int) -> Splits:
    rng = np.random.default_rng(0)
    samples = []
    for place in range(6):
        frames = [rng.integers(0, 255, (*SIZES[place % 3], 3), dtype=np.uint8) for _ in range(num_frames)]
        samples.append(Sample(frames, ANSWERS[place % 3]))
    return Splits("vqa", (), samples, samples, samples, real=False)


def inputs_of_transformers(
    processor: InputProcessor, sample: Sample, answer: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Arguments of the unmodified model's forward for a sample with an answer."""
    encoded = processor.encode(
        processor.chat(PLAN.question, len(sample.frames)), [Image.fromarray(frame) for frame in sample.frames]
    )
    ids = torch.tensor([[*encoded.prompt_ids, *answer]])
    fields: dict[str, list[torch.Tensor]] = {}
    for item in encoded.vision:
        for name, value in item.fields.items():
            fields.setdefault(name, []).append(to_tensor(value))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name, parts in fields.items():
        most = max(part.shape[1] for part in parts) if parts[0].ndim == 5 else 0
        padded = [torch.cat([p, p.new_zeros(1, most - p.shape[1], *p.shape[2:])], 1) if most else p for p in parts]
        inputs[name] = parts[0] if name == "batch_num_images" else torch.cat(padded)
    if processor.family.mrope:
        inputs["mm_token_type_ids"] = (ids == processor.image_token_id).int()
    return inputs


def loss_of_transformers(model: object, processor: InputProcessor, sample: Sample, answer: tuple[int, ...]) -> float:
    """Mean negative log-likelihood of an answer's tokens from the unmodified model's forward."""
    logits = model(**inputs_of_transformers(processor, sample, answer)).logits[0]  # type: ignore[operator]
    chosen = torch.log_softmax(logits[-len(answer) - 1 : -1].float(), -1)
    return float(-chosen[torch.arange(len(answer)), torch.tensor(answer)].mean())


def each_family_once(name: str, *values: int) -> pytest.MarkDecorator:
    """Every family with every value of a parameter. All but one value of each family are exhaustive."""
    pairs = itertools.product(enumerate(FAMILIES), enumerate(values))
    cells = [
        pytest.param(family, value, marks=[pytest.mark.exhaustive] * ((row + column) % len(values) > 0))
        for (row, family), (column, value) in pairs
    ]
    return pytest.mark.parametrize(("family", name), cells)


@each_family_once("num_frames", 1, 2)
def test_a_family_has_the_loss_of_transformers(family: str, num_frames: int) -> None:
    model, splits = build_model(family), clips(num_frames)
    base = FrozenBase(model, processor_of(family, model.config))
    domain, reference = Domain(PLAN, splits, base), build_model(family)
    with torch.no_grad():
        read = forward_samples(base.hf_model, domain.train, base.features_of(domain.train))
        expected = [
            loss_of_transformers(reference, base.processor, sample, one.answer)
            for sample, one in zip(splits.train, domain.train, strict=True)
        ]
    assert read.words.tolist() == pytest.approx(expected, abs=1e-4)
    assert len({round(loss, 3) for loss in expected}) == len(expected)  # otherwise the comparison is meaningless


@each_family_once("vision", False, True)
def test_training_a_family_reaches_every_layer_it_adapts(family: str, vision: bool) -> None:
    model = build_model(family)
    base = FrozenBase(model, processor_of(family, model.config), train_vision=vision)
    training = TrainingPlan(steps=2, batch_size=4, learning_rate=0.01)
    plan = Plan(lora=LoraPlan(rank=2, vision=vision), training=training, domains=(PLAN,))
    trainer = LoraTrainer(base, {PLAN.name: Domain(PLAN, clips(1), base)}, plan)
    trainer.adapter.reset()
    trainer.train(PLAN.name, ())
    still = {name for name, p in trainer.adapter.lora.items() if "lora_B" in name and not p.abs().max()}
    # LLaVA reads the tower's second-to-last layer, so deltas on the last layer are unused.
    last = rf"vision_tower\.encoder\.layers\.{getattr(model.config.vision_config, 'num_hidden_layers', 0) - 1}\."
    assert not {name for name in still if not re.search(last, name)}, still
    assert trainer.evaluator.decode_answers(PLAN.name, trainer.domains[PLAN.name].test)


def write_base(folder: Path, family: str) -> None:
    """Write only the config; weights and processor are not needed."""
    build_model(family).config.save_pretrained(str(folder))


def test_a_family_that_is_not_served_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    AutoConfig.for_model("paligemma").save_pretrained(str(tmp_path / "base"))
    plan = write_plan(tmp_path, "source: sklearn-digits", more="seed: 0\nbase: base\n")
    for arguments in (("--check",), ("--out", str(tmp_path / "out"))):
        monkeypatch.setattr(sys, "argv", ["vlora", "fuse", str(plan), *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        error = capsys.readouterr().err
        assert left.value.code == 2 and error.count("\n") == 1
        assert error.startswith(f"error: {plan}, line 2, field `base`: ")
        assert "model type 'paligemma' is not supported" in error and error.endswith(f"{', '.join(FAMILIES)}\n")
    assert not (tmp_path / "out").exists()


def test_every_family_passes_the_check(tmp_path: Path) -> None:
    for family in FAMILIES:
        (tmp_path / family).mkdir()
        write_base(tmp_path / family / "base", family)
        plan = Plan(base=str(tmp_path / family / "base"), domains=(PLAN,))
        hf_model = shapes_of(plan, errors := PlanErrors(PlanText()))
        assert hf_model is not None and (size := lora_size(plan, hf_model, errors)) is not None and size.layers == 4 * 7


@pytest.mark.slow
def test_a_head_that_needs_a_grid_is_refused_where_tokens_form_none(tmp_path: Path) -> None:
    """Detection on a family that splits pictures into tiles."""
    write_base(tmp_path / "base", "llava_next")
    folder_of_labels(tmp_path)
    kinds = ("data: {format: image_folder, path: pictures}", f"data: {one_folder_yolo(tmp_path)}")
    plan = write_plan(tmp_path, *kinds, more="base: base\n")
    with pytest.raises(BadPlan, match=r"detection cannot be trained on .*llava_next divides an image") as error:
        fuse(plan, tmp_path / "out")
    assert "field `domains[1]`" in str(error.value) and "domains[0]" not in str(error.value)


INVOCATION = "shown ?"


def activated_trainer(family: str, *, checkpointing: bool = False, invocation: str = INVOCATION) -> LoraTrainer:
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
    trainer = with_random_factors(activated_trainer(family))
    own, base = trainer.domains[PLAN.name], trainer.adapter.base
    assert len({len(sample.ids) for sample in own.train}) > 1 or family == "llava", "no sample is padded"
    read = forward_samples(base.hf_model, own.train, base.features_of(own.train))
    decoded = trainer.evaluator.decode_answers(PLAN.name, own.train)
    trainer.adapter.model.save_pretrained(str(tmp_path))
    assert read_config(tmp_path)["alora_invocation_tokens"] == list(base.invocation)
    reference = PeftModel.from_pretrained(build_model(family), str(tmp_path)).eval()
    losses, texts = [], []
    for sample, one in zip(own.splits.train, own.train, strict=True):
        losses.append(loss_of_transformers(reference, base.processor, sample, one.answer))
        prompt = inputs_of_transformers(base.processor, sample, ())
        limit = 2 * max(len(each.answer) for each in own.train)
        tokens = reference.generate(**prompt, max_new_tokens=limit, do_sample=False)[0, len(one.ids) :].tolist()
        texts.append(base.processor.decode(tokens).strip())
    assert read.words.tolist() == pytest.approx(losses, rel=1e-4)
    assert decoded == texts
    assert all(one.start is not None and 0 < one.start < len(one.ids) for one in own.train)


def test_checkpointed_gradients_are_the_same() -> None:
    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        trainer = with_random_factors(activated_trainer("qwen2_5_vl", checkpointing=checkpointing))
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


def test_what_activated_adapters_exclude_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadPlan, match=r"does not contain 'picture', the invocation of activated adapters"):
        activated_trainer("llava", invocation="picture").domains[PLAN.name].encode()
    excluded: list[tuple[dict[str, Any], str]] = [
        ({"invocation": "what"}, "is for activated adapters"),
        ({"activated": True, "vision": True}, "remove one of them"),
        ({"activated": True, "blocks": 2}, "not block-diagonal"),
        ({"activated": True, "invocation": " "}, "pattern"),
    ]
    for settings, message in excluded:
        with pytest.raises(ValidationError, match=message):
            LoraPlan(**settings)
    header = AdapterHeader(tmp_path, (), {}, invocation=(5,))
    with pytest.raises(BadAdapter, match=r"is activated by tokens of the prompt.*omit --data"):
        distil(header, tmp_path, "base", PlanChecked.__new__(PlanChecked), Progress())
