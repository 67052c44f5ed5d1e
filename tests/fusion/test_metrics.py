"""The metric named in a plan decides, for answers of heads and for answers in words."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fusion.data.samples import Sample, Splits
from fusion.embedded.object_names import NUMBERS
from fusion.plan.tasks import METRICS, TASKS
from fusion.synthetic.streets import KINDS, ask_traffic, count_vehicles, find_things
from fusion.training.embedding import TextInput
from fusion.training.frozen_base import Prompt, greedy
from fusion.training.objectives import ForwardOutputs, answer_in_words, objective_of
from fusion.training.text_metrics import token_f1
from fusion.training.zero_shot import score_texts
from heads import Box, detection
from tests.families import VOCAB, build_model, make_prompt
from tests.fusion.small import color_splits, plan_of, trainer_of, write_base
from vlora.models.hf_model import HFModel, Positions

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
    answers, targets, scores = WORKED[task]
    assert scores.keys() == set(METRICS[task])
    words = task in ("vqa", "captioning", "referring")
    splits = splits_of(task, () if words else LABELS.get(task, ("a", "b", "c")), targets)
    objective = objective_of(splits, name)
    assert objective.metric(answers, targets) == pytest.approx(scores[name])  # type: ignore[arg-type]
    assert objective.metric(targets, targets) == 1.0  # type: ignore[arg-type]
    assert objective_of(splits).metric_name == METRICS[task][0]


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


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "qwen3_vl"])
def test_decoding_equals_transformers_generate(family: str) -> None:
    """Greedy, in float32, with images, prompts of two lengths in one call, and one that ends early."""
    model = build_model(family).eval()
    model.generation_config.eos_token_id = None
    texts = ((5, 6), (5, 9), (5, 6))
    prompts = [make_prompt(family, model, seed, num_images=1, text=text) for seed, text in enumerate(texts)]
    limit = 6
    wanted = []
    with torch.no_grad():
        for prompt in prompts:
            out = model.generate(**prompt.kwargs, max_new_tokens=limit, do_sample=False)
            wanted.append(out[0, prompt.kwargs["input_ids"].shape[1] :].tolist())
    end = wanted[0][3]
    model.generation_config.eos_token_id = end
    expected = [tuple(itertools.takewhile(lambda token: token != end, tokens)) for tokens in wanted]
    made = [embeddings_of(model, prompt.kwargs) for prompt in prompts]
    hf_model = HFModel(model)
    model.set_attn_implementation({"text_config": "eager"})
    assert greedy(hf_model, made, limit) == expected
    assert len(expected[0]) < limit == max(map(len, wanted))


def embeddings_of(model: torch.nn.Module, kwargs: dict[str, torch.Tensor]) -> Prompt:
    """The inputs that the model passes to its language model, captured from its forward."""
    seen: dict[str, Any] = {}

    def look(_: object, args: object, given: dict[str, Any]) -> None:
        seen.update(given, embeddings=given["inputs_embeds"][0], positions=given["position_ids"])

    hook = model.model.language_model.register_forward_pre_hook(look, with_kwargs=True)  # type: ignore[union-attr,operator]
    with torch.no_grad():
        model(**kwargs)
    hook.remove()
    positions = seen["positions"]
    if positions is None:
        positions = torch.arange(len(seen["embeddings"]))[None]
    visual = seen.get("visual_pos_masks")
    text_input = TextInput(
        seen["embeddings"],
        torch.zeros(len(seen["embeddings"]), dtype=torch.bool) if visual is None else visual[0],
        tuple(seen.get("deepstack_visual_embeds") or ()),
        None,
    )
    return Prompt(text_input, positions[:, 0] if positions.ndim == 3 else positions)


@pytest.mark.slow
def test_a_domain_in_words_is_scored_by_decoded_text(tmp_path: Path) -> None:
    """Trained to name colours: single correct words count, and agree with the exact matches of one forward."""
    torch.set_num_threads(1)
    plan = plan_of(write_base(tmp_path), ("colors",), steps=50, learning_rate=4e-3)
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


def read_of(
    last: torch.Tensor, images: list[torch.Tensor] | None = None, exact: list[bool] | None = None
) -> ForwardOutputs:
    count = len(last)
    images = images or [torch.zeros(4, 2)] * count
    return ForwardOutputs(
        last, images, images, [((2, 2),)] * count, torch.ones(count), torch.tensor(exact or [True] * count)
    )


def no_samples(task: str, labels: tuple[str, ...]) -> Splits:
    return Splits(task, labels, (), (), (), real=True)


def test_a_choice_is_the_likeliest_label() -> None:
    task = objective_of(no_samples("classification", ("left", "right")))
    head = nn.Linear(2, 2)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
        head.bias.zero_()
    read = read_of(torch.tensor([[3.0, 1.0], [0.0, 2.0], [1.0, 5.0]]))
    answers = task.answers(read, head, [0, 1, 0])
    assert answers == [0, 1, 1] and abs(task.metric(answers, [0, 1, 0]) - 2 / 3) < 1e-9
    assert task.loss(read, head, [0, 1, 1]) < task.loss(read, head, [1, 0, 0])


def test_words_are_right_word_for_word() -> None:
    task = objective_of(no_samples("vqa", ()))
    assert task.num_outputs == 0
    read = read_of(torch.zeros(4, 2), exact=[True, False, True, True])
    assert task.metric(task.answers(read, None, ["a"] * 4), ["a"] * 4) == 0.75


def test_detection_reads_every_image_token() -> None:
    boxes = (Box(1, 0.1, 0.1, 0.4, 0.4), Box(0, 0.6, 0.5, 0.9, 0.9))
    task = objective_of(no_samples("detection", ("car", "bus")))
    classes, edges = detection.targets(boxes, (2, 2))
    logits = torch.cat([nn.functional.one_hot(classes, 3) * 20.0, edges], -1)
    head = nn.Linear(task.num_outputs, task.num_outputs)
    with torch.no_grad():
        head.weight.copy_(torch.eye(task.num_outputs))
        head.bias.zero_()
    read = read_of(torch.zeros(1, task.num_outputs), [logits])
    answers = task.answers(read, head, [boxes])
    assert task.metric(answers, [boxes]) == 1.0
    assert task.metric(answers, [boxes[:1]]) < 1.0
    assert task.loss(read, head, [boxes]) < task.loss(read_of(read.last, [logits.flip(0)]), head, [boxes])


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
