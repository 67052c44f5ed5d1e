"""Metrics named in a plan, their confidence bounds, and decoding of answers in words."""

from __future__ import annotations

import bisect
import functools
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy.stats import binom

import heads
from fusion.data.load import DomainData
from fusion.data.samples import Sample, Splits, Target
from fusion.data.targets import answer_in_words
from fusion.embedded.drawing import NUMBERS
from fusion.plan.check import PlanChecked
from fusion.plan.estimate import Estimate, LoraSize
from fusion.plan.schema import HEADS, METRICS, READ_IMAGES, TASKS, WORDS, DomainPlan, Plan, RelativeThreshold
from fusion.plan.summary import POWER, print_summary, samples_needed
from fusion.synthetic.drawn import KINDS, ask_traffic, count_vehicles, find_things
from fusion.teachers.labelling import TeacherResult
from fusion.training.collator import TextInput
from fusion.training.frozen_base import Prompt, greedy
from fusion.training.objectives import objective_of
from fusion.training.scoring import score_texts, score_with_bound
from fusion.training.text_metrics import token_f1
from heads import Box
from tests.families import VOCAB, build_model
from tests.fusion.small import boxes as pictures_with_boxes
from tests.fusion.small import color_splits, plan_of, trainer_of
from vlora.models.hf_model import HFModel, Positions
from vlora.plan_files.errors import PlanText

BOX, MISSED = Box(0, 0.1, 0.1, 0.4, 0.4), Box(1, 0.6, 0.6, 0.9, 0.9)
LABELS = {"binary": ("no", "yes"), "regression": ("value",), "counting": tuple("0123456789")}
# By task: answers, targets, and the expected value of each metric.
WORKED: dict[str, tuple[list[object], list[object], dict[str, float]]] = {
    "classification": ([0, 0, 1], [0, 1, 1], {"accuracy": 2 / 3, "f1": 2 / 3}),
    "action": ([0, 0, 0], [0, 1, 2], {"accuracy": 1 / 3, "f1": 1 / 6}),
    "binary": ([1, 1, 0, 0], [1, 0, 1, 0], {"accuracy": 0.5, "f1": 0.5}),
    "counting": ([0, 2, 3, 9], [0, 1, 3, 5], {"accuracy": 0.5, "within_one": 0.75}),
    "multi_label": ([(0, 1), (2,)], [(0,), (2,)], {"f1": 4 / 5, "accuracy": 0.5}),
    "regression": ([1.0, 9.0], [1.1, 5.0], {"within": 0.5}),
    "detection": ([(BOX,)], [(BOX, MISSED)], {"f1": 2 / 3, "map": 0.5}),
    "vqa": (["a red car", "No"], ["a red bus", "no"], {"exact_match": 0.0, "accuracy": 0.0, "token_f1": 5 / 6}),
    "captioning": (["a b", "c"], ["a b", "d"], {"exact_match": 0.5, "accuracy": 0.5, "token_f1": 0.5}),
    "referring": (
        ["[0, 0, 500, 1000]"],
        ["[0, 0, 800, 1000]"],
        {"exact_match": 0.0, "accuracy": 0.0, "token_f1": 0.75, "overlap": 1.0},
    ),
}


def splits_of(task: str, labels: tuple[str, ...], targets: list[object]) -> Splits:
    samples = [Sample((), target) for target in targets]  # type: ignore[arg-type]
    return Splits(task, labels, samples, samples, samples, real=True)


@pytest.mark.parametrize(("task", "name"), [(task, name) for task in TASKS for name in METRICS[task]])
def test_the_plans_metric_is_used(task: str, name: str) -> None:
    assert task in WORKED, "add answers and targets with the metrics that they give to `WORKED`"
    answers, targets, scores = WORKED[task]
    assert scores.keys() == set(METRICS[task])
    words = task in ("vqa", "captioning", "referring")
    splits = splits_of(task, () if words else LABELS.get(task, ("a", "b", "c")), targets)
    objective = objective_of(splits, name)
    assert objective.metric(answers, targets) == pytest.approx(scores[name])  # type: ignore[arg-type]
    assert objective.metric(targets, targets) == 1.0  # type: ignore[arg-type]
    assert objective_of(splits).metric_name == METRICS[task][0]


