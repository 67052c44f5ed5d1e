"""Serving between the pieces of a micro-step changes nothing in either, and a diverged adapter harms no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.families import build_model, make_prompt
from tests.harness import FixedModes, RecordingEngine
from tests.references import Reference
from tests.training.cases import SETTINGS, samples
from vlora.models.hf_model import HFModel
from vlora.training import Loss, MicroStep, PackedTrainer
from vlora.types import Mode

Gradients = dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]
MODES = ((Mode.UNMERGED, None), (Mode.MIXED, "wide8"))
NUM_TOKENS = 16


def filled(hf_model: HFModel, weights: dict[str, torch.Tensor] | None = None) -> PackedTrainer:
    """A trainer with adapters that have deltas already, as after some steps."""
    trainer = PackedTrainer(hf_model, weights)
    for name, settings in SETTINGS.items():
        own = trainer.add(name, settings)
        generator = torch.Generator().manual_seed(len(name))
        own.load({layer: (a, torch.randn(b.shape, generator=generator) / 8) for layer, (a, b) in own.values().items()})
    return trainer


def taken(trainer: PackedTrainer) -> Gradients:
    """The gradients of all adapters, which are dropped."""
    found = {name: own.gradients() for name, own in trainer.adapters.items()}
    for own in trainer.adapters.values():
        own.drop()
    return found


def assert_equal_bits(found: Gradients, wanted: Gradients) -> None:
    for name, layers in wanted.items():
        for layer, pair in layers.items():
            for ours, theirs in zip(found[name][layer], pair, strict=True):
                assert torch.equal(ours, theirs), f"{name} at {layer}"


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_serving_between_pieces_changes_no_bit_of_either(family: str, recompute: bool, references: Any) -> None:
    """Requests with adapters, with nothing merged and with merged weights in the model while pieces run."""
    reference: Reference = references(family)
    adapters: tuple[str | None, ...] = ("wide8", "narrow4", None)
    cases = [
        (name, make_prompt(family, reference.model, place, num_images=int(name is None)))
        for place, name in enumerate(adapters)
    ]
    served = RecordingEngine(reference, FixedModes(Mode.UNMERGED, plan=MODES))
    served.answer(cases, NUM_TOKENS)  # from now on the prefix cache has the prompts
    served.engine.parts.scheduler.policy = FixedModes(Mode.UNMERGED, plan=MODES)
    alone = served.answer(cases, NUM_TOKENS)
    parts = served.engine.parts
    parts.scheduler.policy = FixedModes(Mode.UNMERGED, plan=MODES)
    parts.device.switcher.switch(None)
    trainer = filled(parts.device.hf_model)
    batch = samples(parts.device.hf_model, family, tuple(SETTINGS), 0)
    expected_losses = trainer.micro_step(batch, recompute=recompute).run()
    expected = taken(trainer)
    running: list[MicroStep] = [trainer.micro_step(batch, recompute=recompute)]
    done: list[tuple[dict[str, Loss], Gradients]] = []
    merged_at: set[str | None] = set()
    inner = parts.device.runner.launch

    def advance_and_launch(step: Any) -> Any:
        for _ in range(2):
            merged_at.add(parts.device.switcher.merged_key)
            if running[-1].advance():
                done.append((running[-1].losses, taken(trainer)))
                running.append(trainer.micro_step(batch, recompute=recompute))
        return inner(step)

    parts.device.runner.launch = advance_and_launch  # type: ignore[method-assign,assignment]
    beside = served.answer(cases, NUM_TOKENS)
    for (tokens, logits), (wanted_tokens, wanted) in zip(beside, alone, strict=True):
        assert tokens == wanted_tokens and torch.equal(logits, wanted)
    assert len(done) > 1 and len(merged_at) == 2, f"{len(done)} micro-steps are complete; merged: {merged_at}"
    for losses, gradients in done:
        assert losses == expected_losses
        assert_equal_bits(gradients, expected)


def test_training_leaves_no_trace_in_the_modules() -> None:
    hf_model = HFModel(build_model("qwen2_vl"))
    before = [sorted(module.__dict__) for module in hf_model.model.modules()]
    attention = hf_model.text_model.config._attn_implementation  # noqa: SLF001  (transformers)
    trainer = filled(hf_model)
    batch = samples(hf_model, "qwen2_vl", tuple(SETTINGS), 0)
    step = trainer.micro_step(batch)
    with torch.inference_mode():
        complete = False
        while not complete:
            complete = step.advance()
            assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
            assert [sorted(module.__dict__) for module in hf_model.model.modules()] == before
            assert hf_model.text_model.config._attn_implementation == attention  # noqa: SLF001
    assert all(parameter.grad is None for parameter in hf_model.model.parameters())


def test_training_may_be_called_in_inference_mode() -> None:
    """As the engine's step does, and outside of it the same training continues."""
    hf_model = HFModel(build_model("qwen2_vl"))
    batch = samples(hf_model, "qwen2_vl", tuple(SETTINGS), 0)
    losses = []
    for inside in (False, True):
        with torch.inference_mode(inside):
            trainer = filled(hf_model)
        for place in range(3):
            with torch.inference_mode(inside and place != 1):
                trainer.micro_step(batch).run()
                losses.append([own.update().loss for own in trainer.adapters.values()])
    assert losses[3:] == losses[:3] and losses[0] != losses[2]


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_a_diverged_adapter_changes_no_bit_of_another(recompute: bool) -> None:
    """Of each adapter in turn, the values are infinite and NaN."""
    hf_model = HFModel(build_model("qwen2_vl"))
    trainer = filled(hf_model)
    batch = samples(hf_model, "qwen2_vl", tuple(SETTINGS), 0)
    expected_losses = trainer.micro_step(batch, recompute=recompute).run()
    expected = taken(trainer)
    for name, own in trainer.adapters.items():
        state = own.state()
        for value in (torch.nan, torch.inf):
            own.load({layer: (a * value, b) for layer, (a, b) in own.values().items()})
            losses = trainer.micro_step(batch, recompute=recompute).run()
            assert losses[name].total != losses[name].total, "the adapter did not diverge"
            others = {other: each.gradients() for other, each in trainer.adapters.items() if other != name}
            assert_equal_bits(others, {other: expected[other] for other in others})
            assert all(losses[other] == expected_losses[other] for other in others)
            state_before = own.state()["parameters"]
            update = own.update()
            assert not update.applied and update.loss != update.loss
            torch.testing.assert_close(own.state()["parameters"], state_before, rtol=0, atol=0, equal_nan=True)
            for each in trainer.adapters.values():
                each.drop()
        own.restore(state)
    trainer.micro_step(batch, recompute=recompute).run()
    assert_equal_bits(taken(trainer), expected)


