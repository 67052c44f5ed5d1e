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
    counts = {name: len(domain.splits.validation) for name, domain in data.domains.items()}
    return Thresholds(thresholds_of(data.plan, session.cache, data.teacher_scores, counts, session.progress.say))


def thresholds_of(
    plan: Plan,
    train: Train,
    teacher_scores: Mapping[str, float],
    num_validation: Mapping[str, int],
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, float]:
    """The value of each domain's threshold.

    A relative threshold is the validation score of the domain's teacher, or of an adapter for the domain alone, minus
    `minus`.

    Args:
        teacher_scores: validation score of each domain's teacher.
        num_validation: number of validation samples of each domain.
        say: called with a warning for each threshold of 0, which every adapter meets, and for each relative threshold
            that the domain misses even alone.
    """
    thresholds = {}
    for domain in plan.domains:
        name, wanted = domain.name, domain.threshold
        value = threshold_before_training(domain, teacher_scores.get(name))
        if value is None:
            assert isinstance(wanted, RelativeThreshold) and wanted.relative_to == "alone", "the check ensures it"
            alone = train((name,)).scores[name]
            value = max(0.0, alone.value - wanted.minus)
            if value == 0:
                say(
                    f"{name} reaches {alone.value:.3f} alone; minus {wanted.minus:g}, its threshold is 0, which every "
                    "adapter meets; train it longer, or set a smaller `minus` or an absolute threshold"
                )
            elif alone.lower < value:
                say(
                    f"{name} reaches {alone.value:.3f} alone and misses its threshold of {value:.3f} (minus "
                    f"{wanted.minus:g}), because the lower bound of {num_validation[name]} validation samples is "
                    f"{alone.lower:.3f}; add validation samples, or set a larger `minus`"
                )
        thresholds[name] = value
    return thresholds