def test_the_plans_tasks_are_those_of_the_heads() -> None:
    with_heads = {task for task, names in HEADS.items() if names[0] != WORDS}
    assert with_heads == heads.TASKS.keys(), "name every kind of head in `HeadKind` of fusion/plan/schema.py"
    assert {kind for kind, task in heads.TASKS.items() if task.reads_images} == READ_IMAGES


@given(st.lists(st.sampled_from("abcd")), st.lists(st.sampled_from("abcd")), st.randoms())
def test_f1_of_words_is_symmetric_and_ignores_order_and_case(one: list[str], other: list[str], rng: object) -> None:
    value = token_f1(" ".join(one), " ".join(other))
    left = list(other)
    hits = sum(word in left and not left.remove(word) for word in one)  # type: ignore[func-returns-value]
    precision, recall = (hits / len(words) if words else 0.0 for words in (one, other))
    wanted = 2 * precision * recall / (precision + recall) if hits else float(not one and not other)
    assert value == pytest.approx(wanted) == token_f1(" ".join(other).upper() + " !", ", ".join(reversed(one)))


def test_words_are_read_as_answers_of_the_task() -> None:
    """Answers of the base model before training; an invalid answer counts as 0 in every metric."""
    splits = splits_of("classification", ("Red", "green"), [0, 1, 1, 0])
    assert score_texts(splits, None, ["red", "a green thing", "GREEN", "green"]) == 0.5
    assert score_texts(splits, "f1", ["red", " Green", "green", "Red"]) == 1.0
    several = splits_of("multi_label", ("a", "b"), [(0, 1), ()])
    assert score_texts(several, "accuracy", ["b , a", "none"]) == 1.0
    assert score_texts(splits_of("counting", tuple("0123"), [2, 3]), "within_one", ["3", "many"]) == 0.5
    assert score_texts(splits_of("regression", ("value",), [2.0, 4.0]), None, ["2.1", "four"]) == 0.5
    assert score_texts(splits_of("detection", ("car",), [(BOX,)]), "map", ["a car"]) == 0.0
    assert score_texts(splits_of("vqa", (), ["A car"]), "token_f1", ["one car"]) == 0.5


@pytest.mark.slow
def test_a_domain_in_words_is_scored_by_decoded_text(base: str) -> None:
    """Trained to name colours: single correct words count, and agree with the exact matches of one forward."""
    plan = plan_of(base, ("colors",), steps=50, learning_rate=4e-3)
    named = plan.domains[0].model_copy(update={"metric": "token_f1"})
    plan = plan.model_copy(update={"domains": (named,), "confidence": 0.9})
    trainer = trainer_of(plan, {"colors": color_splits().in_words()})
    trainer.adapter.reset()
    trainer.train("colors", ())
    own = trainer.domains["colors"]
    texts = trainer.evaluator.decode_answers("colors", own.test)
    targets = [str(sample.target) for sample in own.test]
    score = trainer.evaluator.bounded_score("colors", own.test)
    assert score.value == pytest.approx(np.mean([token_f1(a, b) for a, b in zip(texts, targets, strict=True)]))
    assert score.value > 0.4 and score.lower < score.value
    exact = np.mean([a == b for a, b in zip(texts, targets, strict=True)])
    assert abs(exact - trainer.evaluator.accuracy_in_words("colors", own.test)) <= 1 / len(targets) + 1e-9


def no_samples(task: str, labels: tuple[str, ...]) -> Splits:
    return Splits(task, labels, (), (), (), real=True)


def test_the_answer_in_words_of_a_sample() -> None:
    rng = np.random.default_rng(0)
    for own, sample in (
        (no_samples("counting", NUMBERS[:6]), count_vehicles(rng)),
        (no_samples("vqa", ()), ask_traffic(rng)),
        (no_samples("detection", KINDS), find_things(rng)),
    ):
        words = answer_in_words(own, sample)
        assert bool(words) == (own.task != "detection")
        assert words == (own.labels[sample.target] if isinstance(sample.target, int) else words)
    assert answer_in_words(no_samples("vqa", ()), Sample((), "a car")) == "a car"


