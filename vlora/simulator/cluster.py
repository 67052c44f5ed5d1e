"""The settings of a world of replicas."""

from __future__ import annotations

import dataclasses
import math

from vlora.errors import BadConfig
from vlora.routing import RULES


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Replicas behind one router. A time of 0 turns a periodic action off.

    Attributes:
        replicas: replicas at the start, and the least number of them.
        max_replicas: upper limit when replicas are added by the router's advice; None: their number is fixed.
        rule: routing rule. One replica has no router.
        over: requests that a replica takes at a time, in batches; None for the rule's own.
        quick: simulate stretches of unmerged steps (`QuickReplica`) instead of each step with the engine's scheduler.
        consolidate_s, replan_s, rebalance_s: periods of moving requests to busy replicas, of planning the homes of
            adapters, and of moving requests to replicas that finish early.
        report_s: period of the replicas' reports; 0: at every event, without delay.
        report_age_s: a report arrives up to so many seconds after it was made (uniformly distributed).
        mtbf_s: mean time between failures of a replica (exponentially distributed); 0: none fail.
        detect_s: from a failure until the router learns of it.
        restart_s: from then until a replacement serves.
        start_s: from the decision to add a replica until it serves.
        up_after_s, down_after_s: for how long the router's advice must be the same before it is followed.
        sample_s: period of samples of the replicas' requests; 0: none.
        seed: of failures and of the age of reports.

    Raises:
        BadConfig: a value is invalid.
    """

    replicas: int = 1
    max_replicas: int | None = None
    rule: str = "placed"
    over: float | None = None
    quick: bool = False
    consolidate_s: float = 10.0
    replan_s: float = 60.0
    rebalance_s: float = 0.0
    report_s: float = 0.0
    report_age_s: float = 0.0
    mtbf_s: float = 0.0
    detect_s: float = 0.0
    restart_s: float = 15.0
    start_s: float = 15.0
    up_after_s: float = 2.0
    down_after_s: float = 60.0
    sample_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise BadConfig(f"replicas is {self.replicas}; it must be at least 1")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise BadConfig(f"max_replicas is {self.max_replicas}; it must be at least replicas, {self.replicas}")
        if self.rule not in RULES:
            raise BadConfig(f"no routing rule named {self.rule!r}; choose one of {', '.join(RULES)}")
        if self.over is not None and not self.over >= 1:
            raise BadConfig(f"over is {self.over:g}; a replica takes at least one batch, so it must be 1 or more")
        for field, value in dataclasses.asdict(self).items():
            if field.endswith("_s") and not (math.isfinite(value) and value >= 0):
                raise BadConfig(f"{field} is {value}; it must be a number of seconds, 0 or more")

    @property
    def routed(self) -> bool:
        return max(self.replicas, self.max_replicas or 1) > 1
