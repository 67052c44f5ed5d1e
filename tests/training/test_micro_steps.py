"""Packed micro-steps equal plain PEFT, whatever runs between their pieces; what cannot be trained is refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from torch.utils._python_dispatch import TorchDispatchMode

from atmm import processor
from atmm.formats import FORMATS
from atmm.quantized import QuantizedWeight
from tests.atmm.cases import needs_compiler
from tests.families import FAMILIES, IMAGE, build_model, make_prompt
from tests.harness import FixedModes, RecordingEngine
from tests.references import Reference
from tests.training.beside import Case, request, settle
from tests.training.cases import SETTINGS, PlainTraining, prompts, samples
from vlora.bench.dummy import language_shapes, write_adapter
from vlora.errors import BadConfig, VLoraError
from vlora.models.hf_model import HFModel, VisionFeatures
from vlora.models.loading import load_model
from vlora.training.adapter import LoraSettings
from vlora.training.batch import Sample
from vlora.training.micro_step import Loss, MicroStep, token_losses
from vlora.training.trainer import PackedTrainer
from vlora.types import Mode

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


Packed = tuple[HFModel, dict[str, list[Sample]]]


@pytest.fixture(scope="module")
def packed() -> Packed:
    """A model, and a batch of all adapters."""
    hf_model = HFModel(build_model("qwen2_vl"))
    return hf_model, samples(hf_model, "qwen2_vl", tuple(SETTINGS), 0)


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


def test_training_leaves_no_trace_in_the_modules_and_may_be_called_in_inference_mode(packed: Packed) -> None:
    """As the engine's step does; outside of it the same training continues."""
    hf_model, batch = packed
    before = [sorted(module.__dict__) for module in hf_model.model.modules()]
    attention = hf_model.text_model.config._attn_implementation  # noqa: SLF001  (transformers)
    trainer = filled(hf_model)
    step = trainer.micro_step(batch)
    with torch.inference_mode():
        complete = False
        while not complete:
            complete = step.advance()
            assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
            assert [sorted(module.__dict__) for module in hf_model.model.modules()] == before
            assert hf_model.text_model.config._attn_implementation == attention  # noqa: SLF001
    assert all(parameter.grad is None for parameter in hf_model.model.parameters())
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
def test_a_diverged_adapter_changes_no_bit_of_another(recompute: bool, packed: Packed) -> None:
    """Of each adapter in turn, the values are infinite and NaN."""
    hf_model, batch = packed
    trainer = filled(hf_model)
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


def test_an_abandoned_micro_step_leaves_no_gradient(packed: Packed) -> None:
    hf_model, batch = packed
    trainer = filled(hf_model)
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


HIDDEN, WORDS, ROWS = 24, 100, 64


