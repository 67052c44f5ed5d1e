"""Adapters trained in one packed batch equal plain PEFT, one adapter after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from tests.families import FAMILIES, build_model
from tests.training.cases import SETTINGS, PlainTraining, prompts, samples
from vlora.models.hf_model import HFModel
from vlora.training import PackedTrainer

WITHIN = 1e-5
NUM_STEPS = 6


def trainer_of(family: str, adapters: Sequence[str], **changes: Any) -> tuple[HFModel, PackedTrainer]:
    hf_model = HFModel(build_model(family))
    trainer = PackedTrainer(hf_model)
    for name in adapters:
        trainer.add(name, dataclasses.replace(SETTINGS[name], **changes))
    return hf_model, trainer


def plain_of(family: str, trainer: PackedTrainer, name: str) -> PlainTraining:
    """Plain PEFT from the packed training's initial values."""
    plain = PlainTraining(family, trainer.adapters[name].settings)
    plain.load(trainer.adapters[name].values())
    return plain


def apart(found: dict[str, tuple[torch.Tensor, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> torch.Tensor:
    """The absolute differences of two adapters' values or gradients."""
    assert 2 * len(found) == len(wanted)
    return torch.cat(
        [
            (ours - wanted[f"{layer}.lora_{side}.weight"]).abs().flatten()
            for layer, pair in found.items()
            for side, ours in zip("AB", pair, strict=True)
        ]
    )


FORMS = [(("wide",), False), (tuple(SETTINGS), False), (tuple(SETTINGS), True)]


@pytest.mark.parametrize(
    ("family", "adapters", "recompute"),
    [  # each family in one form by default
        pytest.param(family, *form, marks=[pytest.mark.exhaustive] * ((row + column) % 3 > 0))
        for row, family in enumerate(FAMILIES)
        for column, form in enumerate(FORMS)
    ],
)
def test_losses_gradients_and_values_equal_plain_peft(family: str, adapters: tuple[str, ...], recompute: bool) -> None:
    """Ragged batches with images; adapters of different ranks, targets, scales and learning rates."""
    hf_model, trainer = trainer_of(family, adapters, max_norm=1.0)
    plain = {name: plain_of(family, trainer, name) for name in adapters}
    for step in range(NUM_STEPS):
        losses = trainer.micro_step(samples(hf_model, family, adapters, step), recompute=recompute).run()
        for name in adapters:
            own = trainer.adapters[name]
            before = own.values()
            wanted = plain[name].backward(prompts(family, hf_model.model, name, step))
            assert losses[name].mean == pytest.approx(wanted, abs=WITHIN)
            gradients = apart(own.gradients(), plain[name].gradients())
            assert gradients.mean() < WITHIN / 10 and (step or gradients.max() < WITHIN)
            plain[name].update()
            assert own.update().applied
            # Single values may differ by more: Adam divides gradients that are nearly zero by their own size. So may
            # later gradients.
            values = {key: value.detach() for key, value in plain[name].parameters.items()}
            assert apart(own.values(), values).mean() < WITHIN / 10
            assert apart(before, values).mean() > 10 * WITHIN, "the values did not change"


def test_an_adapter_does_not_depend_on_its_neighbours() -> None:
    """The same adapter packed alone and with two others."""
    hf_model, together = trainer_of("qwen2_vl", tuple(SETTINGS))
    _, alone = trainer_of("qwen2_vl", ("wide",))
    for step in range(2):
        batch = samples(hf_model, "qwen2_vl", tuple(SETTINGS), step)
        both = together.micro_step(batch).run()["wide"], alone.micro_step({"wide": batch["wide"]}).run()["wide"]
        assert both[0].mean == pytest.approx(both[1].mean, abs=WITHIN)
        for name in SETTINGS:
            together.adapters[name].update()
        alone.adapters["wide"].update()


def test_accumulated_micro_steps_equal_one_large_one() -> None:
    """The gradient is the mean over all tokens, however they are divided between micro-steps."""
    hf_model, trainer = trainer_of("qwen2_vl", ("narrow", "wide"))
    batch = samples(hf_model, "qwen2_vl", ("narrow", "wide"), 0)
    whole = trainer.micro_step(batch).run()
    expected = {name: trainer.adapters[name].gradients() for name in batch}
    for name in batch:
        trainer.adapters[name].drop()
    trainer.micro_step({"narrow": batch["narrow"][:1], "wide": batch["wide"][:2]}).run()
    trainer.micro_step({"wide": batch["wide"][2:]}).run()
    trainer.micro_step({"narrow": batch["narrow"][1:]}).run()
    for name in batch:
        own = trainer.adapters[name]
        for layer, pair in own.gradients().items():
            for ours, wanted in zip(pair, expected[name][layer], strict=True):
                torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)
        update = own.update()
        assert update.num_tokens == whole[name].num_tokens
        assert update.loss == pytest.approx(whole[name].mean, abs=1e-6)


def test_a_saved_adapter_is_one_of_peft(tmp_path: Path) -> None:
    hf_model, trainer = trainer_of("qwen2_vl", ("wide", "mlp"))
    batch = samples(hf_model, "qwen2_vl", ("wide", "mlp"), 0)
    for _ in range(3):
        trainer.micro_step(batch).run()
        for own in trainer.adapters.values():
            own.update()
    losses = trainer.micro_step(batch).run()
    for name, own in trainer.adapters.items():
        own.save(tmp_path / name)
        plain = PlainTraining("qwen2_vl", own.settings)
        plain.model = PeftModel.from_pretrained(build_model("qwen2_vl"), tmp_path / name).eval()
        for parameter in plain.model.parameters():
            parameter.requires_grad_(True)
        found = plain.backward(prompts("qwen2_vl", hf_model.model, name, 0))
        assert found == pytest.approx(losses[name].mean, abs=WITHIN)


def test_a_restored_training_continues_bit_for_bit() -> None:
    hf_model, trainer = trainer_of("llava", ("wide",))
    batch = samples(hf_model, "llava", ("wide",), 0)
    own = trainer.adapters["wide"]

    def step() -> float:
        trainer.micro_step(batch).run()
        return own.update().loss

    step()
    state = own.state()
    expected = [step() for _ in range(3)]
    assert len(set(expected)) == 3, "the training does not change anything"
    trainer.remove("wide")
    own = trainer.add("wide", dataclasses.replace(SETTINGS["wide"], seed=9))
    own.restore(state)
    assert [step() for _ in range(3)] == expected


def test_a_model_in_bfloat16_has_the_gradients_of_float32() -> None:
    """Parameters, gradients' sums and the optimizer remain in float32."""
    gradients, losses = [], []
    for dtype in (torch.float32, torch.bfloat16):
        hf_model = HFModel(build_model("qwen2_vl", dtype))
        trainer = PackedTrainer(hf_model)
        own = trainer.add("wide", SETTINGS["wide"])
        batch = samples(hf_model, "qwen2_vl", ("wide",), 0)
        for _ in range(3):
            losses.append(trainer.micro_step(batch).run()["wide"].mean)
            found = torch.cat([gradient.flatten() for pair in own.gradients().values() for gradient in pair])
            assert found.dtype is torch.float32
            own.update()
        gradients.append(found)
    assert losses[3:] == pytest.approx(losses[:3], rel=0.02)
    assert torch.cosine_similarity(gradients[0], gradients[1], dim=0) > 0.98
    assert losses[2] < losses[0]
