"""A domain of a plan with its samples encoded for the base model."""

from __future__ import annotations

import numpy as np
import torch

from fusion.data.samples import Splits, held_back
from fusion.plan.schema import DomainPlan
from fusion.training.frozen_base import FrozenBase
from fusion.training.objectives import objective_of


class Domain:
    """A domain's plan, its objective and its samples, encoded once.

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
        parts = [part[:most] for part in (splits.train, splits.validation, splits.test)]
        done = 0
        with base.progress.work(f"encoding the pictures of {plan.name}", sum(map(len, parts)), "samples") as update:

            def on_encoded(count: int) -> None:
                nonlocal done
                update(done := done + count)

            self.train, self.validation, self.test = (
                base.encode_samples(plan.question, splits, part, on_encoded) for part in parts
            )
        indices = set(held_back(splits.train[:most]))
        self.held_back = [sample for index, sample in enumerate(self.train) if index in indices]
        self.others = [sample for index, sample in enumerate(self.train) if index not in indices]

    def features(self) -> np.ndarray:
        """Mean image features of its training pictures, [d]: d columns for each image token. Not with `lora.vision`,
        where trainings change them."""
        means = [sample.features.rows().float().mean(0) for sample in self.train if sample.features is not None]
        return torch.stack(means).mean(0).cpu().numpy()
