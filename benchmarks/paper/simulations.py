"""The serving systems of the papers as policies and costs of the simulator: V-LoRA 6.3.3 and 6.4, S-LoRA 7."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from atmm.tuning.search import Shape
from benchmarks.gpu.merge import MergeableModel
from benchmarks.paper.figure import RANK, Measuring, Setting
from benchmarks.paper.operators import EINSUM, OURS, medians, operator_seconds
from vlora.bench.costs import costs_as_dict, fit
from vlora.bench.dummy import random_peft
from vlora.bench.report import Row
from vlora.bench.timing import interleaved, median_ms, work_seconds
from vlora.config import STEP_TOKENS, EngineConfig
from vlora.lora.merge import ShadowSwitcher
from vlora.models.loading import dummy_model
from vlora.orchestrator.cost_model import Costs
from vlora.simulator.arrivals import Arrival, hottest, power_law
from vlora.simulator.cluster_config import ClusterConfig
from vlora.simulator.replica import ReplicaConfig
from vlora.simulator.workloads import Gamma, Hottest
from vlora.simulator.world import replay

SIMULATOR_COSTS = "machine-costs.json"
"""The file of costs for `vlora simulate`, in the folder of the measurements."""

_QUICK_BATCHES = ((1, 64), (4, 32), (8, 64), (16, 8), (32, 8))
_DECODE, _PREFILL = (2,) * 8, (96, 64, 48, 48)  # segments of a step with short and of one with long lanes

_RETRIEVAL = {"prompt_min": 192, "prompt_max": 320, "answer_min": 150, "answer_max": 250}  # V-LoRA 6.2
_MIXED = {"prompt_min": 8, "prompt_max": 512, "answer_min": 8, "answer_max": 512}  # S-LoRA 7.2
_KV_TOKENS = 12_000  # with these, for about 30 requests, as on S-LoRA's A10G (A.1)
_SLO_S = 6.0  # S-LoRA 7.1
_ADAPTERS = 8


# -- costs ------------------------------------------------------------------------------------------------------------


def machine_costs(measuring: Measuring) -> tuple[Costs, float]:
    """The fitted costs of a step of the setting's model, and the seconds to load an adapter."""
    found = _costs(measuring)["costs"]
    return Costs(**{name: found[name] for name in Costs._fields}), float(found["load_s"])


def write_costs(measuring: Measuring) -> None:
    """Write the costs as `vlora simulate --costs` reads them."""
    (measuring.store.folder / SIMULATOR_COSTS).write_text(json.dumps(_costs(measuring)) + "\n")


def _costs(measuring: Measuring) -> dict[str, Any]:
    setting = measuring.setting
    arguments = (1, _QUICK_BATCHES, (16, 24)) if setting.quick else (3,)
    fitted = functools.partial(fit, setting.model, setting.device, *arguments)
    found: dict[str, Any] = measuring.once("costs", lambda: costs_as_dict(fitted(), setting.model.name))
    return found


def _dlora_costs(measuring: Measuring) -> Costs:
    """This machine's costs with dLoRA's operator (a padded einsum) and its switch (a product and an addition per layer,
    as in PEFT): lanes and switches cost as much more as was measured here.
    """
    costs, _ = machine_costs(measuring)
    ratios = measuring.once("einsum-ratios", lambda: _einsum_ratios(measuring.setting))
    ms = measuring.once("switching", lambda: _switch_ms(measuring.setting))
    return costs._replace(
        lane_s=costs.lane_s * ratios["short"],
        adapter_s=costs.adapter_s * ratios["short"],
        long_lane_s=costs.long_lane_s * ratios["long"],
        long_adapter_s=costs.long_adapter_s * ratios["long"],
        merge_s=costs.merge_s * ms["PEFT merge"] / ms["merge"],
        back_s=costs.merge_s * ms["PEFT unmerge"] / ms["merge"],
    )


def _einsum_ratios(setting: Setting) -> dict[str, float]:
    """The einsum's time relative to this operator's, for short and for uneven long lanes."""
    found = {}
    for name, segments in (("short", _DECODE), ("long", _PREFILL)):
        taken = medians(operator_seconds(setting, Shape(896, (4864,)), RANK, segments, 4 * setting.rounds, [EINSUM]))
        found[name] = taken[EINSUM] / taken[OURS]
    return found


def switching(measuring: Measuring) -> list[Row]:
    """Milliseconds to merge another adapter and to go back to the base weights: here, and with PEFT."""
    ms = measuring.once("switching", lambda: _switch_ms(measuring.setting))
    return [
        {"way": OURS, "merge ms": ms["merge"], "back ms": ms["back"]},
        {"way": "PEFT's merge_adapter (dLoRA's way)", "merge ms": ms["PEFT merge"], "back ms": ms["PEFT unmerge"]},
    ]


def _switch_ms(setting: Setting) -> dict[str, float]:
    config = setting.model.config()
    model = MergeableModel(config, setting.device, setting.model.arena_bytes)
    keys = itertools.cycle(model.load((RANK, RANK)))
    shadow = ShadowSwitcher(model.slabs, model.pool)
    peft = random_peft(dummy_model(config, setting.baseline_dtype, setting.device, seed=0), RANK)
    calls = {
        "merge": lambda: shadow.switch(next(keys)),
        "back": lambda: shadow.switch(None),
        "PEFT merge": peft.merge_adapter,
        "PEFT unmerge": peft.unmerge_adapter,
    }
    with torch.no_grad():
        seconds = interleaved(calls, setting.rounds, warmup=1, clock=work_seconds(setting.device))
    return {name: median_ms(taken) for name, taken in seconds.items()}


