"""Phase 4: the threshold of each domain, fixed before packing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

from fusion.packing.algorithm import Train
from fusion.packing.training_counts import min_trainings, trained_alone
from fusion.phases.data_ready import DataReady
from fusion.phases.session import Session
from fusion.plan.schema import Plan, RelativeThreshold
from fusion.teachers.labelling import threshold_before_training


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """values: by domain."""

    values: Mapping[str, float]


def set_thresholds(data: DataReady, session: Session) -> Thresholds:
    """Set every threshold, after training those domains alone for which that is needed in any case."""
    alone = trained_alone(data.plan, data.teacher_scores)
    session.progress.expect(min_trainings(data.plan, alone))
    session.run_ahead([partial(session.cache, (name,)) for name in alone])
    return Thresholds(thresholds_of(data.plan, session.cache, data.teacher_scores, session.progress.say))


def thresholds_of(
    plan: Plan, train: Train, teacher_scores: Mapping[str, float], say: Callable[[str], None] = lambda _: None
) -> dict[str, float]:
    """The value of each domain's threshold.

    A relative threshold is the validation score of the domain's teacher, or of an adapter for the domain alone, minus
    `minus`.

    Args:
        teacher_scores: validation score of each domain's teacher.
        say: called with a warning for each threshold of 0, which every adapter meets.
    """
    thresholds = {}
    for domain in plan.domains:
        name, wanted = domain.name, domain.threshold
        value = threshold_before_training(domain, teacher_scores.get(name))
        if value is None:
            assert isinstance(wanted, RelativeThreshold) and wanted.relative_to == "alone", "the check ensures it"
            alone = train((name,)).scores[name].value
            value = max(0.0, alone - wanted.minus)
            if value == 0:
                say(
                    f"{name} reaches {alone:.3f} alone; minus {wanted.minus:g}, its threshold is 0, which every "
                    "adapter meets; train it longer, or set a smaller `minus` or an absolute threshold"
                )
        thresholds[name] = value
    return thresholds