LIMIT = 6


def recomputed(hf_model: HFModel, prompt: Prompt) -> tuple[int, ...]:
    """Greedy tokens without a cache: each from a forward over the prompt and the tokens so far."""
    positions = Positions(prompt.positions.numpy())
    embeddings, tokens = prompt.input.embeddings, []
    for _ in range(LIMIT):
        rows = torch.from_numpy(positions.span(0, len(embeddings)))
        hidden = hf_model.text_model(inputs_embeds=embeddings[None], position_ids=rows[:, None]).last_hidden_state
        token = hf_model.lm_head(hidden[0, -1]).argmax()
        tokens.append(int(token))
        embeddings = torch.cat([embeddings, hf_model.embed(token[None])])
    return tuple(tokens)


@torch.no_grad()
def test_an_answer_continues_from_the_last_position_not_the_largest() -> None:
    model = build_model("qwen2_vl")
    hf_model = HFModel(model)
    model.set_attn_implementation({"text_config": "eager"})  # as `FrozenBase` trains
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for length, longest in ((9, 3), (9, 40), (14, 25)):  # the time index of a video of so many frames
        embeddings = hf_model.embed(torch.randint(VOCAB, (length,), generator=generator))
        positions = torch.arange(length).repeat(3, 1)
        positions[0, 2:-3] = torch.linspace(2, longest, length - 5).long()
        prompts.append(Prompt(TextInput(embeddings, torch.zeros(length, dtype=torch.bool), (), None), positions))
    expected = [recomputed(hf_model, prompt) for prompt in prompts]
    assert len(set(expected)) == 3
    assert greedy(hf_model, prompts, LIMIT) == expected


def share(answers: Any, targets: Any) -> float:
    return float(np.mean(np.equal(answers, targets)))


def tail(right: int, number: int, p: float) -> float:
    return sum(math.comb(number, k) * p**k * (1 - p) ** (number - k) for k in range(right, number + 1))


@pytest.mark.parametrize(("right", "number"), [(1, 10), (8, 10), (270, 300), (300, 300)])
def test_a_share_has_clopper_and_pearsons_bound(right: int, number: int) -> None:
    """At the bound, at least this many right answers have a probability of 1 - confidence."""
    answers = [1] * right + [0] * (number - right)
    score = score_with_bound(share, answers, [1] * number, mean=True, confidence=0.95)
    assert score.value == right / number
    assert tail(right, number, score.lower) == pytest.approx(0.05, rel=1e-6)


def test_a_bound_falls_with_the_confidence_and_is_low_for_few_samples() -> None:
    assert score_with_bound(share, [0] * 20, [1] * 20, mean=True, confidence=0.95) == (0.0, 0.0)
    answers = [1] * 80 + [0] * 20
    found = [score_with_bound(share, answers, [1] * 100, mean=True, confidence=c).lower for c in (0.8, 0.95, 0.99)]
    assert found == sorted(found, reverse=True) and found[0] < 0.8
    right: tuple[tuple[str, str, Target], ...] = (("detection", "map", (HERE,)), ("classification", "f1", 1))
    for task, name, answer in right:  # about Clopper and Pearson's; resampling only the samples would give 1
        metric = objective_of(Splits(task, ("a", "b", "c"), (), (), (), real=True), name).metric
        score = score_with_bound(metric, [answer] * 10, [answer] * 10, mean=False, confidence=0.95)
        assert score.value == 1.0 and score.lower == pytest.approx(0.05**0.1, abs=0.06)


@pytest.mark.parametrize("confidence", [0.8, 0.9])
def test_a_resampled_bound_is_the_quantile_that_the_confidence_leaves_out(confidence: float) -> None:
    """Against many resamples of the samples and a wrong one; a two-sided bound is more than the tolerance lower."""
    values = np.random.default_rng(0).random(40).tolist()
    found = score_with_bound(lambda a, _: float(np.mean(a)), values, values, mean=True, confidence=confidence)  # type: ignore[arg-type]
    means = np.random.default_rng(1).choice([*values, 0.0], (20_000, 40)).mean(1)
    assert found.value == pytest.approx(np.mean(values))
    assert found.lower == pytest.approx(np.quantile(means, 1 - confidence), abs=0.008)