# -- systems ----------------------------------------------------------------------------------------------------------


class System(NamedTuple):
    """The policy of a serving system, and the costs of the machine with its operator and its switch."""

    policy: str
    costs: Costs


def systems(measuring: Measuring) -> dict[str, System]:
    """All systems by name. S-LoRA and Punica have this project's operator, which favours them on a CPU, where their
    kernels do not exist.
    """
    costs, _ = machine_costs(measuring)
    slow = _dlora_costs(measuring)
    return {
        "cost_based (default here)": System("cost_based", costs),
        "Algorithm 1 (V-LoRA)": System("algorithm1", costs),
        "merged only": System("merged_only", costs),
        "unmerged only (S-LoRA, Punica)": System("unmerged_only", costs),
        "dLoRA (its operator and switch)": System("dlora", slow),
        "Algorithm 1, PEFT's switch": System("algorithm1", costs._replace(merge_s=slow.merge_s, back_s=slow.back_s)),
        "bmm with padding (S-LoRA-bmm)": System(
            "unmerged_only", slow._replace(merge_s=costs.merge_s, back_s=costs.back_s)
        ),
    }


def full_batch_capacity(costs: Costs, prompt: int, answer: int, shares: Sequence[float]) -> float:
    """Requests per second of unmerged-only with full batches; prompts run in separate steps."""
    size = EngineConfig.max_batch_size
    different = sum(1 - (1 - share) ** size for share in shares)
    prompts_a_step = max(1.0, STEP_TOKENS[0] / prompt)
    prompt_s = costs.merged_s(prompt, 0, 1 / prompts_a_step) + costs.lanes_s(prompt)
    step_s = costs.merged_s(size, size * (prompt + answer / 2)) + costs.lanes_s(size, different)
    return 1 / (prompt_s + answer * step_s / size)


# -- traffic ----------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """What is simulated. traffic: "retrieval" (V-LoRA 6.2), or "mixed": prompts and answers of 8 to 512 tokens (S-LoRA
    7.2). load: the rate, as a share of the capacity of unmerged-only with full batches.
    """

    traffic: str
    load: float
    adapters: int = _ADAPTERS
    of: int | None = None  # adapters of the capacity; by default as many
    skew: float = 0.6  # the share of the hottest adapter (retrieval)
    alpha: float = 1.0  # of the power law (mixed)
    cv: float = 1.0  # of the gaps between arrivals (mixed)
    replicas: int = 1  # that share the traffic; the load is of each
    resident: int = ReplicaConfig.resident_adapters
    bound: float | None = None  # seconds to the first token, beyond which requests are refused

    def rate(self, measuring: Measuring) -> float:
        costs, _ = machine_costs(measuring)
        number = self.of or self.adapters
        if self.traffic == "retrieval":
            full = full_batch_capacity(costs, 256, 200, hottest(number, self.skew))
        else:
            full = full_batch_capacity(costs, 260, 260, power_law(number, 1.0))
        return self.load * self.replicas * full

    def arrivals(self, measuring: Measuring, number: int) -> list[Arrival]:
        rate = self.rate(measuring)
        if self.traffic == "retrieval":
            return list(Hottest(rate=rate, skew=self.skew, **_RETRIEVAL).arrivals(number, self.adapters, seed=0))
        workload = Gamma(rate=rate, cv=self.cv, alpha=self.alpha, **_MIXED)
        return list(workload.arrivals(number, self.adapters, seed=0))

    def replay(self, measuring: Measuring, system: System, arrivals: Sequence[Arrival]) -> dict[str, float]:
        config = ReplicaConfig(
            costs=system.costs,
            load_s=machine_costs(measuring)[1],
            policy=system.policy,
            kv_tokens=_KV_TOKENS if self.traffic == "mixed" else ReplicaConfig.kv_tokens,
            resident_adapters=self.resident,
            max_ttft_s=self.bound,
        )
        measures = replay(arrivals, config, ClusterConfig(replicas=self.replicas))
        found = measures.as_dict()
        return {
            "ms": 1e3 * measures.average_token_latency_s,
            "busy s": measures.active_s,
            "requests/s": found["requests_per_s"],
            "latency s": found["mean_latency_s"],
            "first token s": measures.mean_ttft_s,
            "attainment": 100 * measures.share_within(_SLO_S),
            "switches": found["switches"],
        }


def simulate(
    measuring: Measuring,
    names: Sequence[str],
    requests: int,
    point: Mapping[str, Any],
    over: Mapping[str, Sequence[Any]],
) -> list[Row]:
    """What each system does with the same traffic, at all combinations of values.

    Args:
        names: Of systems.
        requests: Of each replica.
        point: What all points have in common.
        over: Values that differ, by name of an attribute of `Point`.
    """
    known = systems(measuring)
    rows: list[Row] = []
    for values in itertools.product(*over.values()):
        at = Point(**{**point, **dict(zip(over, values, strict=True))})
        for name in names:
            arrivals = at.arrivals(measuring, requests * at.replicas)
            found = at.replay(measuring, known[name], arrivals)
            rows.append({**at._asdict(), "system": name, "rate": at.rate(measuring), **found})
    return rows
