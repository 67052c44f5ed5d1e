"""Training with little memory, in other precisions, with features from disk, and on the vision side."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForImageTextToText

from fusion.data.frames import Picture
from fusion.data.samples import Sample, Splits
from fusion.embedded.drawing import SIZE
from fusion.plan.schema import LoraPlan, TrainingPlan
from fusion.training.accumulate import backward_in_parts, halving
from fusion.training.checkpoint import Checkpoint, State
from fusion.training.objectives import ForwardOutputs, HeadObjective
from fusion.training.run_cache import RunCache
from fusion.training.trainer import LoraTrainer
from heads import Box, load_heads
from tests.fusion.small import COLORS, StepsReported, color_splits, plan_of, trainer_of
from vlora.errors import BadImage, BadPlan
from vlora.models import EncodedPrompt, InputProcessor
from vlora.models.vision.images import Clip

pytestmark = pytest.mark.slow


def boxes(count: int, seed: int) -> list[Sample]:
    """One to three bright squares: the loss is a mean over the tokens with a square, not over samples."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        frame = rng.integers(0, 60, (SIZE, SIZE, 3)).astype(np.uint8)
        found = []
        for _ in range(int(rng.integers(1, 4))):
            x, y = (int(v) for v in rng.integers(0, SIZE - 16, 2))
            frame[y : y + 16, x : x + 16] = 250
            found.append(Box(0, x / SIZE, y / SIZE, (x + 16) / SIZE, (y + 16) / SIZE))
        samples.append(Sample((frame,), tuple(found)))
    return samples


@pytest.fixture(scope="module")
def mixed(base: str) -> LoraTrainer:
    """A classification and a detection domain in one adapter, in float32."""
    found = Splits("detection", ("square",), boxes(30, 0), boxes(10, 1), boxes(10, 2), real=False)
    plan = plan_of(base, ("colors", "squares"), bfloat16=False, steps=3)
    trainer = trainer_of(plan, {"colors": color_splits(), "squares": found})
    trainer.adapter.reset()
    trainer.train_together(("colors", "squares"))
    return trainer


