"""A machine model, which computes how long a step takes and answers at once; the settings of a world of replicas."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from vlora.errors import BadConfig
from vlora.orchestrator.cost_model import Costs, StepSize, TokenThresholds
from vlora.routing import RULES
from vlora.types import Batch, BatchItem, Encode, Encoded, ErrorValue, HeadAnswer, StepResult

MEASURED = Path(__file__).parent / "costs" / "epyc-qwen2-0.5b-rank64.json"
_TOKEN = 1
_ANSWER = HeadAnswer(task="binary", label="yes", confidence=1.0, labels=("no", "yes"), label_id=1)


class Clock:
    """Simulated seconds, advanced only by steps, merges, loads, page moves and waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Machine:
    """Simulates batches and advances the clock.

    Merging another adapter costs `merge_s` and unmerging to W0 `back_s`. Merging the last merged adapter again is free,
    unless `back_s` is above 0: merged weights are then not kept.

    Attributes:
        costs: the costs of steps; may be changed between steps.
        merged: the adapter with merged weights in place; None for W0.
    """

    def __init__(self, clock: Clock, costs: Costs, move_s: float = 0.0) -> None:
        """move_s: seconds to move one page within memory."""
        self.costs = costs
        self.merged: str | None = None
        self._clock = clock
        self._move_s = move_s
        self._shadow: str | None = None

    def copy(self, first_page: int, target: int, num_pages: int) -> None:
        self._clock.now += num_pages * self._move_s

    def switch(self, merged: str | None) -> tuple[bool, float]:
        """Put the weights of an adapter in place; return whether they change, and the seconds it takes."""
        if merged == self.merged:
            return False, 0.0
        self.merged = merged
        if merged is None:
            return True, self.costs.back_s
        if merged == self._shadow:
            return True, 0.0
        self._shadow = None if self.costs.back_s else merged
        return True, self.costs.merge_s

    def run(self, batch: Batch) -> StepResult:
        errors: dict[str, ErrorValue] = {}
        encoded = None if batch.encode is None else self._encode(batch.encode, errors)
        encode_s = 0.0 if encoded is None else encoded.seconds
        switched, switch_s = self.switch(batch.merged_adapter)
        result = StepResult(
            tokens={},
            heads={},
            errors=errors,
            step_s=self.costs.step_s(StepSize.of(batch)._replace(num_patches=0.0)) + encode_s,
            switch_s=switch_s,
            switched=switched,
            in_place=self.costs.back_s > 0,
            encoded=encoded,
        )
        for item in batch.items:
            self._compute(item, result)
        self._clock.now += result.step_s + switch_s
        return result

    def _encode(self, encode: Encode, errors: dict[str, ErrorValue]) -> Encoded:
        """Encode the patches of a step. A call that fails adds its requests to `errors`."""
        done = encode.budget >= encode.left or not self.costs.patch_s
        num_patches = encode.left if done else encode.budget
        return Encoded(num_patches=num_patches, seconds=self.costs.patch_s * num_patches, done=done)

    def _compute(self, item: BatchItem, result: StepResult) -> None:
        """Add the answer to an item, if one is due, to the result."""
        if item.answers:
            # Both, since only the scheduler knows which one was requested; it reads that one.
            result.tokens[item.request_id] = _TOKEN
            result.heads[item.request_id] = _ANSWER


def read_costs(path: Path) -> tuple[Costs, float]:
    """Read a machine's costs and `load_s`, the seconds to load an adapter, from a JSON file.

    The file holds an object "costs" with these numbers, as `vlora bench costs --out DIR` writes it; those of
    `_OPTIONAL` may be missing. Raises BadConfig with the invalid field.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise BadConfig(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise BadConfig(f"{path}: not JSON: {error}") from None
    values = found.get("costs") if isinstance(found, dict) else None
    if not isinstance(values, dict):
        raise BadConfig(f'{path}: the object "costs" is missing')
    values = {**dict.fromkeys(_OPTIONAL, 0), **values}
    for field in _PRICES:
        value = values.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
            raise BadConfig(f"{path}: costs.{field} is {value!r}; it must be a number of seconds, 0 or more")
    if values["base_s"] <= 0:
        raise BadConfig(f"{path}: costs.base_s is 0; it must be above 0, or the simulation would not terminate")
    thresholds: dict[str, int] = {}
    for field in TokenThresholds._fields:
        value = values.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BadConfig(f"{path}: costs.{field} is {value!r}; it must be a whole number of tokens, 0 or more")
        thresholds[field] = value
    prices: dict[str, Any] = {field: float(values[field]) for field in _PRICES}
    load_s = prices.pop("load_s")
    return Costs(**prices, **thresholds), load_s


_MODES = ("merged_step_s", "mixed_step_s", "change_s", "launched_s")
_OPTIONAL = ("back_s", "patch_s", "thin_token_s", *_MODES, "hidden_tokens", "thin_tokens")
_PRICES = (*(field for field in Costs._fields if field.endswith("_s")), "load_s")


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
