"""Answers and scores of the adapter that is being trained, with as many samples at once as memory allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch

from fusion.data.samples import Splits, Target
from fusion.data.targets import answer_in_words, reader
from fusion.packing.algorithm import Adapter, Score
from fusion.plan.schema import MEANS
from fusion.progress import Progress, ProgressCallback
from fusion.training.adapter import TrainableAdapter
from fusion.training.collator import EncodedSample
from fusion.training.frozen_base import Domain
from fusion.training.objectives import ForwardOutputs, HeadObjective, Objective, metric_of_some, objective_of
from fusion.training.steps import in_parts
from heads.answer import F1Counts, f1_of
from vlora.confidence import lower_bound

SCORE_AT_ONCE = 50
_MAX_ANSWER_RATIO = 2  # decoding stops at this many times the length of the longest training answer

Result = TypeVar("Result")
Parameters = dict[str, int | float | tuple[int | float, ...]]
"""Of a head's task (`heads.Task.parameters`)."""

_RESAMPLES = 400
Wanted = TypeVar("Wanted")


def _ignore_progress(done: int, facts: str = "", share: float | None = None) -> None: ...


class Evaluator:
    """Scores of an adapter's domains. confidence: of lower bounds; None for none."""

    def __init__(self, adapter: TrainableAdapter, confidence: float | None, progress: Progress) -> None:
        self.adapter = adapter
        self._confidence = confidence
        self._progress = progress
        self._at_once = SCORE_AT_ONCE

    @torch.no_grad()
    def score(self, domain: str, samples: Sequence[EncodedSample]) -> float:
        """The domain's metric on these samples, 0 to 1."""
        answers = self.answers(domain, samples)
        return self.adapter.domains[domain].task.metric(answers, [sample.target for sample in samples])

    @torch.no_grad()
    def bounded_score(self, domain: str, samples: Sequence[EncodedSample]) -> Score:
        """Score with its lower bound at the plan's confidence, or with itself as bound if there is none."""
        with self._progress.work(f"scoring {domain}", len(samples), "samples") as update:
            answers = self.answers(domain, samples, update)
        targets = [sample.target for sample in samples]
        task = self.adapter.domains[domain].task
        if self._confidence is None:
            value = task.metric(answers, targets)
            return Score(value, value)
        seed = self.adapter.seed(f"bound {domain}")
        return score_with_bound(
            task.metric,
            answers,
            targets,
            mean=task.metric_name in MEANS,
            confidence=self._confidence,
            counts=task.f1_counts(answers, targets),
            seed=seed,
        )

    @torch.no_grad()
    def accuracy_in_words(self, domain: str, samples: Sequence[EncodedSample]) -> float:
        """Share of samples that the language model answers word for word; 0 for samples without an answer in words."""
        return sum(float(outputs.exact.sum()) for _, outputs in self.forward(domain, samples)) / len(samples)

    @torch.no_grad()
    def decode_answers(
        self, domain: str, samples: Sequence[EncodedSample], update: ProgressCallback = _ignore_progress
    ) -> list[str]:
        """The language model's answer to each sample, up to twice the length of the longest training answer."""
        limit = _MAX_ANSWER_RATIO * max(len(sample.answer) for sample in self.adapter.domains[domain].train)

        def decode(part: Sequence[EncodedSample]) -> list[str]:
            with self.adapter.autocast():
                return self.adapter.base.decode_answers(part, limit)

        texts: list[str] = []
        for _, found in self._in_parts(samples, decode):
            texts += found
            update(len(texts))
        return texts

    @torch.no_grad()
    def answers(
        self, domain: str, samples: Sequence[EncodedSample], update: ProgressCallback = _ignore_progress
    ) -> list[object]:
        """The answer to each sample, in the form that the domain's metric compares."""
        task = self.adapter.domains[domain].task
        if task.needs_text:
            return list(self.decode_answers(domain, samples, update))
        if task.calibration_decides:
            task = self.calibrated(domain)
        answers: list[object] = []
        for part, outputs in self.forward(domain, samples):
            with self.adapter.autocast():
                found = task.answers(outputs, self.adapter.heads.get(domain), [s.target for s in part])
                answers += [s.of_whole_pictures(answer) for s, answer in zip(part, found, strict=True)]
            update(len(answers))
        return answers

    @torch.no_grad()
    def calibrated(self, domain: str) -> Objective:
        """The domain's objective with a calibrated head, as it is served.

        If calibration changes answers, it uses held-back training samples, so that validation data stays independent;
        otherwise it uses validation data, which has more samples.
        """
        own = self.adapter.domains[domain]
        samples = own.held_back if own.task.calibration_decides else own.validation
        batches = [outputs for _, outputs in self.forward(domain, samples)]
        return own.task.calibrated(batches, self.adapter.heads.get(domain), [sample.learned for sample in samples])

    def head_parameters(self, domain: str) -> Parameters:
        """The parameters of the domain's head, calibrated."""
        served = self.calibrated(domain)
        assert isinstance(served, HeadObjective), "words have no head"
        return dict(served.task.parameters)

    @torch.no_grad()
    def held_back_loss(self, domains: Sequence[str]) -> float:
        self.adapter.model.eval()
        total = 0.0
        for domain in domains:
            samples = self.adapter.domains[domain].held_back
            for part, outputs in self.forward(domain, samples):
                own = self.adapter.loss([(domain, sample) for sample in part], outputs)
                total += float(own) * len(part) / len(samples)
        self.adapter.model.train()
        return total / len(domains)

    def forward(
        self, domain: str, samples: Sequence[EncodedSample]
    ) -> Iterator[tuple[Sequence[EncodedSample], ForwardOutputs]]:
        return self._in_parts(samples, lambda part: self.adapter.forward([(domain, sample) for sample in part]))

    def _in_parts(
        self, samples: Sequence[EncodedSample], compute: Callable[[Sequence[EncodedSample]], Result]
    ) -> Iterator[tuple[Sequence[EncodedSample], Result]]:
        for part, found, size in in_parts(samples, self._at_once, compute):
            self._at_once = size
            yield part, found