@pytest.mark.parametrize(
    ("num_tokens", "words_at_once", "bias"),
    [(1, 1, True), (ROWS, 33, False), (ROWS, 100, True), (ROWS + 7, 33, True), (ROWS + 7, 4000, False)],
)
def test_losses_equal_cross_entropy(num_tokens: int, words_at_once: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
    weight = torch.randn(WORDS, HIDDEN, generator=generator)
    offset = torch.randn(WORDS, generator=generator) if bias else None
    targets = torch.randint(WORDS, (num_tokens,), generator=generator)
    leaf = hidden.double().requires_grad_()
    logits = F.linear(leaf, weight.double(), None if offset is None else offset.double())
    expected = F.cross_entropy(logits, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    found: list[torch.Tensor] = []

    def compute() -> Iterator[None]:
        found.extend((yield from token_losses(hidden, targets, weight, offset, max_weights, ROWS * WORDS + 5)))

    max_weights = words_at_once * HIDDEN + 5
    num_pieces = len(list(compute()))
    for ours, wanted in zip(found, (expected.detach(), gradient), strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-5)
    blocks = -(-WORDS // words_at_once)
    assert num_pieces == 2 * blocks * -(-num_tokens // ROWS)


class _Products(TorchDispatchMode):
    """Torch's matrix products, by name and type."""

    NAMES = frozenset(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear", "addbmm"))

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if name.rstrip("_") in self.NAMES:
            self.found |= {(name, each.dtype) for each in args if isinstance(each, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@needs_compiler
@pytest.mark.parametrize("fast", (True, False))
def test_products_are_in_float32_where_bfloat16_is_slow(
    tmp_path: Path, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: fast)
    monkeypatch.setattr(processor, "flags", lambda: "")
    case = Case.make(tmp_path / "case")
    engine = case.engine(case.plan("results", ["first"]), dtype="bfloat16", policy="unmerged_only")
    shapes = language_shapes(load_model(case.config(dtype="bfloat16")))
    for rank in (4, 40):
        engine.load_adapter(f"rank{rank}", write_adapter(tmp_path / f"rank{rank}", shapes, rank, seed=rank))
    for number in range(4):
        adapter = f"rank{(4, 40)[number % 2]}"
        engine.add(request(f"r{number}", adapter, num_prompt=40))
    with _Products() as products:
        settle(engine.parts.trainings, engine)
        while engine.has_work:
            engine.step()
    engine.close()
    assert {dtype for _, dtype in products.found} == {torch.bfloat16 if fast else torch.float32}, products.found


def test_models_without_whole_weights_in_this_process() -> None:
    hf_model = HFModel(build_model("qwen2_vl"))
    layer = next(iter(hf_model.language_linears.values()))
    layer.shard = layer.shard._replace(size=2)
    with pytest.raises(BadConfig, match="start without --tensor-parallel"):
        PackedTrainer(hf_model)
    layer.shard = layer.shard._replace(size=1)
    layer.quantized = QuantizedWeight(*FORMATS["int8"].encode(layer.weight.detach()), torch.float32, FORMATS["int8"])
    with pytest.raises(BadConfig, match="start without --quantize"):
        PackedTrainer(hf_model)


@pytest.fixture(scope="module")
def trainer() -> PackedTrainer:
    made = PackedTrainer(HFModel(build_model("qwen2_vl")))
    made.add("a", LoraSettings())
    return made


IDS = torch.tensor([5, 6, 7])
WITH_IMAGE = torch.tensor([5, IMAGE, 7])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 0}, "rank is 0; give 1 or more"),
        ({"alpha": 0.0}, "alpha is 0.0; give a number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; give a number above 0"),
        ({"targets": ()}, "targets is empty"),
        ({"targets": ("q_proj", "qkv")}, "no linear layer is named qkv; it has down_proj, gate_proj"),
        ((IDS, IDS[:2]), "a sample has (3,) tokens and (2,) labels"),
        ((IDS, torch.tensor([5, -100, -100])), "no label after its first token"),
        ((IDS, IDS, torch.zeros(1, 3)), "positions of shape (1, 3); this model needs (3, 3)"),
        ((torch.tensor([5, 6, 200]), IDS), "a token outside the model's vocabulary of 200"),
        ((WITH_IMAGE, IDS), "a sample has 1 image and video tokens and features of 0"),
        ((IDS, IDS, None, VisionFeatures(torch.zeros(2, 64), ())), "a sample has 0 image and video tokens"),
        ((IDS.repeat(400), IDS.repeat(400)), "a sample has 1200 tokens; the model takes at most 1024"),
        ({"b": [Sample(IDS, IDS)]}, "no adapter in training is named b"),
        ({"a": []}, "there are none of a"),
        ({}, "samples of every adapter; there are none"),
    ],
)
def test_what_cannot_be_trained_is_refused(given: Any, message: str, trainer: PackedTrainer) -> None:
    """given: Settings of an adapter, a sample, or the samples of a micro-step."""
    is_settings = isinstance(given, dict) and bool(given.keys() - {"a", "b"})
    with pytest.raises(BadConfig if is_settings else VLoraError, match=re.escape(message)):
        if is_settings:
            trainer.add("b", LoraSettings(**given))
        else:
            trainer.micro_step(given if isinstance(given, dict) else {"a": [Sample(*given)]})
    assert not trainer.adapters["a"].busy
    with pytest.raises(BadConfig, match="an adapter 'a' is in training already"):
        trainer.add("a", LoraSettings())
