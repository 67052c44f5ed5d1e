"""Training with little memory, several heads and words in one adapter; PEFT and the engine give the same answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForImageTextToText

from fusion.data.frames import Picture
from fusion.data.samples import Sample, Splits, Target
from fusion.embedded import checkpoint_path
from fusion.plan.schema import DomainPlan, LoraPlan, Plan, TrainingPlan
from fusion.training.checkpoint import Checkpoint, State
from fusion.training.collator import group_by_length
from fusion.training.objectives import ForwardOutputs, HeadObjective
from fusion.training.run_cache import RunCache
from fusion.training.scoring import decode_in_parts
from fusion.training.steps import halving
from fusion.training.trainer import LoraTrainer
from heads import Box, load_heads
from tests.fusion.small import (
    COLORS,
    StepsReported,
    ask_engine,
    boxes,
    color_splits,
    colors,
    inputs,
    picture,
    plan_of,
    texts_of,
    trainer_of,
    value_of,
)
from vlora.errors import BadImage, BadPlan
from vlora.models.processing import EncodedPrompt, InputProcessor
from vlora.models.vision.images import Clip
from vlora.types import SamplingParams

pytestmark = pytest.mark.slow


def clips(count: int, seed: int) -> list[Sample]:
    """Three frames of one colour, then one of another."""
    rng = np.random.default_rng(seed)
    pairs = rng.permutation(list(itertools.permutations(range(3), 2)) * count)[:count]
    return [
        Sample((*(picture(first, rng) for _ in range(3)), picture(last, rng)), int(last))
        for first, last in pairs.tolist()
    ]


def square_splits() -> Splits:
    return Splits("detection", ("square",), boxes(30, 0), boxes(10, 1), boxes(10, 2), real=False)


@pytest.fixture(scope="module")
def mixed(base: str) -> LoraTrainer:
    """Pictures, clips, and a detection domain in one adapter, in float32."""
    moving = Splits("action", COLORS, clips(12, 0), clips(6, 1), clips(6, 2), real=False)
    splits = {"colors": color_splits(), "squares": square_splits(), "clips": moving}
    trainer = trainer_of(plan_of(base, tuple(splits), bfloat16=False, steps=3), splits)
    trainer.adapter.reset()
    trainer.train_together(tuple(splits))
    return trainer


# -- gradients ---------------------------------------------------------------------------------------------------------


def gradients(trainer: LoraTrainer, at_once: int = 11) -> dict[str, torch.Tensor]:
    """The gradients of a mixed batch, computed in parts."""
    rng = np.random.default_rng(0)
    batch = [pair for name, count in (("colors", 5), ("squares", 6)) for pair in trainer.draw(rng, name, count)]
    parameters = trainer.adapter.parameters
    for parameter in parameters.values():
        parameter.requires_grad_(True)
        parameter.grad = None
    trainer.backward(batch, at_once)
    found = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return found


def assert_near(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys() and len(wanted) > 25
    for name, one in wanted.items():
        assert torch.allclose(found[name], one, rtol=1e-3, atol=1e-6 * max(1.0, float(one.abs().max()))), name


def test_parts_of_a_batch_and_recomputed_activations_give_the_same_gradient(mixed: LoraTrainer) -> None:
    """Conflicts are measured in eval mode, in which transformers recomputes nothing by itself."""
    recomputed: list[object] = []

    def checkpoint(call: Callable[..., object], *inputs: object) -> object:
        recomputed.append(call)
        return torch.utils.checkpoint.checkpoint(call, *inputs, use_reentrant=False)

    whole, model = gradients(mixed), mixed.adapter.base.model
    for at_once in (1, 4, 6):
        assert_near(gradients(mixed, at_once), whole)
    kept = mixed.gradients(("colors",), 1)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.modules():
        if getattr(layer, "gradient_checkpointing", False):
            layer._gradient_checkpointing_func = checkpoint  # noqa: SLF001
    try:
        again, in_eval = mixed.gradients(("colors",), 1), len(recomputed)
        assert not any(module.training for module in mixed.adapter.model.modules())
        mixed.adapter.model.train()
        assert_near(gradients(mixed), whole)
    finally:
        model.gradient_checkpointing_disable()
        mixed.adapter.model.eval()
    assert 0 < in_eval < len(recomputed) and torch.equal(again["colors"], kept["colors"])


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_each_row_is_grouped_once_with_rows_of_similar_length(lengths: list[int]) -> None:
    groups = group_by_length(lengths)
    assert sorted(row for rows in groups for row in rows) == list(range(len(lengths)))
    for rows in groups:
        assert max(lengths[row] for row in rows) <= 1.25 * min(lengths[row] for row in rows)
    shortest = sorted(min(lengths[row] for row in rows) for rows in groups)
    assert all(other > 1.25 * one for one, other in itertools.pairwise(shortest))
    assert group_by_length([81, 80, 82]) == [[0, 1, 2]] and group_by_length([300, 80, 81]) == [[1, 2], [0]]


def test_each_step_has_its_own_gradient_and_the_base_stays(mixed: LoraTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    before, backward = mixed.adapter.snapshot(), mixed.backward
    frozen = {name: p.clone() for name, p in mixed.adapter.model.named_parameters() if "lora_" not in name}
    calls = 0

    def fresh(batch: Any, at_once: int) -> float:
        nonlocal calls
        calls += 1
        assert not any(p.grad is not None and p.grad.any() for p in mixed.adapter.parameters.values())
        return backward(batch, at_once)

    mixed.adapter.model.zero_grad()
    monkeypatch.setattr(mixed, "backward", fresh)
    mixed.train("colors", ())
    assert calls == 3 and not torch.equal(*(one["head.colors.weight"] for one in (before, mixed.adapter.snapshot())))
    assert all(torch.equal(p, frozen[name]) for name, p in mixed.adapter.model.named_parameters() if name in frozen)
    assert len(frozen) > 20
    mixed.adapter.restore(before)


# -- heads -------------------------------------------------------------------------------------------------------------


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
    assert mixed.evaluator.calibrated("squares").task == served  # type: ignore[union-attr]
    own.validation = validation
    mixed.adapter.restore(before)
    for name, kept in (("squares", True), ("colors", False)):  # only what calibration decides is kept from training
        own = mixed.domains[name]
        drawn = {id(sample.ids) for _, sample in mixed.draw(np.random.default_rng(0), name, 500)}
        assert len(own.held_back) == len(own.train) // 10
        assert bool(drawn & {id(sample.ids) for sample in own.held_back}) == (not kept)


class Shown(NamedTuple):
    """A noise picture with a left or right half coloured to some degree."""

    color: int
    right: bool
    light: int

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        pixels = rng.integers(0, 60, (96, 96, 3))
        pixels[:, 48 * self.right : 48 + 48 * self.right, self.color] += self.light
        return pixels.astype(np.uint8)


# Target answer of a picture by task, and its labels. Detection and regression have no words.
TARGETS: dict[str, tuple[tuple[str, ...], Callable[[Shown], Target]]] = {
    "classification": (COLORS, lambda shown: shown.color),
    "detection": (COLORS, lambda shown: (Box(shown.color, 0.5 * shown.right, 0, 0.5 + 0.5 * shown.right, 1),)),
    "regression": (("light",), lambda shown: (float(shown.light),)),
}


def halves(task: str) -> Splits:
    parts = list[list[Sample]]()
    for seed, count in enumerate((60, 30, 30)):
        rng = np.random.default_rng(seed)
        drawn = [Shown(int(rng.integers(3)), bool(rng.integers(2)), int(rng.integers(80, 190))) for _ in range(count)]
        parts.append([Sample((shown.draw(rng),), TARGETS[task][1](shown)) for shown in drawn])
    train, validation, test = parts
    return Splits(task, TARGETS[task][0], train, validation, test, real=False)


@torch.no_grad()
def loss_of(trainer: LoraTrainer, task: str) -> float:
    own = trainer.domains[task]
    ((part, outputs),) = trainer.evaluator.forward(task, own.test)
    return own.task.loss(outputs, trainer.adapter.heads[task], [sample.target for sample in part]).item()


def test_heads_of_three_tasks_share_an_adapter_with_words(base: str, tmp_path: Path) -> None:
    """Each is calibrated and served as trained; the accuracy in words is kept when tasks without words are added."""
    plans = tuple(DomainPlan(name=task, source="made", question=f"{task} ?", threshold=0.5) for task in TARGETS)
    settings = TrainingPlan(steps=35, batch_size=12, rehearsal=0.5)
    plan = Plan(base=base, lora=LoraPlan(rank=8, alpha=16), training=settings, domains=plans)
    trainer = trainer_of(plan, {task: halves(task) for task in TARGETS})
    colored = trainer.domains["classification"].test
    in_words = lambda: trainer.evaluator.accuracy_in_words("classification", colored)  # noqa: E731
    trainer.adapter.reset()
    states: list[State] = []
    words = []
    for place, task in enumerate(TARGETS):
        trainer.adapter.add_head(task)
        untrained = loss_of(trainer, task)
        trainer.train(task, tuple(TARGETS)[:place])
        states.append(trainer.adapter.snapshot())
        words.append(in_words())
        assert loss_of(trainer, task) < 0.8 * untrained, task
    assert words[0] > 0.8 and words[-1] >= words[0] - 0.15, "rehearsal keeps the words"
    before, after, later = states
    factors = [name for name in before if name.startswith("lora.")]
    assert factors and all(torch.equal(before[name], after[name]) for name in factors), "boxes change no factor"
    assert any(not torch.equal(later[name], after[name]) for name in factors), "a regression head does"
    ours = [name for name in after if name.startswith("head.detection.")]
    assert len(ours) == 4 and all(torch.equal(later[name], after[name]) for name in ours), "and leaves this head"
    # Negative control: the same training without rehearsal of colours.
    trainer.plan = plan.model_copy(update={"training": settings.model_copy(update={"learning_rate": 0.02})})
    trainer.train("regression", ())
    assert in_words() < words[-1] - 0.3
    trainer.adapter.restore(later)
    trainer.save(tmp_path, later)
    heads = load_heads(tmp_path)
    assert heads.keys() == TARGETS.keys()
    for task, domain in trainer.domains.items():
        assert heads[task].task.parameters.get("temperature") != 1.0  # a regression has none
        found = [value_of(parts[-1].head) for parts in ask_engine(base, domain, tmp_path, head=task)]
        metrics = heads[task].task.metrics(found, [sample.target for sample in domain.splits.test])
        # Training evaluates in bfloat16 autocast, serving in float32: two samples may be answered differently.
        assert abs(metrics[domain.task.metric_name] - trainer.evaluator.score(task, domain.test)) < 2.1 / len(found)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_loss_or_gradient_that_is_not_finite_ends_a_training_of_which_nothing_is_stored(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = {"colors": color_splits(), "squares": square_splits()}
    mixed = trainer_of(plan_of(base, tuple(splits), steps=3, batch_size=4), splits)
    cache = RunCache(mixed, Checkpoint(tmp_path / "checkpoint", resume=False), inputs(*splits), rehearsal=0.5)
    for owner, domain, message in (
        (mixed.adapter, "colors", r"step 2 has a loss of nan .* `training.learning_rate` \(now 0.003\), or set"),
        (mixed.domains["squares"].task, "squares", "step 2 has a loss of nan "),
        (None, "colors", r"step 1 has a loss of \d.* a gradient of norm (inf|nan)"),
    ):
        parameter = next(iter(mixed.adapter.lora.values()))
        with monkeypatch.context() as patched, pytest.raises(BadPlan, match=rf"^training {domain}: {message}"):
            if owner is None:
                parameter.requires_grad_(True)
                hook = parameter.register_hook(lambda gradient: gradient * float("inf"))
            else:
                loss_of, steps = owner.loss, itertools.count(1)  # type: ignore[attr-defined]
                spoilt = lambda *given, of=loss_of, at=steps: of(*given) * (float("nan") if next(at) == 2 else 1)  # noqa: E731
                patched.setattr(owner, "loss", spoilt)
            cache((domain,))
        assert all(bool(tensor.isfinite().all()) for tensor in mixed.adapter.snapshot().values())
        mixed.adapter.model.zero_grad()
        mixed.adapter.model.eval()
    hook.remove()
    assert not list((tmp_path / "checkpoint").iterdir())


def test_out_of_memory_goes_on_with_smaller_parts_to_the_same_adapter(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(
        plan_of(base, ("colors",), bfloat16=False, steps=4, learning_rate=1e-3), {"colors": color_splits()}
    )
    trainer.adapter.reset()
    roomy_losses = trainer.train("colors", ())
    roomy, forward = trainer.adapter.snapshot(), trainer.adapter.forward
    sizes: list[int] = []
    lines: list[str] = []

    def short(batch: list[Any]) -> ForwardOutputs:
        sizes.append(len(batch))
        if len(batch) > 6 or (len(batch) == 6 and sizes.count(6) == 4):  # after the first part has added its gradient
            raise torch.OutOfMemoryError(f"no room for {len(batch)}")
        return forward(batch)

    with monkeypatch.context() as patched:
        patched.setattr(trainer.adapter, "forward", short)
        patched.setattr(trainer.progress, "say", lines.append)
        trainer.adapter.reset()
        assert trainer.train("colors", ()) == pytest.approx(roomy_losses, rel=1e-4)
        assert trainer.evaluator.score("colors", trainer.domains["colors"].validation) >= 0
    assert sizes[:6] == [12, 6, 6, 6, 6, 3] and sizes.count(12) == 1, "no larger size is tried again"
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


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), no_room_on_a_cpu(), RuntimeError("do not match")])
def test_a_single_sample_that_does_not_fit_and_other_errors_end_a_training(error: RuntimeError) -> None:
    def never(size: int) -> None:
        raise error

    sizes: list[int] = []
    other = "match" in str(error)
    with pytest.raises(RuntimeError if other else BadPlan, match=r"match|out of memory with a single sample"):
        halving(5, never, sizes.append)
    assert sizes == ([] if other else [3, 2, 1])


@pytest.mark.parametrize(
    ("labels", "words", "message"),
    [
        (("red", "green", "blue " * 1100), False, r"^a drawn picture: .* answer take \d{4,} tokens; .* most 1024$"),
        (("a <image>", "green", "blue"), True, "the answer 'a <image>' contains <image>, a special token of the base"),
        (("<eos>", "green", "blue"), True, "the answer '<eos>' contains <eos>, a special token of the base model"),
        # Answers of unknown words only would have the same tokens, and each would count as correct for the other.
        (("\U0001f697", "green", "blue"), True, "contains <unk>, a special token of the base model"),
    ],
)
def test_samples_that_the_base_cannot_take_are_named(
    base: str, labels: tuple[str, ...], words: bool, message: str
) -> None:
    splits = color_splits(labels=labels)
    with pytest.raises(BadPlan, match=message):
        trainer_of(plan_of(base, ("colors",)), {"colors": splits.in_words() if words else splits}).domains[
            "colors"
        ].encode()
    if "<unk>" in message:
        assert trainer_of(plan_of(base, ("colors",)), {"colors": splits}).domains["colors"].task.num_outputs == 3


def test_a_picture_that_the_base_cannot_be_shown_is_named(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = InputProcessor.encode

    def refuse(self: InputProcessor, prompt: str, images: Sequence[Image.Image | Clip] = ()) -> EncodedPrompt:
        if isinstance(images[0], Image.Image) and images[0].size != (1, 1):
            return encode(self, prompt, images)  # the picture that checks a base when it is loaded
        raise BadImage("the image processor rejects the images (5000 x 1)")

    monkeypatch.setattr(InputProcessor, "encode", refuse)
    wide = [Sample(Picture(Path("wide.png")), 0)] * 2
    monkeypatch.setattr(Picture, "__iter__", lambda self: iter([np.zeros((1, 1, 3), np.uint8)]))
    with pytest.raises(BadPlan, match=r"^wide.png: the image processor rejects"):
        splits = Splits("classification", COLORS, wide, wide, wide, real=True)
        trainer_of(plan_of(base, ("colors",)), {"colors": splits}).domains["colors"].encode()


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "patience", "losses", "evaluated", "best"),
    [
        # Four evaluations are not better than the second one, so training stops and restores its state.
        ("a", 4, (3.0, 2.0, 2.0, 2.5, 2.1, 2.0), range(2, 13, 2), 1),
        # Twelve evaluations over all steps: the same number of samples per domain between two of them as alone.
        ("abc", 12, (1.0,) * 12, range(6, 73, 6), 0),
    ],
)
def test_training_stops_when_nothing_more_is_learned(
    base: str, monkeypatch: pytest.MonkeyPatch, names: str, patience: int, losses: Any, evaluated: range, best: int
) -> None:
    plan, reported = plan_of(base, tuple(names), steps=24, patience=patience, batch_size=2), StepsReported()
    trainer = trainer_of(plan, dict.fromkeys(names, color_splits()), progress=reported)
    states: list[State] = []
    after: list[int] = []

    def held_back_loss(domains: Sequence[str]) -> float:
        states.append(trainer.adapter.snapshot())
        after.append(reported.steps[-1])
        return float(losses[len(after) - 1])

    monkeypatch.setattr(trainer.evaluator, "held_back_loss", held_back_loss)
    trainer.adapter.reset()
    trainer.train_together(tuple(names))
    assert after == list(evaluated)
    assert all(torch.equal(value, states[best][name]) for name, value in trainer.adapter.snapshot().items())
    held_back = trainer.domains["a"].held_back
    drawn = trainer.draw(np.random.default_rng(0), "a", 500)
    assert len(held_back) == 6 and not {id(s.ids) for _, s in drawn} & {id(s.ids) for s in held_back}


def test_all_held_domains_are_rehearsed_even_in_a_small_batch(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names, seen = ("a", "b", "c", "d"), list[str]()
    trainer = trainer_of(plan_of(base, names, steps=6, batch_size=4), dict.fromkeys(names, color_splits()))

    def backward(batch: Sequence[tuple[str, object]], at_once: int) -> float:
        seen.extend(name for name, _ in batch)
        return 0.0

    monkeypatch.setattr(trainer, "backward", backward)
    trainer.adapter.reset()
    for place, name in enumerate(names):
        trainer.train(name, names[:place])
    last = seen[-6 * 4 :]
    assert last.count("d") == 12 and {last.count(name) for name in "abc"} == {4}


def test_the_order_of_the_domains_in_the_adapter_changes_nothing(base: str) -> None:
    """A stored training is found by the domains beside which it ran, in any order."""
    names = ("a", "b", "c")
    trainer = trainer_of(plan_of(base, names, steps=3, batch_size=5), dict.fromkeys(names, color_splits()))
    trainer.adapter.reset()
    trainer.train_together(names[:2])
    before = trainer.adapter.snapshot()
    results = []
    for beside in (("a", "b"), ("b", "a")):
        trainer.adapter.restore(before)
        results.append((trainer.train("c", beside, rehearsal=0.6), trainer.adapter.snapshot()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())


@pytest.mark.parametrize(("domains", "steps"), [("colors", 9), ("colors squares", 9), ("colors clips", 19)])
def test_a_training_has_the_time_of_the_domains_that_it_trains(
    mixed: LoraTrainer, monkeypatch: pytest.MonkeyPatch, domains: str, steps: int
) -> None:
    """The head of squares trains by itself, in its own time."""
    before, reported = mixed.adapter.snapshot(), StepsReported()
    settings = mixed.plan.training.model_copy(update={"steps": 1000, "seconds": 10.0})
    monkeypatch.setattr(mixed, "plan", mixed.plan.model_copy(update={"training": settings}))
    monkeypatch.setattr(mixed, "progress", reported)
    monkeypatch.setattr(mixed, "backward", lambda batch, at_once: 1.0)
    monkeypatch.setattr("time.process_time", itertools.count().__next__)
    mixed.train_together(tuple(domains.split()))
    assert reported.steps[-1] == steps  # the clock moves on by a second per step
    mixed.adapter.restore(before)


def test_a_head_that_is_trained_by_itself_is_the_same_in_every_adapter_and_trained_once(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = {"colors": color_splits(), "squares": square_splits()}
    trainer, reported = trainer_of(plan_of(base, tuple(splits), steps=2), splits), StepsReported()
    monkeypatch.setattr(trainer, "progress", reported)
    heads = []
    for train in (lambda: trainer.train("squares", ()), lambda: trainer.train_together(tuple(splits))):
        trainer.adapter.reset()
        losses = train()
        heads.append({name: value for name, value in trainer.adapter.snapshot().items() if "head.squares" in name})
    trainer.train("squares", ("colors",))  # into the adapter that has its head
    heads.append({name: value for name, value in trainer.adapter.snapshot().items() if "head.squares" in name})
    assert all(torch.equal(one[name], heads[0][name]) for one in heads[1:] for name in heads[0]) and losses
    assert reported.started.count("training the head of squares") == 1


# -- answers of PEFT and the engine ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lora",
    [
        LoraPlan(rank=4, alpha=8, rslora=True),
        LoraPlan(rank=4, targets=("q_proj", "v_proj")),
        LoraPlan(rank=4, alpha=8, vision=True),
    ],
    ids=["rslora", "targets", "vision"],
)
def test_peft_gives_the_same_logits_from_pixels(base: str, lora: LoraPlan, tmp_path: Path) -> None:
    plan = plan_of(base, ("colors",), lora=lora, steps=6, bfloat16=False)
    trainer = trainer_of(plan, {"colors": color_splits()})
    trainer.adapter.reset()
    trainer.train("colors", ())
    trainer.save(tmp_path, trainer.adapter.snapshot())
    plain = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    with_adapter = PeftModel.from_pretrained(plain, str(tmp_path)).eval()
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
    changed = {name for name, p in trainer.adapter.lora.items() if "lora_B" in name and p.detach().abs().max() > 0}
    for part in ("vision_tower", "multi_modal_projector", "language_model"):
        assert any(part in name for name in changed) == (lora.vision or part == "language_model"), part


# -- before training ---------------------------------------------------------------------------------------------------

LIMIT = 6


def asked_clips() -> Splits:
    """Two frames each, and questions of two lengths."""
    single = colors(16, 5)
    samples = [
        Sample((one.frames[0], other.frames[0]), "red", "what is it ?" if place % 2 else "")
        for place, (one, other) in enumerate(zip(single[::2], single[1::2], strict=True))
    ]
    return Splits("vqa", (), samples, samples, samples, real=False)


@pytest.mark.parametrize("make", [color_splits, asked_clips])
def test_answers_of_the_base_equal_the_engines_also_in_small_parts(
    make: Callable[[], Splits], monkeypatch: pytest.MonkeyPatch
) -> None:
    splits, base = make(), checkpoint_path()  # random weights give no meaningful answers
    domain = trainer_of(plan_of(base, ("fields",)), {"fields": splits}).domains["fields"]
    expected = texts_of(base, ask_engine(base, domain, sampling=SamplingParams(max_tokens=LIMIT)))
    answers = decode_in_parts(domain, domain.test, LIMIT)
    assert answers == expected
    assert len(set(answers)) > 1  # otherwise the comparison is meaningless
    decode, sizes = domain.base.decode_answers, list[int]()

    def short(samples: list[Any], limit: int) -> list[str]:
        sizes.append(len(samples))
        if len(samples) > 8:
            raise torch.OutOfMemoryError
        return decode(samples, limit)

    monkeypatch.setattr(domain.base, "decode_answers", short)
    assert decode_in_parts(domain, domain.test, LIMIT) == expected
    assert sizes == ([30, 16, 8, 8, 8, 6] if make is color_splits else [8])