Draw = Callable[[np.random.Generator, int], tuple[list[object], list[Target]]]
HERE, THERE = Box(0, 0.1, 0.1, 0.3, 0.3), Box(0, 0.6, 0.6, 0.9, 0.9)


def boxes(found: float) -> Draw:
    """One or two objects per picture; the detector finds the first with probability `found`, with higher confidence."""

    def draw(rng: np.random.Generator, number: int) -> tuple[list[object], list[Target]]:
        answers: list[object] = []
        targets: list[Target] = []
        for seen, count in zip(rng.random(number) < found, rng.integers(1, 3, number), strict=True):
            box = (HERE if seen else THERE._replace(image=1))._replace(score=rng.random() * (1 if seen else 0.9))
            answers.append((box,))
            targets.append((HERE, THERE)[:count])
        return answers, targets

    return draw


def labels(right: float) -> Draw:
    """Three labels, one of them rare; a wrong answer is the next label."""

    def draw(rng: np.random.Generator, number: int) -> tuple[list[object], list[Target]]:
        truth = rng.choice(3, number, p=(0.5, 0.35, 0.15))
        answers = np.where(rng.random(number) < right, truth, (truth + 1) % 3)
        return answers.tolist(), truth.tolist()

    return draw


DRAWS = [
    pytest.param("detection", "f1", boxes(0.7), marks=pytest.mark.exhaustive),
    pytest.param("detection", "map", boxes(0.7), marks=pytest.mark.exhaustive),
    pytest.param("classification", "f1", labels(0.8), marks=pytest.mark.exhaustive),
    ("classification", "f1", labels(0.98)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "name", "draw"), DRAWS)
def test_a_resampled_bound_has_its_nominal_coverage(task: str, name: str, draw: Draw) -> None:
    """The metric of a large sample serves as its true value."""
    metric = objective_of(Splits(task, ("a", "b", "c"), (), (), (), real=True), name).metric
    rng = np.random.default_rng(0)
    truth = metric(*draw(rng, 4_000))
    held = 0
    turns, number = (20, 30) if task == "detection" else (60, 60)  # boxes take longest to compare
    for turn in range(turns):
        answers, targets = draw(rng, number)
        held += score_with_bound(metric, answers, targets, mean=False, confidence=0.9, seed=turn).lower <= truth
    assert held >= binom.ppf(1e-3, turns, 0.9), held


def several(right: float) -> Draw:
    """Up to three labels per sample; each is recognized with probability `right`."""

    def draw(rng: np.random.Generator, number: int) -> tuple[list[object], list[Target]]:
        truth = rng.random((number, 3)) < 0.3
        answers = np.where(rng.random((number, 3)) < right, truth, ~truth)
        of = [[tuple(np.flatnonzero(row).tolist()) for row in rows] for rows in (answers, truth)]
        return list(of[0]), list(of[1])

    return draw


def yes_or_no(right: float) -> Draw:
    def draw(rng: np.random.Generator, number: int) -> tuple[list[object], list[Target]]:
        truth = rng.random(number) < 0.3
        return np.where(rng.random(number) < right, truth, ~truth).astype(int).tolist(), truth.astype(int).tolist()

    return draw


@pytest.mark.parametrize(
    ("task", "draw"), [("detection", boxes(0.7)), ("multi_label", several(0.8)), ("binary", yes_or_no(0.8))]
)
def test_a_bound_by_counts_is_that_of_the_metric(task: str, draw: Draw) -> None:
    chosen = ("no", "yes") if task == "binary" else ("a", "b", "c")
    objective = objective_of(Splits(task, chosen, (), (), (), real=True), "f1")
    answers, targets = draw(np.random.default_rng(3), 50)
    bound = functools.partial(score_with_bound, answers=answers, targets=targets, mean=False, confidence=0.9, seed=5)
    by_metric = bound(objective.metric)
    counts = objective.f1_counts(answers, targets)
    assert by_metric.lower < by_metric.value < 1 and len(counts) == 50
    assert bound(share, counts=counts) == by_metric
    other = objective_of(Splits(task, chosen, (), (), (), real=True), "map" if task == "detection" else "accuracy")
    assert other.f1_counts(answers, targets) == []


