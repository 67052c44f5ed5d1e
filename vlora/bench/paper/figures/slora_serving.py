"""S-LoRA's figures of serving: throughput, first-token latency and attainment, merging, early abort, clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlora.bench.paper import drawing
from vlora.bench.paper.figure import Fact, Figure, Found
from vlora.bench.paper.measured.systems import DLORA, MERGED, OURS, UNMERGED, System, capacity, replayed, systems
from vlora.bench.paper.measuring import Measuring
from vlora.bench.report import Goal
from vlora.simulator import Arrival, Measures
from vlora.simulator.popularity import power_law
from vlora.simulator.workloads import Gamma

_LENGTHS = {"prompt_min": 8, "prompt_max": 512, "answer_min": 8, "answer_max": 512}
_MEAN = 260  # tokens
_SLO_S = 6.0  # section 7.1
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


def _draw_numbers(found: Found, canvas: Any) -> None:
    left, middle, right = drawing.panels(canvas, 3)
    for axis, name in ((left, "requests/s"), (middle, "latency s")):
        drawing.lines(
            axis, _columns(found["rows"], name), found["adapters"], xlabel="adapters", ylabel=name, ylim=(0, None)
        )
        drawing.ticks(axis, found["adapters"])
        axis.tick_params(axis="x", labelsize=7)
    drawing.beside(right, _NUMBER_FACTS, _numbers_here(found), ylabel=f"% of the throughput with {_FEW} adapters")


_NUMBER_FACTS = (
    Fact(
        f"throughput with {_MANY} / {_FEW} adapters",
        100 * 7.61 / 8.05,
        "%",
        "Table 3, S1: 8.05 req/s with 5 adapters, 7.61 with 2000",
    ),
)


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


def _draw_rates(found: Found, canvas: Any) -> None:
    labels = {"requests/s": "requests/s", "first token s": "first token, s", "attainment": "first token within 6 s, %"}
    for axis, (name, label) in zip(drawing.panels(canvas, 3), labels.items(), strict=True):
        drawing.lines(axis, _columns(found["rows"], name), found["rates"], xlabel="offered requests/s", ylabel=label)
        axis.set_ylim(bottom=0)


# -- Figure 9 ---------------------------------------------------------------------------------------------------------


def _measure_merging(measuring: Measuring) -> dict[str, Any]:
    alphas = (0.1, 1.0) if measuring.setting.quick else (0.1, 0.3, 0.6, 1.0)
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


def _draw_merging(found: Found, canvas: Any) -> None:
    for axis, (alpha, rows) in zip(
        drawing.panels(canvas, len(found["by alpha"])), found["by alpha"].items(), strict=True
    ):
        drawing.lines(axis, rows, found["adapters"], title=f"alpha {alpha}", xlabel="adapters", ylabel="requests/s")
        drawing.ticks(axis, found["adapters"])
        axis.set_ylim(bottom=0)


def _merging_goals(found: Found) -> list[Goal]:
    rows = found["by alpha"]["1"]
    return [
        Goal("s-lora fig9: merged / on the fly, one adapter", rows[MERGED][0] / rows[UNMERGED][0], 1.0, False),
        Goal("s-lora fig9: merged / on the fly, most adapters", rows[MERGED][-1] / rows[UNMERGED][-1], 1.0, True),
    ]


# -- Figure 10 --------------------------------------------------------------------------------------------------------


def _measure_abort(measuring: Measuring) -> dict[str, Any]:
    cvs = (1, 4, 8) if measuring.setting.quick else (1, 2, 4, 6, 8)
    rows: dict[str, list[float]] = {}
    system = systems(measuring)[OURS]
    for cv in cvs:
        arrivals = _arrivals(measuring, 1.5, 200, cv=cv)
        for name, bound_s in (("early rejection (here)", _SLO_S), ("no bound (FCFS)", None)):
            measures = _replayed(measuring, system, arrivals, max_ttft_s=bound_s)
            rows.setdefault(name, []).append(100 * measures.share_within(_SLO_S))
    return {"cv": list(cvs), "rows": rows}


def _draw_abort(found: Found, canvas: Any) -> None:
    (axis,) = drawing.panels(canvas, 1)
    label = "first token within 6 s, % of all requests"
    drawing.lines(
        axis, found["rows"], found["cv"], xlabel="cv of the gaps between arrivals", ylabel=label, ylim=(0, 105)
    )


def _abort_goals(found: Found) -> list[Goal]:
    early, late = found["rows"]["early rejection (here)"], found["rows"]["no bound (FCFS)"]
    name = "s-lora fig10: attainment with early rejection less without, percentage points, worst"
    return [Goal(name, min(a - b for a, b in zip(early, late, strict=True)), 0.0, False)]


# -- Figures 11 and 12 ------------------------------------------------------------------------------------------------


def _measure_clusters(measuring: Measuring, across: str, values: Sequence[float]) -> dict[str, Any]:
    clusters = (2, 8, 32) if measuring.setting.quick else (1, 2, 4, 8, 16, 32)
    rows: dict[str, list[dict[str, float]]] = {}
    system = systems(measuring)[UNMERGED]
    for value in values:
        arrivals = _arrivals(measuring, 1.1, 32, **{across: value})
        rows[f"{across} {value:g}"] = [
            _measured(_replayed(measuring, system, arrivals, resident_adapters=d)) for d in clusters
        ]
    return {"clusters": list(clusters), "rows": rows}


def _measure_by_alpha(measuring: Measuring) -> dict[str, Any]:
    return _measure_clusters(measuring, "alpha", (0.1, 1.0) if measuring.setting.quick else (0.1, 0.3, 0.6, 1.0))


def _measure_by_cv(measuring: Measuring) -> dict[str, Any]:
    return _measure_clusters(measuring, "cv", (1, 8) if measuring.setting.quick else (1, 2, 4, 6, 8))


def _draw_clusters(found: Found, canvas: Any) -> None:
    left, right = drawing.panels(canvas, 2)
    for axis, name, label in ((left, "requests/s", "requests/s"), (right, "attainment", "first token within 6 s, %")):
        drawing.lines(axis, _columns(found["rows"], name), found["clusters"], xlabel="adapters in memory", ylabel=label)
        drawing.ticks(axis, found["clusters"])
        axis.set_ylim(bottom=0)


_WORKLOAD = (
    "Gamma arrivals, power-law popularity, prompts and answers of 8-512 tokens (S-LoRA 7.2); rates are scaled to this "
    "machine, with fewer requests than five minutes have; memory holds the KV of about 30 requests, as S-LoRA's A10G."
)
_CLUSTERS = (
    "This scheduler has no number of clusters; the nearest is the number of adapters that memory holds, here without "
    f"the preference for them if the batch is not full. 32 adapters. {_WORKLOAD}"
)
_VARIANTS = (
    "S-LoRA is unmerged-only with this project's operator; S-LoRA-bmm the same with a padded einsum's measured cost; "
    "S-LoRA-no-unify-mem has no counterpart here."
)

FIGURES: Sequence[Figure] = (
    Figure(
        paper="s-lora",
        number="fig5",
        title="throughput and latency by number of adapters",
        states="Throughput declines slightly at first and then stays the same up to 2,000 adapters; bmm is far behind.",
        caption=f"At 1.3 times the capacity; memory holds 64 adapters. Beside the paper's number: unmerged-only. "
        f"{_VARIANTS} {_WORKLOAD}",
        measure=_measure_numbers,
        draw=_draw_numbers,
        facts=_NUMBER_FACTS,
        here=_numbers_here,
        goals=_number_goals,
        simulated=True,
        size=(14.0, 4.4),
    ),
    Figure(
        paper="s-lora",
        number="fig6",
        title="throughput, first token and attainment by request rate",
        states="S-LoRA keeps a higher throughput and attainment than its variants as the rate grows (no numbers in the "
        "text).",
        caption=f"200 adapters. {_VARIANTS} {_WORKLOAD}",
        measure=_measure_rates,
        draw=_draw_rates,
        simulated=True,
        size=(14.0, 4.4),
    ),
    Figure(
        paper="s-lora",
        number="fig9",
        title="merging against computing on the fly",
        states="With one adapter merging is better; with more than two it declines, because of switches (no numbers in "
        "the text).",
        caption=f"At 1.2 times the capacity; merged-only switches as this project does. {_WORKLOAD}",
        measure=_measure_merging,
        draw=_draw_merging,
        goals=_merging_goals,
        simulated=True,
        size=(12.0, 4.4),
    ),
    Figure(
        paper="s-lora",
        number="fig10",
        title="early abort",
        states="Early abort has a higher attainment than first-come-first-served, more so as the cv grows (no "
        "numbers in "
        "the text).",
        caption="Early rejection by the predicted first token (6 s) against none, at 1.5 times the capacity and 200 "
        f"adapters; last-come-first-served does not exist here. {_WORKLOAD}",
        measure=_measure_abort,
        draw=_draw_abort,
        goals=_abort_goals,
        simulated=True,
        size=(9.0, 4.4),
    ),
    Figure(
        paper="s-lora",
        number="fig11",
        minutes=3,
        title="clusters of adapters, by alpha",
        states="The impact of the number of clusters is not significant but observable (no numbers in the text).",
        caption=_CLUSTERS,
        measure=_measure_by_alpha,
        draw=_draw_clusters,
        simulated=True,
        size=(11.0, 4.4),
    ),
    Figure(
        paper="s-lora",
        number="fig12",
        minutes=2,
        title="clusters of adapters, by cv",
        states="As figure 11, more so for a large cv (no numbers in the text).",
        caption=_CLUSTERS,
        measure=_measure_by_cv,
        draw=_draw_clusters,
        simulated=True,
        size=(11.0, 4.4),
    ),
)
