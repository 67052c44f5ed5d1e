"""Score of the base model before training, with its text parsed as an answer of the domain's task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from fusion.data.samples import Splits, Target
from fusion.data.targets import reader
from fusion.training.accumulate import halving
from fusion.training.collator import EncodedSample
from fusion.training.domain import Domain
from fusion.training.objectives import answer_in_words, metric_of_some, objective_of

_MIN_TOKEN_LIMIT = 8  # minimum token limit for an answer of the base model
MAX_SAMPLES = 100  # test samples per domain, since decoding an answer takes many steps
_AT_ONCE = 32  # samples per batch, with keys and values in memory


def score_before_training(domain: Domain) -> float:
    """The domain's metric of the base model's answers on the first test samples.

    Call it before a trainer is created on the domain's base, which adds an adapter to it.
    """
    own = dataclasses.replace(domain.splits, test=domain.splits.test[:MAX_SAMPLES])
    return score_texts(own, domain.plan.metric, answers_before_training(domain))


def answers_before_training(domain: Domain) -> list[str]:
    """The base model's answers to the domain's first encoded test samples."""
    tokenizer = domain.base.processor.tokenizer
    wanted = [answer_in_words(domain.splits, sample) for sample in domain.splits.test[:MAX_SAMPLES]]
    longest = max(_MIN_TOKEN_LIMIT, *(len(tokenizer(words)["input_ids"]) for words in wanted))
    return decode_in_parts(domain, domain.test[:MAX_SAMPLES], longest)


def decode_in_parts(domain: Domain, samples: Sequence[EncodedSample], longest: int) -> list[str]:
    """Decode at most `longest` tokens, with as many samples per batch as memory allows."""
    texts: list[str] = []
    at_once = _AT_ONCE
    what = f"asking the base model about {domain.plan.name}"
    with domain.base.progress.work(what, len(samples), "samples") as update:
        while len(texts) < len(samples):

            def attempt(size: int, left: Sequence[EncodedSample] = samples[len(texts) :]) -> list[str]:
                return domain.base.decode_answers(left[:size], longest)

            found, at_once = halving(at_once, attempt, lambda size: None)
            texts += found
            update(len(texts))
    return texts


def score_texts(splits: Splits, metric: str | None, texts: Sequence[str]) -> float:
    """The domain's metric of one text per test sample, ignoring case. metric: None for the task's first.

    A text that is not an answer of the task (which is every text for detection) counts as 0.
    """
    read = _reader(splits)
    answers: list[object] = []
    for words in texts:
        try:
            answers.append(read(words.strip().lower()))
        except ValueError:
            answers.append(None)
    targets = [sample.target.lower() if isinstance(sample.target, str) else sample.target for sample in splits.test]
    return metric_of_some(objective_of(splits, metric), answers, targets)


def _reader(splits: Splits) -> Callable[[str], Target]:
    read = reader(splits.task, tuple(label.lower() for label in splits.labels))
    if splits.task != "multi_label":
        return read
    return lambda words: read(tuple(each.strip() for each in words.split(",") if each.strip() != "none"))