def test_given_weights_are_used_instead_of_the_layers_own() -> None:
    """As with a switcher that writes merged weights over W0."""
    hf_model = HFModel(build_model("qwen2_vl"))
    batch = samples(hf_model, "qwen2_vl", tuple(SETTINGS), 0)
    trainer = filled(hf_model)
    trainer.micro_step(batch).run()
    expected = taken(trainer)
    weights = {name: layer.weight.detach().clone() for name, layer in hf_model.language_linears.items()}
    for layer in hf_model.language_linears.values():
        layer.weight.data.mul_(1.5)
    other = filled(hf_model, weights)
    other.micro_step(batch).run()
    assert_equal_bits(taken(other), expected)
    trainer.micro_step(batch).run()
    with pytest.raises(AssertionError, match="narrow at"):
        assert_equal_bits(taken(trainer), expected)


def test_an_abandoned_micro_step_leaves_no_gradient() -> None:
    hf_model = HFModel(build_model("qwen2_vl"))
    trainer = filled(hf_model)
    batch = samples(hf_model, "qwen2_vl", tuple(SETTINGS), 0)
    trainer.micro_step(batch).run()
    expected = taken(trainer)
    step = trainer.micro_step(batch)
    for _ in range(7):
        assert not step.advance()
    with pytest.raises(AssertionError, match="under way"):
        trainer.adapters["wide"].update()
    with pytest.raises(AssertionError, match="under way"):
        trainer.micro_step({"wide": batch["wide"]})
    step.abandon()
    trainer.micro_step(batch).run()
    assert_equal_bits(taken(trainer), expected)