def score_with_bound(
    metric: Callable[[Sequence[object], Sequence[Wanted]], float],
    answers: Sequence[object],
    targets: Sequence[Wanted],
    *,
    mean: bool,
    confidence: float,
    counts: Sequence[F1Counts] = (),
    seed: int = 0,
) -> Score:
    """A metric over samples, with the bound that its true value exceeds with probability `confidence`.

    If the values on single samples are all 0 or 1, the bound is Clopper and Pearson's exact one, which is conservative.
    Otherwise (F1, mean average precision, F1 of words) it is a percentile of the metric over resampled samples.

    Args:
        mean: whether the metric is the mean of its values on single samples.
        counts: of each sample, if the metric is `f1_of` counts; then resampled samples are not compared again.
    """
    count = len(targets)
    if counts:
        known = np.array(counts)
        return _resampled(lambda rows: f1_of([known[rows].sum(0)]), f1_of(counts), count, confidence, seed)
    if not mean:

        def of(rows: np.ndarray) -> float:
            return metric([answers[row] for row in rows], [targets[row] for row in rows])

        return _resampled(of, metric(answers, targets), count, confidence, seed)
    single = np.array([metric([answer], [target]) for answer, target in zip(answers, targets, strict=True)])
    value = float(single.mean())
    if set(single) <= {0.0, 1.0}:
        return Score(value, lower_bound(round(single.sum()), count, confidence))
    return _resampled(lambda rows: float(single[rows].mean()), value, count, confidence, seed)


def _resampled(of: Callable[[np.ndarray], float], value: float, count: int, confidence: float, seed: int) -> Score:
    """The percentile bootstrap (Efron 1979) over the samples and one extra sample with value 0.

    Without the extra sample, a score of 1 would have the bound 1, however few samples there are. Clopper and Pearson's
    bound includes it as well: for r right and w wrong it is a quantile of Beta(r, w + 1).
    """
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(_RESAMPLES):
        rows = rng.integers(count + 1, size=count)
        seen = rows[rows < count]
        found.append(of(seen) * len(seen) / count if len(seen) else 0.0)
    return Score(value, min(value, float(np.quantile(found, 1 - confidence))))


EVERY_S = 10.0
SHARE = 1 / 100  # maximum share of a training's time for this scoring
_SAMPLES, _FEWEST = 64, 8  # samples over all domains of an adapter, and minimum per domain


class HeldOutScores:
    """Scores of held-out samples, updated at intervals. score: returns a domain's score, 0 to 1, on its first given
    number of validation samples. clock: returns seconds from any origin."""

    def __init__(self, score: Callable[[str, int], float], domains: Adapter, clock: Callable[[], float]) -> None:
        self._score = score
        self._domains = domains
        self._clock = clock
        self._due = clock() + EVERY_S
        self._scores: Mapping[str, float] = {}

    @property
    def due(self) -> bool:
        """Whether ten seconds and a hundred times the duration of the last scoring have passed since it."""
        return self._clock() >= self._due

    def update(self) -> None:
        began = self._clock()
        count = max(_FEWEST, _SAMPLES // len(self._domains))
        self._scores = {name: self._score(name, count) for name in self._domains}
        now = self._clock()
        self._due = now + max(EVERY_S, (now - began) / SHARE)

    def __str__(self) -> str:
        """One domain's score, or the mean of several and the lowest with its name. Empty before the first scoring."""
        if not self._scores:
            return ""
        lowest = min(self._scores, key=self._scores.__getitem__)
        value = sum(self._scores.values()) / len(self._scores)
        worst = f" (lowest {lowest} {self._scores[lowest]:.3f})" if len(self._scores) > 1 else ""
        return f"{value:.3f}{worst}"


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
    what = f"asking the base model about {domain.plan.name}"
    with domain.base.progress.work(what, len(samples), "samples") as update:
        for _, found, _ in in_parts(samples, _AT_ONCE, lambda part: domain.base.decode_answers(part, longest)):
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
