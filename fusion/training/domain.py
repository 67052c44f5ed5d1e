"""A domain of a plan with its samples encoded for the base model."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from fusion.data.samples import Sample, Splits, held_back
from fusion.plan.schema import DomainPlan
from fusion.training.collator import EncodedSample
from fusion.training.frozen_base import FrozenBase
from fusion.training.objectives import objective_of


class Domain:
    """A domain's plan, its objective and its samples, each part encoded when it is first used.

    held_back: training samples that decide early stopping and calibrate heads with answers that depend on calibration.
    others: the remaining training samples, which share no group with them. Validation data is used for neither, so
    bounds computed on it are valid.

    Args:
        most: number of samples of each part to encode; all if None.
    """

    def __init__(self, plan: DomainPlan, splits: Splits, base: FrozenBase, *, most: int | None = None) -> None:
        self.plan = plan
        self.splits = splits
        self.base = base
        self.task = objective_of(splits, plan.metric)
        self._most = most

    @functools.cached_property
    def train(self) -> list[EncodedSample]:
        return self._encode("training", self.splits.train)

    @functools.cached_property
    def validation(self) -> list[EncodedSample]:
        return self._encode("validation", self.splits.validation)

    @functools.cached_property
    def test(self) -> list[EncodedSample]:
        return self._encode("test", self.splits.test)

    @functools.cached_property
    def held_back(self) -> list[EncodedSample]:
        return [self.train[index] for index in sorted(held_back(self.splits.train[: self._most]))]

    @functools.cached_property
    def others(self) -> list[EncodedSample]:
        kept = set(map(id, self.held_back))
        return [sample for sample in self.train if id(sample) not in kept]

    def encode(self) -> None:
        """Encode all parts now. Raises BadPlan for a sample that the base model cannot process."""
        _ = self.train, self.validation, self.test

    def _encode(self, part: str, samples: Sequence[Sample]) -> list[EncodedSample]:
        chosen = samples[: self._most]
        what = f"encoding the pictures of {self.plan.name}, {part}"
        with self.base.progress.work(what, len(chosen), "samples") as update:
            return self.base.encode_samples(self.plan.question, self.splits, chosen, update)

    def features(self) -> np.ndarray:
        """Mean image features of its training pictures, [d]: d columns for each image token. Not with `lora.vision`,
        where trainings change them."""
        means = [sample.features.rows().float().mean(0) for sample in self.train if sample.features is not None]
        return torch.stack(means).mean(0).cpu().numpy()
