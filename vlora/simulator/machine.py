"""A machine model, which computes how long a step takes and answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from vlora.errors import BadConfig
from vlora.orchestrator.cost_model import Costs, StepSize, TokenThresholds
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
    """

    def __init__(self, clock: Clock, costs: Costs, move_s: float = 0.0) -> None:
        """move_s: seconds to move one page within memory."""
        self.costs = costs  # may be changed between steps
        self.merged: str | None = None  # the adapter with merged weights in place; None for W0
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
        found = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise BadConfig(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise BadConfig(f"{path}: not JSON: {error}") from None
    values = found.get("costs") if isinstance(found, dict) else None
    if not isinstance(values, dict):
        raise BadConfig(f'{path}: the object "costs" is missing')
    values = {**dict.fromkeys(_OPTIONAL, 0), **values}
    found = {}
    for field in (*(name for name in Costs._fields if name != "error"), "load_s"):
        kind, what = _TOKENS if field in TokenThresholds._fields else _SECONDS
        try:
            found[field] = msgspec.convert(values.get(field), kind)
        except msgspec.ValidationError:
            raise BadConfig(f"{path}: costs.{field} is {values.get(field)!r}; it must be a {what}, 0 or more") from None
    if found["base_s"] == 0:
        raise BadConfig(f"{path}: costs.base_s is 0; it must be above 0, or the simulation would not terminate")
    load_s = found.pop("load_s")
    return Costs(**found), load_s


_MODES = ("merged_step_s", "mixed_step_s", "change_s", "launched_s")
_SECONDS: tuple[Any, str] = Annotated[float, msgspec.Meta(ge=0)], "number of seconds"
_TOKENS: tuple[Any, str] = Annotated[int, msgspec.Meta(ge=0)], "whole number of tokens"
_OPTIONAL = ("back_s", "patch_s", "thin_token_s", *_MODES, "hidden_tokens", "thin_tokens")
