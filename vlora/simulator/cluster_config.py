"""The settings of simulated replicas behind one router."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from vlora.config import RULES, check_settings, setting
from vlora.errors import BadConfig


def _seconds(default: float, text: str) -> Any:
    return setting(default, "Replicas", text, least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Replicas behind one router. A time of 0 turns a periodic action off.

    Raises:
        BadConfig: A value is invalid.
    """

    replicas: int = setting(1, "Replicas", "Number of replicas that share the load, and the least number.", least=1)
    rule: str = setting("placed", "Replicas", "Which replica gets the next request.", choices=RULES)
    over: float | None = setting(
        None,
        "Replicas",
        "Requests that a replica takes at a time, in batches; others wait in the router. Default: 1.5; 1 under punica; "
        "no limit under least_loaded and round_robin.",
        least=1,
    )
    max_replicas: int | None = setting(
        None, "Replicas", "Add replicas up to this number, and release them, by the load."
    )
    quick: bool = setting(False, "Replicas", "Simulate stretches of unmerged steps (`QuickReplica`), not each step.")
    start_s: float = _seconds(15.0, "Seconds until an added replica serves.")
    up_after_s: float = _seconds(2.0, "The router advises to add one for so long before one is added.")
    down_after_s: float = _seconds(60.0, "The router advises to release one for so long before one is released.")
    mtbf_s: float = _seconds(0.0, "Mean seconds between failures of a replica; 0: none fail.")
    detect_s: float = _seconds(0.0, "Seconds from a failure until the router learns of it.")
    restart_s: float = _seconds(15.0, "Seconds from then until a replacement serves.")
    report_s: float = _seconds(0.0, "Period of the replicas' reports to the router; 0: at every event.")
    report_age_s: float = _seconds(0.0, "A report arrives up to so many seconds after it was made.")
    consolidate_s: float = _seconds(10.0, "Period of moving requests to busy replicas.")
    replan_s: float = _seconds(60.0, "Period of planning the homes of adapters.")
    rebalance_s: float = _seconds(0.0, "Period of moving requests to replicas that finish early; 0: never.")
    sample_s: float = _seconds(0.0, "Period of samples of the replicas' requests.")
    seed: int = setting(0, "Replicas", "Of failures and of the age of reports.")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise BadConfig(f"max_replicas is {self.max_replicas}; it must be at least replicas, {self.replicas}")
        for field, value in dataclasses.asdict(self).items():
            if field.endswith("_s") and not math.isfinite(value):
                raise BadConfig(f"{field} is {value}; it must be a number of seconds")

    @property
    def routed(self) -> bool:
        return max(self.replicas, self.max_replicas or 1) > 1