def gradients(trainer: LoraTrainer, at_once: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    batch = [*trainer.draw(rng, "colors", 5), *trainer.draw(rng, "squares", 6)]
    parameters = trainer.adapter.parameters
    for parameter in parameters.values():
        parameter.requires_grad_(True)
        parameter.grad = None
    trainer.backward(batch, at_once)
    return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


@pytest.mark.parametrize("at_once", [1, 4, 6])
def test_parts_of_a_batch_give_the_gradient_of_the_whole(mixed: LoraTrainer, at_once: int) -> None:
    whole, parts = gradients(mixed, 11), gradients(mixed, at_once)
    assert whole.keys() == parts.keys() and len(whole) > 25
    for name, wanted in whole.items():
        assert torch.allclose(parts[name], wanted, rtol=1e-3, atol=1e-6 * max(1.0, float(wanted.abs().max()))), name


def test_activations_computed_twice_give_the_same_gradient(mixed: LoraTrainer) -> None:
    kept = gradients(mixed, 11)
    mixed.adapter.base.model.gradient_checkpointing_enable({"use_reentrant": False})
    mixed.adapter.model.train()
    try:
        again = gradients(mixed, 11)
    finally:
        mixed.adapter.base.model.gradient_checkpointing_disable()
        mixed.adapter.model.eval()
    for name, wanted in kept.items():
        assert torch.allclose(again[name], wanted, rtol=1e-4, atol=1e-7), name


def test_conflicts_are_measured_without_keeping_activations(mixed: LoraTrainer) -> None:
    """In eval mode, in which transformers recomputes nothing by itself."""
    recomputed: list[object] = []

    def checkpoint(call: Callable[..., object], *inputs: object) -> object:
        recomputed.append(call)
        return torch.utils.checkpoint.checkpoint(call, *inputs, use_reentrant=False)

    mixed.adapter.model.zero_grad()  # of earlier tests
    kept, model = mixed.gradients(("colors",), 1), mixed.adapter.base.model
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.modules():
        if getattr(layer, "gradient_checkpointing", False):
            layer._gradient_checkpointing_func = checkpoint  # noqa: SLF001
    try:
        again = mixed.gradients(("colors",), 1)
    finally:
        model.gradient_checkpointing_disable()
    assert recomputed and not any(module.training for module in mixed.adapter.model.modules())
    assert torch.equal(again["colors"], kept["colors"])


def test_boxes_are_scored_as_they_are_served(mixed: LoraTrainer, tmp_path: Path) -> None:
    """With the calibrated head; its temperature comes from samples used neither for training nor for validation."""
    before, key = mixed.adapter.snapshot(), "head.squares.output.weight"
    mixed.save(tmp_path, {**before, key: before[key] * 5})  # far too confident
    served, plain = load_heads(tmp_path)["squares"].task, mixed.domains["squares"].task
    own = mixed.domains["squares"]
    assert isinstance(plain, HeadObjective)
    with torch.no_grad():  # with gradients, torch computes norms with other code
        ((part, outputs),) = mixed.evaluator.forward("squares", own.validation)
        logits = list(zip(part, plain.logits(outputs, mixed.adapter.heads["squares"]), outputs.grids, strict=True))
    answers = mixed.evaluator.answers("squares", own.validation)
    assert answers == [one.of_whole_pictures(served.decode(rows, grids).value) for one, rows, grids in logits]
    assert answers != [one.of_whole_pictures(plain.task.decode(rows, grids).value) for one, rows, grids in logits]
    assert any(answers)
    validation, own.validation = own.validation, own.validation[:1]
    assert mixed.evaluator.calibrated("squares").task == served  # type: ignore[attr-defined]
    own.validation = validation
    mixed.adapter.restore(before)


def test_only_what_calibration_decides_keeps_samples_from_training(mixed: LoraTrainer) -> None:
    for name, kept in (("squares", True), ("colors", False)):
        own = mixed.domains[name]
        drawn = {id(sample.ids) for _, sample in mixed.draw(np.random.default_rng(0), name, 500)}
        assert len(own.held_back) == len(own.train) // 10
        assert bool(drawn & {id(sample.ids) for sample in own.held_back}) == (not kept)


def test_a_loss_that_is_not_finite_ends_a_training_of_which_nothing_is_stored(
    mixed: LoraTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = mixed.adapter.snapshot()
    monkeypatch.setattr(mixed, "plan", mixed.plan.model_copy(update={"training": TrainingPlan(steps=3, batch_size=4)}))
    head, steps = mixed.domains["squares"].task, {"lora": 0, "head": 0}

    def spoil(owner: object, what: str) -> None:
        """The loss of the second step is not a number."""
        loss_of = owner.loss  # type: ignore[attr-defined]

        def loss(*arguments: object) -> torch.Tensor:
            steps[what] += 1
            return loss_of(*arguments) * (float("nan") if steps[what] == 2 else 1.0)  # type: ignore[no-any-return]

        monkeypatch.setattr(owner, "loss", loss)

    cache = RunCache(mixed, Checkpoint(tmp_path / "checkpoint", {}, resume=False), rehearsal=0.5)
    spoil(mixed.adapter, "lora")
    with pytest.raises(
        BadPlan, match=r"^training colors: step 2 has a loss of nan .* `training.learning_rate` \(now 0.003\), or set"
    ):
        cache(("colors",))
    spoil(head, "head")
    with pytest.raises(BadPlan, match=r"^training squares: step 2 has a loss of nan "):
        cache(("squares",))
    assert all(bool(tensor.isfinite().all()) for tensor in mixed.adapter.snapshot().values())
    assert [file.name for file in (tmp_path / "checkpoint").iterdir()] == ["run.json"]
    forget(mixed, before)


def test_a_gradient_that_is_not_finite_ends_a_training(mixed: LoraTrainer) -> None:
    before, parameter = mixed.adapter.snapshot(), next(iter(mixed.adapter.lora.values()))
    hook = parameter.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(BadPlan, match=r"^training colors: step 1 has a loss of \d.* a gradient of norm (inf|nan)"):
        mixed.train("colors", ())
    hook.remove()
    assert all(bool(tensor.isfinite().all()) for tensor in mixed.adapter.snapshot().values())
    forget(mixed, before)


def forget(trainer: LoraTrainer, state: State) -> None:
    """Undo a training that has failed."""
    trainer.adapter.model.zero_grad()
    trainer.adapter.model.eval()
    trainer.adapter.restore(state)


class LimitedMemory:
    """Memory for `room` samples."""

    def __init__(self, trainer: LoraTrainer, room: int) -> None:
        self.room = room
        self.forward = trainer.adapter.forward
        self.sizes: list[int] = []

    def __call__(self, batch: list[object]) -> ForwardOutputs:
        self.sizes.append(len(batch))
        if len(batch) > self.room:
            raise torch.OutOfMemoryError(f"no room for {len(batch)}")
        return self.forward(batch)  # type: ignore[arg-type]


def test_out_of_memory_goes_on_with_smaller_parts_to_the_same_adapter(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(base, ("colors",), bfloat16=False, steps=4, learning_rate=1e-3)
    trainer = trainer_of(plan, {"colors": color_splits()})
    trainer.adapter.reset()
    roomy_losses = trainer.train("colors", ())
    roomy = trainer.adapter.snapshot()
    short = LimitedMemory(trainer, room=5)
    lines: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(trainer.adapter, "forward", short)
        patched.setattr(trainer.progress, "say", lines.append)
        trainer.adapter.reset()
        assert trainer.train("colors", ()) == pytest.approx(roomy_losses, rel=1e-4)
        assert trainer.evaluator.score("colors", trainer.domains["colors"].validation) >= 0
    assert short.sizes[:4] == [12, 6, 3, 3]  # halved until it fits; larger sizes are not tried again
    assert short.sizes.count(12) == 1
    line = "out of memory: continuing with {} samples at a time; gradients do not change"
    assert lines == [line.format(6), line.format(3)]
    for name, value in trainer.adapter.snapshot().items():
        # Adam divides by the gradient's magnitude: if that is near 0, rounding decides the sign.
        assert (value - roomy[name]).abs().mean() < 1e-5, name


def no_room_on_a_cpu() -> RuntimeError:
    """The error that torch raises for an allocation of three times the address space of a process."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(3 * 2**46, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), no_room_on_a_cpu()])
def test_a_single_sample_that_does_not_fit_is_an_error(error: RuntimeError) -> None:
    def never(size: int) -> None:
        raise error

    sizes: list[int] = []
    with pytest.raises(BadPlan, match="out of memory with a single sample"):
        halving(5, never, sizes.append)
    assert sizes == [3, 2, 1]


def test_other_errors_are_no_lack_of_memory() -> None:
    def wrong(size: int) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="do not match"):
        halving(5, wrong, lambda size: None)


def test_gradients_of_an_abandoned_batch_are_dropped() -> None:
    """Memory may run out in the second part, after the first has added its gradient."""
    weight = torch.zeros(1, requires_grad=True)
    calls = 0

    def read(part: object) -> ForwardOutputs:
        nonlocal calls
        calls += 1
        if calls == 4:  # the second part, read again
            raise torch.OutOfMemoryError
        values = torch.tensor(part, dtype=torch.float32) * weight
        return ForwardOutputs(values[:, None], [], [], [], values, torch.zeros(len(values)))

    def attempt(size: int) -> float:
        return backward_in_parts([1.0, 2.0, 3.0, 4.0], size, read, lambda r: (r.last.sum() - 1) ** 2)

    def undo(size: int) -> None:
        weight.grad = None

    halving(2, attempt, undo)
    assert weight.grad is not None and weight.grad.item() == -20.0


@pytest.mark.parametrize(
    "lora", [LoraPlan(rank=4, alpha=8, rslora=True), LoraPlan(rank=4, targets=("q_proj", "v_proj"))]
)
def test_peft_gives_the_same_logits(base: str, lora: LoraPlan, tmp_path: Path) -> None:
    plan = plan_of(base, ("colors",), lora=lora, steps=6, bfloat16=False)
    logits_agree(trainer_of(plan, {"colors": color_splits()}), base, tmp_path)


def test_the_vision_side_learns_and_peft_gives_the_same_logits(base: str, tmp_path: Path) -> None:
    plan = plan_of(base, ("colors",), lora=LoraPlan(rank=4, alpha=8, vision=True), steps=6, bfloat16=False)
    trainer = trainer_of(plan, {"colors": color_splits()})
    logits_agree(trainer, base, tmp_path)
    changed = [
        name for name, p in trainer.adapter.lora.items() if "lora_B" in name and float(p.detach().abs().max()) > 0
    ]
    for part in ("vision_tower", "multi_modal_projector", "language_model"):
        assert any(part in name for name in changed), part


def logits_agree(trainer: LoraTrainer, base: str, folder: Path) -> None:
    """Train, save, and compare with plain transformers and PEFT, from pixels to logits."""
    trainer.adapter.reset()
    trainer.train("colors", ())
    trainer.save(folder, trainer.adapter.snapshot())
    plain = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    with_adapter = PeftModel.from_pretrained(plain, str(folder)).eval()
    domain = trainer.domains["colors"]
    for sample, prepared in list(zip(domain.splits.test, domain.test, strict=True))[:4]:
        ids = torch.tensor([domain.base.encode_prompt(domain.plan.question, sample).prompt_ids])
        pixels = torch.from_numpy(np.stack(sample.frames)).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.no_grad():
            wanted = with_adapter(input_ids=ids, pixel_values=pixels).logits[0, -1]
            got = trainer.adapter.base.hf_model.lm_head(trainer.adapter.forward([("colors", prepared)]).last[0])
            with with_adapter.disable_adapter():
                without = with_adapter(input_ids=ids, pixel_values=pixels).logits[0, -1]
        assert torch.allclose(got, wanted, atol=1e-4), (got - wanted).abs().max()
        assert (without - wanted).abs().max() > 1e-3  # otherwise the comparison is meaningless


def test_a_picture_that_the_base_cannot_be_shown_is_named(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = InputProcessor.encode

    def refuse(self: InputProcessor, prompt: str, images: Sequence[Image.Image | Clip] = ()) -> EncodedPrompt:
        if isinstance(images[0], Image.Image) and images[0].size != (1, 1):
            return encode(self, prompt, images)  # the picture that checks a base when it is loaded
        raise BadImage("the image processor rejects the images (5000 x 1)")

    plan = plan_of(base, ("colors",))
    monkeypatch.setattr(InputProcessor, "encode", refuse)
    wide = [Sample(Picture(Path("wide.png")), 0)] * 2
    monkeypatch.setattr(Picture, "__iter__", lambda self: iter([np.zeros((1, 1, 3), np.uint8)]))
    with pytest.raises(BadPlan, match=r"^wide.png: the image processor rejects"):
        trainer_of(plan, {"colors": Splits("classification", COLORS, wide, wide, wide, real=True)})


def test_a_sample_longer_than_the_base_takes_is_named(base: str) -> None:
    splits = color_splits(labels=("red", "green", "blue " * 1100))
    with pytest.raises(BadPlan, match=r"^a drawn picture: .* answer take \d{4,} tokens; .* takes at most 1024$"):
        trainer_of(plan_of(base, ("colors",)), {"colors": splits})


@pytest.mark.parametrize(("words", "mark"), [("a <image>", "<image>"), ("<eos>", "<eos>"), ("\U0001f697", "<unk>")])
def test_answers_with_special_tokens_are_refused(base: str, words: str, mark: str) -> None:
    """Two answers of unknown words only would have the same tokens, and each would count as correct for the other."""
    splits = color_splits(labels=(words, "green", "blue"))
    with pytest.raises(BadPlan, match=rf"the answer '{words}' contains {mark}, a special token of the base model"):
        trainer_of(plan_of(base, ("colors",)), {"colors": splits.in_words()})
    if mark == "<unk>":
        assert trainer_of(plan_of(base, ("colors",)), {"colors": splits}).domains["colors"].task.num_outputs == 3


def test_features_come_from_disk_the_second_time(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(base, ("colors",))
    first = trainer_of(plan, {"colors": color_splits()}, tmp_path).domains["colors"]
    assert list(tmp_path.iterdir())

    def encode(self: object, tasks: object) -> None:
        raise AssertionError("the vision tower ran again")

    monkeypatch.setattr("vlora.models.vision.encoder.VisionEncoder.encode", encode)
    second = trainer_of(plan, {"colors": color_splits()}, tmp_path).domains["colors"]
    for one, other in zip(first.train, second.train, strict=True):
        assert one.embeddings is not None and other.embeddings is not None
        assert torch.equal(one.embeddings, other.embeddings)
    # Other pictures have other hashes; a truncated file does not count.
    with pytest.raises(AssertionError, match="ran again"):
        trainer_of(plan, {"colors": color_splits({0: 1, 1: 2, 2: 0})}, tmp_path / "elsewhere")
    next(tmp_path.glob("*.safetensors")).write_bytes(b"torn")
    with pytest.raises(AssertionError, match="ran again"):
        trainer_of(plan, {"colors": color_splits()}, tmp_path)


def test_training_stops_when_nothing_more_is_learned(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four evaluations are not better than the second one, so training stops and restores its state."""
    plan, reported = plan_of(base, ("colors",), steps=24, patience=4, batch_size=2), StepsReported()
    trainer = trainer_of(plan, {"colors": color_splits()}, progress=reported)
    losses = iter((3.0, 2.0, 2.0, 2.5, 2.1, 2.0, 1.0))
    states: list[dict[str, torch.Tensor]] = []

    def held_back_loss(domains: Sequence[str]) -> float:
        states.append(trainer.adapter.snapshot())
        return next(losses)

    monkeypatch.setattr(trainer.evaluator, "held_back_loss", held_back_loss)
    trainer.adapter.reset()
    trainer.train("colors", ())
    assert len(states) == 6 and reported.steps[-1] == 12  # twelve evaluations in 24 steps
    assert all(torch.equal(value, states[1][name]) for name, value in trainer.adapter.snapshot().items())
    held_back = trainer.domains["colors"].held_back
    assert len(held_back) == 6
    drawn = trainer.draw(np.random.default_rng(0), "colors", 500)
    assert not {id(sample.ids) for _, sample in drawn} & {id(sample.ids) for sample in held_back}


def test_patience_lasts_as_long_in_a_joint_training(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve evaluations over all steps: the same number of samples per domain between two of them as alone."""
    plan, reported = plan_of(base, ("a", "b", "c"), steps=24, patience=12, batch_size=3), StepsReported()
    trainer = trainer_of(plan, dict.fromkeys(("a", "b", "c"), color_splits()), progress=reported)
    evaluated_after: list[int] = []

    def held_back_loss(domains: Sequence[str]) -> float:
        evaluated_after.append(reported.steps[-1])
        return 1.0

    monkeypatch.setattr(trainer.evaluator, "held_back_loss", held_back_loss)
    trainer.adapter.reset()
    trainer.train_together(("a", "b", "c"))
    assert evaluated_after == list(range(6, 73, 6))


def test_all_held_domains_are_rehearsed_even_in_a_small_batch(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("a", "b", "c", "d")
    plan = plan_of(base, names, steps=6, batch_size=4)
    trainer = trainer_of(plan, dict.fromkeys(names, color_splits(labels=COLORS)))
    seen: list[str] = []

    def backward(batch: Sequence[tuple[str, object]], at_once: int) -> float:
        seen.extend(name for name, _ in batch)
        return 0.0

    monkeypatch.setattr(trainer, "backward", backward)
    trainer.adapter.reset()
    for place, name in enumerate(names):
        trainer.train(name, names[:place])
    last = seen[-6 * 4 :]
    assert last.count("d") == 12 and {last.count(name) for name in "abc"} == {4}


def test_a_joint_training_has_the_time_of_the_domains_that_it_trains(
    mixed: LoraTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of squares trains by itself, in its own time."""
    before, reported = mixed.adapter.snapshot(), StepsReported()
    settings = mixed.plan.training.model_copy(update={"steps": 1000, "seconds": 10.0})
    monkeypatch.setattr(mixed, "plan", mixed.plan.model_copy(update={"training": settings}))
    monkeypatch.setattr(mixed, "progress", reported)
    monkeypatch.setattr(mixed, "backward", lambda batch, at_once: 1.0)
    monkeypatch.setattr("time.process_time", itertools.count().__next__)
    mixed.train_together(("colors", "squares"))
    assert reported.steps[-1] == 9  # the clock moves on by a second per step
    mixed.adapter.restore(before)
