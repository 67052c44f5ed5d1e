"""How good the base model is before any training: its words, read as an answer of the domain's task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from fusion.data.samples import Splits, Target
from fusion.data.targets import reader
from fusion.training.accumulate import halving
from fusion.training.collator import Prepared
from fusion.training.objectives import answer_in_words, metric_of_some, task_of
from fusion.training.train import Domain

_LONGEST_LABEL = 8  # tokens that the base model may take for a short answer
MOST_ASKED = 100  # test samples of a domain: an answer in words takes many steps
_AT_ONCE = 32  # of these, whose keys and values are in memory


def score_before_training(domain: Domain) -> float:
    """The domain's metric on its first test samples, of what the base model says when asked its question. To be called
    while that is what the domain's base is: before a trainer is made on it."""
    own = dataclasses.replace(domain.splits, test=domain.splits.test[:MOST_ASKED])
    return score_of_words(own, domain.plan.metric, said_before_training(domain))


def said_before_training(domain: Domain) -> list[str]:
    """What the base model says of the domain's first test samples, of those that are prepared."""
    tokenizer = domain.base.processor.tokenizer
    wanted = [answer_in_words(domain.splits, sample) for sample in domain.splits.test[:MOST_ASKED]]
    longest = max(_LONGEST_LABEL, *(len(tokenizer(words)["input_ids"]) for words in wanted))
    return _said(domain, domain.test[:MOST_ASKED], longest)


def _said(domain: Domain, samples: Sequence[Prepared], longest: int) -> list[str]:
    """In `longest` tokens, of as many samples at once as memory has room for."""
    said: list[str] = []
    at_once = _AT_ONCE
    what = f"asking the base model about {domain.plan.name}"
    with domain.base.progress.work(what, len(samples), "samples") as moved:
        while len(said) < len(samples):

            def attempt(size: int, left: Sequence[Prepared] = samples[len(said) :]) -> list[str]:
                return domain.base.said(left[:size], longest)

            found, at_once = halving(at_once, attempt, lambda size: None)
            said += found
            moved(len(said))
    return said


def score_of_words(splits: Splits, metric: str | None, said: Sequence[str]) -> float:
    """The domain's metric of what was said of every test sample, whatever its case; None for the task's first metric.
    Words that are no answer of the task (boxes never are) count as samples that are worth nothing."""
    read = _reader(splits)
    answers: list[object] = []
    for words in said:
        try:
            answers.append(read(words.strip().lower()))
        except ValueError:
            answers.append(None)
    targets = [sample.target.lower() if isinstance(sample.target, str) else sample.target for sample in splits.test]
    return metric_of_some(task_of(splits, metric), answers, targets)


def _reader(splits: Splits) -> Callable[[str], Target]:
    read = reader(splits.task, tuple(label.lower() for label in splits.labels))
    if splits.task != "multi_label":
        return read
    return lambda words: read(tuple(each.strip() for each in words.split(",") if each.strip() != "none"))
