"""S-LoRA's figures of serving: throughput, first-token latency and attainment, merging, early abort, clusters."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.paper import drawing
from benchmarks.paper.figure import Code, Found, Panel
from benchmarks.paper.measured.systems import DLORA, MERGED, OURS, UNMERGED, System, capacity, replayed, systems
from benchmarks.paper.measuring import Measuring
from vlora.bench.report import Goal
from vlora.simulator import Arrival, Measures
from vlora.simulator.popularity import power_law
from vlora.simulator.workloads import Gamma

_LENGTHS = {"prompt_min": 8, "prompt_max": 512, "answer_min": 8, "answer_max": 512}
_MEAN = 260  # tokens
_SLO_S = 6.0  # section 7.1
_ALPHAS, _CVS = (0.1, 0.3, 0.6, 1.0), (1, 2, 4, 6, 8)
_KV_TOKENS = 12_000  # for about 30 requests, as on S-LoRA's A10G (A.1)
BMM = "bmm with padding (S-LoRA-bmm)"


def num_requests(quick: bool) -> int:
    return 120 if quick else 200


def _arrivals(
    measuring: Measuring, load: float, num_adapters: int, *, cv: float = 1.0, alpha: float = 1.0
) -> list[Arrival]:
    """Requests at a share of the capacity of unmerged-only with 200 adapters."""
    rate = load * capacity(measuring, _MEAN, _MEAN, power_law(200, 1.0))
    number = num_requests(measuring.setting.quick)
    return list(Gamma(rate=rate, cv=cv, alpha=alpha, **_LENGTHS).arrivals(number, num_adapters, seed=0))


def _variants(measuring: Measuring) -> dict[str, System]:
    known = systems(measuring)
    base = known[UNMERGED]
    slow = known[DLORA].costs._replace(merge_s=base.costs.merge_s, back_s=base.costs.back_s)
    return {OURS: known[OURS], UNMERGED: base, BMM: System("unmerged_only", slow)}


def _replayed(measuring: Measuring, system: System, arrivals: Sequence[Arrival], **settings: Any) -> Measures:
    return replayed(measuring, system, arrivals, kv_tokens=_KV_TOKENS, **settings)


def _measured(measures: Measures) -> dict[str, float]:
    found = measures.as_dict()
    return {
        "requests/s": found["requests_per_s"],
        "latency s": found["mean_latency_s"],
        "first token s": measures.mean_ttft_s,
        "attainment": 100 * measures.share_within(_SLO_S),
    }


def _panels(
    rows: Mapping[str, Sequence[Mapping[str, float]]],
    across: Sequence[float],
    labels: Mapping[str, str],
    **settings: Any,
) -> list[Panel]:
    """A panel with a line for each entry of `rows` by label of the values; settings: those of `drawing.lines`."""
    return [
        drawing.lines(_columns(rows, name), across, ylabel=label, ylim=(0, None), **settings)
        for label, name in labels.items()
    ]


_ATTAINMENT = "first token within 6 s, %"


def _columns(rows: Mapping[str, Sequence[Mapping[str, float]]], name: str) -> dict[str, list[float]]:
    return {system: [row[name] for row in own] for system, own in rows.items()}


# -- Figures 5 and 6 --------------------------------------------------------------------------------------------------

_FEW, _MANY = 5, 2000  # adapters, as in S-LoRA's table 3


def _measure_numbers(measuring: Measuring) -> dict[str, Any]:
    quick = measuring.setting.quick
    numbers = (1, _FEW, 20, 200, _MANY) if quick else (1, _FEW, 20, 50, 100, 200, 500, 1000, _MANY)
    rows: dict[str, list[dict[str, float]]] = {}
    for number in numbers:
        arrivals = _arrivals(measuring, 1.3, number)
        for name, system in _variants(measuring).items():
            rows.setdefault(name, []).append(_measured(_replayed(measuring, system, arrivals)))
    return {"adapters": list(numbers), "rows": rows}


def _number_panels(found: Found) -> list[Panel]:
    labels = {name: name for name in ("requests/s", "latency s")}
    return _panels(found["rows"], found["adapters"], labels, ticked=True, xlabel="adapters")


def _numbers_here(found: Found) -> dict[str, float | None]:
    """Of unmerged-only, because S-LoRA does not merge."""
    rates = dict(zip(found["adapters"], _columns(found["rows"], "requests/s")[UNMERGED], strict=True))
    return {f"throughput with {_MANY} / {_FEW} adapters": 100 * rates[_MANY] / rates[_FEW]}


def _number_goals(found: Found) -> list[Goal]:
    ratios = [a["requests/s"] / b["requests/s"] for a, b in zip(found["rows"][OURS], found["rows"][BMM], strict=True)]
    return [Goal("s-lora fig5: throughput here / bmm, worst", min(ratios), 1.0, False)]


def _measure_rates(measuring: Measuring) -> dict[str, Any]:
    loads = (0.5, 1.0, 1.5) if measuring.setting.quick else (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
    rows: dict[str, list[dict[str, float]]] = {}
    rates = []
    for load in loads:
        arrivals = _arrivals(measuring, load, 200)
        rates.append(load * capacity(measuring, _MEAN, _MEAN, power_law(200, 1.0)))
        for name, system in _variants(measuring).items():
            rows.setdefault(name, []).append(_measured(_replayed(measuring, system, arrivals)))
    return {"rates": rates, "rows": rows}


def _rate_panels(found: Found) -> list[Panel]:
    labels: dict[str, Any] = {"requests/s": "requests/s", "first token, s": "first token s", _ATTAINMENT: "attainment"}
    return _panels(found["rows"], found["rates"], labels, xlabel="offered requests/s")


# -- Figure 9 ---------------------------------------------------------------------------------------------------------


def _measure_merging(measuring: Measuring) -> dict[str, Any]:
    alphas = (0.1, 1.0) if measuring.setting.quick else _ALPHAS
    numbers = (1, 2, 5, 10) if measuring.setting.quick else (1, 2, 5, 10, 20)
    known = systems(measuring)
    found: dict[str, Any] = {"adapters": list(numbers), "by alpha": {}}
    for alpha in alphas:
        rows: dict[str, list[float]] = {}
        for number in numbers:
            arrivals = _arrivals(measuring, 1.2, number, alpha=alpha)
            for name in (OURS, UNMERGED, MERGED):
                measures = _replayed(measuring, known[name], arrivals)
                rows.setdefault(name, []).append(measures.as_dict()["requests_per_s"])
        found["by alpha"][f"{alpha:g}"] = rows
    return found


def _merging_panels(found: Found) -> list[Panel]:
    labels: dict[str, Any] = {"xlabel": "adapters", "ylabel": "requests/s"}
    return [
        drawing.lines(rows, found["adapters"], ticked=True, title=f"alpha {alpha}", ylim=(0, None), **labels)
        for alpha, rows in found["by alpha"].items()
    ]


def _merging_goals(found: Found) -> list[Goal]:
    rows = found["by alpha"]["1"]
    return [
        Goal("s-lora fig9: merged / on the fly, one adapter", rows[MERGED][0] / rows[UNMERGED][0], 1.0, False),
        Goal("s-lora fig9: merged / on the fly, most adapters", rows[MERGED][-1] / rows[UNMERGED][-1], 1.0, True),
    ]


# -- Figure 10 --------------------------------------------------------------------------------------------------------


def _measure_abort(measuring: Measuring) -> dict[str, Any]:
    cvs = (1, 4, 8) if measuring.setting.quick else _CVS
    rows: dict[str, list[float]] = {}
    system = systems(measuring)[OURS]
    for cv in cvs:
        arrivals = _arrivals(measuring, 1.5, 200, cv=cv)
        for name, bound_s in (("early rejection (here)", _SLO_S), ("no bound (FCFS)", None)):
            measures = _replayed(measuring, system, arrivals, max_ttft_s=bound_s)
            rows.setdefault(name, []).append(100 * measures.share_within(_SLO_S))
    return {"cv": list(cvs), "rows": rows}


def _abort_panels(found: Found) -> list[Panel]:
    labels: dict[str, Any] = {
        "xlabel": "cv of the gaps between arrivals",
        "ylabel": "first token within 6 s, % of all requests",
    }
    return [drawing.lines(found["rows"], found["cv"], ylim=(0, 105), **labels)]


def _abort_goals(found: Found) -> list[Goal]:
    early, late = found["rows"]["early rejection (here)"], found["rows"]["no bound (FCFS)"]
    name = "s-lora fig10: attainment with early rejection less without, percentage points, worst"
    return [Goal(name, min(a - b for a, b in zip(early, late, strict=True)), 0.0, False)]


# -- Figures 11 and 12 ------------------------------------------------------------------------------------------------


def _measure_clusters(across: str, values: Sequence[float], measuring: Measuring) -> dict[str, Any]:
    clusters = [1, 2, 4, 8, 16, 32]
    if measuring.setting.quick:
        clusters, values = clusters[1::2], (values[0], values[-1])
    rows: dict[str, list[dict[str, float]]] = {}
    system = systems(measuring)[UNMERGED]
    for value in values:
        arrivals = _arrivals(measuring, 1.1, 32, **{across: value})
        rows[f"{across} {value:g}"] = [
            _measured(_replayed(measuring, system, arrivals, resident_adapters=d)) for d in clusters
        ]
    return {"clusters": clusters, "rows": rows}


def _cluster_panels(found: Found) -> list[Panel]:
    labels: dict[str, Any] = {"requests/s": "requests/s", _ATTAINMENT: "attainment"}
    return _panels(found["rows"], found["clusters"], labels, ticked=True, xlabel="adapters in memory")


CODE = {
    "s-lora:fig5": Code(_measure_numbers, _number_panels, _numbers_here, _number_goals),
    "s-lora:fig6": Code(_measure_rates, _rate_panels),
    "s-lora:fig9": Code(_measure_merging, _merging_panels, goals=_merging_goals),
    "s-lora:fig10": Code(_measure_abort, _abort_panels, goals=_abort_goals),
    "s-lora:fig11": Code(functools.partial(_measure_clusters, "alpha", _ALPHAS), _cluster_panels),
    "s-lora:fig12": Code(functools.partial(_measure_clusters, "cv", _CVS), _cluster_panels),
}
