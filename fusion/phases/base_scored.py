"""Phase 3: the base model's own scores, before an adapter is added to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fusion.phases.data_ready import DataReady
from fusion.training.zero_shot import score_before_training


@dataclasses.dataclass(frozen=True)
class BaseScored:
    """scores: by domain, the metric of the base model's answers in words on the first test samples."""

    scores: Mapping[str, float]


def score_base(data: DataReady) -> BaseScored:
    """Call it before the session, whose trainer adds an adapter to the base model."""
    return BaseScored({name: score_before_training(domain) for name, domain in data.domains.items()})