def passes(number: int, threshold: float, true: float) -> float:
    """The probability that the lower bound at 0.95 of `number` samples reaches the threshold, by the bound itself."""

    def bound(right: int) -> float:
        answers = [1] * right + [0] * (number - right)
        return score_with_bound(share, answers, [1] * number, mean=True, confidence=0.95).lower

    enough = bisect.bisect_left(range(number + 1), threshold, key=bound)  # correct answers that reach it
    return tail(enough, number, true)


@pytest.mark.parametrize(("threshold", "better"), [(0.6, 0.2), (0.8, 0.15), (0.9, 0.08)])
def test_a_good_adapter_passes_with_the_wanted_probability(threshold: float, better: float) -> None:
    needed = samples_needed(threshold, better, 0.95)
    assert needed is not None
    assert passes(needed, threshold, threshold + better) >= POWER
    assert all(passes(n, threshold, threshold + better) < POWER for n in range(needed - 6, needed))


def test_perfect_adapters_and_unknown_thresholds_need_the_most_samples() -> None:
    assert samples_needed(0.98, 0.05, 0.95) == math.ceil(math.log(0.05) / math.log(0.98))
    most = samples_needed(None, 0.05, 0.95)
    known = [samples_needed(threshold / 20, 0.05, 0.95) for threshold in range(1, 20)]
    assert most is not None and all(needed is not None and needed <= 1.01 * most for needed in known)
    assert samples_needed(None, 0.001, 0.95) is None


@pytest.mark.parametrize(
    ("minus", "power"),
    [
        (0.1, "needs 82 validation samples at a confidence of 0.95, so that an adapter 0.1 above the threshold passes"),
        (0.0, "an adapter as good as its teacher passes in at most 5% of runs at a confidence of 0.95 (warning: set"),
    ],
)
def test_the_margin_of_a_relative_threshold_is_the_plans(minus: float, power: str) -> None:
    threshold = RelativeThreshold(relative_to="teacher", minus=minus)
    plan = Plan(domains=(DomainPlan(name="a", source="made", question="what?", threshold=threshold),))
    data = {"a": DomainData(color_splits(), TeacherResult("theirs", 0.8 + minus))}
    printed = io.StringIO()
    estimate = Estimate(1.0, 2.0, 1.0, 0.1, 32, 1, 32, "cpu", 1, 10**9, 10**7)
    print_summary(PlanChecked(plan, PlanText(), data, LoraSize(1, 1)), estimate, Console(file=printed))
    assert f"power     {power}" in printed.getvalue()


@pytest.mark.parametrize(("real", "threshold", "warned"), [(True, 0.4, True), (True, 0.3, False), (False, 0.4, False)])
def test_a_detection_domain_is_said_what_to_expect(real: bool, threshold: float, warned: bool) -> None:
    """On photographs less than on rendered streets."""
    plan = Plan(domains=(DomainPlan(name="a", source="made", question="what?", threshold=threshold),))
    train, validation, test = map(pictures_with_boxes, (70, 2, 2), range(3))
    splits = Splits("detection", ("square",), train, validation, test, real=real)
    printed = io.StringIO()
    checked = PlanChecked(plan, PlanText(), {"a": DomainData(splits, notes=("of a reader",))}, LoraSize(1, 10**6))
    estimate = Estimate(1.0, 2.0, 1.0, 0.1, 32, 1, 32, "cpu", 1, 3 * 2**29, 74 * 10**6)
    print_summary(checked, estimate, Console(file=printed))
    shown = printed.getvalue()
    assert "expected  F1 0.39 was measured with 349" in shown and "; there are 70" in shown
    assert ("warning: the threshold is above that; let a detector label more" in shown) == warned
    assert "note 1    of a reader" in shown and "about 1.5 GiB" in shown
    assert "74 MB for image features (1000 kB a picture; they stay in --out), and 4.0 MB for each" in shown
