"""The costs of this machine's steps, and those of a system with another operator and another way to switch."""

from __future__ import annotations

import json
from typing import Any

import torch

from atmm.tuning.search import Shape
from benchmarks.merge import MergeableModel
from benchmarks.paper.measured.operators import EINSUM, medians, operator_seconds
from benchmarks.paper.measuring import RANK, Measuring, Setting
from vlora.bench.costs import costs_as_dict, fit
from vlora.bench.dummy import random_peft
from vlora.bench.timing import interleaved, median_ms, work_seconds
from vlora.lora.merge_shadow import ShadowSwitcher
from vlora.models.loading import dummy_model
from vlora.orchestrator import Costs

SIMULATOR_COSTS = "machine-costs.json"
"""The file of costs for `vlora simulate`, in the folder of the measurements."""

_QUICK_BATCHES = ((1, 64), (4, 32), (8, 64), (16, 8), (32, 8))
_SITE = Shape(896, (4864,))
_DECODE, _PREFILL = (2,) * 8, (96, 64, 48, 48)  # segments of a step with short and of one with long lanes


def machine_costs(measuring: Measuring) -> tuple[Costs, float]:
    """The fitted costs of a step of the setting's model, and the seconds to load an adapter."""
    found = _costs(measuring)["costs"]
    return Costs(**{name: found[name] for name in Costs._fields}), float(found["load_s"])


def write_costs(measuring: Measuring) -> None:
    """Write the costs as `vlora simulate --costs` reads them."""
    (measuring.store.folder / SIMULATOR_COSTS).write_text(json.dumps(_costs(measuring)) + "\n")


def _costs(measuring: Measuring) -> dict[str, Any]:
    found: dict[str, Any] = measuring.once("costs", lambda: _fitted(measuring.setting))
    return found


def _fitted(setting: Setting) -> dict[str, Any]:
    if setting.quick:
        found = fit(setting.model, setting.device, 1, _QUICK_BATCHES, sides=(16, 24))
    else:
        found = fit(setting.model, setting.device, 3)
    return costs_as_dict(found, setting.model.name)


def dlora_costs(measuring: Measuring) -> Costs:
    """This machine's costs with dLoRA's operator (a padded einsum) and its switch (a product and an addition per layer,
    as in PEFT): lanes and switches cost as much more as was measured here.
    """
    costs, _ = machine_costs(measuring)
    ratios = measuring.once("einsum-ratios", lambda: _einsum_ratios(measuring.setting))
    switching = switch_times(measuring)
    slower = switching["PEFT merge"] / switching["merge"]
    return costs._replace(
        lane_s=costs.lane_s * ratios["short"],
        adapter_s=costs.adapter_s * ratios["short"],
        long_lane_s=costs.long_lane_s * ratios["long"],
        long_adapter_s=costs.long_adapter_s * ratios["long"],
        merge_s=costs.merge_s * slower,
        back_s=costs.merge_s * switching["PEFT unmerge"] / switching["merge"],
    )


def _einsum_ratios(setting: Setting) -> dict[str, float]:
    """The einsum's time relative to this operator's, for short and for uneven long lanes."""
    found = {}
    for name, segments in (("short", _DECODE), ("long", _PREFILL)):
        taken = medians(operator_seconds(setting, _SITE, RANK, segments, 4 * setting.rounds, [EINSUM]))
        found[name] = taken[EINSUM] / taken["this project"]
    return found


def switch_times(measuring: Measuring) -> dict[str, float]:
    """Milliseconds to merge another adapter and to go back to the base weights: here, and with PEFT."""
    found: dict[str, float] = measuring.once("switching", lambda: _switch_times(measuring.setting))
    return found


def _switch_times(setting: Setting) -> dict[str, float]:
    config = setting.model.config()
    model = MergeableModel(config, setting.device, setting.model.arena_bytes)
    keys = model.load((RANK, RANK))
    shadow = ShadowSwitcher(model.slabs, model.pool)
    peft = random_peft(dummy_model(config, setting.baseline_dtype, setting.device, seed=0), RANK)
    turn = [0]

    def merge() -> None:
        turn[0] += 1
        shadow.switch(keys[turn[0] % 2])

    calls = {
        "merge": merge,
        "back": lambda: shadow.switch(None),
        "PEFT merge": peft.merge_adapter,
        "PEFT unmerge": peft.unmerge_adapter,
    }
    with torch.no_grad():
        seconds = interleaved(calls, setting.rounds, warmup=1, clock=work_seconds(setting.device))
    return {name: median_ms(taken) for name, taken in seconds.items()}
